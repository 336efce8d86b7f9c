"""The runner on tiny books: what makes a chapter fail, what makes it run again, and that half a build never shows."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from sampler import ROOT, house, sampler, write

from rope_heads import contents, pages, runner

PARAMETERS = ('mode = "quick"  # "quick" or "full"\nseed = 0  # any whole number', {"tags": ["parameters"]})
GENEROUS = runner.Limits(cell=300, chapter=600)


def book(root, *cells, name="one", **metadata):
    """A book of one chapter with the given code cells; returns the chapter's path."""
    house(root, [name])
    return write(root, name, ["# One", PARAMETERS, *((cell, {}) for cell in cells)], **metadata)


def execute(root, chapter, parameters=None, limits=GENEROUS, say=print):
    folder = root / "_build" / "executed"
    key = runner.cache_key(root, chapter, parameters or {})
    return runner.execute(root, chapter, parameters or {}, limits, folder, key, say)


def executed(root, name="one"):
    return json.loads((root / "_build/executed" / f"{name}.ipynb").read_text())


def shown(cells):
    return ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]


def nothing_kept(root):
    return not list((root / "_build").rglob("executed/**/*.ipynb")) and not (root / "_build/html").exists()


def waits_for(file):
    """A line of Python that waits until the file is there."""
    return f"import pathlib, time; wait = [time.sleep(.05) for i in range(6000) if not pathlib.Path({str(file)!r}).exists()]"


def look_for(megabytes, file, monkeypatch):
    """Writes the file once the runner has seen so much memory."""
    measured = runner.memory

    def memory(pid):
        found = measured(pid)
        if found > megabytes:
            file.touch()
        return found

    monkeypatch.setattr(runner, "memory", memory)


def test_a_chapter_runs_in_its_own_folder_with_one_thread_and_its_record_tells_what_it_took(tmp_path, monkeypatch):
    code = "import os, pathlib; print(pathlib.Path.cwd().name, os.environ['OMP_NUM_THREADS'], mode)"
    chapter = book(tmp_path, code, "block = b'x' * 300_000_000\n" + waits_for(tmp_path / "seen"))
    look_for(300, tmp_path / "seen", monkeypatch)
    record = execute(tmp_path, chapter)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert shown(executed(tmp_path)["cells"]) == [f"book {threads} quick\n"]
    assert 300 < record["peak_memory_mb"] < 3000 and 0 < record["seconds"] < 600
    assert record["parameters"] == {} and record["versions"]["papermill"] and record["stderr"] == []
    assert json.loads((tmp_path / "_build/executed/one.json").read_text()) == record


def test_a_chapter_reads_what_its_metadata_name_and_nothing_else(tmp_path):
    cells = ["from rope_heads.artefacts import data_path", "data_path('published/claims.toml').stem", "data_path('published_2')"]
    (tmp_path / "data" / "published").mkdir(parents=True)
    with pytest.raises(runner.ChapterError, match="cell 5 raised ValueError: this chapter reads data/published_2, which its metadata do not name"):
        execute(tmp_path, book(tmp_path, *cells, rope_heads={"reads": ["published"]}))


def test_memory_counts_child_processes(tmp_path, monkeypatch):
    child = "block = b'x' * 300_000_000; " + waits_for(tmp_path / "seen")
    look_for(300, tmp_path / "seen", monkeypatch)
    record = execute(tmp_path, book(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"))
    assert record["peak_memory_mb"] > 300


def test_the_executed_chapter_names_no_path_of_this_machine(tmp_path):
    execute(tmp_path, book(tmp_path, "1 + 1"))
    assert str(tmp_path) not in json.dumps(executed(tmp_path))


def test_an_error_names_chapter_cell_and_error_and_keeps_nothing(tmp_path):
    with pytest.raises(runner.ChapterError, match=r"^one: cell 4 raised ZeroDivisionError: division by zero"):
        execute(tmp_path, book(tmp_path, "1 + 1", "1 / 0", "3"))
    assert nothing_kept(tmp_path)


@pytest.mark.parametrize("code, words", [
    ("import sys; sys.exit()", "cell 3 raised SystemExit"),
    ("import os; os._exit(3)", r"(kernel died in cell 3|DeadKernelError)"),
    ("input()", "cell 3 raised StdinNotImplementedError"),
])  # fmt: skip
def test_a_chapter_that_ends_early_fails(tmp_path, code, words):
    with pytest.raises(runner.ChapterError, match="one: .*" + words):
        execute(tmp_path, book(tmp_path, code, "'the end'"))
    assert nothing_kept(tmp_path)


def test_a_slow_cell_is_stopped_and_named(tmp_path):
    started = time.monotonic()
    with pytest.raises(runner.ChapterError, match=r"^one: cell [23] took longer than its limit of 2 s"):
        execute(tmp_path, book(tmp_path, "import time; time.sleep(600)"), limits=runner.Limits(cell=2, chapter=300))
    assert time.monotonic() - started < 200 and nothing_kept(tmp_path)


def test_the_outer_limit_stops_a_chapter_with_its_kernel_and_their_children(tmp_path):
    pid = tmp_path / "pid"

    class Limits:  # the time is up as soon as the chapter has a child, however slow the machine
        cell = 600
        chapter = property(lambda self: 0 if pid.exists() and pid.read_text() else 600)

    code = f"import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'])\npathlib.Path({str(pid)!r}).write_text(str(child.pid))\nchild.wait()"
    with pytest.raises(runner.ChapterError, match=r"^one: took longer than its limit of 0 s \(cell 3 of 3\)"):
        execute(tmp_path, book(tmp_path, code), limits=Limits())
    assert gone(int(pid.read_text())) and nothing_kept(tmp_path)


def gone(pid):
    """Has the process ended? A zombie has; whoever started it has only not asked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killing_waits_until_the_last_descendant_has_ended(monkeypatch):
    ends = time.monotonic() + 1.5

    class Slow(psutil.Process):  # as on a busy machine: the signal is there, the process not yet gone
        def kill(self):
            pass

        def status(self):
            return psutil.STATUS_RUNNING if time.monotonic() < ends else psutil.STATUS_ZOMBIE

    monkeypatch.setattr(runner, "tree", lambda pid: [Slow(pid)])
    runner.kill(os.getpid())
    assert time.monotonic() >= ends
    monkeypatch.setattr(runner, "KILL_WAIT", 0.2)
    ends, started = ends + 600, time.monotonic()
    runner.kill(os.getpid())
    assert time.monotonic() - started < 60, "what the system holds does not hold the build"


def test_an_undeclared_parameter_is_an_error(tmp_path):
    with pytest.raises(runner.ChapterError, match=r"^one: undeclared parameter sed; .* declares: mode, seed"):
        execute(tmp_path, book(tmp_path, "1"), {"sed": 3})
    assert nothing_kept(tmp_path)


def test_a_passed_parameter_is_used_and_shown_once_with_its_comment(tmp_path):
    execute(tmp_path, book(tmp_path, "print(mode, seed)"), {"mode": "full", "seed": 7})
    cells = executed(tmp_path)["cells"]
    assert shown(cells) == ["full 7\n"] and len(cells) == 3
    assert "".join(cells[1]["source"]) == "mode = 'full'  # \"quick\" or \"full\"\nseed = 7  # any whole number"


def test_cells_keep_their_number_when_parameters_are_passed(tmp_path):
    with pytest.raises(runner.ChapterError, match="^one: cell 4 raised ValueError: no"):
        execute(tmp_path, book(tmp_path, "1", "raise ValueError('no')"), {"seed": 7})


def test_what_a_chapter_writes_to_stderr_is_said(tmp_path):
    said = []
    record = execute(tmp_path, book(tmp_path, "import warnings; warnings.warn('careful')"), say=said.append)
    assert any("one: cell 3 wrote to stderr:" in line and "UserWarning: careful" in line for line in said)
    assert len(record["stderr"]) == 1


def test_progress_is_said_while_a_chapter_runs(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(runner, "SAY_EVERY", 0.1)

    def say(line):
        said.append(line)
        if "cell 3 of 3" in line:
            (tmp_path / "seen").touch()

    execute(tmp_path, book(tmp_path, waits_for(tmp_path / "seen")), say=say)
    assert any(line.startswith("  one: cell 3 of 3, ") and line.endswith(" MB") for line in said), said


def test_a_broken_notebook_is_named(tmp_path):
    chapter = book(tmp_path, "1")
    chapter.write_text('{"cells": [')
    with pytest.raises(runner.ChapterError, match="^one: one.ipynb is not a notebook"):
        execute(tmp_path, chapter)


CHANGES = {
    "the notebook": lambda root: write(root, "one", ["# One", PARAMETERS, ("2", {})]),
    "the package": lambda root: (root / "src/rope_heads/concept.py").write_text("VALUE = 2\n"),
    "a new module": lambda root: (root / "src/rope_heads/more.py").write_text(""),
    "data": lambda root: (root / "data/published/table.csv").write_text("step\n"),
    "new data": lambda root: (root / "data/more.csv").write_text(""),
    "the lock": lambda root: (root / "requirements.txt").write_text("one==2\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with(tmp_path, change):
    chapter = book(tmp_path, "1")
    before = runner.cache_key(tmp_path, chapter, {})
    assert runner.cache_key(tmp_path, chapter, {}) == before != runner.cache_key(tmp_path, chapter, {"mode": "full"})
    CHANGES[change](tmp_path)
    assert runner.cache_key(tmp_path, chapter, {}) != before


def test_the_key_follows_the_python_version_but_no_compiled_files(tmp_path, monkeypatch):
    chapter = book(tmp_path, "1")
    before = runner.cache_key(tmp_path, chapter, {})
    (tmp_path / "src/rope_heads/__pycache__").mkdir()
    (tmp_path / "src/rope_heads/__pycache__/concept.pyc").write_text("")
    assert runner.cache_key(tmp_path, chapter, {}) == before
    monkeypatch.setattr(runner.platform, "python_version", lambda: "3.99.0")
    assert runner.cache_key(tmp_path, chapter, {}) != before


def test_a_chapter_that_says_what_it_reads_depends_on_that_alone(tmp_path):
    chapter = book(tmp_path, "1", rope_heads={"reads": ["published/table.csv"]})
    before = runner.cache_key(tmp_path, chapter, {})
    (tmp_path / "data/more.csv").write_text("")
    assert runner.cache_key(tmp_path, chapter, {}) == before
    (tmp_path / "data/published/table.csv").write_text("changed")
    assert runner.cache_key(tmp_path, chapter, {}) != before
    (tmp_path / "data/published/table.csv").unlink()
    with pytest.raises(runner.ChapterError, match="^one: its metadata say that it reads data/published/table.csv, which is not there"):
        runner.cache_key(tmp_path, chapter, {})


def test_a_damaged_or_foreign_result_is_not_used(tmp_path):
    folder, key = tmp_path, "key"
    (folder / "one.ipynb").write_text("{}")
    good = {"key": key, "sha256": runner.sha256(folder / "one.ipynb"), "seconds": 1}
    (folder / "one.json").write_text(json.dumps(good))
    assert runner.kept(folder, "one", key) == good
    assert runner.kept(folder, "one", "another key") is None and runner.kept(folder, "two", key) is None
    for half in ["", json.dumps(good)[:-9], "[]", "{}"]:
        (folder / "one.json").write_text(half)
        assert runner.kept(folder, "one", key) is None
    (folder / "one.json").write_text(json.dumps(good))
    (folder / "one.ipynb").write_text("{ }")
    assert runner.kept(folder, "one", key) is None


def test_chapters_are_the_notebooks_of_the_table_of_contents_in_order(tmp_path):
    house(tmp_path, ["first", "second"])
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/first\nparts:\n- caption: A\n  chapters:\n  - file: book/third\n    sections:\n"
                                       "    - file: book/second\n- chapters:\n  - file: book/glossary\n  - file: book/status\n")  # fmt: skip
    for name in ("first", "second", "third", "unlisted"):
        write(tmp_path, name, ["# Title"])
    assert [path.stem for path in contents.chapters(tmp_path)] == ["first", "third", "second"]


# ---- whole builds ----


def test_build_renders_then_keeps_what_did_not_change(tmp_path, capfd):
    house(tmp_path, ["one", "two"])
    write(tmp_path, "one", ["# One", PARAMETERS])
    write(tmp_path, "two", ["# Two", PARAMETERS, ("print(mode, 1 + 1)", {})])
    assert pages.build(tmp_path) == 0
    first = capfd.readouterr().out
    assert "[1/2] one: executing" in first and "[2/2] two: executing" in first
    assert first.splitlines()[-1] == f"The book is at {tmp_path / '_build/html/index.html'}"
    page = (tmp_path / "_build/html/book/two.html").read_text()
    report = json.loads((tmp_path / "_build/report.json").read_text())
    two = report["chapters"][1]
    assert report["ok"] and two["chapter"] == "two" and not two["cached"]
    assert f"{two['peak_memory_mb']} MB of memory" in page and "quick 2" in page
    status = (tmp_path / "_build/html/book/status.html").read_text()
    assert f"{two['peak_memory_mb']} MB" in status and two["versions"]["torch"] in status

    write(tmp_path, "one", ["# Another title", PARAMETERS])
    assert pages.build(tmp_path) == 0
    second = capfd.readouterr().out
    assert "one: executing" in second and "two: unchanged since" in second and "two: executing" not in second
    assert "Another title" in (tmp_path / "_build/html/book/one.html").read_text()
    assert json.loads((tmp_path / "_build/html/report.json").read_text())["chapters"][1]["cached"]
    assert not {"fresh", "html.old"} & {path.name for path in (tmp_path / "_build").iterdir()}


def test_a_failed_build_says_so_renders_nothing_and_calls_the_old_site_old(tmp_path, capfd):
    book(tmp_path, "1")
    assert pages.build(tmp_path) == 0
    old = (tmp_path / "_build/html/book/one.html").read_text()
    write(tmp_path, "one", ["# One", PARAMETERS, ("raise RuntimeError('something is wrong')", {})])
    capfd.readouterr()
    assert pages.build(tmp_path) == 1
    error = capfd.readouterr().err
    assert "FAILED  one: cell 3 raised RuntimeError: something is wrong" in error
    assert "still shows the build of" in error and "nothing of this run is in it" in error
    assert (tmp_path / "_build/html/book/one.html").read_text() == old
    report = json.loads((tmp_path / "_build/report.json").read_text())
    assert report["ok"] is False and report["error"].startswith("one: cell 3 raised RuntimeError")


def test_a_page_with_a_broken_reference_fails_the_build(tmp_path, capfd):
    book(tmp_path, "1")
    write(tmp_path, "one", ["# One\n\nSee {ref}`nowhere`.", PARAMETERS])
    assert pages.build(tmp_path) == 1
    assert "FAILED  the pages could not be rendered" in (error := capfd.readouterr().err) and "nowhere" in error
    assert not (tmp_path / "_build/html").exists()


def test_a_preview_executes_one_chapter_and_leaves_the_book_alone(tmp_path, capfd):
    sampler(tmp_path)
    assert pages.build(tmp_path, only="title") == 0
    output = capfd.readouterr().out
    assert "title: executing" in output and "everything: executing" not in output
    assert (tmp_path / "_build/preview/book/everything.html").is_file() and not (tmp_path / "_build/html").exists()


def test_an_interrupted_swap_brings_the_old_site_back(tmp_path):
    (tmp_path / "html.old").mkdir()
    (tmp_path / "html.old/index.html").write_text("old")
    pages.restore(tmp_path / "html")
    assert (tmp_path / "html/index.html").read_text() == "old" and not (tmp_path / "html.old").exists()


BUILD = "import sys, pathlib; from rope_heads import pages; sys.exit(pages.build(pathlib.Path(sys.argv[1])))"


@pytest.mark.skipif(os.name != "posix", reason="kills processes")
def test_a_build_killed_in_the_middle_goes_on_where_it_stopped(tmp_path, capfd):
    house(tmp_path, ["one", "two"])
    write(tmp_path, "one", ["# One", PARAMETERS, ("1", {})])
    wait = (f"import pathlib, os, time\npathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
            f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(.1)")  # fmt: skip
    write(tmp_path, "two", ["# Two", PARAMETERS, (wait, {})])
    build = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path)])
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text())
    kernel = int(pid.read_text())
    try:
        again = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], capture_output=True, text=True)
        assert again.returncode == 1 and "another build of this book is running" in again.stderr
    finally:
        build.send_signal(signal.SIGKILL)
        build.wait()
    until(lambda: gone(kernel))  # the kernel does not outlive the build
    assert not (tmp_path / "_build/html").exists()
    (tmp_path / "go").touch()
    capfd.readouterr()
    assert pages.build(tmp_path) == 0
    output = capfd.readouterr().out
    assert "one: unchanged since" in output and "two: executing" in output


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@pytest.mark.skipif(os.name != "posix", reason="limits a process's file size, which needs POSIX")
def test_a_full_disk_fails_clearly_and_does_no_harm(tmp_path):
    """A real write error: the building process may write no file beyond 2,000 bytes, and the executed chapter is larger."""
    book(tmp_path, "print('x' * 5000)")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY));" + BUILD
    done = subprocess.run([sys.executable, "-c", limited, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED" in done.stderr and "File too large" in done.stderr, done.stderr
    assert not list((tmp_path / "_build/executed").rglob("*.ipynb")) and not (tmp_path / "_build/html").exists()
    assert pages.build(tmp_path) == 0


def test_the_book_s_own_chapters_are_found():
    assert [path.stem for path in contents.chapters(ROOT)][0] == "index"
