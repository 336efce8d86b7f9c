"""The toy models of P2: a task that only induction solves, two attention-only layers, and constraints on M = W_Q W_K^T while they learn.

Task (P2, its training interventions): every sequence of 256 tokens draws a map f from the 64 tokens to themselves. The next token is f(current) with
probability .9, else any token. f is new in each sequence, so whoever wants to predict must find where the current token stood before and
what came next: a head that looks one back, and one that uses it.

An arm is a position scheme with a constraint. `ARMS` holds the paper's five and those it lacks. Here are data, model, constraints and what is
measured at an evaluation; `induction_runs` trains.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rope_heads.model import Attention, Config, Transformer
from rope_heads.rope import split_pairs
from rope_heads.spectra import fold_norm, qk_spectrum, random_frame, rope_parts

TOKENS, LENGTH, RULE = 64, 256, 0.9  # vocabulary, tokens a sequence, share of steps that follow the map
LAYERS, HEADS, WIDTH, D_HEAD = 2, 4, 128, 32
STRENGTH = 10.0  # weight of a penalty in the loss
FORMED = (math.log(TOKENS) + 0.15) / 2  # loss on predictable tokens, in nats, below which induction has formed (2.154)
QUERIES_FROM = 64  # attention is read off from this position on
PENALTIES = ("none", "symmetric", "phase", "sham")


@dataclass(frozen=True)
class Arm:
    """A position scheme and a constraint. `seeds`: how many runs the book makes; `published`: P2 has this arm."""

    positions: str
    penalty: str = "none"
    tied: bool = False  # W_Q = W_K exactly; biases stay free
    seeds: int = 5
    published: bool = False

    def __post_init__(self):
        if self.penalty not in PENALTIES:
            raise ValueError(f"penalty must be one of {PENALTIES}, got {self.penalty!r}")
        if self.penalty == "phase" and self.positions != "rope":
            raise ValueError(f"only a rotary head has a phase to suppress, got positions {self.positions!r}")


ARMS = {
    "learned free": Arm("learned", seeds=8, published=True),
    "learned symmetric": Arm("learned", "symmetric", seeds=8, published=True),
    "RoPE free": Arm("rope", seeds=8, published=True),
    "RoPE symmetric": Arm("rope", "symmetric", seeds=8, published=True),
    "RoPE phase suppressed": Arm("rope", "phase", seeds=8, published=True),
    "learned sham": Arm("learned", "sham"),
    "RoPE tied": Arm("rope", tied=True),
    "RoPE sham": Arm("rope", "sham"),
    "learned tied": Arm("learned", tied=True),
    "ALiBi free": Arm("alibi"),
    "ALiBi symmetric": Arm("alibi", "symmetric"),
    "no positions free": Arm("none"),
    "no positions symmetric": Arm("none", "symmetric"),
}


# ---- the task ----------------------------------------------------------------------------------------------------------------------


def sample(
    count: int, rng: np.random.Generator, length: int = LENGTH, tokens: int = TOKENS
) -> tuple[Int[Tensor, "prompt position"], Bool[Tensor, "prompt step"]]:
    """Sequences, and which of their steps follow the map from a token seen before: those can be predicted.

    `step` t leads from position t to t + 1; there are length - 1 of them. ValueError below two tokens.
    """
    if count < 1 or length < 2:
        raise ValueError(f"count must be >= 1 and length >= 2, got {count} and {length}")
    rows = np.arange(count)
    follow = rng.integers(0, tokens, (count, tokens), dtype=np.int64)  # [prompt, token]: the map
    by_rule = rng.random((count, length - 1)) < RULE
    noise = rng.integers(0, tokens, (count, length), dtype=np.int64)
    out, seen = np.empty((count, length), dtype=np.int64), np.zeros((count, tokens), dtype=bool)
    predictable = np.zeros((count, length - 1), dtype=bool)
    out[:, 0] = noise[:, 0]
    for t in range(length - 1):
        here = out[:, t]
        predictable[:, t] = by_rule[:, t] & seen[rows, here]
        seen[rows, here] = True
        out[:, t + 1] = np.where(by_rule[:, t], follow[rows, here], noise[:, t + 1])
    return torch.from_numpy(out), torch.from_numpy(predictable)


# ---- models and constraints --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Makes the keys' rows of a stacked W_Q, W_K, W_V those of the queries, at every step."""

    def forward(self, weight: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        n = weight.shape[0] // 3
        return torch.cat((weight[:n], weight[:n], weight[2 * n :]))


def build(arm: Arm, seed: int, layers: int = LAYERS, length: int = LENGTH, tokens: int = TOKENS, width: int = WIDTH) -> Transformer:
    """The untrained model of an arm: every weight normal with deviation .8 / sqrt(width), biases 0 (P2 uses TransformerLens' default)."""
    heads = width // D_HEAD
    torch.manual_seed(seed)
    model = Transformer(Config(vocab_size=tokens, layers=layers, heads=heads, width=width, d_head=D_HEAD, mlp=0, positions=arm.positions, pairing="half",
                               context=length, bias=True, dropout=0.0, init_std=0.8 / math.sqrt(width)))  # fmt: skip
    if arm.tied:
        for block in model.blocks:
            parametrize.register_parametrization(block.attention.qkv, "weight", Tied())
    return model


def sham_frames(attention: Attention, layer: int) -> Float[Tensor, "head d_head d_head"]:
    """A fixed random rotation R for each head, the same in every run."""
    generator = torch.Generator().manual_seed(7_000 + layer)
    return torch.stack([random_frame(attention.d_head, attention.d_head, generator) for _ in range(attention.heads)]).float()


def asymmetry(w_q: Float[Tensor, "head d_head width"], w_k: Float[Tensor, "head d_head width"]) -> Float[Tensor, "head"]:
    """|M_A|^2 / |M|^2 of each head, the denominator held fixed for the gradient, as in P2. |M_A|^2 = (|M|^2 - tr M^2) / 2, through the d_head core."""
    core = w_k @ w_q.mT  # [head, d_head, d_head]: its trace of squares is tr M^2
    square = ((w_q @ w_q.mT) * (w_k @ w_k.mT)).sum((-1, -2))
    return (square - (core * core.mT).sum((-1, -2))) / 2 / square.detach()


def phase(w_q: Float[Tensor, "head d_head width"], w_k: Float[Tensor, "head d_head width"], pairing: str) -> Float[Tensor, "head"]:
    """sum_t |Im M_t|^2 / sum_t (|Re M_t|^2 + |Im M_t|^2) of each head, the denominator held fixed for the gradient (P2; squared norms here)."""
    (a, c), (b, d) = (split_pairs(w.mT, pairing) for w in (w_q, w_k))  # [head, width, pair]
    dot = lambda x, y: (x * y).sum(-2)  # noqa: E731
    cross = 2 * dot(a, c) * dot(b, d)
    both = dot(a, a) * dot(b, b) + dot(c, c) * dot(d, d), dot(c, c) * dot(b, b) + dot(a, a) * dot(d, d)
    return (both[1] - cross).sum(-1) / (both[0] + both[1]).sum(-1).detach()


def penalty(model: Transformer, kind: str) -> Float[Tensor, ""]:
    """The constraint of an arm before its weight, averaged over heads and layers, in [0, 1]. "sham" is "symmetric" on W_Q R W_K^T."""
    terms = []
    for layer, block in enumerate(model.blocks):
        w_q, w_k = block.attention.w_q, block.attention.w_k
        if kind == "phase":
            terms.append(phase(w_q, w_k, block.attention.pairing))
        else:
            # q R k^T: R turns the query's side; [head, d_head, width]
            w_q = sham_frames(block.attention, layer).to(w_q.device).mT @ w_q if kind == "sham" else w_q
            terms.append(asymmetry(w_q, w_k))
    return torch.cat(terms).mean()


# ---- what is measured at an evaluation ---------------------------------------------------------------------------------------------


def loss_on(model: Transformer, tokens: Tensor, predictable: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over all next tokens and over the predictable ones, in nats."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(predictable.shape)
    return loss.mean(), loss[predictable].mean()


def head_patterns(
    model: Transformer, tokens: Int[Tensor, "prompt position"]
) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """Mean attention of the queries from position 64 on: on the token before (prev), and on tokens that followed an earlier copy of the query's (ind)."""
    length = tokens.shape[1]
    after_copy = torch.zeros(len(tokens), length, length, dtype=torch.bool, device=tokens.device)
    after_copy[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    after_copy &= torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    where = torch.arange(QUERIES_FROM, length, device=tokens.device)
    previous, induction = [], []
    for layer, x in enumerate(model.layer_inputs(tokens)):
        pattern = model.attention(layer, x)[:, :, QUERIES_FROM:]  # [prompt, head, query, key]
        previous.append(pattern[:, :, torch.arange(len(where), device=x.device), where - 1].mean((0, 2)))
        induction.append((pattern * after_copy[:, None, QUERIES_FROM:]).sum(-1).mean((0, 2)))
    return torch.stack(previous), torch.stack(induction)


def head_spectra(model: Transformer) -> list[dict]:
    """dir_frac, d_head and rope_imag_frac of every head, its norm folded in (rope_imag_frac is nan without RoPE)."""
    rows = []
    for layer, block in enumerate(model.blocks):
        w_q, w_k = (fold_norm(w.mT, block.norm.weight, centred=True) for w in (block.attention.w_q, block.attention.w_k))
        found = qk_spectrum(w_q, w_k)
        rotary = block.attention.positions == "rope"
        rif = rope_parts(w_q, w_k, block.attention.pairing).rope_imag_frac() if rotary else torch.full_like(found.d_head, math.nan)
        rows += [{"layer": layer, "head": head, "dir_frac": float(found.dir_frac[head]), "d_head": float(found.d_head[head]),
                  "rope_imag_frac": float(rif[head])} for head in range(block.attention.heads)]  # fmt: skip
    return rows


def evaluate(model: Transformer, tokens: Tensor, predictable: Tensor) -> tuple[dict, list[dict]]:
    """Losses of the run, and one row a head: prev, ind and its spectra."""
    with torch.inference_mode():
        everything, foreseen = loss_on(model, tokens, predictable)
        previous, induction = head_patterns(model, tokens)
        rows = head_spectra(model)
    for row in rows:
        row |= {"prev": float(previous[row["layer"], row["head"]]), "ind": float(induction[row["layer"], row["head"]])}
    return {"loss": float(everything), "loss_predictable": float(foreseen)}, rows
