"""Where the two papers meet: the spectrum of every head of our own models (P2's measures) beside its positional and symbolic score (P1's).

`rope-heads measure` writes the spectra of a run's kept weights, each with a level of chance of its own. The functions below turn the
frozen tables into the values of the claim own-bridge.
"""

import math

import pandas as pd

from rope_heads.head_statistics import RUN, Values, at_the_end, by_seed, pure_layers
from rope_heads.induction import head_spectra
from rope_heads.model import Transformer
from rope_heads.spectra import fold_norm, random_null, singular_values

NULLED = ("dir_frac", "d_head")  # rope_imag_frac has no null of P2's kind: its level of chance is 1/2, by symmetry
DEPTH = range(1, 4)  # layers compared at equal depth


def spectra(model: Transformer, draws: int) -> list[dict]:
    """One row a head: dir_frac, d_head and rope_imag_frac with the norm folded in, and mean and sd of the first two over random heads with
    the head's own singular values (`draws` of them, >= 2; P2's null)."""
    rows = head_spectra(model)
    for layer, block in enumerate(model.blocks):
        w_q, w_k = (fold_norm(w.mT, block.norm.weight, centred=True) for w in (block.attention.w_q, block.attention.w_k))
        null = random_null(singular_values(w_q, w_k), model.config.width, draws, centred=True)
        for row in (row for row in rows if row["layer"] == layer):
            row |= {f"{name}_{word}": float(column[name][row["head"]]) for name in NULLED for word, column in (("null", null.mean), ("null_sd", null.sd))}
    return rows


def with_scores(spectra: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """Spectra of the last step of each run with the head's scores, their difference `score` and its kind at gamma .2 (None when not pure)."""
    keys = [*RUN, "layer", "head"]
    scores = at_the_end(heads)[[*keys, "positional", "symbolic", "movable"]].assign(score=lambda rows: rows.positional - rows.symbolic)
    return at_the_end(spectra).merge(scores, on=keys, validate="1:1").merge(pure_layers(heads)[[*keys, "kind"]], on=keys, validate="1:1")


def bridge(spectra: pd.DataFrame, heads: pd.DataFrame) -> Values:
    """own-bridge. `within` and `rif` leave out runs without a pure layer of each kind; the labels of `score` and `d_head` are run/layer."""
    table = with_scores(spectra, heads)

    def gap(run: pd.DataFrame, measure: str) -> float:
        return run[run.kind == "positional"][measure].median() - run[run.kind == "symbolic"][measure].median()

    def gaps(measure: str) -> dict[str, float]:
        return {seed: value for seed, value in by_seed(table, "number", lambda run: gap(run, measure)).items() if not math.isnan(value)}

    early = table[table.layer.isin(DEPTH)]
    mine = table[table.task == "number"]
    label = mine.seed.astype(str) + "/" + mine.layer.astype(str)
    return {"within": gaps("d_head"),
            "rif": gaps("rope_imag_frac"),
            "number_1_3": by_seed(early, "number", lambda run: run.d_head.mean()),
            "letter_1_3": by_seed(early, "letter", lambda run: run.d_head.mean()),
            "score": dict(zip(label, mine.score.astype(float), strict=True)),
            "d_head": dict(zip(label, mine.d_head.astype(float), strict=True))}  # fmt: skip
