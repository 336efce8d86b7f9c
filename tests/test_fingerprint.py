"""The tables of a real model: from a folder, interrupted and gone on with, and a few frozen numbers derived again from the installed weights."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from test_pretrained import small

from rope_heads import artefacts, binding, detectors, fingerprint, pretrained
from rope_heads.fingerprint import Measures
from rope_heads.phase_ablation import PhaseAblation
from rope_heads.runs import frozen, origin
from rope_heads.spectra import qk_spectrum


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Measures of a small Llama in a folder, with short sequences."""
    monkeypatch.setattr(fingerprint, "LENGTH", 6)
    monkeypatch.setattr(fingerprint, "STRONGEST", 1)
    monkeypatch.setattr(fingerprint, "BLOCK", 2)
    small("llama").save_pretrained(tmp_path / "model")

    def build(**more):
        return Measures(str(tmp_path / "model"), "tiny", sequences=5, ablated=3, draws=4, control_draws=2, data=tmp_path / "data",
                        progress=tmp_path / "runs", **{"report": lambda line: None, **more})  # fmt: skip

    return build


def test_every_table_has_its_rows_and_says_where_it_comes_from(made):
    measures = made()
    assert measures.tables() == list(fingerprint.TABLES)
    rows = measures.write(["detectors", "composition", "spectra", "phase", "control"])
    controlled = len(artefacts.read_parquet(measures.folder / "control.parquet")[0][["layer", "head"]].drop_duplicates())
    assert rows["detectors"] == rows["spectra"] == rows["phase"] == 12 and rows["control"] == controlled * (2 * 2 + 2) and rows["composition"] in range(12, 37, 6)
    for name in rows:
        frame, told = artefacts.read_parquet(measures.folder / f"{name}.parquet")
        assert told["command"].endswith(f"--into tiny --only {name}" + " --ablated 3" * (name in ("phase", "control"))) and told["seconds"] >= 0 and told["versions"]["torch"]
        assert frame.drop(columns=["tokens", "kind"], errors="ignore").apply(np.isfinite).all(axis=None)
    spectra = artefacts.read_parquet(measures.folder / "spectra.parquet")[0].set_index(["layer", "head"])
    w_q, w_k = measures.heads.blocks[1].folded()
    assert spectra.d_head[1, 4] == pytest.approx(float(qk_spectrum(w_q[4], w_k[4]).d_head), abs=1e-12)
    assert spectra.d_head_z[1, 4] == pytest.approx((spectra.d_head[1, 4] - spectra.d_head_null[1, 4]) / spectra.d_head_null_sd[1, 4])
    phase, told = artefacts.read_parquet(measures.folder / "phase.parquet")
    share = phase.increase / (told["first_copy"] - told["before"])
    assert np.allclose(phase.share, share, atol=1e-5) and np.allclose(phase.loss - told["before"], phase.increase, atol=1e-5)


def test_an_interrupted_ablation_goes_on_and_ends_with_the_same_table(made, tmp_path):
    whole = made()
    whole.write(["detectors", "phase"])
    expected = artefacts.read_parquet(whole.folder / "phase.parquet")[0]
    lines = (tmp_path / "runs/tiny/phase.jsonl").read_text().splitlines()
    assert len(lines) == 27  # 12 heads and the loss before any change, two blocks for three sequences
    (tmp_path / "runs/tiny/phase.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:20])  # killed while it wrote the sixth head
    told = []
    again = made(report=told.append)
    again.write(["phase"])
    assert len([line for line in told if "sequences" in line]) == 19
    columns = ["layer", "head", "loss", "increase", "share", "sine_rms"]
    found = artefacts.read_parquet(again.folder / "phase.parquet")[0]
    pd.testing.assert_frame_equal(found[columns], expected[columns], atol=1e-6)
    work = PhaseAblation(again.model, again.heads, again._repeated(3))
    for row in found.itertuples():
        assert abs(float(work.losses(row.layer, row.head).mean()) - row.loss) < 1e-5
        assert abs(float(work.sines(row.layer, row.head).square().mean().sqrt()) - row.sine_rms) < 1e-5
    longer = made(report=told.append)
    longer.ablated = 4
    del told[:]
    longer.write(["phase"])
    assert not any("sequences 0" in line for line in told) and len(told) == 13 and artefacts.read_parquet(longer.folder / "phase.parquet")[1]["sequences"] == 4


def test_progress_of_another_model_is_not_taken_up(made, tmp_path):
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/phase.jsonl").write_text(json.dumps({"model": "another"}) + "\n")
    measures = made()
    measures.write(["detectors"])
    with pytest.raises(ValueError, match="phase.jsonl belongs to .*another.*remove it or use another --into"):
        measures.write(["phase"])


def test_damaged_progress_is_done_again_and_progress_of_other_weights_is_refused(made, tmp_path):
    whole, path = made(), tmp_path / "runs/tiny/phase.jsonl"
    whole.write(["detectors", "phase"])
    expected, good = artefacts.read_parquet(whole.folder / "phase.parquet")[0], path.read_text().splitlines()
    key, value = json.loads(good[3])
    bad = ["7", "[1]", "{}", "[[0], 3]", json.dumps([key, value | {"loss": value["loss"][:1]}]), json.dumps([key, value | {"loss": [float("nan")] * 2}]),
           json.dumps([key, {"loss": value["loss"]}])]  # fmt: skip
    path.write_bytes("\n".join([*good[:3], *bad]).encode() + b"\n\xff\xfe\x00\n" + "\n".join(good[6:]).encode())
    whole.write(["phase"])
    assert artefacts.read_parquet(whole.folder / "phase.parquet")[0].equals(expected)
    for start in (good[0][:9], ""):  # killed while it wrote the first line
        path.write_text(start)
        made().write(["phase"])
        assert path.read_text().splitlines()[0] == good[0]
    path.write_bytes(b"\xff\xfe\n\n")
    with pytest.raises(ValueError, match="phase.jsonl belongs to .*remove it"):
        made().write(["phase"])
    path.write_text("\n".join(good))
    model = small("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="phase.jsonl was made with other weights under the name .*remove it"):
        made().write(["phase"])


def test_tables_of_another_model_are_neither_read_nor_overwritten(made, tmp_path):
    made().write(["detectors"])
    small("gpt2").save_pretrained(tmp_path / "other")
    before = (tmp_path / "data/runs/tiny/detectors.parquet").read_bytes()
    for only in (["composition"], ["detectors"]):
        with pytest.raises(ValueError, match="detectors.parquet belongs to .*model, not to .*other: use another --into"):
            Measures(str(tmp_path / "other"), "tiny", data=tmp_path / "data").write(only)
    with pytest.raises(ValueError, match="belongs to .*model, not to .*model at step7"):
        made(revision="step7").write(["spectra"])
    assert (tmp_path / "data/runs/tiny/detectors.parquet").read_bytes() == before
    (tmp_path / "data/runs/tiny/detectors.parquet").write_bytes(before[:-50])
    with pytest.raises(ValueError, match="detectors.parquet cannot be read as a table.*remove it"):
        made().write(["spectra"])


def test_models_of_one_layer_and_runs_of_one_sequence(made, tmp_path):
    small("llama", num_hidden_layers=1).save_pretrained(tmp_path / "one")
    one = made()
    one.source, one.ablated = str(tmp_path / "one"), 1
    assert "composition" not in one.tables()
    one.write(["detectors", "phase"])  # a warning would be an error
    assert artefacts.read_parquet(one.folder / "phase.parquet")[0].increase_sd.isna().all()


def test_a_missing_tokenizer_is_said_in_one_line(made):
    with pytest.raises(OSError, match="has no tokenizer that can be read, which scores and planes need") as error:
        made().write(["scores"])
    assert "\n" not in str(error.value)


def test_what_a_model_cannot_have_and_what_must_come_first_is_said(made, tmp_path):
    small("gpt2").save_pretrained(tmp_path / "learned")
    learned = Measures(str(tmp_path / "learned"), "x", data=tmp_path, report=lambda line: None)
    assert learned.tables() == ["detectors", "spectra", "composition"]
    with pytest.raises(ValueError, match="has no table phase: this model can have detectors, spectra, composition"):
        learned.write(["phase"])
    with pytest.raises(ValueError, match="detectors.parquet is needed first: rope-heads fingerprint --model .* --only detectors"):
        made().write(["composition"])
    with pytest.raises(ValueError, match="into must be a single folder name, got '../x'"):
        Measures("smollm2", "../x")


@pytest.fixture(scope="module")
def smollm2():
    model = pretrained.load_model("smollm2")
    return model, pretrained.extract(model, "smollm2")


def test_frozen_spectra_and_scores_of_smollm2_come_out_again(smollm2):
    model, heads = smollm2
    table = frozen("smollm2", "spectra").set_index(["layer", "head"])
    w_q, w_k = heads.blocks[16].folded()
    again = qk_spectrum(w_q, w_k)
    for name in ("d_head", "dir_frac", "imag_mass", "content_pos_frac"):
        assert np.allclose(getattr(again, name).numpy(), table.loc[16, name], atol=1e-6), name
    measures = Measures("smollm2", "smollm2")
    measures._model = model
    prompts = binding.prompts(measures._tokenizer(), detectors.start_token(model))
    embedded = model.get_input_embeddings()(prompts.tokens)  # enters layer 0
    found = binding.head_scores(heads, 0, embedded, prompts.sentences)
    scores = frozen("smollm2", "scores").set_index(["layer", "head"])
    for name in ("positional", "symbolic", "positional_sentences", "symbolic_no_first"):
        assert np.allclose(found[name].numpy(), scores.loc[0, name], atol=1e-4), name


def test_the_frozen_ablation_of_the_head_that_matters_comes_out_again(smollm2):
    """Four of its sixteen sequences, so the losses are those of the table within their spread; the order of magnitude cannot be missed."""
    model, heads = smollm2
    table, told = frozen("smollm2", "phase"), origin("smollm2", "phase")
    top = table.loc[table.increase.idxmax()]
    tokens = detectors.repeated_tokens(4, 64, model.config.vocab_size, detectors.start_token(model))
    work = PhaseAblation(model, heads, tokens)
    increase = (work.losses(int(top.layer), int(top["head"])) - work.baseline).mean()
    assert abs(float(increase) - top.increase) < 3 * top.increase_sd
    assert abs(float(work.baseline.mean()) - told["before"]) < 1 and abs(float(work.first_copy.mean()) - told["first_copy"]) < 1.5


def test_frozen_detectors_of_whisper_come_out_again():
    """20 of the 200 sequences, within four standard errors."""
    model = pretrained.load_model("whisper")
    tokens = detectors.repeated_tokens(20, 64, model.config.eos_token_id, detectors.start_token(model))
    found = detectors.detect(model, pretrained.extract(model), tokens)
    table = frozen("whisper", "detectors").query("tokens == 'uniform'").set_index(["layer", "head"])
    for name in detectors.DETECTORS:
        expected, sd = (torch.tensor(table[column].to_numpy()).view(4, 6) for column in (name, f"{name}_sd"))
        assert ((found[name] - expected).abs() <= 4 * sd / 20**0.5 + 1e-4).all(), name
