"""A small book with one of each thing that chapters use; the site's tests build it with the real configuration, style and mends."""

import shutil
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
TEXT = r"""
## A section with everything

A citation {cite:p}`su2021roformer`, a reference to {prf:ref}`sampler-theorem`, to {numref}`sampler-figure`, to {ref}`sampler-exercise`, to
{eq}`sampler-equation`, to the {doc}`glossary`, to a {term}`RoPE` plane, and inline math $\rho(\theta)^{-i} v$, some `code`, a footnote[^note].

[^note]: The footnote.

```{math}
:label: sampler-equation
\operatorname{gap}(n) = \min_{t=1,\dots,n-1} \bigl(1 - \cos(t\theta)\bigr) \le \frac{2\pi^2}{n^2}
```

````{prf:theorem} Feasibility
:label: sampler-theorem
For every $n$ there is an angle, see {prf:ref}`sampler-definition`, {cite:t}`urrutia2026positional`, [this link](https://arxiv.org) and `code`.
````

````{prf:definition}
:label: sampler-definition
A *gap* is a distance.
````

````{prf:proof}
By {prf:ref}`sampler-theorem` and {eq}`sampler-equation`.
````

:::{note}
A note that refers to {prf:ref}`sampler-theorem`, to {ref}`sampler-exercise` and to `code`.
:::

:::{warning}
A warning with a [link](https://arxiv.org) and {numref}`sampler-figure`.
:::

:::{tip}
:class: dropdown
A folded tip with {prf:ref}`sampler-definition`.
:::

| hop | accuracy | a wide column that has to scroll on a narrow screen | another one | and one more |
|--:|--:|---|---|---|
| 1 | .99 | n h n v h y r s 6 3 2 7 7 8 4 7 2 | n h n v h y r s 6 3 2 7 7 8 4 7 2 | n h n v h y r s 6 3 2 7 7 8 4 7 2 |

```python
for a_line in ["that is wide enough to need scrolling on the screen of a phone", "and wide enough", "to need it on a desk as well, we hope"]:
    print(a_line, 3.14, None, True)  # a comment
```
"""
EXERCISE = """
```{exercise}
:label: sampler-exercise
Add one and one. See {prf:ref}`sampler-theorem`.
```
"""
SOLUTION = """
````{solution} sampler-exercise
:class: dropdown
It is two, by {prf:ref}`sampler-definition`.
```python
answer = 1 + 1
```
````
"""
FIGURE = """import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(4, 2))
axes.plot([0, 1], [0, 1]); axes.set_xlabel("step"); axes.set_ylabel("accuracy");"""
TABLE = """import pandas
print("a printed line")
pandas.DataFrame({f"column {i}": [i / 7, i * 1e6] for i in range(14)})"""


def notebook(cells: list, **metadata) -> nbformat.NotebookNode:
    """A chapter as the book's are: kernelspec python3, no outputs. A cell is markdown text, or (code, metadata)."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                                              "language_info": {"name": "python"}, **metadata})  # fmt: skip
    for number, cell in enumerate(cells):
        if isinstance(cell, str):
            made.cells.append(nbformat.v4.new_markdown_cell(cell, id=f"cell-{number}"))
        else:
            made.cells.append(nbformat.v4.new_code_cell(cell[0], id=f"cell-{number}", metadata=cell[1]))
    return made


def write(root: Path, name: str, cells: list, **metadata) -> Path:
    path = root / "book" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(cells, **metadata), path)
    return path


def house(root: Path, chapters: list[str]) -> None:
    """The files around the chapters of a book under `root`: the real configuration, a table of contents, one source file, one data file."""
    for folder in ("book", "src/rope_heads", "data/published"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / "_config.yml", root)
    for name in ("_static", "_ext"):
        shutil.copytree(ROOT / "book" / name, root / "book" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("glossary.md", "bibliography.md", "references.bib"):
        shutil.copy2(ROOT / "book" / name, root / "book")
    (root / "requirements.txt").write_text("one==1\n")
    (root / "src/rope_heads/concept.py").write_text("VALUE = 1\n")
    (root / "data/published/table.csv").write_text("step,accuracy\n")
    pages = [*chapters[1:], "glossary", "bibliography", "status"]
    lines = ["format: jb-book", f"root: book/{chapters[0]}", "chapters:", *(f"- file: book/{page}" for page in pages)]
    (root / "_toc.yml").write_text("\n".join(lines) + "\n")


def sampler(root: Path) -> None:
    """A book of two chapters: a title page, and one that holds one of each thing."""
    house(root, ["title", "everything"])
    parameters = ('mode = "quick"  # "quick" or "full"', {"tags": ["parameters", "hide-input"]})
    write(root, "title", ["# The title\n\nSee {doc}`everything`.", parameters])
    figure = {"image": {"alt": "A rising line."}, "figure": {"caption": "A line.", "name": "sampler-figure"}}
    write(root, "everything", ["# Everything\n\n{.card}\nYou will learn that it works." + TEXT, parameters, (FIGURE, {"mystnb": figure}), (TABLE, {}),
                               EXERCISE, ("answer = ...", {}), SOLUTION, ("answer = 1 + 1", {"tags": ["solution", "hide-cell"]}),
                               ("print(mode, answer)", {"tags": ["hide-input"]})])  # fmt: skip
