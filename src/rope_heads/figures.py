"""The look of the book's figures: fixed colours, white background, and the few plots that more than one chapter draws.

The colours keep apart under protanopia, deuteranopia and tritanopia, and stand out from white by 3 : 1 or more.
"""

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns

POSITIONAL = "#0072b2"  # blue, in every figure and nowhere for anything else
SYMBOLIC = "#d55e00"  # vermilion, likewise
PUBLISHED = "#6e6e6e"  # the papers' curves, always dashed and behind ours
HOP_COLOURS = {1: "#204060", 2: "#8020e0", 3: "#602000", 4: "#c08060"}

WIDTH = 7.2  # inches; the page shows a figure at about this size
STYLE = {
    "figure.figsize": (WIDTH, 3.4), "figure.dpi": 144, "figure.constrained_layout.use": True, "figure.facecolor": "white",
    "savefig.facecolor": "white", "axes.facecolor": "white", "axes.titlelocation": "left", "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.labelsize": 10, "font.size": 10, "legend.frameon": False, "legend.fontsize": 9,
    "xtick.labelsize": 9, "ytick.labelsize": 9, "lines.linewidth": 1.8,
}  # fmt: skip


def use_style() -> None:
    """Set the book's style for all figures that follow; a chapter calls it once."""
    sns.set_theme(context="notebook", style="ticks", rc={**STYLE, "axes.spines.top": False, "axes.spines.right": False})


def curve_with_band(ax: plt.Axes, x, runs, colour: str, label: str | None = None, interval: float = 1.0) -> None:
    """Median over runs as a line, the middle `interval` of the runs as a band (1 = from the lowest to the highest run).

    `x` has shape [point], `runs` [run, point]: a run (a seed) is a row. NaN leaves a run out at that point.
    """
    x, runs = np.asarray(x), np.atleast_2d(np.asarray(runs, dtype=float))
    if runs.shape[1] != len(x):
        raise ValueError(f"runs must have shape [run, {len(x)}] like x, got {runs.shape}")
    if not 0 < interval <= 1:
        raise ValueError(f"interval must be in (0, 1], got {interval}")
    low, middle, high = np.nanquantile(runs, [(1 - interval) / 2, 0.5, (1 + interval) / 2], axis=0)
    ax.plot(x, middle, color=colour, label=label, zorder=3)
    if len(runs) > 1:
        ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0, zorder=2)


def published_line(ax: plt.Axes, x, y, label: str | None = "paper") -> None:
    """A curve read from a paper: grey, dashed, behind ours."""
    ax.plot(x, y, color=PUBLISHED, linestyle=(0, (4, 2)), linewidth=1.4, label=label, zorder=1)


VERDICTS = {"holds": ("o", "#009e73"), "holds with a limit": ("D", "#e69f00"), "does not hold": ("X", "#b3005c"),
            "not testable here": ("_", "#6e6e6e"), "open": ("o", "#6e6e6e")}  # marker and colour; open ones are hollow  # fmt: skip


def verdict_dots(ax: plt.Axes, groups: dict[str, list[str]]) -> None:
    """One row a group, one mark a claim, sorted by verdict. `groups`: {row label: verdicts of its claims}."""
    order, used = list(VERDICTS), [verdict for verdicts in groups.values() for verdict in verdicts]
    for y, verdicts in enumerate(groups.values()):
        for x, verdict in enumerate(sorted(verdicts, key=order.index)):
            marker, colour = VERDICTS[verdict]
            ax.plot(x, y, marker, color=colour, markersize=9, markeredgewidth=1.6, markerfacecolor="none" if verdict == "open" else colour)
    for verdict, (marker, colour) in VERDICTS.items():
        if verdict in used:
            face = "none" if verdict == "open" else colour
            ax.plot([], [], marker, color=colour, markersize=9, markeredgewidth=1.6, markerfacecolor=face, label=f"{verdict} ({used.count(verdict)})")
    ax.set(yticks=range(len(groups)), yticklabels=list(groups), xticks=[], ylim=(len(groups) - 0.5, -0.5))
    ax.spines[["bottom", "left"]].set_visible(False)
    ax.tick_params(length=0)
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.02), ncols=3, columnspacing=1.2, handletextpad=0.3)
