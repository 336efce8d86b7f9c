"""The papers' own numbers, as small tables: curves read from figures, printed tables, and values recomputed from released ones.

The files lie in data/published; its README says for each where it comes from, how exact it is, and under which terms. P1's curves were read
from vector figures: about +-0.003 in y and +-5 steps in x, so a value may leave [0, 1] by that much. Every reader returns a fresh frame.
"""

import numpy as np
import pandas as pd

from rope_heads.artefacts import data_path

TASKS = ("number", "letter")


def table(name: str) -> pd.DataFrame:
    """data/published/`name`.csv, whole. FileNotFoundError names a file that does not exist."""
    return pd.read_csv(data_path(f"published/{name}.csv"))


def _of_task(name: str, task: str) -> pd.DataFrame:
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}: the paper shows one model for each of them")
    rows = table(name)
    return rows[rows["task"] == task].drop(columns="task").reset_index(drop=True)


def published_accuracy(task: str) -> pd.DataFrame:
    """Test accuracy while training [135 steps]: columns hop1 to hop4 and all, index step 50 to 6,750 (P1, Figure 2A)."""
    return _of_task("accuracy", task).set_index("step")


def published_scores(task: str) -> pd.DataFrame:
    """Scores of the last token while training: columns layer (0 first), step, positional, symbolic, entropy (P1, Figure 6).

    Scores lie in [0, 1]: 1 = the attention stays with the slot (positional) or goes with the content (symbolic). The entropy is scaled to
    [0, 1] by its own least and greatest value in each layer, so it compares steps of one layer, not layers.
    """
    return _of_task("scores", task)


def published_length(task: str) -> pd.DataFrame:
    """Accuracy by number of added tokens, 0 to 5,000: columns added, accuracy (P1, Figure 5B)."""
    return _of_task("lengths", task)


def published_frequency_use(task: str) -> pd.DataFrame:
    """Largest q.k of each rotary plane, not divided by sqrt(d_head): rows are layers, columns plane ids 1 (fastest) to 64 (P1, Fig. 8)."""
    return _of_task("frequency_use", task).pivot(index="layer", columns="plane", values="largest_logit")


def published_planes(task: str) -> pd.Series:
    """Weighted mean plane id of each layer (P1, Table 1)."""
    return _of_task("table1", task).set_index("layer")["plane"]


def published_purity(task: str) -> pd.DataFrame:
    """Steps from which layers are pure: columns figure, gamma, kind, layer, step (P1, Figures 2C and 7, where markers can be told apart)."""
    return _of_task("purity_steps", task)


def published_crossings(task: str) -> pd.DataFrame:
    """Steps at which accuracy crosses a level: row = curve (hop1 to hop4, all), column = level (from Figure 2A)."""
    return _of_task("crossings", task).pivot(index="curve", columns="level", values="step")


def published_language_models() -> pd.DataFrame:
    """One-hop accuracy of three language models: model, task, window, accuracy, sd over five runs, source (P1, Table 3, Figure 5C)."""
    return table("language_models")


def published_value(paper: str, name: str) -> float:
    """A single number of a paper, by name (data/published/values.csv)."""
    rows = table("values")
    found = rows.loc[(rows["paper"] == paper) & (rows["name"] == name), "value"]
    if len(found) != 1:
        raise ValueError(f"no published value {name!r} of {paper}, expected one of {sorted(rows.loc[rows['paper'] == paper, 'name'])}")
    return float(found.iloc[0])


def weighted_plane(use: np.ndarray) -> np.ndarray:
    """Mean plane id of each row of `use` [..., plane], weighted by softmax(use): sum_k k softmax(use)_k, ids from 1.

    The paper does not print its formula; this one gives back all 24 entries of Table 1 from the curves of Figure 8. It is an average of the
    id, not of the angle, and a flat row has (planes + 1) / 2 = 32.5.
    """
    use = np.asarray(use, float)
    weight = np.exp(use - use.max(axis=-1, keepdims=True))
    return (weight * np.arange(1, use.shape[-1] + 1)).sum(-1) / weight.sum(-1)
