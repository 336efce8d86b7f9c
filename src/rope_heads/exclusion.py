"""P0's exclusion principle: a head whose logits ignore content and ignore position gives every key the same logit.

With m keys before the query let S[c, j] be the logit of content c at slot j, so that L_j = S[j, j] are the head's logits. For a permutation p of
the keys, d_pos(p, j) = S[p(j), j] - L_j (other content, same slot) and d_sym(p, j) = S[j, p(j)] - L_j (same content, other slot). Theorem 1:

    Var(L) <= (|d_pos|^2 + |d_sym|^2) / (m! m),    Var(L) = 1/m sum_j (L_j - mean)^2,    norms over all m! permutations and m keys.
"""

from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rope_heads.model import Attention
from rope_heads.scores import attention_swap_logits


def deviations(table: Float[Tensor, "... content slot"]) -> tuple[Float[Tensor, "... permutation key"], Float[Tensor, "... permutation key"]]:
    """d_pos and d_sym of a table of `scores.swap_logits` for all permutations of the keys before the query (the last row and column)."""
    keys = table.shape[-1] - 1
    if not 1 <= keys <= 8:
        raise ValueError(f"all permutations are listed for 1 to 8 keys before the query, got {keys}")
    chosen, own = torch.tensor(list(permutations(range(keys)))), torch.arange(keys)
    logits = table.diagonal(dim1=-2, dim2=-1)[..., None, :keys]
    return table[..., chosen, own] - logits, table[..., own, chosen] - logits


def sides(table: Float[Tensor, "... content slot"]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Both sides of theorem 1: variance of the logits, and its bound."""
    positional, symbolic = deviations(table)
    variance = table.diagonal(dim1=-2, dim2=-1)[..., :-1].var(-1, correction=0)
    return variance, (positional.square().sum((-2, -1)) + symbolic.square().sum((-2, -1))) / (positional.shape[-2] * positional.shape[-1])


def random_tables(n: int, count: int, seed: int = 0, width: int = 16) -> Float[Tensor, "head content slot"]:
    """Tables of `count` random rotary heads, each with a random prompt of n tokens (the last is the query), fp64.

    Weights, tokens and the number of planes (1 to 8) and their angles differ from head to head.
    """
    rng, tables = np.random.default_rng([seed, n]), []
    for _ in range(count):
        angles = torch.from_numpy(10.0 ** rng.uniform(-4, 0.5, rng.integers(1, width // 2 + 1)))
        attention = Attention(width, angles=angles).double()
        with torch.no_grad():
            attention.qkv.weight.copy_(torch.from_numpy(rng.normal(0, rng.uniform(0.05, 1), (3 * width, width))))
            tables.append(attention_swap_logits(attention, torch.from_numpy(rng.normal(size=(1, n, width))))[0, 0])
    return torch.stack(tables)


def largest_excess(lengths=range(3, 8), count: int = 1_000) -> dict[str, float]:
    """Value of claim P0-theorem-1: for each n the largest left side minus right side over `count` random heads and prompts."""
    excess = {}
    for n in lengths:
        variance, bound = sides(random_tables(n, count))
        excess[f"n = {n}"] = float((variance - bound).max())
    return excess
