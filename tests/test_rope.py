"""Rotary embedding against rotation matrices written out number by number, complex powers, and exact fractions."""

import cmath
import math
from decimal import Decimal, getcontext

import pytest
import torch

from rope_heads.rope import PAIRINGS, adjacent_to_half, join_pairs, plane_angles, rotary_tables, rotate, split_pairs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rotation_matrix(position: float, angles: list[float], d_head: int, pairing: str) -> torch.Tensor:
    """The d_head x d_head matrix of RoFormer's equation 15, filled entry by entry in fp64."""
    matrix, planes = torch.eye(d_head, dtype=torch.float64), len(angles)
    for k, angle in enumerate(angles):
        a, b = (2 * k, 2 * k + 1) if pairing == "adjacent" else (k, k + planes)
        c, s = math.cos(position * angle), math.sin(position * angle)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
    return matrix


def turned(x: torch.Tensor, positions, angles, pairing: str) -> torch.Tensor:
    """x [position, d_head] through the functions under test, in fp64."""
    cos, sin = rotary_tables(torch.as_tensor(positions), torch.as_tensor(angles, dtype=torch.float64), torch.float64)
    return rotate(x, cos, sin, pairing)


def test_angles_are_the_papers():
    angles = plane_angles(64)
    # P1, Table 1: the angle of a one-based id is 10000^(-(id - 1) / 64); the decimals printed there
    assert [round(angles[i - 1].item(), 4) for i in (1, 2, 10, 38, 42)] == [1.0, 0.8660, 0.2738, 0.0049, 0.0027]
    getcontext().prec = 40
    for k in (0, 1, 17, 63):
        exact = float((Decimal(-k) / 64 * Decimal(10_000).ln()).exp())
        assert angles[k].item() == pytest.approx(exact, rel=1e-14)
    assert torch.all(angles[1:] < angles[:-1]) and angles.dtype == torch.float64
    assert plane_angles(3, base=8.0).tolist() == pytest.approx([1.0, 0.5, 0.25], rel=1e-14)


@pytest.mark.parametrize("planes, base, message", [(0, 10.0, "planes must be >= 1, got 0"), (4, 0.0, "base must be > 0, got 0.0"),
                                                   (4, math.nan, "base must be > 0, got nan")])  # fmt: skip
def test_bad_angles_are_refused(planes, base, message):
    with pytest.raises(ValueError, match=message):
        plane_angles(planes, base)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("d_head, planes", [(2, 1), (8, 4), (10, 3), (7, 2), (128, 64)])
def test_rotate_is_the_rotation_matrix(pairing, d_head, planes):
    angles, positions = plane_angles(planes), [0, 1, 2, 16, 1017]
    x = torch.randn(len(positions), d_head, dtype=torch.float64)
    expected = torch.stack([rotation_matrix(p, angles.tolist(), d_head, pairing) @ row for p, row in zip(positions, x)])
    torch.testing.assert_close(turned(x, positions, angles, pairing), expected, atol=1e-12, rtol=0)


def test_rotate_is_complex_multiplication():
    angles, position = [1.0, 0.866, 0.0027], 5
    z = [complex(1, 2), complex(-0.5, 0.25), complex(3, -1)]
    x = torch.tensor([[part for number in z for part in (number.real, number.imag)]], dtype=torch.float64)
    expected = [part for number, angle in zip(z, angles) for w in [number * cmath.exp(1j * position * angle)] for part in (w.real, w.imag)]
    assert turned(x, [position], angles, "adjacent")[0].tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_accepts_any_layout_in_memory(pairing):
    """Slices with an odd offset, odd strides, transposed axes: none may change the numbers."""
    angles = plane_angles(2)
    cos, sin = rotary_tables(torch.arange(6), angles)
    wide = torch.randn(2, 6, 11)
    turned_axes = torch.randn(4, 2, 6).permute(1, 2, 0), torch.randn(6, 2, 4).transpose(0, 1)
    for x in (wide[..., 1:5], wide[..., 1:6], wide[..., ::2][..., :4], *turned_axes):
        torch.testing.assert_close(rotate(x, cos, sin, pairing), rotate(x.clone(memory_format=torch.contiguous_format), cos, sin, pairing))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_in_half_precision_loses_nothing_but_the_input(pairing):
    cos, sin = rotary_tables(torch.tensor([5000]), plane_angles(8))
    x = torch.randn(3, 1, 20).bfloat16()
    torch.testing.assert_close(rotate(x, cos, sin, pairing).float(), rotate(x.float(), cos, sin, pairing), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_dot_product_sees_distance_only(pairing):
    """P1, section 2: q_i . k_j after rotation depends on i - j. Checked for both signs of the distance and far from the origin."""
    angles = plane_angles(8)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64)
    for distance in (-3, 0, 1, 40):
        products = [(turned(q, [j + distance], angles, pairing) * turned(k, [j], angles, pairing)).sum().item() for j in (3, 7, 100, 5000)]
        assert products == pytest.approx([products[0]] * 4, abs=1e-11)
        single = (turned(q, [distance], angles, pairing) * k).sum().item()
        assert products[0] == pytest.approx(single, abs=1e-11)


def test_direction_of_the_turn():
    """A query looks back by d when its key-aligned vector was turned by -d: the sign convention the Index construction needs."""
    angle = torch.tensor([0.3], dtype=torch.float64)
    key = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(10, 2)
    keys = turned(key, range(10), angle, "adjacent")
    query = turned(turned(key[:1], [-4], angle, "adjacent"), [9], angle, "adjacent")
    assert (keys @ query[0]).argmax().item() == 9 - 4


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_keeps_lengths_and_the_rest(pairing):
    x = torch.randn(5, 12, dtype=torch.float64)
    y = turned(x, range(5), plane_angles(4), pairing)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    assert torch.equal(y[:, 8:], x[:, 8:]) and torch.equal(y[0], x[0])


def test_pairs_split_and_join():
    x = torch.arange(8.0)
    assert [t.tolist() for t in split_pairs(x, "adjacent")] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [t.tolist() for t in split_pairs(x, "half")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for pairing in PAIRINGS:
        assert torch.equal(join_pairs(*split_pairs(x, pairing), pairing), x)


def test_unknown_pairing_is_refused_by_name():
    cos, sin = rotary_tables(torch.arange(1), plane_angles(1))
    for function, arguments in ((split_pairs, (cos,)), (join_pairs, (cos, sin)), (rotate, (torch.zeros(1, 2), cos, sin))):
        with pytest.raises(ValueError, match="pairing must be one of .*'adjacent', 'half'.*, got 'neox'"):
            function(*arguments, "neox")


@pytest.mark.parametrize("rotary_dim, d_head", [(2, 2), (8, 8), (6, 10)])
def test_layouts_agree_under_the_permutation(rotary_dim, d_head):
    p = torch.cat((adjacent_to_half(rotary_dim), torch.arange(rotary_dim, d_head)))
    x, angles = torch.randn(7, d_head, dtype=torch.float64), plane_angles(rotary_dim // 2)
    assert sorted(p.tolist()) == list(range(d_head))
    adjacent, half = turned(x, range(7), angles, "adjacent"), turned(x[:, p], range(7), angles, "half")
    torch.testing.assert_close(adjacent[:, p], half, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rotary_dim", [0, -2, 3])
def test_permutation_needs_an_even_number(rotary_dim):
    with pytest.raises(ValueError, match=f"rotary_dim must be a positive even number, got {rotary_dim}"):
        adjacent_to_half(rotary_dim)


def test_tables_stay_exact_far_out():
    """Phases formed in fp32 are off by up to 6e-4 at 10,000 tokens and more beyond; rounding cosine and sine once leaves 6e-8."""
    positions, angle = [9_999, 50_000, 1_000_000], plane_angles(64)[1].item()
    cos, sin = rotary_tables(torch.tensor(positions), torch.tensor([angle], dtype=torch.float64))
    assert cos[:, 0].tolist() == pytest.approx([math.cos(p * angle) for p in positions], abs=6e-8)
    assert sin[:, 0].tolist() == pytest.approx([math.sin(p * angle) for p in positions], abs=6e-8)
    assert cos.dtype == torch.float32
