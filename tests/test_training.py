"""Training: the same run twice, killed in the middle, its learning rate against Hugging Face's, refusals."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from rope_heads import artefacts
from rope_heads.model import Config, Transformer
from rope_heads.recipes import RECIPES, Recipe, changed, configured
from rope_heads.tasks import LETTER, NUMBER, Batch
from rope_heads.training import Run, accuracy_by_hops, batch_rows, first_of_each, one_process, parameter_groups

TINY = {"layers": 2, "width": 32, "mlp": 64}
SHORT = Recipe(name="short", steps=30, batch=16, lr=1e-3, warmup=5)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_split(monkeypatch):
    """The first 4,800 sequences of each split: the data of a run without its ten seconds of drawing."""
    whole = {}

    def split(self, name, seed):
        if (self.name, name, seed) not in whole:
            rng = np.random.default_rng([self.key, seed, len(name)])
            whole[self.name, name, seed] = self.sample(4_800, None, rng)
        return whole[self.name, name, seed]

    monkeypatch.setattr(type(NUMBER), "split", split)


def start(folder, **more) -> Run:
    return Run("number", more.pop("recipe", SHORT), more.pop("seed", 0), folder, config=TINY, evaluate_every=10, tests_per_hop=20,
               checkpoint_every=10, report=lambda line: None, **more)


def weights(model: Transformer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_same_seed_same_weights_other_seed_other_weights(tmp_path):
    first, second = (weights(start(tmp_path / name).train()) for name in "ab")
    assert torch.equal(first, second)
    assert not torch.equal(first, weights(start(tmp_path / "c", seed=1).train()))


def stop_at(step, run, monkeypatch):
    """Trains until the step, as if interrupted there."""
    update = run._update
    monkeypatch.setattr(run, "_update", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt) if run.step == step else update(*a))
    with pytest.raises(KeyboardInterrupt):
        run.train()


def test_stopped_at_any_evaluation_it_goes_on_to_the_same_weights_and_log(tmp_path, monkeypatch):
    whole = weights(start(tmp_path / "whole").train())
    for stop in (12, 20, 29):
        folder = tmp_path / f"stopped-{stop}"
        stop_at(stop, start(folder), monkeypatch)
        again = start(folder)
        assert torch.equal(weights(again.train()), whole)
        logs = [artefacts.read_parquet(tmp_path / name / "log.parquet")[0] for name in ("whole", folder.name)]
        assert logs[0].equals(logs[1])
        assert not again.checkpoint.exists()


SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from rope_heads.recipes import Recipe
from rope_heads.training import Run
recipe = Recipe(name="killed", steps=400, batch=16, lr=1e-3, warmup=5)

def report(line):  # dies where it has a checkpoint and is not done, however fast the machine is
    if sys.argv[2:] == ["die"] and (Path(sys.argv[1]) / "checkpoint.safetensors").exists():
        os.kill(os.getpid(), signal.SIGKILL)

Run("number", recipe, 0, sys.argv[1], report=report, config={"layers": 2, "width": 32, "mlp": 64}, evaluate_every=10, tests_per_hop=20, checkpoint_every=10).train()
"""


def test_killed_in_the_middle_it_resumes_to_the_same_bytes(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def launch(name, *words):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / name), *words], env=environment, stdout=subprocess.DEVNULL)

    assert launch("whole").wait() == 0
    assert launch("killed", "die").wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert launch("killed").wait() == 0
    assert artefacts.sha256(tmp_path / "killed" / "model.safetensors") == artefacts.sha256(tmp_path / "whole" / "model.safetensors")


def test_kept_weights_log_and_provenance(tmp_path):
    run = start(tmp_path, keep=(0, 10, 25))
    model = run.train()
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"model.safetensors", "step-00000.safetensors", "step-00010.safetensors", "step-00025.safetensors"}
    log, origin = artefacts.read_parquet(tmp_path / "log.parquet")
    assert log.step.unique().tolist() == [0, 10, 20, 30] and log.groupby("step").hops.apply(list).iloc[0] == [1, 2, 3, 4]
    assert origin["seed"] == 0 and origin["recipe"]["steps"] == 30 and origin["versions"]["torch"]
    tests = first_of_each(NUMBER.split("test", 0), 20)
    assert log[log.step == 30].accuracy.tolist() == [accuracy_by_hops(model, tests)[h] for h in (1, 2, 3, 4)]
    assert torch.equal(weights(run.train()), weights(model)), "a finished run is read, not trained again"


def test_measures_are_called_at_every_evaluation_and_survive_a_resume(tmp_path):
    start(tmp_path, measure=lambda model, step: [{"step": step, "norm": float(model.embedding.weight.norm())}]).train()
    table = artefacts.read_parquet(tmp_path / "measures.parquet")[0]
    assert table.step.tolist() == [0, 10, 20, 30] and table.norm.nunique() == 4


def test_a_run_begun_with_measures_goes_on_with_them_only(tmp_path, monkeypatch):
    measure = lambda model, step: [{"step": step}]  # noqa: E731
    stop_at(12, start(tmp_path, measure=measure), monkeypatch)
    with pytest.raises(ValueError, match="was begun with --measure: pass it again"):
        start(tmp_path).train()
    start(tmp_path, measure=measure).train()
    assert artefacts.read_parquet(tmp_path / "measures.parquet")[0].step.tolist() == [0, 10, 20, 30]


def test_it_stops_when_every_hop_count_is_good_enough(tmp_path, monkeypatch):
    accuracies = iter([{1: 0.1, 2: 0.1}, {1: 1.0, 2: 0.5}, {1: 0.9, 2: 0.95}, {1: 1.0, 2: 1.0}])
    monkeypatch.setattr("rope_heads.training.accuracy_by_hops", lambda model, batch: next(accuracies))
    run = start(tmp_path, until=0.9)
    run.train()
    assert run.step == 20 and run.final.exists() and artefacts.read_json(tmp_path / "run.json")[1]["step"] == 20
    with pytest.raises(ValueError, match="until must be in"):
        start(tmp_path, until=1.5)


def test_rate_is_the_trainers_linear_schedule():
    from transformers import get_linear_schedule_with_warmup

    recipe = RECIPES["paper"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, recipe.warmup, recipe.steps)
    for step in range(recipe.steps):
        assert recipe.rate(step) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_weight_decay_spares_biases_and_norms():
    decayed, spared = parameter_groups(Transformer(Config(**TINY)), 0.1)
    assert all(p.dim() > 1 for p in decayed["params"]) and all(p.dim() == 1 for p in spared["params"])
    assert sum(p.numel() for group in (decayed, spared) for p in group["params"]) == sum(p.numel() for p in Transformer(Config(**TINY)).parameters())


def test_batches_cover_each_epoch_once_and_later_epochs_in_another_order():
    rows = np.concatenate([batch_rows(3, step, 8, 40) for step in range(15)])  # three epochs of 40
    for epoch in range(3):
        assert sorted(rows[40 * epoch : 40 * (epoch + 1)]) == list(range(40))
    assert rows[:40].tolist() == list(range(40)) and rows[40:80].tolist() != rows[80:].tolist() != list(range(40))
    assert sorted(np.concatenate([batch_rows(0, s, 16, 40) for s in range(5)])) == sorted(list(range(40)) * 2), "a batch across two epochs"


def test_accuracy_counts_the_answer_after_the_query():
    """A model whose unembedding bias always says id 5."""
    model = Transformer(Config(**TINY)).eval()
    torch.nn.init.zeros_(model.unembedding.weight)
    model.unembedding.bias.data[5] = 1.0
    answers = np.array([5, 5, 6, 5])
    batch = Batch(np.ones((4, 17), dtype=np.int64), answers, np.array([1, 1, 1, 3]))
    assert accuracy_by_hops(model, batch) == {1: pytest.approx(2 / 3), 3: 1.0}


def test_it_learns_the_first_hop(tmp_path):
    """Four layers, 64 wide, 1-hop sequences alone: from chance (1/8 within the window) to more than half in a few hundred steps."""
    rng = np.random.default_rng(0)
    model = Transformer(Config(vocab_size=LETTER.vocabulary_size, layers=2, width=64, dropout=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(400):
        batch = LETTER.sample(128, 1, rng)
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(batch.tokens), last=True)[:, 0], torch.from_numpy(batch.answers))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert accuracy_by_hops(model, LETTER.sample(500, 1, rng))[1] > 0.5


@pytest.mark.parametrize("bad, message", [
    ({"seed": -1}, "seed must be >= 0, got -1"),
    ({"keep": [31]}, "kept steps must be between 0 and 30, got 31"),
    ({"evaluate_every": 0}, "evaluate_every"),
])  # fmt: skip
def test_bad_values_are_named(tmp_path, bad, message):
    values = {"seed": 0, "evaluate_every": 10} | bad
    with pytest.raises(ValueError, match=message):
        Run("number", SHORT, values.pop("seed"), tmp_path, config=TINY, **values)


def test_unknown_task_and_recipe_values_are_named(tmp_path):
    with pytest.raises(ValueError, match="task must be one of number, letter, letter_proper, letter_12, letter_12_debiased, number_64, got 'numbers'"):
        Run("numbers", SHORT, 0, tmp_path)
    with pytest.raises(ValueError, match="'stepz' is no part of a recipe"):
        changed(SHORT, {"stepz": 1})
    for bad in ({"steps": 0}, {"lr": -1.0}, {"precision": "fp8"}, {"lr": float("nan")}, {"steps": "many"}, {"steps": 1.7}, {"steps": True},
                {"batch": None}, {"lr": [1]}, {"steps": float("inf")}, {"lr": float("inf")}, {"beta1": 2.0}, {"dropout": 1.0}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            changed(SHORT, bad)
    assert changed(SHORT, {"batch": 8, "lr": 0.1}).name == "short,batch=8,lr=0.1"


def test_a_folder_of_another_run_is_refused(tmp_path):
    start(tmp_path).train()
    with pytest.raises(ValueError, match="holds a run with another recipe, seed"):
        start(tmp_path, seed=1, recipe=changed(SHORT, {"lr": 0.5})).train()


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    run = start(tmp_path)
    run.folder.mkdir(exist_ok=True)
    model, optimizer = Transformer(run.config), None
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), fused=True)
    run._save(model, optimizer)
    content = run.checkpoint.read_bytes()
    if damage == "cut":
        run.checkpoint.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        run.checkpoint.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    else:
        model.save(run.checkpoint)
    with pytest.raises(ValueError, match="checkpoint.safetensors"):
        start(tmp_path).train()


def test_a_run_that_was_stopped_early_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_heads.training.accuracy_by_hops", lambda model, batch: {1: 0.9})
    assert start(tmp_path, until=0.5).train() is not None
    origin = artefacts.read_json(tmp_path / "run.json")[1]
    assert origin["step"] == 10 and "--until 0.5" in origin["command"], "the first evaluation after an update decides"
    assert start(tmp_path, until=0.5).train() is not None
    for until in (None, 0.95):
        with pytest.raises(ValueError, match="was stopped at step 10 of 30"):
            start(tmp_path, until=until).train()


def test_what_a_run_did_not_keep_cannot_be_had_afterwards(tmp_path):
    start(tmp_path).train()
    with pytest.raises(ValueError, match="without step-00010.safetensors, measures.parquet"):
        start(tmp_path, keep=[10], measure=lambda model, step: []).train()


def interrupted(folder, monkeypatch, **more) -> Run:
    run = start(folder, **more)
    monkeypatch.setattr(run, "_update", lambda *a, u=run._update: (_ for _ in ()).throw(KeyboardInterrupt) if run.step == 15 else u(*a))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    return run


def test_a_checkpoint_and_tables_that_do_not_belong_together_are_refused(tmp_path, monkeypatch):
    run, other = (interrupted(tmp_path / str(seed), monkeypatch, seed=seed) for seed in (0, 1))
    own = run.checkpoint.read_bytes()
    run.checkpoint.write_bytes(other.checkpoint.read_bytes())
    with pytest.raises(ValueError, match="no checkpoint of this run"):
        start(tmp_path / "0").train()
    run.checkpoint.write_bytes(own)
    (tmp_path / "0" / "log.parquet").unlink()
    with pytest.raises(ValueError, match="do not belong to its checkpoint of step 10"):
        start(tmp_path / "0").train()


def test_another_model_in_the_folder_is_refused(tmp_path):
    tmp_path.joinpath("run").mkdir()
    Transformer(Config(**{**TINY, "vocab_size": 129})).save(tmp_path / "run" / "model.safetensors")
    with pytest.raises(ValueError, match="another model than this run's"):
        start(tmp_path / "run").train()


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / ".model.safetensors.1.tmp").write_bytes(b"left over")
    with one_process(tmp_path):
        with pytest.raises(ValueError, match="another process trains in"):
            start(tmp_path).train()
    assert not list(tmp_path.glob("*.tmp"))
    start(tmp_path).train()


# ---- what came after the first runs ------------------------------------------------------------------------------------------------

BEFORE = json.loads("""{"task": "number", "seed": 0,
 "recipe": {"name": "fast", "steps": 2000, "batch": 64, "lr": 0.0005, "warmup": 200, "beta1": 0.95, "beta2": 0.999, "weight_decay": 0.0001,
            "dropout": 0.0, "clip": 0.0, "precision": "fp32"},
 "config": {"vocab_size": 137, "layers": 12, "heads": 1, "width": 128, "d_head": 128, "mlp": 512, "positions": "rope", "rotary_dim": 128,
            "base": 10000.0, "pairing": "adjacent", "context": null, "bias": false, "dropout": 0.0, "norm_eps": 1e-05, "init_std": 0.02}}""")


def test_runs_made_before_the_interventions_existed_keep_their_identity(tmp_path):
    """Settings that came later stay out of a run's identity at their default, so run.json and checkpoints from before are taken for what they are."""
    run = Run("number", RECIPES["fast"], 0, tmp_path)
    assert json.dumps(run.identity) == json.dumps(BEFORE)
    assert Config(**BEFORE["config"]) == run.config


def test_an_intervention_has_an_identity_and_a_folder_name_of_its_own(tmp_path):
    recipe, config = configured(RECIPES["fast"], {"nope_from": 4, "steps": 100, "planes": "slowest"})
    assert recipe.name == "fast,steps=100,nope_from=4,planes=slowest" and recipe.steps == 100 and config == {"nope_from": 4, "planes": "slowest"}
    identity = Run("number", recipe, 0, tmp_path, config=config).identity
    assert identity["config"] == {**BEFORE["config"], "nope_from": 4, "planes": "slowest"}
    identity = Run("number", configured(RECIPES["fast"], {"long_share": 0.05})[0], 0, tmp_path).identity
    assert identity["recipe"] == {**BEFORE["recipe"], "name": "fast,long_share=0.05", "long_share": 0.05}
    assert configured(SHORT, {}) == (SHORT, {})


def test_model_settings_of_a_wrong_kind_are_named():
    for bad in ({"nope_from": "four"}, {"nope_from": 4.0}, {"planes": 16}, {"layers": True}, {"base": "big"}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be of type"):
            configured(SHORT, bad)
    with pytest.raises(ValueError, match="'vocab_size' is no part of a recipe .* nor of a model .*layers"):
        configured(SHORT, {"vocab_size": 5})


def test_long_sequences_take_the_place_of_their_share_and_end_like_others(tmp_path):
    run = Run("letter", changed(SHORT, {"long_share": 0.05, "batch": 64}), 0, tmp_path, config=TINY)
    tokens, answers = (torch.from_numpy(a) for a in LETTER.sample(64, None, np.random.default_rng(0))[:2])
    counts, lengths = [], []
    for run.step in range(400):
        (kept, kept_answers), *long = run._lengthened(tokens, answers)
        assert len(kept) + sum(len(part) for part, _ in long) == 64
        for part, answer in long:
            assert LETTER.solve(part.numpy()).tolist() == answer.tolist()
            lengths.append(part.shape[1] - 17)
        counts.append(64 - len(kept))
        there = [i for i in range(64) if any(torch.equal(tokens[i], row) for row in kept)] if run.step < 5 else None
        assert there is None or torch.equal(tokens[there], kept) and torch.equal(answers[there], kept_answers)
    assert np.mean(counts) == pytest.approx(0.05 * 64, abs=4 * np.sqrt(64 * 0.05 * 0.95 / 400))
    assert min(lengths) == 1 and max(lengths) == 51 and len(set(lengths)) > 45
    again = run._lengthened(tokens, answers)
    assert all(torch.equal(a, b) for x, y in zip(again, run._lengthened(tokens, answers)) for a, b in zip(x, y)), "a function of seed and step"


def test_the_gradient_over_two_lengths_is_that_of_each_sequence_alone(tmp_path):
    run = Run("number", changed(SHORT, {"long_share": 0.3, "dropout": 0.0, "clip": 0.0}), 0, tmp_path, config=TINY)
    model = Transformer(run.config).train()
    tokens, answers = (torch.from_numpy(a) for a in NUMBER.sample(16, None, np.random.default_rng(0))[:2])
    run.step = next(step for step in range(100) if setattr(run, "step", step) or len(run._lengthened(tokens, answers)) == 2)
    for part, right in run._lengthened(tokens, answers):
        for row, answer in zip(part, right):
            (torch.nn.functional.cross_entropy(model(row[None])[:, -1], answer[None]) / 16).backward()
    one_by_one = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    taken = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step = lambda: taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
    run._update(model, optimizer, tokens, answers)
    for name, gradient in one_by_one.items():
        torch.testing.assert_close(taken[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("more", [{"long_share": 0.3}, {"index_layers": 1}])
def test_an_intervention_resumes_to_the_same_weights(tmp_path, monkeypatch, more):
    recipe = changed(SHORT, more)
    whole = weights(start(tmp_path / "whole", recipe=recipe).train())
    interrupted(tmp_path / "stopped", monkeypatch, recipe=recipe)
    assert torch.equal(weights(start(tmp_path / "stopped", recipe=recipe).train()), whole)
    assert not torch.equal(whole, weights(start(tmp_path / "plain").train()))


def test_dropout_on_embeddings_is_a_choice():
    assert changed(SHORT, {"drop_embeddings": True}).drop_embeddings is True
    for bad in (1, "yes", None):
        with pytest.raises(ValueError, match="drop_embeddings must be of type bool"):
            changed(SHORT, {"drop_embeddings": bad})
    tokens = torch.arange(1, 18)[None]
    for wanted in (False, True):
        model = Transformer(Config(layers=1, dropout=0.5, drop_embeddings=wanted)).train()
        assert bool((model.embed(tokens) == 0).any()) is wanted
