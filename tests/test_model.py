"""Attention against its definition in loops, properties of the whole model, and damage to its files."""

import dataclasses
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from models import built, ids
from safetensors.torch import save_file

from rope_heads.model import Attention, Config, Transformer
from rope_heads.rope import adjacent_to_half

SCHEMES = ("rope", "learned", "alibi", "none")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- attention against loops --------------------------------------------------------------------------------------------------------


def projected(a: Attention, which: int, x: torch.Tensor, head: int) -> torch.Tensor:
    """Query (0), key (1) or value (2) of one head at every position of x [position, width], in fp64, before any turn."""
    weight = (a.w_q, a.w_k, a.w_v)[which][head].double()
    bias = 0 if a.qkv.bias is None else a.qkv.bias.double().view(3, a.heads, a.d_head)[which, head]
    return x @ weight.T + bias


def loop_logits(a: Attention, x: torch.Tensor, head: int) -> torch.Tensor:
    """[query, key] for one input x [position, width], one entry at a time in plain floats: the definition, no vectors, no tables."""
    queries, keys = projected(a, 0, x, head).tolist(), projected(a, 1, x, head).tolist()
    planes = len(a.angles) if a.positions == "rope" else 0
    pairs = [(2 * k, 2 * k + 1) if a.pairing == "adjacent" else (k, k + planes) for k in range(planes)]
    logits = torch.full((len(x), len(x)), -torch.inf, dtype=torch.float64)
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            if a.causal and j > i:
                continue
            total = sum(q[d] * k[d] for d in range(2 * planes, a.d_head))
            for (first, second), angle in zip(pairs, a.angles.tolist() if planes else ()):
                c, s = math.cos((i - j) * angle), math.sin((i - j) * angle)  # the query turned by i, the key by j: i - j is left
                total += (q[first] * k[first] + q[second] * k[second]) * c + (q[first] * k[second] - q[second] * k[first]) * s
            logits[i, j] = a.scale * total - (2 ** (-8 * (head + 1) / a.heads) * abs(i - j) if a.positions == "alibi" else 0)
    return logits


def loop_attention(a: Attention, x: torch.Tensor) -> torch.Tensor:
    """Output [position, width] for one input."""
    mixed = [loop_logits(a, x, head).softmax(-1) @ projected(a, 2, x, head) for head in range(a.heads)]
    out = torch.cat(mixed, -1) @ a.out.weight.double().T
    return out if a.out.bias is None else out + a.out.bias.double()


def sharpened(*args, **options) -> Attention:
    a = Attention(*args, **options).eval()
    with torch.no_grad():
        a.qkv.weight.mul_(3)
    return a


@pytest.mark.parametrize("options", [
    {}, {"rotary_dim": 2}, {"pairing": "half", "rotary_dim": 4}, {"bias": True}, {"causal": False, "bias": True}, {"positions": "none"},
    {"positions": "alibi"}, {"positions": "alibi", "causal": False}, {"positions": "learned"}, {"scale": 1.0},
    {"angles": torch.tensor([0.8, 0.0027])}, {"base": 7.0, "pairing": "half"}, {"d_head": 5, "rotary_dim": 4, "bias": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("length", [1, 9, 65])
def test_attention_is_its_definition(options, length):
    a = sharpened(12, 2, **{"d_head": 6, **options})
    x = torch.randn(2, length, 12)
    expected_logits = torch.stack([torch.stack([loop_logits(a, one, h) for h in range(2)]) for one in x.double()])
    expected = torch.stack([loop_attention(a, one) for one in x.double()])
    torch.testing.assert_close(a.logits(x).double(), expected_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(a(x).double(), expected, atol=1e-5, rtol=0)
    for rows in {1, min(3, length)}:
        torch.testing.assert_close(a.logits(x, rows).double(), expected_logits[:, :, -rows:], atol=1e-5, rtol=0)
        torch.testing.assert_close(a(x, rows).double(), expected[:, -rows:], atol=1e-5, rtol=0)


def test_attention_in_fp64_is_exact():
    """Scores and theory compare in fp64 at 1e-6; nothing on the way may fall back to fp32."""
    for length in (9, 70):
        a = sharpened(12, 2).double()
        x = torch.randn(1, length, 12, dtype=torch.float64)
        torch.testing.assert_close(a.logits(x)[0, 1], loop_logits(a, x[0], 1), atol=1e-11, rtol=0)
        torch.testing.assert_close(a(x)[0], loop_attention(a, x[0]), atol=1e-11, rtol=0)


def test_alibi_is_blooms():
    """BLOOM adds slope x key position, which equals ours up to a constant a row; powers of two heads, where all formulas agree."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (1, 2, 8):
        theirs = build_alibi_tensor(torch.ones(1, 11), heads, torch.float32).view(heads, 1, 11)
        a = Attention(8 * heads, heads, positions="alibi")
        with torch.no_grad():
            a.qkv.weight.zero_()
        ours = a.logits(torch.zeros(1, 11, 8 * heads))[0]  # [head, query, key]
        torch.testing.assert_close(ours.softmax(-1)[:, -1:], theirs.softmax(-1))


@pytest.mark.parametrize("options", [{"positions": "rope"}, {"positions": "rope", "pairing": "half", "rotary_dim": 4},
                                     {"positions": "alibi"}, {"positions": "none"}], ids=str)  # fmt: skip
def test_logits_do_not_feel_a_shift(options):
    """Tokens put in front change no logit among those behind: only distance counts."""
    a, x = sharpened(16, 2, **options), torch.randn(1, 12, 16)
    for added in (1, 50, 5_000):
        moved = a.logits(torch.cat((torch.randn(1, added, 16), x), 1), rows=12)[..., added:]
        torch.testing.assert_close(moved, a.logits(x), atol=1e-4, rtol=0)


def test_equal_tokens_leave_a_function_of_distance():
    a = sharpened(16, 2)
    logits = a.logits(torch.randn(1, 1, 16).expand(1, 20, 16))[0]  # [head, query, key]
    for distance in range(20):
        diagonal = logits.diagonal(-distance, 1, 2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert logits[:, -1].std() > 0.1  # and it does depend on it


def test_without_positions_only_content_counts():
    a, x, p = sharpened(16, 2, positions="none", causal=False), torch.randn(1, 20, 16), torch.randperm(20)
    torch.testing.assert_close(a.logits(x[:, p]), a.logits(x)[:, :, p][..., p], atol=1e-5, rtol=0)
    torch.testing.assert_close(a(x[:, p]), a(x)[:, p], atol=1e-5, rtol=0)
    causal = sharpened(16, 2, positions="none")
    before = torch.cat((torch.randperm(19), torch.tensor([19])))
    torch.testing.assert_close(causal(x[:, before], rows=1), causal(x, rows=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_pairings_agree_for_whole_modules(rotary_dim):
    adjacent = sharpened(24, 3, rotary_dim=rotary_dim, bias=True)
    half = Attention(24, 3, rotary_dim=rotary_dim, bias=True, pairing="half").eval()
    half.load_state_dict(adjacent.state_dict())
    x = torch.randn(2, 13, 24)
    assert (half.logits(x) - adjacent.logits(x)).tril().abs().max() > 0.1  # the same weights in the other layout are another head
    p = torch.cat((adjacent_to_half(rotary_dim), torch.arange(rotary_dim, 8)))
    with torch.no_grad():
        for w in (half.w_q, half.w_k):
            w.copy_(w[:, p])
        for b in half.qkv.bias.view(3, 3, 8)[:2]:
            b.copy_(b[:, p])
    torch.testing.assert_close(half.logits(x), adjacent.logits(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(half(x), adjacent(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("arguments, message", [
    ({"positions": "rotary"}, "positions must be one of .*, got 'rotary'"),
    ({"pairing": "interleaved"}, "pairing must be one of .*, got 'interleaved'"),
    ({"rotary_dim": 3}, "rotary_dim must be even and between 2 and d_head = 8, got 3"),
    ({"rotary_dim": 10}, "rotary_dim must be even and between 2 and d_head = 8, got 10"),
    ({"angles": torch.ones(5)}, "angles must hold 1 to d_head / 2 = 4 values, got 5"),
], ids=str)  # fmt: skip
def test_bad_attention_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(8, **arguments)


@pytest.mark.parametrize("rows", [0, -1, 6])
def test_bad_rows_are_named(rows):
    a, x = Attention(8), torch.zeros(1, 5, 8)
    for call in (a, a.logits):
        with pytest.raises(ValueError, match=f"rows must be between 1 and the input's 5 positions, got {rows}"):
            call(x, rows)


# --- properties of the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize("length", [1, 17, 64, 65, 130])
def test_the_last_row_alone_equals_the_full_pass(positions, length):
    model = built(positions=positions, context=130 if positions == "learned" else None)
    tokens = ids(model, 3, length)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, last=True), model(tokens)[:, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize("length", [20, 80])
def test_a_later_token_changes_nothing_before(positions, length):
    model = built(positions=positions, context=80 if positions == "learned" else None)
    tokens = ids(model, 2, length)
    for at in (0, length // 2, length - 1):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 1) % model.config.vocab_size
        with torch.no_grad():
            change = (model(other) - model(tokens)).abs().amax(-1)  # [batch, position]
        assert change[:, :at].sum() <= 1e-4 and change[:, at:].min() > 1e-4


def test_short_and_long_path_meet():
    """The first 60 tokens of a long input (fused kernel) get the logits that they get alone (written out)."""
    for positions in ("rope", "alibi", "none"):
        model = built(positions=positions)
        tokens = ids(model, 2, 200)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens)[:, :60], model(tokens[:, :60]), atol=1e-5, rtol=0)


def test_order_matters_only_with_positions():
    for positions, matters in {"rope": True, "alibi": True, "learned": True, "none": False}.items():
        model = built(positions=positions, layers=1, context=12 if positions == "learned" else None)  # one layer: order leaks through depth
        tokens = ids(model, 1, 12)
        shuffled = torch.cat((tokens[:, :-1].flip(1), tokens[:, -1:]), 1)
        with torch.no_grad():
            change = (model(tokens, last=True) - model(shuffled, last=True)).abs().max().item()
        assert (change > 1e-2) == matters and (matters or change < 1e-5)


def test_attention_only_blocks():
    model = built(mlp=0)
    assert not any("mlp" in name for name, _ in model.named_parameters())
    tokens = ids(model, 2, 10)
    with torch.no_grad():
        inputs = model.layer_inputs(tokens)
        block = model.blocks[0]
        torch.testing.assert_close(inputs[1], inputs[0] + block.attention(block.norm(inputs[0])), atol=1e-6, rtol=0)


def test_training_after_an_evaluation_in_inference_mode():
    """Tables made while evaluating stay usable in the backward pass."""
    model, tokens = built(), ids(built(), 2, 17)
    with torch.inference_mode():
        model(tokens)
    model.train()(tokens, last=True).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dropout_drops_in_training_only():
    model = built(dropout=0.5)
    tokens = ids(model, 2, 17)
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
        assert (model.embed(tokens) == 0).any()


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_the_share_it_says(p, dtype):
    n = 1_000_003
    dropped = built(dropout=p).train().dropout(torch.ones(n, dtype=dtype))
    assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n))
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.004)  # bf16 keeps 8 bits


def test_bf16_autocast_stays_near_fp32():
    """Rounding to 8 bits moves logits by a per cent or two of their spread, in training and evaluation mode, short and long."""
    model = built(heads=4, width=32)
    for length in (17, 100):
        tokens = ids(model, 4, length)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rounded = model(tokens).float()
        with torch.no_grad():
            exact = model(tokens)
        assert 0 < (rounded - exact).square().mean().sqrt() < 0.05 * exact.std()


def test_learned_positions_need_their_length():
    with pytest.raises(ValueError, match="learned positions need context"):
        Config(positions="learned")
    model = built(positions="learned", context=9)
    with pytest.raises(ValueError, match="learned positions end at 9 tokens, got an input of 10"):
        model(ids(model, 1, 10))


@pytest.mark.parametrize("values, message", [
    ({"layers": 0}, "layers must be >= 1, got 0"),
    ({"heads": -1}, "heads must be >= 1, got -1"),
    ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
    ({"width": 0}, "width must be >= 1, got 0"),
    ({"heads": 3}, "width must be a multiple of heads unless d_head is given, got width 128, heads 3"),
    ({"d_head": 0}, "d_head must be >= 1, got 0"),
    ({"mlp": -1}, "mlp must be >= 0, got -1"),
    ({"dropout": 1.0}, "dropout must be in .0, 1., got 1.0"),
    ({"dropout": math.nan}, "dropout must be in .0, 1., got nan"),
    ({"positions": "rotary"}, "positions must be one of .*, got 'rotary'"),
    ({"pairing": "neox"}, "pairing must be one of .*, got 'neox'"),
    ({"rotary_dim": 5}, "rotary_dim must be even and between 2 and d_head = 128, got 5"),
    ({"rotary_dim": 130}, "rotary_dim must be even and between 2 and d_head = 128, got 130"),
    ({"base": 0.0}, "base must be > 0, got 0.0"),
    ({"positions": "learned", "context": -3}, "context must be >= 1, got -3"),
], ids=str)  # fmt: skip
def test_bad_configurations_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        Transformer(Config(**values))


# --- files --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A very small model and its file."""
    model = built(vocab_size=3, layers=1, heads=1, width=2, mlp=1)
    model.save(tmp_path / "seed-0.safetensors")
    return model, tmp_path / "seed-0.safetensors"


@pytest.mark.parametrize(
    "config", [{}, {"positions": "learned", "context": 20, "bias": True}, {"rotary_dim": 4, "pairing": "half", "mlp": 0}], ids=str
)
def test_saved_models_come_back(config, tmp_path):
    model = built(**config).train()
    model.save(tmp_path / "model.safetensors")
    back = Transformer.load(tmp_path / "model.safetensors")
    assert back.config == model.config and not back.training
    assert model.state_dict().keys() == back.state_dict().keys()
    assert all(torch.equal(t, back.state_dict()[name]) for name, t in model.state_dict().items())
    tokens = ids(model, 2, 15)
    assert torch.equal(back(tokens), model.eval()(tokens))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_half_precision_files_load_as_fp32(tmp_path):
    model = built().half()
    model.save(tmp_path / "model.safetensors")
    back = Transformer.load(tmp_path / "model.safetensors")
    assert back.embedding.weight.dtype == torch.float32 and torch.equal(back.embedding.weight, model.embedding.weight.float())


def test_every_cut_file_is_refused_by_name(stored):
    _, path = stored
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="seed-0.safetensors"):
            Transformer.load(path)


def test_every_altered_byte_is_refused_by_name(stored):
    """Weights, names and configuration alike: no single changed bit may pass."""
    _, path = stored
    content = path.read_bytes()
    for at in range(len(content)):
        altered = bytearray(content)
        altered[at] ^= 1 << (at % 8)
        path.write_bytes(altered)
        with pytest.raises(ValueError, match="seed-0.safetensors"):
            Transformer.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 an archive", b"step,accuracy\n0,.125\n" * 40])
def test_a_file_that_is_no_model_is_refused(content, tmp_path):
    path = tmp_path / "curves.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="curves.csv .*not a complete safetensors file"):
        Transformer.load(path)


def test_foreign_weights_are_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(2)}, path, metadata)
        with pytest.raises(ValueError, match="foreign.safetensors was not written by this project"):
            Transformer.load(path)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.safetensors"):
        Transformer.load(tmp_path / "absent.safetensors")
    folder = tmp_path / "run-0"
    folder.mkdir()
    with pytest.raises(ValueError, match="run-0"):
        Transformer.load(folder)


def unharmed(old: Transformer, path) -> None:
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert torch.equal(Transformer.load(path).embedding.weight, old.embedding.weight)


def test_a_full_disk_leaves_the_old_file(stored):
    """The kernel refuses every write beyond 1,000 bytes, as a full disk would in the middle of the file."""
    resource = pytest.importorskip("resource")  # POSIX only
    old, path = stored
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="seed-0.safetensors"):
            built().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    unharmed(old, path)


def test_a_write_stopped_at_the_last_moment_leaves_the_old_file(stored, monkeypatch):
    old, path = stored

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            built().save(path)
    unharmed(old, path)


def test_a_killed_write_leaves_the_old_file(stored):
    """A process that dies in the middle of the write, without any clean-up."""
    old, path = stored
    script = """
import os, signal, sys
import safetensors.torch
from rope_heads.model import Config, Transformer

def die(tensors, target, metadata):
    with open(target, "wb") as half:
        half.write(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)

safetensors.torch.save_file = die
Transformer(Config(layers=1)).save(sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -signal.SIGKILL
    assert torch.equal(Transformer.load(path).embedding.weight, old.embedding.weight)
    assert [p.name for p in path.parent.glob("*.safetensors")] == [path.name]


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().layers = 3


# ---- planes that do not turn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, still", [({"planes": "fastest"}, slice(4, 16)), ({"planes": "slowest"}, slice(0, 12)), ({"nope_from": 1}, slice(0, 16))])
def test_planes_that_do_not_turn_see_no_distance(change, still):
    """Against rotation matrices written out: in the second layer the still planes contribute the plain dot product, the others the turned one."""
    torch.manual_seed(0)
    model = built(heads=1, width=32, layers=2, **change)
    attention = model.blocks[1].attention
    x = torch.randn(1, 9, 32)
    q, k, _ = attention.qkv(x).view(9, 3, 16, 2).double().unbind(1)  # [position, pair, 2]
    angles = torch.tensor([10_000 ** (-i / 16) for i in range(16)], dtype=torch.float64)
    angles[still] = 0
    for i in range(9):
        for j in range(i + 1):
            phase = (i - j) * angles
            turned = torch.stack((q[i, :, 0] * phase.cos() - q[i, :, 1] * phase.sin(), q[i, :, 0] * phase.sin() + q[i, :, 1] * phase.cos()), -1)
            wanted = (turned * k[j]).sum() / 32**0.5
            assert abs(wanted - attention.logits(x)[0, 0, i, j]) < 1e-4


def test_without_positions_anywhere_it_is_the_model_of_positions_none():
    model = built(heads=1, nope_from=0)
    other = built(heads=1, positions="none")
    other.load_state_dict(model.state_dict())
    tokens = ids(model, 3, 20)
    torch.testing.assert_close(model(tokens), other(tokens), atol=1e-5, rtol=1e-5)


def test_layers_below_nope_from_are_as_before_and_files_keep_the_setting(tmp_path):
    model, usual = built(heads=1, nope_from=1), built(heads=1)
    usual.load_state_dict(model.state_dict())
    tokens = ids(model, 2, 12)
    assert torch.equal(model.layer_inputs(tokens)[1], usual.layer_inputs(tokens)[1]) and not torch.equal(model(tokens), usual(tokens))
    model.save(tmp_path / "m")
    assert Transformer.load(tmp_path / "m").config.nope_from == 1 and torch.equal(Transformer.load(tmp_path / "m")(tokens), model(tokens))
    with pytest.raises(ValueError, match="GPT-J needs nope_from = None, got 1"):
        model.to_hugging_face()


@pytest.mark.parametrize("bad, message", [
    ({"planes": "some"}, "planes must be one of"), ({"nope_from": 13}, "between 0 and 12, the number of layers, got 13"),
    ({"nope_from": -1}, "between 0 and 12"), ({"positions": "none", "planes": "fastest"}, "got positions = 'none'"),
])  # fmt: skip
def test_bad_plane_settings_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        Config(**bad)
