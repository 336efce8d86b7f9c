"""The Number task (follow pointers) and the Letter task (follow symbols), vectorised, with a reference solver.

Every sequence has 17 tokens: a target window of 8, eight pre-target tokens and the query, which comes last. The answer stands in
the target window, one to four hops from the query. `LETTER` follows the released code, `LETTER_PROPER` the paper's Definition F.2.
Source: Positional versus Symbolic Attention Heads, Appendix B and its released code.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from rope_heads.solvers import follow_letters, follow_numbers
from rope_heads.splits import BLOCK, Split, splits_of, whole_number

WINDOW = 8  # target-window tokens, where the answers are
PRE_TARGET = 8  # tokens between the target window and the query
QUERY = WINDOW + PRE_TARGET  # position of the query in a sequence without prefix
LENGTH = QUERY + 1
MAX_HOPS = 4
PAD = 0
PREFIX_KINDS = ("own", "uniform", "repeat")


class Batch(NamedTuple):
    """Sequences with their answers.

    tokens: int64 [prompt, position], token ids; the query is the last position.
    answers: int64 [prompt], the token id that the model should predict after the query.
    hops: int64 [prompt], 1 to 4.
    """

    tokens: np.ndarray
    answers: np.ndarray
    hops: np.ndarray


@cache
def _chain_table() -> tuple[np.ndarray, np.ndarray]:
    """All ways to place 0 to 3 chain tokens before the query: positions (rightmost first, -1 = none) and the first row of each hop count."""
    ways = [tuple(reversed(chosen)) for hops in range(1, MAX_HOPS + 1) for chosen in combinations(range(WINDOW, QUERY), hops - 1)]
    rows = np.array([way + (-1,) * (MAX_HOPS - 1 - len(way)) for way in ways])
    return rows, np.searchsorted([len(way) for way in ways], np.arange(MAX_HOPS + 1))


@cache
def _subset_table(size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each bit mask over `size` letters: how many letters it holds [mask], and its k-th letter [mask, k]."""
    held = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
    return held.sum(axis=1), np.argsort(-held, axis=1, kind="stable")


def _balanced(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` numbers below `size`, each as often as any other up to one, shuffled."""
    drawn = np.concatenate([np.tile(np.arange(size), count // size), rng.permutation(size)[: count % size]])
    return rng.permutation(drawn)


def _hops_of(count: int, hops, rng: np.random.Generator) -> np.ndarray:
    """Hop counts [prompt] from what the caller asked for."""
    if hops is None:
        return _balanced(MAX_HOPS, count, rng) + 1
    wanted = np.asarray(hops)
    if wanted.dtype.kind not in "iu" or not np.all((wanted >= 1) & (wanted <= MAX_HOPS)):
        raise ValueError(f"hops must be 1 to {MAX_HOPS} (one whole number or one per sequence) or None, got {hops!r}")
    if wanted.shape not in ((), (count,)):
        raise ValueError(f"hops must be one number or {count} numbers, one per sequence, got shape {wanted.shape}")
    return np.broadcast_to(wanted, (count,)).astype(np.int64)


@dataclass(frozen=True)
class Task(ABC):
    """What both tasks share: balanced factors, splits, readable words, the solver's interface.

    Attributes: name; key (keeps the random streams of tasks apart); vocabulary (word of each id, id 0 is PAD);
    vocabulary_size (PAD included).
    """

    name: str
    key: int

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def answer_values(self) -> int:
        """How many different answers exist."""

    @abstractmethod
    def follow(self, words: list[str]) -> list[int]:
        """Positions visited from the query to the answer."""

    @abstractmethod
    def _fill(self, hops, position, value, rng, prefix: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [prompt, prefix + 17] and answers [prompt] for given factors. The prefix is drawn after everything else."""

    @property
    def vocabulary_size(self) -> int:
        return len(self.vocabulary)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.vocabulary) if token != PAD}

    def sample(self, count: int, hops, rng: np.random.Generator, prefix: int = 0, prefix_kind: str = "own") -> Batch:
        """Draw `count` sequences.

        hops: 1 to 4, or one number per sequence, or None for all four in equal shares. Within a hop count each pair of answer and
        answer position comes as often as any other (up to one). prefix: tokens put before the target window, >= 0; the last 17
        tokens do not depend on it, so the same generator state gives the same sequences at every length. prefix_kind:
        "own" = like the target window (Number: any letter; Letter: a letter outside the chain with a digit);
        "uniform" = any token of the vocabulary (Letter: whose first letter is outside the chain, or the answer would be ambiguous);
        "repeat" = one token of "own", repeated.
        The paper leaves the distribution of added tokens open (Section 5, Fig. 5B).
        """
        wanted = _hops_of(whole_number("count", count, 1), hops, rng)
        prefix = whole_number("prefix", prefix, 0)
        if prefix_kind not in PREFIX_KINDS:
            raise ValueError(f"prefix_kind must be one of {PREFIX_KINDS}, got {prefix_kind!r}")
        position, value = self._factors(wanted, rng)
        return Batch(*self._fill(wanted, position, value, rng, prefix, prefix_kind), wanted)

    def splits(self, seed: int) -> dict[str, Split]:
        """The 432,000 / 2,400 / 45,600 split of the data set that belongs to `seed` (>= 0).

        All three parts depend on the seed and on the task, and on nothing else: two runs with different seeds share no random stream.
        Each block of 2,400 sequences has a stream of its own, spawned from (seed, task, block number), and no split shares a block
        with another. Equal sequences can still come up by chance; as in the paper, nothing removes them.
        """
        return splits_of(seed, self.key)

    def split(self, name: str, seed: int) -> Batch:
        """All sequences of one split ("train", "validation" or "test"), in shuffled order, without prefix."""
        splits = self.splits(seed)
        if name not in splits:
            raise ValueError(f"split must be one of {tuple(splits)}, got {name!r}")
        part = splits[name]
        rng = np.random.default_rng(part.factor_stream)
        hops = _balanced(MAX_HOPS, part.count, rng) + 1
        position, value = self._factors(hops, rng)
        tokens = np.empty((part.count, LENGTH), dtype=np.int64)
        answers = np.empty(part.count, dtype=np.int64)
        for start, stream in zip(range(0, part.count, BLOCK), part.block_streams):
            rows = slice(start, start + BLOCK)
            tokens[rows], answers[rows] = self._fill(hops[rows], position[rows], value[rows], np.random.default_rng(stream), 0, "own")
        return Batch(tokens, answers, hops)

    def chain(self, tokens_row) -> list[int]:
        """Positions visited from the query to the answer in one sequence [position]."""
        return self.follow(self.decode(self._checked(tokens_row, dimensions=(1,))))

    def solve(self, tokens) -> np.ndarray:
        """Answers [prompt] of tokens [prompt, position], found by following the words one by one. Knows nothing of the generator."""
        checked = self._checked(tokens, dimensions=(2,))
        return np.array([row[self.follow([self.vocabulary[token] for token in row])[-1]] for row in checked.tolist()], dtype=np.int64)

    def decode(self, tokens) -> list[str]:
        """One string for each entry of the first axis: words for [position] or [prompt], sentences for [prompt, position]."""
        array = np.asarray(tokens)
        if array.ndim == 2:
            return [" ".join(self.decode(row)) for row in array]
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"tokens must be whole numbers in one or two dimensions, got {array.dtype} with shape {array.shape}")
        if array.size and not 0 <= array.min() <= array.max() < self.vocabulary_size:
            raise ValueError(f"token ids must be 0 to {self.vocabulary_size - 1}, got {array.min()} to {array.max()}")
        return [self.vocabulary[token] for token in array.tolist()]

    def encode(self, text: str) -> np.ndarray:
        """Token ids int64 [position] of words separated by blanks."""
        words = text.split()
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no word of the {self.name} task; its words are {self.vocabulary[1]} to {self.vocabulary[-1]}")
        return np.array([self._ids[word] for word in words], dtype=np.int64)

    def _factors(self, hops: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Answer position and answer value [prompt], balanced within each hop count."""
        drawn = np.empty(len(hops), dtype=np.int64)
        for wanted in range(1, MAX_HOPS + 1):
            rows = np.flatnonzero(hops == wanted)
            drawn[rows] = _balanced(WINDOW * self.answer_values, len(rows), rng)
        return drawn % WINDOW, drawn // WINDOW

    def _path(self, hops: np.ndarray, position: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions on the chain [prompt, 5]: the query, hops - 1 positions leftwards, then the answer position to the end."""
        table, start = _chain_table()
        row = start[hops - 1] + (rng.random(len(hops)) * (start[hops] - start[hops - 1])).astype(np.int64)
        middle = np.where(table[row] < 0, position[:, None], table[row])
        return np.column_stack([np.full(len(hops), QUERY), middle, position])

    def _checked(self, tokens, dimensions: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim not in dimensions or array.dtype.kind not in "iu":
            raise ValueError(f"tokens must be whole numbers in {dimensions[0]} dimension(s), got {array.dtype} with shape {array.shape}")
        if array.shape[-1] < LENGTH:
            raise ValueError(f"a sequence has at least {LENGTH} tokens, got {array.shape[-1]}")
        if array.size and not 1 <= array.min() <= array.max() < self.vocabulary_size:
            raise ValueError(f"token ids must be 1 to {self.vocabulary_size - 1} (0 is padding), got {array.min()} to {array.max()}")
        return array


@dataclass(frozen=True)
class NumberTask(Task):
    """Integers are pointers: v at position p means "go to p - v". The answer is the letter reached.

    ids 1 to 16 are the integers, then `letters` letters a, b, ..., z, aa, ab, ... Target window: letters drawn uniformly with replacement,
    then the answer is written. Every integer outside the chain points at a position drawn uniformly from all earlier ones of the
    17 (Appendix B).
    """

    letters: int = 120

    def __post_init__(self):
        if not 1 <= self.letters <= 26 + 26**2:
            raise ValueError(f"letters must be between 1 and {26 + 26**2}, names of one or two letters, got {self.letters}")

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        names = list(ascii_lowercase) + ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
        return ("PAD", *map(str, range(1, QUERY + 1)), *names[: self.letters])

    @property
    def answer_values(self) -> int:
        return self.letters

    def follow(self, words: list[str]) -> list[int]:
        return follow_numbers(words)

    def _fill(self, hops, position, value, rng, prefix, kind):
        count, first_letter = len(hops), QUERY + 1
        rows = np.arange(count)
        path = self._path(hops, position, rng)
        answers = first_letter + value
        core = np.empty((count, LENGTH), dtype=np.int64)
        core[:, :WINDOW] = rng.integers(first_letter, first_letter + self.letters, (count, WINDOW), dtype=np.uint16)
        for place in range(WINDOW, QUERY):
            core[:, place] = rng.integers(1, place + 1, count, dtype=np.uint8)
        for step in range(MAX_HOPS):  # steps after the answer write a 0 at the answer position; the answer replaces it
            core[rows, path[:, step]] = path[:, step] - path[:, step + 1]
        core[rows, position] = answers
        low = 1 if kind == "uniform" else first_letter
        added = rng.integers(low, self.vocabulary_size, (count, 1 if kind == "repeat" else prefix), dtype=np.int64)
        return np.hstack([np.broadcast_to(added, (count, prefix)), core]) if prefix else core, answers


@dataclass(frozen=True)
class LetterTask(Task):
    """Words are pairs: the second letter of the query names the first letter of the pair to go to, until a letter+digit pair, the answer.

    With L letters, ids 1 to 8 L are letter+digit (a1, a2, ...), the L * L ids after them letter+letter (aa, ab, ...). The chain uses
    `hops` letters; first letters off the chain come from the other letters, the pool, so each chain letter is the first letter of one
    word only.

    proper=False (released code): second letters off the chain come from the pool as well, and digits are independent.
    proper=True (Definition F.2, Figs. 1 and 3B): a letter keeps one digit within the sequence, and every word resolves. A second letter off
    the chain is any letter, chain letters included; if no earlier word starts with it, a pool letter that does takes its place. That the
    word found is unique holds for the query's chain only, as in Fig. 3B (there "db" finds b2 and be).
    """

    proper: bool = False
    letters: int = 8
    digits: int = 8

    def __post_init__(self):
        if not 2 <= self.letters <= 26 or self.digits < 1:
            raise ValueError(f"letters must be between 2 and 26 and digits >= 1, got {self.letters} and {self.digits}")

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        alphabet = ascii_lowercase[: self.letters]
        pairs = [letter + str(digit) for letter in alphabet for digit in range(1, self.digits + 1)]
        return ("PAD", *pairs, *map("".join, product(alphabet, repeat=2)))

    @property
    def answer_values(self) -> int:
        return self.letters * self.digits

    def follow(self, words: list[str]) -> list[int]:
        return follow_letters(words)

    def _fill(self, hops, position, value, rng, prefix, kind):
        count = len(hops)
        rows = np.arange(count)
        path = self._path(hops, position, rng)
        letter, answer_digit = value // self.digits, value % self.digits
        order = self._order(letter, rng)  # [prompt, letter]: answer letter, chain letters from the answer to the query, then the pool

        left = self._from_pool(order, hops, LENGTH, rng)
        for step in range(1, MAX_HOPS):
            left[rows, path[:, step]] = order[rows, np.maximum(hops - step, 0)]
        left[rows, position] = letter
        own_digit = rng.integers(0, self.digits, (count, self.letters), dtype=np.uint8)  # [prompt, letter], for proper data
        own_digit[rows, letter] = answer_digit
        digit = self._digits(left[:, :WINDOW], own_digit, rng)
        digit[rows, position] = answer_digit
        right = np.empty((count, LENGTH), dtype=np.int64)
        right[:, WINDOW:] = self._resolving(left, order, hops, rng) if self.proper else self._from_pool(order, hops, PRE_TARGET + 1, rng)
        for step in range(MAX_HOPS):  # steps after the answer write into the target window, which has no second letters
            right[rows, path[:, step]] = order[rows, np.maximum(hops - step - 1, 0)]
        core = np.hstack([self._digit_pair(left[:, :WINDOW], digit), self._letter_pair(left[:, WINDOW:], right[:, WINDOW:])])
        answers = self._digit_pair(letter, answer_digit)
        return (np.hstack([self._added(order, hops, own_digit, rng, prefix, kind), core]) if prefix else core), answers

    def _order(self, letter: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """All letters [prompt, letter] in random order, the given one first."""
        rank = rng.random((len(letter), self.letters))
        rank[np.arange(len(letter)), letter] = -1.0
        return np.argsort(rank, axis=1)

    def _digit_pair(self, left: np.ndarray, digit: np.ndarray) -> np.ndarray:
        return 1 + left * self.digits + digit

    def _letter_pair(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return 1 + self.letters * self.digits + left * self.letters + right

    def _from_pool(self, order: np.ndarray, hops: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
        """Letters outside the chain [prompt, width]."""
        drawn = hops[:, None] + (rng.random((len(hops), width)) * (self.letters - hops[:, None])).astype(np.int64)
        return np.take_along_axis(order, drawn, axis=1)

    def _digits(self, left: np.ndarray, own_digit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Digits [prompt, position] beside the letters `left`: the letter's own where data are proper, else independent."""
        if self.proper:
            return np.take_along_axis(own_digit, left, axis=1).astype(np.int64)
        return rng.integers(0, self.digits, left.shape, dtype=np.uint8).astype(np.int64)

    def _resolving(self, left: np.ndarray, order: np.ndarray, hops: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Second letters [prompt, 9] for positions 8 to 16: any letter; one that no earlier word starts with gives way to a pool letter."""
        held, nth = _subset_table(self.letters)
        bits = np.left_shift(1, left)
        seen = np.bitwise_or.accumulate(bits, axis=1)[:, WINDOW - 1 : QUERY]  # letters before positions 8, ..., 16, as a bit mask
        pool = (np.left_shift(1, order) * (np.arange(self.letters) >= hops[:, None])).sum(axis=1)
        found = seen & pool[:, None]  # never empty: seven words of the target window start with pool letters
        instead = nth[found, (rng.random(seen.shape) * held[found]).astype(np.int64)]
        drawn = rng.integers(0, self.letters, seen.shape, dtype=np.uint8).astype(np.int64)
        return np.where(np.right_shift(seen, drawn) & 1, drawn, instead)

    def _added(self, order, hops, own_digit, rng, prefix: int, kind: str) -> np.ndarray:
        """Prefix tokens [prompt, prefix]. No first letter lies on the chain: the answer stays unique."""
        width = 1 if kind == "repeat" else prefix
        left = self._from_pool(order, hops, width, rng)
        tokens = self._digit_pair(left, self._digits(left, own_digit, rng))
        if kind == "uniform":
            second = rng.integers(0, self.digits + self.letters, left.shape)
            tokens = np.where(second < self.digits, tokens, self._letter_pair(left, second - self.digits))
        return np.broadcast_to(tokens, (len(hops), prefix))


NUMBER = NumberTask("number", key=1)
LETTER = LetterTask("letter", key=2)
LETTER_PROPER = LetterTask("letter_proper", key=3, proper=True)
TASKS = {task.name: task for task in (NUMBER, LETTER, LETTER_PROPER)}
