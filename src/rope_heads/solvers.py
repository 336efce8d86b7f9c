"""Ways to answer a sequence without a model: follow the words one by one (always right), or guess without hopping.

The followers are the reference solver of `tasks`: they read words and know nothing of the generator. The guesses measure how far one gets
in the Letter task by counting letters alone; the paper does not consider this.
"""

import numpy as np

WINDOW_FROM_END = slice(-17, -9)  # the target window, whatever stands before it


def follow_numbers(words: list[str]) -> list[int]:
    """Positions visited in a Number sequence, query first, answer last. Integer v at position p means: go to p - v.

    Works on readable words of any length. Raises ValueError when a pointer leaves the sequence.
    """
    position = len(words) - 1
    visited = [position]
    while words[position].isdigit():
        pointer = int(words[position])
        if not 1 <= pointer <= position:
            raise ValueError(f"pointer at position {position} must be 1 to {position}, got {pointer}: it leaves the sequence")
        position -= pointer
        visited.append(position)
    return visited


def follow_letters(words: list[str]) -> list[int]:
    """Positions visited in a Letter sequence, query first, answer last.

    A letter+letter word points at the earlier word whose first letter is its second letter (equal duplicates: the nearest one).
    Raises ValueError when there is none, or when different words compete: then the sequence has no answer.
    """
    position = len(words) - 1
    visited = [position]
    while not words[position][1].isdigit():
        letter = words[position][1]
        matches = [earlier for earlier in range(position) if words[earlier][0] == letter]
        found = sorted({words[earlier] for earlier in matches})
        if len(found) != 1:
            raise ValueError(f"'{words[position]}' at position {position} must match one earlier word starting with {letter!r}, got {found}")
        position = matches[-1]
        visited.append(position)
    return visited


def letters_of(task, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second letter of each token of a Letter task, 0 to letters - 1; -1 stands for a digit. Shapes as `tokens`."""
    pairs = task.letters * task.digits  # ids 1 to `pairs` are letter+digit, the others letter+letter
    first = np.where(tokens <= pairs, (tokens - 1) // task.digits, (tokens - 1 - pairs) // task.letters)
    return first, np.where(tokens <= pairs, -1, (tokens - 1 - pairs) % task.letters)


def letter_counts(task, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each letter is a first and a second letter [prompt, letter] in Letter sequences, query included."""
    first, second = letters_of(task, tokens)
    rows = np.arange(len(tokens))[:, None] * task.letters
    counts = [np.bincount((rows + letters)[letters >= 0], minlength=len(tokens) * task.letters) for letters in (first, second)]
    return tuple(count.reshape(len(tokens), task.letters) for count in counts)


def counting_candidates(task, tokens: np.ndarray, second_once: bool = False) -> np.ndarray:
    """Which words could be the answer, by counting alone [prompt, position].

    A letter+digit word whose letter is a first letter once in the whole sequence; with `second_once`, also a second letter once.
    """
    first, second = letters_of(task, tokens)
    as_first, as_second = letter_counts(task, tokens)
    candidates = (second < 0) & (np.take_along_axis(as_first, first, axis=1) == 1)
    return candidates & (np.take_along_axis(as_second, first, axis=1) == 1) if second_once else candidates


def guess_from_window(task, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Any word of the target window, each with equal probability [prompt]."""
    window = tokens[:, WINDOW_FROM_END]
    return window[np.arange(len(window)), rng.integers(0, window.shape[1], len(window))]


def guess_by_counting(task, tokens: np.ndarray, rng: np.random.Generator, second_once: bool = False) -> np.ndarray:
    """Any of the `counting_candidates`, each with equal probability; any word of the target window if there is none [prompt]."""
    candidates = counting_candidates(task, tokens, second_once)
    chosen = np.argmax(candidates * (1 - rng.random(candidates.shape)), axis=1)
    guessed = np.take_along_axis(tokens, chosen[:, None], axis=1)[:, 0]
    return np.where(candidates.any(axis=1), guessed, guess_from_window(task, tokens, rng))


def guess_after_one_hop(task, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The word one hop from the query if it is an answer, else any word of the target window [prompt]."""
    chains = [task.chain(row) for row in tokens]
    landed = tokens[np.arange(len(tokens)), [visited[1] for visited in chains]]
    return np.where([len(visited) == 2 for visited in chains], landed, guess_from_window(task, tokens, rng))
