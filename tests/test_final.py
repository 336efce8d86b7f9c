"""What `rope-heads measure` writes, against loops over prompts and against the interventions one at a time."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from rope_heads import __main__ as command_line
from rope_heads import artefacts, circuits, final, interventions, runs
from rope_heads.final import Prompts, prompt_sets
from rope_heads.model import Config, Transformer
from rope_heads.scores import positional_symbolic, swap_logits
from rope_heads.tasks import LETTER, NUMBER, Batch
from rope_heads.recipes import Recipe
from rope_heads.training import Run, accuracy_by_hops, first_of_each


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(type(NUMBER), "split", lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)])))
    monkeypatch.setattr(final, "PROMPTS", 10)
    monkeypatch.setattr(final, "KEPT_PROMPTS", 5)
    monkeypatch.setattr(final, "PLANE_TESTS", 20)
    monkeypatch.setattr(final, "DRAWS", 3)
    monkeypatch.setattr(final, "KEPT_DRAWS", 2)


def sharp(task, **changes) -> Transformer:
    torch.manual_seed(2)
    model = Transformer(Config(**({"vocab_size": task.vocabulary_size, "layers": 3, "heads": 2, "width": 32, "dropout": 0.0, "init_std": 0.3} | changes)))
    return model.eval()


def prompts_of(model, task, count=20):
    batch = prompt_sets(task, 0, count)[1]
    return batch, Prompts(model, task, batch)


def test_the_three_sets_share_no_sequence_and_are_sorted():
    sets = prompt_sets(NUMBER, 0, 30)
    test = NUMBER.split("test", 0)
    for batch in sets:
        assert batch.hops.tolist() == sorted([1, 2, 3, 4] * 30)
    rows = [tuple(row) for batch in sets for row in batch.tokens]
    assert len(set(rows)) == 360 and set(rows) <= {tuple(row) for row in test.tokens}
    first_two_hops = test.tokens[test.hops == 2][:30]
    assert (sets[0].tokens[30:60] == first_two_hops).all()


@torch.inference_mode()
def test_where_tokens_look_against_loops():
    model = sharp(NUMBER)
    batch, prompts = prompts_of(model, NUMBER)
    rows = pd.DataFrame(final.where_tokens_look(prompts)).set_index(["hops", "layer", "head", "looker", "target"]).share
    for layer in range(3):
        pattern = model.attention(layer, model.layer_inputs(prompts.tokens)[layer])
        counted: dict = {}
        for tokens, hops, weights in zip(batch.tokens, batch.hops.tolist(), pattern, strict=True):
            chain = NUMBER.chain(tokens)
            for head in range(2):
                for i in range(hops):
                    at = int(weights[head, chain[i]].argmax())
                    for j in range(i, hops + 1):
                        counted.setdefault((hops, layer, head, i, j), []).append(at == chain[j])
        for key, values in counted.items():
            assert rows[key] == pytest.approx(np.mean(values))
    assert len(rows) == 3 * 2 * (2 + 5 + 9 + 14)


@torch.inference_mode()
def test_what_is_held_against_the_view():
    model = sharp(NUMBER)
    batch, prompts = prompts_of(model, NUMBER)
    rows = pd.DataFrame(final.what_is_held(model, prompts))
    view = circuits.last_token_view(model, prompts.tokens)
    row = rows[(rows.hops == 3) & (rows.layer == 2) & (rows["head"] == 1)].iloc[0]
    mine = np.flatnonzero(batch.hops == 3)
    assert row.held_answer == pytest.approx(np.mean([int(view.held[2, i]) == batch.answers[i] for i in mine]))
    assert row.copied_answer == pytest.approx(np.mean([int(view.copied[2, i, 1]) == batch.answers[i] for i in mine]))
    there = [int(view.copied[2, i, 1]) == batch.tokens[i, int(view.looked_at[2, i, 1])] for i in mine]
    assert row.copied_looked_at == pytest.approx(np.mean(there)) and row.weight == pytest.approx(float(view.weight[2, mine, 1].mean()))


@torch.inference_mode()
def test_planes_tell_an_index_head_that_knows_letters_from_integers():
    """One plane: queries that lag by v x angle, keys that are opposite for letters and integers."""
    model = sharp(NUMBER, layers=1, heads=1, width=4, d_head=2, mlp=0)
    attention = model.blocks[0].attention
    angle = float(attention.angles[0])
    model.blocks[0].norm = torch.nn.Identity()
    ids = torch.arange(137)
    turned = torch.stack((torch.cos(-angle * ids.float()), torch.sin(-angle * ids.float())), -1)
    sign = torch.where(ids > 16, 1.0, -1.0)
    model.embedding.weight.copy_(torch.cat((turned, torch.stack((sign, 0 * sign), -1)), -1))
    attention.qkv.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3], [0] * 4, [0] * 4]))
    _, prompts = prompts_of(model, NUMBER)
    (row,) = final.dominant_planes(model, prompts)
    assert row["pointing"] == pytest.approx(1, abs=1e-5) and row["query_alignment"] < 0.9
    assert row["kinds"] == pytest.approx(-1) and row["window_alignment"] == row["pre_alignment"] == pytest.approx(1)
    assert (row["plane"], row["window_length"], row["query_length"]) == (1, pytest.approx(3), pytest.approx(1))


@torch.inference_mode()
def test_scores_by_kind_are_the_scores_of_a_shorter_list_of_swaps():
    model = sharp(NUMBER)
    batch, prompts = prompts_of(model, NUMBER)
    rows = pd.DataFrame(final.scores_by_kind(model, prompts)).set_index(["hops", "layer", "head", "swaps"])
    table = swap_logits(model, 1, prompts.streams[1]).double()  # [prompt, head, content, slot]
    window = [*range(8), 16]
    few = table[:, :, window][..., window]  # the table of a prompt without pre-target tokens
    mine = torch.from_numpy(batch.hops == 2)
    attention = table.diagonal(dim1=-2, dim2=-1).softmax(-1)
    a, b = torch.triu_indices(8, 8, 1)
    weights = ((attention[..., a] - attention[..., b]).abs() / 1e-4).softmax(-1)
    positional, _ = positional_symbolic(few, temperature=1e9)  # equal weights: only the cosines are taken from here
    assert positional.shape == (len(batch.hops), 2)
    before, after = few[..., a, a] - few[..., b, b], few[..., b, a] - few[..., a, b]
    v, w = (torch.stack((x, torch.zeros_like(x)), -1).softmax(-1) for x in (before, after))
    cosine = torch.nn.functional.cosine_similarity(v, w, dim=-1)
    expected = (weights * cosine).sum(-1)[mine].mean(0)
    assert rows.loc[(2, 1, 0, "window")].positional == pytest.approx(float(expected[0]), abs=1e-6)
    assert rows.loc[(2, 1, 1, "window")].positional == pytest.approx(float(expected[1]), abs=1e-6)
    assert len(rows) == 4 * 3 * 2 * 3


@torch.inference_mode()
def test_interventions_are_those_of_the_module():
    """Every row of one layer and head again, by editing the whole model."""
    model = sharp(LETTER)
    batch, prompts = prompts_of(model, LETTER)
    reference = Prompts(model, LETTER, prompt_sets(LETTER, 0, 20)[0])
    means = final.mean_outputs(model, reference)
    found = pd.DataFrame(final.interventions_on_heads(model, LETTER, prompts, means, np.random.default_rng(4)))
    found = found.set_index(["hops", "layer", "head", "token", "kind"])
    rng = np.random.default_rng(4)
    for h in range(1, 5):
        mine = np.flatnonzero(batch.hops == h)
        tokens, right = prompts.tokens[mine], prompts.answers[mine]
        places = final.tokens_to_change(prompts.chain[mine], rng)
        inputs = model.layer_inputs(tokens)
        for layer, head in ((0, 1), (2, 0)):
            outputs = circuits.head_outputs(model, layer, inputs[layer])
            mean = torch.stack([circuits.head_outputs(model, layer, x[None])[0] for x in reference.streams[layer]]).mean(0)[:, head]
            for place, token in enumerate(final.TOKENS):
                at = places[:, place]
                if place < 4 and place >= h:
                    assert (at == -1).all() and (h, layer, head, token, "mean") not in found.index
                    continue
                edit = interventions.replace_output(head, at, mean[at])
                answered = interventions.run(model, inputs[0], {layer: [edit]}).argmax(-1)
                assert found.accuracy[h, layer, head, token, "mean"] == pytest.approx(float((answered == right).float().mean()))
                if place < 4:
                    donors = [(i + 1) % len(mine) for i in range(len(mine))]
                    given = torch.stack([outputs[d, at[d], head] for d in donors])
                    answered = interventions.run(model, inputs[0], {layer: [interventions.replace_output(head, at, given)]}).argmax(-1)
                    assert found.accuracy_donor[h, layer, head, token, "donor"] == pytest.approx(float((answered == right[donors]).float().mean()))


def test_changed_tokens_lie_where_they_should():
    batch = NUMBER.sample(400, None, np.random.default_rng(0))
    chain = circuits.chains(NUMBER, batch.tokens)
    places = final.tokens_to_change(chain, np.random.default_rng(1)).numpy()
    for tokens, hops, row in zip(batch.tokens, batch.hops, places, strict=True):
        visited = NUMBER.chain(tokens)
        assert row[:4].tolist() == visited[:hops] + [-1] * (4 - hops)
        assert 0 <= row[4] <= 15 and 8 <= row[5] <= 15 and not {row[4], row[5]} & set(visited)
    assert set(places[:, 4]) == set(range(16))


@torch.inference_mode()
def test_forbidden_looks_by_name():
    model = sharp(NUMBER)
    batch, prompts = prompts_of(model, NUMBER)
    rows = pd.DataFrame(final.looks_forbidden(model, prompts)).set_index(["hops", "forbidden"])
    mine = torch.from_numpy(batch.hops == 3)
    chain, right = prompts.chain[mine], prompts.answers[mine]
    for name, pairs in {"p1 to p2": [(1, 2)], "jumps": [(0, 2), (0, 3), (1, 3)], "not the query's": [(1, 2), (1, 3), (2, 3)], "none": []}.items():
        logits = interventions.run(model, model.embed(prompts.tokens[mine]), forbidden=[(chain[:, i], chain[:, j]) for i, j in pairs])
        assert rows.accuracy[3, name] == pytest.approx(float((logits.argmax(-1) == right).float().mean())) and rows.looks[3, name] == len(pairs)
    controls = rows[rows.index.get_level_values("forbidden").str.startswith("control: ")]
    assert len(rows) - len(controls) == (1 + 3 + 6 + 10) + 4 * 3 and len(controls) == (1 + 3 + 6 + 10) + 3 + 3
    assert controls.looks[4, "control: jumps"] == rows.looks[4, "jumps"] == 6


def test_the_control_forbids_as_many_looks_of_the_same_tokens_off_the_chain():
    batch = NUMBER.sample(400, 4, np.random.default_rng(0))
    chain = circuits.chains(NUMBER, batch.tokens)
    pairs = [(0, 1), (0, 4), (3, 4), (0, 2), (0, 3)]
    looks = final.other_looks(chain, pairs, np.random.default_rng(1))
    for (looker, target), (at, away) in zip(pairs, looks, strict=True):
        assert torch.equal(at, chain[:, looker]) and (away < at).all() and (away >= 0).all()
        assert not (away[:, None] == chain).any()
        if target == 4:  # seven other words of the target window are always there
            assert (away < 8).all() and len(away.unique()) == 8
        if looker == 0:  # the query sees four other tokens after the window
            assert ((away < 8) == (chain[:, target] < 8)).all()
    mine = torch.stack([away for (looker, _), (_, away) in zip(pairs, looks, strict=True) if looker == 0], 1)
    assert all(len(set(row)) == 4 for row in mine.tolist())
    again = final.other_looks(chain, pairs, np.random.default_rng(1))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(looks, again, strict=True))


@torch.inference_mode()
def test_tests_cover_the_split_and_the_registered_planes():
    model = sharp(NUMBER, width=128, heads=1, layers=2)
    test = NUMBER.split("test", 0)
    rows = pd.DataFrame(final.split_accuracy(model, test)).set_index(["planes_off", "hops"])
    whole = accuracy_by_hops(model, test)
    few = first_of_each(test, 20)
    for name, planes in (("1-8", range(1, 9)), ("33-64", range(33, 65))):  # claim own-planes-causal
        off = accuracy_by_hops(interventions.without_planes(model, planes), few)
        assert [rows.accuracy[name, h] for h in range(1, 5)] == [off[h] for h in range(1, 5)] and rows.tests[name, 1] == 20
    assert [rows.accuracy["none", h] for h in range(1, 5)] == [whole[h] for h in range(1, 5)] and rows.tests["none", 1] == 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "runs" / "tiny" / "number-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(NUMBER), "split", lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)])))
        Run("number", Recipe(name="tiny", steps=20, batch=8, warmup=2), 0, folder, keep=[0, 10, 20], config={"layers": 2, "width": 16, "mlp": 16},
            evaluate_every=10, tests_per_hop=10, report=lambda line: None).train()  # fmt: skip
    return folder


def test_measure_writes_tables_that_collect_joins(finished, capsys, tmp_path):
    assert command_line.main(["measure", "--run", str(finished)]) == 0
    told = capsys.readouterr().out
    for name in final.TABLES:
        frame, origin = artefacts.read_parquet(finished / f"{name}.parquet")
        assert f"{name}.parquet: {len(frame)} rows" in told and origin["command"] == "rope-heads measure --run RUNS/tiny/number-0"
        assert set(frame.step) == ({0, 10, 20} if name in ("looks", "lens", "planes", "kinds", "spectra", "steps", "mechanism") else {20})
    mechanism = artefacts.read_parquet(finished / "mechanism.parquet")[0]
    assert mechanism[mechanism.step == 20][["follows", "lost", "kept", "ideal"]].notna().all(axis=None)
    steps = artefacts.read_parquet(finished / "steps.parquet")[0].query("step == 20")
    for reading, row in mechanism[mechanism.step == 20].set_index("reading").iterrows():  # the ledger's words, from the rows of single steps
        mine = steps[steps.reading == reading]
        there = mine[mine.chain_step <= mine.hops]
        assert len(mine) == (16 if reading == "forward" else 10)
        assert row.lost == pytest.approx(((1 - there.accuracy) * (there.share >= 0.5)).sum() / 10)
        kept = mine[mine.chain_step > mine.hops].accuracy if reading == "forward" else there.accuracy_off_chain
        assert row.kept == pytest.approx(kept.mean())
    rows = runs.collect(finished.parents[1], ["tiny"], "tiny", tmp_path)
    assert rows["ablation"] == 2 * sum(2 * h + 3 for h in range(1, 5))  # p0 to p(h-1) twice, two tokens off the chain, one pattern
    assert set(rows) == {"accuracy", *final.TABLES}


def test_kept_weights_give_the_row_of_their_step(finished):
    final.measure_run(finished, report=lambda line: None)
    looks = artefacts.read_parquet(finished / "looks.parquet")[0]
    with torch.inference_mode():
        model = Transformer.load(finished / "step-00010.safetensors")
        batch = prompt_sets(NUMBER, 0, 5)[1]
        expected = pd.DataFrame(final.where_tokens_look(Prompts(model, NUMBER, Batch(*batch))))
    assert looks[looks.step == 10].share.tolist() == expected.share.tolist()


def test_a_run_that_is_not_finished_is_refused(tmp_path, capsys):
    assert command_line.main(["measure", "--run", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert "holds no finished run" in error and error.count("\n") == 1


def test_a_table_that_some_runs_lack_is_no_table(finished, tmp_path):
    other = finished.parent / "number-1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(NUMBER), "split", lambda self, name, seed: self.sample(400, None, np.random.default_rng([seed, len(name)])))
        Run("number", Recipe(name="tiny", steps=20, batch=8, warmup=2), 1, other, config={"layers": 2, "width": 16, "mlp": 16},
            evaluate_every=10, tests_per_hop=10, report=lambda line: None).train()  # fmt: skip
    final.measure_run(finished, report=lambda line: None)
    with pytest.raises(ValueError, match="missing for tiny/number-1: measure them"):
        runs.collect(finished.parents[1], ["tiny"], "tiny", tmp_path)


def test_collect_takes_chosen_runs_and_misses_absent_ones(finished, tmp_path):
    final.measure_run(finished, report=lambda line: None)
    root = finished.parents[1]
    rows = runs.collect(root, ["tiny"], "some", tmp_path, tasks=["number"], seeds=[0])
    frame, origin = artefacts.read_parquet(tmp_path / "runs" / "some" / "accuracy.parquet")
    assert rows["accuracy"] == len(frame) and set(frame.seed) == {0}
    assert origin["command"] == "rope-heads collect --into some --recipe tiny --tasks number --seeds 0"
    with pytest.raises(ValueError, match="lacks tiny/letter-0, tiny/letter-9, tiny/number-9: train them first"):
        runs.collect(root, ["tiny"], "some", tmp_path, tasks=["letter", "number"], seeds=[0, 9])


def test_new_runs_join_a_table_whose_runs_are_gone(finished, tmp_path, capsys, monkeypatch):
    """Tables outlive the folders of their runs: what another machine measured stays, a run measured again replaces its rows."""
    final.measure_run(finished, report=lambda line: None)
    root, path = tmp_path / "runs", tmp_path / "data" / "runs" / "some" / "tests.parquet"
    first, second = (shutil.copytree(finished, root / f"here-{seed}" / "tiny" / f"number-{seed}") for seed in (0, 1))
    for name in ("run.json", "log.parquet"):  # the copy becomes a run of its own
        if name == "run.json":
            identity, made = artefacts.read_json(second / name)
            artefacts.write_json(second / name, identity | {"seed": 1}, made | {"seed": 1})
        else:
            table, made = artefacts.read_parquet(second / name)
            artefacts.write_parquet(second / name, table, made | {"seed": 1})
    runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests"])
    alone = artefacts.read_parquet(path)[0]
    for _ in range(2):  # the second time nothing changes
        rows = runs.collect(second.parents[1], ["tiny"], "some", tmp_path / "data", tasks=["number"], seeds=[1], only=["tests"], add=True)
        table, origin = artefacts.read_parquet(path)
        assert rows == {"tests": len(alone)} and len(table) == 2 * len(alone) and table.dtypes.equals(alone.dtypes)
        assert table[table.seed == 0].reset_index(drop=True).equals(alone)
        assert [made["seed"] for made in origin["runs"]] == [0, 1] and origin["seconds"] == round(sum(made["seconds"] for made in origin["runs"]), 1)
        assert origin["command"] == "rope-heads collect --into some --recipe tiny --tasks number --seeds 0 1 --only tests", "the whole table's"
    runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", only=["lens"])  # a table without the second run stays without it
    both = runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests", "lens"], add=True)
    assert set(both) == {"tests", "lens"} and [made["seed"] for made in artefacts.read_parquet(path.with_name("lens.parquet"))[1]["runs"]] == [0]
    said = []
    for wrong, message in (({"only": ["nonsense"]}, "no table is called nonsense; there are: accuracy"), ({"only": ["gaps"]}, "no run has the table gaps: measure"),
                           ({"seeds": [7]}, "holds no runs of tiny with these tasks and seeds")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", **wrong)
    runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests"], report=said.append)
    assert len(said) == 1 and "some/tests: 1 runs that were in the table are not under" in said[0], "a run does not leave a table unnoticed"
    path.write_bytes(b"half a table")
    with pytest.raises(ValueError, match="tests.parquet is damaged or no parquet table .*: restore it or make it again"):
        runs.collect(second.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests"], add=True)
    runs.collect(first.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests"])  # makes it again
    assert artefacts.read_parquet(path)[0].equals(alone)
    artefacts.write_parquet(path, table.drop(columns="accuracy"), origin)
    with pytest.raises(ValueError, match=r"tests.parquet has other columns \(accuracy\)"):
        runs.collect(second.parents[1], ["tiny"], "some", tmp_path / "data", only=["tests"], add=True)
    monkeypatch.setattr(artefacts, "data_folder", lambda: tmp_path / "data")
    assert command_line.main(["collect", "--recipe", "tiny", "--into", "new", "--add", "--only", "tests", "--runs", str(second.parents[1])]) == 0
    assert "new/tests.parquet" in capsys.readouterr().out, "without a table there is nothing to keep"


def test_kept_weights_are_half_as_large_unless_that_changes_the_accuracy(finished, tmp_path):
    final.measure_run(finished, report=lambda line: None)
    told = []
    runs.keep_weights(finished.parents[1], "tiny", ["number-0"], "some", tmp_path, told.append)
    path = tmp_path / "runs" / "some" / "number-0.safetensors"
    whole, half = Transformer.load(finished / "model.safetensors"), Transformer.load(path)
    assert "fp16, same accuracy" in told[0] and path.stat().st_size < 0.6 * (finished / "model.safetensors").stat().st_size
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(half.state_dict()[name], tensor.half().float(), rtol=0, atol=0)
    tests, origin = artefacts.read_parquet(finished / "tests.parquet")
    artefacts.write_parquet(finished / "tests.parquet", tests.assign(accuracy=tests.accuracy + 0.001), origin)
    runs.keep_weights(finished.parents[1], "tiny", ["number-0"], "some", tmp_path, told.append)
    assert "fp32, for fp16 changes the accuracy" in told[1]
    torch.testing.assert_close(Transformer.load(path).state_dict(), whole.state_dict(), rtol=0, atol=0)
    final.measure_run(finished, report=lambda line: None)
    with pytest.raises(ValueError, match="number-7 is no measured run: train it"):
        runs.keep_weights(finished.parents[1], "tiny", ["number-7"], "some", tmp_path)
