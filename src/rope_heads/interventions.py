"""Changing what a head does and watching the answer: ablation, patching, ideal patterns, rotary planes switched off.

An edit changes what the heads of one layer add to the residual stream; everything after it is computed anew. Several edits, in one layer or in
many, go through one function, `run`. The blocks of GPT-J are parallel, so an edit leaves the same layer's MLP alone.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_heads.circuits import READINGS, Steps, head_values
from rope_heads.model import Transformer
from rope_heads.tasks import MAX_HOPS

Edit = Callable[[Tensor, Tensor], Tensor]  # (outputs, values) of a layer, both [prompt, position, head, width] -> outputs


def replace_output(head: int, at: Int[Tensor, "prompt"], vectors: Float[Tensor, "prompt width"]) -> Edit:
    """What `head` adds to the token at position `at` of each prompt becomes `vectors`: a mean (ablation) or another prompt's (patching)."""

    def edit(outputs, values):
        outputs = outputs.clone()
        outputs[torch.arange(len(at)), at, head] = vectors
        return outputs

    return edit


def look_only(head: int, at: Int[Tensor, "prompt"], to: Int[Tensor, "prompt"]) -> Edit:
    """The token at position `at` attends with `head` to position `to` alone. at -1: this prompt is left as it is."""

    def edit(outputs, values):
        outputs, rows = outputs.clone(), torch.arange(len(at))[at >= 0]
        outputs[rows, at[rows], head] = values[rows, to[rows], head]
        return outputs

    return edit


def whole_pattern(head: int, targets: Int[Tensor, "prompt position"]) -> Edit:
    """Every token attends with `head` to its target alone (`circuits.ideal_targets`: the pattern of Index or Retrieval)."""

    def edit(outputs, values):
        outputs = outputs.clone()
        outputs[:, :, head] = values[torch.arange(len(targets))[:, None], targets, head]
        return outputs

    return edit


def run(
    model: Transformer,
    hidden: Float[Tensor, "prompt position width"],
    edits: Mapping[int, Iterable[Edit]] | None = None,
    start: int = 0,
    forbidden: Sequence[tuple[Int[Tensor, "prompt"], Int[Tensor, "prompt"]]] = (),
) -> Float[Tensor, "prompt vocab"]:
    """Logits after the query when the residual stream `hidden` enters block `start` and heads are changed on the way.

    edits: what to change in which layer, in turn (`circuits.head_outputs` and `head_values` say what outputs and values are).
    forbidden: pairs (at, away) of positions; from `start` on no head lets the token `at` attend to `away`, its other weights sum to 1.
    """
    edits = edits or {}
    if any(not start <= layer < model.config.layers for layer in edits):
        raise ValueError(f"edited layers must be {start} to {model.config.layers - 1}, got {sorted(edits)}")
    x, prompts = hidden, torch.arange(len(hidden))
    for layer, block in list(enumerate(model.blocks))[start:]:
        if layer not in edits and not forbidden:
            x = block(x, 1 if layer == model.config.layers - 1 else None)
            continue
        logits, values = block.attention.logits(block.norm(x)), head_values(model, layer, x)
        for at, away in forbidden:
            logits[prompts, :, at, away] = -torch.inf
        outputs = torch.einsum("bhqk,bkhw->bqhw", logits.softmax(-1), values)
        for edit in edits.get(layer, ()):
            outputs = edit(outputs, values)
        bias = 0 if block.attention.out.bias is None else block.attention.out.bias
        x = x + outputs.sum(2) + bias + (0 if block.mlp is None else block.mlp(block.norm(x)))
    return model.unembedding(model.norm(x[:, -1]))


def resume(
    model: Transformer, inputs: Float[Tensor, "layer prompt position width"], layer: int, rows: Float[Tensor, "prompt row width"]
) -> Float[Tensor, "prompt vocab"]:
    """Logits after the query when the last rows of the residual stream entering block `layer` become `rows`.

    inputs: `model.layer_inputs` of the untouched run. Tokens before a change do not see it, so only the last rows are computed anew.
    `layer` may be the number of layers: then `rows` leave the last block.
    """
    count = rows.shape[1]
    for at in range(layer, model.config.layers):
        rows = model.blocks[at](torch.cat((inputs[at][:, :-count], rows), 1), count if at < model.config.layers - 1 else 1)
    return model.unembedding(model.norm(rows[:, -1]))


def without_planes(model: Transformer, ids: Iterable[int]) -> Transformer:
    """A copy in which q.k of the named planes (1 = fastest) is 0 in every layer and head: their part of W_Q is set to 0."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        attention = block.attention
        planes = len(attention.angles) if attention.positions == "rope" else 0
        for plane in ids:
            if not 1 <= plane <= planes:
                raise ValueError(f"plane ids must be 1 to {planes}, got {plane}")
            rows = [2 * plane - 2, 2 * plane - 1] if attention.pairing == "adjacent" else [plane - 1, planes + plane - 1]
            with torch.no_grad():
                attention.w_q[:, rows] = 0
                if attention.qkv.bias is not None:
                    attention.qkv.bias.view(3, attention.heads, attention.d_head)[0][:, rows] = 0
    return model


# ---- the ledger's experiment: P1-mechanism-number, P1-mechanism-letter -----------------------------------------------------------------


def ablated(
    accuracy: Float[np.ndarray, "hops layer head token"], steps: Steps, reading: str
) -> tuple[Float[np.ndarray, "hops step"], Float[np.ndarray, "hops step"]]:
    """Accuracy of each hop count with each step ablated at its looker, in the head that performs it, and at a random token off the chain.

    accuracy: after every single mean-ablation; token 0 to 3 = chain token p_0 to p_3, 4 = off the chain, nan where there is no such token.
    nan where the step has no head, or the prompts no such token.
    """
    at_looker, off_chain = np.full(steps.share.shape, np.nan), np.full(steps.share.shape, np.nan)
    for (h, k), layer in np.ndenumerate(steps.layer):
        if layer >= 0:
            tokens = accuracy[h, layer, steps.head[h, k]]
            at_looker[h, k], off_chain[h, k] = tokens[READINGS[reading][0][k][0]], tokens[MAX_HOPS]
    return at_looker, off_chain


def lost_and_kept(accuracy: Float[np.ndarray, "hops layer head token"], steps: Steps, reading: str) -> tuple[float, float]:
    """`lost` and `kept` of the ledger from the accuracies of `ablated`.

    lost: 1 - mean accuracy over hop counts h and steps k <= h, where a step that its head performs in under half of the prompts counts as 0
    lost. kept: mean accuracy over k > h (forward), or over k <= h at the random token (backward).
    """
    at_looker, off_chain = ablated(accuracy, steps, reading)
    exists = np.tri(MAX_HOPS, dtype=bool)  # k <= h
    lost = np.where(steps.share[exists] >= 0.5, 1 - at_looker[exists], 0.0)
    return float(lost.mean()), float((at_looker[~exists] if reading == "forward" else off_chain[exists]).mean())


def ideal_edits(chain: Int[Tensor, "prompt 5"], hops: Int[Tensor, "prompt"], steps: Steps, reading: str) -> dict[int, list[Edit]]:
    """Edits under which every step of every prompt's chain is looked at by its performing head alone.

    Where one head performs two forward steps (one query, two places to look at), the later step's edit stands.
    """
    edits: dict[int, list[Edit]] = {}
    for k, (looker, target) in enumerate(READINGS[reading][0]):
        layers, heads = (torch.from_numpy(index)[hops - 1, k] for index in (steps.layer, steps.head))  # [prompt]
        for layer, head in {(int(a), int(b)) for a, b, h in zip(layers, heads, hops, strict=True) if h > k}:
            mine = (layers == layer) & (heads == head) & (hops > k)
            edits.setdefault(layer, []).append(look_only(head, chain[:, looker].where(mine, torch.tensor(-1)), chain[:, target]))
    return edits
