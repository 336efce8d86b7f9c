"""Statistics of the claims about long inputs: hand-made tables whose values are known, and the names that the ledger asks for."""

import math
from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rope_heads import length_statistics as s
from rope_heads import theory, verdicts
from rope_heads.claims import read_ledger
from rope_heads.lengths import GRID


def lengths(accuracy, task="number", recipe="paper", seeds=range(8), inputs=None, kind="own", change="none", grid=GRID) -> pd.DataFrame:
    """Rows as `rope-heads lengths` writes them; accuracy(added, seed) for even hop counts, .1 lower and higher for hops 1 and 3."""
    shift = {1: -0.1, 2: 0.0, 3: 0.1, 4: 0.0}
    return pd.DataFrame([{"recipe": recipe, "task": task, "seed": seed, "step": 10, "inputs": inputs or task, "kind": kind, "change": change,
                          "added": k, "hops": h, "accuracy": accuracy(k, seed) + shift[h]} for seed in seeds for k in grid for h in shift])  # fmt: skip


def fall(length):
    """A straight fall from 1 to 0 over `length` added tokens."""
    return lambda added, seed: max(0.0, 1 - added / length)


def test_a_curve_is_the_mean_over_hop_counts_and_breaks_where_it_says():
    table = s.curves(lengths(lambda k, seed: max(0.0, 1 - k / (800 + 200 * seed))), "number")
    assert table.shape == (8, 28) and table.loc[("paper", 0), 400] == pytest.approx(0.5)
    broken = s.break_lengths(table)
    assert broken[("paper", 0)] == pytest.approx(417) and broken[("paper", 7)] == pytest.approx(17 + 1_100)
    assert s.break_lengths(s.curves(lengths(lambda k, seed: 0.7), "number")).tolist() == [5_017.0] * 8


def test_other_inputs_kinds_and_changes_do_not_mix():
    frame = pd.concat([lengths(fall(100)), lengths(fall(200), kind="uniform"), lengths(fall(300), change="sharper"), lengths(fall(400), task="letter")])
    assert s.curves(frame, "number")[50].iloc[0] == pytest.approx(0.5)
    assert s.curves(frame, "number", kind="uniform")[100].iloc[0] == pytest.approx(0.5)
    assert s.curves(frame, "number", change="sharper")[200].iloc[0] == pytest.approx(1 / 3)


def test_to_850_is_the_least_on_the_way_or_between_800_and_900():
    on_the_way = lengths(lambda k, seed: 0.8 if k == 300 else 0.95, task="letter")
    at_the_end = lengths(lambda k, seed: 0.95 if k <= 800 else 0.75, task="letter_proper")
    values = s.letter_to_850(pd.concat([on_the_way, at_the_end]))
    assert values["letter"]["3"] == pytest.approx(0.8) and values["proper"]["3"] == pytest.approx(0.85)
    flat = s.to_850(s.curves(lengths(lambda k, seed: 0.92, task="letter"), "letter"))
    assert flat.tolist() == pytest.approx([0.92] * 8)


def test_number_separation_and_shortcut():
    frame = pd.concat([lengths(fall(1000)), lengths(fall(4000), task="letter"), lengths(fall(2000), task="letter_proper"),
                       lengths(lambda k, seed: 0.9 - k / 2000, task="letter", inputs="letter_proper", grid=[k for k in GRID if k <= 1000])])  # fmt: skip
    assert s.number_breaks(frame)["at_500"]["0"] == pytest.approx(0.5) and s.number_breaks(frame)["at_40"]["0"] == pytest.approx(0.96)
    values = s.separation(frame)
    assert values["letter"]["0"] == pytest.approx(2017) and values["number"]["0"] == pytest.approx(517) and values["proper"]["0"] == pytest.approx(1017)
    assert s.shortcut(frame)["excess"]["5"] == pytest.approx((0.8 - 0.5) - (1.0 - 0.9))


def test_a_task_without_runs_has_no_values_and_can_only_limit_a_claim(tmp_path):
    frame = pd.concat([lengths(fall(1000)), lengths(fall(40_000), task="letter")])
    assert s.curves(frame, "letter_proper").shape == (0, len(GRID))
    values = s.letter_to_850(frame)
    assert values["proper"] == {} and len(values["letter"]) == 8 and s.separation(frame)["proper"] == {}
    kept = verdicts.record("P1-length-letter", values, tmp_path)
    found = verdicts.judge_known(read_ledger(), {"P1-length-letter": kept})["P1-length-letter"]
    assert found.verdict == "holds with a limit" and found.reason == "to 850, proper: no runs so far, the rule needs 5"


def test_the_audit_compares_its_tasks_with_recipe_fast(tmp_path):
    audit = {"recipe": "fast", "seeds": range(5)}
    fast = pd.concat([lengths(fall(1000), **audit), lengths(fall(4000), task="letter", **audit)])
    twelve = pd.concat([lengths(fall(2000), task="letter_12_debiased", **audit), lengths(fall(100), task="letter_12", **audit)])
    curve = [{"recipe": "fast", "task": task, "seed": seed, "step": step, "hops": h, "accuracy": float(step >= 100 + late * h)}
             for task, late in (("letter_12_debiased", 50), ("letter_12", 100)) for seed in range(5) for step in range(0, 500, 50) for h in (1, 2, 3, 4)]  # fmt: skip
    found = s.debiased_letter(pd.DataFrame(curve), twelve, fast)
    assert found["letter_break"]["4"] == pytest.approx(1017) and found["number_break"]["4"] == pytest.approx(517)
    first, last = 50 * 2 + 45, 50 * 5 + 45  # .9 of the way from the evaluation before
    assert found["spread90"]["0"] == pytest.approx((last - first) / first)
    assert s.number_64(lengths(fall(500), task="number_64", **audit), fast) == {"letter": dict.fromkeys("01234", pytest.approx(2017)),
                                                                              "number64": dict.fromkeys("01234", pytest.approx(267))}  # fmt: skip
    for name, values in (("own-debiased-letter", found), ("own-number-64", s.number_64(lengths(fall(500), task="number_64", **audit), fast))):
        assert verdicts.record(name, values, tmp_path)


def gaps(slopes, task, recipe="paper") -> pd.DataFrame:
    """Two performing layers, the lower one ahead by 10 at all lengths, the higher by 2 and less with length; one that performs nothing."""
    rows = []
    for seed, slope in enumerate(slopes):
        for k in GRID:
            for layer, gap, performs in ((0, 10.0, True), (1, 2 - slope * k, True), (5, -50.0, False)):
                rows.append({"recipe": recipe, "task": task, "seed": seed, "added": k, "layer": layer, "head": 0, "hops": layer + 1, "looker": 0,
                             "target": 1, "performs": performs, "prompts": 100, "gap": gap})  # fmt: skip
    return pd.DataFrame(rows)


def test_theory_compares_ranks_within_recipes():
    paper, fast = np.linspace(0.001, 0.01, 8), np.linspace(0.02, 0.05, 5)
    frame = pd.concat([lengths(lambda k, seed, r=r, n=n: max(0.0, 1 - k * (1 + seed) / n), task=task, recipe=r, seeds=range(c))
                       for task in ("number", "letter") for r, n, c in (("paper", 8000, 8), ("fast", 1000, 5))])  # fmt: skip
    found = pd.concat([gaps(values, task, recipe) for task in ("number", "letter") for recipe, values in (("paper", paper), ("fast", fast))])
    heads = pd.DataFrame([{"recipe": r, "task": "letter", "seed": seed, "step": 10, "layer": layer, "head": 0, "weighted_id": plane}
                          for r, c in (("paper", 8), ("fast", 5)) for seed in range(c) for layer, plane in ((0, 42.4), (1, 18.2), (5, 1.0))])  # fmt: skip
    assert s.gap_lengths(found, "number")["paper", 0] == pytest.approx(2017)
    values = s.theory_explains(frame, found, heads)
    assert set(values) == verdicts._needed(read_ledger().claims["P1-theory-explains-length"])
    assert values["number_gap_length"] == values["number_break"] and values["number_break"]["fast-4"] == pytest.approx(1 / 6)
    assert values["number_break"]["paper-7"] == pytest.approx(1 / 9) and values["number_break"]["paper-0"] == pytest.approx(8 / 9)
    least = 1 + (2 * math.pi / 8) / 2 * 10_000 ** (17 / 64)
    assert values["one_angle"]["paper-0"] == pytest.approx(4017 / least) and len(values["one_angle"]) == 13
    with pytest.raises(ValueError, match="heads lacks the plane ids of"):
        s.theory_explains(frame, found, heads[heads.layer != 1])


@pytest.mark.parametrize("plane", [12, 18, 30])
def test_the_one_angle_length_is_where_the_constructed_head_loses_its_gap(plane):
    """Half a token before: the exact gap knows that the right and the wrong key cannot stand in one place."""
    theta = 10_000 ** (-(plane - 1) / 64)
    gap = theory.retrieval_gap([theta], [1.0], 400, 8)
    assert math.floor(s.one_angle_length(theta) + 0.5) + 1 == next(n for n in range(2, 401) if gap[n] < 0)


def test_dilution_and_crowds_read_their_own_curves():
    base = {"task": "letter", "recipe": "fast", "seeds": range(5)}
    cut = {(task, kind, change): 0.1 * i for i, (task, kind, change) in enumerate((
        ("letter", "own", "none"), ("letter", "own", "sharper"), ("letter", "repeat", "sharper"), ("number", "own", "sharper"), ("letter", "own/repeat", "none"),
        ("letter", "repeat/own", "none"), ("number", "own", "windowed")))}  # fmt: skip
    frame = pd.concat([lengths(lambda k, seed, lost=lost: 1 - lost - k / 50_000, **base | {"task": task}, kind=kind, change=change)
                       for (task, kind, change), lost in cut.items()])  # fmt: skip
    values = s.dilution(frame)
    assert set(values) == verdicts._needed(read_ledger().claims["own-letter-dilution"])
    assert [values[name]["3"] for name in ("letter", "copies", "number")] == pytest.approx([0.8, 0.78, 0.69])
    values = s.copies_by_value(frame)
    assert set(values) == verdicts._needed(read_ledger().claims["own-copies-by-value"])
    assert s.number_window(frame)["windowed"]["2"] == pytest.approx(0.38) and verdicts._needed(read_ledger().claims["own-number-window"]) == {"windowed"}
    assert values["by_values"]["0"] == pytest.approx(0.4) and values["by_keys"]["4"] == pytest.approx(0.5)


def test_planes_take_three_seeds_at_the_end():
    rows = [{"recipe": "paper", "task": task, "seed": seed, "step": step, "planes_off": band, "hops": h, "accuracy": 0.1 * h + (step == 20) * 0.2 + (band == "1-8") * 0.3}
            for task in ("number", "letter") for seed in range(8) for step in (10, 20) for band in ("none", "1-8", "33-64") for h in (1, 2, 3, 4)]  # fmt: skip
    values = s.planes_causal(pd.DataFrame(rows))
    assert set(values) == verdicts._needed(read_ledger().claims["own-planes-causal"]) and set(values["letter_without_fast"]) == {"0", "1", "2"}
    assert values["number_without_fast"]["0"] == pytest.approx(0.75) and values["number_without_slow"]["0"] == pytest.approx(0.45)


def test_an_intervention_counts_its_worst_run_and_only_when_it_keeps_the_short_inputs():
    untouched = lengths(fall(600))
    good = lengths(lambda k, seed: 1 - k / 5000 - seed / 100, seeds=range(3))
    table = s.curves(good, "number")
    assert s.worst_of(table, s.curves(untouched, "number")) == pytest.approx(0.88)
    assert s.worst_of(table - 0.05, s.curves(untouched, "number")) == 0
    assert s.worst_of(table, s.curves(lengths(fall(2000)), "number")) == 0
    with pytest.raises(ValueError, match="judged on 3 runs, got 2"):
        s.worst_of(table.iloc[:2], s.curves(untouched, "number"))
    frame = pd.concat([untouched, lengths(lambda k, seed: 0.99 - k / 1000, change="sharper"), lengths(fall(300), recipe="fast", seeds=range(5)),
                       lengths(fall(400), recipe="fast", seeds=range(5), change="sharper")])  # fmt: skip
    trained = pd.concat([lengths(lambda k, seed: 0.99 - k / 5000, recipe="fast,nope_from=4", seeds=range(3))])
    values = s.length_learnt(frame, trained, ["sharper"])["worst_at_500"]
    assert values == {"sharper (paper)": pytest.approx(0.49), "sharper (fast)": 0.0, "nope_from=4 (fast)": pytest.approx(0.89)}


def test_exchanged_runs_against_all_exchanges():
    """Two recipes of four runs: all 24 * 24 exchanges by hand."""
    x = pd.Series([1.0, 2, 3, 4, 2, 1, 4, 3], index=[f"{recipe}-{seed}" for recipe in ("paper", "fast,lr=1") for seed in range(4)])
    y = pd.Series([1.0, 3, 2, 4, 2, 1, 3, 4], index=x.index)
    ranks = stats.rankdata(y)
    rho = [np.corrcoef(stats.rankdata(x), [*ranks[list(p)], *ranks[list(q)]])[0, 1] for p in permutations(range(4)) for q in permutations(range(4, 8))]
    exact = np.mean(np.array(rho) >= rho[0] - 1e-9)
    assert s.permuted(x, y) == pytest.approx(exact, abs=4 * np.sqrt(exact / 20_000))
    assert s.permuted(x, y.iloc[::-1].set_axis(x.index)) > 0.3 > s.permuted(x, x)
