"""Whisper from a CTranslate2 file: a short reader of the binary format, and the names of its tensors in transformers.

The file is a list of named arrays: version, name of the model kind, revision, number of arrays; each array as name, rank, sizes, type, bytes;
then aliases. Nothing in it is code.
"""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from torch import nn

VERSION = 6  # of the container
TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
DECODER = {  # names in transformers -> names in the file; {i} is the layer
    "embed_tokens": "decoder/embeddings", "embed_positions.weight": "decoder/position_encodings/encodings", "layer_norm": "decoder/layer_norm",
}  # fmt: skip
ENCODER = {"conv1": "encoder/conv1", "conv2": "encoder/conv2", "embed_positions.weight": "encoder/position_encodings/encodings",
           "layer_norm": "encoder/layer_norm"}  # fmt: skip


def read_variables(path: str | Path) -> dict[str, np.ndarray]:
    """{name: array} of a CTranslate2 file. ValueError names a file that is cut, altered in its structure or of another version."""
    content, at = Path(path).read_bytes(), 0

    def take(kind: str) -> tuple:
        nonlocal at
        values = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(f"<{kind}")
        return values

    def word() -> str:
        return take(f"{take('H')[0]}s")[0].rstrip(b"\0").decode()

    try:
        (version,) = take("I")
        if version != VERSION:
            raise ValueError(f"version {version}, expected {VERSION}")
        word()
        _, count = take("II")
        arrays = {}
        for _ in range(count):
            name, (rank,) = word(), take("B")
            shape, (kind, size) = take(f"{rank}I"), take("BI")
            dtype = np.dtype(TYPES[kind])
            if size != dtype.itemsize * int(np.prod(shape)):
                raise ValueError(f"{name} has {size} bytes, expected {dtype.itemsize} x {shape}")
            arrays[name] = np.frombuffer(content, dtype, int(np.prod(shape)), at).reshape(shape)
            at += size
        arrays |= {alias: arrays[name] for alias, name in ((word(), word()) for _ in range(take("I")[0]))}
        if at != len(content):
            raise ValueError(f"{len(content) - at} bytes follow the last array")
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a CTranslate2 file of version {VERSION} ({error}): install it again") from None
    return arrays


def _attention(prefix: str, own: str, cross: bool = False) -> dict[str, tuple[str, int, int]]:
    """{name in transformers: (name in the file, part, parts)}: the file stacks query, key and value, or key and value of cross-attention."""
    if cross:
        parts = {"q_proj": ("linear_0", 0, 1), "k_proj": ("linear_1", 0, 2), "v_proj": ("linear_1", 1, 2), "out_proj": ("linear_2", 0, 1)}
    else:
        parts = {"q_proj": ("linear_0", 0, 3), "k_proj": ("linear_0", 1, 3), "v_proj": ("linear_0", 2, 3), "out_proj": ("linear_1", 0, 1)}
    return {f"{own}.{name}": (f"{prefix}/{file}", part, of) for name, (file, part, of) in parts.items()}


def to_transformers(arrays: dict[str, np.ndarray], layers: dict[str, int]) -> dict[str, torch.Tensor]:
    """State of a `WhisperForConditionalGeneration` with layers {"encoder": n, "decoder": n}, in fp32."""
    names = {f"encoder.{name}": (file, 0, 1) for name, file in ENCODER.items()} | {f"decoder.{name}": (file, 0, 1) for name, file in DECODER.items()}
    for side in ("encoder", "decoder"):
        for i in range(layers[side]):
            own, file = f"{side}.layers.{i}", f"{side}/layer_{i}"
            names |= _attention(f"{file}/self_attention", f"{own}.self_attn") | {f"{own}.self_attn_layer_norm": (f"{file}/self_attention/layer_norm", 0, 1)}
            if side == "decoder":
                names |= _attention(f"{file}/attention", f"{own}.encoder_attn", cross=True)
                names[f"{own}.encoder_attn_layer_norm"] = (f"{file}/attention/layer_norm", 0, 1)
            names |= {f"{own}.fc1": (f"{file}/ffn/linear_0", 0, 1), f"{own}.fc2": (f"{file}/ffn/linear_1", 0, 1)}
            names[f"{own}.final_layer_norm"] = (f"{file}/ffn/layer_norm", 0, 1)
    state = {}
    for name, (file, part, of) in names.items():
        for kind, ends in {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}.items():
            found = file if file in arrays else next((f"{file}/{end}" for end in ends if f"{file}/{end}" in arrays), None)
            if found is None or name.endswith(".weight") and kind == "bias":
                continue
            if not np.issubdtype(arrays[found].dtype, np.floating):
                raise ValueError(f"{found} must hold fp16 or fp32, got {arrays[found].dtype}: convert the model without quantization")
            own = name if name.endswith(".weight") else f"{name}.{kind}"
            if not own.endswith("k_proj.bias"):  # zero in the file, absent in the model
                state[f"model.{own}"] = torch.from_numpy(np.split(arrays[found].astype(np.float32), of)[part].copy())
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return state


def read_whisper(path: str | Path) -> nn.Module:
    """transformers' `WhisperForConditionalGeneration` with the weights of a CTranslate2 file, fp32, evaluation mode. Shapes are read off the arrays.

    ValueError names a file that holds no whole Whisper, or one whose weights are quantized.
    """
    arrays, special = read_variables(path), special_tokens(path)
    try:
        return _whisper(arrays, special)
    except (KeyError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        told = " ".join(str(error).split())  # torch lists every tensor that is wrong
        raise ValueError(f"{path} cannot be read as a Whisper model ({type(error).__name__}: {told[:200]}): install it again") from None


def _whisper(arrays: dict[str, np.ndarray], special: dict[str, int]) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    vocabulary, width = arrays["decoder/embeddings/weight"].shape
    layers = {side: sum(name.startswith(f"{side}/layer_") and name.endswith("/ffn/linear_0/weight") for name in arrays) for side in ("encoder", "decoder")}
    config = WhisperConfig(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers["encoder"], decoder_layers=layers["decoder"],
        encoder_attention_heads=int(arrays["encoder/num_heads"]), decoder_attention_heads=int(arrays["decoder/num_heads"]),
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, num_mel_bins=arrays["encoder/conv1/weight"].shape[1],
        max_source_positions=len(arrays["encoder/position_encodings/encodings"]), max_target_positions=len(arrays["decoder/position_encodings/encodings"]),
        attn_implementation="eager", **special)  # fmt: skip
    with torch.random.fork_rng():
        model = WhisperForConditionalGeneration(config)
    model.load_state_dict(to_transformers(arrays, layers))
    return model.eval().requires_grad_(False)


def special_tokens(path: str | Path) -> dict[str, int]:
    """Ids of the tokens that begin and end a transcript, from the vocabulary beside the weights."""
    words = vocabulary(path)
    try:
        end, start = words.index("<|endoftext|>"), words.index("<|startoftranscript|>")
    except ValueError:
        raise ValueError(f"{Path(path).parent}: the vocabulary lacks <|endoftext|> or <|startoftranscript|>, this is no Whisper: install it again") from None
    return {"pad_token_id": end, "eos_token_id": end, "bos_token_id": end, "decoder_start_token_id": start}


def vocabulary(path: str | Path) -> list[str]:
    """The tokens of a CTranslate2 folder, by id, in the byte-level spelling of GPT-2 (a leading space is written \u0120)."""
    folder = Path(path).parent
    listed = folder / "vocabulary.json"
    file = listed if listed.is_file() else folder / "vocabulary.txt"
    try:
        text = file.read_text(encoding="utf-8")
        words = json.loads(text) if file == listed else text.removesuffix("\n").split("\n")
    except ValueError as error:  # also bytes that are no text
        raise ValueError(f"{file} cannot be read as a vocabulary ({error}): install it again") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{file} must hold a list of words: install it again")
    return words
