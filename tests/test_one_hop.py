"""One-hop items, prompts and scoring: against a solver that follows the rule word by word, and cases written by hand."""

from collections import Counter

import pytest

from rope_heads import one_hop

PAIRS = [(task, setting) for setting, tasks in one_hop.SETTINGS.items() for task in tasks]


@pytest.mark.parametrize("task, setting", PAIRS)
@pytest.mark.parametrize("window", [2, 12, 100, 300])
def test_the_answer_is_what_the_rule_reaches(task, setting, window):
    for item in one_hop.items(task, window, 3, setting):
        words = list(item.words)
        if setting == "words":
            words[-1] = str(1 + [one_hop.spelled(n) for n in range(1, 400)].index(words[-1]))
        assert len(words) == window + 1
        assert one_hop.solve(words, task, setting) == item.answer == words[-1 - item.distance]


@pytest.mark.parametrize("setting", ["plain", "near", "commas", "lines"])
def test_the_letter_asked_for_starts_one_word_of_the_window(setting):
    for window in (12, 300):
        for item in one_hop.items("letter", window, 1, setting):
            assert [word[0] for word in item.words[:-1]].count(item.words[-1][1]) == 1


def test_twice_has_two_matching_words_and_the_answer_is_the_nearer_one():
    found = one_hop.items("letter", 24, 0, "twice")
    for item in found:
        matching = [word for word in item.words[:-1] if word[0] == item.words[-1][1]]
        assert len(matching) == (1 if item.place == 0 else 2)
        assert item.other is None if item.place == 0 else matching == [item.other, item.answer] and item.other != item.answer
    assert sum(item.other is not None for item in found) > 30


@pytest.mark.parametrize("task", one_hop.TASKS)
def test_places_are_balanced_over_the_window_and_near_stays_near(task):
    distances = Counter(item.distance for item in one_hop.items(task, 20, 0))
    assert set(distances) == set(range(1, 21)) and max(distances.values()) <= 3
    assert {item.distance for item in one_hop.items(task, 300, 0, "near")} == set(range(1, 13))


def test_forms_of_one_item_share_their_words():
    plain, words, front = (one_hop.items("number", 48, 2, setting) for setting in ("plain", "words", "front"))
    for a, b, c in zip(plain, words, front):
        assert a.words[:-1] == b.words[:-1] == c.words[:-1] and a.place == b.place == c.place
        assert b.words[-1] == one_hop.spelled(a.distance) and c.words[-1] == str(a.place + 1)
    assert [i.words for i in one_hop.items("letter", 48, 2)] == [i.words for i in one_hop.items("letter", 48, 2, "commas")]


def test_data_sets_differ_and_repeat():
    assert one_hop.items("number", 12, 0) == one_hop.items("number", 12, 0)
    seen = {i.words for seed in range(5) for i in one_hop.items("number", 12, seed)}
    assert len(seen) == 200


@pytest.mark.parametrize("task, setting", PAIRS)
def test_a_prompt_holds_the_rule_three_solved_examples_and_the_item(task, setting):
    item = one_hop.items(task, 16, 4, setting)[5]
    chat = one_hop.prompt(item)
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 3 + ["user"]
    separator = {"commas": ", ", "lines": "\n"}.get(setting, " ")
    assert chat[-1]["content"] == separator.join(item.words)
    for question, answer in zip(chat[:6:2], chat[1:6:2]):
        words = question["content"].rpartition("\n\n")[2].split(separator)
        if setting == "words":
            words[-1] = str(1 + [one_hop.spelled(n) for n in range(1, 400)].index(words[-1]))
        assert one_hop.solve(words, task, setting) == answer["content"]
    assert ("n words to the left" in chat[0]["content"]) == (task == "number" and setting != "front")


@pytest.mark.parametrize("n, text", [(1, "one"), (12, "twelve"), (20, "twenty"), (21, "twenty-one"), (100, "one-hundred"), (110, "one-hundred-ten"),
                                     (300, "three-hundred"), (342, "three-hundred-forty-two")])  # fmt: skip
def test_numbers_in_words(n, text):
    assert one_hop.spelled(n) == text
    assert len({one_hop.spelled(k) for k in range(1, 1000)}) == 999


ITEM = one_hop.Item("letter", "twice", 4, 0, 0, ("a4", "b3", "a1", "c2", "fa"), 2, "a4")


@pytest.mark.parametrize("answer, kind", [
    ("a1", "right"), (" a1\n", "right"), ('"a1"', "right"), ("'a1'", "right"), ("`a1`", "right"), ("“a1”", "right"), ("\u00a0a1", "right"),
    ("A1", "outside"), ("a1.", "outside"), ("**a1**", "outside"), ('"a1', "outside"), ("a 1", "several"), ("a1 a1", "several"),
    ("The answer is a1", "several"), ("a1\nbecause", "several"), ("I'm sorry, I can't help with that.", "several"), ("a4", "other"), ("b3", "window"),
    ("c9", "outside"), ("fa", "outside"), ("", "empty"), (" \n", "empty"), ('""', "empty"), ("<script>alert(1)</script>", "outside"),
])  # fmt: skip
def test_scoring_is_exact_but_for_packaging(answer, kind):
    assert one_hop.classify(answer, ITEM) == kind


@pytest.mark.parametrize("arguments, words", [
    (("number", 1, 0), "window must be 2 to 999 words, got 1"),
    (("number", 12, 0, "twice"), "setting twice exists for task letter, got 'number'"),
    (("letter", 12, 0, "sideways"), "setting must be one of plain, near"),
])  # fmt: skip
def test_bad_values_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        one_hop.items(*arguments)
