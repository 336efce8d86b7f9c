"""The spectrum of M = W_Q W_K^T, head by head: how much of it rotates, and what RoPE adds (P2, its sections on measures and on RoPE).

A query and a key are rows here, q = x W_Q and k = x W_K, so that q k^T = x M x^T. W_Q and W_K have shape [..., width, d_head]; a torch
`Linear` keeps the transpose, [d_head, width]. M is width x width but has rank d_head at most, so nothing of that size is ever built:
its non-zero eigenvalues are those of the d_head x d_head core W_K^T W_Q, and norms follow from Gram matrices. All in float64, because M
is far from normal, and over any leading axes at once (heads, draws).

Biases are outside M, as in P2. `fold_norm` puts a norm's gain into the weights and centres them for LayerNorm.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from rope_heads.rope import split_pairs

MEASURES = ("dir_frac", "d_head", "imag_mass", "content_pos_frac", "henrici")
NULL_MEASURES = ("dir_frac", "d_head", "imag_mass", "henrici")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of M and what P2 reads off them, one number a head.

    M_S and M_A are the symmetric and antisymmetric part of M, |.| the Frobenius norm, lambda the eigenvalues.

    - `dir_frac` = |M_A| / |M|, in [0, 1]. 0: symmetric, a pair of tokens scores the same either way. .707: a random M. 1: antisymmetric.
    - `d_head` = sum |Im lambda| / sum |lambda|, in [0, 1]. 0: every eigenvalue real. About .6: a random M.
    - `imag_mass` = sum |Im lambda| / |M|, in [0, sqrt(d_head)].
    - `content_pos_frac` = share of the positive eigenvalues in sum |eigenvalues of M_S|, in [0, 1]. 1: every token prefers its like.
    - `henrici` = sqrt(|M|^2 - sum |lambda|^2) / |M|, in [0, 1]. 0: M is normal.
    """

    eigenvalues: Complex[Tensor, "*head d_head"]
    dir_frac: Float[Tensor, "*head"]
    d_head: Float[Tensor, "*head"]
    imag_mass: Float[Tensor, "*head"]
    content_pos_frac: Float[Tensor, "*head"]
    henrici: Float[Tensor, "*head"]


LARGEST = 1e60  # of a weight or singular value: products of four must stay finite


def _first_bad(values: Tensor) -> float:
    return float(values[~(values.abs() < LARGEST)][0])


def _pair(w_q, w_k) -> tuple[Tensor, Tensor]:
    w_q, w_k = (torch.as_tensor(w).detach().to(torch.float64) for w in (w_q, w_k))
    if w_q.ndim < 2 or w_q.shape != w_k.shape:
        raise ValueError(f"w_q and w_k must have one shape [..., width, d_head], got {tuple(w_q.shape)} and {tuple(w_k.shape)}: repeat shared keys")
    if w_q.shape[-2] < w_q.shape[-1]:
        raise ValueError(f"weights must be [..., width, d_head] with width >= d_head, got {tuple(w_q.shape)}: transpose those of a torch Linear")
    for name, w in (("w_q", w_q), ("w_k", w_k)):
        if not (w.abs() < LARGEST).all():  # also nan: LAPACK crashes on it, or says something else
            raise ValueError(f"{name} must be finite and below {LARGEST:g}, got {_first_bad(w):g}: fetch or scale the weights again")
    return w_q, w_k


def fold_norm(w, gain=None, centred: bool = False) -> Float[Tensor, "*head width d_head"]:
    """Weights [..., width, d_head] that act on the normalised residual: diag(gain) W, for LayerNorm (`centred`) C diag(gain) W, C = I - 11^T/width.

    LayerNorm subtracts the mean of its input, so what a weight does along the all-ones direction has no effect: C removes it from M.
    The norm's bias only shifts the query's and key's bias, which stay outside M.
    """
    w = torch.as_tensor(w).detach().to(torch.float64)
    if gain is not None:
        gain = torch.as_tensor(gain).detach().to(torch.float64)
        if gain.shape != w.shape[-2:-1]:
            raise ValueError(f"gain must have shape [{w.shape[-2]}] like the width of the weights, got {tuple(gain.shape)}")
        w = gain[:, None] * w
    return w - w.mean(dim=-2, keepdim=True) if centred else w


def _rotation_measures(core: Tensor, square: Tensor) -> dict[str, Tensor]:
    """Eigenvalues and the measures that need only the core [..., d_head, d_head] and `square` = |M|^2."""
    values = torch.linalg.eigvals(core)
    size, turning = values.abs().sum(-1), values.imag.abs().sum(-1)
    trace_of_square = (core * core.mT).sum((-1, -2))  # tr M^2 = |M_S|^2 - |M_A|^2
    return {
        "eigenvalues": values,
        "dir_frac": ((1 - trace_of_square / square) / 2).clamp(0, 1).sqrt(),
        "d_head": turning / size,
        "imag_mass": turning / square.sqrt(),
        "henrici": (1 - values.abs().square().sum(-1) / square).clamp(0, 1).sqrt(),
    }


def _content_pos_frac(gram: Tensor) -> Tensor:
    """From the Gram matrix of [W_Q, W_K], whose root L gives M_S the non-zero eigenvalues of L^T J L, J = [[0, 1/2], [1/2, 0]]."""
    values, vectors = torch.linalg.eigh(gram)  # not Cholesky: tied or centred heads have a singular Gram matrix
    first, second = (vectors * values.clamp(min=0).sqrt()[..., None, :]).chunk(2, dim=-2)
    eigenvalues = torch.linalg.eigvalsh((first.mT @ second + second.mT @ first) / 2)
    return eigenvalues.clamp(min=0).sum(-1) / eigenvalues.abs().sum(-1)


def qk_spectrum(w_q: Float[Tensor, "*head width d_head"], w_k: Float[Tensor, "*head width d_head"]) -> Spectrum:
    """Spectrum and measures of M = W_Q W_K^T for every head at once. Fold the norm into the weights first (`fold_norm`).

    Keys shared by several queries (grouped attention) must be repeated to the shape of W_Q. A head of zeros gives nan.
    """
    w_q, w_k = _pair(w_q, w_k)
    queries, keys, core = w_q.mT @ w_q, w_k.mT @ w_k, w_k.mT @ w_q  # each [..., d_head, d_head]
    square = (queries * keys).sum((-1, -2))  # |M|^2 = tr (W_Q^T W_Q)(W_K^T W_K)
    gram = torch.cat((torch.cat((queries, core.mT), -1), torch.cat((core, keys), -1)), -2)
    return Spectrum(content_pos_frac=_content_pos_frac(gram), **_rotation_measures(core, square))


def singular_values(w_q: Float[Tensor, "*head width d_head"], w_k: Float[Tensor, "*head width d_head"]) -> Float[Tensor, "*head d_head"]:
    """Singular values of M, largest first: those of R_Q R_K^T from two thin QR decompositions."""
    w_q, w_k = _pair(w_q, w_k)
    r_q, r_k = (torch.linalg.qr(w, mode="r").R for w in (w_q, w_k))
    return torch.linalg.svdvals(r_q @ r_k.mT)


# ---- what chance would give --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Null:
    """Mean and standard deviation of each measure over random heads, {measure: [head]}."""

    mean: dict[str, Float[Tensor, "*head"]]
    sd: dict[str, Float[Tensor, "*head"]]
    draws: int

    def z(self, measured: Spectrum, name: str = "d_head") -> Float[Tensor, "*head"]:
        """(measured - null mean) / null sd of the measure `name`: how far a head is from a random one with its own singular values."""
        return (getattr(measured, name) - self.mean[name]) / self.sd[name]


def random_frame(rows: int, columns: int, generator: torch.Generator) -> Float[Tensor, "row column"]:
    """Orthonormal columns, uniformly distributed. The signs matter: QR as LAPACK returns it is not uniform."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def random_null(singular: Float[Tensor, "head d_head"], width: int, draws: int = 300, seed: int = 0, centred: bool = False) -> Null:
    """Measures of random heads with the singular values of the given ones: M = U diag(S) V^T with uniform frames U and V (P2's null).

    `width` is the model's; `centred` heads (LayerNorm) live in the width - 1 dimensions whose sum is 0. Only V^T U matters, and U may be
    fixed, so a draw is the top d_head rows of one random frame. The draws are the same for all heads of one shape.
    """
    singular = torch.as_tensor(singular).to(torch.float64)
    if singular.ndim != 2:
        raise ValueError(f"singular values must be [head, d_head], got shape {tuple(singular.shape)}")
    if not isinstance(draws, int) or draws < 2:
        raise ValueError(f"draws must be >= 2 for a standard deviation, got {draws}")
    if not isinstance(width, int) or width < 2:
        raise ValueError(f"width must be a whole number >= 2, got {width}")
    if not (singular.abs() < LARGEST).all() or (singular < 0).any():
        raise ValueError(f"singular values must be 0 to {LARGEST:g}, got {float(singular.min()):g} to {float(singular.max()):g}")
    dimension = width - centred
    if (singular[:, dimension:] > 1e-6 * singular[:, :1]).any():
        raise ValueError(f"heads must have rank {dimension} at most, got more: centre the weights (fold_norm) or pass centred=False")
    singular = singular[:, :dimension]
    square, k = singular.square().sum(-1), singular.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    sums = {name: torch.zeros(2, len(singular), dtype=torch.float64) for name in NULL_MEASURES}
    for _ in range(draws):
        overlap = random_frame(dimension, k, generator)[:k]  # V^T U
        found = _rotation_measures(singular[:, :, None] * overlap, square)
        for name, total in sums.items():
            total += torch.stack((found[name], found[name].square()))
    mean = {name: total[0] / draws for name, total in sums.items()}
    sd = {name: ((total[1] / draws - mean[name].square()).clamp(min=0) * draws / (draws - 1)).sqrt() for name, total in sums.items()}
    return Null(mean, sd, draws)


# ---- what RoPE adds ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeParts:
    """A rotary head plane by plane. With columns a, c of W_Q and b, d of W_K in plane t: Re M_t = a b^T + c d^T, Im M_t = c b^T - a d^T.

    The score of query i and key j, offset D = j - i, is x_i [M_rest + sum_t cos(D theta_t) Re M_t + sin(D theta_t) Im M_t] x_j^T, while
    M = M_rest + sum_t Re M_t: the phases Im M_t are not in M at all (P2).
    """

    query: tuple[Float[Tensor, "*head width pair"], Float[Tensor, "*head width pair"]]  # a, c
    key: tuple[Float[Tensor, "*head width pair"], Float[Tensor, "*head width pair"]]  # b, d
    rest: tuple[Float[Tensor, "*head width rest"], Float[Tensor, "*head width rest"]]  # W_Q and W_K beyond the rotary dimensions

    def _check(self, angles: Tensor) -> None:
        """One angle would be taken for all planes."""
        planes = self.query[0].shape[-1]
        if tuple(angles.shape) != (planes,):
            raise ValueError(f"angles must hold one angle for each of {planes} planes, got shape {tuple(angles.shape)}")

    def real(self, plane: int) -> Float[Tensor, "*head width width"]:
        (a, c), (b, d) = self.query, self.key
        return a[..., plane, None] * b[..., None, :, plane] + c[..., plane, None] * d[..., None, :, plane]

    def imaginary(self, plane: int) -> Float[Tensor, "*head width width"]:
        (a, c), (b, d) = self.query, self.key
        return c[..., plane, None] * b[..., None, :, plane] - a[..., plane, None] * d[..., None, :, plane]

    def not_rotary(self) -> Float[Tensor, "*head width width"]:
        return self.rest[0] @ self.rest[1].mT

    def norms(self) -> tuple[Float[Tensor, "*head pair"], Float[Tensor, "*head pair"]]:
        """Frobenius norms of Re M_t and Im M_t, from inner products of the four columns."""
        (a, c), (b, d) = self.query, self.key
        dot = lambda x, y: (x * y).sum(-2)  # noqa: E731
        cross = 2 * dot(a, c) * dot(b, d)
        real = dot(a, a) * dot(b, b) + dot(c, c) * dot(d, d) + cross
        imaginary = dot(c, c) * dot(b, b) + dot(a, a) * dot(d, d) - cross
        return real.clamp(min=0).sqrt(), imaginary.clamp(min=0).sqrt()

    def rope_imag_frac(self) -> Float[Tensor, "*head"]:
        """sum_t |Im M_t| / sum_t (|Re M_t| + |Im M_t|), by norms, in [0, 1]. 0: no phase. .5: a random head. (P2 trains with squared norms.)"""
        real, imaginary = self.norms()
        return imaginary.sum(-1) / (real + imaginary).sum(-1)

    def frequency_centroid(self, angles: Float[Tensor, "pair"]) -> Float[Tensor, "*head"]:
        """Mean angle of the planes, in radians a position, weighted by |Im M_t|."""
        _, imaginary = self.norms()
        self._check(angles)
        return (imaginary * angles.to(torch.float64)).sum(-1) / imaginary.sum(-1)

    def traces(self) -> tuple[Float[Tensor, "*head pair"], Float[Tensor, "*head pair"]]:
        """tr Re M_t and tr Im M_t: the mean of x Re M_t x^T and x Im M_t x^T over residuals x with unit covariance."""
        (a, c), (b, d) = self.query, self.key
        return (a * b + c * d).sum(-2), (c * b - a * d).sum(-2)

    def kernel(self, offsets: Float[Tensor, "offset"], angles: Float[Tensor, "pair"]) -> Float[Tensor, "*head offset"]:
        """Score of a token with a copy of itself `offsets` = key - query away, mean over unit-covariance residuals, rotary planes only."""
        real, imaginary = self.traces()
        self._check(angles)
        phase = torch.outer(torch.as_tensor(offsets, dtype=torch.float64), angles.to(torch.float64))  # [offset, pair]
        return real @ phase.cos().mT + imaginary @ phase.sin().mT

    def scores(self, x: Float[Tensor, "position width"], angles: Float[Tensor, "pair"]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of all queries and keys of one input, not divided by sqrt(d_head), as three parts [..., query, key]: rest, cosine, sine."""
        self._check(angles)
        x, where = torch.as_tensor(x, dtype=torch.float64), torch.arange(len(x), dtype=torch.float64)
        (a, c), (b, d) = ((x @ w for w in pair) for pair in (self.query, self.key))  # [..., position, pair]
        phase = (where[None, :] - where[:, None])[..., None] * angles.to(torch.float64)  # [query, key, pair]
        product = lambda q, k: q[..., :, None, :] * k[..., None, :, :]  # noqa: E731
        cosine = (phase.cos() * (product(a, b) + product(c, d))).sum(-1)
        sine = (phase.sin() * (product(c, b) - product(a, d))).sum(-1)
        return (x @ self.rest[0]) @ (x @ self.rest[1]).mT, cosine, sine


def rope_parts(w_q: Float[Tensor, "*head width d_head"], w_k: Float[Tensor, "*head width d_head"], pairing: str, rotary_dim: int | None = None) -> RopeParts:
    """Split a rotary head into its planes. `pairing` is `"adjacent"` (GPT-J) or `"half"` (GPT-NeoX, Llama); `rotary_dim` defaults to d_head."""
    w_q, w_k = _pair(w_q, w_k)
    rotary_dim = w_q.shape[-1] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 2 <= rotary_dim <= w_q.shape[-1]:
        raise ValueError(f"rotary_dim must be even and between 2 and d_head = {w_q.shape[-1]}, got {rotary_dim}")
    query, key = (split_pairs(w[..., :rotary_dim], pairing) for w in (w_q, w_k))
    return RopeParts(query, key, (w_q[..., rotary_dim:], w_k[..., rotary_dim:]))
