"""Scores against brute force: the layer re-run with two rows of its input exchanged, for every pair."""

import numpy as np
import pytest
import torch

from rope_heads.model import Attention, Config, Transformer
from rope_heads.scores import (
    attention_swap_logits,
    centred_scores,
    entropy,
    movable_mass,
    plane_swap_logits,
    positional_symbolic,
    pure_from,
    swap_logits,
    swap_weights,
)
from rope_heads.tasks import LETTER, NUMBER


def sharp(**changes) -> Transformer:
    """A random model in fp64 whose heads attend to few keys."""
    torch.manual_seed(1)
    model = Transformer(Config(**({"layers": 2, "heads": 2, "dropout": 0.0} | changes))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def exchanged_attention(model, layer, hidden, query, a, b):
    swapped = hidden.clone()
    swapped[:, [a, b]] = hidden[:, [b, a]]
    return model.attention(layer, swapped)[:, :, query, : query + 1]


def brute_force(model, layer, hidden, query, temperature, centred=False):
    """Both scores by re-running the layer for every swap, cosines without any epsilon."""
    query = query % hidden.shape[1]
    shift = 1 / (query + 1) if centred else 0.0
    base = model.attention(layer, hidden)[:, :, query, : query + 1]
    positional, symbolic, moved = [], [], []
    for a in range(query):
        for b in range(a + 1, query):
            after = exchanged_attention(model, layer, hidden, query, a, b)[..., [a, b]] - shift
            before = base[..., [a, b]] - shift
            norm = before.norm(dim=-1) * after.norm(dim=-1)
            positional.append((before * after).sum(-1) / norm)
            symbolic.append((before.flip(-1) * after).sum(-1) / norm)
            moved.append((base[..., a] - base[..., b]).abs())
    weights = (torch.stack(moved, -1) / temperature).softmax(-1)
    return (weights * torch.stack(positional, -1)).sum(-1), (weights * torch.stack(symbolic, -1)).sum(-1)


@pytest.mark.parametrize("changes", [{}, {"rotary_dim": 32}, {"pairing": "half"}, {"positions": "alibi"}, {"positions": "none"}])
@pytest.mark.parametrize("query", [-1, 9])
@pytest.mark.parametrize("temperature", [1e-4, 0.1])
def test_closed_form_is_brute_force(changes, query, temperature):
    model = sharp(**changes)
    hidden = model.layer_inputs(torch.from_numpy(NUMBER.sample(12, None, np.random.default_rng(0)).tokens))
    for layer in range(2):
        table = swap_logits(model, layer, hidden[layer], query)
        for ours, theirs in zip(positional_symbolic(table, temperature), brute_force(model, layer, hidden[layer], query, temperature), strict=True):
            assert (ours - theirs).abs().max() < 1e-6
        for ours, theirs in zip(centred_scores(table, temperature), brute_force(model, layer, hidden[layer], query, temperature, True), strict=True):
            assert (ours - theirs).abs().max() < 1e-6


def test_closed_form_is_brute_force_on_a_trained_head():
    """A few steps of training on 1-hop letters make the logits far from random."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Transformer(Config(vocab_size=LETTER.vocabulary_size, layers=1, width=32, dropout=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        batch = LETTER.sample(64, 1, rng)
        torch.nn.functional.cross_entropy(model(torch.from_numpy(batch.tokens), last=True)[:, 0], torch.from_numpy(batch.answers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = model.double().eval()
    hidden = model.layer_inputs(torch.from_numpy(LETTER.sample(20, None, rng).tokens))[0]
    for ours, theirs in zip(positional_symbolic(swap_logits(model, 0, hidden)), brute_force(model, 0, hidden, -1, 1e-4), strict=True):
        assert (ours - theirs).abs().max() < 1e-6


def test_the_table_holds_the_logits_after_every_swap():
    model = sharp()
    hidden = model.layer_inputs(torch.from_numpy(NUMBER.sample(3, None, np.random.default_rng(0)).tokens))[1]
    table = swap_logits(model, 1, hidden)
    attention, norm = model.blocks[1].attention, model.blocks[1].norm
    assert torch.allclose(table.diagonal(dim1=-2, dim2=-1), attention.logits(norm(hidden), 1)[:, :, 0], atol=1e-12)
    swapped = hidden.clone()
    swapped[:, [4, 11]] = hidden[:, [11, 4]]
    logits = attention.logits(norm(swapped), 1)[:, :, 0]
    assert torch.allclose(logits[..., 4], table[:, :, 11, 4], atol=1e-12) and torch.allclose(logits[..., 11], table[:, :, 4, 11], atol=1e-12)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_planes_add_up_to_the_table(pairing):
    model = sharp(pairing=pairing)
    hidden = model.layer_inputs(torch.from_numpy(NUMBER.sample(4, None, np.random.default_rng(0)).tokens))[1]
    planes = plane_swap_logits(model, 1, hidden, 10)
    assert planes.shape == (4, 2, 32, 11, 11)
    assert torch.allclose(planes.sum(2), swap_logits(model, 1, hidden, 10), atol=1e-10)


def table_of(content_part, slot_part):
    """Logits that are a sum of what stands there and where."""
    return torch.as_tensor(content_part, dtype=torch.float64)[:, None] + torch.as_tensor(slot_part, dtype=torch.float64)[None]


def test_a_head_that_reads_slots_is_positional_and_one_that_reads_content_symbolic():
    values = np.random.default_rng(0).normal(size=9) * 3
    zero = np.zeros(9)
    positional, symbolic = positional_symbolic(table_of(zero, values))
    assert positional == pytest.approx(1) and symbolic < 0.9
    positional, symbolic = positional_symbolic(table_of(values, zero))
    assert symbolic == pytest.approx(1) and positional < 0.9


def test_extreme_logits_neither_overflow_nor_lose_the_limit():
    values = np.zeros(9)
    values[3] = 5_000.0
    positional, symbolic = positional_symbolic(table_of(np.zeros(9), values))
    assert positional == pytest.approx(1) and symbolic == pytest.approx(0)
    assert torch.isfinite(torch.stack(centred_scores(table_of(np.zeros(9), values)))).all()


def test_a_uniform_head_scores_one_on_both_and_zero_when_centred():
    uniform = torch.zeros(2, 7, 7)
    assert [float(s[0]) for s in positional_symbolic(uniform)] == [1.0, 1.0]
    assert [float(s[0]) for s in centred_scores(uniform)] == [0.0, 0.0]
    assert entropy(uniform)[0] == pytest.approx(np.log(7)) and movable_mass(uniform)[0] == pytest.approx(6 / 7)


def test_at_the_papers_temperature_one_swap_decides():
    model = sharp()
    hidden = model.layer_inputs(torch.from_numpy(NUMBER.sample(20, None, np.random.default_rng(0)).tokens))[0]
    weights = swap_weights(swap_logits(model, 0, hidden))
    assert torch.allclose(weights.sum(-1), torch.ones(20, 2, dtype=weights.dtype)) and weights.amax(-1).median() > 0.99


def test_purity_by_hand():
    up, down = np.array([0.5, 0.9, 0.7, 0.85, 0.99]), np.array([0.5, 0.1, 0.1, 0.05, 0.0])
    assert pure_from(up, down, 0.2) == ("positional", 3)
    assert pure_from(down, up, 0.2) == ("symbolic", 3)
    assert pure_from(up, down, 0.1) == ("positional", 4)
    assert pure_from(up, 1 - up, 0.005) == (None, None)
    assert pure_from(np.ones(3), np.zeros(3), 0.05) == ("positional", 0)
    assert pure_from(np.ones(3), np.ones(3), 0.2) == (None, None), "high on both is not pure"


def test_published_curves_give_the_published_purity_steps():
    """The rule was recovered from these curves; layer 0 of Number is the one known exception (facts of the paper's figure 2C)."""
    from rope_heads import papers

    for task in ("number", "letter"):
        scores = papers.published_scores(task)
        assert len(scores)
        kinds = {}
        for layer, part in scores.groupby("layer"):
            kinds[layer] = pure_from(part.positional.to_numpy(), part.symbolic.to_numpy(), 0.2).kind
        assert kinds == ({0: None, 1: "positional", 2: "positional", 3: "positional"} | {i: "symbolic" for i in range(4, 12)}
                         if task == "number" else {0: None} | {i: "symbolic" for i in range(1, 12)})  # fmt: skip


@pytest.mark.parametrize("call, message", [
    (lambda: swap_logits(sharp(), 0, torch.zeros(1, 5, 128, dtype=torch.float64), 7), "got 7"),
    (lambda: swap_logits(sharp(), 0, torch.zeros(1, 5, 128, dtype=torch.float64), 1), "at least two keys"),
    (lambda: swap_weights(torch.zeros(5, 5), 0.0), "temperature must be > 0, got 0"),
    (lambda: plane_swap_logits(sharp(positions="none"), 0, torch.zeros(1, 5, 128, dtype=torch.float64)), "positions = 'none'"),
    (lambda: pure_from([1.0], [0.0], 0.5), "gamma must be between 0 and 0.5, got 0.5"),
    (lambda: pure_from([1.0, 1.0], [0.0], 0.2), "one value a step"),
])  # fmt: skip
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bare_attention_modules_can_be_scored():
    torch.manual_seed(0)
    attention = Attention(16, heads=2, d_head=8, bias=True, scale=3.0).double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    table = attention_swap_logits(attention, x)
    assert torch.allclose(table.diagonal(dim1=-2, dim2=-1), attention.logits(x, 1)[:, :, 0])
