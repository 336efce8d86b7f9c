"""From frozen tables to the values of the claims about long inputs: one function a claim, as the ledger words its statistic.

Tables: `lengths` and `gaps` (`rope-heads lengths`), `tests` (`rope-heads measure`), `heads` (measured while training), each with the columns recipe,
task and seed. The functions return {value name: {label: number}}, which is what `verdicts.record` keeps and `claims.judge` judges. Accuracy is
the mean over hop counts, which are equally frequent.
"""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from rope_heads.claims import break_length
from rope_heads.head_statistics import Values, at_the_end, by_seed
from rope_heads.length_gap import gap_curve, gap_length
from rope_heads.training_statistics import spread

PLANES, BASE, LETTERS = 64, 10_000, 8


def curves(lengths: pd.DataFrame, task: str, inputs: str | None = None, kind: str = "own", change: str = "none") -> pd.DataFrame:
    """Accuracy of every run of `task` (row: recipe, seed) by number of added tokens (column). inputs: whose sequences, by default its own task's."""
    rows = lengths[(lengths.task == task) & (lengths.inputs == (inputs or task)) & (lengths.kind == kind) & (lengths.change == change)]
    if rows.empty:  # a task without runs yet: no rows, but the columns that statistics ask for
        return pd.DataFrame(columns=pd.Index(sorted(lengths.added.unique()), name="added"), index=pd.MultiIndex.from_arrays([[], []], names=["recipe", "seed"]), dtype=float)
    return rows.groupby(["recipe", "seed", "added"]).accuracy.mean().unstack("added")


def labelled(values: pd.Series) -> dict[str, float]:
    """{seed: value}; {recipe-seed: value} where runs of several recipes meet."""
    several = values.index.get_level_values("recipe").nunique() > 1
    return {f"{recipe}-{seed}" if several else str(seed): float(value) for (recipe, seed), value in values.items()}


def break_lengths(table: pd.DataFrame) -> pd.Series:
    """Break length of every row of `curves`: tokens at which accuracy first falls below .5, the longest input when it never does."""
    return pd.Series({run: break_length(curve.dropna().index, curve.dropna()) for run, curve in table.iterrows()}, index=table.index, dtype=float)


def to_850(table: pd.DataFrame) -> pd.Series:
    """Least accuracy over the grid points to 800, and at 850: the mean of 800 and 900."""
    return np.minimum(table.loc[:, :800].min(axis=1), table[[800, 900]].mean(axis=1))


def letter_to_850(lengths: pd.DataFrame) -> Values:
    """P1-length-letter."""
    return {name: labelled(to_850(curves(lengths, task))) for name, task in (("letter", "letter"), ("proper", "letter_proper"))}


def number_breaks(lengths: pd.DataFrame) -> Values:
    """P1-length-number."""
    table = curves(lengths, "number")
    return {"at_500": labelled(table[500]), "at_40": labelled(table[40])}


def separation(lengths: pd.DataFrame, tasks: Mapping[str, str] | None = None) -> Values:
    """P1-length-separation: break lengths by value name; `tasks` gives the task of each, by default those of the ledger."""
    tasks = tasks or {"letter": "letter", "proper": "letter_proper", "number": "number"}
    return {name: labelled(break_lengths(curves(lengths, task))) for name, task in tasks.items()}


def shortcut(lengths: pd.DataFrame) -> Values:
    """own-shortcut-length: what Letter models lose on proper inputs at 800 added tokens, beyond what they lose there without any."""
    own, proper = curves(lengths, "letter"), curves(lengths, "letter", inputs="letter_proper")
    loss = own - proper
    return {"excess": labelled(loss[800] - loss[0])}


def debiased_letter(accuracy: pd.DataFrame, lengths: pd.DataFrame, fast: pd.DataFrame) -> Values:
    """own-debiased-letter. accuracy, lengths: of the 12-letter runs; fast: `lengths` of recipe fast, for Number's break lengths."""
    breaks = separation(pd.concat([lengths, fast]), {"letter_break": "letter_12_debiased", "number_break": "number"})
    return {"spread90": by_seed(accuracy, "letter_12_debiased", lambda run: spread(run, 0.9)), **breaks}


def number_64(lengths: pd.DataFrame, fast: pd.DataFrame) -> Values:
    """own-number-64. lengths: of Number with 64 letters; fast: `lengths` of recipe fast, for Letter's break lengths."""
    return separation(pd.concat([lengths, fast]), {"letter": "letter", "number64": "number_64"})


def planes_causal(tests: pd.DataFrame, seeds=range(3)) -> Values:
    """own-planes-causal."""
    end = at_the_end(tests[tests.seed.isin(seeds)])
    return {f"{task}_without_{name}": by_seed(end[end.planes_off == band], task, lambda run: run.accuracy.mean())
            for task in ("number", "letter") for name, band in (("fast", "1-8"), ("slow", "33-64"))}  # fmt: skip


def dilution(lengths: pd.DataFrame) -> Values:
    """own-letter-dilution. lengths: of one recipe, with sharper logits."""
    sharper = {name: curves(lengths, task, kind=kind, change="sharper")
               for name, task, kind in (("letter", "letter", "own"), ("copies", "letter", "repeat"), ("number", "number", "own"))}  # fmt: skip
    return {name: labelled(table[{"letter": 5_000, "copies": 1_000, "number": 500}[name]]) for name, table in sharper.items()}


def number_window(lengths: pd.DataFrame) -> Values:
    """own-number-window. lengths: of one recipe, with a short view."""
    return {"windowed": labelled(curves(lengths, "number", change="windowed")[1_000])}


def copies_by_value(lengths: pd.DataFrame) -> Values:
    """own-copies-by-value. lengths: of one recipe, with crowds whose keys and values come from different tokens."""
    own = curves(lengths, "letter")[200]
    return {name: labelled(own - curves(lengths, "letter", kind=kind)[200]) for name, kind in (("by_values", "own/repeat"), ("by_keys", "repeat/own"))}


# ---- does the gap explain the break? --------------------------------------------------------------------------------------------------


def gap_lengths(gaps: pd.DataFrame, task: str, value: str = "gap", every_look: bool = False) -> pd.Series:
    """Gap length of every run of `task` (recipe, seed): input length at which `length_gap.gap_curve` first falls below 0."""
    runs = gaps[gaps.task == task].groupby(["recipe", "seed"])
    return runs[gaps.columns.tolist()].apply(lambda run: gap_length(gap_curve(run, value, every_look)))


def within_recipe(values: pd.Series) -> pd.Series:
    """Fractional ranks, rank / (runs + 1), within each recipe: a difference between recipes cannot make a correlation."""
    return values.groupby("recipe").transform(lambda group: stats.rankdata(group) / (len(group) + 1))


def permuted(x: pd.Series, y: pd.Series, draws: int = 20_000) -> float:
    """One-sided p of the rank correlation of x and y, labels RECIPE-SEED: share of `draws` exchanges of y within each recipe (and the one that
    was found) with as high a correlation. With so few runs it is safer than an interval from runs drawn again."""
    a, b, recipes = stats.rankdata(x), stats.rankdata(y), pd.factorize(x.index.str.rpartition("-").get_level_values(0))[0]
    rng, order = np.random.default_rng(0), np.argsort(recipes, kind="stable")
    sizes = np.bincount(recipes)
    a, b = a[order] - a.mean(), b[order] - b.mean()
    drawn = np.concatenate([rng.permuted(np.tile(part, (draws, 1)), axis=1) for part in np.split(b, np.cumsum(sizes)[:-1])], axis=1)
    return float((1 + (drawn @ a >= b @ a - 1e-9).sum()) / (1 + draws))


def one_angle_length(theta: float, letters: int = LETTERS) -> float:
    """Tokens at which the worst-case gap of P1's Retrieval head with one angle reaches 0: 1 + omega / (2 theta), omega = 2 pi / letters."""
    return 1 + math.pi / letters / theta


def one_angle(gaps: pd.DataFrame, heads: pd.DataFrame) -> pd.Series:
    """Shortest `one_angle_length` over the layers in which the last token performs a hop, each with the angle of its Table-1 id; by recipe and seed.

    heads: `weighted_id` of every layer at the last step. The id is rounded, as in Table 1.
    """
    ids = at_the_end(heads).groupby(["recipe", "task", "seed", "layer"]).weighted_id.min().rename("id")
    hops = gaps[gaps.performs & (gaps.looker == 0)][["recipe", "task", "seed", "layer"]].drop_duplicates()
    joined = hops.merge(ids.reset_index(), how="left", validate="one_to_one")
    if joined.id.isna().any():
        raise ValueError(f"heads lacks the plane ids of {joined[joined.id.isna()].iloc[0, :4].tolist()}: measure that run while it trains (--measure)")
    lengths = [one_angle_length(BASE ** (-(round(plane) - 1) / PLANES)) for plane in joined.id]
    return joined.assign(length=lengths).groupby(["recipe", "seed"]).length.min()


def theory_explains(lengths: pd.DataFrame, gaps: pd.DataFrame, heads: pd.DataFrame) -> Values:
    """P1-theory-explains-length."""
    values: Values = {}
    for task in ("number", "letter"):
        broken = break_lengths(curves(lengths, task))
        values[f"{task}_gap_length"] = labelled(within_recipe(gap_lengths(gaps, task)))
        values[f"{task}_break"] = labelled(within_recipe(broken))
    letter = gaps[gaps.task == "letter"]
    values["one_angle"] = labelled((broken / one_angle(letter, heads[heads.task == "letter"])).dropna())
    return values


# ---- interventions ----------------------------------------------------------------------------------------------------------------------


def worst_of(table: pd.DataFrame, untouched: pd.DataFrame, runs: int = 3) -> float:
    """`worst_at_500` of one intervention: its worst run's accuracy with 500 added tokens; 0 when a run is under .98 without any, or when the
    untouched models have a median of .75 or more at 500. Both tables as from `curves`."""
    if len(table) != runs:
        raise ValueError(f"an intervention is judged on {runs} runs, got {len(table)}")
    if table[0].min() < 0.98 or untouched[500].median() >= 0.75:
        return 0.0
    return float(table[500].min())


def length_learnt(lengths: pd.DataFrame, interventions: pd.DataFrame, at_test: list[str], seeds=range(3)) -> Values:
    """own-length-learnt. lengths: the untouched runs of both recipes, with the changes at test time. interventions: the runs trained under one,
    whose recipe names it (`fast,nope_from=4`)."""
    cases = {}
    for recipe, runs in lengths[lengths.seed.isin(seeds)].groupby("recipe"):
        untouched = curves(runs, "number")
        cases |= {f"{change} ({recipe})": worst_of(curves(runs, "number", change=change), untouched) for change in at_test}
        for name in interventions.recipe.unique():
            if name.partition(",")[0] == recipe:
                rows = interventions[(interventions.recipe == name) & interventions.seed.isin(seeds)]
                cases[f"{name.partition(',')[2]} ({recipe})"] = worst_of(curves(rows, "number"), untouched)
    return {"worst_at_500": cases}
