"""From chapters to the site: `build` executes what changed, assembles the pages and lets Jupyter Book render them.

Pages are assembled in _build/source from the executed chapters, rendered into a fresh folder with warnings as errors, and put in place of
_build/html in one step. Jupyter Book itself executes nothing.
"""

import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rope_heads import runner
from rope_heads.artefacts import write_bytes

RENDER = "import sys; from jupyter_book.cli.main import main; main(sys.argv[1:])"


def build(root: Path, mode: str = "quick", only: str | None = None, force: bool = False, minutes: float | None = None,
          extra: dict | None = None, say=print) -> int:
    """Executes and renders the book under `root`; returns the exit code: 0, or 1 when a chapter or the rendering failed."""
    build_folder = root / "_build"
    with one_at_a_time(build_folder):
        restore(build_folder / "html")
        try:
            return _build(root, mode, only, force, minutes, extra or {}, lambda text: say(text, flush=True))
        except (runner.ChapterError, OSError) as error:
            message = str(error) if isinstance(error, runner.ChapterError) else f"the book was not built: {error}"
            print(f"\nFAILED  {message}", file=sys.stderr, flush=True)
            old = built(build_folder / "html")
            if old:
                print(f"_build/html still shows the build of {old}; nothing of this run is in it.", file=sys.stderr)
            return 1


def _build(root, mode, only, force, minutes, extra, say) -> int:
    build_folder, notebooks = root / "_build", runner.chapters(root)
    names = [path.stem for path in notebooks]
    if only is not None and only not in names:
        raise runner.ChapterError(f"no chapter is called {only!r}; there are: {', '.join(names)}")
    parameters = runner.parameters_of(mode, extra)
    slot = "-".join([mode, *(f"{name}={value}" for name, value in sorted(extra.items()))])
    folder = build_folder / "executed" / "".join(c if c.isalnum() or c in "-=._" else "_" for c in slot)
    folder.mkdir(parents=True, exist_ok=True)
    report = {"mode": mode, "started": now(), "python": platform.python_version(), "ok": False, "chapters": []}
    started = time.monotonic()
    try:
        for number, notebook in enumerate(notebooks, 1):
            key = runner.cache_key(root, notebook, parameters)
            record = runner.kept(folder, notebook.stem, key)
            again = notebook.stem == only if only else (record is None or force)
            if only and not again and record is None:
                continue  # a preview shows the other chapters as they are
            if again and (force or record is None):
                say(f"[{number}/{len(notebooks)}] {notebook.stem}: executing ({mode})")
                limits = runner.limits_for(mode, minutes)
                record = runner.execute(root, notebook, parameters, limits, folder, key, say)
                report["chapters"].append(record | {"cached": False})
                say(f"[{number}/{len(notebooks)}] {notebook.stem}: {duration(record['seconds'])}, {record['peak_memory_mb']} MB")
            else:
                report["chapters"].append(record | {"cached": True})
                say(f"[{number}/{len(notebooks)}] {notebook.stem}: unchanged since {record['executed']}")
        report["ok"] = True
    except runner.ChapterError as error:
        report["error"] = str(error)
        raise
    finally:
        report["seconds"] = round(time.monotonic() - started, 1)
        with contextlib.suppress(OSError):  # the report is no reason to hide what went wrong
            write_report(build_folder, report)
    target = build_folder / ("preview" if only else "html")
    assemble(root, folder, report)
    say("rendering the pages")
    render(build_folder, target, report)
    for record in report["chapters"]:
        say(f"  {record['chapter']:<24}{duration(record['seconds']):>12}{record['peak_memory_mb']:>8} MB{'   (kept)' if record['cached'] else ''}")
    say(f"The {'preview' if only else 'book'} is at {target / 'index.html'}")
    return 0


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{int(seconds // 60)} min {seconds % 60:02.0f} s"


def write_report(folder: Path, report: dict) -> None:
    write_bytes(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())


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
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy2(root / name, source / name)
    shutil.copytree(root / "book", source / "book", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", ".*"))
    records = {record["chapter"]: record for record in report["chapters"]}
    for notebook in runner.chapters(root):
        if notebook.stem in records:
            page = json.loads((executed / notebook.name).read_text(encoding="utf-8"))
            page["cells"][0]["source"] = with_measure(page["cells"][0]["source"], records[notebook.stem], report["mode"])
            (source / notebook.relative_to(root)).write_text(json.dumps(page), encoding="utf-8")
    (source / "book" / "status.md").write_text(status_page(report), encoding="utf-8")
    return source


def with_measure(text: str | list[str], record: dict, mode: str) -> str:
    """The first cell with one line below its title: what the chapter took when it was executed."""
    title, _, rest = (text if isinstance(text, str) else "".join(text)).partition("\n")
    line = (f"Executed on {record['executed'][:10]} in mode {mode}: {duration(record['seconds'])}, "
            f"{record['peak_memory_mb']} MB of memory.")
    return f"{title}\n\n{{.measured}}\n{line}\n{rest}"


def status_page(report: dict) -> str:
    """Markdown of the status page: one row a chapter, and the versions it ran with."""
    lines = ["# Status of this build", "", f"Built on {report['started'][:10]} in mode {report['mode']}, Python {report['python']}, "
             f"{os.cpu_count()} processor cores. A chapter that did not change is not executed again.", ""]
    if report["chapters"]:
        lines += ["| chapter | time | peak memory | executed on | parameters |", "|---|--:|--:|---|---|"]
        for record in report["chapters"]:
            values = ", ".join(f"{name}={value}" for name, value in record["parameters"].items()) or "as written"
            lines.append(f"| [{record['chapter']}]({record['chapter']}.ipynb) | {duration(record['seconds'])} | {record['peak_memory_mb']} MB "
                         f"| {record['executed'][:16].replace('T', ' ')} | {values} |")
        lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in report["chapters"][-1]["versions"].items()) + ".", ""]
    lines.append("The same facts for programs: `report.json` at the top of this site.")
    return "\n".join(lines) + "\n"


def render(build_folder: Path, target: Path, report: dict) -> None:
    """Runs Jupyter Book in a fresh folder, warnings as errors, and puts the result in place of `target`."""
    fresh = build_folder / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-c", RENDER, "build", str(build_folder / "source"), "--path-output", str(fresh), "-W", "-n", "--keep-going"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
                          stdin=subprocess.DEVNULL, env=runner.environment(build_folder))
    write_bytes(build_folder / "render.log", done.stdout.encode())
    html = fresh / "_build" / "html"
    if done.returncode or not (html / "index.html").is_file():
        lines = done.stdout.splitlines()
        telling = [line for line in lines if "WARNING" in line or "ERROR" in line or "rror:" in line] or lines[-15:]
        raise runner.ChapterError("the pages could not be rendered (all of it in _build/render.log):\n" + "\n".join(telling))
    write_report(html, report)
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
