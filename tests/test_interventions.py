"""Edits against hooks inside the model's own modules, and the ledger's ablation numbers on models whose attention is prescribed."""

import numpy as np
import pytest
import torch
from models import built
from prescribed import flowing_backward, prescribed, walking_forward

from rope_heads import circuits, interventions
from rope_heads.circuits import READINGS
from rope_heads.tasks import LETTER, NUMBER

EACH = torch.arange(6)


@pytest.fixture(params=[{}, {"bias": True}, {"positions": "alibi"}, {"mlp": 0}], ids=str)
def setting(request):
    torch.manual_seed(0)
    model = built(vocab_size=129, width=32, layers=3, **request.param).double()
    tokens = torch.from_numpy(LETTER.sample(6, None, np.random.default_rng(0)).tokens)
    at, to = torch.tensor([16, 9, 16, 8, 12, 15]), torch.tensor([3, 9, 0, 2, 11, 14])
    with torch.no_grad():
        yield model, tokens, model.layer_inputs(tokens), at, to


def with_hook(model, layer, tokens, change):
    """Logits after the query when `change` rewrites what enters W_O of one layer: mixed values [prompt, position, head, d_head]."""
    attention = model.blocks[layer].attention

    def hook(_, arguments):
        return (change(arguments[0].unflatten(-1, (attention.heads, attention.d_head)).clone()).flatten(-2),)

    handle = attention.out.register_forward_pre_hook(hook)
    try:
        return model(tokens)[:, -1]
    finally:
        handle.remove()


@pytest.mark.parametrize("layer", [0, 2])
def test_replaced_output_is_a_replaced_mix_of_values(setting, layer):
    model, tokens, inputs, at, _ = setting
    attention = model.blocks[layer].attention
    mixed = torch.randn(6, attention.d_head, dtype=torch.float64)
    vectors = mixed @ attention.out.weight[:, 16:].T

    def change(z):
        z[EACH, at, 1] = mixed
        return z

    edited = interventions.run(model, inputs[layer], {layer: [interventions.replace_output(1, at, vectors)]}, layer)
    assert torch.allclose(edited, with_hook(model, layer, tokens, change), atol=1e-10)
    assert torch.allclose(edited, interventions.run(model, inputs[0], {layer: [interventions.replace_output(1, at, vectors)]}), atol=1e-10)


def test_looking_at_one_place_only_mixes_one_value(setting):
    model, tokens, inputs, at, to = setting
    block = model.blocks[1]
    value = block.attention.project(block.norm(inputs[1]), 1)[2]  # [prompt, position, head, d_head]
    some = torch.tensor([True, False, True, True, True, False])

    def change(z):
        z[EACH[some], at[some], 0] = value[EACH[some], to[some], 0]
        return z

    edit = interventions.look_only(0, at.where(some, torch.tensor(-1)), to)
    assert torch.allclose(interventions.run(model, inputs[1], {1: [edit]}, 1), with_hook(model, 1, tokens, change), atol=1e-10)


def test_whole_pattern_mixes_one_value_everywhere(setting):
    model, tokens, inputs, _, _ = setting
    block = model.blocks[1]
    value = block.attention.project(block.norm(inputs[1]), 1)[2]
    targets = torch.stack([torch.randint(0, position + 1, (6,)) for position in range(17)], dim=1)

    def change(z):
        for prompt in range(6):
            for position in range(17):
                z[prompt, position, 1] = value[prompt, targets[prompt, position], 1]
        return z

    edited = interventions.run(model, inputs[1], {1: [interventions.whole_pattern(1, targets)]}, 1)
    assert torch.allclose(edited, with_hook(model, 1, tokens, change), atol=1e-10)


def test_forbidden_looks_are_masked_before_the_softmax(setting, monkeypatch):
    model, tokens, inputs, _, _ = setting
    places = [(16, 9), (16, 2), (11, 4)]
    forbidden = [(torch.full((6,), at), torch.full((6,), away)) for at, away in places]
    edited = interventions.run(model, inputs[0], forbidden=forbidden)
    original = type(model.blocks[0].attention).bias_and_mask

    def masked(self, queries, keys, device):
        mask = original(self, keys, keys, device).clone()
        for at, away in places:
            mask[:, at, away] = -torch.inf
        return mask[:, keys - queries :]

    monkeypatch.setattr(type(model.blocks[0].attention), "bias_and_mask", masked)
    assert torch.allclose(edited, model(tokens)[:, -1], atol=1e-10)


def test_resume_sees_only_the_last_rows(setting):
    model, tokens, inputs, _, _ = setting
    for rows in (1, 9, 17):
        for layer in (1, 2, 3):
            hidden = inputs[layer] if layer < 3 else model.blocks[2](inputs[2])
            changed = hidden.clone()
            changed[:, -rows:] += torch.randn(6, rows, 32)
            direct = interventions.run(model, changed, start=layer)
            assert torch.allclose(interventions.resume(model, inputs, layer, changed[:, -rows:]), direct, atol=1e-10)


def test_nothing_edited_is_the_model_itself(setting):
    model, tokens, inputs, _, _ = setting
    assert torch.allclose(interventions.run(model, inputs[0]), model(tokens)[:, -1], atol=1e-10)
    with pytest.raises(ValueError, match=r"edited layers must be 1 to 2, got \[0\]"):
        interventions.run(model, inputs[1], {0: []}, 1)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_switched_off_planes_leave_the_sum_over_the_others(pairing, rotary_dim):
    torch.manual_seed(0)
    model = built(vocab_size=129, width=32, pairing=pairing, rotary_dim=rotary_dim, bias=True).double()
    tokens = torch.from_numpy(LETTER.sample(5, None, np.random.default_rng(0)).tokens)
    planes = rotary_dim // 2
    with torch.no_grad():
        hidden = model.layer_inputs(tokens)[1]
        products = circuits.plane_products(model, 1, hidden)  # [prompt, head, pair, key]
        block = model.blocks[1]
        off = interventions.without_planes(model, [1, 3]).blocks[1]
        changed = off.attention.logits(off.norm(hidden), 1)[:, :, 0]
        expected = block.attention.logits(block.norm(hidden), 1)[:, :, 0] - block.attention.scale * products[:, :, [0, 2]].sum(2)
        assert torch.allclose(changed, expected, atol=1e-6)
        assert torch.equal(circuits.plane_products(interventions.without_planes(model, [1, 3]), 1, hidden)[:, :, [0, 2]], torch.zeros(5, 2, 2, 17))
    assert not torch.equal(model.blocks[1].attention.qkv.weight, off.attention.qkv.weight)
    with pytest.raises(ValueError, match=f"plane ids must be 1 to {planes}, got 0"):
        interventions.without_planes(model, [0])
    with pytest.raises(ValueError, match="plane ids must be 1 to 0, got 1"):
        interventions.without_planes(built(positions="none"), [1])


# ---- the ledger's experiment ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [NUMBER, LETTER], ids=lambda task: task.name)
@pytest.mark.parametrize("reading, build, lost", [("forward", walking_forward, 0.4), ("backward", flowing_backward, 1.0)])
def test_lost_and_kept_of_prescribed_models(task, reading, build, lost):
    """Forward the pattern is fixed and only letters are copied, so of the ten pairs only the four last steps matter; backward all ten do."""
    accuracy = np.full((4, 5, 1, 5), np.nan)
    found = []
    for h in range(1, 5):
        batch = task.sample(60, h, np.random.default_rng(h))
        model, tokens = prescribed(task, build(task, batch.tokens)), torch.from_numpy(batch.tokens)
        chain, right = circuits.chains(task, batch.tokens), torch.from_numpy(batch.answers)
        with torch.inference_mode():
            inputs = model.layer_inputs(tokens)
            found.append(circuits.chain_looks(task, tokens, chain, circuits.looks(model, inputs)))
            off = torch.tensor([next(p for p in range(8, 17) if p not in row) for row in chain.tolist()])
            for layer in range(5):
                mean = circuits.head_outputs(model, layer, inputs[layer]).mean((0, 1))  # [head, width]
                for place in range(5):
                    at = off if place == 4 else chain[:, place]
                    if place < h or place == 4:
                        edit = interventions.replace_output(0, at, mean[0].expand(60, -1))
                        accuracy[h - 1, layer, 0, place] = (interventions.run(model, inputs[0], {layer: [edit]}).argmax(-1) == right).float().mean()
    steps = circuits.performing(torch.cat(found, 1), np.repeat(np.arange(1, 5), 60), reading)
    measured = interventions.lost_and_kept(accuracy, steps, reading)
    assert measured[0] == pytest.approx(lost, abs=0.08) and measured[1] == 1
    other = next(name for name in READINGS if name != reading)
    wrong = interventions.lost_and_kept(accuracy, circuits.performing(torch.cat(found, 1), np.repeat(np.arange(1, 5), 60), other), other)
    assert wrong[0] < lost - 0.1  # steps that are not there count as nothing lost


def test_a_step_done_in_under_half_of_the_prompts_loses_nothing():
    accuracy = np.zeros((4, 2, 1, 5))
    layer, head = np.zeros((4, 4), dtype=int), np.zeros((4, 4), dtype=int)
    share = np.full((4, 4), 0.5)
    share[:, 1] = 0.49
    lost, kept = interventions.lost_and_kept(accuracy, circuits.Steps(layer, head, share), "forward")
    assert lost == pytest.approx(7 / 10) and kept == 0  # step 2 exists in three of the ten pairs


@pytest.mark.parametrize("reading", READINGS)
def test_ideal_edits_repair_a_model_that_looks_at_itself(reading):
    """The right looks alone give the answer, in a model whose own attention never leaves the token."""
    batch = NUMBER.sample(80, None, np.random.default_rng(0))
    tokens, hops, chain = torch.from_numpy(batch.tokens), torch.from_numpy(batch.hops), circuits.chains(NUMBER, batch.tokens)
    steps = circuits.Steps(*(np.full((4, 4), -1) for _ in range(2)), np.full((4, 4), np.nan))
    for h in range(4):
        for k in range(4):
            if reading == "forward" or k <= h:
                steps.layer[h, k], steps.head[h, k] = (k, 0) if reading == "forward" else (h - k, 0)
    blind = prescribed(NUMBER, np.tile(np.arange(17), (5, 80, 1)))
    with torch.inference_mode():
        hidden = blind.embed(tokens)
        answers = interventions.run(blind, hidden, interventions.ideal_edits(chain, hops, steps, reading)).argmax(-1)
        assert (answers.numpy() == batch.answers).all()
        assert (interventions.run(blind, hidden).argmax(-1).numpy() == batch.answers).mean() < 0.3  # its traces of uniform attention find the window
