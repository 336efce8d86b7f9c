"""Small models for the tests, with weights large enough that every part matters."""

import torch

from rope_heads.model import Config, Transformer


def built(**config) -> Transformer:
    """A model in evaluation mode whose every parameter matters: large weights, so that attention is far from uniform, and no zero bias."""
    values = {"vocab_size": 50, "layers": 2, "heads": 2, "width": 24, "init_std": 0.3, "dropout": 0.0, **config}
    model = Transformer(Config(**values)).eval()
    scatter(model)
    return model


def scatter(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))


def ids(model: Transformer, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length))


def inputs(model: Transformer, prompts: int = 3, longest: int = 130) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to be added, and the 17 of a task."""
    return ids(model, prompts, longest), ids(model, prompts, 17)


def plainly(model: Transformer, tokens: torch.Tensor, factor=lambda n: 1.0, stretch=1.0) -> torch.Tensor:
    """Logits after the query in float64, attention row by row: positions times `stretch`, logits of a query that sees n tokens times `factor`(n)."""
    model = model.double()
    x = model.embedding(tokens)
    length = tokens.shape[1]
    for block in model.blocks:
        a, h = block.attention, block.norm(x)
        q, k, v = a.qkv(h).unflatten(-1, (3, a.heads, a.d_head)).unbind(2)  # [prompt, position, head, d_head]
        z = [torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (q, k)]
        out = torch.zeros_like(v)
        for i in range(length):
            phase = torch.exp(1j * torch.outer(stretch * (i - torch.arange(i + 1.0, dtype=torch.float64)), a.angles))  # [key, pair]
            logits = torch.einsum("bhp,bkhp,kp->bhk", z[0][:, i], z[1][:, : i + 1].conj(), phase).real * a.scale * factor(i + 1)
            out[:, i] = torch.einsum("bhk,bkhd->bhd", logits.softmax(-1), v[:, : i + 1])
        x = x + a.out(out.flatten(-2)) + block.mlp(h)
    logits = model.unembedding(model.norm(x[:, -1]))
    model.float()
    return logits.float()
