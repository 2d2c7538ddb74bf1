"""Figures with a point a group: scaling and trade-off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from sapus_cli import analysis
from sapus_cli.figures import data
from sapus_cli.figures.style import Look, look_of
from sapus_cli.figures.view import MOST_LINES, WHISKER, View, bytes_axis, nothing, percent, plain_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sapus_cli.analysis import Estimate, Group
    from sapus_cli.figures.canvas import Sheet


def scaling(figure: Figure, view: View) -> Sheet:
    """Throughput and time to the target over the number of workers."""
    series = data.by_workers(view.groups)[:MOST_LINES]
    table = analysis.table(view.groups, view.target, None, ["throughput", "time"])
    cells = {row.group.label: row.cells for row in table}
    left, right = figure.subplots(1, 2)
    keys, seen = [], dict.fromkeys((one.groups[0].strategy for one in series), 0)
    for one in series:
        strategy = one.groups[0].strategy
        look = look_of(strategy, seen[strategy], view.theme)
        seen[strategy] += 1
        for axes, metric in ((left, "throughput"), (right, "time")):
            _series(axes, view, look, [(g.runs[0].workers, cells[g.label][metric]) for g in one.groups])
        keys.append(Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, label=one.label))
    counts = sorted({group.runs[0].workers for group in view.groups})
    rates = [(g.runs[0].workers, rate) for g in view.groups if (rate := cells[g.label]["throughput"].value)]
    if rates:
        n, rate = min(rates, key=lambda point: (point[0], -point[1]))
        linear = [rate * count / n for count in counts]
        left.plot(counts, linear, color=view.theme.ink, linestyle=(0, (1, 2)), linewidth=view.thin, zorder=1)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_yscale("log")
        plain_log(axes.yaxis, axes.get_ylim())
        axes.margins(0.08)
        axes.set_xlabel("workers")
    left.set_ylabel("samples a second")
    right.set_ylabel(f"time to {percent(view.target)} accuracy, s")
    caption = [
        view.over_seeds(f"Mean of the seeds; {WHISKER}"),
        "Dotted: in proportion to the workers. Both axes are logarithmic.",
    ]
    if any(row["time"].bound for row in cells.values()):
        caption.append("Hollow, >: a run did not reach the target, so the true time is above.")
    return view.sheet(0.85 * view.height_mm, keys, *caption)


def _series(axes: Axes, view: View, look: Look, points: Sequence[tuple[int, Estimate]]) -> None:
    """A line over the number of workers; what is not above 0 has no place on a logarithmic axis."""
    known = [(n, cell.value, cell) for n, cell in points if cell.value is not None and cell.value > 0]
    axes.plot(
        [n for n, *_ in known],
        [value for _, value, _ in known],
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
    )
    for n, value, cell in known:
        if cell.low is not None and cell.high is not None:
            axes.vlines(n, cell.low, cell.high, color=look.color, linewidth=0.8 * view.theme.line)
        if cell.bound:
            _hollow(axes, view, look, (n, value), cell.bound)


def _hollow(axes: Axes, view: View, look: Look, point: tuple[float, float], text: str) -> None:
    axes.plot(*point, marker=look.marker, color=look.color, markerfacecolor=view.theme.paper, zorder=3)
    axes.annotate(text, point, (0.8 * view.theme.size, 0), textcoords="offset points", va="center")


def tradeoff(figure: Figure, view: View) -> Sheet:
    """Time to the target against bytes to it."""
    groups, notes = view.first(MOST_LINES)
    found = {group.label: data.cost_to(group, view.target) for group in groups}
    drawn = [group for group in groups if found[group.label]]
    if not drawn:
        raise nothing(groups, "bytes", "resources.csv has no samples of the server")
    axes = figure.subplots()
    keys, missed = [], False
    for group in drawn:
        costs = found[group.label]
        bounded = any(cost.censored for cost in costs)
        missed |= bounded
        keys.append(_mean_and_seeds(axes, view, group, costs, bounded=bounded))
    axes.set_xlabel(f"time to {percent(view.target)} test accuracy, s")
    axes.set_ylabel(f"bytes to {percent(view.target)} test accuracy")
    every = [cost for group in drawn for cost in found[group.label]]
    _from_0_or_log(axes, "x", [cost.seconds for cost in every])
    _from_0_or_log(axes, "y", [cost.n_bytes for cost in every])
    bytes_axis(axes.yaxis, axes.get_ylim()[1])
    caption = [view.over_seeds("Large: mean of the seeds; small: each seed"), "Lower left is better."]
    if missed:
        caption.append("Hollow, >: a run did not reach the target, so the true time and bytes are above.")
    notes += [f"{group.label} has no samples of the server's bytes." for group in groups if group not in drawn]
    return view.sheet(view.height_mm, keys, *caption, *notes)


def _mean_and_seeds(axes: Axes, view: View, group: Group, costs: Sequence[data.Cost], *, bounded: bool) -> Line2D:
    look = view.looks[group.label]
    x, y = [cost.seconds for cost in costs], [cost.n_bytes for cost in costs]
    point: dict[str, Any] = {"linestyle": "none", "marker": look.marker, "color": look.color}
    if len(costs) > 1:
        axes.plot(x, y, markersize=0.35 * view.theme.size, alpha=0.6, **point)
    if bounded:
        point["markerfacecolor"] = view.theme.paper
    mean = (math.fsum(x) / len(x), math.fsum(y) / len(y))
    axes.plot(*mean, markersize=0.95 * view.theme.size, label=group.label, **point)
    if bounded:
        axes.annotate(">", mean, (0.8 * view.theme.size, 0), textcoords="offset points", va="center")
    return view.key(group, **point)


def _from_0_or_log(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Logarithmic where the values are far apart."""
    axis, most = axes.xaxis if which == "x" else axes.yaxis, max(values)
    if min(values) > 0 and most > 4 * min(values):
        axes.set(**{f"{which}scale": "log"})
        plain_log(axis, axes.get_xlim() if which == "x" else axes.get_ylim())
    else:
        axes.set(**{f"{which}lim": (0, 1.1 * most or 1)})
