"""Binding prompts and scores of real models: the table of logits against attention after rows are really swapped, prompts against their text."""

import pytest
import torch
from test_pretrained import small

from rope_heads import binding
from rope_heads.pretrained import extract
from rope_heads.scores import plane_swap_logits, positional_symbolic, swap_logits

WORDS = ["[BOS]", "likes", "like?", "Which", "colour", "does", ".", *binding.NAMES[:7], *binding.COLOURS[:6]]


SENTENCES = torch.tensor([[1, 2], [3, 4], [5, 6]])


class Words:
    """A tokenizer of whole words; others become two pieces."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        pieces = text.replace(".", " .").split()
        return {"input_ids": [i for word in pieces for i in ([WORDS.index(word)] if word in WORDS else [40, 41])]}


def test_prompts_ask_for_one_of_the_pairs_and_answers_point_to_its_colour():
    found = binding.prompts(Words(), bos=0, count=50, pairs=4, seed=1)
    assert found.tokens.shape == (50, 1 + 4 * 4 + 3 + 1 + 1 + 1 + 1) and found.colours.shape == (50, 4)
    for row, answer, colours in zip(found.tokens.tolist(), found.answer.tolist(), found.colours.tolist()):
        text = [WORDS[i] for i in row]
        assert text[0] == "[BOS]" and text[-1] == "likes" and text[-3] == "like?" and text[-2] == text[-4]
        assert [[text[i] for i in block] for block in found.sentences.tolist()] == [text[i : i + 4] for i in range(1, 17, 4)]
        said = {text[i]: text[i + 2] for i in range(1, 17, 4)}
        assert len(said) == 4 and text[answer] == said[text[-2]] and [text[i] for i in colours] == list(said.values())
    assert len(set(found.answer.tolist())) == 4
    assert torch.equal(found.tokens, binding.prompts(Words(), 0, 50, 4, seed=1).tokens)
    with pytest.raises(ValueError, match="7 names and 6 colours whole, needed: pairs = 7"):
        binding.prompts(Words(), 0, 3, pairs=7)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj", "gpt2"])
def test_the_table_holds_what_the_layer_gives_after_two_rows_are_swapped(family):
    heads = extract(small(family))
    hidden = torch.randn(3, 9, 24)
    table = swap_logits(heads, 1, hidden)  # [prompt, head, content, slot]
    with torch.no_grad():
        torch.testing.assert_close(table.diagonal(dim1=-2, dim2=-1), heads.blocks[1].logits(hidden)[:, :, -1], atol=1e-4, rtol=1e-4)
        for a, b in ((0, 7), (3, 4)):
            swapped = hidden.clone()
            swapped[:, [a, b]] = hidden[:, [b, a]]
            logits = heads.blocks[1].logits(swapped)[:, :, -1]
            torch.testing.assert_close(table[:, :, b, a], logits[..., a], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(table[:, :, a, b], logits[..., b], atol=1e-4, rtol=1e-4)
    if family == "llama":  # all dimensions turn: the planes add up
        torch.testing.assert_close(plane_swap_logits(heads, 1, hidden).sum(2), table, atol=1e-4, rtol=1e-4)


def test_scores_of_a_head_that_reads_positions_and_of_one_that_reads_content():
    """With keys that do not depend on the content only slots differ; without any turn only contents differ."""
    heads = extract(small("llama"))
    attention = heads.blocks[1].attention
    hidden = torch.randn(6, 9, 24)
    with torch.no_grad():
        attention.qkv.weight[24:48] = 0
        attention.qkv.bias[24:48] = 3 * torch.randn(24)
    found = binding.head_scores(heads, 1, hidden, SENTENCES)
    assert (found["positional"] > 1 - 1e-6).all() and found["positional_sd"].max() < 1e-6 and (found["symbolic"] < 0.999).all()
    assert set(found) >= {"positional_no_first", "symbolic_centred", "movable", "movable_no_first"}
    heads.blocks[0].attention.angles.zero_()
    still = binding.head_scores(heads, 0, hidden, SENTENCES)
    assert (still["symbolic"] > 1 - 1e-6).all()
    planes = binding.plane_scores(heads, 0, hidden, batch=4)
    assert planes["symbolic"].shape == (6, 2) and (planes["symbolic"] > 1 - 1e-6).all() and (planes["spread"] > 0).all()


def test_block_scores_equal_p0s_definition_with_blocks_really_swapped():
    """Mean attention of two blocks before and after their rows change places, the same or reversed, weights softmax(|D_a - D_b| / tau)."""
    heads = extract(small("llama"))
    hidden = torch.randn(2, 9, 24)
    temperature = 0.05  # soft, so that every swap counts
    positional, symbolic = positional_symbolic(binding.block_table(swap_logits(heads, 1, hidden).double(), SENTENCES), 2 * temperature)

    def means(x):
        with torch.no_grad():
            pattern = heads.blocks[1].logits(x)[:, :, -1].softmax(-1)
        return pattern[..., SENTENCES].mean(-1).double()  # [prompt, head, block]

    before, weights, same, reverse = means(hidden), [], [], []
    for a, b in ((0, 1), (0, 2), (1, 2)):
        swapped = hidden.clone()
        swapped[:, SENTENCES[a]], swapped[:, SENTENCES[b]] = hidden[:, SENTENCES[b]], hidden[:, SENTENCES[a]]
        v, w = before[..., [a, b]], means(swapped)[..., [a, b]]
        weights.append((v[..., 0] - v[..., 1]).abs() / temperature)
        same.append(torch.cosine_similarity(w, v, dim=-1))
        reverse.append(torch.cosine_similarity(w, v.flip(-1), dim=-1))
    weights = torch.stack(weights).softmax(0)
    torch.testing.assert_close(positional, (weights * torch.stack(same)).sum(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(symbolic, (weights * torch.stack(reverse)).sum(0), atol=1e-5, rtol=0)
    assert (positional - symbolic).abs().max() > 0.1


def test_accuracy_counts_the_right_colour():
    model = small("llama")
    p = binding.prompts(Words(), 0, 200, 4)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[WORDS.index("red"), 0] = 1
        offered, total = binding.accuracy(model, p)
        last = model.model(p.tokens).last_hidden_state[:, -1, 0]
    red = p.tokens.gather(1, p.answer[:, None])[:, 0] == WORDS.index("red")
    # "red" wins where the state is positive; elsewhere every other token ties at 0 and counts as a win
    there = (p.tokens.gather(1, p.colours) == WORDS.index("red")).any(1)
    expected = torch.where(last > 0, red | ~there, ~red).float().mean()
    assert abs(offered - float(expected)) < 1e-6 and total <= offered
