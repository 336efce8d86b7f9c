"""Whole builds for a class: without solutions, beside the usual build."""

import hashlib

import pytest
from sampler import sampler

from rope_heads import pages


def content(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def holding(folder, words):
    """Files with these words as text, whatever their kind: pages, sources, the search index."""
    return [path for path in folder.rglob("*") if path.is_file() and words.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("class")
    sampler(root)
    assert pages.build(root) == 0
    before = content(root / "_build/html") | content(root / "_build/executed")
    assert pages.build(root, solutions=False) == 0
    return root / "_build", before


def test_a_book_without_solutions_holds_none_and_is_executed_without_them(built):
    folder, _ = built
    site = folder / "html-teaching"
    for words in ("It is two", "answer = 1 + 1"):
        assert holding(folder / "html", words) and not holding(site, words)
    page = (site / "book/everything.html").read_text()
    assert "Add one and one." in page and "quick Ellipsis" in page, "the exercise stays, and later cells run with it open"
    assert "quick 2" in (folder / "html/book/everything.html").read_text()


def test_a_book_without_solutions_opens_no_chapter_elsewhere(built):
    folder, _ = built
    assert holding(folder / "html/book", "colab.research.google.com") and not holding(folder / "html-teaching/book", "colab.research.google.com")


GOOD = {"ok": True, "mode": "quick", "started": "2026-01-01", "chapters": [{"parameters": {"mode": "quick"}}]}


@pytest.mark.parametrize("report, preview, why", [
    (None, GOOD, "there is no build yet"),
    (GOOD | {"ok": False}, None, "the last build failed"),
    (GOOD | {"mode": "full"}, None, "the last build was made in mode full"),
    (GOOD | {"chapters": [{"parameters": {"mode": "quick", "steps": 3}}]}, None, "the last build was made with --parameter"),
    (GOOD, GOOD | {"mode": "full", "started": "2026-01-02"}, "the preview since then was made in mode full"),
    (GOOD, GOOD | {"mode": "full", "started": "2025-12-31"}, None),
    (GOOD, None, None),
])  # fmt: skip
def test_only_values_of_a_whole_quick_build_are_frozen(tmp_path, report, preview, why):
    for name, content in (("report", report), ("report-preview", preview)):
        if content:
            pages.write_report(tmp_path / f"{name}.json", content)
    assert pages.not_to_freeze(tmp_path) == why


def test_a_book_without_solutions_leaves_the_usual_build_alone(built, capfd):
    folder, before = built
    now = content(folder / "html") | content(folder / "executed")
    assert {name: now[name] for name in before} == before
    assert {name.parts[0] for name in set(now) - set(before)} == {"quick-teaching"}
    assert pages.build(folder.parent) == 0 and pages.build(folder.parent, solutions=False) == 0
    assert "executing" not in capfd.readouterr().out
