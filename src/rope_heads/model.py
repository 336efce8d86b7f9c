"""A GPT-J small enough to read: token embedding, parallel blocks, one attention class with its position scheme named.

P1, appendix C.2: GPTJForCausalLM from scratch with 12 layers of one head, width 128, MLP 512, exact GELU, dropout .1,
rotary embedding over all 128 dimensions of the head. `Config()` is that model with the Number task's 137 ids.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_heads import artefacts
from rope_heads.rope import PAIRINGS, plane_angles, rotary_tables, rotate

POSITIONS = ("rope", "learned", "alibi", "none")
PLANES = ("all", "fastest", "slowest")
LATER = {"later": True}  # metadata of settings that came after the first runs, see `as_dict`


@dataclass(frozen=True)
class Config:
    """Shape of a model. The defaults are the paper's (P1, appendix C.2); `d_head`, `mlp` and `rotary_dim` follow from the width when None."""

    vocab_size: int = 137  # ids of the Number task, padding included
    layers: int = 12
    heads: int = 1
    width: int = 128
    d_head: int | None = None  # width / heads
    mlp: int | None = None  # 4 x width; 0 leaves attention-only blocks
    positions: str = "rope"
    rotary_dim: int | None = None  # d_head
    base: float = 10_000.0
    pairing: str = "adjacent"  # GPT-J's layout
    context: int | None = None  # longest input; needed by learned positions only
    bias: bool = False  # on queries, keys, values and output
    dropout: float = 0.1  # on attention and residuals
    norm_eps: float = 1e-5
    init_std: float = 0.02
    nope_from: int | None = dataclasses.field(default=None, metadata=LATER)  # layers from this one up (0 first) encode no position
    drop_embeddings: bool = dataclasses.field(default=True, metadata=LATER)  # and on embeddings
    planes: str = dataclasses.field(default="all", metadata=LATER)  # rotary planes that turn: all, or the "fastest" or "slowest" quarter

    def __post_init__(self):
        for name, least in {"vocab_size": 1, "layers": 1, "heads": 1, "width": 1, "d_head": 1, "mlp": 0, "context": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.d_head is None:
            if self.width % self.heads:
                raise ValueError(f"width must be a multiple of heads unless d_head is given, got width {self.width}, heads {self.heads}")
            object.__setattr__(self, "d_head", self.width // self.heads)
        if self.mlp is None:
            object.__setattr__(self, "mlp", 4 * self.width)
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.d_head if self.positions == "rope" else 0)
        for name, known in {"positions": POSITIONS, "pairing": PAIRINGS, "planes": PLANES}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.positions == "learned" and not self.context:
            raise ValueError("learned positions need context, the longest input: pass Config(context=...)")
        if self.nope_from is not None and not 0 <= self.nope_from <= self.layers:
            raise ValueError(f"nope_from must be between 0 and {self.layers}, the number of layers, got {self.nope_from}")
        if self.positions != "rope" and (self.planes != "all" or self.nope_from is not None):
            raise ValueError(f"planes and nope_from change rotary positions, got positions = {self.positions!r}")

    def layer_angles(self, layer: int) -> Float[Tensor, "pair"] | None:
        """Angles of one layer's planes, 0 where a plane does not turn, so that plane ids stay what they are; None for the usual ones."""
        off = self.nope_from is not None and layer >= self.nope_from
        if self.positions != "rope" or not (off or self.planes != "all"):
            return None
        angles = plane_angles(self.rotary_dim // 2, self.base)
        quarter = len(angles) // 4
        still = {"all": slice(0), "fastest": slice(quarter, None), "slowest": slice(len(angles) - quarter)}[self.planes]
        angles[slice(None) if off else still] = 0
        return angles


def as_dict(settings) -> dict:
    """A configuration or recipe as plain values. Parts that came later are left out at their default, so that a run's identity stays what
    it was before they existed."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {field.name: values[field.name] for field in dataclasses.fields(settings)
            if not (field.metadata.get("later") and values[field.name] == field.default)}  # fmt: skip


class Dropout(nn.Module):
    """Inverted dropout. On a CPU its masks are 16 random bits a value from numpy's SFC64: a third of the cost of torch's Bernoulli draws.

    `reseed` ties the masks to (seed, step), so that a resumed run draws what an uninterrupted one would have drawn.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p, self.rng = p, np.random.Generator(np.random.SFC64(0))

    def reseed(self, seed: int, step: int) -> None:
        self.rng = np.random.Generator(np.random.SFC64([seed, step]))
        if torch.cuda.is_available():
            torch.cuda.manual_seed((seed << 32) + step)

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        words = self.rng.integers(0, 2**64, -(-x.numel() // 4), dtype=np.uint64)
        bits = torch.from_numpy(words.view(np.int16)[: x.numel()]).view(x.shape)
        return x * (bits >= round(self.p * 2**16) - 2**15).to(x.dtype).mul_(1 / (1 - self.p))


class Attention(nn.Module):
    """Causal multi-head attention with a named position scheme.

    `positions`: `"rope"` turns queries and keys by `angles` (radians a position, one a plane; default base^(-k/planes) over
    `rotary_dim` dimensions in the named `pairing`); `"alibi"` subtracts slope x distance; `"none"` and `"learned"` add nothing here
    (learned positions live in the embedding). `scale` multiplies the logits; default 1 / sqrt(d_head). It is the sharpness of the softmax.
    Weights: `qkv.weight` stacks W_Q, W_K, W_V, each [head * d_head, width]; `out.weight` is [width, head * d_head].
    """

    def __init__(self, width: int, heads: int = 1, d_head: int | None = None, *, positions: str = "rope", rotary_dim: int | None = None,
                 base: float = 10_000.0, angles: Tensor | None = None, pairing: str = "adjacent", bias: bool = False, causal: bool = True,
                 scale: float | None = None, dropout: nn.Module | None = None):  # fmt: skip
        super().__init__()
        self.heads, self.d_head = heads, d_head if d_head is not None else width // heads
        self.positions, self.pairing, self.causal = positions, pairing, causal
        self.dropout = dropout if dropout is not None else nn.Identity()  # on the attention pattern
        self.scale = scale if scale is not None else 1 / math.sqrt(self.d_head)
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {positions!r}")
        if pairing not in PAIRINGS:
            raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r}")
        if positions == "rope":
            if angles is None:
                rotary_dim = self.d_head if rotary_dim is None else rotary_dim
                if rotary_dim % 2 or not 2 <= rotary_dim <= self.d_head:
                    raise ValueError(f"rotary_dim must be even and between 2 and d_head = {self.d_head}, got {rotary_dim}")
                angles = plane_angles(rotary_dim // 2, base)
            if not 1 <= len(angles) <= self.d_head // 2:
                raise ValueError(f"angles must hold 1 to d_head / 2 = {self.d_head // 2} values, got {len(angles)}")
            self.angles = torch.as_tensor(angles, dtype=torch.float64)
        self._tables: tuple | None = None  # cosine and sine of the positions seen last; not part of the weights
        self.qkv = nn.Linear(width, 3 * heads * self.d_head, bias=bias)
        self.out = nn.Linear(heads * self.d_head, width, bias=bias)

    def _weight(self, which: int) -> Float[Tensor, "head d_head width"]:
        return self.qkv.weight.view(3, self.heads, self.d_head, -1)[which]

    w_q = property(lambda self: self._weight(0), doc="W_Q, [head, d_head, width]: query = W_Q x.")
    w_k = property(lambda self: self._weight(1), doc="W_K, [head, d_head, width]: key = W_K x.")
    w_v = property(lambda self: self._weight(2), doc="W_V, [head, d_head, width]: value = W_V x.")

    def tables(self, length: int, like: Tensor) -> tuple[Float[Tensor, "position pair"], Float[Tensor, "position pair"]]:
        """Cosine and sine for positions 0 .. length - 1, in fp32 at least, kept from call to call."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        kept = self._tables
        if kept is None or kept[0].shape[0] < length or kept[0].dtype != dtype or kept[0].device != like.device:
            cos, sin = rotary_tables(torch.arange(length), self.angles, dtype)
            kept = self._tables = (cos.to(like.device), sin.to(like.device))
        return kept[0][:length], kept[1][:length]

    def turn(self, x: Float[Tensor, "batch position head d_head"], length: int) -> Float[Tensor, "batch position head d_head"]:
        """Turn queries or keys, the last rows of an input of `length` tokens, by their positions."""
        if self.positions != "rope":
            return x
        cos, sin = (t[length - x.shape[1] :, None] for t in self.tables(length, x))  # [position, 1, pair], the head's axis in the middle
        return rotate(x, cos, sin, self.pairing)

    def bias_and_mask(self, queries: int, keys: int, device) -> Float[Tensor, "#head query key"] | None:
        """What is added to the logits: ALiBi's slope x distance and -inf for keys after the query."""
        q_at = torch.arange(keys - queries, keys, device=device)[:, None]  # [query, 1]
        distance = q_at - torch.arange(keys, device=device)  # [query, key]
        added = torch.zeros(1, queries, keys, device=device)
        if self.positions == "alibi":
            slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1, device=device))
            added = -slopes[:, None, None] * distance.abs()  # [head, query, key]
        return added.masked_fill(distance < 0, -torch.inf) if self.causal else added

    def project(self, x: Float[Tensor, "batch position width"], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries of the last `rows` positions, turned keys and values of all, each [batch, position, head, d_head]."""
        length, shape = x.shape[1], (self.heads, self.d_head)
        if not 1 <= rows <= length:
            raise ValueError(f"rows must be between 1 and the input's {length} positions, got {rows}")
        if rows == length:  # queries and keys turn together
            qk, v = self.qkv(x).split((2 * self.heads * self.d_head, self.heads * self.d_head), dim=-1)
            q, k = self.turn(qk.unflatten(-1, (2 * self.heads, self.d_head)), length).split(self.heads, dim=-2)
            return q, k, v.unflatten(-1, shape)
        n, b = self.heads * self.d_head, self.qkv.bias
        q = F.linear(x[:, -rows:], self.qkv.weight[:n], None if b is None else b[:n]).unflatten(-1, shape)
        k, v = F.linear(x, self.qkv.weight[n:], None if b is None else b[n:]).unflatten(-1, (2, *shape)).unbind(-3)
        return self.turn(q, length), self.turn(k, length), v

    def logits(self, x: Float[Tensor, "batch position width"], rows: int | None = None) -> Float[Tensor, "batch head query key"]:
        """Scaled attention logits of the last `rows` queries (default all), -inf where causality forbids the key."""
        rows = x.shape[1] if rows is None else rows
        q, k, _ = self.project(x, rows)
        scores = self.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)  # [batch, head, query, key]
        return scores + self.bias_and_mask(rows, x.shape[1], x.device).to(scores.dtype)

    def forward(self, x: Float[Tensor, "batch position width"], rows: int | None = None) -> Float[Tensor, "batch query width"]:
        """Output for the last `rows` positions (default all)."""
        q, k, v = self.project(x, x.shape[1] if rows is None else rows)
        return self.out(self.mix(q, k, v).flatten(-2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "batch query head d_head"]:
        """Softmax-weighted mean of the values. Long inputs go through the fused kernel, which keeps no query x key matrix."""
        queries, keys = q.shape[1], k.shape[1]
        drops = self.training and getattr(self.dropout, "p", 0) > 0  # the fused kernel would draw masks of its own
        if drops or keys <= 64:
            # in fp32 whatever the autocast: at 17 tokens the product is cheap, and logits near 75 lose their differences in bf16
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = (t.transpose(1, 2).to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))  # [batch, head, position, d_head]
                scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale + self.bias_and_mask(queries, keys, q.device).to(q.dtype)
                return torch.matmul(self.dropout(scores.softmax(-1)), v).transpose(1, 2)
        q, k, v = (t.transpose(1, 2).to(v.dtype) for t in (q, k, v))
        whole = queries == keys and self.causal and self.positions != "alibi"
        mask = None if whole else self.bias_and_mask(queries, keys, q.device).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, scale=self.scale).transpose(1, 2)


class Block(nn.Module):
    """GPT-J's parallel block, y = x + attention(norm x) + mlp(norm x); with mlp = 0 the attention-only block of the toy models."""

    def __init__(self, c: Config, dropout: Dropout, layer: int):
        super().__init__()
        self.norm = nn.LayerNorm(c.width, c.norm_eps)
        self.attention = Attention(c.width, c.heads, c.d_head, positions=c.positions, rotary_dim=c.rotary_dim, base=c.base,
                                   angles=c.layer_angles(layer), pairing=c.pairing, bias=c.bias, dropout=dropout)  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(c.width, c.mlp), nn.GELU(), nn.Linear(c.mlp, c.width)) if c.mlp else None
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "batch position width"], rows: int | None = None) -> Float[Tensor, "batch query width"]:
        h = self.norm(x)
        attended = self.dropout(self.attention(h, rows))
        if rows is not None:  # the last rows are wanted alone; slicing costs a copy in the backward pass, so not otherwise
            x, h = x[:, -rows:], h[:, -rows:]
        return x + attended if self.mlp is None else x + attended + self.dropout(self.mlp(h))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, untied unembedding. Tokens are int64 ids [batch, position]; logits are [batch, position, id]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.width)
        self.position_embedding = nn.Embedding(c.context, c.width) if c.positions == "learned" else None
        self.dropout = Dropout(c.dropout)  # one for all blocks, so that one call seeds every mask
        self.blocks = nn.ModuleList(Block(c, self.dropout, layer) for layer in range(c.layers))
        self.norm = nn.LayerNorm(c.width, c.norm_eps)
        self.unembedding = nn.Linear(c.width, c.vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=c.init_std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position width"]:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            if tokens.shape[1] > self.config.context:
                raise ValueError(f"learned positions end at {self.config.context} tokens, got an input of {tokens.shape[1]}")
            x = x + self.position_embedding.weight[: tokens.shape[1]]
        return self.dropout(x) if self.config.drop_embeddings else x

    def forward(self, tokens: Int[Tensor, "batch position"], last: bool = False) -> Float[Tensor, "batch query vocab"]:
        """Logits at every position; with `last` at the query alone, [batch, 1, id]: the last block then works on one row."""
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, 1 if last else None)
        return self.unembedding(self.norm(x))

    def layer_inputs(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "layer batch position width"]:
        """The residual stream entering each block."""
        x, inputs = self.embed(tokens), []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        return torch.stack(inputs)

    def attention(self, layer: int, hidden: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch head query key"]:
        """Attention pattern of one layer for the residual stream `hidden` entering it; rows sum to 1."""
        block = self.blocks[layer]
        return block.attention.logits(block.norm(hidden)).softmax(-1)

    def save(self, path: str | os.PathLike) -> None:
        """Write weights and configuration as safetensors, atomically, with a checksum that `load` verifies."""
        artefacts.write_tensors(path, self.state_dict(), {"config": json.dumps(as_dict(self.config))})

    @staticmethod
    def load(path: str | os.PathLike) -> "Transformer":
        """Read a file of `save`, in evaluation mode and fp32. ValueError names the file when it is truncated, altered or something else."""
        tensors, metadata = artefacts.read_tensors(path)
        if "config" not in metadata:
            raise ValueError(f"{path} holds no model of this project: its metadata lacks config")
        model = Transformer(Config(**json.loads(metadata["config"])))
        model.load_state_dict({name: t.float() for name, t in tensors.items()})
        return model.eval()

    def to_hugging_face(self, n_positions: int = 128):
        """The same model as a transformers `GPTJForCausalLM` (evaluation mode). Needs the package transformers."""
        from rope_heads.hugging_face import to_gptj

        return to_gptj(self, n_positions)

    @staticmethod
    def from_hugging_face(model) -> "Transformer":
        """This class with the weights of a transformers `GPTJForCausalLM` (evaluation mode)."""
        from rope_heads.hugging_face import from_gptj

        return from_gptj(model)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
