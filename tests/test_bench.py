"""The benches compare what they say they compare: the contestants give the same numbers. No test looks at a time."""

import re

import torch

from rope_heads import bench
from rope_heads.model import Config, Transformer
from rope_heads.scores import positional_symbolic, swap_logits


def test_brute_force_of_the_bench_is_the_closed_form():
    torch.manual_seed(0)
    model = Transformer(Config(vocab_size=20, layers=2, width=32, d_head=32, mlp=64)).double().eval()
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight.mul_(20)  # attention that is far from uniform
        hidden = model.layer_inputs(torch.randint(1, 20, (5, 9)))[1]
        for ours, theirs in zip(positional_symbolic(swap_logits(model, 1, hidden)), bench.scores_by_brute_force(model, 1, hidden), strict=True):
            assert ours.std() > 1e-3 and (ours - theirs).abs().max() < 1e-6


def test_benches_say_how_far_the_contestants_agree():
    lines = bench.scores(rounds=2, inputs=((9, 4),)) + bench.spectra(rounds=2, heads=1, width=256)
    agreements = [float(found) for line in lines for found in re.findall(r"agree to (\S+)$", line)]
    assert len(agreements) == 2 and max(agreements) < 1e-9
