"""One pass for all lengths: what a model says of an input behind k added tokens, for many k at once.

A causal model makes of the added tokens what it makes of them alone. So one pass over the longest prefix serves every shorter length: the
input with k added tokens is the first k of them, then the 17 tokens of the task, at positions k to k + 16.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_heads.length_gap import Observe
from rope_heads.model import Transformer
from rope_heads.rope import rotate
from rope_heads.tasks import LENGTH


def read(model: Transformer, prefix: Int[Tensor, "prompt position"], core: Int[Tensor, "prompt 17"], added: Sequence[int],
         observe: Observe | None = None, sharper: bool = False, values: Int[Tensor, "prompt position"] | None = None,
         window: int | None = None) -> Float[Tensor, "prompt length id"]:  # fmt: skip
    """Logits after the query when the first k tokens of `prefix` stand before `core`, for each k of `added`.

    Equal to `model` on each input alone, up to rounding. Nothing of size position x position is kept; in the last layer only the query's row
    is computed. `sharper`: a query that sees n tokens has its logits multiplied by max(1, log n / log 17). `values`: another crowd of the same
    size, each layer in its own pass; the task's tokens look at the keys of `prefix` and get the values of `values`. `window`: every
    token sees itself and the `window` - 1 tokens before it.
    """
    c = model.config
    if c.positions not in ("rope", "none"):
        raise ValueError(f"one pass for all lengths needs positions that see distance only (rope or none), got {c.positions!r}")
    longest = prefix.shape[1]
    if not 0 <= min(added) <= max(added) <= longest:
        raise ValueError(f"added must be between 0 and the prefix's {longest} tokens, got {min(added)} to {max(added)}")
    if values is not None and values.shape != prefix.shape:
        raise ValueError(f"values must be tokens of the prefix's shape {tuple(prefix.shape)}, got {tuple(values.shape)}")
    count, crowds = core.shape[1], prefix if values is None else torch.cat((prefix, values))
    at = torch.tensor(added)[:, None] + torch.arange(count)  # [length, row], positions of the task's tokens
    x, y = model.embed(crowds), model.embed(core)[:, None].expand(-1, len(added), -1, -1)  # [prompt, length, row, width]
    for layer, block in enumerate(model.blocks):
        last = layer == c.layers - 1
        attention, rows = block.attention, 1 if last else count
        hidden = block.norm(y)
        q, k, v = attention.qkv(hidden).unflatten(-1, (3, c.heads, c.d_head)).unbind(-3)  # [prompt, length, row, head, d_head]
        q, k = _turned(attention, q[:, :, -rows:], at[:, -rows:]), _turned(attention, k, at)
        if sharper:
            q = q * sharpening(at[:, -rows:] + 1)[..., None, None]
        h = block.norm(x)
        pq, pk, pv = attention.project(h, 1 if last else longest) if longest else (k[:, 0, :0],) * 3
        seen, given = pk[: len(core)], pv[-len(core) :]  # [prompt, position, head, d_head], of the same crowd unless there are two
        mixed = []
        for i, a in enumerate(added):
            logits = attention.scale * torch.cat((_dot(q[:, i], seen[:, :a]), _within(q[:, i], k[:, i])), -1)  # [prompt, head, row, key]
            if window:
                keys = torch.arange(a + count)
                logits = logits.masked_fill(at[i, -rows:, None] - keys >= window, -torch.inf)
            if observe:
                observe(layer, i, logits, q[:, i], seen[:, :a], k[:, i])
            weight = logits.softmax(-1)
            mixed.append(_gather(weight[..., :a], given[:, :a]) + _gather(weight[..., a:], v[:, i]))
        y = y[:, :, -rows:] + attention.out(torch.stack(mixed, 1).flatten(-2)) + _mlp(block, hidden[:, :, -rows:])
        if not last and longest:
            if sharper:
                pq = pq * sharpening(torch.arange(1, longest + 1))[:, None, None]
            attended = _mix_nearby(attention, pq, pk, pv, window) if window else attention.mix(pq, pk, pv)
            x = x + attention.out(attended.flatten(-2)) + _mlp(block, h)
    return model.unembedding(model.norm(y[:, :, -1]))


def sharpening(seen: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """max(1, log n / log 17) for queries that see n tokens: nothing changes within the training length."""
    return (seen.double().log() / math.log(LENGTH)).clamp(min=1).float()


def _turned(attention, x: Float[Tensor, "prompt length row head d_head"], at: Int[Tensor, "length row"]) -> Tensor:
    if attention.positions != "rope":
        return x
    cos, sin = (t[at][:, :, None] for t in attention.tables(int(at.max()) + 1, x))  # [length, row, 1, pair]
    return rotate(x, cos, sin, attention.pairing)


def _dot(q: Float[Tensor, "prompt row head d"], k: Float[Tensor, "prompt key head d"]) -> Float[Tensor, "prompt head row key"]:
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)


def _within(q: Float[Tensor, "prompt row head d"], k: Float[Tensor, "prompt key head d"]) -> Float[Tensor, "prompt head row key"]:
    """Products among the task's own tokens, -inf for keys after the query."""
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)[-q.shape[1] :]
    return _dot(q, k).masked_fill(later, -torch.inf)


def _gather(weight: Float[Tensor, "prompt head row key"], v: Float[Tensor, "prompt key head d"]) -> Float[Tensor, "prompt row head d"]:
    return (weight @ v.transpose(1, 2)).transpose(1, 2)


def _mix_nearby(attention, q: Tensor, k: Tensor, v: Tensor, window: int, step: int = 256) -> Float[Tensor, "prompt position head d_head"]:
    """`Attention.mix` when each query sees the last `window` tokens, some queries at a time."""
    out = []
    for start in range(0, q.shape[1], step):
        first, end = max(0, start - window + 1), min(start + step, q.shape[1])
        behind = torch.arange(start, end)[:, None] - torch.arange(first, end)
        logits = attention.scale * _dot(q[:, start:end], k[:, first:end]).masked_fill((behind < 0) | (behind >= window), -torch.inf)
        out.append(_gather(logits.softmax(-1), v[:, first:end]))
    return torch.cat(out, 1)


def _mlp(block, hidden: Tensor) -> Tensor | int:
    """A thousand positions at a time: four times the width stays in the cache, and memory stays flat."""
    if block.mlp is None:
        return 0
    return torch.cat([block.mlp(part) for part in hidden.flatten(0, -2).split(1_024)]).unflatten(0, hidden.shape[:-1])
