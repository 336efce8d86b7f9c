"""The model against Hugging Face's GPT-J, an implementation that shares no line with ours: logits, states, gradients, counts."""

import pytest
import torch
from models import built, ids, scatter

from rope_heads.model import Config, Transformer, count_parameters


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


SHAPES = [
    {"layers": 12, "heads": 1, "width": 128, "vocab_size": 137, "init_std": 0.1},  # the paper's
    {"heads": 4, "width": 32, "rotary_dim": 4},
    {"heads": 2, "width": 24, "rotary_dim": 12},
    {"heads": 3, "width": 30, "rotary_dim": 2, "mlp": 17, "layers": 1},
    {"heads": 2, "width": 10, "rotary_dim": 4, "layers": 3},  # an odd d_head
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch, length", [(1, 1), (3, 2), (2, 17), (1, 65), (2, 101)])
def test_logits_equal_hugging_faces(shape, batch, length):
    ours = built(**shape)
    theirs = ours.to_hugging_face()
    tokens = ids(ours, batch, length)
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, ours(tokens)
        assert logits.std() > 0.3 and logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours(tokens, last=True), expected[:, -1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_hugging_faces_weights_come_over(shape):
    from transformers import GPTJConfig, GPTJForCausalLM

    theirs = GPTJForCausalLM(GPTJConfig(
        vocab_size=41, n_positions=64, n_embd=shape["width"], n_layer=2, n_head=shape["heads"], rotary_dim=shape.get("rotary_dim", shape["width"]),
        activation_function="gelu", initializer_range=0.3, tie_word_embeddings=False, layer_norm_epsilon=1e-3, bos_token_id=None,
        eos_token_id=None)).eval()  # fmt: skip
    scatter(theirs)
    ours, tokens = Transformer.from_hugging_face(theirs), torch.randint(41, (3, 33))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
        again = ours.to_hugging_face(n_positions=64).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in theirs.state_dict().items())


def test_long_inputs_equal_hugging_faces():
    """17 + 1,000 tokens: theirs needs a larger table, ours needs nothing."""
    ours = built(**SHAPES[0])
    tokens = ids(ours, 1, 1_017)
    with torch.no_grad():
        expected = ours.to_hugging_face(n_positions=2_048)(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours(tokens, last=True), expected[:, -1:], atol=1e-4, rtol=0)


def test_inner_states_equal_hugging_faces():
    ours = built(**SHAPES[1])
    tokens = ids(ours, 2, 17)
    with torch.no_grad():
        theirs = ours.to_hugging_face()(tokens, output_hidden_states=True, output_attentions=True)
        inputs = ours.layer_inputs(tokens)  # [layer, batch, position, width]
        for layer in range(2):
            pattern = ours.attention(layer, inputs[layer])
            torch.testing.assert_close(inputs[layer], theirs.hidden_states[layer], atol=1e-4, rtol=0)
            torch.testing.assert_close(pattern, theirs.attentions[layer], atol=1e-5, rtol=0)


def test_gradients_equal_hugging_faces():
    """The training path: loss on the last token only, where the last block works on one row."""
    ours = built(**SHAPES[1]).train()
    theirs = ours.to_hugging_face().train()
    tokens, answers = ids(ours, 5, 17), torch.randint(50, (5,))
    torch.nn.functional.cross_entropy(ours(tokens, last=True)[:, 0], answers).backward()
    torch.nn.functional.cross_entropy(theirs(tokens).logits[:, -1], answers).backward()
    for i, block in enumerate(theirs.transformer.h):
        expected = torch.cat([getattr(block.attn, f"{part}_proj").weight.grad for part in "qkv"])
        torch.testing.assert_close(ours.blocks[i].attention.qkv.weight.grad, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.blocks[i].mlp[0].weight.grad, block.mlp.fc_in.weight.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.blocks[i].norm.bias.grad, block.ln_1.bias.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.transformer.wte.weight.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocab_size, parameters", [(137, 2_405_513), (129, 2_403_457)])
def test_parameter_counts_are_the_papers(vocab_size, parameters):
    model = Transformer(Config(vocab_size=vocab_size))
    assert count_parameters(model) == parameters
    assert model.to_hugging_face().num_parameters() == parameters


@pytest.mark.parametrize(
    "change", [{"pairing": "half"}, {"bias": True}, {"base": 500.0}, {"d_head": 8}, {"mlp": 0}, {"positions": "none"}], ids=str
)
def test_what_gptj_cannot_express_is_refused(change):
    with pytest.raises(ValueError, match=f"GPT-J .*{next(iter(change))}"):
        built(**change).to_hugging_face()


def test_another_activation_is_refused():
    from transformers import GPTJConfig, GPTJForCausalLM

    theirs = GPTJForCausalLM(GPTJConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=1, rotary_dim=8, bos_token_id=None, eos_token_id=None))
    with pytest.raises(ValueError, match="exact GELU, got activation_function = 'gelu_new'"):
        Transformer.from_hugging_face(theirs)


def test_what_the_first_papers_code_sets_without_saying_so():
    """Its name for the dropout on embeddings is none of GPT-J's, which keeps its own value, 0; its Trainer clips gradients by default."""
    import dataclasses

    from transformers import GPTJConfig, TrainingArguments

    from rope_heads.recipes import RECIPES

    theirs = GPTJConfig(resid_pdrop=0.1, attn_pdrop=0.1, embed_pdrop=0.1)
    assert (theirs.resid_pdrop, theirs.attn_pdrop, theirs.embd_pdrop) == (0.1, 0.1, 0.0)
    clip = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}["max_grad_norm"]
    paper = RECIPES["paper"]
    assert (paper.dropout, paper.clip) == (theirs.attn_pdrop, clip) and paper.drop_embeddings, "the text drops embeddings too, and so do we"
