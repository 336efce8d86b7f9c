"""Planes, looks and chains against direct computation, and against models whose attention is prescribed."""

import numpy as np
import pytest
import torch
from models import built
from prescribed import flowing_backward, prescribed, walking_forward

from rope_heads import circuits
from rope_heads.circuits import READINGS, plane_products, plane_use, plane_vectors
from rope_heads.papers import weighted_plane
from rope_heads.model import Config, Transformer
from rope_heads.tasks import LETTER, LETTER_PROPER, NUMBER, QUERY


def prompts(task, count=60, hops=None, seed=0):
    batch = task.sample(count, hops, np.random.default_rng(seed))
    return batch, torch.from_numpy(batch.tokens)


@pytest.fixture
def two_heads():
    torch.manual_seed(0)
    model = built(vocab_size=129, width=32, layers=3).double()
    _, tokens = prompts(LETTER, 7)
    with torch.no_grad():
        return model, tokens, model.layer_inputs(tokens)


def test_plane_products_add_up_to_the_logit():
    torch.manual_seed(0)
    model = Transformer(Config(layers=1, width=32, heads=2)).double().eval()
    hidden = model.layer_inputs(torch.from_numpy(LETTER.sample(5, None, np.random.default_rng(0)).tokens))[0]
    block = model.blocks[0]
    logits = block.attention.logits(block.norm(hidden), 1)[:, :, 0]  # [prompt, head, key]
    assert torch.allclose(plane_products(model, 0, hidden).sum(2) * block.attention.scale, logits, atol=1e-10)


def test_plane_use_takes_the_largest_key_and_the_mean_prompt():
    products = torch.tensor([[[[1.0, 5.0], [2.0, 0.0]]], [[[3.0, 1.0], [0.0, -2.0]]]])  # [prompt, head, pair, key]
    assert plane_use(products).tolist() == [[4.0, 1.0]]
    assert weighted_plane([100.0, 0.0, 0.0]) == pytest.approx(1) and weighted_plane(np.zeros(64)) == pytest.approx(32.5)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_plane_vectors_give_the_products_of_their_plane(pairing):
    torch.manual_seed(0)
    model = built(vocab_size=129, width=32, pairing=pairing).double()
    _, tokens = prompts(LETTER, 4)
    with torch.no_grad():
        hidden = model.layer_inputs(tokens)[1]
        products = plane_products(model, 1, hidden)
        for plane in (1, 5):
            q, k = plane_vectors(model, 1, hidden, plane)  # [prompt, position, head]
            turned = torch.exp(1j * float(model.blocks[1].attention.angles[plane - 1]) * (torch.arange(17.0, dtype=torch.float64) - QUERY))
            expected = (q[:, -1:].conj() * k * turned[:, None]).real
            assert torch.allclose(products[:, :, plane - 1], expected.transpose(1, 2), atol=1e-6)
    for bad in (0, 9):
        with pytest.raises(ValueError, match=f"got {bad} with"):
            plane_vectors(model, 1, hidden, bad)


def test_alignment_is_one_for_one_direction_and_zero_for_opposite_ones():
    direction = torch.polar(torch.tensor([1.0, 3.0]), torch.tensor([0.7, 0.7]))
    assert circuits.alignment(direction) == pytest.approx(1) and circuits.alignment(torch.tensor([1 + 1j, -1 - 1j])) == pytest.approx(0)


def test_head_outputs_add_up_to_the_layer(two_heads):
    model, _, inputs = two_heads
    block = model.blocks[1]
    with torch.no_grad():
        total = circuits.head_outputs(model, 1, inputs[1]).sum(2)
        assert torch.allclose(total, block.attention(block.norm(inputs[1])), atol=1e-10)


def test_head_outputs_with_a_bias_leave_the_output_bias_out():
    torch.manual_seed(0)
    model = built(vocab_size=129, bias=True).double()
    _, tokens = prompts(LETTER, 3)
    with torch.no_grad():
        x = model.embed(tokens)
        block = model.blocks[0]
        whole = block.attention(block.norm(x))
        assert torch.allclose(circuits.head_outputs(model, 0, x).sum(2) + block.attention.out.bias, whole, atol=1e-10)


def test_last_token_view_against_a_loop(two_heads):
    model, tokens, inputs = two_heads
    with torch.no_grad():
        view = circuits.last_token_view(model, tokens)
        for layer, block in enumerate(model.blocks):
            pattern = block.attention.logits(block.norm(inputs[layer])).softmax(-1)[:, :, -1]
            after = block(inputs[layer])[:, -1]
            for prompt in range(len(tokens)):
                assert view.held[layer, prompt] == model.unembedding(model.norm(after[prompt])).argmax()
                for head in range(2):
                    weights = pattern[prompt, head]
                    assert view.looked_at[layer, prompt, head] == int(np.argmax(weights.numpy())) and view.weight[layer, prompt, head] == weights.max()
                    value = (weights[:, None] * block.attention.project(block.norm(inputs[layer]), 1)[2][prompt, :, head]).sum(0)
                    added = block.attention.out.weight[:, 16 * head : 16 * head + 16] @ value
                    assert view.copied[layer, prompt, head] == model.unembedding(model.norm(added)).argmax()


def test_ideal_targets_follow_the_definitions():
    """Index and Retrieval token by token, from the words (P1, section 3.4)."""
    for task in (NUMBER, LETTER, LETTER_PROPER):
        batch, _ = prompts(task, 80)
        for sequence, targets in zip(batch.tokens, circuits.ideal_targets(task, batch.tokens).tolist(), strict=True):
            words = task.decode(sequence)
            for position, word in enumerate(words):
                expected = position
                if task is NUMBER and word.isdigit() and int(word) <= position:
                    expected = position - int(word)
                if task is not NUMBER and word[1].isalpha():
                    expected = max((j for j in range(position) if words[j][0] == word[1]), default=position)
                assert targets[position] == expected
            chain = task.chain(sequence)
            assert [targets[p] for p in chain[:-1]] == chain[1:]


def chain_looks_by_loops(task, tokens, looked):
    hits = torch.zeros(looked.shape[0], len(tokens), looked.shape[2], 4, 4, dtype=torch.bool)
    for layer, prompt, head in np.ndindex(hits.shape[:3]):
        chain = task.chain(tokens[prompt])
        for i in range(len(chain) - 1):
            for j in range(i + 1, len(chain)):
                at = int(looked[layer, prompt, head, chain[i]])
                hits[layer, prompt, head, i, j - 1] = at == chain[j] if task is NUMBER else bool(tokens[prompt, at] == tokens[prompt, chain[j]])
    return hits


@pytest.mark.parametrize("task", [NUMBER, LETTER, LETTER_PROPER], ids=lambda task: task.name)
def test_chain_looks_against_loops(task):
    batch, tokens = prompts(task, 60)
    rng = np.random.default_rng(1)
    chain = circuits.chains(task, batch.tokens)
    looked = torch.from_numpy(rng.integers(0, 17, (3, 60, 2, 17)))
    for prompt, row in enumerate(chain):  # make the chain likely
        for at, to in zip(row[:-1], row[1:]):
            if to >= 0:
                looked[rng.integers(3), prompt, rng.integers(2), at] = to
    hits = circuits.chain_looks(task, tokens, chain, looked)
    assert torch.equal(hits, chain_looks_by_loops(task, batch.tokens, looked)) and hits.any()


def test_equal_letter_tokens_count_as_the_chain_token():
    """Figure 3B of P1 holds the answer a2 twice."""
    tokens = LETTER.encode("e1 b2 e1 g6 a2 b2 e1 a2 be db ca ge eb hc dg fh eh")
    chain = circuits.chains(LETTER, tokens[None])
    looked = torch.full((1, 1, 1, 17), 4)
    answer, last = 7, int((chain[0] >= 0).sum()) - 1
    assert chain[0, last] == answer and tokens[4] == tokens[7]
    assert circuits.chain_looks(LETTER, torch.from_numpy(tokens[None]), chain, looked)[0, 0, 0, 0, last - 1]


@pytest.mark.parametrize("task", [NUMBER, LETTER], ids=lambda task: task.name)
@pytest.mark.parametrize("build, reading, expected_layer", [
    (walking_forward, "forward", lambda hops, step: step - 1),
    (flowing_backward, "backward", lambda hops, step: hops - step),
], ids=["forward", "backward"])  # fmt: skip
def test_prescribed_models_follow_their_own_reading(task, build, reading, expected_layer):
    batch, tokens = prompts(task, 120)
    model = prescribed(task, build(task, batch.tokens))
    with torch.inference_mode():
        assert (model(tokens, last=True)[:, 0].argmax(-1).numpy() == batch.answers).all()
        chain = circuits.chains(task, batch.tokens)
        hits = circuits.chain_looks(task, tokens, chain, circuits.looks(model, model.layer_inputs(tokens)))
    four = torch.from_numpy(batch.hops == 4)
    other = next(name for name in READINGS if name != reading)
    assert circuits.follows(hits[:, four], reading).all() and not circuits.follows(hits[:, four], other).any()
    steps = circuits.performing(hits, batch.hops, reading)
    for h in range(4):
        for k in range(4):
            if k <= h or reading == "forward":
                assert steps.layer[h, k] == expected_layer(h + 1, k + 1) and steps.share[h, k] == 1
            else:
                assert steps.layer[h, k] == -1 and np.isnan(steps.share[h, k])


def test_follows_wants_four_layers_in_order():
    hits = torch.zeros(4, 3, 1, 4, 4, dtype=torch.bool)  # [layer, prompt, head, looker, target]
    for layer in range(4):
        hits[layer, 0, 0, 0, layer] = True  # steps 1, 2, 3, 4
        hits[layer, 1, 0, 0, 3 - layer] = True  # 4, 3, 2, 1
    hits[0, 2, 0, 0, :2] = hits[1, 2, 0, 0, 2] = hits[2, 2, 0, 0, 3] = True  # steps 1 and 2 in one layer
    assert circuits.follows(hits, "forward").tolist() == [True, False, False]
    assert circuits.follows(torch.cat((hits, hits)), "forward").tolist() == [True, False, True]


def test_performing_takes_the_most_frequent_head():
    hits = torch.zeros(3, 10, 2, 4, 4, dtype=torch.bool)
    hits[1, :4, 0, 0, 0] = hits[2, :7, 1, 0, 0] = True
    steps = circuits.performing(hits, np.ones(10, dtype=int), "forward")
    assert (steps.layer[0, 0], steps.head[0, 0], steps.share[0, 0]) == (2, 1, pytest.approx(0.7))
    assert np.isnan(steps.share[0, 1]) and steps.layer[0, 1] == -1
