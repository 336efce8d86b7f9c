"""Instant checks: one line, right or not yet, never the answer, never an exception."""

import numpy as np
import pytest
import torch

from rope_heads import checks

ANSWER = 0.8125


def said(capsys):
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("value, words", [
    (ANSWER, "right: the gap"),
    (ANSWER + 9e-7, "right: the gap"),
    (torch.tensor(ANSWER, requires_grad=True), "right: the gap"),
    (ANSWER + 1e-5, "not yet: the gap is too large"),
    (-1, "not yet: the gap is too small"),
    (float("nan"), "not yet: the gap is not a number"),
    (..., "not yet: the gap is still to be filled in"),
    (None, "not yet: the gap is still to be filled in"),
    ("much", "not yet: the gap must be a number or an array of numbers, got str"),
    ([ANSWER], "not yet: the gap has shape (1,), expected ()"),
])  # fmt: skip
def test_close_on_numbers(capsys, value, words):
    assert checks.close("the gap", value, ANSWER) is words.startswith("right")
    line = said(capsys)
    assert line == words and str(ANSWER) not in line


def test_close_on_arrays_counts_the_wrong_entries(capsys):
    expected = np.arange(6.0).reshape(2, 3)
    assert checks.close("table", torch.arange(6).reshape(2, 3), expected)
    assert said(capsys) == "right: table"
    assert not checks.close("table", [[0, 1, 2], [3, float("nan"), 6]], expected)
    assert said(capsys) == "not yet: table differs in 2 of 6 entries"
    assert checks.close("table", expected + 0.4, expected, tolerance=0.5)


@pytest.mark.parametrize("value, expected, good", [
    ("b2", "b2", True), ("b1", "b2", False), ([1, 2], (1, 2), True), ([1, 2], [1, 2, 3], False), ([[1], [2, 3]], [[1], [2, 3]], True),
    ([[1], [2, 3]], [[1], [2, 4]], False), (7, 7.0, True), (torch.tensor([1, 2]), np.array([1, 2]), True), (..., 3, False), (None, 3, False),
    ({"a": 1}, {"a": 1}, True), ("7", 7, False),
])  # fmt: skip
def test_equal(capsys, value, expected, good):
    assert checks.equal("answer", value, expected) is good
    assert said(capsys).startswith("right: answer" if good else "not yet: answer is ")


@pytest.mark.parametrize("condition, good", [(True, True), (np.True_, True), (np.array([True, False]), False), (torch.tensor([True]), True), (..., False)])
def test_holds(capsys, condition, good):
    assert checks.holds("all sequences", condition, "leaves some sequences out") is good
    assert said(capsys).startswith("right: all sequences" if good else "not yet: all sequences ")


@pytest.mark.parametrize("value, words", [
    (4, "right: the gap"), (torch.tensor(4.0), "right: the gap"), (4 - 1e-7, "right: the gap"), (5, "right: the gap"),
    (3.9, "not yet: the gap can be larger"), (float("nan"), "not yet: the gap can be larger"), (..., "not yet: the gap is still to be filled in"),
    (None, "not yet: the gap is still to be filled in"),
])  # fmt: skip
def test_largest_finds_its_target_itself(capsys, value, words):
    assert checks.largest("the gap", value, lambda x: torch.tensor(4 - (x - 2) ** 2), range(5)) is words.startswith("right")
    assert said(capsys) == words


@pytest.mark.parametrize("value", [[..., ...], [None], (..., [...])])
def test_a_list_of_open_answers_is_open(capsys, value):
    for check in (checks.close, checks.equal):
        assert not check("next_place", value, [1, 2])
        assert said(capsys) == "not yet: next_place is still to be filled in"
    assert not checks.equal("next_place", [1, ...], [1, 2]) and said(capsys) == "not yet: next_place is something else"
    assert checks.equal("next_place", [], []) and said(capsys) == "right: next_place"


def test_an_open_answer_costs_no_search():
    def never(candidate):
        raise AssertionError

    assert not checks.largest("the gap", ..., never, range(5))
