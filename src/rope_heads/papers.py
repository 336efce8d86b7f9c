"""The papers' own numbers, as small tables: curves read from figures, printed tables, and values recomputed from released ones.

The files lie in data/published; its README says for each where it comes from, how exact it is, and under which terms. P1's curves were read
from vector figures: about +-0.003 in y and +-5 steps in x, so a value may leave [0, 1] by that much. Every reader returns a fresh frame.

P2's own tables, one row a head, are not part of this repository: `released_tables` fetches them by address and checksum.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from rope_heads.artefacts import data_path, sha256

TASKS = ("number", "letter")

RELEASED_AT = "https://raw.githubusercontent.com/HengyuLi-Ozaki-lab/qk-spectral-fingerprint/cd01d4a9a1eeb098e51fd5678caf6bbb16aee1c6/results/cache/"
RELEASED = {  # P2's tables (Li Hengyu, CC BY 4.0): file without .parquet -> sha256
    "gpt2_head_full": "1f4f528d641e23c67cc6f842710eab209a7575a80692368683641c80df5db6b1",
    "opt-1.3b_head_full": "490a9d1cc0eeb9cc8e84fd39ec1376303fc55c9db0b4f07e753495c162e20143",
    "gpt-neo-1.3b_head_full": "d5ddb914e33ea5ca8164d1c93b1150330bf7e1fda712470a147875bc88120550",
    "bloom-1b1_head_full": "cb38d755c136b31fed38bb67575bd3b1793a9bbd93c5d53d125e716aa7cdbc3a",
    "pythia-410m_head_full": "a5bc6aab87a6ba4d24a1c036f472f8f393c70d0f5dff61b6723d0e2c7df3bc2d",
    "pythia-1.4b_head_full": "0e3f5c09f124e9dd47bd4de9393e3f05df779a2d0c1a09a99e7ffb95807468fc",
    "llama-3-8b_head_full": "32b3c9110a9dc76ae7d7efd181f61d3085aac39c89d1532f7c1a519cf0823b6f",
    "pythia-410m_ckpt_analysis": "08dbfb99db4d676039e9a2c47478bd05cea237f4f2f0a31de86ed4298cfd2b63",
    "pythia-410m_ckpt_summary": "f6511b2ebdb4daf4258b762a74734e3ddc100bf0e98e3663cfbe556eef668f9f",
    "pythia-160m_ckpt_analysis": "c33dbe3415a59b585a9141226825d18ddb1ab0cdb0d578564efedfc727888318",
    "pythia-160m_ckpt_summary": "6e2a7bf1be80651a63c9a23d08e217951452c339076afcba4c8cb538fd5f8ceb",
    "pythia-410m_kernel_curves": "1f43b87e77b76261881dbc6341e66a337119bcd112b0e7e977a458bc74fffffc",
}
FOLDER_VARIABLE = "ROPE_HEADS_TABLES"


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


def released_tables(download: bool = True) -> dict[str, pd.DataFrame] | None:
    """P2's released tables by the names in `RELEASED`, or None when they are neither here nor within reach.

    The environment variable ROPE_HEADS_TABLES names a folder that holds them; else they are kept in the user's cache folder, fetched once.
    Every file must have its sha256: another one raises ValueError, and a download like that is not kept. `download=False` only looks.
    """
    import pooch

    folder = os.environ.get(FOLDER_VARIABLE)
    home = Path(folder) if folder else Path(pooch.os_cache("rope-heads"))
    pooch.get_logger().setLevel("WARNING")  # a page is no place for one line a file
    tables = {}
    for name, digest in RELEASED.items():
        path = home / f"{name}.parquet"
        if not path.is_file():
            if folder:
                raise FileNotFoundError(f"{FOLDER_VARIABLE} names a folder without {name}.parquet: unset it, or put all {len(RELEASED)} tables there")
            if not download:
                return None
            try:
                pooch.retrieve(RELEASED_AT + path.name, f"sha256:{digest}", path.name, home, downloader=pooch.HTTPDownloader(timeout=10))
            except OSError:  # no network (requests' errors are of this kind), or a cache folder that cannot be written to
                return None
        if sha256(path) != digest:
            raise ValueError(f"{path} is not the table that P2 released: its sha256 is {sha256(path)[:12]}..., expected {digest[:12]}...; remove it")
        tables[name] = pd.read_parquet(path)
    return tables
