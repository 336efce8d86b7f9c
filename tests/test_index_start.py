"""The start as Index heads: where the fitted heads look, that nothing else changes, refusals."""

import numpy as np
import pytest
import torch

from rope_heads.index_start import start_as_index
from rope_heads.model import Config, Transformer
from rope_heads.tasks import LETTER, NUMBER


def fresh(seed=0, **config) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(Config(vocab_size=NUMBER.vocabulary_size, **config))


@pytest.mark.parametrize("seed, pairing", [(0, "adjacent"), (1, "half")])
def test_integers_look_back_as_far_as_they_say(seed, pairing):
    """On sequences the fit has not seen, also longer ones; an untouched head hits few."""
    batch = NUMBER.sample(60, None, np.random.default_rng(99), prefix=60)
    tokens = torch.from_numpy(batch.tokens)
    plain, model = fresh(seed, pairing=pairing).eval(), fresh(seed, pairing=pairing).eval()
    start_as_index(model, NUMBER, 4, seed)
    target = torch.arange(tokens.shape[1]) - tokens
    integer = tokens <= 16
    for layer in range(4):
        hit = {}
        for name, m in (("plain", plain), ("started", model)):
            looked = m.attention(layer, m.layer_inputs(tokens)[layer])[:, 0].argmax(-1)
            hit[name] = (looked == target)[integer].float().mean().item()
        assert hit["started"] > (0.85 if layer else 0.99) and hit["plain"] < 0.1, (layer, hit)


def test_only_queries_keys_and_the_constant_of_the_named_layers_change():
    plain, model = fresh(), fresh()
    before = torch.get_rng_state()
    start_as_index(model, NUMBER, 2, 0)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    d = 128
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        if name in ("blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"):
            assert torch.equal(a[2 * d :], b[2 * d :]) and ((b - a)[:d].norm(dim=1) > 1e-3).all(), "every query dimension"
            assert torch.allclose((b - a)[d : 2 * d].mean(1, keepdim=True), (b - a)[d : 2 * d], atol=1e-6), "keys read the constant alone"
        elif name in ("blocks.0.norm.bias", "blocks.1.norm.bias"):
            assert (b == 1).all()
        else:
            assert torch.equal(a, b), name


def test_refusals_say_why():
    with pytest.raises(ValueError, match="index_layers is for the number task.*got letter"):
        start_as_index(fresh(), LETTER, 4, 0)
    with pytest.raises(ValueError, match="needs one head"):
        start_as_index(fresh(heads=2), NUMBER, 4, 0)
    with pytest.raises(ValueError, match="between 0 and 12, the number of layers, got 13"):
        start_as_index(fresh(), NUMBER, 13, 0)
