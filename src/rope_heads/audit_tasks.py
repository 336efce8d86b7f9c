"""Tasks that the papers lack: they separate hopping from counting, and the rule of a task from the number of its answers.

The Letter data of either reading can mostly be answered by counting letters (chapter on the tasks). Here are a Letter task with 12 letters as the
released code would make it (`LETTER_12`), one in which counts say as good as nothing (`LETTER_12_DEBIASED`), inputs on which counting and hopping
disagree (`conflicts`), and a Number task with as many answers as the Letter task has (`NUMBER_64`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rope_heads.splits import whole_number
from rope_heads.tasks import LENGTH, MAX_HOPS, PRE_TARGET, QUERY, TASKS, WINDOW, LetterTask, NumberTask


@dataclass(frozen=True)
class DebiasedLetterTask(LetterTask):
    """A Letter task whose answers cannot be found by counting the letters of the target window.

    The eight words of the target window start with eight different letters, and no other word starts with one of them: as a first letter the
    answer's is like the others. The second letters off the chain name the other letters of the window, each once as far as they go: all seven
    with one or two hops (with one hop a further one names any of the eight), six with three, five with four. So who counts second letters still
    has to choose between 8, 8, 7 and 6 words: right in .140 of all cases, where a blind guess is right in .125. Words off the chain and
    added words start with the remaining letters, which lead nowhere. 12 letters are just enough: 8 + 3 on the chain + 1.

    It has a cue of its own: before the query only words of the chain are named by another word, so who looks for named words finds a chain of two
    hops and more without the query.
    """

    letters: int = 12

    def __post_init__(self):
        super().__post_init__()
        if self.letters < WINDOW + MAX_HOPS:
            raise ValueError(
                f"letters must be >= {WINDOW + MAX_HOPS}: eight in the target window, three on the chain, one more; got {self.letters}"
            )

    def _fill(self, hops, position, value, rng, prefix, kind):
        count = len(hops)
        rows = np.arange(count)
        path = self._path(hops, position, rng)
        letter, answer_digit = value // self.digits, value % self.digits
        order = self._order(letter, rng)  # [prompt, letter]: answer, chain from the answer to the query, 7 of the window, the rest

        left = self._from_rest(order, hops, LENGTH, rng)
        others = np.take_along_axis(order, hops[:, None] + np.arange(WINDOW - 1), axis=1)  # [prompt, 7], in random order
        places = np.argsort(
            np.where(np.arange(WINDOW) == position[:, None], 2.0, rng.random((count, WINDOW))), axis=1
        )  # answer's place last
        np.put_along_axis(left, places, np.column_stack([others, letter]), axis=1)
        digit = rng.integers(0, self.digits, (count, WINDOW), dtype=np.uint8).astype(np.int64)
        digit[rows, position] = answer_digit

        spare = np.take_along_axis(np.column_stack([others, letter]), rng.integers(0, WINDOW, (count, 1)), axis=1)
        decoys = np.column_stack([rng.permuted(others, axis=1), spare])  # [prompt, 8], used from the front: all eight with one hop only
        decoys[hops == 1] = rng.permuted(decoys[hops == 1], axis=1)
        free = np.ones((count, LENGTH), dtype=bool)
        for step in range(MAX_HOPS):
            free[rows, path[:, step]] = False
        nth = np.cumsum(free[:, WINDOW:QUERY], axis=1) - 1  # of the words off the chain
        right = np.zeros((count, LENGTH), dtype=np.int64)
        right[:, WINDOW:QUERY] = np.take_along_axis(decoys, np.maximum(nth, 0), axis=1)
        for step in range(1, MAX_HOPS):
            inner = hops > step  # this step is a word before the query, not the answer
            left[rows[inner], path[inner, step]] = order[rows[inner], hops[inner] - step]
        for step in range(MAX_HOPS):  # steps after the answer write into the target window, which has no second letters
            right[rows, path[:, step]] = order[rows, np.maximum(hops - step - 1, 0)]
        core = np.hstack([self._digit_pair(left[:, :WINDOW], digit), self._letter_pair(left[:, WINDOW:], right[:, WINDOW:])])
        answers = self._digit_pair(letter, answer_digit)
        return (np.hstack([self._added_rest(order, hops, rng, prefix, kind), core]) if prefix else core), answers

    def _from_rest(self, order, hops, width: int, rng: np.random.Generator) -> np.ndarray:
        """Letters neither on the chain nor in the target window [prompt, width]."""
        first = hops[:, None] + WINDOW - 1
        drawn = first + (rng.random((len(hops), width)) * (self.letters - first)).astype(np.int64)
        return np.take_along_axis(order, drawn, axis=1)

    def _added_rest(self, order, hops, rng: np.random.Generator, prefix: int, kind: str) -> np.ndarray:
        """Prefix tokens [prompt, prefix]: their first letters lead nowhere, so that counting stays useless at any length."""
        width = 1 if kind == "repeat" else prefix
        left = self._from_rest(order, hops, width, rng)
        digit = rng.integers(0, self.digits, left.shape)
        tokens = self._digit_pair(left, digit)
        if kind == "uniform":
            second = rng.integers(0, self.digits + self.letters, left.shape)
            named = self._from_rest(order, hops, width, rng)  # a second letter from the window would make counts speak
            tokens = np.where(second < self.digits, tokens, self._letter_pair(left, named))
        return np.broadcast_to(tokens, (len(hops), prefix))


CONTROL_PLACES = 2  # tokens of the target window that hold the control word; the counted word stands in one


class Conflicts(NamedTuple):
    """Inputs on which hopping and counting disagree. tokens [prompt, position]; answers, counted, control: token ids [prompt]; hops [prompt].

    answers: where the hops lead. counted: the one word of the target window that the counting rule points at (its letter is a first letter once
    and a second letter once in the sequence). control: another wrong word of the same window, in CONTROL_PLACES of its tokens; its letter is a
    second letter once, as the counted one's is, but a first letter twice.
    """

    tokens: np.ndarray
    answers: np.ndarray
    counted: np.ndarray
    control: np.ndarray
    hops: np.ndarray


def conflicts(task: LetterTask, count: int, hops, rng: np.random.Generator) -> Conflicts:
    """`count` conflict inputs for a Letter task with at least 8 letters.

    The answer stands twice in the target window, as the same word, so its letter is a first letter twice; the hops still lead to it. One wrong word
    has the counts that the answer has in the task's own data. All other letters of the window, the control's among them, are a first letter
    twice, and the control's is a second letter once, like the answer's, so that the two wrong words differ in their count as first letters alone.
    """
    count = whole_number("count", count, 1)
    if task.letters < MAX_HOPS + 4:
        raise ValueError(f"conflicts need at least {MAX_HOPS + 4} letters, got {task.letters}")
    base = task.sample(count, hops, rng)
    out = [_conflict(task, path_hops, value, rng) for path_hops, value in zip(base.hops, base.answers)]
    tokens, counted, control = (np.array(column, dtype=np.int64) for column in zip(*out))
    return Conflicts(tokens, base.answers, counted, control, base.hops)


def _conflict(task: LetterTask, hops: int, answer: int, rng: np.random.Generator) -> tuple[list[int], int, int]:
    """One conflict input of a given hop count and answer: its tokens, the counted word and the control word."""
    letter, digits = (answer - 1) // task.digits, task.digits
    rest = rng.permutation([x for x in range(task.letters) if x != letter])
    chain, (counted, control), pool = [letter, *rest[: hops - 1]], rest[hops - 1 : hops + 1], rest[hops + 1 :]
    digit = rng.integers(digits, size=task.letters)
    digit[letter] = (answer - 1) % digits
    fill = pool[:2]  # two letters fill the window, twice each at least
    window = rng.permutation([letter, letter, counted, *[control] * CONTROL_PLACES, fill[0], fill[0], fill[-1]])
    places = np.sort(rng.choice(np.arange(WINDOW, QUERY), hops - 1, replace=False))[::-1]  # of the chain, from the query leftwards
    free = rng.permutation([p for p in range(WINDOW, QUERY) if p not in places])
    left, right = np.empty(LENGTH, dtype=int), np.empty(LENGTH, dtype=int)
    left[WINDOW:], right[WINDOW:] = rng.choice(pool, PRE_TARGET + 1), rng.choice(pool, PRE_TARGET + 1)
    left[free[0]] = fill[-1]  # so that the last letter of the window, too, is a first letter twice
    right[free[0]], right[free[1]] = counted, control
    stops = [QUERY, *places]
    for step, at in enumerate(stops):  # the word at stop k names the letter of stop k + 1, the last one the answer's
        right[at] = chain[hops - 1 - step]
        if step:
            left[at] = chain[hops - step]
    core = [int(task._digit_pair(x, digit[x])) for x in window]
    core += [int(task._letter_pair(left[p], right[p])) for p in range(WINDOW, LENGTH)]
    return core, int(task._digit_pair(counted, digit[counted])), int(task._digit_pair(control, digit[control]))


LETTER_12 = LetterTask("letter_12", key=4, letters=12)
LETTER_12_DEBIASED = DebiasedLetterTask("letter_12_debiased", key=5)
NUMBER_64 = NumberTask("number_64", key=6, letters=64)
ALL_TASKS = {**TASKS, **{task.name: task for task in (LETTER_12, LETTER_12_DEBIASED, NUMBER_64)}}
