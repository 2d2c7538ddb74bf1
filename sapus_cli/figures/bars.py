"""Figures with a bar a group: speed-up and throughput."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from sapus_cli import analysis
from sapus_cli.figures import data
from sapus_cli.figures.style import mix
from sapus_cli.figures.view import WHISKER, View, nothing, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sapus_cli.analysis import Estimate, Group
    from sapus_cli.figures.canvas import Sheet


def _bars(axes: Axes, view: View, bars: Sequence[tuple[Group, Estimate]], unit: str) -> None:
    for place, (group, cell) in enumerate(bars):
        color = view.looks[group.label].color
        if cell.value is None:
            axes.text(0, place, " ?" if cell.bound else " -", va="center", size=0.9 * view.theme.size)
            continue
        face, hatch = (mix(color, view.theme.paper, 0.55), "////") if cell.bound else (color, "")
        axes.barh(place, cell.value, height=0.68, edgecolor=color, linewidth=view.thin, facecolor=face, hatch=hatch)
        end = cell.value
        if cell.low is not None and cell.high is not None:
            spread = [[max(0.0, cell.value - cell.low)], [max(0.0, cell.high - cell.value)]]
            axes.errorbar(
                cell.value, place, xerr=spread, fmt="none", ecolor=view.theme.ink, elinewidth=0.8 * view.theme.line,
                capsize=0.3 * view.theme.size,
            )  # fmt: skip
            end = max(end, cell.high)
        axes.annotate(
            f"{cell.bound} {data.number(cell.value)}{unit}".strip(), (end, place), (0.4 * view.theme.size, 0),
            textcoords="offset points", va="center", size=0.9 * view.theme.size,
        )  # fmt: skip
    axes.set_yticks(range(len(bars)), [group.name for group, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    ends = [max(cell.value, cell.high or 0) for _, cell in bars if cell.value is not None]
    axes.set_xlim(0, 1.18 * max(ends, default=1) or 1)


def _filled(view: View, label: str) -> str:
    """A label in as many lines as it needs beside the names of bars."""
    return textwrap.fill(label, max(12, round(0.6 * view.width_mm / (0.2 * view.theme.size))))


def _height_of_bars(axes: Axes, view: View) -> float:
    lines = axes.get_xlabel().count("\n") + 1
    return (5.2 * len(axes.get_yticks()) + 4 * lines + 8) * view.scale


def _best_first(bars: list[tuple[Group, Estimate]]) -> list[tuple[Group, Estimate]]:
    return sorted(bars, key=lambda bar: (bar[1].value is None, -(bar[1].value or 0)))


def speedup(figure: Figure, view: View) -> Sheet:
    """Speed-up of every group over the baseline in time to the target."""
    rows = analysis.table(view.groups, view.target, view.request.baseline, ["speedup"])
    bars = _best_first([(row.group, row.cells["speedup"]) for row in rows])
    axes = figure.subplots()
    _bars(axes, view, bars, "x")
    axes.axvline(1, color=view.theme.ink, linewidth=view.thin, linestyle=(0, (3, 2)), zorder=0.9)
    axes.set_xlabel(_filled(view, f"speed-up over {view.request.baseline} in time to {percent(view.target)} accuracy"))
    bounded = any(cell.bound for _, cell in bars)
    return view.sheet(
        _height_of_bars(axes, view),
        [],
        view.over_seeds(f"Bar: geometric mean over the seeds that both have; {WHISKER}"),
        *(["Hatched: a run did not reach the target, so the true value is above (>) or below (<)."] if bounded else []),
        *(["?: it cannot be told."] if any(cell.bound == "?" for _, cell in bars) else []),
    )


def throughput(figure: Figure, view: View) -> Sheet:
    """Training samples a second."""
    rows = analysis.table(view.groups, 1.0, None, ["throughput"])
    bars = _best_first([(row.group, row.cells["throughput"]) for row in rows])
    if all(cell.value is None for _, cell in bars):
        raise nothing(view.groups, "throughput", "the runs have neither a summary nor evaluations")
    axes = figure.subplots()
    _bars(axes, view, bars, "")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(_filled(view, "training samples a second, all workers together"))
    return view.sheet(_height_of_bars(axes, view), [], view.over_seeds(f"Bar: mean of the seeds; {WHISKER}"))
