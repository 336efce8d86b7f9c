"""Long inputs: changes at test time against logits written out; counting, resuming, refusals."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from models import built, inputs, plainly
from scipy import stats

from rope_heads import artefacts, lengths
from rope_heads.audit_tasks import ALL_TASKS
from rope_heads.lengths import CHANGES, EIGHT, GRID, Setting, changed, right_answers, sequences, settings, wilson
from rope_heads.long_pass import read
from rope_heads.model import Config, Transformer
from rope_heads.tasks import LENGTH, LETTER, LETTER_PROPER, NUMBER, TASKS, Batch
from rope_heads.recipes import Recipe
from rope_heads.training import Run

def test_interpolated_positions_stay_within_the_training_range():
    model = built()
    prefix, core = inputs(model, longest=70)
    before = [block.attention.angles.clone() for block in model.blocks]
    with torch.inference_mode():
        for k in (0, 70):
            found = read(changed(model, "interpolated", k), prefix[:, :k], core, [k])[:, 0]
            wanted = plainly(model, torch.cat((prefix[:, :k], core), 1), stretch=16 / (16 + k))
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(a, block.attention.angles) for a, block in zip(before, model.blocks)), "the model itself is as it was"


def test_planes_switched_off_add_nothing_to_any_logit():
    model = built(heads=1, width=128, layers=2)
    for change, off in (("no fast planes", range(8)), ("no slow planes", range(32, 64)), ("no first planes", range(32)), ("no odd planes", range(0, 64, 2))):
        now = changed(model, change)
        x = torch.randn(2, 9, 128)
        for block, other in zip(now.blocks, model.blocks):
            q, k, _ = (t[:, :, 0].unflatten(-1, (64, 2)) for t in other.attention.project(x, 9))
            keep = [plane for plane in range(64) if plane not in off]
            wanted = torch.einsum("bqpc,bkpc->bqk", q[:, :, keep], k[:, :, keep]) / 128**0.5
            causal = torch.ones(9, 9).tril().bool()
            torch.testing.assert_close(block.attention.logits(x)[:, 0][:, causal], wanted[:, causal], atol=1e-4, rtol=1e-4)


def test_tripled_logits_are_three_times_those_of_the_model_which_stays_as_it_was():
    model, x = built(), torch.randn(2, 9, 24)
    for block, other in zip(changed(model, "tripled").blocks, model.blocks):
        seen = torch.ones(9, 9).tril().bool()
        before = other.attention.logits(x)[..., seen]
        torch.testing.assert_close(block.attention.logits(x)[..., seen], 3 * before, atol=1e-5, rtol=1e-5)
    assert math.isclose(math.log(LENGTH + GRID[-1]) / math.log(LENGTH), 3, abs_tol=0.01)


def test_half_is_what_half_precision_keeps():
    model = built()
    now = changed(model, "half")
    for a, b in zip(model.parameters(), now.parameters()):
        assert torch.equal(b, a.half().float())
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), now.parameters()))


@pytest.mark.parametrize("task", TASKS.values(), ids=str)
@pytest.mark.parametrize("kind", ["own", "uniform", "repeat"])
def test_every_length_of_a_block_is_a_sequence_of_the_task(task, kind):
    drawn = sequences(task, 3, 7, kind)
    assert drawn.prefix.shape == (20, 1_000) and drawn.core.tokens.shape == (20, 17) and np.bincount(drawn.core.hops).tolist() == [0, 5, 5, 5, 5]
    for k in (0, 1, 40, 1_000):
        assert task.solve(np.hstack([drawn.prefix[:, :k], drawn.core.tokens])).tolist() == drawn.core.answers.tolist()
    assert np.array_equal(drawn.core.tokens, sequences(task, 3, 7).core.tokens), "the task's tokens do not depend on what is added"
    assert not np.array_equal(drawn.core.tokens, sequences(task, 4, 7).core.tokens) and not np.array_equal(drawn.core.tokens, sequences(task, 3, 8).core.tokens)


def test_the_grid_is_the_papers_and_the_short_one_is_part_of_it():
    from rope_heads.papers import published_length

    assert list(GRID) == published_length("number").added.tolist() and set(EIGHT) <= set(GRID) and len(EIGHT) == 8
    assert sequences(NUMBER, 0, 0).prefix.shape == (20, 5_000)
    assert [s.inputs for s in settings(LETTER, "readings")] == ["letter_proper"] and settings(NUMBER, "readings") == []
    assert [s.inputs for s in settings(ALL_TASKS["letter_12"], "readings")] == ["letter_12_debiased"]
    assert {s.change for what in ("changes", "controls") for s in settings(NUMBER, what)} == set(CHANGES) - {"none"}
    assert [(s.kind, s.change, s.added) for s in settings(LETTER, "sharper")] == [("own", "sharper", GRID), ("repeat", "sharper", EIGHT)]


def test_a_crowd_of_two_kinds_has_the_keys_of_one_and_the_values_of_the_other():
    own, copies, mixed = (sequences(LETTER, 1, 2, kind) for kind in ("own", "repeat", "own/repeat"))
    assert own.values is None and np.array_equal(mixed.core.tokens, own.core.tokens)
    assert np.array_equal(mixed.prefix, own.prefix) and np.array_equal(mixed.values, copies.prefix)
    model = built(vocab_size=LETTER.vocabulary_size, heads=1, width=128)
    said = read(model, *(torch.from_numpy(t) for t in (mixed.prefix[:, :30], mixed.core.tokens)), [30], values=torch.from_numpy(mixed.values[:, :30]))
    wanted = said[:, 0].argmax(-1).detach().numpy() == mixed.core.answers
    assert np.array_equal(right_answers(model, mixed._replace(core=Batch(mixed.core.tokens, said[:, 0].argmax(-1).numpy(), mixed.core.hops)), [30]), np.ones((1, 20), bool))
    assert np.array_equal(right_answers(model, mixed, [30])[0], wanted)
    assert {s.kind for s in settings(LETTER, "crowds")} == {"own/repeat", "repeat/own"}


@pytest.mark.parametrize("change", ["none", "interpolated", "no fast planes"])
def test_right_answers_are_those_of_the_model_on_each_input(change, monkeypatch):
    """Three prompts a pass, and answers that are right in about half of the cases."""
    monkeypatch.setattr(lengths, "prompts_at_once", lambda added: 3)
    model = built(vocab_size=NUMBER.vocabulary_size, heads=1, width=128)
    drawn = sequences(NUMBER, 0, 7)
    added = [0, 30, 90]
    said = np.stack([changed(model, change, k)(torch.from_numpy(np.hstack([drawn.prefix[:, :k], drawn.core.tokens])))[:, -1].argmax(-1).numpy() for k in added])
    answers = np.where(np.arange(20) % 2 == 0, said[1], drawn.core.answers)
    found = right_answers(model, drawn._replace(core=drawn.core._replace(answers=answers)), added, change)
    assert np.array_equal(found, said == answers) and 0 < found.mean() < 1


def test_wilson_is_scipys():
    for right, tests in ((0, 25), (1, 25), (99, 100), (100, 100), (37, 100)):
        wanted = stats.binomtest(right, tests).proportion_ci(0.95, "wilson")
        low, high = wilson(right, tests)
        assert (low, high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a tiny model on the Number task."""
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "number-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(NUMBER), "split", lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)])))
        Run("number", Recipe(name="tiny", steps=10, batch=8, warmup=2), 0, folder, config={"layers": 2, "width": 16, "mlp": 16}, report=lambda line: None).train()
    return folder


@pytest.fixture
def few(monkeypatch):
    """A grid of a few short lengths, and blocks of 4 sequences, so that a run takes a second."""
    for name, value in {"GRID": (0, 4, 30, 60), "EIGHT": (0, 4, 30), "BLOCK": 1, "BLOCKS": 4, "FAR_BLOCKS": 2, "NEAR": 30,
                        "PLANES_OFF": {name: range(1 + i, 9, 2) for i, name in enumerate(lengths.PLANES_OFF)}}.items():
        monkeypatch.setattr(lengths, name, value)


def copied(run, tmp_path):
    import shutil

    return shutil.copytree(run, tmp_path / "number-0")


def test_the_table_counts_what_the_model_says(run, few, tmp_path):
    folder = copied(run, tmp_path)
    assert lengths.measure_run(folder, report=lambda line: None) == 16
    table, origin = artefacts.read_parquet(folder / "lengths.parquet")
    assert table.groupby("added").tests.first().to_dict() == {0: 4, 4: 4, 30: 4, 60: 2} and origin["command"].endswith("number-0 --what main")
    model = Transformer.load(folder / "model.safetensors")
    for k, blocks in ((4, 4), (60, 2)):
        right = np.zeros(4, int)
        for block in range(blocks):
            drawn = sequences(NUMBER, 0, block)
            said = model(torch.from_numpy(np.hstack([drawn.prefix[:, :k], drawn.core.tokens])))[:, -1].argmax(-1).numpy()
            right += [((said == drawn.core.answers) & (drawn.core.hops == h)).sum() for h in (1, 2, 3, 4)]
        rows = table[table.added == k]
        assert rows.right.tolist() == right.tolist() and np.allclose(rows.accuracy, right / blocks)
        assert ((rows.low <= rows.accuracy) & (rows.accuracy <= rows.high)).all()
    assert (folder / "gaps.parquet").exists() and not (folder / "lengths.part.npz").exists()


def test_interrupted_it_goes_on_to_the_same_tables(run, few, tmp_path, monkeypatch):
    whole, stopped = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    lengths.measure_run(whole, report=lambda line: None)
    calls, original = [], lengths.right_answers

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(lengths, "right_answers", breaks)
    with pytest.raises(KeyboardInterrupt):
        lengths.measure_run(stopped, report=lambda line: None)
    said = []
    lengths.measure_run(stopped, report=said.append)
    assert "goes on after block 2 of 4" in said and len(calls) == 5, "two blocks before, one broken off, two after"
    for name in ("lengths", "gaps"):
        a, b = (artefacts.read_parquet(folder / f"{name}.parquet")[0] for folder in (whole, stopped))
        pd.testing.assert_frame_equal(a, b)
    lengths.measure_run(stopped, report=said.append)
    assert len(calls) == 5, "what stands in the table is not measured again"


def test_more_settings_join_the_table_and_other_weights_empty_it(run, few, tmp_path):
    folder = copied(run, tmp_path)
    lengths.measure_run(folder, ["main", "changes", "controls", "kinds", "sharper"], report=lambda line: None)
    table = artefacts.read_parquet(folder / "lengths.parquet")[0]
    assert set(table.change) == set(CHANGES) and set(table.kind) == {"own", "uniform", "repeat"} and not table.duplicated(["inputs", "kind", "change", "added", "hops"]).any()
    other = Transformer(Config(vocab_size=NUMBER.vocabulary_size, layers=2, width=16, mlp=16)).eval()
    other.save(folder / "model.safetensors")
    assert lengths.measure_run(folder, ["short"], report=lambda line: None) == 12
    assert lengths.measure_run(folder, [], added=[60, 2, 0], report=lambda line: None) == 20


@pytest.mark.parametrize("task", sorted(set(ALL_TASKS) - set(TASKS)))
def test_audit_tasks_are_measured_too(task, few, tmp_path, monkeypatch):
    monkeypatch.setattr(type(ALL_TASKS[task]), "split", lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)])))
    folder = tmp_path / f"{task}-0"
    Run(task, Recipe(name="tiny", steps=2, batch=8, warmup=0), 0, folder, config={"layers": 2, "width": 16, "mlp": 16}, report=lambda line: None).train()
    if not settings(ALL_TASKS[task], "readings"):
        with pytest.raises(ValueError, match=f"readings measures nothing of task {task}"):
            lengths.measure_run(folder, ["readings"], report=lambda line: None)
    lengths.measure_run(folder, ["main", "readings"], report=lambda line: None)
    table = artefacts.read_parquet(folder / "lengths.parquet")[0]
    other = {"letter_12": "letter_12_debiased", "letter_12_debiased": "letter_12"}
    assert set(table.inputs) == {task, other.get(task, task)}


def test_collect_joins_the_tables_of_lengths(run, few, tmp_path):
    """Of two runs, and of them only what is asked for; a run that lacks a table is named with the command that makes it."""
    import shutil

    from rope_heads import runs

    first = copied(run, tmp_path / "runs" / "tiny")
    second = shutil.copytree(first, first.with_name("number-1"))
    lengths.measure_run(first, report=lambda line: None)
    with pytest.raises(ValueError, match=r"missing for tiny/number-1: measure them \(rope-heads lengths --run\)"):
        runs.collect(tmp_path / "runs", ["tiny"], "lengths", tmp_path / "data", only=["lengths"])
    lengths.measure_run(second, report=lambda line: None)
    assert runs.collect(tmp_path / "runs", ["tiny"], "lengths", tmp_path / "data", only=["lengths", "gaps"])["lengths"] == 32
    table, origin = artefacts.read_parquet(tmp_path / "data" / "runs" / "lengths" / "lengths.parquet")
    assert table.columns[:4].tolist() == ["recipe", "task", "seed", "step"] and origin["command"].endswith("--recipe tiny --only lengths gaps")
    assert sorted(path.name for path in (tmp_path / "data" / "runs" / "lengths").iterdir()) == ["gaps.parquet", "lengths.parquet"]
    (second / "lengths.parquet").unlink()  # the tables of training do not wait for those on long inputs, nor take them along
    assert "lengths" not in runs.collect(tmp_path / "runs", ["tiny"], "all", tmp_path / "data")


def test_a_length_beyond_memory_is_named_before_anything_is_allocated(run, tmp_path):
    folder = copied(run, tmp_path)
    with pytest.raises(ValueError, match=r"100000000000 added tokens need about [\d.]+ GB, [\d.]+ GB are free"):
        lengths.measure_run(folder, [], added=[100_000_000_000])
    lengths.check_memory(Config(), 5_000, free=2**30)
    with pytest.raises(ValueError, match="5000 added tokens need about"):
        lengths.check_memory(Config(), 5_000, free=2**20)


PEAK = """
import re, torch
from rope_heads import lengths
from rope_heads.model import Config, Transformer
from rope_heads.tasks import NUMBER, Batch
torch.set_num_threads(1)
added, config = 20_000, Config(layers=3)
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])  # getrusage would start from the parent's peak
before = peak()
drawn = lengths.sequences(NUMBER, 0, 0, "own", added)
drawn = lengths.Sequences(Batch(*(column[:1] for column in drawn.core)), drawn.prefix[:1])
lengths.right_answers(Transformer(config).eval(), drawn, (0, added))
print((peak() - before) * 1024, lengths.memory_needed(config, added))
"""


def test_memory_is_what_the_estimate_says():
    """One prompt of 20,017 tokens; a single attention matrix over all positions would take 1.6 GB."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process of its own is read from /proc")
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    taken, estimate = map(int, done.stdout.split())
    assert estimate / 4 < taken < 1.2 * estimate < 0.5e9, (taken, estimate)


def test_bad_values_are_named(run, tmp_path):
    with pytest.raises(ValueError, match="holds no finished run"):
        lengths.measure_run(tmp_path)
    with pytest.raises(ValueError, match="change must be one of none, .*, got 'nothing'"):
        changed(built(), "nothing")


def test_both_readings_of_letter_share_their_ids():
    """A model of one reading can be measured on the other."""
    assert LETTER.vocabulary == LETTER_PROPER.vocabulary
    assert Setting("letter_proper", "own", "none", tuple(k for k in GRID if k <= 1_000)) in settings(LETTER, "readings")
