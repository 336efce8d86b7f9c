"""What is measured on every head while a model trains: scores, entropy, movable mass, use of the planes; no attention is stored.

One row a step, layer and head: means over prompts, standard deviations and quantiles. The prompts are the first of the run's own test
split, 75 of each hop count (300), and 300 of each (1,200) at ten steps. P1, appendix D and E; the paper's number of prompts is not known.
"""

import numpy as np
import torch

from rope_heads.circuits import plane_products, plane_use
from rope_heads.model import Transformer
from rope_heads.papers import weighted_plane
from rope_heads.scores import centred_scores, entropy, movable_mass, positional_symbolic, swap_cosines, swap_logits, swap_weights
from rope_heads.tasks import QUERY, WINDOW, Task
from rope_heads.training import first_of_each

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PAPER_TEMPERATURE = 1e-4
TEMPERATURES = (1e-2, 1.0)  # how much the scores depend on it
PROMPTS, MANY_PROMPTS, OTHER_PROMPTS = 75, 300, 25  # of each hop count: usual, at ten steps, for other query positions


def ten_steps(steps: int, every: int = 50) -> list[int]:
    """Ten evaluations at which 1,200 prompts are measured: denser early, the first and the last among them."""
    shares = (0, 0.075, 0.15, 0.225, 0.3, 0.375, 0.45, 0.6, 0.8)
    return sorted({every * round(steps * share / every) for share in shares} | {steps})


class Trajectory:
    """Callable for `Run(measure=...)`: measures every head on prompts fixed once."""

    def __init__(self, task: Task, seed: int, steps: int):
        test = task.split("test", seed)
        few, many, other = (first_of_each(test, count) for count in (PROMPTS, MANY_PROMPTS, OTHER_PROMPTS))
        self.few, self.many, self.other = (torch.from_numpy(batch.tokens) for batch in (few, many, other))
        self.many_at = set(ten_steps(steps))
        chains = [set(task.chain(row)) for row in other.tokens]
        self.on_chain = torch.tensor([[p in chain for p in range(WINDOW, QUERY)] for chain in chains])  # [prompt, position 8 to 15]

    def __call__(self, model: Transformer, step: int) -> list[dict]:
        device = next(model.parameters()).device
        tokens = self.many if step in self.many_at else self.few
        inputs, others = model.layer_inputs(tokens.to(device)), model.layer_inputs(self.other.to(device))
        rows = []
        for layer in range(model.config.layers):
            measured = measure_layer(model, layer, inputs[layer])
            measured |= other_queries(model, layer, others[layer], self.on_chain.to(device))
            for head in range(model.config.heads):
                rows.append({"step": step, "layer": layer, "head": head, "prompts": len(tokens)} | {n: v[head] for n, v in measured.items()})
        return rows


def measure_layer(model: Transformer, layer: int, hidden: torch.Tensor) -> dict[str, list]:
    """Statistics over prompts of one layer for its last token, each a list over heads. hidden: [prompt, position, width]."""
    table = swap_logits(model, layer, hidden).double()  # [prompt, head, content, slot]
    out: dict[str, list] = {}
    cosines = swap_cosines(table)
    at = {temperature: [(swap_weights(table, temperature) * c).sum(-1) for c in cosines] for temperature in (PAPER_TEMPERATURE, *TEMPERATURES)}
    positional, symbolic = at[PAPER_TEMPERATURE]
    values = {"positional": positional, "symbolic": symbolic, "entropy": entropy(table), "movable": movable_mass(table)}
    swappable = table.diagonal(dim1=-2, dim2=-1)[..., :-1].log_softmax(-1)  # attention over the keys a swap can move, renormalised
    values["swappable_entropy"] = -(swappable.exp() * swappable).sum(-1) / np.log(swappable.shape[-1])  # share of its maximum, [0, 1]
    for name, value in values.items():  # [prompt, head]
        out[name], out[f"{name}_sd"] = value.mean(0).tolist(), value.std(0).tolist()
        for share, quantile in zip(QUANTILES, value.quantile(torch.tensor(QUANTILES, dtype=value.dtype, device=value.device), dim=0), strict=True):
            out[f"{name}_q{round(100 * share):02d}"] = quantile.tolist()
    for temperature in TEMPERATURES:
        for name, value in zip(("positional", "symbolic"), at[temperature], strict=True):
            out[f"{name}_t{temperature:g}"] = value.mean(0).tolist()
    for name, value in zip(("positional_centred", "symbolic_centred"), centred_scores(table), strict=True):
        out[name] = value.mean(0).tolist()
    if model.blocks[layer].attention.positions == "rope":
        use = plane_use(plane_products(model, layer, hidden))
        out["weighted_id"], out["plane_use"] = weighted_plane(use.cpu().numpy()).tolist(), list(use.half().cpu().numpy())
    return out


def other_queries(model: Transformer, layer: int, hidden: torch.Tensor, on_chain: torch.Tensor) -> dict[str, list]:
    """Mean scores where the query is a pre-target token (positions 8 to 15): all of them, and those on the prompt's chain only."""
    tables = (swap_logits(model, layer, hidden, query) for query in range(WINDOW, QUERY))
    scores = [torch.stack(pair) for pair in (positional_symbolic(table) for table in tables)]
    scores = torch.stack(scores, dim=2)  # [kind, prompt, position, head]
    every, chain = scores.flatten(1, 2).mean(1), scores[:, on_chain].mean(1)  # [kind, head]
    return {"positional_pre": every[0].tolist(), "symbolic_pre": every[1].tolist(),
            "positional_chain": chain[0].tolist(), "symbolic_chain": chain[1].tolist()}  # fmt: skip
