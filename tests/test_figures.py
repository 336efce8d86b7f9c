"""The figures' colours measured as a colour-blind reader sees them, and what the shared plots draw."""

import matplotlib

matplotlib.use("agg")

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from rope_heads import figures

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def linear(colour: str) -> np.ndarray:
    c = np.asarray(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(colour: str, sight) -> np.ndarray:
    """CIE L*a*b* of a colour as seen with one kind of sight."""
    xyz = TO_XYZ @ np.clip(np.asarray(sight) @ linear(colour), 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT.values(), ids=SIGHT)
@pytest.mark.parametrize(
    "colours", [[figures.POSITIONAL, figures.SYMBOLIC, figures.PUBLISHED], [*figures.HOP_COLOURS.values()]], ids=["kinds", "hops"]
)
def test_colours_of_one_figure_keep_apart(colours, sight):
    """20 units of L*a*b* are about ten times the least difference that is seen side by side."""
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 20


def test_colours_stand_out_from_white():
    """WCAG 2.1, 1.4.11: graphics need a contrast of 3 : 1."""
    for colour in (figures.POSITIONAL, figures.SYMBOLIC, figures.PUBLISHED, *figures.HOP_COLOURS.values()):
        assert 1.05 / (TO_XYZ[1] @ linear(colour) + 0.05) >= 3


@pytest.fixture
def ax():
    figures.use_style()
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def test_band_shows_median_and_middle_of_the_runs(ax):
    runs = np.array([[0.0, 0.1], [0.2, np.nan], [0.3, 0.5], [0.9, 0.9], [1.0, 1.0]])
    figures.curve_with_band(ax, [10, 20], runs, figures.POSITIONAL, "ours", interval=0.5)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.3, 0.7])  # the run with nan is left out of its point only
    ys = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (ys.min(), ys.max()) == pytest.approx((0.2, 0.925))
    figures.curve_with_band(ax, [10, 20], runs, figures.POSITIONAL)
    ys = ax.collections[1].get_paths()[0].vertices[:, 1]
    assert (ys.min(), ys.max()) == (0.0, 1.0)


def test_one_run_has_no_band(ax):
    figures.curve_with_band(ax, [1, 2, 3], [0.1, 0.2, 0.3], figures.SYMBOLIC)
    assert len(ax.lines) == 1 and not ax.collections


def test_published_lines_lie_behind_ours(ax):
    figures.curve_with_band(ax, [1, 2], [[0, 1], [1, 0]], figures.SYMBOLIC)
    figures.published_line(ax, [1, 2], [0, 1])
    ours, theirs = ax.lines
    assert theirs.get_zorder() < ax.collections[0].get_zorder() < ours.get_zorder() and theirs.get_linestyle() == "--"
    assert ax.get_facecolor() == ax.figure.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("runs, interval, message", [(np.zeros((2, 3)), 1, r"runs must have shape \[run, 2\] like x, got \(2, 3\)"),
                                                     (np.zeros((2, 2)), 0, r"interval must be in \(0, 1\], got 0")])  # fmt: skip
def test_bad_bands_are_named(ax, runs, interval, message):
    with pytest.raises(ValueError, match=message):
        figures.curve_with_band(ax, [1, 2], runs, figures.SYMBOLIC, interval=interval)
