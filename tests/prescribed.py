"""Models whose attention is prescribed, for tests: every token looks where it is told, and letters are the only thing that is copied.

The residual stream is the one-hot token. W_V doubles the coordinates of answers and drops the others, so a token that looks at an answer holds
it from then on (P1, appendix F), whatever the layer.
"""

import numpy as np
import torch
from torch import nn

from rope_heads.model import Attention, Config, Transformer
from rope_heads.tasks import LetterTask


class Prescribed(Attention):
    """Attention whose pattern [prompt, query, key] is given; all but 1e-6 of it."""

    def __init__(self, width: int, pattern: torch.Tensor):
        super().__init__(width, positions="none", scale=1.0)
        self.pattern = pattern[:, None]

    def logits(self, x, rows=None):
        length = x.shape[1]
        causal = torch.ones(length, length).tril().to(self.pattern.dtype)
        return (self.pattern * (1 - 1e-6) + 1e-6 * causal / causal.sum(-1, keepdim=True)).log()[:, :, -(rows or length) :]

    def forward(self, x, rows=None):
        _, _, v = self.project(x, 1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", self.logits(x, rows).softmax(-1), v).flatten(-2))


def prescribed(task, targets: np.ndarray) -> Transformer:
    """The model that looks at targets [layer, prompt, position]."""
    width = task.vocabulary_size
    model = Transformer(Config(vocab_size=width, layers=len(targets), width=width, mlp=0, positions="none", dropout=0.0)).eval()
    answers = torch.zeros(width)
    first, last = (1, task.letters * task.digits) if isinstance(task, LetterTask) else (width - task.letters, width - 1)
    answers[first : last + 1] = 1
    model.norm = nn.Identity()
    for block, target in zip(model.blocks, torch.from_numpy(targets), strict=True):
        block.norm, block.attention = nn.Identity(), Prescribed(width, nn.functional.one_hot(target, target.shape[-1]).float())
    with torch.no_grad():
        model.embedding.weight[:] = torch.eye(width)
        model.unembedding.weight[:], model.unembedding.bias[:] = torch.diag(answers), 0
        for block in model.blocks:
            block.attention.w_v[:], block.attention.out.weight[:] = 2 * torch.diag(answers), torch.eye(width)
    return model


def walking_forward(task, tokens: np.ndarray, layers: int = 5) -> np.ndarray:
    """Layer k: the query looks at the k-th chain token (k from 1), at itself when the chain is over; other tokens at themselves."""
    targets = np.tile(np.arange(tokens.shape[1]), (layers, len(tokens), 1))
    for prompt, sequence in enumerate(tokens):
        for layer, position in enumerate(task.chain(sequence)[1:]):
            targets[layer, prompt, -1] = position
    return targets


def flowing_backward(task, tokens: np.ndarray, layers: int = 5) -> np.ndarray:
    """Composition of the task's function: the token i steps from the answer looks at its next one in layers 0 to i - 1, then at itself."""
    targets = np.tile(np.arange(tokens.shape[1]), (layers, len(tokens), 1))
    for prompt, sequence in enumerate(tokens):
        chain = task.chain(sequence)
        for step, (position, following) in enumerate(zip(chain, chain[1:])):
            targets[: len(chain) - 1 - step, prompt, position] = following
    return targets
