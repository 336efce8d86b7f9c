"""The table of contents and the chapters' files: what is odd is said in one line, and solutions can be taken out."""

import copy
import json

import pytest
from sampler import EXERCISE, SOLUTION, house, notebook, write

from rope_heads import __main__ as command_line
from rope_heads import artefacts, contents

FINE = "format: jb-book\nroot: book/one\nparts:\n- caption: A\n  chapters:\n  - file: book/two\n    sections:\n    - file: book/glossary\n  - file: book/status\n"


def book(root):
    house(root, ["one", "two"])
    for name in ("one", "two"):
        write(root, name, [f"# {name}"])
    (root / "_toc.yml").write_text(FINE)


def said(root, monkeypatch, capsys):
    """What the command says: one line on stderr, with exit code 2, nothing executed."""
    monkeypatch.setattr(artefacts, "repository", lambda: root)
    assert command_line.main(["book"]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1 and told.err.startswith("rope-heads book: ") and not (root / "_build").exists()
    return told.err


def test_pages_in_reading_order(tmp_path):
    book(tmp_path)
    assert contents.pages(tmp_path) == ["book/one", "book/two", "book/glossary", "book/status"]
    assert [path.stem for path in contents.chapters(tmp_path)] == ["one", "two"]


@pytest.mark.parametrize("toc, words", [
    ("", "must look like `file: book/tasks`, got None"),
    ("- file: book/one", "must look like `file: book/tasks`, got [{"),
    ("root: [", "_toc.yml cannot be read: while parsing"),
    ("root: 3", "`root` must name a page, such as book/tasks, got 3"),
    (FINE.replace("root: book/one\n", ""), "`root` must name a page, such as book/tasks, got None"),
    (FINE.replace("  - file: book/two", "  - page: book/two"), "`file` must name a page, such as book/tasks, got None in {'page': 'book/two'"),
    (FINE.replace("- file: book/two", "- book/two"), "_toc.yml cannot be read"),
    ("root: book/one\nchapters: book/two", "`chapters` must be a list of entries, got 'book/two'"),
    ("root: book/one\nchapters: [book/two]", "must look like `file: book/tasks`, got 'book/two'"),
    ("root: book/one\nparts:\n- chapters:", "`chapters` must be a list of entries, got None"),
    ("root: book/one\nparts:\n- file: book/two\n  sections: {file: book/two}", "`sections` must be a list of entries, got {"),
    (FINE.replace("book/two", "book/three"), "_toc.yml lists book/three, but there is no book/three.ipynb and no book/three.md"),
    (FINE.replace("book/two", "book/two.ipynb"), "lists book/two.ipynb, but there is no book/two.ipynb.ipynb"),
])  # fmt: skip
def test_an_odd_table_of_contents_is_one_line(tmp_path, monkeypatch, capsys, toc, words):
    book(tmp_path)
    (tmp_path / "_toc.yml").write_text(toc)
    assert words in said(tmp_path, monkeypatch, capsys)


def test_a_missing_table_of_contents_is_one_line(tmp_path, monkeypatch, capsys):
    book(tmp_path)
    (tmp_path / "_toc.yml").unlink()
    assert "_toc.yml cannot be read: [Errno 2]" in said(tmp_path, monkeypatch, capsys)


def reads(value):
    return lambda content: content["metadata"].update(rope_heads={"reads": value})


ODD = {
    "a number": (reads(3), "rope_heads.reads must be a list of names in data/, got 3"),
    "a word": (reads("published"), "must be a list of names in data/, got 'published'"),
    "numbers": (reads([1]), "must be a list of names in data/, got [1]"),
    "outside": (reads(["../src"]), "must be a list of names in data/, got ['../src']"),
    "not there": (reads(["runs/nothing"]), "it reads data/runs/nothing, which is not there"),
    "a list": (lambda content: content["metadata"].update(rope_heads=["published"]), "two.ipynb is not a notebook (AttributeError"),
    "no metadata": (lambda content: content.pop("metadata"), "two.ipynb is not a notebook (KeyError: 'metadata')"),
    "null": (lambda content: content.update(metadata=None), "two.ipynb is not a notebook (AttributeError"),
    "no cells": (lambda content: content.update(cells=[]), "two.ipynb is not a valid notebook: it has no cells"),
    "cells gone": (lambda content: content.pop("cells"), "two.ipynb is not a valid notebook"),
    "tags": (lambda content: content["cells"][0]["metadata"].update(tags=None), "is not a valid notebook: cells.0.metadata.tags: None is not of type 'array'"),
    "cell's metadata": (lambda content: content["cells"][0].pop("metadata"), "is not a valid notebook: cells.0: 'metadata' is a required property"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_metadata_are_one_line_that_names_the_chapter(tmp_path, monkeypatch, capsys, odd):
    book(tmp_path)
    change, words = ODD[odd]
    content = json.loads((tmp_path / "book/two.ipynb").read_text())
    change(content)
    (tmp_path / "book/two.ipynb").write_text(json.dumps(content))
    line = said(tmp_path, monkeypatch, capsys)
    assert line.startswith("rope-heads book: two: ") and words in line


@pytest.mark.parametrize("content", ["", "[]", "{", "3"])
def test_what_is_no_notebook_is_one_line(tmp_path, monkeypatch, capsys, content):
    book(tmp_path)
    (tmp_path / "book/two.ipynb").write_text(content)
    assert "two: two.ipynb is not a notebook" in said(tmp_path, monkeypatch, capsys)


def test_solutions_go_and_everything_else_stays():
    colons = ":::{solution} one\n:class: dropdown\nIt is two.\n\n```python\n1 + 1\n```\n:::\n"
    cells = ["# One", EXERCISE, ("answer = ...", {"tags": ["exercise"]}), SOLUTION, ("1 + 1", {"tags": ["solution", "hide-cell"]}),
             f"Before.\n\n{colons}\nAfter `{{solution}}`.", ("print(1)", {"tags": ["hide-input"]})]  # fmt: skip
    whole = json.loads(json.dumps(notebook(cells)))
    before = copy.deepcopy(whole)
    less = contents.without_solutions(whole, "one")
    assert whole == before
    assert ["".join(cell["source"]) for cell in less["cells"]] == ["# One", EXERCISE, "answer = ...", "Before.\n\n\nAfter `{solution}`.", "print(1)"]
    assert {key: value for key, value in less.items() if key != "cells"} == {key: value for key, value in whole.items() if key != "cells"}


@pytest.mark.parametrize("text", ["```{solution-start} one\n```\nTwo.\n```{solution-end}\n```", "````{solution} one\nTwo.\n```"])
def test_a_solution_that_cannot_be_taken_out_is_an_error(text):
    with pytest.raises(contents.ChapterError, match="^one: a solution cannot be taken out"):
        contents.without_solutions(json.loads(json.dumps(notebook(["# One", text]))), "one")
