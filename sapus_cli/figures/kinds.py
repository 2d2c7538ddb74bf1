"""The function that draws each kind of figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sapus_cli.figures import bars, curves, panels, points

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

    from sapus_cli.figures.canvas import Sheet
    from sapus_cli.figures.view import View

DRAW: Mapping[str, Callable[[Figure, View], Sheet]] = {
    "speedup": bars.speedup,
    "accuracy": curves.accuracy,
    "loss": curves.loss,
    "throughput": bars.throughput,
    "cpu": curves.cpu,
    "bandwidth": curves.bandwidth,
    "interval": panels.interval,
    "staleness": curves.staleness,
    "weights": panels.weights,
    "timeline": panels.timeline,
    "scaling": points.scaling,
    "tradeoff": points.tradeoff,
}
"""Each draws its axes on an empty figure and says what belongs into legend and caption."""
