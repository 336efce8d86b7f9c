"""The two canonical one-layer tasks of P0, put to attention-only models in which every rotary plane turns by one and the same angle.

Index: a window of 16 symbols and a query that names a position; the answer is the symbol there. Retrieval: a window of 16 symbols, each with a
value, and a query that names a symbol; the answer is its value. P0 says: Index needs a fast angle, Retrieval a slow one. Its window,
vocabulary, width and training are not known, so these are ours.

A model is embedding, one attention head without bias or residual, unembedding. With one angle theta the logit of a key t places before the
query is A cos(theta t) + B sin(theta t), where A = q.k and B = q.Jk (J turns every plane back by a right angle) depend on the two tokens only.
All models of a grid train at once: their weights are stacked along a first axis [model].
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

WINDOW = 16  # tokens before the query
SYMBOLS = VALUES = 16  # as many answers in both tasks
ANGLES = (1.5, 1.1, 0.74, 0.5, 0.2, 0.1, 0.05, 0.02, 0.005, 0.001)  # radians a position
FAST, SLOW = 0.5, 0.02  # bands of the ledger: at least, at most
TASKS = ("index", "retrieval")


def vocabulary_size(task: str) -> int:
    """Window tokens first, then the 16 query tokens."""
    return {"index": SYMBOLS, "retrieval": SYMBOLS * VALUES}[task] + WINDOW


def sample(task: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [prompt, 17], answers [prompt] in 0 to 15, answer position [prompt] in 0 to 15). The query is the last token.

    Index: symbols with replacement. Retrieval: every symbol once, in random order, with a random value; symbol s with value v is token 16 s + v.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    place = rng.integers(0, WINDOW, count)
    if task == "index":
        window = rng.integers(0, SYMBOLS, (count, WINDOW))
        named, answers = place, window[np.arange(count), place]
    else:
        symbols, values = rng.permuted(np.tile(np.arange(SYMBOLS), (count, 1)), axis=1), rng.integers(0, VALUES, (count, WINDOW))
        window = symbols * VALUES + values
        named, answers = symbols[np.arange(count), place], values[np.arange(count), place]
    return np.column_stack([window, vocabulary_size(task) - WINDOW + named]), answers, place


class OneAngleModels(torch.nn.Module):
    """Stacked models, one for each entry of `angles`; `seeds` fix the initial weights. Weights are [model, out, in], embeddings [model, token, width]."""

    def __init__(self, task: str, angles: Sequence[float], seeds: Sequence[int], width: int = 32):
        super().__init__()
        tokens = vocabulary_size(task)
        shapes = {"embedding": (tokens, width), "w_q": (width, width), "w_k": (width, width), "w_v": (width, width), "unembedding": (VALUES, width)}
        drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
        for name, shape in shapes.items():
            std = 0.3 if name == "embedding" else 1 / math.sqrt(width)
            weights = torch.stack([std * torch.randn(shape, generator=generator) for generator in drawn])
            self.register_parameter(name, torch.nn.Parameter(weights))
        phase = torch.tensor(angles, dtype=torch.float64)[:, None] * torch.arange(WINDOW, -1, -1)  # [model, key], distance 16 to 0
        self.cos, self.sin = phase.cos().float(), phase.sin().float()
        self.queries = range(tokens - WINDOW, tokens)

    def logits(self, tokens: Int[Tensor, "model prompt 17"]) -> Float[Tensor, "model prompt key"]:
        """Attention logits of the query, from two tables [model, query token, token]."""
        q = self.embedding[:, self.queries[0] :] @ self.w_q.mT
        k = self.embedding @ self.w_k.mT
        turned = torch.stack((k[..., 1::2], -k[..., 0::2]), dim=-1).flatten(-2)  # J k
        size = k.shape[1]
        at = (tokens[..., -1:] - self.queries[0]) * size + tokens  # [model, prompt, key] into the flat tables
        dot, cross = ((q @ keys.mT).flatten(1).gather(1, at.flatten(1)).view(at.shape) for keys in (k, turned))
        return (dot * self.cos[:, None] + cross * self.sin[:, None]) / math.sqrt(q.shape[-1])

    def forward(self, tokens: Int[Tensor, "model prompt 17"]) -> Float[Tensor, "model prompt answer"]:
        said = self.embedding @ self.w_v.mT @ self.unembedding.mT  # [model, token, answer]: what each token says when attended to
        pattern = self.logits(tokens).softmax(-1)
        on_tokens = pattern.new_zeros(*pattern.shape[:2], said.shape[1]).scatter_add(-1, tokens, pattern)  # [model, prompt, token]
        return on_tokens @ said


def train(task: str, angles: Sequence[float] = ANGLES, seeds: Sequence[int] = range(5), steps: int = 1_500, batch: int = 128,
          lr: float = 1e-2, width: int = 32, tests: int = 1_600) -> pd.DataFrame:  # fmt: skip
    """Trains a model for every angle and seed; rows (task, angle, seed, position, tests, accuracy), position = where the answer stood.

    A seed fixes initial weights and data; the models of one seed see the same data whatever their angle. Rate: linear to zero. The test
    accuracy of a model is the mean over positions weighted with `tests` (`accuracies`).
    """
    grid = [(angle, seed) for seed in seeds for angle in angles]
    model = OneAngleModels(task, *zip(*grid, strict=True), width=width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    streams = [np.random.default_rng([seed, TASKS.index(task)]) for seed in seeds]
    for step in range(steps):
        tokens, answers, _ = _for_all(task, batch, streams, len(angles))
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten()) * len(grid)  # the mean over prompts for each model
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, answers, places = _for_all(task, tests, streams, len(angles))
    with torch.inference_mode():
        right = (model(tokens).argmax(-1) == answers).numpy()
    return pd.DataFrame([{"task": task, "angle": angle, "seed": seed, "position": position, "tests": int(here.sum()), "accuracy": float(hits[here].mean())}
                         for (angle, seed), hits, place in zip(grid, right, places.numpy(), strict=True)
                         for position in range(WINDOW) for here in [place == position]])  # fmt: skip


def _for_all(task: str, count: int, streams: list[np.random.Generator], repeats: int) -> list[Tensor]:
    """One sample a seed, repeated for its angles: tokens [model, prompt, 17], answers and answer positions [model, prompt]."""
    parts = zip(*(sample(task, count, rng) for rng in streams), strict=True)
    return [torch.from_numpy(np.repeat(np.stack(part), repeats, axis=0)) for part in parts]


def accuracies(frame: pd.DataFrame) -> pd.Series:
    """Test accuracy by task, seed and angle."""
    weighted = frame.assign(right=frame.accuracy * frame.tests).groupby(["task", "seed", "angle"])[["right", "tests"]].sum()
    return weighted.right / weighted.tests


def by_band(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Values of claim P0-one-angle-tasks: for each task and band the best accuracy over its angles, by seed (label: the seed)."""
    accuracy = accuracies(frame).reset_index(name="accuracy")
    bands = {"fast": accuracy[accuracy.angle >= FAST], "slow": accuracy[accuracy.angle <= SLOW]}
    return {f"{task}_{band}": {str(seed): float(best) for seed, best in rows[rows.task == task].groupby("seed").accuracy.max().items()}
            for task in TASKS for band, rows in bands.items()}  # fmt: skip
