import math

import numpy as np
import pandas as pd
import pytest

from rope_heads import training_statistics as statistics
from rope_heads.claims import judge, read_ledger
from rope_heads.papers import published_accuracy, published_crossings


def table(task, seed, arrivals, steps=range(0, 1001, 50)):
    """Accuracies that jump from 0 to 1 linearly within one interval, reaching .9 and .5 where the test can work out by hand."""
    return pd.DataFrame([{"recipe": "r", "task": task, "seed": seed, "step": step, "hops": hops, "accuracy": float(step >= arrival)}
                         for hops, arrival in zip((1, 2, 3, 4), arrivals) for step in steps])  # fmt: skip


def test_crossings_are_linear_between_evaluations():
    run = table("number", 0, (200, 400, 600, 800))
    assert statistics.crossing(run, 0.9, 1) == pytest.approx(150 + 0.9 * 50)
    assert statistics.crossing(run, 0.75) == pytest.approx(600)  # the mean over four hop counts reaches .75 with the third
    assert statistics.crossing(run, 0.6) == pytest.approx(550 + 50 * 0.1 / 0.25)


def test_staged_by_hand():
    values = statistics.number_staged(table("number", 3, (200, 400, 600, 800)))
    t1 = 195.0
    assert values == {"spread": {"3": 600 / t1}, "step_12": {"3": 200 / t1}, "step_23": {"3": 200 / t1}, "lag_34": {"3": pytest.approx(200)}}


@pytest.mark.parametrize(("arrivals", "expected"), [
    ((200, 400, math.inf, math.inf), (math.inf, 200 / 195, math.inf, 0.0)),
    ((math.inf,) * 4, (0.0, 0.0, 0.0, 0.0)),
    ((math.inf, 400, 400, 400), (-math.inf, -math.inf, 0.0, 0.0)),
])  # fmt: skip
def test_hops_that_never_arrive(arrivals, expected):
    values = statistics.number_staged(table("number", 0, arrivals))
    assert [column["0"] for column in values.values()] == pytest.approx(expected)
    judge(read_ledger().claims["P1-dynamics-number-staged"], values | {k: {str(s): v["0"] for s in range(8)} for k, v in values.items()})


def test_letter_statistics_by_hand():
    accuracy = pd.concat([table("letter", 1, (100, 200, 200, 300)), table("letter_proper", 1, (100, 100, 100, 100))])
    values = statistics.letter_simultaneous(accuracy)
    assert values["spread90"]["1"] == pytest.approx(200 / 95)
    assert values["spread50"]["1"] == pytest.approx(200 / 75)
    assert values["spread90_proper"] == {"1": 0.0}
    assert statistics.letter_hop1_leads(accuracy) == {"lead50": {"1": pytest.approx(100)}}
    for arrivals in ((math.inf,) * 4, (100, 100, 100, math.inf)):  # what is never learnt is not learnt at once
        assert statistics.letter_simultaneous(table("letter", 1, arrivals))["spread90"] == {"1": math.inf}


def test_final_accuracy_weighs_by_tests_and_takes_the_last_step():
    rows = [("number", 10, "none", 1, 0.9, 100), ("number", 20, "none", 1, 1.0, 300), ("number", 20, "none", 2, 0.8, 100),
            ("number", 20, "1-8", 2, 0.1, 100), ("letter", 20, "none", 1, 0.7, 10), ("letter_proper", 20, "none", 1, 0.6, 10)]  # fmt: skip
    tests = pd.DataFrame(rows, columns=["task", "step", "planes_off", "hops", "accuracy", "tests"]).assign(recipe="paper", seed=5)
    assert statistics.final_accuracy(tests) == {
        "number": {"5": pytest.approx(0.95)}, "letter": {"5": pytest.approx(0.7)}, "proper": {"5": pytest.approx(0.6)}, "worst_hop": {"5": pytest.approx(0.7)}}  # fmt: skip


def test_speed_of_the_papers_own_curves_is_one():
    for task in ("number", "letter"):
        wide = published_accuracy(task)[[f"hop{h}" for h in statistics.HOPS]].set_axis(list(statistics.HOPS), axis=1).rename_axis(columns="hops")
        run = wide.stack().rename("accuracy").reset_index().assign(task=task, seed=0, recipe="published")
        ratio = statistics.speed(run, {task: published_crossings(task).loc["all", 0.9]})[task]["0"]
        assert ratio == pytest.approx(1, abs=0.02)


def test_differences_of_never():
    assert statistics.difference(math.inf, math.inf) == 0 and statistics.difference(math.inf, 5) == math.inf
    assert np.isfinite(statistics.share(5, math.inf))
