"""What the heads of a real model do on repeated random tokens [BOS, r, r]: previous token, duplicate token, induction, K-composition.

P2's detectors. At query position p of the second copy, with r of length n, the mean attention on
    p - 1      is `previous`: the token before,
    p - n      is `duplicate`: the same token in the first copy,
    p - n + 1  is `induction`: the token that came after it there (prefix matching).
Attention is rebuilt from the extracted weights and reduced in a hook, layer by layer; no pattern is kept.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_heads.pretrained import Heads, decoder, layers, norm_of

DETECTORS = ("previous", "duplicate", "induction")
SILENCE = -1.5  # Whisper's log-mel spectrogram where there is no sound


def repeated_tokens(count: int, length: int, tokens: int | Sequence[int], bos: int, seed: int = 0) -> Int[Tensor, "sequence position"]:
    """`count` sequences [BOS, r, r], r uniform over the ids below `tokens`, or over the listed ones; 1 + 2 x length tokens each."""
    if count < 1 or length < 2:
        raise ValueError(f"count must be >= 1 and length >= 2, got {count} and {length}")
    ids = torch.arange(max(tokens, 0)) if isinstance(tokens, int) else torch.as_tensor(tokens)
    if not len(ids):
        raise ValueError(f"tokens must be a number of ids >= 1 or a list of ids, got {tokens}")
    r = ids[torch.randint(len(ids), (count, length), generator=torch.Generator().manual_seed(seed))]  # [sequence, length]
    return torch.cat((torch.full((count, 1), bos), r, r), dim=1)


def common_words(vocabulary: Sequence[str], count: int = 1_000) -> list[int]:
    """Ids of the first `count` tokens that are a space and letters only. Byte-pair vocabularies are in order of merging, so these are the most common."""
    found = [i for i, token in enumerate(vocabulary) if token[:1] in ("\u0120", " ") and token[1:].isascii() and token[1:].isalpha()]
    if len(found) < count:
        raise ValueError(f"the vocabulary holds {len(found)} such words, asked for {count}: ask for fewer")
    return found[:count]


def start_token(model: nn.Module) -> int:
    """The id that begins a sequence: Whisper's start of a transcript, else beginning of text, end of text or 0, as P2 does."""
    names = ("decoder_start_token_id",) if model.config.is_encoder_decoder else ("bos_token_id", "eos_token_id")
    return next((i for i in (getattr(model.config, name, None) for name in names) if isinstance(i, int)), 0)


def _check_tokens(model: nn.Module, tokens: Int[Tensor, "sequence position"]) -> None:
    """ids that have an embedding, positions that the model knows. Some rotary models go on beyond them, with other angles than those extracted."""
    ids, longest = model.get_input_embeddings().num_embeddings, getattr(model.config, "max_target_positions", None)
    longest = longest or getattr(model.config, "max_position_embeddings", None)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= ids:
        raise ValueError(f"tokens must be 0 to {ids - 1}, got {low if low < 0 else high}: the model's configuration names an id that it does not have")
    if longest is not None and tokens.shape[1] > longest:
        raise ValueError(f"sequences of {tokens.shape[1]} tokens are too long for this model, which takes {longest}: use a model for longer inputs")


def hidden_states(model: nn.Module, tokens: Int[Tensor, "sequence position"], **options):
    """Runs embedding, layers and final norm, without unembedding. Whisper's decoder hears silence."""
    _check_tokens(model, tokens)
    options = {"use_cache": False, **options}
    if model.config.model_type == "whisper":
        frames = 2 * model.config.max_source_positions
        heard = model.base_model.encoder(torch.full((1, model.config.num_mel_bins, frames), SILENCE)).last_hidden_state
        options["encoder_hidden_states"] = heard.expand(len(tokens), -1, -1)
    return decoder(model)(input_ids=tokens, **options)


@torch.no_grad()
def detect(model: nn.Module, heads: Heads, tokens: Int[Tensor, "sequence position"], batch: int = 8) -> dict[str, Float[Tensor, "layer head"]]:
    """Mean attention of every head on each detector's key (`DETECTORS`), in [0, 1], over sequences [BOS, r, r] and queries of the second copy.

    `<name>_sd` is the standard deviation over sequences. `first` is the attention on position 0, where heads park what they do not use.
    """
    length = (tokens.shape[1] - 1) // 2
    if tokens.shape[1] != 2 * length + 1 or not torch.equal(tokens[:, 1 : length + 1], tokens[:, length + 1 :]):
        raise ValueError(f"tokens must be [BOS, r, r], got {tokens.shape[1]} tokens whose halves differ: use repeated_tokens")
    queries = torch.arange(length + 1, 2 * length + 1)
    keys = {"previous": queries - 1, "duplicate": queries - length, "induction": queries - length + 1, "first": 0 * queries}
    seen = {name: torch.zeros(len(heads.blocks), heads.heads, len(tokens)) for name in keys}
    rows = slice(0, 0)  # of the batch that is running

    def reduce(layer: int, x: Tensor) -> None:
        pattern = heads.blocks[layer].attend(x).softmax(-1)  # [sequence, head, query, key]
        for name, key in keys.items():
            seen[name][layer, :, rows] = pattern[:, :, queries, key].mean(-1).T

    hooks = [norm_of(layer).register_forward_hook(lambda _, __, x, i=i: reduce(i, x)) for i, layer in enumerate(layers(model))]
    try:
        for start in range(0, len(tokens), batch):
            rows = slice(start, start + batch)
            hidden_states(model, tokens[rows])
    finally:
        for hook in hooks:
            hook.remove()
    out = {name: values.mean(-1) for name, values in seen.items()}
    return out | {f"{name}_sd": seen[name].std(-1) for name in DETECTORS}


def k_composition(heads: Heads, layer: int, head: int) -> Float[Tensor, "layer head"]:
    """How much a head's keys read of what every earlier head writes: |M (W_V W_O)^T| / (|M| |W_V W_O|), in [0, 1]; [earlier layer, head].

    M = W_Q W_K^T of the reading head, norms folded in (P2; Elhage et al. 2021). Norms come from d_head x d_head matrices. What was written
    passes through later norms and layers, which this leaves out.
    """
    if not 1 <= layer < len(heads.blocks):
        raise ValueError(f"layer must be 1 to {len(heads.blocks) - 1} to have earlier heads, got {layer}")
    w_q, w_k = (w[head] for w in heads.blocks[layer].folded())  # [width, d_head]
    reads = w_q.T @ w_q
    size = ((w_k.T @ w_k) * reads).sum().sqrt()
    rows = []
    for block in heads.blocks[:layer]:
        w_v, w_o = block.written()
        if block.centred:  # the mean of what is written is invisible to the reading head
            w_o = w_o - w_o.mean(-1, keepdim=True)
        core = torch.einsum("wk,hdw->hkd", w_k, w_o)  # W_K^T W_O^T
        values = w_v.mT @ w_v  # [head, d_head, d_head]
        written = ((w_o @ w_o.mT) * values).sum((-1, -2)).sqrt()
        rows.append(((core.mT @ reads @ core) * values).sum((-1, -2)).sqrt() / (size * written))
    return torch.stack(rows)
