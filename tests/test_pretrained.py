"""Extracted heads against the models they come from: logits and patterns rebuilt from our weights equal those of transformers' own code."""

import json
import struct

import numpy as np
import pytest
import torch
import transformers
from models import scatter
from safetensors.torch import load_file, save_file

from rope_heads import ctranslate2
from rope_heads.pretrained import Block, decoder, extract, installed, layers, load_heads, load_model, norm_of

LENGTH = 13
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {  # family -> (class, configuration); d_head, counts of heads and options differ, so that a mixed-up axis cannot pass
    "gpt2": ("GPT2", {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("OPT", {"hidden_size": 24, "word_embed_proj_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 40,
                    "max_position_embeddings": 40, "pad_token_id": 1}),
    "gpt_neo": ("GPTNeo", {"hidden_size": 24, "num_layers": 2, "num_heads": 3, "attention_types": [[["global", "local"], 1]], "window_size": 4,
                           "max_position_embeddings": 40}),
    "bloom": ("Bloom", {"hidden_size": 24, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoX", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "gptj": ("GPTJ", {"n_embd": 24, "n_layer": 2, "n_head": 3, "rotary_dim": 4, "n_positions": 40}),
    "llama": ("Llama", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
}  # fmt: skip


def small(family: str, **changes) -> torch.nn.Module:
    """A small random model in evaluation mode with eager attention, weights large enough that every part matters."""
    torch.manual_seed(0)
    if family == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=60, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=3, encoder_ffn_dim=40,
            decoder_ffn_dim=40, num_mel_bins=5, max_source_positions=9, max_target_positions=40, init_std=0.3, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, attn_implementation="eager")  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(config)
    else:
        name, values = SMALL[family]
        spread = {"init_std": 0.3} if family == "opt" else {"initializer_range": 0.3}
        config = getattr(transformers, f"{name}Config")(**{"vocab_size": 60, **NO_SPECIAL, **spread, **values, **changes}, attn_implementation="eager")
        model = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(config)
    scatter(model)
    return model.eval()


def run(model, tokens, **options):
    if model.config.model_type == "whisper":
        features = torch.randn(len(tokens), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return model(input_features=features, decoder_input_ids=tokens, **options)
    return model(tokens, **options)


def own_logits(model, tokens, monkeypatch):
    """What the model's own code puts into its softmax, and the hidden states that enter its layers."""
    seen, softmax = [], torch.nn.functional.softmax

    def spy(scores, *args, **kwargs):
        seen.append(scores.detach().clone())
        return softmax(scores, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", spy)
        out = run(model, tokens, output_hidden_states=True)
    hidden = out.decoder_hidden_states if model.config.model_type == "whisper" else out.hidden_states
    square = [scores for scores in seen if scores.shape[-2:] == (tokens.shape[1],) * 2]  # Whisper's other attentions are not square
    return square, hidden


@pytest.mark.parametrize("family", [*SMALL, "whisper"])
def test_logits_rebuilt_from_the_extracted_weights_equal_the_models_own(family, monkeypatch):
    """Hidden states in, logits before the softmax out, at 1e-5 of their spread; forbidden keys are the same."""
    model = small(family)
    tokens = torch.randint(60, (3, LENGTH))
    theirs, hidden = own_logits(model, tokens, monkeypatch)
    heads = extract(model)
    assert len(theirs) == len(heads.blocks) == 2 and heads.family == family
    for block, expected, x in zip(heads.blocks, theirs, hidden):
        with torch.no_grad():
            ours = block.logits(x)
        if heads.positions == "alibi":  # theirs count from the first key
            slopes = 2.0 ** (-8 / heads.heads * torch.arange(1, heads.heads + 1))
            ours = ours + (slopes[:, None] * torch.arange(LENGTH))[..., None]
        seen = expected > -1e30
        assert torch.equal(seen, ours > -1e30)
        spread = expected[seen].std()
        assert spread > 0.5  # far from uniform
        torch.testing.assert_close(ours[seen], expected[seen], atol=1e-5 * float(spread.clamp(min=1)), rtol=1e-5)


def test_local_layers_see_their_window_only():
    blocks = extract(small("gpt_neo")).blocks
    assert [block.window for block in blocks] == [None, 4]
    seen = blocks[1].logits(torch.randn(1, 9, 24))[0, 0].isfinite()
    assert seen[8].tolist() == [False] * 5 + [True] * 4 and seen[2].tolist() == [True] * 3 + [False] * 6


def test_scaled_angles_of_llama_3_come_from_the_models_own_code(monkeypatch):
    scaling = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 30}  # fmt: skip
    model = small("llama", rope_parameters=scaling)
    theirs, hidden = own_logits(model, torch.randint(60, (2, LENGTH)), monkeypatch)
    with torch.no_grad():
        ours = extract(model).blocks[1].logits(hidden[1])
    seen = ours.isfinite()
    torch.testing.assert_close(ours[seen], theirs[1][seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", [*SMALL, "whisper"])
def test_folded_weights_give_the_logits_of_the_first_key(family):
    """Key = query: no turn is left and ALiBi adds nothing, so the diagonal is z W_Q (z W_K)^T plus the biases' part (norm bias included)."""
    model = small(family)
    block = extract(model).blocks[1]
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    norm, attention = block.norm.double(), block.attention.double()
    z = (norm(x) - (norm.bias if getattr(norm, "bias", None) is not None else 0)) / norm.weight
    w_q, w_k = block.folded()  # [head, width, d_head]
    constant = [torch.nn.functional.linear(norm.bias, w) if getattr(norm, "bias", None) is not None else 0 for w in attention.qkv.weight.chunk(3)[:2]]
    b_q, b_k = (((b + c).unflatten(0, (attention.heads, -1))) for b, c in zip(attention.qkv.bias.chunk(3)[:2], constant))
    q, k = (torch.einsum("bpw,hwd->bhpd", z, w) + b[:, None] for w, b in ((w_q, b_q), (w_k, b_k)))
    diagonal = attention.logits(norm(x)).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(attention.scale * (q * k).sum(-1), diagonal, atol=1e-9, rtol=1e-9)
    if isinstance(norm, torch.nn.LayerNorm):
        assert w_q.sum(1).abs().max() < 1e-12


@pytest.mark.parametrize("family", [*SMALL, "whisper"])
def test_values_and_output_rebuild_the_attentions_own_output(family):
    model = small(family)
    seen = {}
    inner = next(m for name, m in layers(model)[1].named_modules() if name.split(".")[-1] in ("attn", "attention", "self_attn", "self_attention"))
    inner.register_forward_hook(lambda module, args, kwargs, out: seen.update(out=out[0], x=kwargs.get("hidden_states", args[0] if args else None)), with_kwargs=True)
    tokens = torch.randint(60, (2, LENGTH))
    with torch.no_grad():
        out = run(model, tokens, output_hidden_states=True)
        block = extract(model).blocks[1]
        a = block.attention
        v = a.qkv(seen["x"]).unflatten(-1, (3, a.heads, a.d_head))[:, :, 2]  # [batch, key, head, d_head]
        mixed = torch.einsum("bhqk,bkhd->bqhd", block.attend(seen["x"]).softmax(-1), v)
        ours = a.out(mixed.flatten(-2))
    if family == "bloom":  # its attention adds the residual itself
        ours = ours + out.hidden_states[1]
    torch.testing.assert_close(ours, seen["out"], atol=1e-4, rtol=1e-5)
    w_v, w_o = block.written()
    assert w_v.shape == (a.heads, 24, a.d_head) and w_o.shape == (a.heads, a.d_head, 24)
    by_head = torch.einsum("bqhd,hdw->bqw", mixed.double(), w_o) + a.out.bias
    torch.testing.assert_close(by_head.float(), a.out(mixed.flatten(-2)), atol=1e-5, rtol=1e-5)


def test_a_folder_is_read_and_a_callers_random_numbers_stay(tmp_path):
    model = small("gpt_neox")
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    heads = load_heads(tmp_path)
    assert torch.equal(before, torch.get_rng_state()) and heads.name == str(tmp_path) and heads.rotary_dim == 4
    for ours, theirs in zip(heads.blocks, extract(model).blocks):
        assert torch.equal(ours.attention.qkv.weight, theirs.attention.qkv.weight) and torch.equal(ours.norm.bias, theirs.norm.bias)


def test_pickled_weights_are_not_read(tmp_path):
    model = small("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_heads(tmp_path)


def test_code_of_a_models_folder_is_never_run(tmp_path):
    small("llama").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"auto_map": {"AutoConfig": "evil.C"}, "model_type": "own"')
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    with pytest.raises(OSError, match="cannot be read as a model"):
        load_heads(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no adapter for models of type 'mamba'.*gpt2"):
        extract(type("M", (), {"config": type("C", (), {"model_type": "mamba"})})())
    with pytest.raises(ValueError, match="power of two of heads, got 3"):
        extract(small("bloom", n_head=3))
    with pytest.raises(ValueError, match="normalises after"):
        extract(small("opt", do_layer_norm_before=False))
    with pytest.raises(ValueError, match="name must be one of smollm2, whisper, got 'gpt5'"):
        installed("gpt5")
    with pytest.raises(FileNotFoundError, match="nothing.gguf is not here"):
        load_model(tmp_path / "nothing.gguf")
    for missing in (tmp_path / "folder", "", "./folder", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="is not here: give a folder"):
            load_model(missing)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="must be a folder.*got another file"):
        load_model(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="revision is for models of the hub.*got 'step7'"):
        load_model(tmp_path, "step7")


def damaged(kind: str, folder) -> None:
    """A saved model with one fault."""
    weights, values = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(weights), json.loads(values.read_text())
    first = "model.layers.1.self_attn.q_proj.weight"
    changed = {
        "lacks a tensor": {name: t for name, t in tensors.items() if name != first},
        "other names": {f"x.{name}": t for name, t in tensors.items()},
        "not finite": tensors | {first: tensors[first] * torch.nan},
        "another shape": tensors | {first: tensors[first][:-1].clone()},
    }
    if kind in changed:
        save_file(changed[kind], weights, {"format": "pt"})
    else:
        content = weights.read_bytes()
        weights.write_bytes({"cut": content[:-1000], "cut header": content[:20], "empty": b"", "noise": b"\xff" * 500}.get(kind, content))
    config |= {"layers missing": {"num_hidden_layers": 3}, "no layers": {"num_hidden_layers": 0}, "no heads": {"num_attention_heads": 0},
               "a word": {"num_attention_heads": "four"}, "five heads": {"num_attention_heads": 5}, "mamba": {"model_type": "mamba"}}.get(kind, {})  # fmt: skip
    values.write_text(json.dumps(config))


@pytest.mark.parametrize("kind, told", [
    ("lacks a tensor", "lacks 1 of the model's weights, model.layers.1.self_attn.q_proj.weight"), ("other names", "is not whole"),
    ("not finite", "q_proj.weight holds numbers that are not finite"), ("another shape", "cannot be read as a model"), ("cut", "cannot be read as a model"),
    ("cut header", "cannot be read as a model"), ("empty", "cannot be read as a model"), ("noise", "cannot be read as a model"),
    ("layers missing", "is not whole: it lacks"), ("no layers", "has no layer"), ("no heads", "cannot be read as a model"),
    ("a word", "cannot be read as a model.*got str"), ("five heads", "cannot be read as a model.*multiple"), ("mamba", "no adapter for models of type 'mamba'"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_in_one_line(tmp_path, kind, told):
    """transformers fills what is missing with random numbers and says so in a table: numbers from it would be measured as if they were real."""
    small("llama").save_pretrained(tmp_path / "model")
    damaged(kind, tmp_path / "model")
    with pytest.raises((OSError, ValueError), match=told) as error:
        load_heads(tmp_path / "model")
    assert "\n" not in str(error.value) and str(tmp_path / "model") in str(error.value)


def test_a_cut_gguf_header_is_refused(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + b"\x08" * 20)
    with pytest.raises(OSError, match="cut.gguf cannot be read as a model"):
        load_model(tmp_path / "cut.gguf")


def test_norms_without_gain_and_bias_still_centre(monkeypatch):
    """Galactica's OPT has such norms."""
    model = small("opt", layer_norm_elementwise_affine=False, enable_bias=False)
    theirs, hidden = own_logits(model, torch.randint(60, (2, LENGTH)), monkeypatch)
    for block, expected, x in zip(extract(model).blocks, theirs, hidden):
        seen = torch.isfinite(ours := block.logits(x)).expand_as(expected)
        assert block.centred and torch.allclose(ours[seen], expected[seen], atol=1e-5 * float(expected[seen].std()))


def test_decoder_layers_and_norms_are_found_in_every_family():
    for family in [*SMALL, "whisper"]:
        model = small(family)
        assert len(layers(model)) == 2 and all(isinstance(norm_of(layer), torch.nn.Module) for layer in layers(model))
        assert isinstance(decoder(model).get_parameter(next(name for name, _ in decoder(model).named_parameters())), torch.Tensor)
        assert isinstance(extract(model).blocks[0], Block)


def test_smollm2_comes_from_the_installed_file_with_its_rows_in_transformers_order():
    """Rows of one head against the file itself: llama.cpp stores the planes side by side, transformers in two halves."""
    gguf = pytest.importorskip("gguf")
    tensor = next(t for t in gguf.GGUFReader(installed("smollm2")).tensors if t.name == "blk.3.attn_q.weight")
    stored = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).unflatten(0, (9, 32, 2))  # [head, plane, part, width]
    heads = load_heads("smollm2")
    assert len(heads.blocks) == 30 and heads.heads == 9 and heads.rotary_dim == 64 and heads.positions == "rope"
    attention = heads.blocks[3].attention
    torch.testing.assert_close(attention.w_q.unflatten(1, (2, 32)), stored.transpose(1, 2), atol=0, rtol=0)
    torch.testing.assert_close(attention.angles, 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32), atol=1e-7, rtol=1e-6)
    assert attention.qkv.bias.abs().max() == 0 and torch.equal(attention.w_k[0], attention.w_k[2]) and not torch.equal(attention.w_k[2], attention.w_k[3])


def test_whisper_comes_from_the_installed_file_and_predicts_english():
    model = load_model("whisper")
    heads = extract(model)
    assert len(heads.blocks) == 4 and heads.heads == 6 and heads.positions == "learned"
    stored = ctranslate2.read_variables(installed("whisper"))["decoder/layer_2/self_attention/linear_0/weight"]
    assert np.array_equal(heads.blocks[2].attention.qkv.weight.numpy(), stored.astype(np.float32))
    words = ctranslate2.vocabulary(installed("whisper"))
    text = [words.index("Ġ" + word) for word in "the king of the old city said that he would go to the river and wait for the other men".split()]
    silence = torch.full((2, 80, 3000), -1.5)  # log-mel spectrogram of no sound at all
    tokens = torch.tensor([[model.config.decoder_start_token_id, 50362, *t] for t in (text, text[::-1])])
    with torch.no_grad():
        logits = model(input_features=silence, decoder_input_ids=tokens).logits[:, 1:-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 2:], reduction="none").mean(1)
    assert losses[0] < 6 and losses[0] < losses[1] - 1  # ln of the vocabulary's size is 10.9


def test_a_cut_or_altered_ctranslate2_file_is_refused(tmp_path):
    def word(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    good = struct.pack("<I", 6) + word("Spec") + struct.pack("<II", 3, 1) + word("a/weight") + struct.pack("<BIIBI", 2, 2, 3, 4, 12) + array.tobytes()
    good += struct.pack("<I", 1) + word("b/weight") + word("a/weight")
    path = tmp_path / "model.bin"
    path.write_bytes(good)
    read = ctranslate2.read_variables(path)
    assert set(read) == {"a/weight", "b/weight"} and np.array_equal(read["b/weight"], array)
    for bad in (good[:-3], good[:40], good + b"x", struct.pack("<I", 5) + good[4:], good.replace(struct.pack("<BI", 4, 12), struct.pack("<BI", 4, 13))):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="model.bin cannot be read as a CTranslate2 file"):
            ctranslate2.read_variables(path)


def whisper_file(folder, changes=None, kinds=None):
    """A CTranslate2 file of a Whisper of width 4 with two layers in the encoder and one in the decoder; `changes` replaces arrays, None removes."""
    rng = np.random.default_rng(0)

    def norm(name):
        return {f"{name}/gamma": (4,), f"{name}/beta": (4,)}

    def linear(name, rows, columns=4):
        return {f"{name}/weight": (rows, columns), f"{name}/bias": (rows,)}

    shapes = {"encoder/conv1/weight": (4, 3, 3), "encoder/conv1/bias": (4,), "encoder/conv2/weight": (4, 4, 3), "encoder/conv2/bias": (4,),
              "encoder/position_encodings/encodings": (6, 4), "decoder/position_encodings/encodings": (9, 4), "decoder/embeddings/weight": (5, 4),
              **norm("encoder/layer_norm"), **norm("decoder/layer_norm")}  # fmt: skip
    for layer in ("encoder/layer_0", "encoder/layer_1", "decoder/layer_0"):
        own = f"{layer}/self_attention"
        shapes |= norm(f"{own}/layer_norm") | linear(f"{own}/linear_0", 12) | linear(f"{own}/linear_1", 4) | norm(f"{layer}/ffn/layer_norm")
        shapes |= linear(f"{layer}/ffn/linear_0", 16) | linear(f"{layer}/ffn/linear_1", 4, 16)
        if layer.startswith("decoder"):
            cross = f"{layer}/attention"
            shapes |= norm(f"{cross}/layer_norm") | linear(f"{cross}/linear_0", 4) | linear(f"{cross}/linear_1", 8) | linear(f"{cross}/linear_2", 4)
    arrays = {name: rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    arrays |= {"encoder/num_heads": np.array(2, np.int16), "decoder/num_heads": np.array(1, np.int16)} | (changes or {})
    arrays = {name: a for name, a in arrays.items() if a is not None}
    out = struct.pack("<IH", 6, 2) + b"W\0" + struct.pack("<II", 3, len(arrays))
    for name, a in arrays.items():
        out += struct.pack("<H", len(name) + 1) + name.encode() + b"\0" + struct.pack(f"<B{a.ndim}I", a.ndim, *a.shape)
        out += struct.pack("<BI", ctranslate2.TYPES.index(a.dtype.type), a.nbytes) + a.tobytes()
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(out + struct.pack("<I", 0))
    (folder / "vocabulary.txt").write_text("a\nb\nc\n<|endoftext|>\n<|startoftranscript|>\n")
    return folder / "model.bin"


def test_whispers_with_fewer_layers_in_the_decoder_keep_their_encoder_whole(tmp_path):
    """The distilled ones and large-v3-turbo: 32 layers hear, 2 or 4 write."""
    path = whisper_file(tmp_path)
    model = load_model(path)
    config = model.config
    assert (config.encoder_layers, config.decoder_layers, config.encoder_attention_heads, config.decoder_attention_heads) == (2, 1, 2, 1)
    stored = ctranslate2.read_variables(path)["encoder/layer_1/ffn/linear_1/weight"]
    assert np.array_equal(model.model.encoder.layers[1].fc2.weight.numpy(), stored.astype(np.float32))


@pytest.mark.parametrize("name, value, told", [
    ("decoder/layer_0/self_attention/linear_0/weight", np.ones((12, 4), np.int8), "must hold fp16 or fp32, got int8: convert the model without quantization"),
    ("decoder/layer_0/self_attention/linear_0/weight", np.full((12, 4), np.nan, np.float16), "not finite"),
    ("decoder/layer_0/self_attention/linear_0/weight", np.ones((12, 3), np.float16), "cannot be read as a Whisper model"),
    ("decoder/layer_0/self_attention/linear_0/weight", None, "cannot be read as a Whisper model"),
    ("decoder/embeddings/weight", None, "cannot be read as a Whisper model.*decoder/embeddings/weight"),
    ("decoder/embeddings/weight", np.ones(5, np.float16), "cannot be read as a Whisper model"),
    ("decoder/num_heads", None, "cannot be read as a Whisper model"), ("decoder/num_heads", np.array(0, np.int16), "cannot be read as a Whisper model"),
    ("decoder/num_heads", np.array(3, np.int16), "cannot be read as a Whisper model"),
])  # fmt: skip
def test_a_ctranslate2_file_without_a_whole_whisper_is_refused_in_one_line(tmp_path, name, value, told):
    path = whisper_file(tmp_path, {name: value})
    with pytest.raises(ValueError, match=told) as error:
        load_model(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, content", [("vocabulary.txt", b"a\nb\n"), ("vocabulary.txt", b"\xff\xfe"), ("vocabulary.json", b"{}"), ("vocabulary.json", b"[7"),
                                           ("vocabulary.json", b"[1, 2]")])  # fmt: skip
def test_a_vocabulary_that_is_none_is_refused_by_name(tmp_path, name, content):
    path = whisper_file(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="vocabulary.*install it again"):
        load_model(path)
