"""Accuracy on long inputs: tokens are put before the target window, so the answer and every hop stay where they were (P1, Figure 5B).

One pass serves all lengths (`long_pass`). Added tokens are independent draws, so the first k of many are as good as k drawn alone. A run is
measured on the same sequences at all lengths.

`rope-heads lengths --run DIR` writes `lengths.parquet` and `gaps.parquet` (`length_gap`) into the run's folder.
"""

import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from scipy import stats

from rope_heads import artefacts, interventions
from rope_heads.audit_tasks import ALL_TASKS
from rope_heads.length_gap import GapTally, Observe
from rope_heads.long_pass import read
from rope_heads.model import Config, Transformer
from rope_heads.tasks import LENGTH, MAX_HOPS, Batch, LetterTask, Task

GRID = (*range(0, 100, 10), *range(100, 1_000, 100), *range(1_000, 5_001, 500))  # added tokens, the points of Figure 5B
EIGHT = (0, 40, 100, 200, 300, 500, 800, 1_000)
BLOCK, BLOCKS, FAR_BLOCKS, NEAR = 5, 20, 5, 1_000  # 20 blocks of 5 sequences a hop count up to 1,000 added tokens, 5 blocks beyond
STREAM = 5_017  # keeps these sequences apart from those of training
PLANES_OFF = {"no fast planes": range(1, 9), "no slow planes": range(33, 65), "no first planes": range(1, 33), "no odd planes": range(1, 65, 2)}  # ids

# ---- memory -------------------------------------------------------------------------------------------------------------------------


def memory_needed(config: Config, added: int) -> int:
    """Bytes that one pass over `added` tokens takes at its peak, a little more than was seen: 22 arrays of the size of the stream, the rotary
    tables of every layer, and the random numbers of a block of sequences. It grows with the length, not with its square."""
    position = 4 * max(config.width, config.heads * config.d_head)
    return (added + LENGTH) * (position * 22 * prompts_at_once(added) + 4 * config.rotary_dim * config.layers + 6 * 8 * BLOCK * MAX_HOPS)


def memory_free() -> int:
    """Bytes that this process can still take: what the system has available, or what its control group allows, whichever is less."""
    limits = []
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(fields["MemAvailable"].split()[0]))
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):  # no such files here, or "max"
        pass
    if not limits and hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=2**62)


def check_memory(config: Config, added: int, free: int | None = None) -> None:
    """ValueError, before anything is allocated, when `added` tokens would not fit."""
    needed, free = memory_needed(config, added), memory_free() if free is None else free
    if needed > free:
        raise ValueError(f"{added} added tokens need about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: choose a shorter length")


def prompts_at_once(added: int) -> int:
    return max(1, 16_384 // (added + LENGTH))


# ---- what is measured ---------------------------------------------------------------------------------------------------------------

CHANGES = {  # what is done to a trained model at test time
    "none": "nothing",
    "no fast planes": "q.k of planes 1 to 8 is 0 in every layer",
    "no slow planes": "q.k of planes 33 to 64 is 0 in every layer",
    "no first planes": "q.k of planes 1 to 32 is 0 in every layer: as many as the slow ones",
    "no odd planes": "q.k of every second plane is 0 in every layer: as many, fast and slow",
    "tripled": "all logits are multiplied by 3 at every length; log n / log 17 comes to 3 at the end of the grid",
    "interpolated": "positions are multiplied by 16 / (n - 1) for an input of n tokens, so that none is beyond the training range",
    "sharper": "logits of a query that sees n tokens are multiplied by max(1, log n / log 17)",
    "windowed": "no token sees more than the 16 before it and itself, in every layer",
    "half": "weights are rounded to half precision, as they are kept in data/",
}


def changed(model: Transformer, change: str, added: int = 0) -> Transformer:
    """The model after a change; only "interpolated" depends on the number of added tokens. "sharper" and "windowed" are left to `read`."""
    if change not in CHANGES:
        raise ValueError(f"change must be one of {', '.join(CHANGES)}, got {change!r}")
    if change in PLANES_OFF:
        return interventions.without_planes(model, PLANES_OFF[change])
    if change in ("none", "sharper", "windowed"):
        return model
    model = copy.deepcopy(model)
    if change == "half":
        model.load_state_dict({name: t.half().float() for name, t in model.state_dict().items()})
        return model
    for block in model.blocks:
        if change == "tripled":
            block.attention.scale = 3 * block.attention.scale
        elif block.attention.positions == "rope":
            block.attention.angles = block.attention.angles * min(1.0, (LENGTH - 1) / (added + LENGTH - 1))
            block.attention._tables = None
    return model


class Sequences(NamedTuple):
    """One block: the task's 17 tokens with answers and hop counts, the tokens to put before them, and those that give the values if others do."""

    core: Batch
    prefix: Int[np.ndarray, "prompt position"]
    values: Int[np.ndarray, "prompt position"] | None = None


def sequences(task: Task, seed: int, block: int, kind: str = "own", longest: int = 0) -> Sequences:
    """Block 0 to 19: five sequences of each hop count with 5,000 (block 0 to 4) or 1,000 tokens to be added, more if `longest` is more.

    The 17 tokens are the same for every kind of added tokens, and a shorter grid sees the same sequences as the whole one. Kind "own/repeat": the
    keys of own added tokens and the values of repeated ones (`read`).
    """
    kind, _, values = kind.partition("/")
    if values:
        return sequences(task, seed, block, kind, longest)._replace(values=sequences(task, seed, block, values, longest).prefix)
    hops = np.repeat(np.arange(1, MAX_HOPS + 1), BLOCK)
    longest = max(longest, GRID[-1] if block < FAR_BLOCKS else NEAR)
    batch = task.sample(len(hops), hops, np.random.default_rng([seed, task.key, STREAM, block]), prefix=longest, prefix_kind=kind)
    return Sequences(Batch(batch.tokens[:, longest:], batch.answers, batch.hops), batch.tokens[:, :longest])


def right_answers(model: Transformer, drawn: Sequences, added: Sequence[int], change: str = "none",
                  observer: Callable[[slice], Observe] | None = None) -> Bool[np.ndarray, "length prompt"]:  # fmt: skip
    """Which answers of one block are right, with each number of added tokens. `observer` makes the observer of some of its rows."""
    right = np.zeros((len(added), len(drawn.core.answers)), dtype=bool)
    passes = [[i] for i in range(len(added))] if change == "interpolated" else [list(range(len(added)))]
    for places in passes:
        some = [added[i] for i in places]
        now, step = changed(model, change, some[-1]), prompts_at_once(max(some))
        for start in range(0, len(drawn.core.answers), step):
            rows = slice(start, start + step)
            prefix, core, answers = (torch.from_numpy(a[rows]) for a in (drawn.prefix[:, : max(some)], drawn.core.tokens, drawn.core.answers))
            values = None if drawn.values is None else torch.from_numpy(drawn.values[rows, : max(some)])
            with torch.inference_mode():
                logits = read(now, prefix, core, some, observer(rows) if observer else None, sharper=change == "sharper", values=values,
                              window=LENGTH if change == "windowed" else None)  # fmt: skip
            right[places, rows] = (logits.argmax(-1) == answers[:, None]).T.numpy()
    return right


def wilson(right, tests, coverage: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's interval for the share behind `right` of `tests` independent sequences (in [0, 1]; for one run, not over runs)."""
    right, tests = np.asarray(right, float), np.asarray(tests, float)
    z2 = stats.norm.ppf((1 + coverage) / 2) ** 2
    middle = (right + z2 / 2) / (tests + z2)
    reach = np.sqrt(z2) / (tests + z2) * np.sqrt(right * (tests - right) / tests + z2 / 4)
    return np.clip(middle - reach, 0, 1), np.clip(middle + reach, 0, 1)


# ---- a run --------------------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What one curve is measured on: whose inputs, which added tokens, what change, which numbers of added tokens."""

    inputs: str
    kind: str
    change: str
    added: tuple[int, ...]


WHAT = {  # what `rope-heads lengths --what` offers
    "main": "the whole grid on the run's own task, with the gaps of its heads",
    "short": "eight lengths to 1,000 on the run's own task",
    "readings": "Letter models on the other Letter data with as many letters, to 1,000",
    "kinds": "eight lengths with added tokens uniform over the vocabulary, and with one token repeated",
    "changes": "eight lengths with each change at test time; two lengths with weights in half precision",
    "controls": "for the changes: eight lengths with other planes off, the whole grid with all logits tripled",
    "crowds": "to 200 added tokens: the keys of varied ones with the values of one token repeated, and the other way round",
    "windowed": "eight lengths when no token looks further back than 16",
    "sharper": "the whole grid with sharper logits, and eight lengths with them and one token repeated",
}


def settings(task: Task, what: str) -> list[Setting]:
    """The curves that a word of `WHAT` stands for."""
    other = [name for name, t in ALL_TASKS.items() if isinstance(task, LetterTask) and isinstance(t, LetterTask) and t is not task and t.letters == task.letters]
    controls = ("no first planes", "no odd planes", "tripled")
    changes = [change for change in CHANGES if change not in ("none", "half", *controls)]
    return {
        "main": [Setting(task.name, "own", "none", GRID)],
        "short": [Setting(task.name, "own", "none", EIGHT)],
        "readings": [Setting(name, "own", "none", tuple(k for k in GRID if k <= NEAR)) for name in other],
        "kinds": [Setting(task.name, kind, "none", EIGHT) for kind in ("uniform", "repeat")],
        "changes": [Setting(task.name, "own", change, EIGHT) for change in changes] + [Setting(task.name, "own", "half", (0, NEAR))],
        "controls": [Setting(task.name, "own", change, GRID if change == "tripled" else EIGHT) for change in controls],
        "crowds": [Setting(task.name, kind, "none", (40, 100, 200)) for kind in ("own/repeat", "repeat/own")],
        "windowed": [Setting(task.name, "own", "windowed", EIGHT)],
        "sharper": [Setting(task.name, "own", "sharper", GRID), Setting(task.name, "repeat", "sharper", EIGHT)],
    }[what]


def measure_setting(model: Transformer, seed: int, setting: Setting, tally: GapTally | None = None, progress: Path | None = None, key: str = "",
                    report: Callable[[str], None] = print) -> Int[np.ndarray, "length hops"]:  # fmt: skip
    """Right answers by number of added tokens and hop count. After every block the counts so far go to `progress`; `key` says whose they are."""
    task, near = ALL_TASKS[setting.inputs], [i for i, k in enumerate(setting.added) if k <= NEAR]
    check_memory(model.config, max(setting.added))
    right, first, started, before = np.zeros((len(setting.added), MAX_HOPS), int), 0, time.perf_counter(), 0.0
    if progress and progress.exists():
        with np.load(progress, allow_pickle=False) as kept:
            if str(kept["key"]) == key:
                right, first, before = kept["right"], int(kept["blocks"]), float(kept["seconds"])
                if tally:
                    tally.restore(kept)
                report(f"goes on after block {first} of {BLOCKS}")
    for block in range(first, BLOCKS):
        places = list(range(len(setting.added))) if block < FAR_BLOCKS else near
        if not places:
            break
        some = [setting.added[i] for i in places]
        drawn = sequences(task, seed, block, setting.kind, max(some))
        observer = tally.observer(task, drawn.core, places) if tally else None
        answered = right_answers(model, drawn, some, setting.change, observer)
        right[places] += np.stack([answered[:, drawn.core.hops == h].sum(1) for h in range(1, MAX_HOPS + 1)], 1)
        seconds = before + time.perf_counter() - started
        if progress:
            with artefacts.atomic(progress) as temporary, open(temporary, "wb") as file:
                np.savez(file, key=key, right=right, blocks=block + 1, seconds=seconds, **(tally.state() if tally else {}))
        if block < FAR_BLOCKS or block == BLOCKS - 1:
            report(f"{setting.inputs}, added tokens {setting.kind}, change {setting.change}: block {block + 1} of {BLOCKS}, {seconds:.0f} s")
    return right


def accuracy_rows(setting: Setting, right: Int[np.ndarray, "length hops"]) -> pd.DataFrame:
    """One row a length and hop count: how many sequences, how many right, the share and its Wilson interval of 95 %."""
    rows = [{"inputs": setting.inputs, "kind": setting.kind, "change": setting.change, "added": k, "hops": h + 1,
             "tests": BLOCK * (BLOCKS if k <= NEAR else FAR_BLOCKS), "right": int(right[i, h])}
            for i, k in enumerate(setting.added) for h in range(MAX_HOPS)]  # fmt: skip
    frame = pd.DataFrame(rows)
    low, high = wilson(frame.right, frame.tests)
    return frame.assign(accuracy=frame.right / frame.tests, low=low, high=high)


def measure_run(folder: str | os.PathLike, what: Sequence[str] = ("main",), added: Sequence[int] = (), report: Callable[[str], None] = print) -> int:
    """Measures a finished run and writes `lengths.parquet`, with "main" also `gaps.parquet`, into its folder; rows of lengths.parquet.

    What stands in the table is not measured again, an interrupted measurement goes on. added: one more curve, with these numbers of tokens.
    """
    folder = Path(folder)
    if not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds no finished run (no model.safetensors): train it first, or go on with the same command")
    identity, made = artefacts.read_json(folder / "run.json")
    task, seed, end = ALL_TASKS[identity["task"]], identity["seed"], made["step"]
    model, weights = Transformer.load(folder / "model.safetensors"), artefacts.sha256(folder / "model.safetensors")
    wanted = [(name, setting) for name in what for setting in settings(task, name)]
    wanted += [("added", Setting(task.name, "own", "none", tuple(sorted(set(added)))))] * bool(added)
    path, progress = folder / "lengths.parquet", folder / "lengths.part.npz"
    if not wanted:
        raise ValueError(f"{' '.join(what) or 'nothing'} measures nothing of task {task.name}: readings are for Letter models, or pass --added")
    table, seconds = _table_of(path, weights)
    for name, setting in wanted:
        same = (table[["inputs", "kind", "change"]] == list(setting[:3])).all(axis=1) if len(table) else pd.Series(dtype=bool)
        if len(table) and set(setting.added) <= set(table[same].added) and (name != "main" or (folder / "gaps.parquet").exists()):
            continue
        tally, began = GapTally(model, setting.added) if name == "main" else None, time.perf_counter()
        right = measure_setting(model, seed, setting, tally, progress, json.dumps([weights, name, *setting]), report)
        rows = accuracy_rows(setting, right)
        rows.insert(0, "step", end)
        table = pd.concat([table[~(same & table.added.isin(setting.added))], rows]) if len(table) else rows
        table = table.sort_values(["inputs", "kind", "change", "added", "hops"], kind="stable", ignore_index=True)
        seconds += time.perf_counter() - began
        command = f"rope-heads lengths --run RUNS/{folder.parent.name}/{folder.name}" + (f" --what {name}" if name in WHAT else "")
        origin = artefacts.provenance(command, round(seconds, 1), seed, weights=made["command"], weights_sha256=weights)
        if tally:
            core = [sequences(task, seed, block).core for block in range(BLOCKS)]
            gaps = tally.rows(task, Batch(*(np.concatenate(column) for column in zip(*core))))
            gaps.insert(0, "step", end)
            artefacts.write_parquet(folder / "gaps.parquet", gaps, origin)
        artefacts.write_parquet(path, table, origin)
        progress.unlink(missing_ok=True)
    return len(table)


def _table_of(path: Path, weights: str) -> tuple[pd.DataFrame, float]:
    """What was measured of these weights, and how long it took; nothing if they are other weights."""
    if path.exists():
        table, origin = artefacts.read_parquet(path)
        if origin["weights_sha256"] == weights:
            return table, origin["seconds"]
    return pd.DataFrame(), 0.0
