"""The graph of the Snakefile, end to end on a tiny recipe: all at once, after an interruption, through a cluster's submit command.

Each test works in a checkout of its own with smaller models and test sets; its jobs are the real command line.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rope_heads import artefacts

ROOT = Path(__file__).resolve().parents[1]

SMALL = '''
"""rope-heads with two small layers, few sequences, a checkpoint every second step; dies once, at a checkpoint, when the file `die` says at which step."""
import os, pathlib, signal, sys
import numpy as np
from rope_heads import __main__, final, tasks, training, trajectory

assert os.environ["OMP_NUM_THREADS"] == "1"
for module, name, value in [(final, "PROMPTS", 10), (final, "KEPT_PROMPTS", 5), (final, "PLANE_TESTS", 20), (trajectory, "PROMPTS", 5),
                            (trajectory, "MANY_PROMPTS", 10), (trajectory, "OTHER_PROMPTS", 3)]:
    assert hasattr(module, name)
    setattr(module, name, value)
for task in (tasks.NUMBER, tasks.LETTER):
    type(task).split = lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)]))
class Run(training.Run):
    def __init__(self, *arguments, config=None, **more):
        small = {"layers": 2, "width": 16, "mlp": 16} | (config or {})
        super().__init__(*arguments, config=small, evaluate_every=2, tests_per_hop=10, checkpoint_every=2, **more)

    def _save(self, *arguments):
        super()._save(*arguments)
        if (die := pathlib.Path("die")).exists() and self.step == int(die.read_text()):
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

training.Run = Run
sys.exit(__main__.main())
'''


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "data" / "published", root / "data" / "published")
    for name in ("Snakefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / "small.py").write_text(SMALL)
    return root


def snakemake(root, *arguments, config=()):
    """What Snakemake said, and its exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SNAKEMAKE")} | {
        "PYTHONPATH": str(root / "src"), "HOME": str(root / "home"), "XDG_CACHE_HOME": str(root / "home"), "TMPDIR": str(root)}  # fmt: skip
    environment.pop("OMP_NUM_THREADS", None)
    settings = [f"command={sys.executable} small.py", "recipe=fast", "set=batch=8,steps=6", "into=tiny", "tasks=number", "seeds=0-1", "keep=0,4", "weights=number-1"]
    done = subprocess.run([sys.executable, "-m", "snakemake", *arguments, "--config", *settings, *config], cwd=root, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    return done.returncode, done.stdout


def run(root, seed):
    return root / "runs" / "fast,batch=8,steps=6" / f"number-{seed}"


def tables(root):
    return {path.stem: artefacts.read_parquet(path) for path in (root / "data" / "runs" / "tiny").glob("*.parquet")}


def weights(path):
    return {name: tensor.numpy() for name, tensor in artefacts.read_tensors(path)[0].items()}


def test_everything_is_made_from_nothing_and_nothing_twice(checkout):
    code, said = snakemake(checkout, "-c2", "data")
    assert code == 0, said
    found = tables(checkout)
    assert {"accuracy", "heads", "tests", "looks", "ablation", "mechanism"} <= set(found)
    for frame, origin in found.values():
        assert set(frame.seed) == {0, 1} and set(frame.task) == {"number"} and len(origin["runs"]) == 2
    assert set(found["heads"][0].step) == {0, 2, 4, 6} and set(found["looks"][0].step) == {0, 4, 6}
    assert origin["runs"][0]["command"] == "rope-heads train --task number --recipe fast --seed 0 --set batch=8 --set steps=6 --measure --keep 0 4"
    assert artefacts.check_data(checkout / "data") == (len(list((checkout / "data").rglob("*.*"))) - 1, [])
    kept = weights(checkout / "data" / "runs" / "tiny" / "number-1.safetensors")
    for name, tensor in weights(run(checkout, 1) / "model.safetensors").items():
        np.testing.assert_allclose(kept[name].astype(np.float32), tensor, rtol=1e-3, atol=1e-7)

    code, said = snakemake(checkout, "-c2", "data")
    assert code == 0 and "Nothing to be done" in said
    shutil.rmtree(checkout / "data" / "runs")  # tables that are gone are joined again, without training
    code, said = snakemake(checkout, "-c2", "data")
    assert code == 0 and "rule collect_tiny" in said and "rule train_tiny" not in said and not artefacts.check_data(checkout / "data")[1]
    for name, (frame, _) in tables(checkout).items():
        pd.testing.assert_frame_equal(frame, found[name][0])


def test_an_interrupted_run_goes_on_from_its_checkpoint(checkout):
    (checkout / "die").write_text("4")
    code, said = snakemake(checkout, "-c1", "tiny", config=["seeds=0"])
    assert code != 0 and not (checkout / "die").exists() and not (run(checkout, 0) / "model.safetensors").exists(), said
    code, said = snakemake(checkout, "-c1", "tiny", config=["seeds=0", "weights="])
    assert code == 0 and "goes on from step 4" in said, said
    interrupted = weights(run(checkout, 0) / "model.safetensors")
    shutil.rmtree(checkout / "runs")
    code, said = snakemake(checkout, "-c1", "runs/fast,batch=8,steps=6/number-0/model.safetensors")
    assert code == 0 and "goes on" not in said, said
    for name, tensor in weights(run(checkout, 0) / "model.safetensors").items():
        np.testing.assert_array_equal(interrupted[name], tensor)


def test_a_cluster_is_given_every_job_but_the_last_step(checkout):
    """The submit command gets a job script as its last argument and prints a job's number; here it runs the script in the background."""
    submit = checkout / "submit.sh"
    submit.write_text('#!/bin/sh\necho "$1" >> submitted\nsh "$1" >> said 2>&1 &\necho $!\n')
    submit.chmod(0o755)
    code, said = snakemake(checkout, "--jobs", "2", "data", "--executor", "cluster-generic", "--cluster-generic-submit-cmd", str(submit),
                           "--seconds-between-status-checks", "1", "--latency-wait", "30", config=["seeds=0", "weights="])  # fmt: skip
    assert code == 0, said + (checkout / "said").read_text()
    submitted = [Path(line).name.split(".")[1] for line in (checkout / "submitted").read_text().splitlines()]
    assert sorted(submitted) == ["collect_tiny", "measure_tiny", "train_tiny"]
    assert set(tables(checkout)["accuracy"][0].seed) == {0} and not artefacts.check_data(checkout / "data")[1]


def test_the_whole_graph_is_what_the_issue_asks_for(checkout):
    """A dry run without changes: 8 seeds x 3 tasks and 5 seeds x 2 tasks, and 3 seeds of each intervention."""
    done = subprocess.run([sys.executable, "-m", "snakemake", "-n", "-p", "data"], cwd=checkout, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(checkout / "src"), "HOME": str(checkout), "XDG_CACHE_HOME": str(checkout)})
    assert done.returncode == 0, done.stderr
    trained = {tuple(line.split("rope_heads ")[1].split()[1:7]) for line in done.stdout.splitlines() if "rope_heads train" in line}
    expected = {("--task", task, "--recipe", "paper", "--seed", str(seed)) for task in ("number", "letter", "letter_proper") for seed in range(8)}
    expected |= {("--task", task, "--recipe", "fast", "--seed", str(seed)) for task in ("number", "letter") for seed in range(5)}
    assert trained == expected and done.stdout.count("rope_heads measure") == 34 and done.stdout.count("rope_heads collect") == 4
    changed = [line for line in done.stdout.splitlines() if "rope_heads train" in line and "--set" in line]
    assert len(changed) == 27 and done.stdout.count("rope_heads lengths") == 34 + 27, "at most 40 models more, and each is measured on long inputs"


def test_the_toy_models_are_those_of_the_package(checkout):
    from rope_heads.induction import ARMS
    from rope_heads.induction_runs import run_folder, schedule

    code, said = snakemake(checkout, "-n", "-p", "toys", config=["seeds="])
    assert code == 0, said
    trained = {line.split(" toy ")[1].split(" --runs")[0] for line in said.splitlines() if " toy --arm" in line}
    expected = {f'--arm "{arm}" --seed {seed}' for arm, spec in ARMS.items() for seed in range(spec.seeds)}
    expected |= {f'--arm "{arm}" --seed {seed} --set after=None --set cap=6000' for arm, spec in ARMS.items() if spec.published for seed in range(2)}
    assert trained == expected and said.count(" toy --collect") == 2
    assert str(run_folder("runs", "RoPE free", 1, schedule({"after": None, "cap": 6000}))).replace(os.sep, "/") in said
    assert all(str(run_folder("runs", arm, 0)).replace(os.sep, "/") in said for arm in ARMS)


def test_the_audit_trains_at_most_sixty_models_and_measures_what_its_claims_read(checkout):
    code, said = snakemake(checkout, "-n", "-p", "audit", config=["recipe=paper", "set=", "into=paper"])
    assert code == 0, said
    trained = [line.split(" train ")[1].split(" --runs")[0] for line in said.splitlines() if " train --task" in line]
    assert len(set(trained)) == len(trained) == 15 + 30 + 10 + 3 and all("--measure" in line for line in trained)
    assert "--task letter_12_debiased --recipe fast --seed 4 --measure" in trained
    assert "--task number --recipe fast --seed 2 --set heads=4 --set layers=2 --measure" in trained
    assert said.count(" lengths --run") == 15 and said.count(" collect --recipe") == 5
    assert "--task number --recipe fast --seed 2 --set steps=8000 --set heads=4 --set layers=2 --measure" in trained
    assert "--recipe fast --into letter_12 --only accuracy audit lengths --tasks letter_12 letter_12_debiased --seeds 0 1 2 3 4" in said


def test_a_recipe_that_does_not_exist_is_named(checkout):
    code, said = snakemake(checkout, "-n", "data", config=["recipe=slow"])
    assert code != 0 and "recipe must be one of paper, fast, got slow" in said
