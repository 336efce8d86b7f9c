"""The one-hop Number and Letter tasks in words, for any language model: items, prompts, scoring (P1, Section 3.6 and Appendix H).

The last word of an item is the query, the words before it are the window. Number: the query n says how many places to go left. Letter: the
query's second letter names the first letter of the word to find. The paper's setting is `plain`. The other settings change one thing each:

- near: the answer is one of the 12 words before the query, however long the window: the controlled models' own setting.
- words: distances are written out, "five" for 5 (Number).
- front: n counts from the first word of the window instead of from the query (Number).
- twice: two words of the window start with the letter; the one nearer to the query is the answer (Letter). In `plain` the word looked for
  is often the only one whose first letter occurs once: at 300 words it can be found without reading the query.
- commas, lines: what stands between the words.

The rules are the paper's; wording and examples are this project's.
"""

from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase

import numpy as np

WINDOWS = (12, 16, 24, 32, 48, 64, 80, 100, 150, 200, 300)
DATA_SETS, PER_DATA_SET = 5, 40  # 200 items a cell
LONGEST = 999  # words: the largest number that `spelled` writes out
TASKS = ("number", "letter")
SETTINGS = {"plain": TASKS, "near": TASKS, "commas": TASKS, "lines": TASKS, "words": ("number",), "front": ("number",), "twice": ("letter",)}
NEAR = 12
SEPARATORS = {"commas": (", ", "commas"), "lines": ("\n", "line breaks")}
EXAMPLE_WINDOWS = (8, 9, 10)  # the paper's three examples hold 4 to 10 words
EXAMPLE_DATA_SET = 1_000_003  # seeds the worked examples of the prompts, far from every data set

RULES: dict[str, str] = {
    "number": "The last word is a whole number n. Start at the last word and go n words to the left. The word you reach is the answer.",
    "front": "The last word is a whole number n. Count from the first word, which has number 1. Word number n is the answer.",
    "letter": "The last word is two letters. Take its second letter. Go left from the last word to the only word that starts with this letter. "
    "That word is the answer.",
    "twice": "The last word is two letters. Take its second letter. Go left from the last word to the first word you meet that starts with this "
    "letter. That word is the answer.",
}


@dataclass(frozen=True)
class Item:
    """One question: `words` ends with the query; `place` is the answer's place in the window, from 0; `distance` its distance from the query.

    `other` is a second word that starts with the letter asked for (setting twice), else None.
    """

    task: str
    setting: str
    window: int
    data_set: int
    number: int
    words: tuple[str, ...]
    place: int
    other: str | None = None

    @property
    def answer(self) -> str:
        return self.words[self.place]

    @property
    def distance(self) -> int:
        return self.window - self.place


def check(task: str, setting: str) -> None:
    if setting not in SETTINGS:
        raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {setting!r}")
    if task not in SETTINGS[setting]:
        raise ValueError(f"setting {setting} exists for task {' and '.join(SETTINGS[setting])}, got {task!r}")


def items(task: str, window: int, data_set: int, setting: str = "plain", count: int = PER_DATA_SET) -> list[Item]:
    """`count` items; the data set is the seed. Places are balanced: each stretch of 1 / count of the window holds one answer.

    Raises ValueError on an unknown task or setting, and on a window below 2 or above 999 words.
    """
    check(task, setting)
    if not 2 <= window <= LONGEST:
        raise ValueError(f"window must be 2 to {LONGEST} words, got {window}")
    if data_set < 0 or count < 1:
        raise ValueError(f"data_set must be >= 0 and count >= 1, got {data_set} and {count}")
    draw = {"near": 1, "twice": 2}.get(setting, 0)  # the others put the items of `plain` in another form, so that answers can be paired
    rng = np.random.default_rng([data_set, TASKS.index(task), draw, window])
    reach = min(NEAR, window) if setting == "near" else window
    distances = 1 + np.floor((rng.permutation(count) + rng.random(count)) / count * reach).astype(int)
    make = _number if task == "number" else _letter
    return [make(setting, window, data_set, i, window - int(d), rng) for i, d in enumerate(distances)]


def _number(setting, window, data_set, number, place, rng) -> Item:
    letters = [ascii_lowercase[i] for i in rng.integers(26, size=window)]
    steps = place + 1 if setting == "front" else window - place
    query = spelled(steps) if setting == "words" else str(steps)
    return Item("number", setting, window, data_set, number, (*letters, query), place)


def _letter(setting, window, data_set, number, place, rng) -> Item:
    order = rng.permutation(26)
    wanted, rest = order[0], order[1:]
    digits = rng.integers(1, 10, window)
    first = rest[rng.integers(25, size=window)]
    first[place] = wanted
    other = None
    if setting == "twice" and place > 0:
        second = int(rng.integers(place))
        first[second] = wanted
        digits[second] = 1 + (digits[place] - 1 + rng.integers(1, 9)) % 9  # another digit, so that the two words differ
        other = ascii_lowercase[wanted] + str(digits[second])
    words = [ascii_lowercase[i] + str(d) for i, d in zip(first, digits)]
    query = ascii_lowercase[rest[rng.integers(25)]] + ascii_lowercase[wanted]
    return Item("letter", setting, window, data_set, number, (*words, query), place, other)


UNITS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen",
         "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def spelled(n: int) -> str:
    """1 to 999 as one word: hyphens instead of spaces, because a space separates words ("two-hundred-forty-one")."""
    if not 1 <= n <= 999:
        raise ValueError(f"n must be 1 to 999, got {n}")
    hundreds, rest = divmod(n, 100)
    parts = [UNITS[hundreds], "hundred"] if hundreds else []
    parts += [UNITS[rest]] if rest < 20 else [TENS[rest // 10], UNITS[rest % 10]]
    return "-".join(part for part in parts if part)


def solve(words: list[str], task: str, setting: str = "plain") -> str:
    """Answer by following the rule word by word; independent of how items are made. Digits only, not numbers in words."""
    *window, query = words
    if task == "number":
        return window[int(query) - 1] if setting == "front" else window[-int(query)]
    return next(word for word in reversed(window) if word[0] == query[1])


def prompt(item: Item) -> list[dict[str, str]]:
    """The chat [{"role", "content"}]: the rule, three worked examples as turns of the chat, the item.

    The examples come from the generator that made the item, with a seed of their own. As turns they show a model that the answer stands
    alone; put into one message they leave a small model free to write "The answer is ...".
    """
    rule = RULES[item.setting if item.setting in RULES else item.task]
    joined = SEPARATORS.get(item.setting, (" ", "spaces"))[1]
    chat = [{"role": "user", "content": f"You get rows of words, separated by {joined}. {rule} Write the answer and nothing else.\n\n"}]
    for example in _examples(item.task, item.setting):
        chat[-1]["content"] += row(example)
        chat += [{"role": "assistant", "content": example.answer}, {"role": "user", "content": ""}]
    chat[-1]["content"] = row(item)
    return chat


@cache
def _examples(task: str, setting: str) -> tuple[Item, ...]:
    return tuple(items(task, window, EXAMPLE_DATA_SET, setting, 3)[2] for window in EXAMPLE_WINDOWS)


def row(item: Item) -> str:
    """The item's words as they stand in the prompt."""
    return SEPARATORS.get(item.setting, (" ", ""))[0].join(item.words)


QUOTES = ("'", '"', "`", "“", "‘")
CLOSING = {"“": "”", "‘": "’"}


def bare(answer: str) -> str:
    """The answer without white space around it and without one pair of quotes: packaging, not content. Case and all else count."""
    text = answer.strip()
    if len(text) > 1 and text[0] in QUOTES and text[-1] == CLOSING.get(text[0], text[0]):
        text = text[1:-1].strip()
    return text


def classify(answer: str, item: Item) -> str:
    """`right`, `other` (the second matching word), `window` (another word of it), `outside` (a word that is not there), `several`, `empty`."""
    text = bare(answer)
    if not text:
        return "empty"
    if text == item.answer:
        return "right"
    if len(text.split()) > 1:
        return "several"
    if text == item.other:
        return "other"
    return "window" if text in item.words[:-1] else "outside"
