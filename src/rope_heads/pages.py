"""From chapters to the site: `build` executes what changed, assembles the pages and lets Jupyter Book render them.

Pages are assembled in _build/source from the executed chapters, rendered into a fresh folder with warnings as errors, and put in place of
_build/html when they are whole. Jupyter Book itself executes nothing.
"""

import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rope_heads import contents, runner, scorecard, verdicts
from rope_heads.artefacts import data_folder, write_bytes
from rope_heads.claims import read_ledger

RENDER = "import sys; from jupyter_book.cli.main import main; main(sys.argv[1:])"


def build(root: Path, mode: str = "quick", only: str | None = None, force: bool = False, minutes: float | None = None,
          extra: dict | None = None, solutions: bool = True) -> int:
    """Executes what changed of the book under `root` and renders it; returns the exit code: 0, or 1 when something failed.

    `only` executes one chapter and renders a preview to _build/preview, with the other chapters as they are. `minutes` is the limit of a
    cell, `extra` are parameters for the chapters. Without `solutions` the chapters are executed as a student gets them, kept apart from the
    others, and rendered to _build/html-teaching. Writes _build/ alone.
    """
    folder = root / "_build"
    target = folder / ("preview" if only else "html" if solutions else "html-teaching")
    reported = folder / f"report{'-preview' if only else ''}{'' if solutions else '-teaching'}.json"  # a preview is no build of the book
    report = {"mode": mode, "solutions": solutions, "started": now(), "python": platform.python_version(), "ok": False, "chapters": []}
    with one_at_a_time(folder):
        restore(target)
        try:
            executed = execute_changed(root, report, only, force, minutes, extra or {})
            say("rendering the pages")
            assemble(root, executed, report)
            render(folder, target, report | {"ok": True}, strict=not only)
            report["ok"] = True
            write_report(reported, report)
        except (contents.ChapterError, OSError) as error:
            report["error"] = str(error) if isinstance(error, contents.ChapterError) else f"the book was not built: {error}"
            print(f"\nFAILED  {report['error']}", file=sys.stderr, flush=True)
            old = built(target)
            if old:
                print(f"{target} still shows the build of {old}; nothing of this run is in it.", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):  # a full disk has been reported already
                write_report(reported, report)
            return 1
    for record in report["chapters"]:
        note = "   (kept)" if record["cached"] else ""
        say(f"  {record['chapter']:<24}{duration(record['seconds']):>12}{record['peak_memory_mb']:>8} MB{note}")
    if mode == "quick" and not extra:
        for line in unlike_frozen(folder / "values", [record["chapter"] for record in report["chapters"]]):
            say(f"  a value of the scorecard changed: {line}. If it should: rope-heads book --freeze-values, then check-data --update")
    say(f"The {'preview' if only else 'book'} is at {target / 'index.html'}")
    return 0


def unlike_frozen(values: Path, names: list[str]) -> list[str]:
    """How the values that the chapters `names` recorded differ from the frozen ones that the scorecard shows."""
    recorded, frozen = ({claim: named for name in names for claim, named in verdicts.recorded(folder, name).items()}
                        for folder in (values, data_folder() / "values"))  # fmt: skip
    return scorecard.differences(recorded, frozen)


def not_to_freeze(folder: Path) -> str | None:
    """Why the values that lie in the build folder must not become the frozen ones; None when they may. A preview since the last build counts."""
    reports = {}
    for name in ("report", "report-preview"):
        with contextlib.suppress(OSError, ValueError):
            reports[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    if "report" not in reports:
        return "there is no build yet"
    preview = reports.get("report-preview")
    newer = [preview] if preview and preview["started"] > reports["report"]["started"] else []
    for what, report in zip(("the last build", "the preview since then"), [reports["report"], *newer], strict=False):
        if not report["ok"]:
            return f"{what} failed"
        if report["mode"] != "quick":
            return f"{what} was made in mode {report['mode']}"
        if any(set(record["parameters"]) - {"mode"} for record in report["chapters"]):
            return f"{what} was made with --parameter"
    return None


def execute_changed(root: Path, report: dict, only: str | None, force: bool, minutes: float | None, extra: dict) -> Path:
    """Executes what is not up to date, or `only` one chapter, and adds a record a chapter to the report; returns the folder they lie in."""
    notebooks, parameters = contents.chapters(root), runner.parameters_of(report["mode"], extra)
    slot = "-".join([report["mode"], *(f"{name}={value}" for name, value in sorted(extra.items()))]) + "-teaching" * (not report["solutions"])
    folder = root / "_build" / "executed" / re.sub(r"[^\w.=-]", "_", slot)
    folder.mkdir(parents=True, exist_ok=True)
    for number, notebook in enumerate(notebooks, 1):
        name, place = notebook.stem, f"[{number}/{len(notebooks)}] {notebook.stem}"
        key = runner.cache_key(root, notebook, parameters)
        record = runner.kept(folder, name, key)
        wanted = only in (None, name)
        collects = report["mode"] == "full" and name == "scorecard"  # shows what the other chapters recorded just now
        if wanted and (force or record is None or collects):
            say(f"{place}: executing, mode {report['mode']}")
            record = runner.execute(root, notebook, parameters, runner.limits_for(report["mode"], minutes), folder, key, say,
                                    report["solutions"])
            report["chapters"].append(record | {"cached": False})
            say(f"{place}: {duration(record['seconds'])}, {record['peak_memory_mb']} MB")
        elif record is not None:
            report["chapters"].append(record | {"cached": True})
            if record.get("values"):
                write_bytes(root / "_build" / "values" / f"{name}.json", (json.dumps(record["values"], indent=1) + "\n").encode())
            say(f"{place}: unchanged since {record['executed']}")
    return folder


def say(text: str) -> None:
    print(text, flush=True)


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def duration(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds} s" if seconds < 100 else f"{seconds // 60} min {seconds % 60:02d} s"


def write_report(path: Path, report: dict) -> None:
    write_bytes(path, (json.dumps(report, indent=1) + "\n").encode())


def built(html: Path) -> str | None:
    """When the site in `html` was built, or None when there is none."""
    try:
        return json.loads((html / "report.json").read_text(encoding="utf-8"))["started"]
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """Holds a lock on the build folder; the system releases it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: builds are not protected from each other
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("another build of this book is running: wait for it or stop it") from None
        yield


def assemble(root: Path, executed: Path, report: dict) -> Path:
    """_build/source: the book with executed chapters in place of the written ones, and a status page. A fresh folder each time."""
    source = root / "_build" / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    shutil.copy2(root / "_toc.yml", source)
    config = (root / "_config.yml").read_text(encoding="utf-8")
    (source / "_config.yml").write_text(config if report["solutions"] else without_launch_buttons(config), encoding="utf-8")
    shutil.copytree(root / "book", source / "book", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", ".*"))
    records = {record["chapter"]: record for record in report["chapters"]}
    for notebook in contents.chapters(root):
        done = notebook.stem in records
        page = json.loads((executed / notebook.name if done else notebook).read_text(encoding="utf-8"))
        if not report["solutions"]:
            page = contents.without_solutions(page, notebook.stem)
        if done:
            with_anchors(page["cells"])
            page["cells"][0]["source"] = with_measure(page["cells"][0]["source"], records[notebook.stem], report["mode"])
        (source / notebook.relative_to(root)).write_text(json.dumps(page), encoding="utf-8")
    (source / "book" / "status.md").write_text(status_page(report), encoding="utf-8")
    return source


def without_launch_buttons(config: str) -> str:
    """_config.yml less the buttons that open a chapter elsewhere: what opens there is the chapter as published, with its solutions."""
    import yaml

    return yaml.safe_dump({key: value for key, value in yaml.safe_load(config).items() if key != "launch_buttons"}, sort_keys=False)


def with_measure(text: str | list[str], record: dict, mode: str) -> str:
    """The first cell with one line below its title: what the chapter took when it was executed."""
    title, _, rest = (text if isinstance(text, str) else "".join(text)).partition("\n")
    line = (f"Executed on {record['executed'][:10]} in mode {mode}: {duration(record['seconds'])}, "
            f"{record['peak_memory_mb']} MB of memory.")
    return f"{title}\n\n{{.measured}}\n{line}\n{rest}"


def with_anchors(cells: list[dict]) -> None:
    """Puts `scorecard.anchor` in front of the first code cell that names a claim of the ledger: there the scorecard's links lead."""
    first: dict[int, list[str]] = {}
    for name in read_ledger().claims:
        found = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code" and f'"{name}"' in "".join(cell["source"])]
        if found:
            first.setdefault(found[0], []).append(name)
    for index in sorted(first, reverse=True):
        anchors = "\n".join(f'<span id="{scorecard.anchor(name)}"></span>' for name in first[index])
        cells.insert(index, {"cell_type": "markdown", "id": f"claims-{index}", "metadata": {}, "source": anchors})


def status_page(report: dict) -> str:
    """Markdown of the status page: one row a chapter, and the versions it ran with."""
    without = "" if report["solutions"] else ", without solutions"
    built_on = f"Built on {report['started'][:10]} in mode {report['mode']}{without}, Python {report['python']}, {os.cpu_count()} processor cores."
    lines = ["# Status of this build", "", f"{built_on} A chapter that did not change is not executed again.", ""]
    if report["chapters"]:
        lines += ["| chapter | time | peak memory | executed on | parameters |", "|---|--:|--:|---|---|"]
        for record in report["chapters"]:
            values = ", ".join(f"{name}={value}" for name, value in record["parameters"].items()) or "as written"
            lines.append(f"| [{record['chapter']}]({record['chapter']}.ipynb) | {duration(record['seconds'])} | {record['peak_memory_mb']} MB "
                         f"| {record['executed'][:16].replace('T', ' ')} | {values} |")
        lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in report["chapters"][-1]["versions"].items()) + ".", ""]
    lines.append("The same facts for programs: `report.json` at the top of this site.")
    return "\n".join(lines) + "\n"


def render(build_folder: Path, target: Path, report: dict, strict: bool = True) -> None:
    """Runs Jupyter Book in a fresh folder and puts the result in place of `target`; warnings are errors when `strict`."""
    fresh = build_folder / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-c", RENDER, "build", str(build_folder / "source"), "--path-output", str(fresh)]
    command += ["-W", "-n", "--keep-going"] if strict else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
                          stdin=subprocess.DEVNULL, env=runner.environment(build_folder))
    output = runner.plain(done.stdout)
    write_bytes(build_folder / "render.log", output.encode())
    html = fresh / "_build" / "html"
    if done.returncode or not (html / "index.html").is_file():
        lines = output.splitlines()
        telling = [line for line in lines if "WARNING" in line or "ERROR" in line or "rror:" in line] or lines[-15:]
        raise contents.ChapterError("the pages could not be rendered (all of it in _build/render.log):\n" + "\n".join(telling))
    write_report(html / "report.json", report)
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    html.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(fresh, ignore_errors=True)


def restore(target: Path) -> None:
    """Brings back the site that an interrupted `render` had moved aside."""
    old = target.with_name(target.name + ".old")
    if old.is_dir() and not target.exists():
        old.rename(target)
