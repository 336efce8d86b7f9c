import math

import pandas as pd
import pytest
import torch

from rope_heads import bridge
from rope_heads.claims import judge, read_ledger
from rope_heads.model import Config, Transformer


def run(task: str, seed: int, kinds: str, measures: list[float]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables of one run with two evaluations: kinds is one letter a layer (p, s, or m for mixed), measures its d_head."""
    at = {"p": (0.95, 0.05), "s": (0.05, 0.95), "m": (0.5, 0.5)}
    key = {"recipe": "paper", "task": task, "seed": seed}
    heads = [{**key, "step": step, "layer": layer, "head": 0, "movable": 1.0, "positional": at[kind][0], "symbolic": at[kind][1]}
             for step in (0, 50) for layer, kind in enumerate(kinds)]  # fmt: skip
    spectra = [{**key, "step": step, "layer": layer, "head": 0, "d_head": value if step else 9.0, "rope_imag_frac": value / 2}
               for step in (0, 50) for layer, value in enumerate(measures)]  # fmt: skip
    return pd.DataFrame(spectra), pd.DataFrame(heads)


def joined(*runs_of):
    return (pd.concat(tables, ignore_index=True) for tables in zip(*runs_of, strict=True))


def test_values_of_the_bridge_by_hand():
    spectra, heads = joined(run("number", 0, "mpps", [0.1, 0.5, 0.7, 0.2]), run("number", 1, "ssss", [0.1, 0.2, 0.3, 0.4]),
                            run("letter", 0, "msss", [0.9, 0.1, 0.2, 0.3]))  # fmt: skip
    found = bridge.bridge(spectra, heads)
    assert found["within"] == {"0": pytest.approx(0.6 - 0.2)} and found["rif"] == {"0": pytest.approx(0.2)}  # run 1 has no positional layer
    assert found["number_1_3"] == {"0": pytest.approx(1.4 / 3), "1": pytest.approx(0.3)} and found["letter_1_3"] == {"0": pytest.approx(0.2)}
    assert found["d_head"]["0/2"] == 0.7 and found["score"]["0/2"] == pytest.approx(0.9) and found["score"]["1/3"] == pytest.approx(-0.9)
    assert len(found["score"]) == 8


def test_values_are_those_that_the_rule_reads():
    spectra, heads = joined(*(run(task, seed, kinds, measures) for seed in range(5) for task, kinds, measures in
                              (("number", "mpps", [0.1, 0.5 + seed / 100, 0.7, 0.2]), ("letter", "msss", [0.9, 0.1, 0.2, 0.3 + seed / 100]))))  # fmt: skip
    verdict = judge(read_ledger().claims["own-bridge"], bridge.bridge(spectra, heads))
    assert verdict.verdict == "holds" and dict(verdict.parts)["over heads"].n == 5


def test_spectra_of_a_model_against_numpy_and_its_own_chance():
    torch.manual_seed(3)
    model = Transformer(Config(vocab_size=11, layers=2, heads=2, width=32, d_head=16, mlp=16)).eval()
    rows = pd.DataFrame(bridge.spectra(model, 40)).set_index(["layer", "head"])
    for layer, block in enumerate(model.blocks):
        centre = torch.eye(32).double() - 1 / 32
        for head in range(2):
            w_q, w_k = (centre @ (block.norm.weight.double()[:, None] * w[head].mT.double()) for w in (block.attention.w_q, block.attention.w_k))
            m = (w_q @ w_k.mT).detach()
            row = rows.loc[layer, head]
            assert row.dir_frac == pytest.approx(float(((m - m.mT) / 2).norm() / m.norm()), rel=1e-6)
            values = torch.linalg.eigvals(m)
            assert row.d_head == pytest.approx(float(values.imag.abs().sum() / values.abs().sum()), abs=1e-5)
            # a fresh model is random, so it lies within a few deviations of its own level of chance
            assert abs(row.d_head - row.d_head_null) < 5 * row.d_head_null_sd and abs(row.dir_frac - row.dir_frac_null) < 5 * row.dir_frac_null_sd
            assert row.dir_frac_null == pytest.approx(math.sqrt(0.5), abs=0.04)
