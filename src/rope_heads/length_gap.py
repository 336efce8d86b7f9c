"""A model's own gap on long inputs: how far the logit of the key that a head should attend to stands above the largest other, over all planes.

The chain of a sequence runs from the query p_0 over p_1, ... to the answer p_h; looker i attends to target j when p_i's largest logit is at
p_j (`circuits`). For every layer, head and pair (i, j) the log-odds of the target fall apart exactly:

    log (weight / (1 - weight))  =  gap  -  dilution,    gap = logit of the target - largest other,
                                                         dilution = logsumexp of the others - the largest of them.

The gap is what theory calls discrepancy, on these inputs instead of the worst one. The dilution is what many small rivals add: between 0 and
log(n - 1), as when all n - 1 others are equal. The first decides whether the target is the largest; both decide how much attention it gets.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rope_heads import circuits
from rope_heads.claims import crossing_step
from rope_heads.model import Transformer
from rope_heads.rope import split_pairs
from rope_heads.tasks import LENGTH, MAX_HOPS, Batch, Task

Observe = Callable[[int, int, Tensor, Tensor, Tensor, Tensor], None]
"""observe(layer, which length, logits [prompt, head, row, key], queries [prompt, row, head, d_head], keys of the added tokens [prompt,
position, head, d_head], keys of the task's 17 tokens): rows are the last rows of the input, queries and keys are turned, logits are scaled."""

PAIRS = [(i, j) for i in range(MAX_HOPS) for j in range(i + 1, MAX_HOPS + 1)]  # looker, target; the query's four come first
VALUES = ("gap", "gap_inside", "log_odds", "weight", "ahead")
SHOWN = 0.25  # a look is kept in the table when at least this share of the prompts shows it at training length
PERFORMED = 0.5  # a head performs a step when it shows the look in at least this share


def look_gaps(logits: Float[Tensor, "prompt head row key"], looker: Int[Tensor, "prompt pair"],
              at: Int[Tensor, "prompt pair"], added: int) -> tuple[dict[str, Tensor], Int[Tensor, "prompt pair head"]]:  # fmt: skip
    """For lookers (row) and targets (key): `VALUES`, each [prompt, pair, head], and the key of the largest rival.

    gap_inside: gap to rivals among the task's own tokens, the keys from `added` on. ahead: 1 where the gap is positive.
    """
    prompts = torch.arange(len(looker))[:, None]
    mine = logits[prompts, :, looker]  # [prompt, pair, head, key]
    place = at[:, :, None, None].expand(*mine.shape[:3], 1)
    right, others = mine.gather(-1, place)[..., 0], mine.scatter(-1, place, -torch.inf)
    best, rival = others.max(-1)
    gap = right - best
    log_odds = right - others.logsumexp(-1)
    values = {"gap": gap, "gap_inside": right - others[..., added:].amax(-1), "log_odds": log_odds, "weight": log_odds.sigmoid(), "ahead": (gap > 0).float()}
    return values, rival


def plane_shares(query: Float[Tensor, "prompt pair head d_head"], difference: Float[Tensor, "prompt pair head d_head"],
                 pairing: str) -> Float[Tensor, "prompt pair head plane"]:  # fmt: skip
    """What each rotary plane adds to query . (key of the target - key of the rival)."""
    first, second = split_pairs(query * difference, pairing)
    return first + second


class GapTally:
    """Sums over prompts of `VALUES` and of what each plane adds to the gap, by length, layer, head, hop count and pair.

    observer(...) gives the functions that `long_pass.read` calls; state and restore carry the sums over an interruption.
    """

    def __init__(self, model: Transformer, added: Sequence[int]):
        c = model.config
        if c.rotary_dim not in (0, c.d_head):
            raise ValueError(f"planes must fill the head to carry its gap, got rotary_dim {c.rotary_dim} and d_head {c.d_head}")
        self.model, self.added, self.pairing = model, tuple(added), c.pairing
        shape = (len(added), c.layers, c.heads, MAX_HOPS, len(PAIRS))
        self.sums = {name: np.zeros(shape) for name in VALUES} | {"planes": np.zeros((*shape, c.d_head // 2)), "prompts": np.zeros(shape)}

    def state(self) -> dict[str, np.ndarray]:
        return {f"sum_{name}": value for name, value in self.sums.items()}

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        self.sums = {name: kept[f"sum_{name}"] for name in self.sums}

    def observer(self, task: Task, core: Batch, places: Sequence[int]) -> Callable[[slice], Observe]:
        """For the prompts of `core`, read at the lengths number `places` of the whole list."""
        chain, hops = circuits.chains(task, core.tokens), torch.from_numpy(core.hops)
        return lambda rows: lambda layer, i, *seen: self._add(layer, places[i], chain[rows], hops[rows], *seen)

    def _add(self, layer, length, chain, hops, logits, queries, far_keys, keys) -> None:
        rows, added = logits.shape[2], far_keys.shape[1]
        pairs = PAIRS if rows > 1 else PAIRS[:MAX_HOPS]  # in the last layer the query alone is computed
        looker, target = (chain[:, [pair[side] for pair in pairs]] for side in (0, 1))
        there = (looker >= 0) & (target >= 0)  # [prompt, pair]
        looker, target = looker.where(there, LENGTH - 1) - LENGTH + rows, target.clamp(min=0)
        values, rival = look_gaps(logits, looker, target + added, added)
        prompts, heads = torch.arange(len(chain))[:, None], torch.arange(logits.shape[1])
        near = keys[prompts[..., None], (rival - added).clamp(min=0), heads]  # [prompt, pair, head, d_head]
        if added:
            far = far_keys[prompts[..., None], rival.clamp(max=added - 1), heads]
            near = near.where((rival >= added)[..., None], far)
        values["planes"] = self.model.blocks[layer].attention.scale * plane_shares(queries[prompts, looker], keys[prompts, target] - near, self.pairing)
        values["prompts"] = torch.ones_like(rival)
        groups = ((hops[:, None] == torch.arange(1, MAX_HOPS + 1))[:, :, None] & there[:, None]).double()  # [prompt, hops, pair]
        for name, value in values.items():
            self.sums[name][length, layer, :, :, : len(pairs)] += torch.einsum("pzk,pkh...->hzk...", groups, value.double()).numpy()

    def rows(self, task: Task, core: Batch) -> pd.DataFrame:
        """One row a length, layer, head, hop count and look: means over prompts; `planes` (of looks that are performed) adds up to `gap`.

        core: the prompts without added tokens, which say who performs which step (`performs`, of the reading that they follow more often).
        Other looks are left out when fewer than `SHOWN` of the prompts show them at training length.
        """
        reading, performs = performed(self.model, task, core)
        count = np.maximum(self.sums["prompts"], 1)
        means = {name: self.sums[name] / count for name in VALUES}
        planes = (self.sums["planes"] / count[..., None]).astype(np.float16)
        base = self.added.index(0)
        kept = (self.sums["prompts"][base] > 0) & (performs | (means["ahead"][base] >= SHOWN))  # [layer, head, hops, pair]
        rows = [{"added": added, "layer": layer, "head": head, "hops": h + 1, "looker": PAIRS[k][0], "target": PAIRS[k][1], "reading": reading,
                 "performs": bool(performs[layer, head, h, k]), "prompts": int(self.sums["prompts"][i, layer, head, h, k])}
                | {name: float(means[name][i, layer, head, h, k]) for name in VALUES} | {"planes": planes[i, layer, head, h, k] if performs[layer, head, h, k] else None}
                for i, added in enumerate(self.added) for layer, head, h, k in np.argwhere(kept)]  # fmt: skip
        return pd.DataFrame(rows).astype(dict.fromkeys(VALUES, np.float32))


@torch.inference_mode()
def performed(model: Transformer, task: Task, core: Batch) -> tuple[str, Bool[np.ndarray, "layer head hops pair"]]:
    """The reading that more four-hop prompts follow, and which heads perform its steps in at least half of the prompts.

    When none of the query's steps reaches half, the one that is shown most often stands for them.
    """
    order = np.argsort(core.hops, kind="stable")
    core = Batch(*(column[order] for column in core))
    tokens, chain = torch.from_numpy(core.tokens), circuits.chains(task, core.tokens)
    hits = circuits.chain_looks(task, tokens, chain, circuits.looks(model, model.layer_inputs(tokens)))
    share = {reading: float(circuits.follows(hits[:, core.hops == MAX_HOPS], reading).float().mean()) for reading in circuits.READINGS}
    reading = max(share, key=share.get)
    steps, looks = circuits.performing(hits, core.hops, reading), circuits.READINGS[reading][0]
    out = np.zeros((model.config.layers, model.config.heads, MAX_HOPS, len(PAIRS)), dtype=bool)
    own = [(h, k) for h in range(MAX_HOPS) for k in range(h + 1) if looks[k][0] == 0 and steps.layer[h, k] >= 0]
    best = max(own, key=lambda place: steps.share[place])
    for h in range(MAX_HOPS):
        for k in range(h + 1):
            if steps.layer[h, k] >= 0 and (steps.share[h, k] >= PERFORMED or ((h, k) == best and steps.share[best] < PERFORMED)):
                out[steps.layer[h, k], steps.head[h, k], h, PAIRS.index(looks[k])] = True
    return reading, out


# ---- from gaps to lengths -------------------------------------------------------------------------------------------------------------


def look_means(gaps: pd.DataFrame, every_look: bool = False) -> pd.DataFrame:
    """One run: means of `VALUES` over the prompts in which a layer performs a hop (row: number of added tokens, layer).

    The ledger takes the looks of the last token; `every_look` takes those of all tokens on the chain.
    """
    rows = gaps[gaps.performs & (every_look | (gaps.looker == 0))]
    values, keys = [name for name in VALUES if name in rows], [rows.added, rows.layer]
    return rows[values].mul(rows.prompts, axis=0).groupby(keys).sum().div(rows.prompts.groupby(keys).sum(), axis=0)


def gap_curve(gaps: pd.DataFrame, value: str = "gap", every_look: bool = False) -> pd.Series:
    """One run: the least of `look_means` over layers, by number of added tokens."""
    return look_means(gaps, every_look)[value].groupby("added").min()


def weakest(gaps: pd.DataFrame) -> pd.DataFrame:
    """One run: `look_means` of the layer with the least gap, with its number (`layer`), by number of added tokens."""
    means = look_means(gaps)
    return means.loc[means.gap.groupby("added").idxmin()].reset_index("layer")


def gap_length(curve: pd.Series) -> float:
    """Input length at which a curve by number of added tokens first falls below 0, linear on the grid; the longest when it never does."""
    crossed = crossing_step(curve.index, -curve.to_numpy(), 0.0)
    return LENGTH + float(min(crossed, curve.index.max()))
