"""Training inside a chapter: what fails is named, and an interrupted build finds its runs again."""

from pathlib import Path

import pytest

from rope_heads import live


def test_side_by_side_names_what_failed(tmp_path):
    blocked = tmp_path / "runs"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(RuntimeError, match="number fast 0 ended with"):
        live.train_side_by_side([("number", "fast", 0)], blocked, report=lambda line: None)


def test_the_same_source_finds_its_folder_again_and_other_source_another(tmp_path, monkeypatch):
    package = tmp_path / "src"
    package.mkdir()
    (package / "a.py").write_text("x = 1")
    monkeypatch.setattr(live, "repository", lambda: tmp_path)
    monkeypatch.setattr(live, "PACKAGE", package)
    folder = live.live_folder()
    (folder / "checkpoint").write_text("step 250")
    assert live.live_folder() == folder and (folder / "checkpoint").exists() and folder.parent == tmp_path / "_build" / "live"
    (package / "a.py").write_text("x = 2")
    assert live.live_folder() != folder and not folder.exists()


def test_without_a_checkout_a_temporary_folder(monkeypatch):
    monkeypatch.setattr(live, "repository", lambda: None)
    folder = live.live_folder()
    assert folder.is_dir() and "rope-heads-" in folder.name
    Path(folder).rmdir()
