"""The spectral measures against full matrices, the model's own logits and the algebra they rest on."""

import math

import numpy as np
import pytest
import torch

from rope_heads.model import Attention
from rope_heads.rope import adjacent_to_half, plane_angles
from rope_heads.spectra import MEASURES, NULL_MEASURES, fold_norm, qk_spectrum, random_frame, random_null, rope_parts, singular_values


def weights(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(2)]


def by_definition(m):
    """The five measures from the whole matrix, in numpy, with no use of its low rank."""
    values, norm = np.linalg.eigvals(m), np.linalg.norm(m)
    symmetric = np.linalg.eigvalsh((m + m.T) / 2)
    return {
        "dir_frac": np.linalg.norm((m - m.T) / 2) / norm,
        "d_head": np.abs(values.imag).sum() / np.abs(values).sum(),
        "imag_mass": np.abs(values.imag).sum() / norm,
        "content_pos_frac": symmetric[symmetric > 0].sum() / np.abs(symmetric).sum(),
        "henrici": np.sqrt(norm**2 - (np.abs(values) ** 2).sum()) / norm,
    }


@pytest.mark.parametrize("width, d_head", [(40, 6), (33, 5), (8, 8), (12, 1)])
def test_measures_equal_those_of_the_whole_matrix(width, d_head):
    w_q, w_k = weights(2, 3, width, d_head)
    found = qk_spectrum(w_q, w_k)
    assert found.eigenvalues.shape == (2, 3, d_head) and found.d_head.shape == (2, 3)
    for where in np.ndindex(2, 3):
        expected = by_definition((w_q[where] @ w_k[where].T).numpy())
        for name in MEASURES:
            assert getattr(found, name)[where].item() == pytest.approx(expected[name], abs=1e-9), name


def test_eigenvalues_of_the_core_are_those_of_the_whole_matrix():
    w_q, w_k = weights(300, 16)
    core = qk_spectrum(w_q, w_k).eigenvalues.numpy()
    whole = np.linalg.eigvals((w_q @ w_k.T).numpy())
    whole = whole[np.argsort(-np.abs(whole))][:16]
    distance = np.abs(core[:, None] - whole[None, :])
    assert distance.min(0).max() < 1e-10 * np.abs(whole).max() and distance.min(1).max() < 1e-10 * np.abs(whole).max()


def test_singular_values_are_those_of_the_whole_matrix():
    w_q, w_k = weights(3, 50, 7)
    assert torch.allclose(singular_values(w_q, w_k), torch.linalg.svdvals(w_q @ w_k.mT)[:, :7], atol=1e-11)


def test_gauge_invariance():
    w_q, w_k = weights(4, 30, 6)
    (g, _), one = weights(6, 6, seed=1), qk_spectrum(w_q, w_k)
    other = qk_spectrum(w_q @ g, w_k @ torch.linalg.inv(g).T)
    for name in MEASURES:
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-9), name
    turned = qk_spectrum(*(torch.linalg.qr(weights(30, 30, seed=2)[0]).Q @ w for w in (w_q, w_k)))  # another basis of the residual
    assert torch.allclose(one.d_head, turned.d_head, atol=1e-9)


def test_known_cases():
    w, _ = weights(20, 4)
    symmetric = qk_spectrum(w, w)  # tied: M = W W^T is symmetric and positive
    assert symmetric.dir_frac < 1e-7 and symmetric.d_head < 1e-10 and symmetric.henrici < 1e-6
    assert symmetric.content_pos_frac == pytest.approx(1)
    assert qk_spectrum(w, -w).content_pos_frac == pytest.approx(0, abs=1e-7)
    turn = torch.tensor([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]], dtype=torch.float64)
    antisymmetric = qk_spectrum(w @ turn, w)
    assert antisymmetric.dir_frac == pytest.approx(1) and antisymmetric.d_head == pytest.approx(1)
    identity = torch.eye(5, dtype=torch.float64)
    rotation = torch.matrix_exp(torch.diag(torch.ones(4), 1).double() - torch.diag(torch.ones(4), -1).double())
    assert qk_spectrum(rotation, identity).henrici < 1e-6  # a rotation is normal


def test_folding_equals_the_norm_in_front_of_the_weights():
    (w_q, w_k), (x, _) = weights(2, 24, 5), weights(7, 24, seed=3)
    norm = torch.nn.LayerNorm(24, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(24) + 0.5)
    plain = torch.nn.functional.layer_norm(x, (24,))  # without the gain
    folded_q, folded_k = (fold_norm(w, norm.weight, centred=True) for w in (w_q, w_k))
    expected = (norm(x) @ w_q) @ (norm(x) @ w_k).mT
    assert torch.allclose((plain @ folded_q) @ (plain @ folded_k).mT, expected.detach(), atol=1e-10)
    c = torch.eye(24, dtype=torch.float64) - 1 / 24
    m = torch.diag(norm.weight) @ w_q[0] @ w_k[0].T @ torch.diag(norm.weight)
    assert torch.allclose(folded_q[0] @ folded_k[0].T, (c @ m @ c).detach(), atol=1e-10)
    rms = torch.nn.functional.rms_norm(x, (24,))
    folded_q, folded_k = (fold_norm(w, norm.weight) for w in (w_q, w_k))
    expected = ((rms * norm.weight) @ w_q) @ ((rms * norm.weight) @ w_k).mT
    assert torch.allclose((rms @ folded_q) @ (rms @ folded_k).mT, expected.detach(), atol=1e-10)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_scores_rebuilt_from_the_parts_are_the_models(pairing, rotary_dim):
    torch.manual_seed(0)
    head = Attention(24, heads=3, d_head=8, rotary_dim=rotary_dim, pairing=pairing).double()
    x = torch.randn(11, 24, dtype=torch.float64)
    parts = rope_parts(head.w_q.mT, head.w_k.mT, pairing, rotary_dim)
    rest, cosine, sine = parts.scores(x, head.angles)
    expected = head.logits(x[None])[0] / head.scale
    seen = torch.isfinite(expected[0])
    assert (rest + cosine + sine - expected.detach())[:, seen].abs().max() < 1e-10
    assert sine[:, seen].abs().max() > 0.05  # a part worth having
    assert (rest.abs().max() == 0) == (rotary_dim == 8)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_m_is_the_sum_of_its_real_parts_and_the_rest(pairing):
    w_q, w_k = weights(2, 20, 10)
    parts = rope_parts(w_q, w_k, pairing, rotary_dim=6)
    total = parts.not_rotary() + sum(parts.real(t) for t in range(3))
    assert torch.allclose(total, w_q @ w_k.mT, atol=1e-12)
    real, imaginary = parts.norms()
    for t in range(3):
        assert torch.allclose(real[:, t], torch.linalg.matrix_norm(parts.real(t)), atol=1e-10)
        assert torch.allclose(imaginary[:, t], torch.linalg.matrix_norm(parts.imaginary(t)), atol=1e-10)
    share = parts.rope_imag_frac()
    expected = sum(torch.linalg.matrix_norm(parts.imaginary(t)) for t in range(3)) / (real.sum(-1) + imaginary.sum(-1))
    assert torch.allclose(share, expected, atol=1e-10)
    trace_real, trace_imaginary = parts.traces()
    assert torch.allclose(trace_imaginary[:, 1], parts.imaginary(1).diagonal(dim1=-2, dim2=-1).sum(-1), atol=1e-10)
    assert torch.allclose(trace_real[:, 1], parts.real(1).diagonal(dim1=-2, dim2=-1).sum(-1), atol=1e-10)


def test_adjacent_equals_half_under_the_permutation():
    (w_q, w_k), order = weights(3, 20, 8), adjacent_to_half(8)
    adjacent, half = rope_parts(w_q, w_k, "adjacent"), rope_parts(w_q[..., order], w_k[..., order], "half")
    assert torch.equal(adjacent.rope_imag_frac(), half.rope_imag_frac())
    assert torch.equal(adjacent.imaginary(2), half.imaginary(2))
    assert not torch.allclose(adjacent.rope_imag_frac(), rope_parts(w_q, w_k, "half").rope_imag_frac(), atol=1e-4)
    angles = plane_angles(4)
    assert torch.equal(adjacent.frequency_centroid(angles), half.frequency_centroid(angles))
    assert torch.allclose(qk_spectrum(w_q, w_k).d_head, qk_spectrum(w_q[..., order], w_k[..., order]).d_head, atol=1e-12)  # M does not see pairs


def test_difference_of_the_two_directions_is_the_sine_part():
    (w_q, w_k), (x, _), angles = weights(20, 8), weights(6, 20, seed=4), plane_angles(4)
    parts = rope_parts(w_q, w_k, "half")
    n = x[0]
    for offset in (1, 2, 5):
        forth, back = (parts.scores(n.expand(6, 20), angles) for _ in range(2))
        difference = sum(p[0, offset] for p in forth) - sum(p[offset, 0] for p in back)
        expected = sum(2 * torch.sin(offset * angles[t]) * (n @ parts.imaginary(t) @ n) for t in range(4))
        assert difference.item() == pytest.approx(expected.item(), abs=1e-9)


def test_the_kernel_is_the_mean_score_of_a_token_with_itself():
    (w_q, w_k), angles = weights(16, 6), plane_angles(3)
    parts = rope_parts(w_q, w_k, "adjacent")
    basis = 4.0 * torch.eye(16, dtype=torch.float64)  # sixteen residuals whose second moment is the identity
    offsets = [-3, 0, 2]
    total = torch.zeros(3, dtype=torch.float64)
    for n in basis:
        rest, cosine, sine = parts.scores(n.expand(4, 16), angles)
        score = rest + cosine + sine
        total += torch.stack([score[max(0, -d), max(0, d)] for d in offsets]) / 16
    assert torch.allclose(parts.kernel(offsets, angles), total, atol=1e-9)


def test_tied_weights_have_an_even_kernel_and_a_symmetric_matrix_need_not():
    w, _ = weights(5, 20, 8)
    angles, offsets = plane_angles(4), torch.arange(1, 20)
    tied = rope_parts(w, w, "half")
    assert (tied.kernel(offsets, angles) - tied.kernel(-offsets, angles)).abs().max() < 1e-12
    assert (tied.imaginary(0) + tied.imaginary(0).mT).abs().max() == 0  # antisymmetric: n Im n^T = 0 for each n
    assert tied.rope_imag_frac().min() > 0.2  # but not zero: unequal tokens still feel it
    u = torch.linalg.qr(weights(20, 4, seed=5)[0]).Q
    w_q = torch.cat((u, torch.zeros_like(u)), -1)
    pointing = rope_parts(w_q, torch.cat((u * angles.cos(), u * angles.sin()), -1), "half")
    assert (pointing.kernel(offsets, angles) - pointing.kernel(-offsets, angles)).abs().max() > 0.5
    assert qk_spectrum(w_q, torch.cat((u * angles.cos(), u * angles.sin()), -1)).dir_frac < 1e-7


# ---- the null


def test_random_frames_are_orthonormal_and_uniform():
    generator = torch.Generator().manual_seed(0)
    frames = torch.stack([random_frame(6, 3, generator) for _ in range(3000)])
    assert torch.allclose(frames.mT @ frames, torch.eye(3, dtype=torch.float64).expand(3000, 3, 3), atol=1e-12)
    assert frames.mean(0).abs().max() < 0.04  # sd of an entry is 1/sqrt(6 * 3000) = .0075
    assert (frames.square().mean(0) - 1 / 6).abs().max() < 0.02


# width, d_head, dir_frac, D_head of a flat spectrum with its sd, from a simulation with other code; 40 draws suffice for the tolerances
@pytest.mark.parametrize("width, d_head, dir_frac, mean, sd", [(128, 32, 0.704, 0.585, 0.024), (768, 64, 0.7067, 0.613, 0.017), (1536, 96, 0.7068, 0.619, 0.013)])
def test_null_means_of_flat_spectra(width, d_head, dir_frac, mean, sd):
    null = random_null(torch.ones(1, d_head), width, draws=40)
    assert null.mean["dir_frac"].item() == pytest.approx(dir_frac, abs=1.5e-3)
    assert null.mean["d_head"].item() == pytest.approx(mean, abs=4 * sd / 40**0.5)
    assert null.sd["d_head"].item() == pytest.approx(sd, rel=0.5)


def test_the_null_is_that_of_whole_random_matrices():
    """Against M = U diag(S) V^T built in full inside the centred subspace and measured by definition."""
    singular = torch.linspace(3, 0.1, 6, dtype=torch.float64)
    null = random_null(singular[None], 30, draws=600, centred=True)
    rng, measured = np.random.default_rng(1), []
    centre = np.eye(30) - 1 / 30
    for _ in range(600):
        u, v = (np.linalg.svd(centre @ rng.standard_normal((30, 6)), full_matrices=False)[0] for _ in range(2))
        measured.append(by_definition(u @ np.diag(singular.numpy()) @ v.T))
    for name in NULL_MEASURES:
        values = np.array([m[name] for m in measured])
        assert null.mean[name].item() == pytest.approx(values.mean(), abs=4 * values.std() * (2 / 600) ** 0.5), name
        assert null.sd[name].item() == pytest.approx(values.std(), rel=0.2), name


def test_heads_of_one_shape_share_their_draws():
    singular = torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    together, alone = random_null(singular, 40, draws=5, seed=7), random_null(singular[1:2], 40, draws=5, seed=7)
    assert torch.allclose(together.mean["d_head"][1], alone.mean["d_head"][0], atol=1e-12)
    assert not torch.allclose(alone.mean["d_head"], random_null(singular[1:2], 40, draws=5, seed=8).mean["d_head"], atol=1e-6)


def test_a_random_head_is_at_its_null_and_a_tied_one_far_below():
    w_q, w_k = weights(20, 96, 16)
    null = random_null(singular_values(w_q, w_k), 96, draws=100)
    z = null.z(qk_spectrum(w_q, w_k))
    assert z.abs().max() < 4.5 and abs(z.mean()) < 1
    assert null.z(qk_spectrum(w_q, w_q)).max() < -5


def test_centred_square_heads_lose_one_dimension():
    w_q, w_k = (fold_norm(w, centred=True) for w in weights(2, 16, 16))
    null = random_null(singular_values(w_q, w_k), 16, draws=50, centred=True)
    assert null.z(qk_spectrum(w_q, w_k)).abs().max() < 5
    with pytest.raises(ValueError, match="heads must have rank 15 at most, got more"):
        random_null(singular_values(*weights(2, 16, 16)), 16, centred=True)


def test_bad_shapes_are_refused():
    w_q, w_k = weights(20, 4)
    with pytest.raises(ValueError, match=r"width >= d_head, got \(4, 20\): transpose those of a torch Linear"):
        qk_spectrum(w_q.T, w_k.T)
    with pytest.raises(ValueError, match=r"one shape .*got \(20, 4\) and \(20, 3\)"):
        qk_spectrum(w_q, w_k[:, :3])
    with pytest.raises(ValueError, match=r"gain must have shape \[20\].*got \(4,\)"):
        fold_norm(w_q, torch.ones(4))
    with pytest.raises(ValueError, match="rotary_dim must be even and between 2 and d_head = 4, got 3"):
        rope_parts(w_q, w_k, "half", 3)
    with pytest.raises(ValueError, match="pairing must be one of .*got 'neox'"):
        rope_parts(w_q, w_k, "neox")
    with pytest.raises(ValueError, match=r"singular values must be \[head, d_head\], got shape \(4,\)"):
        random_null(torch.ones(4), 20)
    with pytest.raises(ValueError, match="draws must be >= 2 for a standard deviation, got 1"):
        random_null(torch.ones(1, 4), 20, draws=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e80])
def test_weights_that_are_no_numbers_are_refused(bad):
    """LAPACK says something about convergence, or ends the whole process."""
    w, altered = torch.randn(2, 3, 12, 4, dtype=torch.float64)
    altered[1, 5, 2] = bad
    for measure in (qk_spectrum, singular_values, lambda q, k: rope_parts(q, k, "half")):
        with pytest.raises(ValueError, match=f"w_k must be finite and below 1e.60, got {bad:g}".replace("+", ".")):
            measure(w, altered)
    values = singular_values(w, w)
    values[1, 0] = bad
    with pytest.raises(ValueError, match="singular values must be 0 to 1e"):
        random_null(values, 12, 3)


def test_a_null_of_other_values_or_sizes_is_refused():
    values = torch.ones(2, 4)
    with pytest.raises(ValueError, match="singular values must be 0 to .*got -1"):
        random_null(-values, 12, 3)
    for width in (0, -5, 12.5, math.nan):
        with pytest.raises(ValueError, match="width must be a whole number >= 2"):
            random_null(values, width, 3)
    with pytest.raises(ValueError, match="draws must be >= 2 for a standard deviation, got 2.5"):
        random_null(values, 12, 2.5)


def test_one_angle_is_not_taken_for_all_planes():
    w_q, w_k = torch.randn(2, 12, 6, dtype=torch.float64)
    parts = rope_parts(w_q, w_k, "half")
    for angles in (torch.ones(1), torch.ones(4), torch.tensor(1.0)):
        for use in (parts.frequency_centroid, lambda a: parts.kernel(torch.arange(3), a), lambda a: parts.scores(torch.randn(5, 12), a)):
            with pytest.raises(ValueError, match="angles must hold one angle for each of 3 planes"):
                use(angles)
