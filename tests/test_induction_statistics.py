import math

import numpy as np
import pandas as pd
import pytest

from rope_heads import induction_statistics as toys
from rope_heads.claims import judge, read_ledger

LEDGER = read_ledger()


def course(arm: str, seed: int, prev: list[float], rif: list[float], dir_frac: float = 0.0) -> pd.DataFrame:
    """Two heads of one run, an evaluation every 20 steps: head 1 has the given course, head 0 attends nowhere and keeps a rif of .502."""
    rows = []
    for i, (p, r) in enumerate(zip(prev, rif, strict=True)):
        for head, (attention, imaginary) in enumerate(((0.01, 0.502), (p, r))):
            rows.append({"arm": arm, "seed": seed, "step": 20 * i, "layer": 0, "head": head, "prev": attention, "ind": 0.0, "dir_frac": dir_frac,
                         "d_head": 0.3, "rope_imag_frac": imaginary})  # fmt: skip
    return pd.DataFrame(rows)


def test_onsets_by_hand():
    late = course("RoPE free", 0, [0, 0.1, 0.5, 0.8, 0.8, 0.8], [0.5, 0.5, 0.5, 0.52, 0.5, 0.54])
    early = course("RoPE free", 1, [0, 0.1, 0.1, 0.1, 0.3, 0.6], [0.5, 0.53, 0.53, 0.54, 0.54, 0.54])
    bare = course("RoPE free", 2, [0, 0.9, 0.9, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5, 0.5, 0.504])
    found, without = toys.not_before(pd.concat([late, early, bare]))
    # seed 0: half of .8 is there at step 40; .52 is not above .5 + .02, so the signature comes at step 100 only
    assert found["lag"] == {"0": 60, "1": 20 - 80} and without == [2]
    # two heads: the lower one has percentile .5, the upper 1; seed 0 is below .502 at steps 0 and 20, seed 1 above it at three of four steps
    assert found["no_head_start"] == {"0": 0.5, "1": pytest.approx((0.5 + 3) / 4)}


def test_a_signature_that_is_there_from_the_start_and_a_function_at_step_0():
    found, _ = toys.not_before(course("RoPE free", 0, [0.9, 0.9], [0.54, 0.54]))
    assert found == {"lag": {"0": 0.0}, "no_head_start": {}}


def test_formation_steps_keep_censored_runs_as_never():
    table = pd.DataFrame({"arm": ["learned free", "learned free", "learned sham"], "seed": [1, 0, 0], "formed": [600.0, math.inf, 700.0]})
    assert toys.formation_steps(table, "ape_free", "ape_sham") == {"ape_free": {"0": math.inf, "1": 600.0}, "ape_sham": {"0": 700.0}}


def test_mechanism_takes_the_strongest_head_at_the_end():
    runs = [course("RoPE symmetric", s, [0, 0.9], [0.5, 0.52], dir_frac=0.004) for s in range(5)]
    runs += [course("RoPE phase suppressed", s, [0, 0.8 + s / 100], [0.5, 0.004]) for s in range(6)]
    found = toys.mechanism(pd.concat(runs))
    assert toys.mechanism(pd.concat(runs).iloc[:0]) == {name: {} for name in found}, "an arm may have no runs yet"
    assert found["sym_rif"] == dict.fromkeys("01234", 0.52) and found["im_rif"] == dict.fromkeys("012345", 0.004)
    assert found["previous"] == {str(s): pytest.approx(0.8 + s / 100) for s in range(5)}
    verdict = judge(LEDGER.claims["P2-mechanism"], found | {"peak_offset": {"half": -1}})
    assert verdict.verdict == "holds"


def test_values_are_those_that_the_rules_read():
    rng = np.random.default_rng(0)
    table = pd.DataFrame([{"arm": arm, "seed": seed, "formed": 20.0 * rng.integers(20, 90)} for arm in toys.SHORT.values() for seed in range(5)])
    for name in ("P2-formation-cost", "own-cost-of-symmetry", "own-hard-tying"):
        parts = [part for part in LEDGER.claims[name]["part"] if part["kind"] == "shift"]
        needed = {part[key] for part in parts for key in ("value", "against")}
        values = toys.formation_steps(table, *needed)
        if name == "own-hard-tying":
            values["asymmetry"] = {"random heads": 0.0}
        assert judge(LEDGER.claims[name], values, dict.fromkeys([part["name"] for part in parts], 0.01)).parts
    found, _ = toys.not_before(pd.concat([course("RoPE free", s, [0, 0.2, 0.9], [0.5, 0.5, 0.54]) for s in range(5)]))
    assert judge(LEDGER.claims["P2-not-before"], found).verdict == "holds"
