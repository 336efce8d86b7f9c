"""Weights to and from transformers' GPTJForCausalLM, the independent implementation that ours is checked against."""

import torch

from rope_heads.model import Config, Transformer


def _names(layer: int) -> dict[str, str]:
    """Our parameter names of one block -> GPT-J's, where one stands for one."""
    ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
    names = {"attention.out.weight": "attn.out_proj.weight"}
    for a, b in (("norm", "ln_1"), ("mlp.0", "mlp.fc_in"), ("mlp.2", "mlp.fc_out")):
        names |= {f"{a}.weight": f"{b}.weight", f"{a}.bias": f"{b}.bias"}
    return {ours + a: theirs + b for a, b in names.items()}


ENDS = {"embedding.weight": "transformer.wte.weight", "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias",
        "unembedding.weight": "lm_head.weight", "unembedding.bias": "lm_head.bias"}  # fmt: skip


def to_gptj(model: Transformer, n_positions: int):
    """GPTJForCausalLM with the weights of `model`. ValueError when GPT-J cannot express the configuration."""
    from transformers import GPTJConfig, GPTJForCausalLM

    c = model.config
    wanted = {"positions": "rope", "pairing": "adjacent", "bias": False, "base": 10_000.0, "d_head": c.width // c.heads, "nope_from": None, "planes": "all"}
    for name, value in wanted.items():
        if getattr(c, name) != value:
            raise ValueError(f"GPT-J needs {name} = {value!r}, got {getattr(c, name)!r}")
    if not c.mlp:
        raise ValueError("GPT-J has an MLP in every block, got mlp = 0")
    theirs = GPTJForCausalLM(GPTJConfig(
        vocab_size=c.vocab_size, n_positions=n_positions, n_embd=c.width, n_layer=c.layers, n_head=c.heads, rotary_dim=c.rotary_dim,
        n_inner=c.mlp, activation_function="gelu", resid_pdrop=c.dropout, embd_pdrop=c.dropout * c.drop_embeddings, attn_pdrop=c.dropout,
        layer_norm_epsilon=c.norm_eps, initializer_range=c.init_std, tie_word_embeddings=False, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_implementation="eager"))  # fmt: skip
    state = model.state_dict()
    mapped = {b: state[a] for a, b in ENDS.items()}
    for i in range(c.layers):
        mapped |= {b: state[a] for a, b in _names(i).items()}
        for part, weight in zip("qkv", state[f"blocks.{i}.attention.qkv.weight"].chunk(3)):
            mapped[f"transformer.h.{i}.attn.{part}_proj.weight"] = weight
    theirs.load_state_dict(mapped)
    return theirs.eval()


def from_gptj(theirs) -> Transformer:
    """Our model with the weights of a GPTJForCausalLM whose activation is the exact GELU. ValueError otherwise."""
    c = theirs.config
    if c.activation_function != "gelu":
        raise ValueError(f"the block here uses the exact GELU, got activation_function = {c.activation_function!r}")
    model = Transformer(Config(
        vocab_size=c.vocab_size, layers=c.n_layer, heads=c.n_head, width=c.n_embd, mlp=c.n_inner or 4 * c.n_embd,
        rotary_dim=c.rotary_dim or c.n_embd // c.n_head, dropout=c.resid_pdrop, drop_embeddings=c.embd_pdrop == c.resid_pdrop, norm_eps=c.layer_norm_epsilon,
        init_std=c.initializer_range))  # fmt: skip
    source = {name: t.float() for name, t in theirs.state_dict().items()}
    mapped = {a: source[b] for a, b in ENDS.items()}
    for i in range(c.n_layer):
        mapped |= {a: source[b] for a, b in _names(i).items()}
        mapped[f"blocks.{i}.attention.qkv.weight"] = torch.cat([source[f"transformer.h.{i}.attn.{part}_proj.weight"] for part in "qkv"])
    model.load_state_dict(mapped)
    return model.eval()
