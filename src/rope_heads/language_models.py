"""Answers of language models to the one-hop tasks: kept as JSONL, planned, counted. Asking itself is in `asking`, items in `one_hop`.

One line an answer: model, date, task, setting, window, data_set, number, prompt (first 16 hex digits of the sha256 over the chat), answer,
input_tokens, output_tokens; a model that runs here also has rank, candidates and top, and near_rank: the mean rank of the words that are not the
answer among the twelve before the query (frozen for Letter only, near and plain at 12 words). Whether an answer is right is never stored: it
follows from the item, which the first six fields make again.
"""

import hashlib
import html
import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from rope_heads import one_hop
from rope_heads.artefacts import data_folder, data_path, repository
from rope_heads.one_hop import Item

FIELDS = ("model", "date", "task", "setting", "window", "data_set", "number", "prompt", "answer", "input_tokens", "output_tokens")
SCREEN_WINDOW, SCREEN = 16, 0.85  # P1, Appendix H: a model must reach this accuracy on Letter
LONGEST_ANSWER = 2_000  # characters kept of an answer
PAPER_MODELS = {"GPT 5.4": "openai/gpt-5.4", "GPT 5.5": "openai/gpt-5.5", "Claude Sonnet 3.7": "anthropic/claude-3-7-sonnet-20250219"}  # inspect's names
SMALL = "smollm2"  # SmolLM2-135M-Instruct on this machine
EXTRA = ".venv/bin/python -m pip install -e '.[llm]'"  # in a checkout; `make book` has done it
INSTALL = f"asking language models needs the extra llm, in the checkout: {EXTRA}"


def folder() -> Path:
    """Where answers lie: in data/ of the checkout; elsewhere those of the release, fetched."""
    return data_path("runs/language_models") if repository() is None else data_folder() / "runs" / "language_models"


def file_of(model: str, where: Path | None = None) -> Path:
    """The JSONL file of a model: its name with everything but letters, digits, dots and hyphens turned into _."""
    return (where or folder()) / ("".join(c if c.isascii() and (c.isalnum() or c in ".-") else "_" for c in model) + ".jsonl")


def prompt_hash(item: Item) -> str:
    return hashlib.sha256(json.dumps(one_hop.prompt(item), ensure_ascii=False).encode()).hexdigest()[:16]


# ---- the plan --------------------------------------------------------------------------------------------------------------------


def plan(tasks: Sequence[str] = one_hop.TASKS, settings: Sequence[str] = ("plain",), windows: Sequence[int] = one_hop.WINDOWS,
         data_sets: int = one_hop.DATA_SETS) -> list[Item]:  # fmt: skip
    """The items to ask, short windows first. A task that a setting does not have is left out; ValueError when nothing is left."""
    pairs = [(task, setting) for setting in settings for task in tasks if task in one_hop.SETTINGS.get(setting, tasks)]
    if not pairs or not windows or data_sets < 1:
        raise ValueError(f"nothing to ask: tasks {list(tasks)}, settings {list(settings)}, windows {list(windows)}, data sets {data_sets}")
    return [item for window in sorted(set(windows)) for task, setting in pairs for seed in range(data_sets)
            for item in one_hop.items(task, window, seed, setting)]  # fmt: skip


def tokens_at_most(item: Item) -> int:
    """A generous guess of a prompt's tokens without the model's tokenizer: two a word for pieces of three characters, 4 a chat turn.

    Commas and line breaks are tokens of their own.
    """
    texts = [turn["content"] for turn in one_hop.prompt(item)]
    return sum(4 + text.count(",") + text.count("\n") + sum(max(2, -(-len(word) // 3)) for word in text.split()) for text in texts)


@dataclass(frozen=True)
class Price:
    """US dollars a million tokens."""

    input: float
    output: float

    def of(self, input_tokens: int, output_tokens: int) -> float:
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


# ---- the file --------------------------------------------------------------------------------------------------------------------


WHOLE = {"window": 2, "data_set": 0, "number": 0, "input_tokens": 0, "output_tokens": 0, "rank": 1, "candidates": 2}  # least value of whole numbers


def _fault(record) -> str:
    """What is wrong with a line, or nothing. A fault that goes unseen here ends a chapter far from its cause."""
    if not isinstance(record, dict):
        return "lacks everything"
    missing = [field for field in FIELDS if field not in record]
    if missing:
        return f"lacks {', '.join(missing)}"
    beside = record.get("near_rank", 1.0)
    if not isinstance(beside, float) or not 1 <= beside < float("inf"):
        return f"has near_rank = {beside!r:.40}, expected a number >= 1, with a point"
    for name in FIELDS + ("rank", "candidates"):
        value = record.get(name)
        if name in WHOLE:
            if name in record and (not isinstance(value, int) or isinstance(value, bool) or value < WHOLE[name]):
                return f"has {name} = {value!r:.40}, expected a whole number >= {WHOLE[name]}"
        elif name in FIELDS and not isinstance(value, str):
            return f"has {name} = {value!r:.40}, expected text"
    try:
        one_hop.check(record["task"], record["setting"])
    except ValueError as error:
        return f"cannot be one: {error}"
    return "" if record["window"] <= one_hop.LONGEST else f"has window = {record['window']}, expected at most {one_hop.LONGEST}"


def read(path: Path) -> list[dict]:
    """Records of a file; [] when there is none. A last line that was cut off is left out; any other bad line is a ValueError."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for i, line in enumerate(lines[:-1], 1):  # what follows the last line break is empty, or was cut off while it was written
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            record = None
        fault = _fault(record)
        if fault:
            raise ValueError(f"{path}, line {i} {fault}: restore the file or delete the line")
        records.append(record)
    return records


def append(path: Path, records: Iterable[dict]) -> None:
    """Adds records and has them on the disk before it returns: an answer that was paid for is not lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=True) + "\n" for record in records)
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1_000_000))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def encodable(text: str) -> str:
    """`text` with halves of characters replaced: JSON can hold them, a table of texts cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def record(item: Item, model: str, date: str, answer: str, input_tokens: int, output_tokens: int, **more) -> dict:
    return {"model": model, "date": date, "task": item.task, "setting": item.setting, "window": item.window, "data_set": item.data_set,
            "number": item.number, "prompt": prompt_hash(item), "answer": encodable(answer)[:LONGEST_ANSWER], "input_tokens": input_tokens,
            "output_tokens": output_tokens, **more}  # fmt: skip


# ---- what the answers say --------------------------------------------------------------------------------------------------------


def table(records: Sequence[dict]) -> pd.DataFrame:
    """One row an answer: the record, the kind of answer (`one_hop.classify`), right (0 or 1), place and distance of the right word.

    An answer to a prompt that the package no longer makes is left out, because its item is unknown. Of several answers of one model to one
    prompt the first counts, the one that nobody would ask for again.
    """
    made: dict[tuple, list[Item]] = {}
    rows, first = [], {}
    for r in records:
        first.setdefault((r["model"], r["prompt"]), r)
    for r in first.values():
        cell = r["task"], r["window"], r["data_set"], r["setting"]
        if cell not in made:
            made[cell] = one_hop.items(*cell)
        item = made[cell][r["number"]] if r["number"] < len(made[cell]) else None
        if item is not None and prompt_hash(item) == r["prompt"]:
            answer = encodable(r["answer"])
            kind = one_hop.classify(answer, item)
            rows.append({**r, "answer": answer, "kind": kind, "right": int(kind == "right"), "place": item.place, "distance": item.distance})
    columns = [*FIELDS, "kind", "right", "place", "distance"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def answers(where: Path | None = None) -> pd.DataFrame:
    """`table` of every file of answers: all models that were asked. `off`: (rank - 1) / (candidates - 1), for models that run here.

    `off` is 0 when the right word is the most probable of the window and 1/2 on average when the order says nothing. `near_off`: the same
    of near_rank, nan where a record has none.
    """
    rows = table([r for path in sorted((where or folder()).glob("*.jsonl")) for r in read(path)])
    if "rank" in rows:
        rows["off"] = (rows["rank"] - 1) / (rows["candidates"] - 1)
        rows["near_off"] = (rows.get("near_rank", np.nan) - 1) / (rows["candidates"] - 1)
    return rows


def accuracy(answers: pd.DataFrame, by: Sequence[str] = ("model", "task", "setting", "window")) -> pd.DataFrame:
    """Mean over data sets, lowest and highest data set, sd over data sets, number of answers: one row for each value of `by`."""
    sets = answers.groupby([*by, "data_set"]).right.agg(["mean", "size"])
    groups = sets.groupby(list(by))
    return pd.DataFrame({"accuracy": groups["mean"].mean(), "low": groups["mean"].min(), "high": groups["mean"].max(),
                         "sd": groups["mean"].std(), "answers": groups["size"].sum()}).reset_index()  # fmt: skip


def screened(accuracies: pd.DataFrame, task: str, window: int = SCREEN_WINDOW, least: float = SCREEN) -> list[str]:
    """Models whose accuracy on `task` at the screening window is at least `least` (columns model, task, window, accuracy)."""
    rows = accuracies[(accuracies.task == task) & (accuracies.window == window) & (accuracies.accuracy >= least)]
    return sorted(rows.model)


def guessing(task: str, window):
    """Accuracy of one random word of the window. Number: its letters repeat, 1/window + (1 - 1/window)/26; Letter: 1/window."""
    return 1 / window + (1 - 1 / window) / 26 if task == "number" else 1 / window


def lonely_word(item: Item, rng: np.random.Generator) -> str:
    """A solver that never reads the query: one of the words whose first letter occurs once in the window, any word if there is none."""
    window = item.words[:-1]
    first = [word[0] for word in window]
    lonely = [word for word in window if first.count(word[0]) == 1]
    return str(rng.choice(lonely or window))


def within_reach(reach: float, window, task: str = "number") -> np.ndarray:
    """Accuracy of a model that is right up to distance `reach` and names a random word of the window beyond; places are uniform."""
    window = np.asarray(window, float)
    near = np.minimum(1.0, reach / window)
    return near + (1 - near) * guessing(task, window)


def fitted_reach(window, accuracy) -> tuple[float, float]:
    """(reach, root mean square error) of `within_reach` for Number, by least squares over reaches 0, 0.1, ..., 300."""
    reaches = np.arange(0, 300.05, 0.1)
    errors = [np.sqrt(np.mean((within_reach(r, window) - np.asarray(accuracy)) ** 2)) for r in reaches]
    return float(reaches[int(np.argmin(errors))]), float(min(errors))


def effective_reach(window, accuracy, guess: float = 1 / 26):
    """Number of distances that are right, window * p with accuracy = p + (1 - p) guess: how many words back the answers can be told.

    If being right depends on the distance alone, this is the sum of that probability over distances 1 to window, so it cannot fall as the
    window grows. `guess` 1/26: a wrong word still holds the right letter once in 26. Words; below 0 where accuracy is below the guess.
    """
    return np.asarray(window, float) * (np.asarray(accuracy, float) - guess) / (1 - guess)


def difference_by_data_set(rows: pd.DataFrame, least: int = 24) -> pd.Series:
    """Letter minus Number, mean accuracy over windows of at least `least` words, for each data set in which all of them are answered."""
    cells = rows[(rows.setting == "plain") & (rows.window >= least)].groupby(["data_set", "task", "window"]).right
    wanted = [(task, window) for task in one_hop.TASKS for window in one_hop.WINDOWS if window >= least]
    sizes, means = cells.size().unstack([1, 2]).reindex(columns=wanted), cells.mean().unstack([1, 2])
    whole = sizes.index[(sizes == one_hop.PER_DATA_SET).all(axis=1)]
    if not len(whole):
        return pd.Series(dtype=float, name="difference")
    return (means.loc[whole, "letter"].mean(axis=1) - means.loc[whole, "number"].mean(axis=1)).rename("difference")


# ---- showing answers -------------------------------------------------------------------------------------------------------------


def plain(text: str, longest: int = 60) -> str:
    """`text` on one line for a terminal: control and invisible characters written out, cut to `longest` characters."""
    visible = "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else ascii(c)[1:-1] for c in text)
    return visible if len(visible) <= longest else visible[: longest - 3] + "..."


def answers_html(rows: Sequence[Sequence[str]], head: Sequence[str], longest: int = 60) -> str:
    """An HTML table of texts that models wrote: every cell escaped, inside <code>, and out of MathJax's reach. Nothing in it executes."""
    mark = 'class="mathjax_ignore tex2jax_ignore"'
    look = 'style="color: inherit; background: none; border: 0; white-space: pre-wrap"'

    def cells(texts, tag):
        shown = (html.escape(plain(str(text), longest)) for text in texts)
        return "".join(f'<{tag} style="text-align: left; padding: 0 .8em"><code {mark} {look}>{text}</code></{tag}>' for text in shown)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<table class="dataframe mathjax_ignore tex2jax_ignore"><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table>'
