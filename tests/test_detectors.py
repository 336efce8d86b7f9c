"""Detectors against attention that transformers itself returns, against hand-made heads, and K-composition against whole matrices."""

import pytest
import torch
from test_pretrained import LENGTH, SMALL, run, small

from rope_heads.detectors import DETECTORS, common_words, detect, hidden_states, k_composition, repeated_tokens, start_token
from rope_heads.pretrained import Block, Heads, extract, layers, norm_of


def test_sequences_repeat_a_uniform_draw_after_the_first_token():
    tokens = repeated_tokens(400, 5, 7, bos=9)
    assert tokens.shape == (400, 11) and (tokens[:, 0] == 9).all() and torch.equal(tokens[:, 1:6], tokens[:, 6:])
    counts = tokens[:, 1:6].flatten().bincount(minlength=7)
    assert len(counts) == 7 and (counts - 2000 / 7).abs().max() < 5 * (2000 / 7) ** 0.5
    assert torch.equal(tokens[:3], repeated_tokens(3, 5, 7, bos=9)) and not torch.equal(tokens[:3], repeated_tokens(3, 5, 7, bos=9, seed=1))
    assert set(repeated_tokens(20, 5, [3, 8], bos=0)[:, 1:].flatten().tolist()) == {3, 8}
    with pytest.raises(ValueError, match="length >= 2, got 3 and 1"):
        repeated_tokens(3, 1, 7, bos=0)


def test_common_words_are_the_first_of_a_space_and_letters():
    words = ["!", "a", "\u0120the", "\u01202", "\u0120of", " a", "\u0120", "\u0120caf\u00e9", "\u0120x"]
    assert common_words(words, 4) == [2, 4, 5, 8]
    with pytest.raises(ValueError, match="holds 4 such words, asked for 5"):
        common_words(words, 5)


@pytest.mark.parametrize("family", [*SMALL, "whisper"])
def test_detectors_equal_means_over_the_attention_that_transformers_returns(family):
    model = small(family)
    tokens = repeated_tokens(3, LENGTH // 2, 60, bos=1)
    n = LENGTH // 2
    with torch.no_grad():
        if family == "whisper":
            features = torch.full((3, model.config.num_mel_bins, 2 * model.config.max_source_positions), -1.5)
            patterns = model(input_features=features, decoder_input_ids=tokens, output_attentions=True).decoder_attentions
        else:
            patterns = run(model, tokens, output_attentions=True).attentions
    expected = {name: torch.zeros(2, patterns[0].shape[1]) for name in (*DETECTORS, "first")}
    for layer, pattern in enumerate(patterns):
        for p in range(n + 1, 2 * n + 1):
            for name, key in {"previous": p - 1, "duplicate": p - n, "induction": p - n + 1, "first": 0}.items():
                expected[name][layer] += pattern[:, :, p, key].mean(0) / n
    found = detect(model, extract(model), tokens, batch=2)  # a last batch that is not full
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
        assert value.std() > 1e-3
    assert (found["previous_sd"] > 0).all() and not any(norm_of(layer)._forward_hooks for layer in layers(model))


def test_inputs_that_the_model_does_not_have_are_refused():
    model = small("gpt2")  # 60 ids, 40 positions
    with pytest.raises(ValueError, match="tokens must be 0 to 59, got 60"):
        hidden_states(model, torch.tensor([[60, 1]]))
    with pytest.raises(ValueError, match="tokens must be 0 to 59, got -1"):
        hidden_states(model, torch.tensor([[3, -1]]))
    for family in ("gpt2", "opt", "gpt_neo", "gptj", "whisper"):
        with pytest.raises(ValueError, match="41 tokens are too long for this model, which takes 40"):
            hidden_states(small(family), torch.ones(1, 41, dtype=torch.long))
    for none in (0, -3, []):
        with pytest.raises(ValueError, match="tokens must be a number of ids >= 1"):
            repeated_tokens(1, 3, none, bos=0)


def test_other_inputs_are_refused():
    model = small("llama")
    with pytest.raises(ValueError, match="must be \\[BOS, r, r\\]"):
        detect(model, extract(model), torch.arange(7)[None])


def test_k_composition_equals_the_norms_of_whole_matrices():
    for family in ("gpt2", "llama"):
        heads = extract(small(family))
        found = k_composition(heads, 1, 2)
        assert found.shape == (1, heads.heads)
        (w_q, w_k), (w_v, w_o) = heads.blocks[1].folded(), heads.blocks[0].written()
        m = w_q[2] @ w_k[2].T
        centre = torch.eye(24, dtype=torch.float64) - (1 / 24 if heads.blocks[0].centred else 0)
        for head in range(heads.heads):
            ov = w_v[head] @ w_o[head] @ centre
            expected = (m @ ov.T).norm() / (m.norm() * ov.norm())
            torch.testing.assert_close(found[0, head], expected, atol=1e-10, rtol=1e-8)
    with pytest.raises(ValueError, match="layer must be 1 to 1"):
        k_composition(heads, 0, 0)


def test_a_head_that_reads_exactly_what_another_writes_composes_fully():
    heads = extract(small("llama"))
    reader, writer = heads.blocks[1].attention, heads.blocks[0].attention
    d = reader.d_head
    with torch.no_grad():
        heads.blocks[0].norm.weight.fill_(1)
        heads.blocks[1].norm.weight.fill_(1)
        e = torch.eye(24)
        for weight, rows in ((reader.qkv.weight, 0), (reader.qkv.weight, reader.heads), (writer.qkv.weight, 2 * writer.heads)):
            weight[rows * d : rows * d + d] = e[:d]  # head 0 of queries, keys, values: the first d_head directions
        writer.out.weight[:, :d] = e[:, :d]
        writer.out.weight[:, d : 2 * d] = e[:, d : 2 * d]  # head 1 writes elsewhere
    found = k_composition(Heads("", "llama", (Block(heads.blocks[0].norm, writer), Block(heads.blocks[1].norm, reader))), 1, 0)
    assert abs(float(found[0, 0]) - d**-0.5) < 1e-9 and float(found[0, 1]) < 1e-9  # d_head equal singular values: 1 / sqrt(d_head)


def test_first_tokens_and_silence():
    whisper = small("whisper")
    assert start_token(whisper) == 1 and start_token(small("llama", bos_token_id=None, eos_token_id=5)) == 5 and start_token(small("llama")) == 0
    states = hidden_states(whisper, repeated_tokens(2, 3, 60, bos=1), output_hidden_states=True)
    assert len(states.hidden_states) == 3 and states.last_hidden_state.shape == (2, 7, 24)
