"""The stacked one-angle models against the project's attention, their tasks against the definitions, and that they learn what they can."""

import numpy as np
import pandas as pd
import pytest
import torch

from rope_heads import one_angle
from rope_heads.model import Attention


def test_index_names_a_position_and_retrieval_a_symbol():
    rng = np.random.default_rng(0)
    tokens, answers, places = one_angle.sample("index", 500, rng)
    for sequence, answer, place in zip(tokens, answers, places, strict=True):
        assert sequence[16] - 16 == place and sequence[place] == answer and sequence[:16].max() < 16
    tokens, answers, places = one_angle.sample("retrieval", 500, rng)
    for sequence, answer, place in zip(tokens, answers, places, strict=True):
        symbols, values = divmod(sequence[:16], 16)
        (at,) = np.flatnonzero(symbols == sequence[16] - 256)
        assert at == place and values[at] == answer and sorted(symbols) == list(range(16))
    assert np.bincount(places, minlength=16).min() > 15
    with pytest.raises(ValueError, match="got 'copy'"):
        one_angle.sample("copy", 1, rng)


@pytest.mark.parametrize("task", one_angle.TASKS)
def test_stacked_models_are_attention_with_one_angle_in_every_plane(task):
    angles, seeds = (1.3, 0.05, 0.4), (3, 7, 7)
    models = one_angle.OneAngleModels(task, angles, seeds, width=12).double()
    models.cos, models.sin = models.cos.double(), models.sin.double()
    tokens = torch.from_numpy(one_angle.sample(task, 40, np.random.default_rng(1))[0])
    with torch.no_grad():
        logits, answers = models.logits(tokens.expand(3, -1, -1)), models(tokens.expand(3, -1, -1))
        for i, angle in enumerate(angles):
            attention = Attention(12, angles=torch.full((6,), angle)).double()
            attention.qkv.weight.copy_(torch.cat((models.w_q[i], models.w_k[i], models.w_v[i])))
            attention.out.weight.copy_(torch.eye(12))
            x = models.embedding[i][tokens]
            assert torch.allclose(logits[i], attention.logits(x, 1)[:, 0, 0], atol=1e-5)
            assert torch.allclose(answers[i], attention(x, 1)[:, 0] @ models.unembedding[i].T, atol=1e-5)
    assert torch.equal(models.embedding[1], models.embedding[2]) and not torch.equal(models.embedding[0], models.embedding[1])


def test_models_of_a_grid_do_not_touch_each_other():
    alone = one_angle.train("index", [1.1], [4], steps=30, batch=16, width=8, tests=400)
    grid = one_angle.train("index", [0.01, 1.1], [2, 4], steps=30, batch=16, width=8, tests=400)
    same = grid[(grid.angle == 1.1) & (grid.seed == 4)].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, same, atol=0.02, rtol=0)  # a rounding difference may turn a near tie


def test_each_task_is_learnt_with_its_angle():
    index = one_angle.accuracies(one_angle.train("index", [1.1, 0.01], [0], steps=500, batch=64))
    assert index["index", 0, 1.1] > 0.9 and index["index", 0, 0.01] < 0.4
    retrieval = one_angle.accuracies(one_angle.train("retrieval", [1.1, 0.01], [0], steps=900, batch=64))
    assert retrieval["retrieval", 0, 0.01] > retrieval["retrieval", 0, 1.1] + 0.2


def test_bands_take_the_best_angle_of_each_seed():
    rows = [("index", angle, seed, position, tests, accuracy) for angle, seed, accuracy in
            [(1.1, 0, 0.9), (0.5, 0, 1.0), (0.2, 0, 0.7), (0.02, 0, 0.1), (0.001, 0, 0.3), (1.1, 1, 0.8)] for position, tests in ((0, 3), (1, 1))]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["task", "angle", "seed", "position", "tests", "accuracy"])
    frame.loc[0, "accuracy"] = 0.5  # angle 1.1, seed 0: (3 x .5 + 1 x .9) / 4
    assert one_angle.accuracies(frame)["index", 0, 1.1] == pytest.approx(0.6)
    assert one_angle.by_band(frame) == {"index_fast": {"0": 1.0, "1": pytest.approx(0.8)}, "index_slow": {"0": pytest.approx(0.3)},
                                        "retrieval_fast": {}, "retrieval_slow": {}}  # fmt: skip
