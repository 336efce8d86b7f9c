"""From frozen accuracy tables to the values of the claims about learning: one function a claim, as the ledger words its statistic.

Tables: `accuracy` (measured while training: recipe, task, seed, step, hops, accuracy) and `tests` (`rope-heads measure`: the whole test split).
Every function returns {value name: {seed: number}}, which is what `verdicts.record` keeps and `claims.judge` judges. t(level, hop) is the first
step at which the accuracy of that hop count reaches the level, linear between evaluations, inf when it never does.
"""

import math

import numpy as np
import pandas as pd

from rope_heads.claims import crossing_step
from rope_heads.head_statistics import Values, at_the_end, by_seed
from rope_heads.tasks import MAX_HOPS

HOPS = range(1, MAX_HOPS + 1)


def crossing(run: pd.DataFrame, level: float, hops: int | None = None) -> float:
    """t(level, hops) of one run, in steps; with `hops` None of the mean over the hop counts, which are equally frequent."""
    chosen = run if hops is None else run[run.hops == hops]
    curve = chosen.groupby("step").accuracy.mean()
    return crossing_step(curve.index, curve, level)


def difference(later: float, earlier: float) -> float:
    """later - earlier, where inf - inf is 0: two levels that are never reached are reached together."""
    return 0.0 if math.isinf(later) and math.isinf(earlier) else later - earlier


def share(steps: float, of: float) -> float:
    """steps / of, for a denominator that may be inf: 0 for a finite difference."""
    return steps / of if math.isfinite(of) else 0.0 if math.isfinite(steps) else steps


def spread(run: pd.DataFrame, level: float) -> float:
    """(latest - earliest)/earliest of t(level, hop) over the four hop counts; inf when one of them never arrives."""
    times = [crossing(run, level, hops) for hops in HOPS]
    return (max(times) - min(times)) / min(times) if math.isfinite(max(times)) else math.inf


def final_accuracy(tests: pd.DataFrame) -> Values:
    """P1-accuracy: accuracy on the whole test split by task, and the worst hop count of the two tasks."""
    whole = at_the_end(tests[tests.planes_off == "none"])
    values = {name: by_seed(whole, task, lambda run: np.average(run.accuracy, weights=run.tests))
              for name, task in (("number", "number"), ("letter", "letter"), ("proper", "letter_proper"))}  # fmt: skip
    worst = [by_seed(whole, task, lambda run: run.accuracy.min()) for task in ("number", "letter")]
    return values | {"worst_hop": {seed: min(low[seed] for low in worst) for seed in worst[0] if seed in worst[1]}}


def number_staged(accuracy: pd.DataFrame) -> Values:
    """P1-dynamics-number-staged."""
    values: Values = {"spread": {}, "step_12": {}, "step_23": {}, "lag_34": {}}
    for seed, run in accuracy[accuracy.task == "number"].groupby("seed"):
        t1, t2, t3, t4 = (crossing(run, 0.9, hops) for hops in HOPS)
        values["spread"][str(seed)] = share(difference(t4, t1), t1)
        values["step_12"][str(seed)] = share(difference(t2, t1), t1)
        values["step_23"][str(seed)] = share(difference(min(t3, t4), t2), t1)
        values["lag_34"][str(seed)] = difference(t4, t3)
    return values


def letter_simultaneous(accuracy: pd.DataFrame) -> Values:
    """P1-dynamics-letter-simultaneous."""
    return {"spread90": by_seed(accuracy, "letter", lambda run: spread(run, 0.9)), "spread50": by_seed(accuracy, "letter", lambda run: spread(run, 0.5)),
            "spread90_proper": by_seed(accuracy, "letter_proper", lambda run: spread(run, 0.9))}  # fmt: skip


def letter_hop1_leads(accuracy: pd.DataFrame) -> Values:
    """own-letter-hop1-leads."""

    def lead(run: pd.DataFrame) -> float:
        first, *others = (crossing(run, 0.5, hops) for hops in HOPS)
        return difference(min(others), first)

    return {"lead50": by_seed(accuracy, "letter", lead)}


def speed(accuracy: pd.DataFrame, published: dict[str, float]) -> Values:
    """P1-dynamics-speed; `published` gives the paper's t(.9, all hop counts) by task."""
    return {task: by_seed(accuracy, task, lambda run, step=step: crossing(run, 0.9) / step) for task, step in published.items()}
