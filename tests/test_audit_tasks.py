import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_heads import solvers
from rope_heads.audit_tasks import ALL_TASKS, LETTER_12, LETTER_12_DEBIASED, NUMBER_64, DebiasedLetterTask, conflicts
from rope_heads.tasks import PREFIX_KINDS, QUERY, TASKS, WINDOW, LetterTask, NumberTask


def counts_of_window(task, tokens):
    """For each word of the target window: how often its letter is a first letter, a second letter, and a first letter in the window [prompt, 8, 3]."""
    first, second = solvers.letters_of(task, tokens)
    window = first[:, -17:-9]
    per_letter = [np.stack([(part == x).sum(axis=1) for x in range(task.letters)], axis=1) for part in (first, second, window)]
    return np.stack([np.take_along_axis(count, window, axis=1) for count in per_letter], axis=-1)


def learnt_from_counts(task, train, test, steps=150):
    """Test accuracy of a small network that scores each word of the window by its counts, beside those of all eight, trained to pick the answer."""
    torch.manual_seed(0)
    nets = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def features(batch):
        counts = torch.tensor(counts_of_window(task, batch.tokens), dtype=torch.float32)  # [prompt, 8, 3]
        spread = torch.cat([counts.mean(1), counts.amin(1), counts.amax(1)], dim=-1)[:, None].expand(-1, WINDOW, -1)
        return torch.cat([counts, spread], dim=-1)

    def target(batch):
        return torch.from_numpy((batch.tokens[:, -17:-9] == batch.answers[:, None]).astype(np.float32))

    x, y = features(train), target(train)
    optimizer = torch.optim.Adam(nets.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = -((y / y.sum(1, keepdim=True)) * nets(x)[..., 0].log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        chosen = nets(features(test))[..., 0].argmax(1)
    return float(target(test)[torch.arange(len(chosen)), chosen].mean())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.one_of(st.none(), st.integers(1, 4)), st.sampled_from([0, 1, 40]), st.sampled_from(PREFIX_KINDS))
def test_solver_agrees_on_the_debiased_task(seed, hops, prefix, kind):
    batch = LETTER_12_DEBIASED.sample(20, hops, np.random.default_rng(seed), prefix, kind)
    assert np.array_equal(LETTER_12_DEBIASED.solve(batch.tokens), batch.answers)
    assert [len(LETTER_12_DEBIASED.chain(row)) - 1 for row in batch.tokens] == batch.hops.tolist()
    counts = counts_of_window(LETTER_12_DEBIASED, batch.tokens)
    assert (counts[..., 0] == 1).all() and (counts[..., 2] == 1).all(), (
        "each letter of the window is a first letter once in the whole input"
    )


@pytest.mark.parametrize("prefix", [0, 50])
def test_counting_is_useless_in_the_debiased_task_and_useful_in_its_twin(prefix):
    rng = np.random.default_rng(0)
    accuracy = {}
    for task in (LETTER_12, LETTER_12_DEBIASED):
        train, test = (task.sample(n, None, rng, prefix) for n in (4_000, 4_000))
        accuracy[task.name] = learnt_from_counts(task, train, test)
    assert accuracy["letter_12"] > 0.65, accuracy
    assert abs(accuracy["letter_12_debiased"] - 1 / 8) < 0.02 + 2.6 * np.sqrt(0.14 * 0.86 / 4_000), accuracy


def test_counting_alone_answers_three_quarters_of_the_twelve_letter_task_whatever_the_hop_count():
    rng = np.random.default_rng(0)
    for hops in (1, 2, 3, 4):
        batch = LETTER_12.sample(1_500, np.full(1_500, hops), rng)
        right = (solvers.guess_by_counting(LETTER_12, batch.tokens, rng, second_once=True) == batch.answers).mean()
        assert abs(right - 0.75) < 0.06, (hops, right)


def test_the_debiased_task_gives_its_chain_away_to_whoever_looks_for_named_words():
    """The known limit: before the query only words of the chain are named, and the named one that names a word of the window names the answer."""
    rng = np.random.default_rng(0)
    for hops in (2, 3, 4):
        for task in (LETTER_12, LETTER_12_DEBIASED):
            batch = task.sample(500, np.full(500, hops), rng)
            first, second = solvers.letters_of(task, batch.tokens)
            window, before = slice(0, WINDOW), slice(WINDOW, QUERY)
            named = (first[:, before, None] == second[:, None, WINDOW:]).any(-1)
            last = named & (second[:, before, None] == first[:, None, window]).any(-1)
            letter = np.take_along_axis(second[:, before], last.argmax(1)[:, None], axis=1)
            said = batch.tokens[np.arange(500), (first[:, window] == letter).argmax(1)]
            right = ((last.sum(1) == 1) & (said == batch.answers)).mean()
            assert (right == 1) == (task is LETTER_12_DEBIASED) and right > 0.05, (task.name, hops, right)
        assert (named.sum(1) == hops - 1).all()


def test_second_letters_name_as_many_words_of_the_window_as_there_is_room_for():
    for hops, named in ((1, 8), (2, 8), (3, 7), (4, 6)):
        batch = LETTER_12_DEBIASED.sample(300, hops, np.random.default_rng(hops))
        counts = counts_of_window(LETTER_12_DEBIASED, batch.tokens)[..., 1]
        assert ((counts > 0).sum(axis=1) == named).all()
        if hops == 1:  # the ninth second letter falls on the answer one time in eight
            at = batch.tokens[:, :WINDOW] == batch.answers[:, None]
            assert 0.06 < (counts[at] == 2).mean() < 0.2


def test_decoys_stand_anywhere():
    """The word that names the answer is found at no place more often than the chain's own placing makes it: one hop, the spare at each place alike."""
    batch = LETTER_12_DEBIASED.sample(8_000, 1, np.random.default_rng(3))
    _, second = solvers.letters_of(LETTER_12_DEBIASED, batch.tokens)
    pre_target = second[:, WINDOW:-1]
    twice = np.array([[(row == x).sum() == 2 for x in row] for row in pre_target])  # the spare's letter, where it doubles another decoy
    share = twice.mean(axis=0)
    assert np.ptp(share) < 0.04, share


def test_factors_stay_balanced():
    batch = LETTER_12_DEBIASED.sample(8 * 96 * 4, None, np.random.default_rng(1))
    position = np.argmax(batch.tokens == batch.answers[:, None], axis=1)
    assert set(zip(batch.hops.tolist(), position.tolist(), batch.answers.tolist())) == {
        (h, p, a) for h in range(1, 5) for p in range(8) for a in range(1, 97)
    }


@pytest.mark.parametrize("task", [LETTER_12, LetterTask("small", key=92)])
@pytest.mark.parametrize("hops", [None, 1, 2, 3, 4])
def test_conflicts_pit_hops_against_counts(task, hops):
    inputs = conflicts(task, 200, hops, np.random.default_rng(5))
    assert np.array_equal(task.solve(inputs.tokens), inputs.answers)
    assert [len(task.chain(row)) - 1 for row in inputs.tokens] == inputs.hops.tolist()
    candidates = solvers.counting_candidates(task, inputs.tokens, second_once=True)
    assert (candidates.sum(axis=1) == 1).all(), "the counting rule points at one word"
    assert np.array_equal(inputs.tokens[np.arange(200), candidates.argmax(axis=1)], inputs.counted)
    assert np.array_equal(solvers.counting_candidates(task, inputs.tokens).sum(axis=1), np.ones(200)), "and so does the weaker rule"
    for wrong in (inputs.counted, inputs.control):
        assert (wrong != inputs.answers).all()
        assert (inputs.tokens[:, :WINDOW] == wrong[:, None]).any(axis=1).all()
    assert (inputs.counted != inputs.control).all()


def test_few_letters_are_refused():
    with pytest.raises(ValueError, match="letters must be >= 12"):
        DebiasedLetterTask("x", key=99, letters=11)
    for task, letters in ((DebiasedLetterTask, 27), (LetterTask, 27), (LetterTask, 1), (NumberTask, 703), (NumberTask, 0)):
        with pytest.raises(ValueError, match=f"letters must be between .*, got {letters}"):
            task("x", key=99, letters=letters)
    with pytest.raises(ValueError, match="at least 8 letters"):
        conflicts(LetterTask("x", key=99, letters=7), 5, None, np.random.default_rng(0))


def test_every_task_has_streams_of_its_own():
    assert len({task.key for task in ALL_TASKS.values()}) == len(ALL_TASKS) and list(ALL_TASKS)[: len(TASKS)] == list(TASKS)
    assert NUMBER_64.answer_values == 64 == TASKS["letter"].answer_values
