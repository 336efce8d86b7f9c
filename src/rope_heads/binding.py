"""Binding prompts for real models: who likes which colour, asked again at the end (P0 scores the heads of gemma-2-2b-it on such prompts).

P0 does not print its wording; this one is the project's own. All prompts of a set have the same number of tokens, so that they form one batch.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_heads.detectors import hidden_states
from rope_heads.pretrained import Heads
from rope_heads.scores import centred_scores, movable_mass, plane_swap_logits, positional_symbolic, swap_logits

NAMES = ("Anna", "Ben", "Carl", "David", "Emma", "Frank", "George", "Henry", "Jack", "Jane", "John", "Kate", "Laura", "Mark", "Mary", "Paul",
         "Peter", "Rose", "Sam", "Sarah", "Simon", "Susan", "Thomas", "Tom")  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "orange", "purple", "gray", "gold")


class Prompts(NamedTuple):
    """tokens [prompt, position], the last one " likes"; answer: position of the right colour; colours: positions of all colours [prompt, pair].

    sentences: positions of each sentence's tokens [pair, size], the same in all prompts.
    """

    tokens: Int[Tensor, "prompt position"]
    answer: Int[Tensor, "prompt"]
    colours: Int[Tensor, "prompt pair"]
    sentences: Int[Tensor, "pair size"]

    def first(self, count: int) -> "Prompts":
        return Prompts(self.tokens[:count], self.answer[:count], self.colours[:count], self.sentences)


def prompts(tokenizer, bos: int, count: int = 256, pairs: int = 5, seed: int = 0) -> Prompts:
    """`count` prompts: BOS, `pairs` sentences " Tom likes red.", then " Which colour does Tom like? Tom likes" for one of them at random.

    Names and colours are those that the tokenizer keeps whole after a space.
    """
    def whole(words):
        ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
        return [i[0] for i in ids if len(i) == 1]

    def part(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    names, colours = whole(NAMES), whole(COLOURS)
    if min(len(names), len(colours)) < pairs:
        raise ValueError(f"the tokenizer keeps {len(names)} names and {len(colours)} colours whole, needed: pairs = {pairs}")
    likes, stop, ask, like = part(" likes"), part("."), part(" Which colour does"), part(" like?")
    rng = np.random.default_rng(seed)
    rows, answers, places = [], [], []
    for _ in range(count):
        row, place = [bos], []
        who = rng.permutation(names)[:pairs].tolist()
        for name, colour in zip(who, rng.permutation(colours)[:pairs].tolist()):
            row += [name, *likes, colour, *stop]
            place.append(len(row) - len(stop) - 1)
        asked = int(rng.integers(pairs))
        rows.append([*row, *ask, who[asked], *like, who[asked], *likes])
        answers.append(place[asked])
        places.append(place)
    size = 1 + len(likes) + 1 + len(stop)
    return Prompts(torch.tensor(rows), torch.tensor(answers), torch.tensor(places), 1 + torch.arange(pairs * size).view(pairs, size))


def accuracy(model: nn.Module, p: Prompts) -> tuple[float, float]:
    """Share of prompts whose right colour has the highest logit among the prompt's colours, and among all tokens."""
    with torch.no_grad():
        logits = model.get_output_embeddings()(hidden_states(model, p.tokens).last_hidden_state[:, -1])  # [prompt, id]
    right = p.tokens.gather(1, p.answer[:, None])
    offered = logits.gather(1, p.tokens.gather(1, p.colours))
    top = logits.gather(1, right)[:, 0]
    return float((top >= offered.amax(1)).float().mean()), float((top >= logits.amax(1)).float().mean())


@torch.no_grad()
def streams(model: nn.Module, p: Prompts, batch: int = 64) -> tuple[Float[Tensor, "prompt position width"], ...]:
    """Residual stream entering each layer."""
    parts = [hidden_states(model, tokens, output_hidden_states=True).hidden_states[:-1] for tokens in p.tokens.split(batch)]
    return tuple(torch.cat(layer) for layer in zip(*parts))


def block_table(table: Float[Tensor, "... content slot"], blocks: Int[Tensor, "block size"]) -> Float[Tensor, "... content slot"]:
    """A table of logits for whole blocks of tokens, ready for `scores.positional_symbolic`: entry [A, B] is the logarithm of what block A's
    tokens together would weigh in block B's slots, each in its own place. Its last row and column hold all other tokens, which stay.

    P0 scores swaps of blocks and compares block means; means of equal blocks are sums up to a factor, which the cosine does not see (pass
    temperature x size to keep P0's weights).
    """
    content, slot = blocks[:, None, :], blocks[None, :, :]
    inner = table[..., content, slot].logsumexp(-1)  # [..., block, block]
    others = torch.ones(table.shape[-1], dtype=torch.bool)
    others[blocks.flatten()] = False
    out = inner.new_full((*inner.shape[:-2], len(blocks) + 1, len(blocks) + 1), -torch.inf)
    out[..., :-1, :-1] = inner
    out[..., -1, -1] = table.diagonal(dim1=-2, dim2=-1)[..., others].logsumexp(-1)
    return out


@torch.no_grad()
def head_scores(heads: Heads, layer: int, hidden: Float[Tensor, "prompt position width"],
                sentences: Int[Tensor, "pair size"]) -> dict[str, Float[Tensor, "head"]]:  # fmt: skip
    """Mean scores of one layer's heads, query = last token, all pair swaps before it (as `scores.positional_symbolic`); `_sd` over prompts.

    `_no_first` leaves the first token out of the swaps: heads park unused attention there, and at the paper's temperature the swap that moves
    most mass decides. `_sentences` swaps whole sentences, as P0 swaps blocks. `_centred` subtracts the uniform attention. `movable`: attention
    that swaps can move, with and without the first token.
    """
    table = swap_logits(heads, layer, hidden).double()  # [prompt, head, content, slot]
    first = table[..., 1:, 1:]
    found = dict(zip(("positional", "symbolic"), positional_symbolic(table)))
    found |= dict(zip(("positional_no_first", "symbolic_no_first"), positional_symbolic(first)))
    by_sentence = positional_symbolic(block_table(table, sentences), 1e-4 * sentences.shape[1])
    found |= dict(zip(("positional_sentences", "symbolic_sentences"), by_sentence))
    found |= dict(zip(("positional_centred", "symbolic_centred"), centred_scores(table)))
    movable = movable_mass(table)
    on_first = table.diagonal(dim1=-2, dim2=-1).softmax(-1)[..., 0]
    found |= {"movable": movable, "movable_no_first": movable - on_first}
    return {name: value.mean(0) for name, value in found.items()} | {f"{name}_sd": found[name].std(0) for name in ("positional", "symbolic")}


@torch.no_grad()
def plane_scores(heads: Heads, layer: int, hidden: Float[Tensor, "prompt position width"], batch: int = 16) -> dict[str, Float[Tensor, "head pair"]]:
    """Mean scores of every rotary plane taken alone as a head of two dimensions (P0's frequency-level score); spread: sd of its logits over keys."""
    parts: dict[str, list] = {"positional": [], "symbolic": [], "spread": []}
    for part in hidden.split(batch):
        table = plane_swap_logits(heads, layer, part).double()  # [prompt, head, pair, content, slot]
        for name, value in zip(parts, (*positional_symbolic(table), table.diagonal(dim1=-2, dim2=-1).std(-1))):
            parts[name].append(value)
    return {name: torch.cat(values).mean(0) for name, values in parts.items()}
