"""What a head does with its planes and its keys: use of each rotary plane, the plane that dominates, where the query looks.

P1, figures 3, 4 and 8 and Table 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rope_heads.model import Transformer
from rope_heads.rope import split_pairs


def plane_products(model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"]) -> Float[Tensor, "prompt head pair key"]:
    """Raw q.k of the last token in each rotary plane, both turned by their positions, not divided by sqrt(d_head)."""
    block = model.blocks[layer]
    attention = block.attention
    if attention.positions != "rope":
        raise ValueError(f"only rotary heads have planes, got positions = {attention.positions!r}")
    q, k, _ = attention.project(block.norm(hidden), 1)
    turning = 2 * len(attention.angles)
    (q1, q2), (k1, k2) = (split_pairs(t[..., :turning], attention.pairing) for t in (q[:, 0], k))  # [prompt, (key,) head, pair]
    return (q1[:, None] * k1 + q2[:, None] * k2).permute(0, 2, 3, 1)


def plane_use(products: Float[Tensor, "prompt head pair key"]) -> Float[Tensor, "head pair"]:
    """Use of each plane: its largest raw q.k over the keys, mean over prompts (P1, figure 8; the aggregation is our choice)."""
    return products.amax(-1).mean(0)


def weighted_id(use: Float[Tensor, "... pair"]) -> Float[Tensor, "..."]:
    """Mean plane id, 1 (fastest) to the number of planes, weighted with softmax(use).

    Recovered from the published curves: rounded, it gives all 24 entries of P1's Table 1 from figure 8.
    """
    ids = torch.arange(1, use.shape[-1] + 1, dtype=use.dtype, device=use.device)
    return (use.softmax(-1) * ids).sum(-1)
