"""One pass for all lengths against each input alone, against Hugging Face, against logits and windows written out."""

import math

import pytest
import torch
from models import built, inputs, plainly

from rope_heads.long_pass import read

ADDED = [0, 1, 5, 70, 130]  # on both sides of 64 keys, where the attention changes kernel


@pytest.mark.parametrize("config", [{}, {"positions": "none"}, {"rotary_dim": 4}, {"pairing": "half"}, {"layers": 1}, {"mlp": 0}, {"bias": True},
                                    {"planes": "slowest", "nope_from": 1}])  # fmt: skip
def test_one_pass_equals_each_input_alone(config):
    model = built(**config)
    prefix, core = inputs(model)
    with torch.inference_mode():
        together = read(model, prefix, core, ADDED)
        for i, k in enumerate(ADDED):
            alone = model(torch.cat((prefix[:, :k], core), 1))[:, -1]
            torch.testing.assert_close(together[:, i], alone, atol=1e-4, rtol=1e-4)


def test_it_equals_hugging_face():
    model = built(heads=1, width=32, layers=3)
    theirs = model.to_hugging_face(n_positions=200)
    prefix, core = inputs(model)
    with torch.inference_mode():
        together = read(model, prefix, core, ADDED)
        for i, k in enumerate(ADDED):
            wanted = theirs(input_ids=torch.cat((prefix[:, :k], core), 1)).logits[:, -1]
            torch.testing.assert_close(together[:, i], wanted, atol=1e-4, rtol=1e-4)


def test_two_crowds_one_for_the_keys_and_one_for_the_values():
    model = built()
    prefix, core = inputs(model, longest=20)
    other = inputs(model, longest=20)[0]
    where = torch.arange(37.0)

    def attended(a, q, k, v):
        z = [torch.view_as_complex(t.double().unflatten(-1, (-1, 2)).contiguous()) for t in (q, k)]
        ahead = where[20:, None] - where if q.shape[1] == 17 else where[:20, None] - where[:20]  # [query, key]
        logits = torch.einsum("bihp,bjhp,ijp->bhij", z[0], z[1].conj(), torch.exp(1j * ahead[..., None] * a.angles)).real * a.scale
        return a.out(torch.einsum("bhij,bjhd->bihd", logits.masked_fill(ahead < 0, -torch.inf).softmax(-1).float(), v).flatten(-2))

    with torch.inference_mode():
        found = read(model, prefix, core, [0, 20], values=other)
        x, o, y = (model.embedding(tokens) for tokens in (prefix, other, core))
        for block in model.blocks:
            a = block.attention
            (qx, kx, vx), (qo, ko, vo), (qy, ky, vy) = (a.qkv(block.norm(t)).unflatten(-1, (3, a.heads, a.d_head)).unbind(2) for t in (x, o, y))
            mixed = attended(a, qx, kx, vx), attended(a, qo, ko, vo), attended(a, qy, torch.cat((kx, ky), 1), torch.cat((vo, vy), 1))
            x, o, y = (t + out + block.mlp(block.norm(t)) for t, out in zip((x, o, y), mixed))
        torch.testing.assert_close(found[:, 1], model.unembedding(model.norm(y[:, -1])), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found[:, 0], read(model, prefix, core, [0])[:, 0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(read(model, prefix, core, [20], values=prefix), read(model, prefix, core, [20]), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(found[:, 1], read(model, prefix, core, [20])[:, 0], atol=1e-2)


def test_sharper_multiplies_the_logits_of_every_query_by_what_it_sees():
    model = built()
    prefix, core = inputs(model, longest=70)
    with torch.inference_mode():
        together = read(model, prefix, core, [0, 3, 70], sharper=True)
        for i, k in enumerate([0, 3, 70]):
            wanted = plainly(model, torch.cat((prefix[:, :k], core), 1), lambda n: max(1.0, math.log(n) / math.log(17)))
            torch.testing.assert_close(together[:, i], wanted, atol=1e-3, rtol=1e-3)
        assert torch.allclose(together[:, 0], read(model, prefix, core, [0])[:, 0], atol=1e-5), "nothing changes at training length"
        assert not torch.allclose(together[:, 2], read(model, prefix, core, [70])[:, 0], atol=1e-2)


@pytest.mark.parametrize("window, longest", [(17, 70), (5, 70), (17, 300)])
def test_a_window_is_what_each_token_sees(window, longest):
    """Against every token computed from its own window alone, layer by layer; a window over all changes nothing."""
    model = built()
    prefix, core = inputs(model, longest=longest)
    tokens = torch.cat((prefix, core), 1)
    with torch.inference_mode():
        x = model.embed(tokens)
        for block in model.blocks:
            h, rows = block.norm(x), []
            for t in range(tokens.shape[1]):
                seen = h[:, max(0, t - window + 1) : t + 1]
                rows.append(block.attention(seen, 1))  # only distances matter to rotary positions
            x = x + torch.cat(rows, 1) + block.mlp(h)
        found = read(model, prefix, core, [0, longest], window=window)
        torch.testing.assert_close(found[:, 1], model.unembedding(model.norm(x[:, -1])), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(read(model, prefix, core, [0, longest], window=1_000), read(model, prefix, core, [0, longest]), atol=1e-4, rtol=1e-4)


def test_bad_values_are_named():
    model = built()
    with pytest.raises(ValueError, match="added must be between 0 and the prefix's 130 tokens, got 0 to 131"):
        read(model, *inputs(model), [0, 131])
    with pytest.raises(ValueError, match=r"values must be tokens of the prefix's shape \(3, 130\), got \(3, 17\)"):
        read(model, *inputs(model), [0], values=inputs(model)[1])
    with pytest.raises(ValueError, match="got 'alibi'"):
        read(built(positions="alibi"), *inputs(model), [0])
