"""Phase ablation against P2's formula written out, and against a whole run of transformers with its attention replaced."""

import pytest
import torch
import transformers
from test_pretrained import small

from rope_heads.detectors import repeated_tokens
from rope_heads.phase_ablation import PhaseAblation, output_change, random_change, sine_part
from rope_heads.pretrained import extract, layers
from rope_heads.spectra import rope_parts

ROTARY = ("llama", "gpt_neox", "gptj")


def written_out(block, x, head):
    """scale x sum_t sin((j - i) theta_t) n_i Im M_t n_j with whole matrices, n = the norm's output; weights only."""
    a = block.attention
    parts = rope_parts(a.w_q[head].T, a.w_k[head].T, a.pairing, 2 * len(a.angles))
    where = torch.arange(x.shape[1], dtype=torch.float64)
    total = 0
    for plane, angle in enumerate(a.angles):
        total = total + torch.sin((where[None] - where[:, None]) * angle) * (x.double() @ parts.imaginary(plane) @ x.double().mT)
    return a.scale * total


@pytest.mark.parametrize("family", ROTARY)
def test_the_sine_part_is_the_papers_formula_and_odd_where_tokens_are_equal(family):
    block = extract(small(family)).blocks[1]
    x = torch.randn(2, 9, 24)
    found = sine_part(block.attention, x)
    for head in range(block.attention.heads):
        expected = written_out(block, x, head)
        assert expected.std() > 0.1
        torch.testing.assert_close(found[:, head].double(), expected, atol=1e-4, rtol=1e-4)
    same = sine_part(block.attention, x[:, :1].expand(-1, 9, -1))
    torch.testing.assert_close(same, -same.mT, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ROTARY)
def test_without_it_the_weights_part_of_the_kernel_is_even(family):
    """One token repeated, biases off: the logit of key i + D must equal that of key i - D."""
    block = extract(small(family)).blocks[0]
    with torch.no_grad():
        block.attention.qkv.bias.zero_()
    block.attention.causal = False
    x = torch.randn(1, 1, 24).expand(-1, 11, -1)
    logits = block.attend(x)
    assert (logits[0, :, 5] - logits[0, :, 5].flip(-1)).abs().max() > 0.1
    even = (logits - sine_part(block.attention, x))[0, :, 5]
    torch.testing.assert_close(even, even.flip(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("layer, head", [(0, 1), (1, 2)])
def test_the_run_from_the_cached_residual_equals_a_whole_run_with_that_head_changed(family, layer, head):
    """Theirs: an attention function of our own inside transformers, which changes one head's scores and nothing else."""
    model = small(family)
    tokens = repeated_tokens(4, 6, 60, bos=1)
    work = PhaseAblation(model, extract(model), tokens)
    change = written_out(work.heads.blocks[layer], work.heads.blocks[layer].norm(work.residuals[layer]), head).float().tril()
    found = {"sine": work.losses(layer, head), "none": work.losses(layer, head, torch.zeros_like(change))}
    modules = [next(m for n, m in x.named_modules() if n in ("self_attn", "attention", "attn")) for x in layers(model)]

    def attention(module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = scaling * query @ key.mT
        if module is modules[layer]:
            scores[:, head] -= change
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    def losses():
        with torch.no_grad():
            logits = model(tokens).logits
        each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")  # loss of tokens 1 to 12
        return each[:, 7:].mean(1), each[:, 1:6].mean(1)

    plain, first = losses()
    torch.testing.assert_close(work.baseline, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(work.first_copy, first, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["none"], plain, atol=1e-4, rtol=1e-4)
    transformers.AttentionInterface.register("changed", attention)
    model.set_attn_implementation("changed")
    changed, _ = losses()
    assert (changed - plain).abs().max() > 1e-3
    torch.testing.assert_close(found["sine"], changed, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gaussian", "shuffled"])
def test_random_changes_keep_every_rows_norm_and_touch_no_later_key(kind):
    part = torch.randn(3, 8, 8)
    found = random_change(part, kind, torch.Generator().manual_seed(0))
    assert torch.equal(found, found.tril()) and not torch.allclose(found, part.tril())
    torch.testing.assert_close(found.norm(dim=-1), part.tril().norm(dim=-1), atol=1e-5, rtol=1e-5)
    if kind == "shuffled":
        for row in range(8):
            torch.testing.assert_close(found[:, row, : row + 1].sort(-1).values, part[:, row, : row + 1].sort(-1).values, atol=0, rtol=0)
    with pytest.raises(ValueError, match="kind must be one of .*, got 'sham'"):
        random_change(part, "sham", torch.Generator())


def test_a_change_that_a_softmax_cannot_see_changes_nothing():
    block = extract(small("llama")).blocks[1]
    x = torch.randn(2, 9, 24)
    assert output_change(block, x, 3, torch.randn(2, 9, 1).expand(-1, -1, 9)).abs().max() < 1e-6


def test_taking_out_the_even_part_leaves_the_phase_and_taking_out_all_leaves_uniform_attention():
    model = small("llama")
    work = PhaseAblation(model, extract(model), repeated_tokens(2, 4, 60, bos=1))
    logits, sines = work.logits(1, 3), work.sines(1, 3)
    block, x = work.heads.blocks[1], work.heads.blocks[1].norm(work.residuals[1])
    a = block.attention
    v = x @ a.w_v[3].T
    causal = torch.ones(9, 9).tril()
    uniform = causal / causal.sum(-1, keepdim=True)
    expected = (uniform - block.attend(x)[:, 3].softmax(-1)) @ v @ a.out.weight[:, 12:16].T
    assert expected.std() > 0.1
    torch.testing.assert_close(output_change(block, x, 3, logits), expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(logits, work.logits(1, 3)) and not torch.allclose(work.losses(1, 3, logits), work.losses(1, 3, logits - sines))


def test_models_without_a_phase_are_refused():
    model = small("gpt2")
    with pytest.raises(ValueError, match="only rotary heads have a phase, got positions = 'learned'"):
        PhaseAblation(model, extract(model), repeated_tokens(1, 3, 60, bos=0))
    with pytest.raises(ValueError, match="only rotary heads have a phase"):
        sine_part(extract(model).blocks[0].attention, torch.zeros(1, 2, 24))
