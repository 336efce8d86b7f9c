"""What the released tables of seven models say, as a few numbers a model: percentiles of the strongest heads, levels, ablations, timing.

The tables themselves (one row a head) are not part of this repository. `statistics` makes one small table of them; it is frozen in
data/runs/published_heads/statistics.parquet, so that the book shows the same numbers with and without them. To make it again:

    ROPE_HEADS_TABLES=FOLDER python -m rope_heads.published_heads

P2's convention: percentile = rank of the raw value among the model's heads / number of heads, then the median over the k heads that attend
most to the previous token.
"""

import time

import numpy as np
import pandas as pd
from scipy import stats

from rope_heads import artefacts, papers
from rope_heads.claims import clustered_correlation

FILES = {  # model as in data/published/p2_models.csv -> table
    "GPT-2 small": "gpt2", "OPT-1.3B": "opt-1.3b", "GPT-Neo-1.3B": "gpt-neo-1.3b", "BLOOM-1b1": "bloom-1b1",
    "Pythia-410m": "pythia-410m", "Pythia-1.4B": "pythia-1.4b", "Llama-3-8B": "llama-3-8b",
}  # fmt: skip
ROPE = ("Pythia-410m", "Pythia-1.4B", "Llama-3-8B")
VOCABULARY = {"Pythia-410m": 50_304, "Pythia-1.4B": 50_304, "Llama-3-8B": 128_256}  # ids from which the random tokens are drawn
COLUMNS = {"d_head": "D_head", "dir_frac": "dir_frac", "imag_mass": "imag_mass", "content_pos_frac": "content_pos_frac",
           "henrici": "henrici", "self_match": "self_match"}  # fmt: skip
DETECTORS = {"previous": "prev", "induction": "ind"}
TOP = (1, 2, 3, 5, 10, 20, 30)
TABLE = "runs/published_heads/statistics.parquet"


def percentiles(values) -> np.ndarray:
    """Rank of each value [head] among all of them, divided by their number: in (0, 1], ties share their mean rank. ValueError unless all are finite."""
    if np.ndim(values) != 1 or not len(values) or not np.isfinite(np.asarray(values, float)).all():
        raise ValueError(f"values must be finite numbers [head], got shape {np.shape(values)}: leave heads without a value out")
    return stats.rankdata(values) / len(values)


def strongest(behaviour, k: int) -> np.ndarray:
    """Indices of the k heads with the largest behaviour [head], the largest first. ValueError unless there are k and all are finite."""
    if not np.isfinite(np.asarray(behaviour, float)).all() or not 1 <= k <= len(behaviour):
        raise ValueError(f"behaviour must hold finite numbers and k be 1 to their number {len(behaviour)}, got k = {k}")
    return np.argsort(-np.asarray(behaviour), kind="stable")[:k]


def top_percentile(values, behaviour, k: int = 5) -> float:
    """Median percentile of `values` over the k heads with the largest `behaviour`, both [head]. P2's headline number for k = 5."""
    if len(values) != len(behaviour):
        raise ValueError(f"values and behaviour must be of the same heads, got {len(values)} and {len(behaviour)}")
    return float(np.median(percentiles(values)[strongest(behaviour, k)]))


def partial_correlation(values, behaviour, given, clusters) -> tuple[float, float, float]:
    """Spearman's correlation of two columns after a straight line in `given` is taken from both, with a 90 % interval over whole clusters."""
    design = np.column_stack([np.ones(len(given)), np.asarray(given, float)])
    left = [y - design @ np.linalg.lstsq(design, y, rcond=None)[0] for y in (np.asarray(values, float), np.asarray(behaviour, float))]
    return clustered_correlation(*left, clusters)


def _of_model(model: str, heads: pd.DataFrame) -> list[tuple]:
    """Rows (statistic, measure, by, k, value) of one table of heads."""
    rows = []
    for by, detector in DETECTORS.items():
        order = strongest(heads[detector], max(TOP))
        rows += [("behaviour", "", by, rank, heads[detector].iloc[order[rank - 1]]) for rank in range(1, 6)]
        for measure, column in COLUMNS.items():
            rows += [("percentile", measure, by, k, top_percentile(heads[column], heads[detector], k)) for k in TOP]
            rows += [("value", measure, by, rank, heads[column].iloc[order[rank - 1]]) for rank in range(1, 6)]
    others = heads.drop(index=heads.index[strongest(heads["prev"], 5)])
    for measure in ("d_head", "dir_frac"):
        rows += [("quantile of others", measure, "", round(100 * q), others[COLUMNS[measure]].quantile(q)) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
    for least in (0.3, 0.5):
        chosen = percentiles(heads["D_head"])[heads["prev"] > least]
        rows += [("threshold", "d_head", "previous", round(100 * least), np.median(chosen)), ("heads above", "", "previous", round(100 * least), len(chosen))]
    partial = partial_correlation(heads["D_head"], heads["prev"], heads["dir_frac"], heads["layer"])
    rows += [(f"partial correlation{part}", "d_head", "previous", 0, value) for part, value in zip(("", ", low", ", high"), partial)]
    if model == "GPT-2 small":
        rows += _gpt2(heads)
    if model in ROPE:
        rows += _phase(heads)
    return rows


def _gpt2(heads: pd.DataFrame) -> list[tuple]:
    """Null levels, z of the strongest previous-token heads, and the losses when M is replaced by one of its halves in one head at a time."""
    rows = [("null mean", measure, "", 0, heads[f"{COLUMNS[measure]}_null_mean"].mean()) for measure in ("dir_frac", "d_head")]
    rows += [("null z", "d_head", "previous", rank, heads["D_head_z"].iloc[i]) for rank, i in enumerate(strongest(heads["prev"], 5), 1)]
    without = {"without M_S": heads["dCE_anti"], "without M_A": heads["dCE_sym"]}  # the column names say what is kept
    rows += [(f"sum of losses {name}", "", "", 0, losses.sum()) for name, losses in without.items()]
    rows.append(("ratio of losses", "", "", 0, heads["dCE_anti"].sum() / heads["dCE_sym"].sum()))
    largest = without["without M_S"].sort_values(ascending=False)
    rows += [("share of the largest losses without M_S", "", "", k, largest.head(k).sum() / largest.sum()) for k in (1, 3)]
    rest = largest.index[1:]
    return [*rows, ("ratio of losses without the largest head", "", "", 0, heads.loc[rest, "dCE_anti"].sum() / heads.loc[rest, "dCE_sym"].sum())]


def _phase(heads: pd.DataFrame) -> list[tuple]:
    """Phase ablation of every head: which head costs most, its rank by previous-token attention, and how concentrated the loss is."""
    cost, rank = heads["dInd_rope"], heads["prev"].rank(ascending=False)
    first, second = cost.sort_values(ascending=False).index[:2]
    rows = [("phase: largest loss", "", "", 0, cost[first]), ("phase: second largest loss", "", "", 0, cost[second]),
            ("phase: layer of the largest", "", "", 0, heads["layer"][first]), ("phase: head of the largest", "", "", 0, heads["head"][first]),
            ("phase: previous-token rank of the largest", "", "", 0, rank[first]),
            ("phase: share of heads below .01", "", "", 0, (cost.abs() < 0.01).mean())]  # fmt: skip
    rows += [("phase: loss", "", "previous", k, cost.iloc[i]) for k, i in enumerate(strongest(heads["prev"], 5), 1)]
    return [*rows, ("rope_imag_frac with previous", "", "", 0, stats.spearmanr(heads["rope_imag_frac"], heads["prev"]).statistic)]


def _of_checkpoints(analysis: pd.DataFrame, summary: pd.DataFrame) -> list[tuple]:
    """Timing of one tracked head: rises between steps 512 and 1,000, and how much of the final change of its phase share is there at 1,000."""
    percentile = analysis.set_index("step")[next(name for name in analysis if name.startswith("rif_pct"))]
    raw = summary.astype({"step": int}).set_index("step")["prev_rope_imag_frac"]
    seen = analysis.set_index("step")
    return [("checkpoints: percentile rise 512 to 1000", "rope_imag_frac", "", 0, percentile[1000] - percentile[512]),
            ("checkpoints: rise 512 to 1000", "rope_imag_frac", "", 0, raw[1000] - raw[512]),
            ("checkpoints: share of the change at 1000", "rope_imag_frac", "", 0, (raw[1000] - raw[0]) / (raw[143_000] - raw[0])),
            ("checkpoints: share of the change at 1000", "previous", "", 0,
             (seen["prev_beh"][1000] - seen["prev_beh"][0]) / (seen["prev_beh"][143_000] - seen["prev_beh"][0])),
            ("checkpoints: percentile at step 0", "d_head", "", 0, seen[next(name for name in analysis if name.startswith("D_pct"))][0]),
            ("checkpoints: median of all at the end", "d_head", "", 0, seen["pop_med_D"][143_000])]  # fmt: skip


def statistics(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """One long table of everything the book takes from the released ones: statistic, model, measure, by, k, value.

    `k` is the number of strongest heads for `percentile`, the rank of the head for `value`, `behaviour`, `null z` and `phase: loss`, and
    a percent for quantiles and thresholds. `tables` is what `papers.released_tables` returns.
    """
    rows = [(statistic, model, *rest) for model, file in FILES.items() for statistic, *rest in _of_model(model, tables[f"{file}_head_full"])]
    for model in ("Pythia-410m", "Pythia-160m"):
        name = model.lower()
        rows += [(statistic, model, *rest) for statistic, *rest in _of_checkpoints(tables[f"{name}_ckpt_analysis"], tables[f"{name}_ckpt_summary"])]
    rows += [("rank test over the strongest heads", "all", "d_head", "previous", 5, _strongest_heads_test(tables))]
    return pd.DataFrame(rows, columns=["statistic", "model", "measure", "by", "k", "value"]).astype({"k": int, "value": float})


def _strongest_heads_test(tables: dict[str, pd.DataFrame]) -> float:
    """Two-sided p of the rank test on the 35 percentiles of five heads a model, which counts heads of one model as independent (P2 calls it descriptive)."""
    groups = {True: [], False: []}
    for model, file in FILES.items():
        heads = tables[f"{file}_head_full"]
        groups[model in ROPE] += percentiles(heads["D_head"])[strongest(heads["prev"], 5)].tolist()
    return float(stats.mannwhitneyu(groups[True], groups[False], method="asymptotic").pvalue)


def frozen() -> pd.DataFrame:
    """The frozen table of `statistics`."""
    return artefacts.read_parquet(artefacts.data_path(TABLE))[0]


def pick(table: pd.DataFrame, statistic: str, **where) -> pd.Series:
    """Values of one statistic by model, in the order of the models; further columns by keyword (measure, by, k). ValueError when there are none."""
    rows = table[table["statistic"] == statistic]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    if rows.empty or rows["model"].duplicated().any():
        raise ValueError(f"{statistic!r} with {where} must name one value a model, got {len(rows)}: see published_heads.statistics")
    return rows.set_index("model")["value"]


def gap(values: pd.Series) -> float:
    """Smallest value [model] of a RoPE model minus the largest of another: positive when the two groups are apart."""
    rope = values.index.isin(ROPE)
    return float(values[rope].min() - values[~rope].max())


def separation_p(rope: int, others: int) -> tuple[float, float]:
    """Exact p of complete separation of `rope` from `others` models, one-sided and two-sided, from Mann-Whitney's test."""
    if rope < 1 or others < 1:
        raise ValueError(f"both groups must hold a model, got {rope} and {others}")
    high, low = np.arange(rope) + others, np.arange(others)
    return tuple(float(stats.mannwhitneyu(high, low, alternative=side, method="exact").pvalue) for side in ("greater", "two-sided"))


def main() -> None:
    start = time.perf_counter()
    tables = papers.released_tables()
    if tables is None:
        raise SystemExit(f"the released tables cannot be fetched: set {papers.FOLDER_VARIABLE} to a folder that holds them")
    table = statistics(tables)
    source = {"tables": papers.RELEASED_AT, "sha256": papers.RELEASED, "license": "CC BY 4.0, Li Hengyu; these are statistics of them"}
    origin = artefacts.provenance("python -m rope_heads.published_heads", round(time.perf_counter() - start, 1), seed=0, source=source)
    artefacts.write_parquet(artefacts.data_folder() / TABLE, table, origin)
    print(f"data/{TABLE}: {len(table)} numbers")


if __name__ == "__main__":
    main()
