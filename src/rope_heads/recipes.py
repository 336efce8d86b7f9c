"""Recipes: how a model is trained, and names for changes to them (`paper,batch=192`)."""

import dataclasses
import math
import typing
from dataclasses import dataclass

from rope_heads.model import LATER, Config


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are the paper's values (P1, section 3 of its released code); batch 64 for 6,750 steps is one epoch."""

    name: str = "paper"
    steps: int = 6_750
    batch: int = 64
    lr: float = 1e-4
    warmup: int = 750  # steps to the full rate, then linearly down to 0 at the last step
    beta1: float = 0.95
    beta2: float = 0.999
    weight_decay: float = 1e-4  # not on biases and norms
    dropout: float = 0.1  # on attention and residuals
    drop_embeddings: bool = dataclasses.field(default=True, metadata=LATER)  # and on embeddings, as P1's text says (in its code the setting has no effect, see the log)
    clip: float = 1.0  # largest gradient norm, the default of the Trainer that P1's code uses; 0 = no limit
    precision: str = "fp32"  # or "bf16": autocast, worth it only where the processor multiplies bf16 faster
    # what the paper does not do (chapter length_generalization)
    long_share: float = dataclasses.field(default=0.0, metadata=LATER)  # share of sequences that get a prefix in training
    long_added: int = dataclasses.field(default=51, metadata=LATER)  # longest such prefix
    index_layers: int = dataclasses.field(default=0, metadata=LATER)  # layers whose W_Q and W_K start as Index heads

    def __post_init__(self):
        for name in ("steps", "batch", "long_added"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("lr", "warmup", "clip", "weight_decay", "index_layers"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "dropout", "long_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be 'fp32' or 'bf16', got {self.precision!r}")

    def rate(self, step: int) -> float:
        """Learning rate of update number `step` (0 first): linear warm-up, then linear decay to zero at the last step."""
        up = step / self.warmup if self.warmup else 1.0
        return self.lr * min(up, (self.steps - step) / max(1, self.steps - self.warmup))


RECIPES = {
    "paper": Recipe(),
    "fast": Recipe(name="fast", steps=2_000, lr=5e-4, warmup=200, dropout=0.0, clip=0.0),  # a third of the time
}


NOT_SET = ("vocab_size", "dropout", "drop_embeddings")  # parts of `Config` that follow from the task and the recipe


def configured(recipe: Recipe, changes: dict[str, object]) -> tuple[Recipe, dict]:
    """Recipe and changes to `Config` from changes to either; the recipe's name says all of them."""
    kinds = {f.name: next(t for t in typing.get_args(f.type) or (f.type,) if t is not type(None)) for f in dataclasses.fields(Config)}
    model = {name: value for name, value in changes.items() if name in kinds and name not in NOT_SET}
    for name, value in model.items():
        if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
            raise ValueError(f"{name} must be of type {kinds[name].__name__}, got {value!r}")
    parts = [field.name for field in dataclasses.fields(Recipe) if field.name != "name"]
    unknown = sorted(set(changes) - set(model) - set(parts))
    if unknown:
        of_the_model = [name for name in kinds if name not in NOT_SET]
        raise ValueError(f"{unknown[0]!r} is no part of a recipe ({', '.join(parts)}) nor of a model ({', '.join(of_the_model)})")
    recipe = changed(recipe, {name: value for name, value in changes.items() if name not in model})
    return dataclasses.replace(recipe, name=",".join([recipe.name, *(f"{k}={v}" for k, v in sorted(model.items()))])), model


def changed(recipe: Recipe, changes: dict[str, object]) -> Recipe:
    """`recipe` with some values replaced; its name then says which, so that the runs get a folder of their own (`paper,batch=192`)."""
    if not changes:
        return recipe
    types = {field.name: type(getattr(recipe, field.name)) for field in dataclasses.fields(recipe) if field.name != "name"}
    unknown = sorted(set(changes) - set(types))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no part of a recipe; its parts are {', '.join(types)}")
    values = {}
    for name, value in changes.items():
        try:
            values[name] = types[name](value)
        except (ValueError, TypeError, OverflowError):
            values[name] = None
        if values[name] is None or isinstance(value, bool) != (types[name] is bool) or (types[name] is int and values[name] != float(value)):
            raise ValueError(f"{name} must be of type {types[name].__name__}, got {value!r}")
    name = ",".join([recipe.name, *(f"{key}={value}" for key, value in sorted(values.items()))])
    return dataclasses.replace(recipe, name=name, **values)
