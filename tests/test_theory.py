import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from rope_heads import solvers, theory
from rope_heads.rope import plane_angles
from rope_heads.tasks import LETTER, LETTER_PROPER, NUMBER, LetterTask, NumberTask

ROPE = plane_angles(64).numpy()
SETTINGS = [([0.8], [1.0]), ([1.3, 0.21], [0.7, 0.3]), ([2.0, 1.0, 0.05], [0.5, 1.5, 0.25]), ([2 * np.pi / 3], [2.0])]


def number_inputs(n, letters=2):
    """Every sequence of n tokens over `letters` letters whose pointers stay inside; integers are ids 1 to n - 1 at least."""
    return np.array(list(itertools.product(*[[*range(1, j + 1), *range(n, n + letters)] for j in range(n)])))  # integers = n - 1


def letter_inputs(n, letters, digits=1):
    return np.array(list(itertools.product(range(1, letters * (letters + digits) + 1), repeat=n)))


def logits_of(model, tokens):
    """Unscaled logits of the last query, [prompt, key]."""
    head = model.layers[0]
    return head.logits(model.embed(tokens), rows=1)[:, 0, 0].numpy() / head.scale


# ---- the functions


def test_index_and_retrieval_on_words():
    words = {1: "1", 2: "2", 3: "3", 4: "A", 5: "B"}
    result = theory.index(np.array([[4, 1, 1, 3, 2, 3, 5, 1]]), 3)  # A 1 1 3 2 3 B 1: the second 1, the 2 and the last 3 point at integers
    assert [words[t] for t in result[0]] == "A A 1 A 2 3 B B".split()
    assert theory.index(np.array([[2, 4]]), 3).tolist() == [[2, 4]]  # a pointer that leaves the sequence
    task = LetterTask("3 letters", key=91, letters=3, digits=2)
    tokens = task.encode("a1 b2 ca ab bb cc ca b1 bc")[None]
    result, defined = theory.retrieval(tokens, 3, 2)
    assert task.decode(result[0]) == "a1 b2 a1 b2 b2 ca a1 b1 ca".split()
    assert defined[0].tolist() == [True] * 4 + [False] * 5  # bb and cc name themselves; a1/ab, b2/bb, ca/cc compete
    result, defined = theory.retrieval(tokens, 3, 2, last=True)
    assert task.decode(result[0]) == "a1 b2 a1 b2 b2 ca ab b1 ca".split()
    assert defined[0].tolist() == [True] * 4 + [False] * 2 + [True] * 3


def test_index_and_retrieval_agree_with_the_solvers_hop_by_hop():
    for task, step in ((NUMBER, lambda t: theory.index(t, 16)), (LETTER, lambda t: theory.retrieval(t, 8, 8)[0]),
                       (LETTER_PROPER, lambda t: theory.retrieval(t, 8, 8)[0])):  # fmt: skip
        batch = task.sample(200, None, np.random.default_rng(3))
        tokens = batch.tokens
        for hop in range(1, 5):
            tokens = step(tokens)
            assert np.array_equal(tokens[batch.hops <= hop, -1], batch.answers[batch.hops <= hop])
            assert not (tokens[batch.hops > hop, -1] == batch.answers[batch.hops > hop]).any()


def test_letters_in_matches_the_task_and_the_solver_module():
    ids = np.arange(1, LETTER.vocabulary_size)[None]
    ours, theirs = theory.letters_in(ids, 8, 8), solvers.letters_of(LETTER, ids)
    assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])


# ---- gaps: against the built models' logits over all inputs, and against direct sums


def test_kernel_is_the_sum_of_cosines_up_to_a_million():
    d = np.array([0, 1, 2, 999, 1000, 1001, 54_321, 999_999])
    weights, phases = np.random.default_rng(0).random(64), np.linspace(0, 3, 64)
    expected = (weights * np.cos(phases + d[:, None] * ROPE)).sum(axis=1)
    assert np.allclose(theory.kernel(ROPE, weights, 1_000_000, phases)[d], expected, atol=1e-9, rtol=0)
    assert len(theory.kernel([0.1], [1.0], 7)) == 7


@pytest.mark.parametrize("angles, weights", SETTINGS)
def test_index_gap_is_the_extreme_over_all_inputs(angles, weights):
    smallest, largest = (theory.index_gap(angles, weights, 6, over) for over in ("min", "max"))
    assert np.isinf(smallest[:2]).all() and np.isinf(largest[:2]).all()
    for n in range(2, 7):
        inputs = number_inputs(n)
        logits = logits_of(theory.build_index(2, n - 1, angles, weights, sharpness=7.0), inputs)
        pointer = np.where(inputs[:, -1] < n, inputs[:, -1], 0)
        right = logits[np.arange(len(inputs)), n - 1 - pointer]
        others = logits.copy()
        others[np.arange(len(inputs)), n - 1 - pointer] = -np.inf
        gaps = right - others.max(axis=1)
        assert smallest[n] == pytest.approx(gaps.min(), abs=1e-12) and largest[n] == pytest.approx(gaps.max(), abs=1e-12)


@pytest.mark.parametrize("letters, angles, weights, turns, centre", [
    (2, [0.3], [1.0], None, 0.0), (3, [0.1], [1.0], None, 0.0), (3, [0.9], [0.5], None, 1.5), (3, [0.0, 0.7], [0.6, 0.4], [1, 0], 0.0),
    (2, [0.4, 1.1], [0.3, 0.9], [1, 1], 0.7), (4, [0.5], [1.0], [2], 0.0),
])  # fmt: skip
def test_retrieval_gap_is_the_extreme_over_all_inputs(letters, angles, weights, turns, centre):
    turns = None if turns is None else 2 * np.pi / letters * np.array(turns)
    given = (angles, weights, 4, letters, turns, centre)
    smallest, largest = theory.retrieval_gap(*given), theory.retrieval_gap(*given, over="max")
    model = theory.build_retrieval(letters, 1, angles, weights, sharpness=3.0, turns=turns, centre=centre)
    assert np.isinf(smallest[:2]).all()
    for n in range(2, 5 if letters < 4 else 4):
        inputs = letter_inputs(n, letters)
        answers, defined = theory.retrieval(inputs, letters, 1)
        right = inputs == answers[:, -1:]
        once = defined[:, -1] & (right.sum(axis=1) == 1)
        logits, right = logits_of(model, inputs[once]), right[once]
        gaps = np.where(right, logits, -np.inf).max(axis=1) - np.where(right, -np.inf, logits).max(axis=1)
        assert smallest[n] == pytest.approx(gaps.min(), abs=1e-12) and largest[n] == pytest.approx(gaps.max(), abs=1e-12), n


def test_copies_of_the_right_word_only_help():
    inputs = letter_inputs(4, 3)
    answers, defined = theory.retrieval(inputs, 3, 1)
    model = theory.build_retrieval(3, 1, [0.1], sharpness=1.0)
    right, ok = inputs == answers[:, -1:], defined[:, -1]
    logits = logits_of(model, inputs)
    with np.errstate(invalid="ignore"):
        gaps = np.where(right, logits, -np.inf).max(axis=1) - np.where(right, -np.inf, logits).max(axis=1)
    assert gaps[ok].min() == pytest.approx(theory.retrieval_gap([0.1], [1.0], 4, 3)[4], abs=1e-12)


@pytest.mark.parametrize("theta, letters", [(0.0027, 8), (0.0115, 8), (0.0866, 8), (0.2, 2), (0.05, 3)])
def test_retrieval_gap_closed_form_and_where_it_ends(theta, letters):
    omega = 2 * np.pi / letters
    n = np.arange(2, int(omega / theta) + 2)
    gap = theory.retrieval_gap([theta], [1.0], n[-1], letters)[2:]
    first = np.cos((n - 2) * theta) - np.cos(omega - (n - 1) * theta)
    second = np.cos((n - 1) * theta) - np.cos(omega - (n - 2) * theta)
    assert np.allclose(gap, np.minimum(first, second), atol=1e-12, rtol=0)
    inside = (n - 1) * theta <= omega / 2
    assert np.allclose(gap[inside], first[inside], atol=1e-12, rtol=0)
    assert np.array_equal(gap > 1e-12, n < 1.5 + omega / (2 * theta) - 1e-9)


def test_best_single_angle_meets_the_bounds():
    for n in (2, 3, 10, 77):
        assert theory.index_gap([2 * np.pi / n], [1.0], n)[n] == pytest.approx(1 - np.cos(2 * np.pi / n), abs=1e-12)
        best = 2 * np.pi / (n // 2 + 1)
        assert theory.index_gap([best], [1.0], n, over="max")[n] == pytest.approx(1 - np.cos(best), abs=1e-12)


def test_best_weights_solve_the_whole_programme():
    weights, gap = theory.best_weights(ROPE, 400)
    rows = np.c_[np.cos(np.outer(np.arange(1, 400), ROPE)) - 1, np.ones(399)]
    whole = linprog(np.r_[np.zeros(64), -1.0], A_ub=rows, b_ub=np.zeros(399), A_eq=[np.r_[np.ones(64), 0.0]], b_eq=[1.0],
                    bounds=[(0, None)] * 64 + [(None, None)], method="highs")  # fmt: skip
    assert gap == pytest.approx(-whole.fun, abs=1e-8) and weights.sum() == pytest.approx(1) and (weights >= 0).all()
    assert gap == pytest.approx(theory.index_gap(ROPE, weights, 400)[400], abs=1e-12)
    assert gap > 5 * theory.index_gap(ROPE, np.full(64, 1 / 64), 400)[400]


# ---- softmax: the exact length at which a head fails


@pytest.mark.parametrize("angles, weights, sharpness", [([0.8], [1.0], 2.0), ([0.8], [1.0], 1.2), ([1.0, 0.3], [0.5, 0.5], 1.5)])
def test_index_fails_exactly_where_predicted(angles, weights, sharpness):
    broken, pointer = theory.index_breaks(angles, weights, sharpness, 60)
    assert theory.promised_length(theory.index_gap(angles, weights, 60), sharpness) < broken <= 7
    for n in range(1, broken + 1):
        inputs = number_inputs(n)
        model = theory.build_index(2, max(n - 1, 1), angles, weights, sharpness=sharpness)
        wrong = model.answer(inputs) != theory.index(inputs, n - 1)[:, -1] if n > 1 else np.zeros(1)
        assert wrong.any() == (n == broken)
    assert pointer in inputs[wrong, -1]


@pytest.mark.parametrize("theta, sharpness, letters", [(0.3, 2.0, 2), (0.4, 1.5, 3), (0.0, 0.7, 3), (0.2, 0.6, 2)])
def test_retrieval_fails_exactly_where_predicted(theta, sharpness, letters):
    broken, _, _ = theory.retrieval_breaks([theta], [1.0], sharpness, 60, letters)
    assert theory.promised_length(theory.retrieval_gap([theta], [1.0], 60, letters), sharpness) < broken <= (6 if letters == 2 else 4)
    model = theory.build_retrieval(letters, 1, [theta], sharpness=sharpness)
    for n in range(1, broken + 1):
        inputs = letter_inputs(n, letters)
        answers, defined = theory.retrieval(inputs, letters, 1)
        ok = defined[:, -1]
        assert (model.answer(inputs[ok]) != answers[ok, -1]).any() == (n == broken)


def test_failures_that_do_not_come_and_promises():
    assert theory.index_breaks(ROPE, np.ones(64), 10.0, 300) is None
    assert theory.retrieval_breaks([0.0], [1.0], 100.0, 300, 8) is None
    gap = np.r_[np.inf, np.inf, np.full(99, 0.5)]
    assert theory.promised_length(gap, 2 * np.log(20.5)) == 21  # ln(n - 1) < ln(20.5) up to n = 21
    assert theory.promised_length(gap, 1e6) == 100
    assert theory.sharpness_needed([0.5, 0.0, -1.0], [11, 5, 5]).tolist() == [2 * np.log(10), np.inf, np.inf]


# ---- constructions


@pytest.mark.parametrize("n", [1, 3, 6])
def test_index_head_equals_index_on_all_inputs(n):
    inputs = number_inputs(n)
    for angles in ([0.8], [1.0, 0.1, 0.01]):
        model = theory.build_index(2, max(n - 1, 1), angles, sharpness=200.0)
        assert np.array_equal(model.answer(inputs, last=False), theory.index(inputs, n - 1) if n > 1 else inputs)


@pytest.mark.parametrize("letters, digits, n", [(2, 2, 4), (3, 1, 4)])
def test_retrieval_head_equals_retrieval_on_all_inputs(letters, digits, n):
    inputs = letter_inputs(n, letters, digits)
    for last, model in ((False, theory.build_retrieval(letters, digits, [0.05], sharpness=300.0)),
                        (True, theory.build_retrieval(letters, digits, [0.0, 0.5], [0.7, 0.3], turns=[2 * np.pi / letters, 0], sharpness=300.0))):
        answers, defined = theory.retrieval(inputs, letters, digits, last)
        assert defined[:, -1].sum() > len(inputs) / 5
        assert np.array_equal(model.answer(inputs[defined[:, -1]]), answers[defined[:, -1], -1])


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_stacks_solve_the_tasks_untrained(hops):
    by_place = theory.build_index(120, 16, ROPE, np.ones(64), sharpness=10.0, layers=4, reflexive=8)
    by_name = theory.build_retrieval(8, 8, [0.0], sharpness=100.0, layers=4, reflexive=8)
    for task, model in ((NUMBER, by_place), (LETTER, by_name), (LETTER_PROPER, by_name)):
        assert len(model.layers) == 12
        for count, prefix in ((60, 0), (3, 400)):
            tokens, answers, _ = task.sample(count, hops, np.random.default_rng(hops), prefix)
            assert np.array_equal(model.answer(tokens), answers)
            assert np.array_equal(task.solve(tokens), answers)


def test_a_stack_of_too_few_layers_fails_where_it_must():
    model = theory.build_index(120, 16, ROPE, np.ones(64), sharpness=10.0, layers=2)
    for hops, right in ((2, True), (3, False)):
        tokens, answers, _ = NUMBER.sample(30, hops, np.random.default_rng(0))
        assert (model.answer(tokens) == answers).all() == right


def test_last_row_alone_is_the_last_row():
    model = theory.build_index(120, 16, ROPE, np.ones(64), sharpness=10.0, layers=3)
    tokens = torch.from_numpy(NUMBER.sample(3, 3, np.random.default_rng(0), prefix=80).tokens)
    assert torch.allclose(model(tokens, last=True)[:, 0], model(tokens)[:, -1], atol=1e-9)


def test_one_task_object_and_the_builders_share_their_ids():
    task = NumberTask("5 letters", key=92, letters=5)
    tokens = task.encode("a b c d e a b c 1 9 3 10 5 2 16 4 8")[None]
    model = theory.build_index(5, 16, ROPE, np.ones(64), sharpness=10.0, layers=4)
    assert np.array_equal(model.answer(tokens), task.solve(tokens))


# ---- heads that cannot


def test_copying_margin():
    pair = np.array([[1, 2, 9], [2, 1, 9]])
    assert theory.copying_margin(pair[:1], [1]) > 0.9  # one sequence: look at the first slot
    assert theory.copying_margin(pair, [1, 2]) > 0.9  # the answer stands in the same slot
    assert theory.copying_margin(pair, [1, 1]) <= 1e-9  # the answer moves, a fixed pattern cannot


def test_errors_name_the_value_and_the_way_out():
    with pytest.raises(ValueError, match="weights must have one entry per angle"):
        theory.index_gap([0.1, 0.2], [1.0], 5)
    with pytest.raises(ValueError, match="over must be one of"):
        theory.index_gap([0.1], [1.0], 5, over="mean")
    with pytest.raises(ValueError, match="over must be one of"):
        theory.retrieval_gap([0.1], [1.0], 5, 3, over="mean")
    with pytest.raises(ValueError, match="length must be >= 1, got 0"):
        theory.kernel([0.1], [1.0], 0)
    with pytest.raises(ValueError, match="letters must be >= 2, got 1"):
        theory.retrieval_gap([0.1], [1.0], 5, 1)
    with pytest.raises(ValueError, match="turns must be one multiple"):
        theory.build_retrieval(3, 1, [0.1], sharpness=1.0, turns=[0.5])
    with pytest.raises(ValueError, match="weights must be >= 0, one per angle"):
        theory.build_index(2, 2, [0.1], [-1.0], sharpness=1.0)
    for call in (lambda x: theory.kernel([x], [1.0], 5), lambda x: theory.kernel([0.1], [x], 5), lambda x: theory.index_gap([x], [1.0], 5)):
        with pytest.raises(ValueError, match="must be finite"):
            call(float("nan"))
    gap = theory.index_gap([0.1], [1.0], 5)
    for bad in (float("nan"), -1.0):
        for call in (lambda s: theory.promised_length(gap, s), lambda s: theory.index_breaks([0.1], [1.0], s, 5),
                     lambda s: theory.retrieval_breaks([0.1], [1.0], s, 5, 3)):  # fmt: skip
            with pytest.raises(ValueError, match="sharpness must be >= 0"):
                call(bad)
    with pytest.raises(ValueError, match="fp64 cannot tell beyond"):
        theory.retrieval_breaks([0.1], [1.0], 1e4, 50, 8)
