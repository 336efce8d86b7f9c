"""A start for training: W_Q and W_K of the first layers as the many-angle Index head of the theory chapter, everything else random as usual.

The construction reads all keys from a constant coordinate, and its queries are turned back by the integer of their token. The bias of the
layer's norm (0 otherwise) becomes 1 and is that constant: what the norm makes of its input sums to 0, so keys come out alike to the last bit.
The queries are fitted by ridge regression to the stream that enters the layer of the untrained model.
"""

import math

import numpy as np
import torch

from rope_heads import theory
from rope_heads.model import Transformer
from rope_heads.rope import from_planes
from rope_heads.tasks import NumberTask, Task

LONGEST = 5_017  # tokens up to which the exact construction would put half of its attention on the right key
PROMPTS, STREAM = 1_000, 31  # sequences for the fit, and what keeps their random numbers apart
RIDGE = 1e-3  # of the mean squared coordinate


@torch.no_grad()
def start_as_index(model: Transformer, task: Task, layers: int, seed: int) -> None:
    """Adds the construction to the random W_Q and W_K of layers 0 to `layers` - 1, in place; draws nothing from torch's generator.

    In every plane the query of integer i is s exp(-i angle), that of a letter s, every key s; s makes the exact head's gap, equal weights in
    all planes, as large as softmax needs at `LONGEST` tokens (`theory.sharpness_needed`). ValueError where the task or the head is another.
    """
    c = model.config
    if not isinstance(task, NumberTask):
        raise ValueError(f"index_layers is for the number task, whose hops are Index, got {task.name}")
    if c.positions != "rope" or c.heads != 1 or c.bias or c.rotary_dim != c.d_head:
        raise ValueError("index_layers needs one head without bias, with rotary planes in all of its dimensions")
    if not 0 <= layers <= c.layers:
        raise ValueError(f"index_layers must be between 0 and {c.layers}, the number of layers, got {layers}")
    integers = task.vocabulary_size - 1 - task.letters
    tokens = torch.from_numpy(task.sample(PROMPTS, None, np.random.default_rng([seed, STREAM])).tokens)
    steps = tokens.where(tokens <= integers, 0).double().flatten()  # [token]
    was_training = model.training
    model.eval()
    x = model.embed(tokens)
    for block in model.blocks[:layers]:
        attention = block.attention
        gap = theory.index_gap(attention.angles, np.ones(len(attention.angles)), LONGEST)[-1]
        size = math.sqrt(float(theory.sharpness_needed(gap, LONGEST)) / attention.scale)  # length of query and key in each plane
        queries = from_planes(size * torch.exp(-1j * torch.outer(steps, attention.angles)), attention.pairing)  # [token, d_head]
        key = from_planes(torch.full((len(attention.angles),), size, dtype=torch.complex128), attention.pairing)  # [d_head]
        block.norm.bias.fill_(1.0)
        h = block.norm(x).flatten(0, 1).double()  # [token, width]
        square = h.T @ h
        ridge = RIDGE * square.diagonal().mean() * torch.eye(c.width, dtype=torch.float64)
        attention.w_q[0] += torch.linalg.solve(square + ridge, h.T @ queries).T
        attention.w_k[0] += torch.outer(key, torch.ones(c.width)) / c.width
        x = block(x)
    model.train(was_training)
