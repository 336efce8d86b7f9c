"""P0's theorem 1: deviations by really moving tokens, the bound in closed form, and where it is tight."""

from itertools import permutations

import pytest
import torch

from rope_heads import exclusion
from rope_heads.model import Attention
from rope_heads.scores import attention_swap_logits


def test_deviations_are_those_of_permuted_inputs():
    """Content moved: rows of the input permuted. Position moved: the same rows, read where they came from."""
    torch.manual_seed(0)
    attention, x = Attention(8, angles=torch.tensor([1.0, 0.1])).double(), torch.randn(1, 5, 8).double()
    with torch.no_grad():
        attention.qkv.weight.normal_()
        positional, symbolic = exclusion.deviations(attention_swap_logits(attention, x)[0, 0])
        base = attention.logits(x, 1)[0, 0, 0, :4]
        for row, order in enumerate(permutations(range(4))):
            moved = attention.logits(x[:, [*order, 4]], 1)[0, 0, 0, :4]  # content order[j] at slot j
            assert torch.allclose(positional[row], moved - base, atol=1e-10)
            inverse = [order.index(j) for j in range(4)]
            back = attention.logits(x[:, [*inverse, 4]], 1)[0, 0, 0, :4]  # content j at slot order[j]
            assert torch.allclose(symbolic[row], back[list(order)] - base, atol=1e-10)


@pytest.mark.parametrize("n", [3, 5, 7])
def test_the_bound_in_closed_form(n):
    """Every content stands at every slot in the same number of permutations, so that the sum over permutations is one over pairs."""
    tables = exclusion.random_tables(n, 20)
    variance, bound = exclusion.sides(tables)
    inner = tables[:, :-1, :-1]
    own = inner.diagonal(dim1=-2, dim2=-1)
    closed = ((inner - own[:, None, :]).square().sum((-2, -1)) + (inner - own[:, :, None]).square().sum((-2, -1))) / (n - 1) ** 2
    assert torch.allclose(bound, closed) and torch.allclose(variance, own.square().mean(-1) - own.mean(-1).square(), atol=1e-9)
    assert (variance <= bound + 1e-9).all()


def test_the_bound_is_tight_for_equal_parts_of_content_and_position():
    part = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    variance, bound = exclusion.sides(part[:, None] + part[None, :])
    assert float(bound) == pytest.approx(float(variance)) and variance > 0.1


def test_one_deviation_alone_bounds_nothing():
    """A positional head: no positional deviation, any variance."""
    slots = torch.tensor([0.0, 5.0, -5.0, 1.0]).double().expand(4, 4)
    positional, symbolic = exclusion.deviations(slots)
    assert positional.abs().max() == 0 and symbolic.abs().max() == 10


def test_largest_excess_by_length():
    excess = exclusion.largest_excess(range(3, 6), 30)
    assert list(excess) == ["n = 3", "n = 4", "n = 5"] and max(excess.values()) <= 1e-9
    variance, bound = exclusion.sides(exclusion.random_tables(4, 30))
    assert excess["n = 4"] == float((variance - bound).max())
    with pytest.raises(ValueError, match="1 to 8 keys before the query, got 9"):
        exclusion.deviations(torch.zeros(10, 10))
