"""From the tables of the toy models to the values of claims about them: one function a claim, as the ledger words its statistic.

Tables of `rope-heads toy --collect`: `formation` (one row a run), `heads` (one row an evaluation and head). Every function returns
{value name: {seed: number}}, which is what `verdicts.record` keeps and `claims.judge` judges.
"""

import math

import numpy as np
import pandas as pd

from rope_heads.head_statistics import Values
from rope_heads.published_heads import percentiles

SIGNATURE = 0.505  # a final rope_imag_frac below it is no signature; 1/2 is chance
BEFORE = 200  # steps before the function, in which a head start would show
SHORT = {"ape_free": "learned free", "ape_sym": "learned symmetric", "ape_sham": "learned sham", "rope_free": "RoPE free", "rope_sym": "RoPE symmetric",
         "rope_im": "RoPE phase suppressed", "rope_tied": "RoPE tied"}  # fmt: skip


def formed(formation: pd.DataFrame, arm: str) -> dict[str, float]:
    """Step of formation by seed; inf for a run that has not formed by its cap."""
    rows = formation[formation.arm == arm].sort_values("seed")
    return {str(seed): float(step) for seed, step in zip(rows.seed, rows.formed, strict=True)}


def formation_steps(formation: pd.DataFrame, *names: str) -> Values:
    """Columns of P2-formation-cost, own-cost-of-symmetry and own-hard-tying, by the ledger's short names of the arms (`SHORT`)."""
    return {name: formed(formation, SHORT[name]) for name in names}


def strongest(run: pd.DataFrame) -> pd.DataFrame:
    """The course of the head that attends most to the previous token at a run's last evaluation; index: step."""
    end = run[run.step == run.step.max()]
    best = end.loc[end.prev.idxmax()]
    return run[(run.layer == best.layer) & (run["head"] == best["head"])].sort_values("step").set_index("step")


def percentile(run: pd.DataFrame, measure: str = "rope_imag_frac") -> pd.Series:
    """Percentile of each head among the run's heads at the same evaluation, in (0, 1], as P2 counts it; index as in `run`."""
    return run.groupby("step")[measure].transform(percentiles)


def onset(head: pd.DataFrame) -> dict[str, float]:
    """t_function and t_signature (steps) of one head's course; t_signature is nan where the head ends without a signature."""
    function = head.index[head.prev >= head.prev.iloc[-1] / 2][0]
    final = head.rope_imag_frac.iloc[-1]
    if not final >= SIGNATURE:
        return {"function": float(function), "signature": math.nan}
    above = (head.rope_imag_frac > 0.5 + (final - 0.5) / 2).to_numpy()
    lasting = np.flatnonzero(~above)
    return {"function": float(function), "signature": float(head.index[0 if not len(lasting) else lasting[-1] + 1])}


def not_before(heads: pd.DataFrame, arm: str = "RoPE free") -> tuple[Values, list[int]]:
    """P2-not-before, and the seeds that are left out because their head ends without a signature. A run whose function is there at
    step 0 has no steps before it and no value in `no_head_start`."""
    lag, start, without = {}, {}, []
    for seed, run in heads[heads.arm == arm].groupby("seed"):
        run = run.assign(percentile=percentile(run))
        head = strongest(run)
        found = onset(head)
        if math.isnan(found["signature"]):
            without.append(int(seed))
            continue
        lag[str(seed)] = found["signature"] - found["function"]
        earlier = head[(head.index < found["function"]) & (head.index >= found["function"] - BEFORE)]
        if len(earlier):
            start[str(seed)] = float(earlier.percentile.mean())
    return {"lag": lag, "no_head_start": start}, without


def final_rank(heads: pd.DataFrame, measure: str = "d_head") -> pd.Series:
    """Percentile of that head's `measure` among the run's heads, at the last evaluation; index: arm, seed."""
    return pd.Series({key: strongest(run.assign(rank=percentile(run, measure)))["rank"].iloc[-1] for key, run in heads.groupby(["arm", "seed"])}).rename_axis(
        ["arm", "seed"])


def at_the_end(heads: pd.DataFrame) -> pd.DataFrame:
    """The strongest previous-token head of each run at its last evaluation; index: arm, seed."""
    measures = ["layer", "head", "prev", "ind", "dir_frac", "d_head", "rope_imag_frac"]
    rows = [{"arm": arm, "seed": seed, **strongest(run).iloc[-1][measures]} for (arm, seed), run in heads.groupby(["arm", "seed"])]
    frame = pd.DataFrame(rows, columns=["arm", "seed", *measures]).set_index(["arm", "seed"])
    return frame.astype({name: int if name in ("layer", "head") else float for name in measures})


def mechanism(heads: pd.DataFrame) -> Values:
    """P2-mechanism without peak_offset, which is a construction. `previous` takes the seeds that both arms have."""
    end = at_the_end(heads[heads.arm.isin([SHORT["rope_sym"], SHORT["rope_im"]])])

    def column(arm: str, measure: str) -> dict[str, float]:
        rows = end[end.index.get_level_values("arm") == SHORT[arm]][measure].droplevel("arm")
        return {str(seed): float(value) for seed, value in rows.items()}

    sym, im = column("rope_sym", "prev"), column("rope_im", "prev")
    return {"sym_dir_frac": column("rope_sym", "dir_frac"), "sym_rif": column("rope_sym", "rope_imag_frac"), "im_rif": column("rope_im", "rope_imag_frac"),
            "previous": {seed: min(sym[seed], im[seed]) for seed in sym if seed in im}}  # fmt: skip
