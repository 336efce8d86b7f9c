"""Values of claims from small tables written by hand; the expected numbers are worked out from the ledger's words."""

import math

import pandas as pd
import pytest

from rope_heads import head_statistics, verdicts
from rope_heads.claims import read_ledger

STEPS = [0, 50, 100, 150]


def heads(layers: dict, task="number", seed=0, recipe="paper") -> pd.DataFrame:
    """layers: {layer: (scores by step as (positional, symbolic) pairs, entropy, weighted id)}."""
    rows = [(recipe, task, seed, step, layer, 0, p, s, entropy, identity)
            for layer, (scores, entropy, identity) in layers.items() for step, (p, s) in zip(STEPS, scores, strict=True)]  # fmt: skip
    return pd.DataFrame(rows, columns=["recipe", "task", "seed", "step", "layer", "head", "positional", "symbolic", "swappable_entropy", "weighted_id"])


POSITIONAL = [(1, 1), (0.9, 0.3), (0.96, 0.1), (0.97, 0.04)]  # pure at .2 and at .1 from step 100 on, at .05 from 150 on
SYMBOLIC = [(0.98, 0.99), (0.1, 0.9), (0.12, 0.95), (0.08, 0.99)]  # pure at .2 from 50 on, at .1 from 150 on, never at .05
MIXED = [(0.97, 1), (0.5, 0.6), (0.5, 0.6), (0.85, 0.82)]


@pytest.fixture
def number():
    return heads({0: (MIXED, 0.5, 20.0), 1: (SYMBOLIC, 0.5, 40.0), 2: (POSITIONAL, 0.5, 2.5), 3: (SYMBOLIC, 0.95, 38.0), 4: (POSITIONAL, 0.5, 1.5)})


@pytest.fixture
def both(number):
    letter = heads({0: (MIXED, 0.95, 30.0), 1: (SYMBOLIC, 0.5, 41.0), 2: (SYMBOLIC, 0.5, 35.0), 3: (MIXED, 0.5, 31.0)}, "letter")
    return pd.concat((number, letter, heads({0: (SYMBOLIC, 0.5, 33.0), 1: (MIXED, 0.5, 3.0)}, "letter_proper")))


def needed(claim_id):
    return verdicts._needed(read_ledger().claims[claim_id])


def test_heads_of_both_tasks(both):
    values = head_statistics.heads_number(both)
    assert values == {"positional": {"0": 2}, "symbolic": {"0": 2}, "misplaced": {"0": 3}, "layer0": {"0": 0.85}}  # 1 below 2 and 4, 3 below 4
    assert head_statistics.heads_letter(both) == {"symbolic": {"0": 2}, "positional": {"0": 0}, "symbolic_proper": {"0": 1}}
    assert set(values) == needed("P1-heads-number") and set(head_statistics.heads_letter(both)) == needed("P1-heads-letter")


def test_untrained_and_exclusion(both):
    assert head_statistics.untrained(both) == {"number": {"0": 0.97}, "letter": {"0": 0.97}}
    assert head_statistics.exclusion(both) == {"number": {"0": 1}, "letter": {"0": 1}}  # letter's layer 0 is near uniform
    assert set(head_statistics.untrained(both)) == needed("P1-untrained") and set(head_statistics.exclusion(both)) == needed("P1-exclusion")


def accuracy(curve, task, seed=0, recipe="paper"):
    rows = [(recipe, task, seed, step, hops, value, 500) for step, values in zip(STEPS, curve, strict=True) for hops, value in enumerate(values, 1)]
    return pd.DataFrame(rows, columns=["recipe", "task", "seed", "step", "hops", "accuracy", "tests"])


def test_lag_between_purity_and_accuracy(both):
    """t_max needs the mean over hop counts within .001 of the mean of the last ten evaluations (here all four)."""
    curve = [(0.1, 0.1), (0.4, 0.4), (1.0, 0.5), (1.0, 1.0)]  # means .1, .4, .75, 1: mean .5625, reached at step 100
    values = head_statistics.purity_coincides(pd.concat((accuracy(curve, "number"), accuracy(curve, "letter"))), both)
    assert values["number_020"] == {"0": 100 - 100} and values["number_010"] == {"0": 100 - 150} and values["number_005"] == {"0": -math.inf}
    assert values["letter_020"] == {"0": 100 - 50} and values["letter_010"] == {"0": 100 - 150} and values["letter_005"] == {"0": -math.inf}
    assert values["layers"] == {"0": 2} and set(values) == needed("P1-purity-coincides")


def test_no_pure_layer_is_never():
    run = heads({0: (POSITIONAL, 0.5, 1.0), 1: (MIXED, 0.5, 1.0)})
    assert head_statistics.purity_step(run, 0.2) == math.inf


def test_purity_is_asked_of_good_runs_only(both):
    runs = pd.concat([frame.assign(recipe="fast", seed=seed) for seed in (0, 1) for frame in (both,)])
    tests = pd.DataFrame([("fast", task, seed, 150, planes, hops, 100 * hops, value) for task in ("number", "letter") for seed in (0, 1) for planes, hops, value in
                          [("none", 1, 1.0), ("none", 2, 0.9 if (task, seed) == ("number", 1) else 1.0), ("1-8", 1, 0.0)]],
                         columns=["recipe", "task", "seed", "step", "planes_off", "hops", "tests", "accuracy"])  # fmt: skip
    values = head_statistics.purity_necessary(tests, runs)
    assert values == {"number_pure": {"0": 4}, "letter_pure": {"0": 2, "1": 2}, "number_positional": {"0": 2}}
    assert set(values) == needed("P1-purity-necessary")
    with pytest.raises(ValueError, match="seeds belong to one recipe, got fast, paper"):
        head_statistics.heads_number(pd.concat((runs, both)))


def test_other_shapes_count_heads_of_runs_that_learnt_and_not_the_papers_shape():
    def run(task, seed, kinds, recipe):
        return pd.concat([heads({layer: (kind, 0.5, 1.0)}, task, seed, recipe).assign(head=head) for layer, row in enumerate(kinds) for head, kind in enumerate(row)])

    two = "fast,heads=2,layers=2"
    runs = pd.concat((run("number", 0, [[POSITIONAL, MIXED], [SYMBOLIC, POSITIONAL]], two), run("letter", 0, [[SYMBOLIC, MIXED], [SYMBOLIC, SYMBOLIC]], two),
                      run("letter", 1, [[POSITIONAL, MIXED], [SYMBOLIC, SYMBOLIC]], two), run("letter", 0, [[SYMBOLIC]] * 12, "fast,dropout=0.1"),
                      run("letter", 0, [[POSITIONAL], [SYMBOLIC]], "fast,layers=2")))  # fmt: skip
    learnt, not_learnt = ([(0.1, 0.1)] * 3 + [end] for end in ((1.0, 0.97), (1.0, 0.95)))
    tables = pd.concat([accuracy(not_learnt if (task, seed) == ("letter", 1) else learnt, task, seed, recipe)
                        for recipe, task, seed in runs[["recipe", "task", "seed"]].drop_duplicates().itertuples(index=False)])  # fmt: skip
    values = head_statistics.other_shapes(tables, runs)
    assert values == {"number_positional": {"2 x 2-0": 2}, "letter_positional": {"2 x 1-0": 1, "2 x 2-0": 0}, "letter_symbolic": {"2 x 1-0": 0.5, "2 x 2-0": 0.75}}
    assert set(values) == needed("own-other-shapes")


def test_frequency_of_pure_layers(both):
    values = head_statistics.frequency(both)
    assert values == {"positional": {"0": 2.5}, "number": {"0": 39.0}, "letter": {"0": 38.0}} and set(values) == needed("P1-frequency")
    assert head_statistics.frequency(both[both.layer.isin([0, 1]) | (both.task != "number")])["positional"] == {"0": math.inf}


def test_mechanism_takes_the_reading_that_follows_more():
    rows = [("paper", task, seed, step, reading, follows, lost, 0.9, 0.8)
            for task in ("number", "letter", "letter_proper") for seed in (0, 1)
            for step, reading, follows, lost in [(50, "forward", 1.0, 0.0), (150, "forward", 0.2, 0.3), (150, "backward", 0.2 + 0.1 * seed, 0.7)]]  # fmt: skip
    table = pd.DataFrame(rows, columns=["recipe", "task", "seed", "step", "reading", "follows", "lost", "kept", "ideal"])
    values = head_statistics.mechanism(table, "number")
    assert values["follows"] == {"0": 0.2, "1": pytest.approx(0.3)} and values["lost"] == {"0": 0.3, "1": 0.7} and values["kept"] == {"0": 0.9, "1": 0.9}
    letter = head_statistics.mechanism(table, "letter")
    assert set(values) == needed("P1-mechanism-number") and set(letter) == needed("P1-mechanism-letter")
    assert letter["follows_proper"] == {"0": 0.2, "1": pytest.approx(0.3)}


def test_every_layer_is_scored_under_every_variant(number):
    columns = {name: 0.25 for pair in list(head_statistics.VARIANTS.values())[1:] for name in pair}
    kinds = pd.DataFrame([("paper", "number", 0, step, hops, layer, 0, swaps, 0.1 * hops + 0.2 * (step > 0), 0.5) for step in (0, 150) for hops in (1, 3)
                          for layer in range(5) for swaps in ("window", "across")],
                         columns=["recipe", "task", "seed", "step", "hops", "layer", "head", "swaps", "positional", "symbolic"])  # fmt: skip
    table = head_statistics.score_variants(number.assign(**columns), kinds).set_index(["variant", "layer"])
    assert len(table) == 5 * (len(head_statistics.VARIANTS) + 2) and not table.isna().any(axis=None)
    assert tuple(table.loc[("last token", 2), ["positional", "symbolic"]]) == (0.97, 0.04)
    assert tuple(table.loc[("swaps: across", 4), ["positional", "symbolic"]]) == (pytest.approx(0.4), 0.5)
    assert head_statistics.pure_now([0.9, 0.1, 0.9, 0.5], [0.1, 0.9, 0.9, 0.5]).tolist() == [1, -1, 0, 0]
    assert head_statistics.pure_now(0.81, 0.19) == 1 and head_statistics.pure_now(0.81, 0.19, gamma=0.1) == 0


def test_ablation_stands_beside_the_forbidden_look():
    key = ("paper", "number", 0, 150)
    steps = pd.DataFrame([(*key, reading, hops, k, layer, 0, 0.9, accuracy, 1.0) for reading, hops, k, layer, accuracy in
                          [("forward", 2, 1, 0, 0.7), ("forward", 2, 2, 1, 0.4), ("forward", 2, 3, 2, 1.0), ("backward", 2, 2, 0, 0.95)]],
                         columns=["recipe", "task", "seed", "step", "reading", "hops", "chain_step", "layer", "head", "share", "accuracy", "accuracy_off_chain"])
    forbidden = pd.DataFrame([(*key, 2, name, 1, accuracy) for name, accuracy in [("none", 0.9), ("p0 to p1", 0.1), ("p0 to p2", 0.8), ("p1 to p2", 0.3),
                              ("control: p0 to p1", 0.85), ("control: p0 to p2", 0.9), ("control: p1 to p2", 0.7)]],
                             columns=["recipe", "task", "seed", "step", "hops", "forbidden", "looks", "accuracy"])  # fmt: skip
    found = head_statistics.ablated_and_forbidden(steps, forbidden).set_index(["reading", "chain_step"])
    assert len(found) == 3  # forward step 3 does not exist in a chain of two hops
    assert tuple(found.loc[("forward", 1), ["ablated", "forbidden", "control"]]) == (pytest.approx(0.2), pytest.approx(0.8), pytest.approx(0.05))  # p0 to p1
    assert tuple(found.loc[("forward", 2), ["ablated", "forbidden"]]) == (pytest.approx(0.5), pytest.approx(0.1))  # p0 to p2
    assert tuple(found.loc[("backward", 2), ["ablated", "forbidden"]]) == (pytest.approx(-0.05), pytest.approx(0.6))  # p1 to p2
