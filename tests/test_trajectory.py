"""Measurements along training against direct computation, and their joining into tables."""

import numpy as np
import pandas as pd
import pytest
import torch

from rope_heads import artefacts, runs
from rope_heads.model import Config, Transformer
from rope_heads.scores import positional_symbolic, swap_logits
from rope_heads.tasks import LETTER, NUMBER, QUERY
from rope_heads.recipes import Recipe
from rope_heads.training import Run, first_of_each
from rope_heads.trajectory import Trajectory, ten_steps


@pytest.fixture(autouse=True)
def small_split(monkeypatch):
    monkeypatch.setattr(type(NUMBER), "split", lambda self, name, seed: self.sample(2_400, None, np.random.default_rng([seed, len(name)])))


def test_rows_are_means_over_the_prompts():
    torch.manual_seed(0)
    model = Transformer(Config(layers=2, heads=2, width=32)).eval()
    with torch.inference_mode():
        rows = pd.DataFrame(Trajectory(NUMBER, 3, 1_000)(model, 50))
        tokens = torch.from_numpy(first_of_each(NUMBER.split("test", 3), 75).tokens)
        positional, symbolic = positional_symbolic(swap_logits(model, 1, model.layer_inputs(tokens)[1]).double())
    assert rows[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and (rows.prompts == 300).all()
    last = rows[(rows.layer == 1) & (rows["head"] == 1)].iloc[0]
    assert last.positional == pytest.approx(float(positional[:, 1].mean())) and last.symbolic_sd == pytest.approx(float(symbolic[:, 1].std()))
    assert last.positional_q05 <= last.positional_q50 <= last.positional_q95 and len(last.plane_use) == 8
    assert np.isfinite(rows.drop(columns="plane_use").to_numpy(dtype=float)).all()


def test_chain_queries_are_those_on_the_chain():
    """The mean over positions that the solver visits, prompt by prompt."""
    torch.manual_seed(0)
    model = Transformer(Config(layers=1, width=32)).eval()
    with torch.inference_mode():
        row = Trajectory(NUMBER, 0, 1_000)(model, 50)[0]
        batch = first_of_each(NUMBER.split("test", 0), 25)
        inputs = model.layer_inputs(torch.from_numpy(batch.tokens))[0]
        scores = {q: positional_symbolic(swap_logits(model, 0, inputs, q))[0][:, 0] for q in range(8, QUERY)}
    on_chain = [float(scores[p][i]) for i, tokens in enumerate(batch.tokens) for p in NUMBER.chain(tokens) if 8 <= p < QUERY]
    assert row["positional_chain"] == pytest.approx(np.mean(on_chain), abs=1e-5)


def test_ten_steps_hold_the_ends_and_fall_on_evaluations():
    for steps in (6_750, 1_750):
        chosen = ten_steps(steps)
        assert len(chosen) == 10 and chosen[0] == 0 and chosen[-1] == steps and all(step % 50 == 0 for step in chosen)


def test_runs_are_joined_with_their_provenance(tmp_path):
    recipe = Recipe(name="tiny", steps=20, batch=8, warmup=2)
    for task, seed in (("number", 0), ("number", 1), ("letter", 0)):
        measure = Trajectory(NUMBER if task == "number" else LETTER, seed, 20)
        Run(task, recipe, seed, tmp_path / "runs" / "tiny" / f"{task}-{seed}", config={"layers": 1, "width": 16, "mlp": 16}, evaluate_every=10,
            tests_per_hop=10, measure=measure, report=lambda line: None).train()  # fmt: skip
    rows = runs.collect(tmp_path / "runs", ["tiny"], "small", tmp_path / "data")
    accuracy, origin = artefacts.read_parquet(tmp_path / "data" / "runs" / "small" / "accuracy.parquet")
    assert rows == {"accuracy": 3 * 3 * 4, "heads": 3 * 3} and len(accuracy) == 36
    assert (accuracy.recipe == "tiny").all() and accuracy[["task", "seed"]].drop_duplicates().to_numpy().tolist() == [["letter", 0], ["number", 0], ["number", 1]]
    assert len(origin["runs"]) == 3 and all(run["command"].startswith("rope-heads train") and run["seconds"] > 0 for run in origin["runs"])
    assert "3 runs" in runs.describe(origin)
    (tmp_path / "runs" / "tiny" / "number-1" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="not finished: tiny/number-1"):
        runs.collect(tmp_path / "runs", ["tiny"], "small", tmp_path / "data")
    assert runs.collect(tmp_path / "runs", ["tiny"], "small", tmp_path / "data", partial=True)["accuracy"] == 36
    (tmp_path / "runs" / "tiny" / "number-9").mkdir()
    (tmp_path / "runs" / "tiny" / "number-9" / "run.json").write_text((tmp_path / "runs" / "tiny" / "number-1" / "run.json").read_text())
    assert runs.collect(tmp_path / "runs", ["tiny"], "small", tmp_path / "data", partial=True)["accuracy"] == 36, "a run that has just begun"
    with pytest.raises(ValueError, match="no run of tiny in .* has been evaluated yet"):
        runs.collect(tmp_path / "runs", ["tiny"], "small", tmp_path / "data", partial=True, seeds=[9])
    (tmp_path / "runs" / "tiny" / "number-9" / "run.json").unlink()
    for into, recipes in (("../out", ["tiny"]), ("small", ["../tiny"]), ("", ["tiny"]), ("small", [str(tmp_path)])):
        with pytest.raises(ValueError, match="single folder names"):
            runs.collect(tmp_path / "runs", recipes, into, tmp_path / "data")
    assert runs.collect(tmp_path / "runs", ["tiny", "tiny"], "small", tmp_path / "data", partial=True)["accuracy"] == 36
    with pytest.raises(ValueError, match="holds no runs of absent"):
        runs.collect(tmp_path / "runs", ["tiny", "absent"], "small", tmp_path / "data", partial=True)
    with pytest.raises(ValueError, match="holds no runs"):
        runs.collect(tmp_path / "runs", ["absent"], "small", tmp_path / "data")


def test_prediction_interval_covers_a_new_seed_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = rng.normal(10, 2, size=(4_000, 6))
    inside = [low <= new <= high for *known, new in draws for low, high in [runs.prediction_interval(known, 0.9)]]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.02)
    for bad in ([1.0], [1.0, np.inf]):
        with pytest.raises(ValueError, match="at least two finite values"):
            runs.prediction_interval(bad)


def test_crossings_by_task_seed_and_hops():
    frame = pd.DataFrame([(t, 0, step, hops, step / 100 if t == "a" else 0.1) for t in "ab" for step in (0, 50, 100) for hops in (1, 2)],
                         columns=["task", "seed", "step", "hops", "accuracy"])  # fmt: skip
    crossed = runs.crossings(frame, 0.75)
    assert crossed["a", 0, 1] == pytest.approx(75) and crossed["b", 0, 2] == np.inf
