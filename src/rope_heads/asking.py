"""Asking language models: the model that runs here, and any provider through inspect-ai (extra llm).

Every answer is on the disk before the next call is planned, so that an interrupted run goes on without paying twice. What a call may cost is
set aside before it is made, attempts that fail count as paid, and calls that would pass the limit are not made.
"""

import contextlib
import datetime
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from rope_heads import language_models, one_hop
from rope_heads.one_hop import Item

SMALL = "smollm2"  # SmolLM2-135M-Instruct in this process; the other two routes to the same weights:
SMALL_HTTP, SMALL_HF = "smollm2-http", "smollm2-hf"  # a server on loopback; inspect's local Hugging Face provider


def need(*modules: str) -> None:
    """ImportError with the line that installs the extra when a module is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not found: {language_models.INSTALL}")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def missing_items(items: Sequence[Item], path: Path, model: str) -> list[Item]:
    """Items without an answer of `model` in the file, by prompt hash: a changed prompt is a new question."""
    have = {r["prompt"] for r in language_models.read(path) if r["model"] == model}
    return [item for item in items if language_models.prompt_hash(item) not in have]


@contextlib.contextmanager
def alone(path: Path):
    """Holds a lock beside the file: two processes would ask, and pay for, the same items. The system releases it with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_name(f".{path.stem}.lock")
    with open(lock_path, "w") as lock:
        with contextlib.suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is writing {path}: wait for it or stop it") from None
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)


def ask_small(items: Sequence[Item], path: Path, report: Callable[[str], None], small=None) -> None:
    """Answers, ranks and most probable words of SmolLM2 for the items that lack them, cell by cell."""
    need("transformers", "gguf", "accelerate")
    from rope_heads import small_model

    with alone(path):
        todo = missing_items(items, path, SMALL)
        report(f"{len(items) - len(todo)} answers are there, {len(todo)} to make; nothing is paid for")
        if not todo:
            return
        small = small or small_model.SmallModel.load()
        cells: dict[tuple, list[Item]] = {}
        for item in todo:
            cells.setdefault((item.task, item.setting, item.window, item.data_set), []).append(item)
        for number, (cell, members) in enumerate(cells.items(), 1):
            chats, words = [one_hop.prompt(item) for item in members], [item.words[:-1] for item in members]
            for i, reply in small.replies(chats, words):
                item, logs = members[i], reply.log_probabilities
                found = {"rank": small_model.rank(logs, item.answer), "candidates": len(logs), "top": max(logs, key=logs.get)}
                language_models.append(path, [language_models.record(item, SMALL, today(), reply.text, reply.input_tokens, reply.output_tokens, **found)])
            report(f"cell {number}/{len(cells)}: task {cell[0]}, setting {cell[1]}, window {cell[2]}, data set {cell[3]}")
