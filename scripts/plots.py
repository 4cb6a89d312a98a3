"""Prepares matplotlib for the plots of the documentation."""

from __future__ import annotations

from typing import Any

GRAY = "#888888"
BLUE, ORANGE, GREEN, RED = "#3b82d0", "#d9822b", "#3f9a5f", "#c8553d"
OF_TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def neutral_pyplot() -> Any:
    """Returns pyplot with colors of middle lightness, which light and dark pages show."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.use("Agg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none", "svg.hashsalt": "grpo", "font.size": 8,
            "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, RED]),
            "axes.facecolor": "none", **dict.fromkeys(OF_TEXT, GRAY),
        }
    )  # fmt: skip
    from matplotlib import pyplot

    return pyplot
