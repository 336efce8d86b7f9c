"""What is measured once, on the final weights of a run: the whole test split, planes switched off, where tokens look, what ablation costs.

`rope-heads measure --run DIR` reads the run's weights and writes small tables beside them (`TABLES`); at steps whose weights were kept
it also measures where tokens look. The prompts come from the run's own test split: of every hop count the first 300 decide whether looks
follow the chain, the next 300 give the head of each step and the mean outputs, 300 further ones the accuracy after each intervention (100 instead of 300 for kept weights).
"""

import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from rope_heads import artefacts, bridge, circuits, interventions, scores
from rope_heads.circuits import READINGS
from rope_heads.model import Transformer
from rope_heads.audit_tasks import ALL_TASKS
from rope_heads.tasks import LENGTH, MAX_HOPS, QUERY, WINDOW, Batch, Task
from rope_heads.training import accuracy_by_hops, first_of_each
from rope_heads.trajectory import PAPER_TEMPERATURE

TABLES = {  # file in the run's folder -> what a row is
    "tests": "accuracy by hop count on the test split, with all planes (whole split) or some switched off (500 of each hop count)",
    "looks": "share of prompts in which chain token p_looker attends most to p_target (itself when equal), by hop count, layer and head",
    "lens": "how often the logit lens reads the answer from the query's residual stream (held) and from what a head adds to it (copied)",
    "planes": "queries and keys in each head's most used plane: how long, how aligned",
    "kinds": "scores from swaps within the target window, within the pre-target tokens, and across",
    "ablation": "accuracy after one head's output to one token is replaced, or its whole pattern",
    "forbidden": "accuracy when chain tokens may not look at later chain tokens, in any layer",
    "steps": "for both readings, hop count and chain step: the head that performs it, how often, and the accuracy without it",
    "spectra": "spectral measures of W_Q W_K^T of each head, with its own level of chance (P2)",
    "mechanism": "the ledger's follows, lost, kept and ideal for both readings",
}
DRAWS, KEPT_DRAWS = 100, 20  # random heads for the level of chance of a spectrum: final weights, weights kept on the way
PROMPTS, KEPT_PROMPTS, PLANE_TESTS = 300, 100, 500  # of each hop count: final weights, weights kept on the way, planes switched off
CONTROL_STREAM = 11  # random numbers of the looks that are forbidden as a control
SLOW = range(33, 65)  # plane ids of the claim own-planes-causal, beside 1 to 8
TOKENS = ("p0", "p1", "p2", "p3", "off chain", "off chain, pre-target")  # where a head's output is replaced
FIRST_ROWS = (QUERY, WINDOW, WINDOW, WINDOW, 0, WINDOW)  # the lowest position that each can have: earlier tokens see nothing of the change


def prompt_sets(task: Task, seed: int, count: int | None = None) -> tuple[Batch, Batch, Batch]:
    """Three disjoint sets of `count` (default `PROMPTS`) prompts of each hop count, sorted by hop count: for follows, for reference, for interventions."""
    test = first_of_each(task.split("test", seed), 3 * (count or PROMPTS))
    rows = np.stack([np.flatnonzero(test.hops == h) for h in range(1, MAX_HOPS + 1)])  # [hops, prompt]
    return tuple(Batch(*(column[part.ravel()] for column in test)) for part in np.split(rows, 3, axis=1))


def split_accuracy(model: Transformer, test: Batch) -> list[dict]:
    """Accuracy on the whole test split, and with bands of planes switched off on the sequences that are read along training."""
    rows = [("none", model, test)]
    if model.config.positions == "rope":
        planes = model.config.rotary_dim // 2
        bands = [range(first, min(first + 8, planes + 1)) for first in range(1, planes + 1, 8)]
        few = first_of_each(test, PLANE_TESTS)
        off = dict.fromkeys((band[0], band[-1]) for band in (*bands, SLOW, range(9, 65), range(1, 33)) if band[-1] <= planes)
        rows += [(f"{a}-{b}", interventions.without_planes(model, range(a, b + 1)), few) for a, b in off]
    return [{"planes_off": name, "hops": h, "tests": int((batch.hops == h).sum()), "accuracy": accuracy}
            for name, changed, batch in rows for h, accuracy in accuracy_by_hops(changed, batch).items()]  # fmt: skip


class Prompts:
    """A batch with what the measures need of it: tokens, chains, residual streams; with `look`, where tokens look."""

    def __init__(self, model: Transformer, task: Task, batch: Batch, look: bool = True):
        self.tokens, self.hops, self.answers = torch.from_numpy(batch.tokens), batch.hops, torch.from_numpy(batch.answers)
        self.chain = circuits.chains(task, batch.tokens)
        self.streams = model.layer_inputs(self.tokens)
        if look:
            self.looked = circuits.looks(model, self.streams)
            self.hits = circuits.chain_looks(task, self.tokens, self.chain, self.looked)


def where_tokens_look(prompts: Prompts) -> list[dict]:
    rows = []
    for h in range(1, MAX_HOPS + 1):
        mine = torch.from_numpy(prompts.hops == h)
        hits, chain = prompts.hits[:, mine].float().mean(1), prompts.chain[mine]  # [layer, head, looker, target]
        for looker in range(h):
            at = prompts.looked[:, mine, :][:, torch.arange(len(chain)), :, chain[:, looker]]  # [prompt, layer, head]
            itself = (at == chain[:, looker, None, None]).float().mean(0)  # [layer, head]
            shares = {looker: itself} | {target: hits[:, :, looker, target - 1] for target in range(looker + 1, h + 1)}
            rows += [{"hops": h, "layer": layer, "head": head, "looker": looker, "target": target, "share": float(share[layer, head])}
                     for target, share in shares.items() for layer in range(len(share)) for head in range(share.shape[1])]  # fmt: skip
    return rows


def what_is_held(model: Transformer, prompts: Prompts) -> list[dict]:
    view = circuits.last_token_view(model, prompts.tokens)
    there = prompts.tokens[torch.arange(len(prompts.tokens))[:, None], view.looked_at]  # [layer, prompt, head]
    rows = []
    for h in range(1, MAX_HOPS + 1):
        mine = torch.from_numpy(prompts.hops == h)
        answer = prompts.answers[mine]
        shares = {"copied_answer": view.copied[:, mine] == answer[:, None], "copied_looked_at": (view.copied == there)[:, mine]}
        for layer, head in np.ndindex(view.weight.shape[0], view.weight.shape[2]):
            rows.append({"hops": h, "layer": layer, "head": head, "held_answer": float((view.held[layer, mine] == answer).float().mean()),
                         "weight": float(view.weight[layer, mine, head].mean())}
                        | {name: float(value[layer, :, head].float().mean()) for name, value in shares.items()})  # fmt: skip
    return rows


def dominant_planes(model: Transformer, prompts: Prompts) -> list[dict]:
    """Last token's queries and all keys in the plane that a head uses most: mean length, and alignment in [0, 1] (`circuits.alignment`).

    kinds: cosine between the mean key of target-window tokens and that of pre-target tokens; -1 means that the head also tells the two kinds
    apart, by opposite keys. pointing (Number): alignment of the queries once each is turned forward by its integer x angle, 1 in the
    Index construction of P1, theorem 3.1.
    """
    if model.config.positions != "rope":
        return []
    rows = []
    for layer, hidden in enumerate(prompts.streams):
        use = circuits.plane_use(circuits.plane_products(model, layer, hidden))  # [head, pair]
        for head, plane in enumerate((use.argmax(-1) + 1).tolist()):
            q, k = (vectors[..., head] for vectors in circuits.plane_vectors(model, layer, hidden, plane))  # [prompt, position]
            q, window, pre = q[:, -1], k[:, :WINDOW], k[:, WINDOW:QUERY]
            lag = torch.polar(torch.ones(len(q)), float(model.blocks[layer].attention.angles[plane - 1]) * prompts.tokens[:, -1].float())
            rows.append({"layer": layer, "head": head, "plane": plane, "use": float(use[head, plane - 1]),
                         "query_length": float(q.abs().mean()), "window_length": float(window.abs().mean()), "pre_length": float(pre.abs().mean()),
                         "window_alignment": circuits.alignment(window), "pre_alignment": circuits.alignment(pre),
                         "kinds": float((window.mean() / pre.mean()).angle().cos()),
                         "query_alignment": circuits.alignment(q), "pointing": circuits.alignment(q * lag)})  # fmt: skip
    return rows


def scores_by_kind(model: Transformer, prompts: Prompts) -> list[dict]:
    """Positional and symbolic score from some swaps only: of two target-window tokens, two pre-target tokens, or one of each; by hop count.

    A head that looks v places back, but only at tokens of one kind, is positional within a kind and not across.
    """
    first, second = torch.triu_indices(QUERY, QUERY, 1)  # slots of each swap, as scores.swap_cosines has them
    kinds = {"window": second < WINDOW, "pre-target": first >= WINDOW, "across": (first < WINDOW) & (second >= WINDOW)}
    rows = []
    for layer, hidden in enumerate(prompts.streams):
        table = scores.swap_logits(model, layer, hidden).double()  # [prompt, head, content, slot]
        attention, cosines = table.diagonal(dim1=-2, dim2=-1).softmax(-1), torch.stack(scores.swap_cosines(table))
        moved = (attention[..., first] - attention[..., second]).abs() / PAPER_TEMPERATURE
        for kind, chosen in kinds.items():
            both = (moved[..., chosen].softmax(-1) * cosines[..., chosen]).sum(-1)  # [score, prompt, head]
            rows += [{"hops": h, "layer": layer, "head": head, "swaps": kind, "positional": positional, "symbolic": symbolic}
                     for h in range(1, MAX_HOPS + 1)
                     for head, (positional, symbolic) in enumerate(both[:, torch.from_numpy(prompts.hops == h)].mean(1).T.tolist())]  # fmt: skip
    return rows


def mean_outputs(model: Transformer, prompts: Prompts) -> torch.Tensor:
    """Mean output of every head at every position, over all prompts, [layer, head, position, width]."""
    return torch.stack([circuits.head_outputs(model, layer, x).mean(0).transpose(0, 1) for layer, x in enumerate(prompts.streams)])


def tokens_to_change(chain: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Positions p0 to p3, a random one off the chain, and one off the chain among the pre-target tokens, [prompt, 6]; -1 where there is none."""
    free = np.ones((len(chain), QUERY + 1), dtype=bool)
    for row, visited in zip(free, chain.numpy(), strict=True):
        row[visited[visited >= 0]] = False
    priority = rng.random((2, *free.shape)) * free
    priority[1, :, :WINDOW] = 0
    answer = (chain >= 0).sum(1, keepdim=True) - 1
    lookers = chain[:, :MAX_HOPS].where(torch.arange(MAX_HOPS) < answer, torch.tensor(-1))
    return torch.cat((lookers, torch.from_numpy(priority.argmax(-1).T)), dim=1)


def interventions_on_heads(model: Transformer, task: Task, prompts: Prompts, means: torch.Tensor, rng: np.random.Generator) -> list[dict]:
    """Accuracy after every single intervention, by hop count, layer, head and token: `mean` (ablation), `donor` (patching with the output that
    the next prompt of the same hop count has at its own token; accuracy_donor = share that then give the donor's answer), `ideal` (all tokens
    look where Index or Retrieval looks)."""
    rows = []
    for h in range(1, MAX_HOPS + 1):
        mine = np.flatnonzero(prompts.hops == h)
        streams, right, each = prompts.streams[:, mine], prompts.answers[mine], torch.arange(len(mine))
        targets = circuits.ideal_targets(task, prompts.tokens[mine].numpy())
        places = tokens_to_change(prompts.chain[mine], rng)
        for layer, block in enumerate(model.blocks):
            outputs, after = circuits.head_outputs(model, layer, streams[layer]), block(streams[layer])
            for head in range(model.config.heads):
                key = {"hops": h, "layer": layer, "head": head}
                for token, at, first in zip(TOKENS, places.T, FIRST_ROWS, strict=True):
                    if (at < 0).any():
                        continue
                    kinds = {"mean": means[layer, head, at]}
                    if token in TOKENS[:MAX_HOPS]:
                        kinds["donor"] = outputs[each, at, head].roll(-1, 0)
                    for kind, vectors in kinds.items():
                        changed = after[:, first:].clone()
                        changed[each, at - first] += vectors - outputs[each, at, head]
                        answered = interventions.resume(model, streams, layer + 1, changed).argmax(-1)
                        rows.append(key | {"token": token, "kind": kind, "accuracy": _share(answered == right),
                                           "accuracy_donor": _share(answered == right.roll(-1)) if kind == "donor" else np.nan})  # fmt: skip
                edit = interventions.whole_pattern(head, targets)
                answered = interventions.run(model, streams[layer], {layer: [edit]}, layer).argmax(-1)
                rows.append(key | {"token": "all", "kind": "ideal", "accuracy": _share(answered == right), "accuracy_donor": np.nan})
    return rows


def other_looks(chain: Int[Tensor, "prompt 5"], pairs: list[tuple[int, int]], rng: np.random.Generator) -> list[tuple[Tensor, Tensor]]:
    """The control of forbidden looks p_looker to p_target: (at, away) with the same lookers and random tokens off the chain as targets.

    Such a token stands before the looker, in the target's part of the input (target window or after it) where there is one left, and is
    another for each look of one looker as long as there are enough.
    """
    places = torch.arange(LENGTH)
    on_chain = (places[None, :, None] == chain[:, None]).any(-1)  # [prompt, position]; -1 stands for no token
    taken, out = {}, []
    for looker, target in pairs:
        cost = torch.from_numpy(rng.random(on_chain.shape))
        cost += 2 * ((places < WINDOW) != (chain[:, target, None] < WINDOW)) + 4 * taken.get(looker, torch.zeros_like(on_chain))
        away = cost.masked_fill(on_chain | (places >= chain[:, looker, None]), torch.inf).argmin(-1)
        taken[looker] = taken.get(looker, torch.zeros_like(on_chain)) | (places == away[:, None])
        out.append((chain[:, looker], away))
    return out


def looks_forbidden(model: Transformer, prompts: Prompts, seed: int = 0) -> list[dict]:
    """Accuracy when chain token p_looker may attend to p_target in no layer: one look at a time; all that skip a chain token (name `jumps`,
    which the backward reading can spare); all that are not the query's (`not the query's`, which the forward reading can spare). And for each
    its control (`control: ...`): as many looks by the same tokens, at tokens off the chain."""
    rows, rng = [], np.random.default_rng([seed, CONTROL_STREAM])
    for h in range(1, MAX_HOPS + 1):
        mine = torch.from_numpy(prompts.hops == h)
        chain, right, hidden = prompts.chain[mine], prompts.answers[mine], prompts.streams[0, mine]
        pairs = [(i, j) for i in range(h) for j in range(i + 1, h + 1)]
        sets = {f"p{i} to p{j}": [(i, j)] for i, j in pairs}
        sets |= {"none": [], "jumps": [(i, j) for i, j in pairs if j > i + 1], "not the query's": [(i, j) for i, j in pairs if i > 0]}
        forbidden = {name: [(chain[:, i], chain[:, j]) for i, j in looks] for name, looks in sets.items()}
        forbidden |= {f"control: {name}": other_looks(chain, looks, rng) for name, looks in sets.items() if looks}
        for name, looks in forbidden.items():
            answered = interventions.run(model, hidden, forbidden=looks).argmax(-1)
            rows.append({"hops": h, "forbidden": name, "looks": len(looks), "accuracy": _share(answered == right)})
    return rows


def accuracy_grid(ablation: pd.DataFrame) -> np.ndarray:
    """Accuracy after mean-ablation as `interventions.lost_and_kept` wants it, [hops, layer, head, token]."""
    rows = ablation[(ablation.kind == "mean") & ablation.token.isin(TOKENS[: MAX_HOPS + 1])]
    grid = np.full((MAX_HOPS, rows.layer.max() + 1, rows["head"].max() + 1, MAX_HOPS + 1), np.nan)
    grid[rows.hops - 1, rows.layer, rows["head"], rows.token.map(TOKENS.index)] = rows.accuracy
    return grid


def step_rows(reading: str, steps: circuits.Steps, grid: np.ndarray | None = None) -> list[dict]:
    """Who performs which chain step; with the accuracies of `accuracy_grid` also what its ablation leaves, at its looker and off the chain."""
    left = (np.full(steps.share.shape, np.nan),) * 2 if grid is None else interventions.ablated(grid, steps, reading)
    return [{"reading": reading, "hops": h + 1, "chain_step": k + 1, "layer": int(layer), "head": int(steps.head[h, k]), "share": float(steps.share[h, k]),
             "accuracy": float(left[0][h, k]), "accuracy_off_chain": float(left[1][h, k])}
            for (h, k), layer in np.ndenumerate(steps.layer) if layer >= 0]  # fmt: skip


def measure_looks(model: Transformer, first: Prompts, reference: Prompts) -> dict[str, list[dict]]:
    """What is cheap enough for every kept step: where tokens look, what they hold, and `follows`. first: four-hop prompts only."""
    steps = {reading: circuits.performing(reference.hits, reference.hops, reading) for reading in READINGS}
    return {"looks": where_tokens_look(reference), "lens": what_is_held(model, reference), "planes": dominant_planes(model, reference),
            "kinds": scores_by_kind(model, reference),
            "steps": [row for reading, found in steps.items() for row in step_rows(reading, found)],
            "mechanism": [{"reading": reading, "follows": _share(circuits.follows(first.hits, reading))} for reading in READINGS]}  # fmt: skip


def measure_interventions(model: Transformer, task: Task, seed: int, reference: Prompts, further: Prompts) -> dict[str, list[dict]]:
    """What the final weights alone are put through: interventions on heads, forbidden looks, and the ledger's lost, kept and ideal."""
    means, rng = mean_outputs(model, reference), np.random.default_rng([seed, len(TOKENS)])
    out = {"ablation": interventions_on_heads(model, task, further, means, rng), "forbidden": looks_forbidden(model, further, seed), "steps": [], "mechanism": []}
    grid = accuracy_grid(pd.DataFrame(out["ablation"]))
    for reading in READINGS:
        steps = circuits.performing(reference.hits, reference.hops, reading)
        edits = interventions.ideal_edits(further.chain, torch.from_numpy(further.hops), steps, reading)
        lost, kept = interventions.lost_and_kept(grid, steps, reading)
        ideal = _share(interventions.run(model, further.streams[0], edits).argmax(-1) == further.answers)
        out["mechanism"].append({"reading": reading, "lost": lost, "kept": kept, "ideal": ideal})
        out["steps"] += step_rows(reading, steps, grid)
    return out


def measure_run(folder: Path, report=print) -> dict[str, int]:
    """Measures a finished run and writes `TABLES` as parquet into its folder; rows of each. ValueError when the run is not finished."""
    folder = Path(folder)
    if not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds no finished run (no model.safetensors): train it first, or go on with the same command")
    started = time.perf_counter()
    identity, made = artefacts.read_json(folder / "run.json")
    task, seed, end = ALL_TASKS[identity["task"]], identity["seed"], made["step"]
    kept = {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.safetensors"))}
    tables: dict[str, list[dict]] = {name: [] for name in TABLES}
    with torch.inference_mode():
        for step, path in ({**kept, end: folder / "model.safetensors"}).items():
            model, sets = Transformer.load(path), prompt_sets(task, seed, PROMPTS if step == end else KEPT_PROMPTS)
            first = Prompts(model, task, Batch(*(column[sets[0].hops == MAX_HOPS] for column in sets[0])))
            reference = Prompts(model, task, sets[1])
            measured = measure_looks(model, first, reference)
            if model.config.positions == "rope":
                measured["spectra"] = bridge.spectra(model, DRAWS if step == end else KEPT_DRAWS)
            if step == end:
                changed = measure_interventions(model, task, seed, reference, Prompts(model, task, sets[2], look=False))
                changed["mechanism"] = [a | b for a, b in zip(measured["mechanism"], changed["mechanism"], strict=True)]
                measured |= changed
                measured["tests"] = split_accuracy(model, task.split("test", seed))
            for name, rows in measured.items():
                tables[name] += [{"step": step, **row} for row in rows]
            report(f"{folder.name}: step {step} measured, {time.perf_counter() - started:.0f} s")
    origin = artefacts.provenance(f"rope-heads measure --run RUNS/{folder.parent.name}/{folder.name}", round(time.perf_counter() - started, 1),
                                  seed, weights=made["command"])  # fmt: skip
    for name, rows in tables.items():
        if rows:
            artefacts.write_parquet(folder / f"{name}.parquet", pd.DataFrame(rows), origin)
    return {name: len(rows) for name, rows in tables.items()}


def _share(right: torch.Tensor) -> float:
    return float(right.float().mean())
