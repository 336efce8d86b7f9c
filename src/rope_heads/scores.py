"""Positional and symbolic score of an attention head, in closed form.

Swap two keys before a query and look at the two attention weights. If they stay with the slots the head reads positions; if they go with
the content it reads symbols. P0 and P1 (appendix D) score each swap of slots a and b by a cosine:

    positional: cos(v', v)            v  = (D_a, D_b) before the swap
    symbolic:   cos(v', reversed v)   v' = (D_a, D_b) after it

and average over swaps with weights softmax(|D_a - D_b| / temperature). The normaliser of the attention cancels in the cosine, so only two
logit differences are left, delta = l_a - l_b before and delta' after:

    positional = cosh((delta' + delta) / 2) / sqrt(cosh(delta) cosh(delta')),   symbolic = the same with -delta.

All swaps follow from one table of logits S[content, slot]: no re-run of the layer. Both scores lie in [0, 1]. A uniform head gets 1 and 1.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rope_heads.model import Attention, Transformer
from rope_heads.rope import rotary_tables, rotate, split_pairs


def swap_logits(model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"], query: int = -1) -> Float[Tensor, "prompt head content slot"]:
    """Scaled logit that the query would give to the content of position c if it stood at position p, for all c, p <= query.

    hidden: the residual stream entering `layer` (`model.layer_inputs(tokens)[layer]`). The diagonal holds the head's true logits; the last
    row and column belong to the query itself, which is never swapped. As in P1's code, earlier layers are not re-run.
    """
    block = model.blocks[layer]
    return attention_swap_logits(block.attention, block.norm(hidden), query)


def attention_swap_logits(attention: Attention, x: Float[Tensor, "prompt position width"], query: int = -1) -> Float[Tensor, "prompt head content slot"]:
    """`swap_logits` of a bare attention module, for its normalised input x."""
    at = _query_index(query, x.shape[1])
    x = x[:, : at + 1]
    q, k, _ = _unturned(attention, x, at)
    if attention.positions == "rope":
        # turning the query back by each slot once costs slot x d_head; turning every key to every slot would cost content x slot x d_head
        cos, sin = rotary_tables(at - torch.arange(at + 1), attention.angles, torch.float64 if x.dtype == torch.float64 else torch.float32)
        turned = q[:, None].expand(-1, at + 1, -1, -1)  # [prompt, slot, head, d_head]
        q = rotate(turned, cos[:, None].to(x.device), sin[:, None].to(x.device), attention.pairing)
        table = torch.einsum("bphd,bchd->bhcp", q, k)
    else:
        table = torch.einsum("bhd,bchd->bhc", q, k)[..., None].expand(-1, -1, -1, at + 1)
    added = attention.bias_and_mask(1, at + 1, x.device)[:, 0, :]  # [#head, slot]: what the position scheme adds by slot
    return attention.scale * table + added[:, None, :].to(table.dtype)


def plane_swap_logits(model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"], query: int = -1) -> Float[Tensor, "prompt head pair content slot"]:
    """`swap_logits` split by rotary plane (P0's frequency-level score): summed over pairs it is the whole table when all dimensions turn."""
    block = model.blocks[layer]
    attention, x = block.attention, block.norm(hidden)
    if attention.positions != "rope":
        raise ValueError(f"only rotary heads have planes, got positions = {attention.positions!r}")
    at = _query_index(query, x.shape[1])
    q, k, _ = _unturned(attention, x[:, : at + 1], at)
    turning = 2 * len(attention.angles)
    q1, q2 = split_pairs(q[..., :turning], attention.pairing)  # [prompt, head, pair]
    k1, k2 = split_pairs(k[..., :turning], attention.pairing)  # [prompt, content, head, pair]
    dot = q1[:, None] * k1 + q2[:, None] * k2  # real and imaginary part of (query times conjugate key)
    cross = q2[:, None] * k1 - q1[:, None] * k2
    cos, sin = (t.to(x) for t in rotary_tables(at - torch.arange(at + 1), attention.angles, torch.float64))  # [slot, pair]
    return attention.scale * (torch.einsum("bcht,pt->bhtcp", dot, cos) - torch.einsum("bcht,pt->bhtcp", cross, sin))


def _query_index(query: int, length: int) -> int:
    at = query + length if query < 0 else query
    if not 2 <= at < length:
        raise ValueError(f"query must have at least two keys before it and lie in the input of {length} tokens, got {query}")
    return at


def _unturned(attention: Attention, x: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [prompt, head, d_head] of position `at`, keys and values [prompt, position, head, d_head], before any rotation."""
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.heads, attention.d_head)).unbind(-3)
    return q[:, at], k, v


def _log_cosh(x: Tensor) -> Tensor:
    """log(2 cosh x) without overflow."""
    return x.abs() + torch.log1p(torch.exp(-2 * x.abs()))


def _pairs(table: Tensor) -> tuple[Tensor, Tensor]:
    """Slots a < b of all swaps, the query's own (the last) left out."""
    keys = table.shape[-1] - 1
    return tuple(torch.triu_indices(keys, keys, 1, device=table.device))


def swap_weights(table: Float[Tensor, "... content slot"], temperature: float = 1e-4) -> Float[Tensor, "... swap"]:
    """Weight of each swap, softmax(|D_a - D_b| / temperature), with D the attention over all keys, the query's own slot included."""
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    attention = table.diagonal(dim1=-2, dim2=-1).softmax(-1)
    a, b = _pairs(table)
    return ((attention[..., a] - attention[..., b]).abs() / temperature).softmax(-1)


def swap_cosines(table: Float[Tensor, "... content slot"]) -> tuple[Float[Tensor, "... swap"], Float[Tensor, "... swap"]]:
    """Positional and symbolic cosine of every swap, in [0, 1]: 1 and 0 when the weights stay with the slots, 0 and 1 when they follow the content."""
    a, b = _pairs(table)
    before = table[..., a, a] - table[..., b, b]  # [..., swap]
    after = table[..., b, a] - table[..., a, b]  # content b now stands at slot a
    scale = (_log_cosh(before) + _log_cosh(after)) / 2
    return torch.exp(_log_cosh((after + before) / 2) - scale), torch.exp(_log_cosh((after - before) / 2) - scale)


def positional_symbolic(table: Float[Tensor, "... content slot"], temperature: float = 1e-4) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Positional and symbolic score of each prompt (and head), both in [0, 1], from a table of `swap_logits`. P1, appendix D.

    1 and 0: the weights stay with the slots whatever stands there. 0 and 1: they go with the content. At the paper's temperature
    nearly all weight lies on the one swap that moves most mass.
    """
    positional, symbolic = swap_cosines(table)
    weights = swap_weights(table, temperature)
    return (weights * positional).sum(-1), (weights * symbolic).sum(-1)


def centred_scores(table: Float[Tensor, "... content slot"], temperature: float = 1e-4) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The scores after the uniform attention 1/n is subtracted from every weight: in [-1, 1], and 0 for a uniform head.

    Subtracting brings the normaliser back, so the attention after each swap is computed in full.
    """
    a, b = _pairs(table)
    exponents = torch.exp(table.double() - table.double().amax((-2, -1), keepdim=True))
    diagonal = exponents.diagonal(dim1=-2, dim2=-1)
    n = diagonal.shape[-1]
    others = torch.ones(len(a), n, dtype=torch.float64, device=table.device)
    others[torch.arange(len(a)), a] = others[torch.arange(len(a)), b] = 0
    rest = diagonal @ others.T  # [..., swap]: mass of the keys that stay
    before = torch.stack((diagonal[..., a], diagonal[..., b])) / diagonal.sum(-1, keepdim=True) - 1 / n
    after = torch.stack((exponents[..., b, a], exponents[..., a, b]))
    after = after / (rest + after.sum(0)) - 1 / n
    norms = before.norm(dim=0) * after.norm(dim=0)
    positional = ((before * after).sum(0) / norms).where(norms > 1e-12, 0)
    symbolic = ((before.flip(0) * after).sum(0) / norms).where(norms > 1e-12, 0)
    weights = swap_weights(table.double(), temperature)
    return (weights * positional).sum(-1), (weights * symbolic).sum(-1)


def entropy(table: Float[Tensor, "... content slot"]) -> Float[Tensor, "..."]:
    """Entropy in nats of the query's attention, 0 (one key) to log(keys) (uniform)."""
    logs = table.diagonal(dim1=-2, dim2=-1).log_softmax(-1)
    return -(logs.exp() * logs.where(logs.isfinite(), 0)).sum(-1)


def movable_mass(table: Float[Tensor, "... content slot"]) -> Float[Tensor, "..."]:
    """Share of the attention that swaps can move: all but what the query gives its own slot. In [0, 1]; near 0 the score judges leftovers."""
    return 1 - table.diagonal(dim1=-2, dim2=-1).softmax(-1)[..., -1]


class Purity(NamedTuple):
    """kind: "positional", "symbolic" or None; index: the first evaluation from which it lasts, or None."""

    kind: str | None
    index: int | None


def pure_from(positional: Float[np.ndarray, "step"], symbolic: Float[np.ndarray, "step"], gamma: float) -> Purity:
    """From which evaluation on a head is pure until the end of training: one score above 1 - gamma, the other below gamma.

    P1, figures 2C and 7; the rule is recovered from the published curves, the paper says "converged".
    """
    if not 0 < gamma < 0.5:
        raise ValueError(f"gamma must be between 0 and 0.5, got {gamma}")
    positional, symbolic = np.asarray(positional), np.asarray(symbolic)
    if positional.shape != symbolic.shape or positional.ndim != 1 or not len(positional):
        raise ValueError(f"both scores need one value a step, got shapes {positional.shape} and {symbolic.shape}")
    for kind, high, low in (("positional", positional, symbolic), ("symbolic", symbolic, positional)):
        impure = np.flatnonzero(~((high > 1 - gamma) & (low < gamma)))
        first = 0 if not len(impure) else int(impure[-1]) + 1
        if first < len(high):
            return Purity(kind, first)
    return Purity(None, None)
