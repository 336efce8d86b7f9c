"""Rotary position embedding: every pair of dimensions turns by its own angle per position (RoFormer; P1, section 2).

Two layouts of the pairs are in use and easily confused, so the pairing is always named:
`"adjacent"` joins dimensions (0, 1), (2, 3), ... (GPT-J); `"half"` joins dimension k with k + rotary_dim/2 (GPT-NeoX, Llama).
"""

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

PAIRINGS = ("adjacent", "half")


def plane_angles(planes: int, base: float = 10_000.0) -> Float[Tensor, "pair"]:
    """Angle per position of each rotary plane, in radians: base^(-k / planes) for k = 0 .. planes - 1 (fp64, falling from 1)."""
    if planes < 1:
        raise ValueError(f"planes must be >= 1, got {planes}")
    if not base > 0:
        raise ValueError(f"base must be > 0, got {base}")
    return base ** (-torch.arange(planes, dtype=torch.float64) / planes)


def rotary_tables(
    positions: Int[Tensor, "position"] | Float[Tensor, "position"], angles: Float[Tensor, "pair"], dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "position pair"], Float[Tensor, "position pair"]]:
    """Cosine and sine of position x angle, computed in fp64 and rounded once, so that long inputs lose nothing."""
    phase = torch.outer(positions.to(torch.float64), angles.to(torch.float64))  # [position, pair]
    return phase.cos().to(dtype), phase.sin().to(dtype)


def split_pairs(x: Float[Tensor, "... d"], pairing: str) -> tuple[Float[Tensor, "... pair"], Float[Tensor, "... pair"]]:
    """First and second coordinate of every rotary plane."""
    if pairing == "adjacent":
        return x[..., 0::2], x[..., 1::2]
    if pairing == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r}")


def join_pairs(first: Float[Tensor, "... pair"], second: Float[Tensor, "... pair"], pairing: str) -> Float[Tensor, "... d"]:
    """Inverse of `split_pairs`."""
    if pairing == "adjacent":
        return torch.stack((first, second), dim=-1).flatten(-2)
    if pairing == "half":
        return torch.cat((first, second), dim=-1)
    raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r}")


def to_planes(x: Float[Tensor, "... d"], pairing: str) -> Complex[Tensor, "... pair"]:
    """Every rotary plane as one complex number, so that turning a plane is one multiplication (no copy for adjacent fp32 pairs)."""
    x = x if x.dtype == torch.float64 else x.float()  # complex numbers exist in these two precisions
    if pairing == "adjacent":
        if x.stride(-1) != 1 or x.storage_offset() % 2 or any(step % 2 for step in x.stride()[:-1]):
            x = x.contiguous()  # a complex view needs every pair at an even place in memory
        return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.complex(*split_pairs(x, pairing))


def from_planes(z: Complex[Tensor, "... pair"], pairing: str) -> Float[Tensor, "... d"]:
    """Inverse of `to_planes`."""
    if pairing == "adjacent":
        return torch.view_as_real(z).flatten(-2)
    return join_pairs(z.real, z.imag, pairing)


def rotate(
    x: Float[Tensor, "... d_head"], cos: Float[Tensor, "... pair"], sin: Float[Tensor, "... pair"], pairing: str
) -> Float[Tensor, "... d_head"]:
    """Turn every plane of x by the phase given as cosine and sine; dimensions beyond the 2 x pair rotary ones pass unchanged.

    `cos` and `sin` broadcast against the planes of x. Between a query at position i and a key at position j only the angle of
    j - i is left in the dot product: that is what makes the logit depend on distance. The result is fp32 (fp64 for fp64 input).
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return from_planes(to_planes(x, pairing) * torch.complex(cos, sin), pairing)
    turned = rotate(x[..., :rotary_dim], cos, sin, pairing)
    return torch.cat((turned, x[..., rotary_dim:].to(turned.dtype)), dim=-1)


def adjacent_to_half(rotary_dim: int) -> Int[Tensor, "rotary_dim"]:
    """Permutation p such that x[..., p] in the `half` layout holds the same planes as x in the `adjacent` layout."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be a positive even number, got {rotary_dim}")
    return torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))
