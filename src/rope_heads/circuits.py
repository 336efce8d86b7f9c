"""What a head does: which planes it uses, where each token looks and what it brings back, and whether the looks follow the chain of the task.

P1, figures 3, 4 and 8 and Table 1. The chain of a sequence runs from the query p_0 over p_1, p_2, ... to the answer p_h. It can be followed
in two ways, and both are measured (claims P1-mechanism-number and P1-mechanism-letter):

    forward:  the query looks at p_1, then at p_2, ... in layers of increasing depth, as figure 3 draws it. Step k is the look p_0 -> p_k.
    backward: p_(h-1) looks at the answer in the lowest layer, then p_(h-2) at p_(h-1), ..., as the composition of Index or Retrieval
              prescribes: the answer flows down the chain to the query. Step k is the look p_(k-1) -> p_k.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from rope_heads.model import Transformer
from rope_heads.rope import split_pairs, to_planes
from rope_heads.tasks import MAX_HOPS, LetterTask, Task

READINGS = {  # reading -> for step k = 1 to 4: who looks (chain index) and where, and the order of steps in depth
    "forward": ([(0, k) for k in range(1, MAX_HOPS + 1)], [1, 2, 3, 4]),
    "backward": ([(k - 1, k) for k in range(1, MAX_HOPS + 1)], [4, 3, 2, 1]),
}

# ---- planes ----------------------------------------------------------------------------------------------------------------------


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


def plane_vectors(
    model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"], plane: int
) -> tuple[Complex[Tensor, "prompt position head"], Complex[Tensor, "prompt position head"]]:
    """Queries and keys of every token in one rotary plane, before any rotation, as complex numbers (P1, figure 4B).

    plane: its id, 1 (fastest) to the number of planes. With theta the plane's angle, a query q at position i and a key k at j have the
    raw product Re(conj(q) k exp(i theta (j - i))): a query that lags a fixed key by the phase theta v looks v places back.
    """
    block = model.blocks[layer]
    attention = block.attention
    if attention.positions != "rope" or not 1 <= plane <= len(attention.angles):
        raise ValueError(f"plane must be the id of a rotary plane of layer {layer}, got {plane} with positions = {attention.positions!r}")
    q, k, _ = attention.qkv(block.norm(hidden)).unflatten(-1, (3, attention.heads, attention.d_head)).unbind(-3)
    turning = 2 * len(attention.angles)
    q, k = (to_planes(t[..., :turning], attention.pairing)[..., plane - 1] for t in (q, k))
    return q, k


def alignment(vectors: Complex[Tensor, "..."]) -> float:
    """Length of the mean over the mean length, in [0, 1]: 1 when all vectors of a plane point in one direction, 0 when they cancel."""
    return float(vectors.mean().abs() / vectors.abs().mean())


# ---- where tokens look, and what they bring back ------------------------------------------------------------------------------------


def head_values(model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"]) -> Float[Tensor, "prompt position head width"]:
    """What each token gives a reader that attends to it alone: W_O W_V x, head by head, in the residual stream (biases of W_O left out)."""
    block = model.blocks[layer]
    attention = block.attention
    v = attention.qkv(block.norm(hidden)).unflatten(-1, (3, attention.heads, attention.d_head)).select(-3, 2)
    return torch.einsum("bphd,whd->bphw", v, attention.out.weight.unflatten(-1, (attention.heads, attention.d_head)))


def head_outputs(model: Transformer, layer: int, hidden: Float[Tensor, "prompt position width"]) -> Float[Tensor, "prompt position head width"]:
    """What each head adds to the residual stream of each token: `head_values` weighted with its attention."""
    return torch.einsum("bhqk,bkhw->bqhw", model.attention(layer, hidden), head_values(model, layer, hidden))


def lens(model: Transformer, added: Float[Tensor, "... width"]) -> Int[Tensor, "..."]:
    """Token that the unembedding reads from a vector alone, after the final norm ("logit lens")."""
    return model.unembedding(model.norm(added)).argmax(-1)


class View(NamedTuple):
    """Figure 3 in numbers. looked_at: arg max of the last token's attention; weight: its attention there, in [0, 1]; copied: the logit-lens
    label of what the head adds to the last token; held: the logit-lens label of the last token's residual stream after the block."""

    looked_at: Int[Tensor, "layer prompt head"]
    weight: Float[Tensor, "layer prompt head"]
    copied: Int[Tensor, "layer prompt head"]
    held: Int[Tensor, "layer prompt"]


def last_token_view(model: Transformer, tokens: Int[Tensor, "prompt position"]) -> View:
    """What the last token looks at in every layer, and what it holds afterwards (P1, figure 3; the paper does not say how it labels)."""
    x, rows = model.embed(tokens), []
    for layer, block in enumerate(model.blocks):
        weight, looked_at = model.attention(layer, x)[:, :, -1].max(-1)  # [prompt, head]
        copied = lens(model, head_outputs(model, layer, x)[:, -1])
        x = block(x)
        rows.append((looked_at, weight, copied, lens(model, x[:, -1])))
    return View(*(torch.stack(column) for column in zip(*rows, strict=True)))


def looks(model: Transformer, inputs: Float[Tensor, "layer prompt position width"]) -> Int[Tensor, "layer prompt head query"]:
    """Position to which each token attends most, from the residual streams of `model.layer_inputs` (or its first layers)."""
    return torch.stack([model.attention(layer, x).argmax(-1) for layer, x in enumerate(inputs)])


# ---- the chain ---------------------------------------------------------------------------------------------------------------------


def chains(task: Task, tokens: Int[np.ndarray, "prompt position"]) -> Int[Tensor, "prompt 5"]:
    """Positions p_0 (query) to p_h (answer) of every sequence, -1 after the answer."""
    table = torch.full((len(tokens), MAX_HOPS + 1), -1)
    for row, sequence in zip(table, tokens, strict=True):
        visited = task.chain(sequence)
        row[: len(visited)] = torch.tensor(visited)
    return table


def ideal_targets(task: Task, tokens: Int[np.ndarray, "prompt position"]) -> Int[Tensor, "prompt position"]:
    """Where the task's own function looks from each token: Index (v places back) for Number, Retrieval (the nearest earlier pair that starts
    with the token's second letter) for Letter; the token itself where there is no such place. P1, section 3.4."""
    from rope_heads.solvers import letters_of

    own = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if not isinstance(task, LetterTask):
        there = own - np.where(tokens <= task.vocabulary_size - 1 - task.letters, tokens, 0)  # ids of integers are their values
        return torch.from_numpy(np.where(there >= 0, there, own))
    first, second = letters_of(task, tokens)
    matches = (first[:, None, :] == second[:, :, None]) & (own[:, None, :] < own[:, :, None])  # [prompt, position, earlier position]
    nearest = tokens.shape[1] - 1 - matches[:, :, ::-1].argmax(-1)
    return torch.from_numpy(np.where(matches.any(-1), nearest, own))


def chain_looks(
    task: Task, tokens: Int[Tensor, "prompt position"], chain: Int[Tensor, "prompt 5"], looked: Int[Tensor, "layer prompt head query"]
) -> Bool[Tensor, "layer prompt head looker target"]:
    """Does chain token p_i (looker i = 0 to 3) attend most to p_j (target j = 1 to 4, at index j - 1)? Only j > i can be.

    On the Letter tasks any position with the same token as p_j counts as p_j (the ledger's rule).
    """
    prompts = torch.arange(len(tokens))[:, None]
    at = looked.permute(1, 3, 0, 2)[prompts, chain[:, :-1].clamp(min=0)].permute(2, 0, 3, 1)  # [layer, prompt, head, looker]
    target = chain[:, 1:].clamp(min=0)  # [prompt, target]
    if isinstance(task, LetterTask):
        found, wanted = tokens[torch.arange(len(tokens))[:, None, None], at.permute(1, 0, 2, 3).flatten(1, 2)], tokens[prompts, target]
        found = found.unflatten(1, (at.shape[0], at.shape[2])).permute(1, 0, 2, 3)
    else:
        found, wanted = at, target
    later = torch.ones(MAX_HOPS, MAX_HOPS, dtype=torch.bool).triu()  # target j = index + 1 > looker i
    there = (chain[:, :-1, None] >= 0) & (chain[:, None, 1:] >= 0) & later  # [prompt, looker, target]
    return (found[..., None] == wanted[:, None, None, :]) & there[:, None]


def step_looks(hits: Bool[Tensor, "layer prompt head looker target"], reading: str) -> Bool[Tensor, "layer prompt head step"]:
    """Of `chain_looks`, the four looks that a reading calls steps 1 to 4."""
    steps, _ = READINGS[reading]
    return torch.stack([hits[..., looker, target - 1] for looker, target in steps], dim=-1)


def follows(hits: Bool[Tensor, "layer prompt head looker target"], reading: str) -> Bool[Tensor, "prompt"]:
    """Which four-hop prompts show all four steps, each as the largest attention of its token, in four layers of the reading's order."""
    steps = step_looks(hits, reading).any(2)  # [layer, prompt, step]
    order = torch.tensor([*READINGS[reading][1], 1]) - 1  # one entry more, never reached by a full count
    done = torch.zeros(steps.shape[1], dtype=torch.long)
    for layer in steps:  # taking each step in the first layer that shows it leaves most room for the others
        done += layer[torch.arange(len(done)), order[done]] & (done < MAX_HOPS)
    return done == MAX_HOPS


class Steps(NamedTuple):
    """Which head performs which step. Index [hops - 1, step - 1]; -1 and nan where a backward step does not exist."""

    layer: Int[np.ndarray, "hops step"]
    head: Int[np.ndarray, "hops step"]
    share: Float[np.ndarray, "hops step"]  # of the prompts in which that head's largest attention is the step


def performing(hits: Bool[Tensor, "layer prompt head looker target"], hops: Int[np.ndarray, "prompt"], reading: str) -> Steps:
    """The head in which each step is the largest attention most often.

    Forward, a step has one head for all hop counts (also those too short to have it, where the head can be ablated as a control).
    Backward, it has one for each hop count: in the composition of Index step k of h hops belongs to layer h - k. Among heads that do it
    equally often stands the lowest above the step that the reading puts before it: earlier looks of that token were in vain, later ones
    come when the work is done.
    """
    steps = step_looks(hits, reading).float().numpy()  # [layer, prompt, head, step]
    backward = reading == "backward"
    layer, head, share = np.full((MAX_HOPS, MAX_HOPS), -1), np.full((MAX_HOPS, MAX_HOPS), -1), np.full((MAX_HOPS, MAX_HOPS), np.nan)
    for h in range(MAX_HOPS):
        before = -1
        for k in (step - 1 for step in READINGS[reading][1]):
            prompts = hops == h + 1 if backward else hops >= k + 1
            if (backward and k > h) or not prompts.any():
                continue
            shares = steps[..., k][:, prompts].mean(1)  # [layer, head]
            equal = np.argwhere(shares == shares.max())
            layer[h, k], head[h, k] = next((best for best in equal if best[0] > before), equal[0])
            share[h, k], before = shares.max(), layer[h, k]
    return Steps(layer, head, share)
