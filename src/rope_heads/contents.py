"""What the book consists of: the pages of _toc.yml, the chapters among them, what a chapter reads, and a chapter without its solutions.

What is odd in these files is found here and said in one line, before anything is executed.
"""

import json
import re
from pathlib import Path

WRITTEN = "book/status"  # the page that a build writes itself
SOLUTION = re.compile(r"^(`{3,}|:{3,})\{solution\}.*?^\1[`:]*[ \t]*$\n?", re.M | re.S)


class ChapterError(Exception):
    """A chapter, or the table of contents, cannot be used or did not run to its end. The message starts with its name."""


def pages(root: Path) -> list[str]:
    """Pages of _toc.yml in reading order, as paths without suffix (`book/tasks`). ChapterError when it is odd or names a page that is not there."""
    import yaml

    found = []

    def walk(entry, key):  # `key` holds the page: none does in a part
        if not isinstance(entry, dict):
            raise ChapterError(f"_toc.yml: an entry must look like `file: book/tasks`, got {entry!r:.60}")
        if key:
            if not isinstance(entry.get(key), str):
                raise ChapterError(f"_toc.yml: `{key}` must name a page, such as book/tasks, got {entry.get(key)!r:.60} in {entry!r:.60}")
            found.append(entry[key])
        for name, inner in (("parts", None), ("chapters", "file"), ("sections", "file")):
            if not isinstance(entry.get(name, []), list):
                raise ChapterError(f"_toc.yml: `{name}` must be a list of entries, got {entry[name]!r:.60}")
            for item in entry.get(name, []):
                walk(item, inner)

    try:
        toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ChapterError(f"_toc.yml cannot be read: {' '.join(str(error).split())}") from None
    walk(toc, "root")
    for page in found:
        if page != WRITTEN and not any((root / f"{page}{suffix}").is_file() for suffix in (".ipynb", ".md")):
            raise ChapterError(f"_toc.yml lists {page}, but there is no {page}.ipynb and no {page}.md")
    return found


def chapters(root: Path) -> list[Path]:
    """Notebooks of the book in reading order: the pages of _toc.yml that are .ipynb files."""
    return [path for page in pages(root) if (path := root / f"{page}.ipynb").is_file()]


def reads(notebook: Path) -> list[str]:
    """What of data/ a chapter depends on: files and folders that its metadata name (`rope_heads: {"reads": ["published"]}`), else all of it (".")."""
    try:
        metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
        names = metadata.get("rope_heads", {}).get("reads", ["."])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChapterError(f"{notebook.stem}: {notebook.name} is not a notebook ({type(error).__name__}: {error})") from None
    if not isinstance(names, list) or not all(isinstance(name, str) and ".." not in name and not Path(name).is_absolute() for name in names):
        raise ChapterError(f"{notebook.stem}: its metadata rope_heads.reads must be a list of names in data/, got {names!r:.100}")
    return names


def files_read(root: Path, notebook: Path) -> list[Path]:
    """Files of data/ a chapter depends on."""
    found = []
    for name in reads(notebook):
        path = root / "data" / name
        if not path.exists():
            raise ChapterError(f"{notebook.stem}: its metadata say that it reads data/{name}, which is not there")
        found += sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    return found


def check_chapter(root: Path, notebook: Path) -> None:
    """ChapterError unless the file is a valid notebook with cells, and its metadata say in the right form what it reads."""
    import nbformat

    files_read(root, notebook)
    content = json.loads(notebook.read_text(encoding="utf-8"))
    try:
        nbformat.validate(content)
        fault = "" if content["cells"] else "it has no cells"
    except nbformat.ValidationError as error:
        fault = f"{'.'.join(str(step) for step in error.absolute_path)}: {error.message.splitlines()[0]:.200}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # too far from a notebook for the validator
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise ChapterError(f"{notebook.stem}: {notebook.name} is not a valid notebook: {fault}")


def without_solutions(notebook: dict, name: str) -> dict:
    """A notebook, as JSON, less its solutions: cells tagged `solution`, and {solution} directives in other cells. It shares cells with the argument."""
    cells = []
    for cell in notebook["cells"]:
        if "solution" in cell["metadata"].get("tags", []):
            continue
        if cell["cell_type"] == "markdown":
            text = SOLUTION.sub("", "".join(cell["source"]))
            if re.search(r"^(`{3,}|:{3,})\{solution", text, re.M):
                raise ChapterError(f"{name}: a solution cannot be taken out; write it as one {{solution}} directive that is closed in its cell")
            if not text.strip():
                continue
            cell = cell | {"source": text}
        cells.append(cell)
    return notebook | {"cells": cells}
