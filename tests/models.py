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
