"""Executes the chapters of the book with papermill, one child process a chapter, and keeps what succeeded.

A chapter runs again only when something it depends on changed: its notebook, the package, the data it reads, its parameters, the lock
file or Python. What is kept lies in _build/executed/<mode>/: NAME.ipynb, and NAME.json that says how it was made. Both are written whole
or not at all, the record last, and the record holds the notebook's checksum: an interrupted build, a full disk or a damaged file means
that the chapter runs again, never that half a chapter is shown.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from rope_heads.artefacts import READS, sha256, write_bytes
from rope_heads.contents import ChapterError, files_read, reads, without_solutions

MODES = ("quick", "full")
MINUTES = {"quick": 30, "full": 48 * 60}  # default limit of a cell; a chapter may take twice that
SAY_EVERY = 10.0  # seconds between two lines of progress
SAMPLE_EVERY = 0.5  # seconds between two looks at the memory
KILL_WAIT = 30.0  # seconds that killed processes have to end; longer only where the system holds them


@dataclasses.dataclass(frozen=True)
class Limits:
    cell: float  # seconds
    chapter: float  # seconds


def limits_for(mode: str, minutes: float | None = None) -> Limits:
    seconds = 60 * (MINUTES[mode] if minutes is None else minutes)
    return Limits(cell=seconds, chapter=2 * seconds)


def parameters_of(mode: str, extra: dict | None = None) -> dict:
    """What papermill is given. `quick` is what every chapter declares itself, so nothing is passed for it."""
    return ({} if mode == "quick" else {"mode": mode}) | (extra or {})


def cache_key(root: Path, notebook: Path, parameters: dict) -> str:
    """sha256 over everything the executed chapter depends on."""
    package = sorted(path for path in (root / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256(json.dumps([platform.python_version(), parameters], sort_keys=True).encode())
    for path in [notebook, root / "requirements.txt", *package, *files_read(root, notebook)]:
        digest.update(f"{path.relative_to(root).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()


def kept(folder: Path, name: str, key: str) -> dict | None:
    """The record of an executed chapter, when it was made under `key` and its notebook is still the one described."""
    try:
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        good = record["key"] == key and record["sha256"] == sha256(folder / f"{name}.ipynb")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if good else None


def tree(pid: int) -> list:
    """The process and all its descendants; the kernel is one of them but leads a process group of its own."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory(pid: int) -> float:
    """MB held by a process and its descendants; pages they share count once where the system tells (Linux)."""
    import psutil

    total = 0
    for process in tree(pid):
        try:
            info = process.memory_full_info() if psutil.LINUX else process.memory_info()
        except psutil.Error:
            continue
        total += getattr(info, "pss", info.rss)
    return total / 1e6


def kill(pid: int) -> None:
    """Kills a process and its descendants and waits until they have ended: a signal is a request, and it takes effect a little later."""
    import psutil

    processes, end = tree(pid), time.monotonic() + KILL_WAIT
    for process in processes:  # parents first: none answers the end of a child by starting another
        try:
            process.kill()
        except psutil.Error:
            pass
    while any(map(_runs, processes)) and time.monotonic() < end:
        time.sleep(0.01)


def _runs(process) -> bool:
    """A zombie does not: it has ended, and whoever started it has only not asked yet."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def environment(build: Path) -> dict:
    """Environment of a chapter: one thread a process, and no start-up files or kernels of the user's own Jupyter."""
    own = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    folders = {name: str(build / "jupyter" / folder) for name, folder in own.items()}
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm would like widgets, and the page is no place to say so
    return {"OMP_NUM_THREADS": "1", **quiet, **os.environ, **folders, "PYTHONUNBUFFERED": "1"}


def execute(root: Path, notebook: Path, parameters: dict, limits: Limits, folder: Path, key: str, say=print, solutions: bool = True) -> dict:
    """Runs one chapter, with its `solutions` or without, in a child process and keeps it in `folder`; returns its record, raises ChapterError.

    The record: seconds, peak_memory_mb (sampled twice a second), versions, parameters, executed (time), key, sha256, stderr, values.
    """
    build, name = root / "_build", notebook.stem
    work = build / "work" / name
    work.mkdir(parents=True, exist_ok=True)
    job = {"notebook": str(notebook), "output": str(work / "executed.ipynb"), "parameters": parameters, "cell_limit": limits.cell,
           "solutions": solutions}
    progress, result = work / "progress.json", work / "result.json"
    for old in (progress, result, Path(job["output"])):
        old.unlink(missing_ok=True)
    write_bytes(work / "job.json", json.dumps(job).encode())
    declared = {READS: json.dumps(reads(notebook))} if parameters.get("mode", "quick") == "quick" else {}  # mode full makes its data itself
    values = build / "values" / f"{name}.json"  # what the chapter measures for the ledger: `verdicts.record` writes it
    values.unlink(missing_ok=True)
    log = work / "log.txt"
    started, peak, said = time.monotonic(), 0.0, time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "rope_heads.runner", str(work)], stdin=subprocess.PIPE, stdout=output,
                                   stderr=subprocess.STDOUT, cwd=notebook.parent,
                                   env=environment(build) | declared, start_new_session=True)
    try:
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            now = time.monotonic()
            if now - started > limits.chapter:
                raise ChapterError(f"{name}: took longer than its limit of {limits.chapter:g} s ({_where(progress)})")
            if now - said > SAY_EVERY:
                say(f"  {name}: {_where(progress)}, {now - started:.0f} s, {peak:.0f} MB")
                said = now
            time.sleep(SAMPLE_EVERY)
    finally:
        if process.poll() is None:  # else its number may be another process's by now
            kill(process.pid)
        process.wait()
        process.stdin.close()
    try:
        outcome = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise ChapterError(f"{name}: its process ended with status {process.returncode} ({_where(progress)}) {' '.join(last)}") from None
    if "error" in outcome:
        raise ChapterError(f"{name}: {outcome['error']}")
    for line in outcome["stderr"]:
        say(f"  {name}: {line}")
    content = Path(job["output"]).read_bytes()
    record = {"chapter": name, "seconds": round(time.monotonic() - started, 1), "peak_memory_mb": round(peak), "parameters": parameters,
              "executed": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "versions": outcome["versions"],
              "stderr": outcome["stderr"], "key": key, "sha256": hashlib.sha256(content).hexdigest(),
              "values": json.loads(values.read_text(encoding="utf-8")) if values.is_file() else {}}
    write_bytes(folder / f"{name}.ipynb", content)
    write_bytes(folder / f"{name}.json", (json.dumps(record, indent=1) + "\n").encode())
    return record


def plain(text: str) -> str:
    """Text without the terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _where(progress: Path) -> str:
    try:
        cell, cells = json.loads(progress.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "starting"
    return f"cell {cell} of {cells}"


# ---- below: what happens inside the child process ----


def _end_with_parent() -> None:
    """The parent holds the other end of stdin: when it is gone, this process takes its kernel and itself down."""
    import psutil

    sys.stdin.buffer.read()
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)


def _shown_parameters(source: str, parameters: dict) -> str:
    """The parameters cell with the values that were passed, its comments kept: the reader sees one cell, and it is true."""
    lines = source.splitlines()
    for index, line in enumerate(lines):
        name = line.split("=")[0].split(":")[0].strip()
        if "=" in line and name in parameters:
            comment = line.partition("#")[2]
            lines[index] = f"{name} = {parameters[name]!r}" + (f"  #{comment}" if comment else "")
    return "\n".join(lines)


def _tidy(notebook, parameters: dict) -> list[str]:
    """Removes papermill's traces (paths, times, the injected cell); returns what the chapter wrote to stderr, by cell."""
    notebook.metadata.pop("papermill", None)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    stderr = []
    for number, cell in enumerate(notebook.cells, 1):
        for name in ("papermill", "execution"):
            cell.metadata.pop(name, None)
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = _shown_parameters(cell.source, parameters)
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                stderr.append(f"cell {number} wrote to stderr: {output.text.strip()[:500]}")
    return stderr


def _execute_here(work: Path) -> dict:
    """Executes the chapter described in job.json; returns {"stderr", "versions"} or {"error"}."""
    import logging

    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    logging.getLogger("papermill").setLevel(logging.WARNING)
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    written = Path(job["notebook"])
    if not job["solutions"]:
        less = without_solutions(json.loads(written.read_text(encoding="utf-8")), written.stem)
        written = work / written.name
        write_bytes(written, json.dumps(less).encode())
    declared = papermill.inspect_notebook(str(written))
    unknown = sorted(set(job["parameters"]) - set(declared))
    if unknown:
        known = ", ".join(declared) or "none"
        return {"error": f"undeclared parameter {', '.join(unknown)}; its cell tagged 'parameters' declares: {known}"}
    tags = [cell.metadata.get("tags", []) for cell in nbformat.read(written, as_version=4).cells]
    injected = next((i + 1 for i, own in enumerate(tags) if "parameters" in own), len(tags)) if job["parameters"] else len(tags)
    state = {"cell": 0}

    def number(index):  # of the cell in the chapter as written, from 1; papermill's own cell stands behind the parameters
        return index + 1 - (index >= injected)

    def begin(cell, cell_index):
        state["cell"] = number(cell_index)
        write_bytes(work / "progress.json", json.dumps([state["cell"], len(tags)]).encode())

    try:
        notebook = papermill.execute_notebook(
            str(written), None, parameters=job["parameters"], kernel_name="python3", progress_bar=False, start_timeout=300,
            request_save_on_cell_execute=False, execution_timeout=max(1, round(job["cell_limit"])),
            cwd=str(Path(job["notebook"]).parent), on_cell_start=begin)
    except papermill.PapermillExecutionError as error:
        trace = plain("\n".join(error.traceback))
        return {"error": f"cell {number(error.cell_index)} raised {error.ename}: {error.evalue}\n{trace}"}
    except CellTimeoutError:
        return {"error": f"cell {state['cell']} took longer than its limit of {job['cell_limit']:g} s"}
    except DeadKernelError:
        return {"error": f"the kernel died in cell {state['cell']} (out of memory?)"}
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":  # papermill lets an early `sys.exit()` pass
                return {"error": f"cell {number(index)} raised {output.ename}: {output.evalue}"}
    stderr = _tidy(notebook, job["parameters"])
    Path(job["output"]).write_text(nbformat.writes(notebook), encoding="utf-8")
    return {"stderr": stderr, "versions": _versions()}


def _versions() -> dict:
    import importlib.metadata

    names = ("rope-heads", "torch", "numpy", "papermill", "nbclient", "ipykernel")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def main(work: Path) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        outcome = _execute_here(work)
    except ChapterError as error:
        outcome = {"error": str(error).partition(": ")[2]}
    except Exception as error:  # a broken notebook, a kernel that does not start: the parent reports it under the chapter's name
        outcome = {"error": f"{type(error).__name__}: {error}"}
    write_bytes(work / "result.json", json.dumps(outcome).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
