"""Phase ablation: take the sine part out of one head's logits and see what induction loses (P2, its section on phase ablation).

A rotary head's logit is an even and an odd function of the offset D = key - query, plane by plane:
    scale x (cos(D theta_t) n_i Re M_t n_j + sin(D theta_t) n_i Im M_t n_j),
with n the normalised residual. Subtracting the sines leaves a head that cannot tell before from after by angle. Biases stay as they are:
the sines are those of the weights alone. The rest of the model runs on from the residual stream cached at that layer.
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_heads.detectors import hidden_states
from rope_heads.model import Attention
from rope_heads.pretrained import Block, decoder, layers
from rope_heads.rope import rotate

CONTROLS = ("gaussian", "shuffled")


def sine_part(attention: Attention, x: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch head query key"]:
    """Part of the scaled logits that is odd in the offset, for the norm's output x: half the difference between turning forward and backward."""
    if attention.positions != "rope":
        raise ValueError(f"only rotary heads have a phase, got positions = {attention.positions!r}")
    q, k = (torch.einsum("bpw,hdw->bphd", x, w) for w in (attention.w_q, attention.w_k))
    cos, sin = (t[:, None] for t in attention.tables(x.shape[1], x))  # [position, 1, pair]
    forward, backward = (
        torch.einsum("bqhd,bkhd->bhqk", *(rotate(y, cos, turn, attention.pairing) for y in (q, k))) for turn in (sin, -sin)
    )
    return attention.scale / 2 * (forward - backward)


def random_change(part: Float[Tensor, "batch query key"], kind: str, generator: torch.Generator) -> Float[Tensor, "batch query key"]:
    """A random change of logits with the norm that `part` has in every row, counted over the keys that the query may see.

    "gaussian": a random direction. "shuffled": the row's own values in random order, so that mean and spread stay too.
    """
    if kind not in CONTROLS:
        raise ValueError(f"kind must be one of {CONTROLS}, got {kind!r}")
    part = part.tril()
    noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
    if kind == "gaussian":
        noise = noise.tril()
        return noise * part.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    hidden = torch.ones(part.shape[-2:], dtype=torch.bool).triu(1)
    return part.gather(-1, noise.masked_fill(hidden, math.inf).argsort(-1)).tril()


def output_change(block: Block, x: Float[Tensor, "batch position width"], head: int, subtracted: Float[Tensor, "batch query key"],
                  logits: Float[Tensor, "batch query key"] | None = None) -> Float[Tensor, "batch position width"]:  # fmt: skip
    """How the layer's attention output changes when `subtracted` is taken from one head's logits (`logits`: that head's, when known)."""
    attention = block.attention
    logits = block.attend(x)[:, head] if logits is None else logits
    rows = slice((2 * attention.heads + head) * attention.d_head, (2 * attention.heads + head + 1) * attention.d_head)
    v = F.linear(x, attention.qkv.weight[rows], attention.qkv.bias[rows])  # [batch, position, d_head]
    change = (logits - subtracted).softmax(-1) - logits.softmax(-1)
    return (change @ v) @ attention.out.weight.unflatten(1, (attention.heads, -1))[:, head].T


def attention_module(layer: nn.Module) -> nn.Module:
    """The module of a layer whose first output is what all its heads together write."""
    return next(getattr(layer, name) for name in ("self_attn", "attention", "attn") if hasattr(layer, name))


@contextlib.contextmanager
def beginning_at(model: nn.Module, layer: int):
    """Within it the model's embedding feeds `layer` directly: earlier layers are left out."""
    stack, whole = decoder(model), layers(model)
    name = "h" if hasattr(stack, "h") else "layers"
    setattr(stack, name, whole[layer:])
    try:
        yield stack
    finally:
        setattr(stack, name, whole)


@torch.no_grad()
def copy_losses(model: nn.Module, tokens: Int[Tensor, "sequence position"], final: Float[Tensor, "sequence position width"],
                copy: int = 2) -> Float[Tensor, "sequence"]:  # fmt: skip
    """Mean loss in nats of one copy of r in [BOS, r, r], its first token left out, from the final norm's output."""
    length = (tokens.shape[1] - 1) // 2
    at = slice((copy - 1) * length + 1, copy * length)  # each predicts the token after it
    logits = model.get_output_embeddings()(final[:, at])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, at.start + 1 : at.stop + 1], reduction="none").mean(1)


class PhaseAblation:
    """Second-copy loss of a model when the logits of one head change. Residual streams of all layers are cached once, in fp32."""

    def __init__(self, model: nn.Module, heads, tokens: Int[Tensor, "sequence position"]):
        if heads.positions != "rope":
            raise ValueError(f"only rotary heads have a phase, got positions = {heads.positions!r}")
        self.model, self.heads, self.tokens = model, heads, tokens
        with torch.no_grad():
            out = hidden_states(model, tokens, output_hidden_states=True)
        self.residuals = out.hidden_states[:-1]  # entering each layer, [sequence, position, width]
        self.baseline = copy_losses(model, tokens, out.last_hidden_state)  # [sequence]
        self.first_copy = copy_losses(model, tokens, out.last_hidden_state, copy=1)
        self._layer = None

    @torch.no_grad()
    def _open(self, layer: int) -> None:
        """What all heads of a layer share; the latest layer is kept."""
        if self._layer != layer:
            block = self.heads.blocks[layer]
            x = block.norm(self.residuals[layer])
            self._layer, self._x, self._logits, self._sines = layer, x, block.attend(x), sine_part(block.attention, x)

    def sines(self, layer: int, head: int) -> Float[Tensor, "sequence query key"]:
        """The head's sine part; keys after the query are 0."""
        self._open(layer)
        return self._sines[:, head].tril()

    def logits(self, layer: int, head: int) -> Float[Tensor, "sequence query key"]:
        """The head's unchanged logits; keys that it may not see are 0."""
        self._open(layer)
        seen = self._logits[:, head]
        return seen.where(seen.isfinite(), 0)

    @torch.no_grad()
    def losses(self, layer: int, head: int, subtracted: Float[Tensor, "sequence query key"] | None = None) -> Float[Tensor, "sequence"]:
        """Loss on the second copy after `subtracted` (default: the sine part) is taken from the head's logits at every query."""
        self._open(layer)
        subtracted = self.sines(layer, head) if subtracted is None else subtracted
        change = output_change(self.heads.blocks[layer], self._x, head, subtracted, self._logits[:, head])

        def write(_, __, out):
            return (out[0] + change, *out[1:])

        hook = attention_module(layers(self.model)[layer]).register_forward_hook(write)
        try:
            with beginning_at(self.model, layer) as stack:
                final = stack(inputs_embeds=self.residuals[layer], use_cache=False).last_hidden_state
        finally:
            hook.remove()
        return copy_losses(self.model, self.tokens, final)
