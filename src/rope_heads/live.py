"""Training inside a chapter: several runs side by side through the command line, in a folder where an interrupted build finds them again."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rope_heads.artefacts import PACKAGE, repository


def live_folder() -> Path:
    """Where a chapter trains: _build/live/ID of the checkout, elsewhere a temporary folder. ID stands for the source of this package.

    When a build is stopped or runs out of time, the next one goes on from the checkpoints; with other source it starts anew. A chapter that has
    read its runs removes the folder: the next execution trains again.
    """
    root = repository()
    if root is None:
        return Path(tempfile.mkdtemp(prefix="rope-heads-"))
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    folder = root / "_build" / "live" / digest.hexdigest()[:12]
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def train_side_by_side(runs: list[tuple[str, str, int]], root: str | os.PathLike, until: float | None = None,
                       report: Callable[[str], None] = print) -> None:  # fmt: skip
    """Train (task, recipe, seed) runs at the same time, one process and one thread each, through the command line.

    Lines of progress are passed on as they come. RuntimeError names the runs that failed, with the end of their output.
    """
    from concurrent.futures import ThreadPoolExecutor

    def one(run: tuple[str, str, int]) -> str | None:
        task, recipe, seed = run
        command = [sys.executable, "-u", "-m", "rope_heads", "train", "--task", task, "--recipe", recipe, "--seed", str(seed), "--runs", str(root)]
        command += ["--until", str(until)] if until is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip())
                report(lines[-1])
        return None if process.returncode == 0 else f"{' '.join(map(str, run))} ended with {process.returncode}: {' / '.join(lines[-3:])}"

    with ThreadPoolExecutor(len(runs)) as pool:
        failures = [failure for failure in pool.map(one, runs) if failure]
    if failures:
        raise RuntimeError("; ".join(failures))
