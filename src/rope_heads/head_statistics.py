"""From frozen tables to the values of claims about heads: one function a claim, as the ledger words its statistic.

Tables: `heads` and `accuracy` (measured while training), `tests` and `mechanism` (`rope-heads measure`), each with the columns recipe, task and
seed. Every function returns {value name: {seed: number}}, which is what `verdicts.record` keeps and `claims.judge` judges.
"""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from rope_heads.circuits import READINGS
from rope_heads.claims import maximal_step
from rope_heads.scores import pure_from

Values = dict[str, dict[str, float]]
RUN = ["recipe", "task", "seed"]


def pure_layers(heads: pd.DataFrame, gamma: float = 0.2) -> pd.DataFrame:
    """Kind ("positional", "symbolic" or None) and purity step (inf when never) of every head of every run at one gamma."""
    rows = []
    for key, head in heads.sort_values("step").groupby([*RUN, "layer", "head"]):
        kind, index = pure_from(head.positional, head.symbolic, gamma)
        rows.append((*key, kind, math.inf if index is None else float(head.step.iloc[index])))
    return pd.DataFrame(rows, columns=[*RUN, "layer", "head", "kind", "step"])


def at_the_end(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each run's last step."""
    return table[table.step == table.groupby(RUN).step.transform("max")]


def by_seed(table: pd.DataFrame, task: str, statistic: Callable[[pd.DataFrame], float]) -> dict[str, float]:
    """One number a run of a task. ValueError when seeds of several recipes meet: choose one first."""
    table = table[table.task == task]
    if table.recipe.nunique() > 1:
        raise ValueError(f"seeds belong to one recipe, got {', '.join(sorted(table.recipe.unique()))}: choose rows of one of them")
    return {str(seed): float(statistic(run)) for seed, run in table.groupby("seed")}


def heads_number(heads: pd.DataFrame) -> Values:
    """P1-heads-number."""
    pure, end = pure_layers(heads), at_the_end(heads)

    def misplaced(run: pd.DataFrame) -> int:
        symbolic, positional = (run.layer[run.kind == kind].to_numpy() for kind in ("symbolic", "positional"))
        return int((symbolic[:, None] < positional).sum())

    return {"positional": by_seed(pure, "number", lambda run: (run.kind == "positional").sum()),
            "symbolic": by_seed(pure, "number", lambda run: (run.kind == "symbolic").sum()),
            "misplaced": by_seed(pure, "number", misplaced),
            "layer0": by_seed(end[end.layer == 0], "number", lambda run: run.positional.mean())}  # fmt: skip


def heads_letter(heads: pd.DataFrame) -> Values:
    """P1-heads-letter."""
    pure = pure_layers(heads)
    return {"symbolic": by_seed(pure, "letter", lambda run: (run.kind == "symbolic").sum()),
            "positional": by_seed(pure, "letter", lambda run: (run.kind == "positional").sum()),
            "symbolic_proper": by_seed(pure, "letter_proper", lambda run: (run.kind == "symbolic").sum())}  # fmt: skip


def untrained(heads: pd.DataFrame) -> Values:
    """P1-untrained."""
    start = heads[heads.step == 0]
    return {task: by_seed(start, task, lambda run: run[["positional", "symbolic"]].min(axis=1).min()) for task in ("number", "letter")}


def exclusion(heads: pd.DataFrame) -> Values:
    """P1-exclusion."""
    end = at_the_end(heads)
    both = end.assign(both=(end.positional > 0.8) & (end.symbolic > 0.8) & (end.swappable_entropy < 0.9))
    return {task: by_seed(both, task, lambda run: run.both.sum()) for task in ("number", "letter")}


def purity_step(run: pd.DataFrame, gamma: float) -> float:
    """t_pure(gamma) of one run's `heads`: latest purity step over the layers 1 and up that end pure at gamma .2, inf without any."""
    loose, strict = (pure_layers(run, g).query("layer >= 1") for g in (0.2, gamma))
    steps = strict.step[loose.kind.notna()]
    return float(steps.max()) if len(steps) else math.inf


def purity_coincides(accuracy: pd.DataFrame, heads: pd.DataFrame) -> Values:
    """P1-purity-coincides."""
    values: Values = {}
    for task in ("number", "letter"):
        latest = by_seed(accuracy, task, lambda run: maximal_step(*run.groupby("step").accuracy.mean().reset_index().to_numpy().T))
        for gamma in (0.2, 0.1, 0.05):
            pure = by_seed(heads, task, lambda run, gamma=gamma: purity_step(run, gamma))
            values[f"{task}_{round(100 * gamma):03d}"] = {seed: latest[seed] - pure[seed] for seed in latest}
    counts = [_pure_above_first(pure_layers(heads), task) for task in ("number", "letter")]
    values["layers"] = {seed: min(count[seed] for count in counts) for seed in counts[0] if seed in counts[1]}
    return values


def purity_necessary(tests: pd.DataFrame, heads: pd.DataFrame, least: float = 0.98) -> Values:
    """P1-purity-necessary, for the rows of recipe `fast`. Runs below `least` on the whole test split are left out."""
    whole = tests[tests.planes_off == "none"]
    pure = pure_layers(heads)
    values: Values = {}
    for task in ("number", "letter"):
        good = {seed for seed, accuracy in by_seed(whole, task, lambda run: np.average(run.accuracy, weights=run.tests)).items() if accuracy >= least}
        rows = pure[pure.seed.astype(str).isin(good)]
        values[f"{task}_pure"] = _pure_above_first(rows, task)
        if task == "number":
            values["number_positional"] = by_seed(rows, task, lambda run: (run.kind == "positional").sum())
    return values


def other_shapes(accuracy: pd.DataFrame, heads: pd.DataFrame, least: float = 0.98) -> Values:
    """own-other-shapes, one value a run ("6 x 1-0": layers x heads, seed). Runs of the paper's shape, and those whose last accuracy is below `least`,
    are left out."""
    last = at_the_end(accuracy).groupby(RUN).accuracy.mean()
    values: Values = {"number_positional": {}, "letter_positional": {}, "letter_symbolic": {}}
    for (recipe, task, seed), run in pure_layers(heads).groupby(RUN):
        shape = run.layer.nunique(), run["head"].nunique()
        if shape == (12, 1) or last[recipe, task, seed] < least:
            continue
        label, kinds = f"{shape[0]} x {shape[1]}-{seed}", run.kind
        if f"{task}_positional" in values:
            values[f"{task}_positional"][label] = float((kinds == "positional").sum())
        if task == "letter":
            values["letter_symbolic"][label] = float((kinds == "symbolic").mean())
    return values


def frequency(heads: pd.DataFrame) -> Values:
    """P1-frequency. A run without pure symbolic layers gives nan there, which the ledger has no rule for."""
    end = at_the_end(heads).merge(pure_layers(heads)[[*RUN, "layer", "head", "kind"]], on=[*RUN, "layer", "head"])
    positional = by_seed(end, "number", lambda run: run.weighted_id[run.kind == "positional"].max() if (run.kind == "positional").any() else math.inf)
    later = end[end.layer >= 1]
    return {"positional": positional} | {
        task: by_seed(later, task, lambda run: run.weighted_id[run.kind == "symbolic"].median()) for task in ("number", "letter")}  # fmt: skip


def mechanism(mechanism: pd.DataFrame, task: str) -> Values:
    """P1-mechanism-number (task "number") and P1-mechanism-letter ("letter"): each run by the reading with the larger follows, forward if equal."""
    end = at_the_end(mechanism)
    better = end.sort_values(["follows", "reading"]).groupby(RUN, as_index=False).last()
    names = ["follows", "lost", "kept"] + (["ideal"] if task == "number" else [])
    values = {name: by_seed(better, task, lambda run, name=name: run[name].iloc[0]) for name in names}
    if task == "letter":
        values["follows_proper"] = by_seed(better, "letter_proper", lambda run: run.follows.iloc[0])
    return values


# ---- exploratory: no claim rests on these ----------------------------------------------------------------------------------------------


VARIANTS = {  # name -> columns of `heads` that hold the two scores; the first is the ledger's
    "last token": ("positional", "symbolic"), "temperature 0.01": ("positional_t0.01", "symbolic_t0.01"), "temperature 1": ("positional_t1", "symbolic_t1"),
    "centred": ("positional_centred", "symbolic_centred"), "all pre-target tokens": ("positional_pre", "symbolic_pre"),
    "pre-target tokens on the chain": ("positional_chain", "symbolic_chain")}  # fmt: skip


def score_variants(heads: pd.DataFrame, kinds: pd.DataFrame) -> pd.DataFrame:
    """Final scores of every head under each variant of the score: other temperatures, query tokens and swaps, not the ledger's alone.

    Columns recipe, task, seed, layer, head, variant, positional, symbolic. From `kinds` the mean over hop counts. All layers are scored under all
    variants, so that a variant which would make one layer pure also shows what it does to the others.
    """
    end, key = at_the_end(heads), [*RUN, "layer", "head"]
    parts = [end[key].assign(variant=name, positional=end[p], symbolic=end[s]) for name, (p, s) in VARIANTS.items()]
    last = at_the_end(kinds).groupby([*key, "swaps"], as_index=False)[["positional", "symbolic"]].mean()
    parts.append(last.assign(variant="swaps: " + last.swaps).drop(columns="swaps"))
    return pd.concat(parts, ignore_index=True)


def pure_now(positional, symbolic, gamma: float = 0.2) -> np.ndarray:
    """+1 where scores are pure positional at this moment, -1 where pure symbolic, 0 elsewhere."""
    positional, symbolic = np.asarray(positional), np.asarray(symbolic)
    return ((positional > 1 - gamma) & (symbolic < gamma)).astype(int) - ((symbolic > 1 - gamma) & (positional < gamma))


def ablated_and_forbidden(steps: pd.DataFrame, forbidden: pd.DataFrame) -> pd.DataFrame:
    """What each chain step costs when the head that performs it is ablated, beside what the same look costs when no layer may make it.

    Ablation alone can mislead either way: a look that several layers make costs little although the model needs it, and a head's output may
    carry more than the look. Columns recipe, task, seed, reading, hops, chain_step, layer, share, ablated, forbidden, control: the last three are
    lost accuracy, `control` that without a look of the same token off the chain.
    """
    found = at_the_end(steps).query("chain_step <= hops").copy()
    looks = [READINGS[reading][0][k - 1] for reading, k in zip(found.reading, found.chain_step, strict=True)]
    whole, key = at_the_end(forbidden), [*RUN, "hops"]
    untouched = whole[whole.forbidden == "none"].set_index(key).accuracy
    found["name"] = [f"p{looker} to p{target}" for looker, target in looks]
    without = whole.set_index([*key, "forbidden"]).accuracy
    base = untouched.reindex(pd.MultiIndex.from_frame(found[key])).to_numpy()
    lost = {column: base - without.reindex(pd.MultiIndex.from_frame(found[key].assign(forbidden=prefix + found.name))).to_numpy()
            for column, prefix in (("forbidden", ""), ("control", "control: "))}  # fmt: skip
    found = found.assign(ablated=base - found.accuracy, **lost)
    return found[[*key[:3], "reading", "hops", "chain_step", "layer", "share", "ablated", "forbidden", "control"]]


def _pure_above_first(pure: pd.DataFrame, task: str) -> dict[str, float]:
    return by_seed(pure[pure.layer >= 1], task, lambda run: run.kind.notna().sum())
