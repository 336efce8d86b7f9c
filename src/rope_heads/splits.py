"""Which random stream makes which sequence: the 432,000 / 2,400 / 45,600 split of a data set.

The released code gives sequence i the seed `base + i`. Data sets of neighbouring base seeds then share nearly all their sequence seeds: no
choice for runs that should differ. Here streams are spawned (NumPy's SeedSequence), so no two data sets, and no two parts of one, share any.
"""

from dataclasses import dataclass

import numpy as np

SPLIT_SIZES = {"train": 432_000, "validation": 2_400, "test": 45_600}  # 90 / 0.5 / 9.5 %, Appendix B
BLOCK = 2_400  # sequences that share one random stream; divides every part


@dataclass(frozen=True)
class Split:
    """Sequences `first` to `stop - 1` of 480,000, in blocks of 2,400 with one random stream each. `key` keeps tasks apart."""

    name: str
    first: int
    stop: int
    seed: int
    key: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def block_streams(self) -> list[np.random.SeedSequence]:
        """One stream a block. Blocks are numbered through the whole data set, so no two parts share one."""
        blocks = range(self.first // BLOCK, self.stop // BLOCK)
        return [np.random.SeedSequence(self.seed, spawn_key=(self.key, 0, block)) for block in blocks]

    @property
    def factor_stream(self) -> np.random.SeedSequence:
        """The stream that shuffles hops, answers and answer positions over this part."""
        return np.random.SeedSequence(self.seed, spawn_key=(self.key, 1, self.first // BLOCK))


def whole_number(name: str, value, least: int) -> int:
    """`value` as an int, or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        expected = f">= {least}" if isinstance(value, (int, np.integer)) else f"a whole number >= {least}"
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return int(value)


def splits_of(seed: int, key: int) -> dict[str, Split]:
    """The three parts of the data set that belongs to `seed` (>= 0) and a task's key, by name."""
    seed = whole_number("seed", seed, 0)
    stops = np.cumsum(list(SPLIT_SIZES.values())).tolist()
    return {name: Split(name, stop - SPLIT_SIZES[name], stop, seed, key) for name, stop in zip(SPLIT_SIZES, stops)}
