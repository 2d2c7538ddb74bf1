"""Figures with a line a group: accuracy, loss, load of the server, staleness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from sapus_cli.figures import AXES, data
from sapus_cli.figures.view import MOST_LINES, View, bytes_axis, nothing, percent, plain_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from sapus_cli.analysis import Group
    from sapus_cli.figures.canvas import Sheet
    from sapus_cli.figures.data import Band


def _curve(axes: Axes, view: View, group: Group, band: Band, **more: Any) -> None:
    color, marker, dash = view.looks[group.label]
    every = max(1, math.ceil(len(band.x) / 8))
    # Markers of different groups are set off against each other, so that lines on top of each other can be told.
    first = view.groups.index(group) * every // max(1, len(view.groups))
    axes.plot(
        band.x,
        band.mean,
        color=color,
        linestyle=dash,
        marker=marker,
        markevery=(first, every),
        label=group.label,
        **more,
    )
    if len(group.runs) > 1:
        axes.fill_between(
            band.x, band.low, band.high, color=color, alpha=0.18, linewidth=0, step="post" if more else None
        )
    if not all(run.finished for run in group.runs) and len(band.x):
        axes.plot(band.x[-1], band.mean[-1], color=color, marker="x", markersize=view.theme.size, linestyle="none")


def _evals(figure: Figure, view: View, y: str, scale: float) -> tuple[Axes, list[Line2D], list[str]]:
    axes = figure.subplots()
    x = view.request.x
    groups, notes = view.first(MOST_LINES)
    keys: list[Line2D] = []
    for group in groups:
        curves = [curve for run in group.runs if len((curve := data.evaluations(run, y, x))[0])]
        band = data.band(curves) if curves else None
        if band is None or not len(band.x):
            notes.append(f"{group.label} has no evaluation that all its seeds cover.")
            continue
        if len(curves) < len(group.runs):
            notes.append(f"{group.label}: {len(curves)} of {len(group.runs)} seeds have evaluations.")
        scaled = data.Band(band.x, *(scale * values for values in band[1:]))
        _curve(axes, view, group, scaled)
        keys.append(view.key(group))
    if not keys:
        raise nothing(groups, f"test {y}", f"there is no evaluation over {x}")
    axes.set_xlabel(AXES[x])
    axes.margins(x=0.02)
    if x == "bytes":
        bytes_axis(axes.xaxis, axes.get_xlim()[1])
    else:
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return axes, keys, [view.band, *notes]


def accuracy(figure: Figure, view: View) -> Sheet:
    """Test accuracy over time, samples, bytes or version."""
    axes, keys, caption = _evals(figure, view, "accuracy", 100)
    axes.set_ylabel("test accuracy, %")
    _without_the_start(axes)
    if view.request.target is not None:
        axes.axhline(100 * view.target, color=view.theme.ink, linewidth=view.thin, linestyle=(0, (1, 2)))
        caption.append(f"Dotted: target {percent(view.target)}.")
    return view.sheet(view.height_mm, keys, *caption)


def _without_the_start(axes: Axes) -> None:
    """Begin the axis half way up to where the least of the curves ends: what is compared is how they end."""
    means = [np.asarray(line.get_ydata(), float) for line in axes.lines if len(np.asarray(line.get_ydata())) > 1]
    start, end = min((y.min() for y in means), default=0.0), min((y[-1] for y in means), default=0.0)
    axes.set_ylim(bottom=(start + end) / 2 if end > start else None)


def loss(figure: Figure, view: View) -> Sheet:
    """Test loss over time, samples, bytes or version; logarithmic."""
    axes, keys, caption = _evals(figure, view, "loss", 1)
    axes.set_ylabel("test loss (logarithmic)")
    if any((np.asarray(line.get_ydata(), float) > 0).any() for line in axes.lines):
        axes.set_yscale("log")
        plain_log(axes.yaxis, axes.get_ylim())
    return view.sheet(view.height_mm, keys, *caption)


def _rates(
    figure: Figure, view: View, columns: Mapping[str, str], scale: float, unit: str
) -> tuple[list[Axes], list[Line2D], list[str]]:
    panels = list(np.atleast_1d(figure.subplots(1, len(columns), sharey=True)))
    groups, notes = view.first(MOST_LINES)
    keys: list[Line2D] = []
    for group in groups:
        bands = [data.rates(group.runs, column, scale) for column in columns]
        if any(band is None for band in bands):
            notes.append(f"{group.label} has too few samples of the server.")
            continue
        means = []
        for axes, band in zip(panels, bands, strict=True):
            assert band is not None  # noqa: S101 - checked above
            _curve(axes, view, group, band)
            means.append(data.number(float(band.mean.mean())))
        keys.append(view.key(group, f"  {' / '.join(means)} {unit}"))
    if not keys:
        raise nothing(groups, "rates of the server", "resources.csv has no two samples of it")
    for axes, title in zip(panels, columns.values(), strict=True):
        axes.set_xlabel("time, s")
        axes.set_title(title)
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)
        axes.margins(x=0.02)
    return panels, keys, [view.band, *notes]


def cpu(figure: Figure, view: View) -> Sheet:
    """CPU load of the server process over time."""
    panels, keys, caption = _rates(figure, view, {"cpu_s": ""}, 100, "%")
    panels[0].set_ylabel("server CPU, % of a core")
    return view.sheet(view.height_mm, keys, *caption, "Beside the name: mean over the run.")


def bandwidth(figure: Figure, view: View) -> Sheet:
    """Rate of the server's link in each direction over time."""
    columns = {"rx_bytes": "received by the server", "tx_bytes": "sent by the server"}
    panels, keys, caption = _rates(figure, view, columns, 8e-9, "Gbit/s")
    panels[0].set_ylabel("Gbit/s")
    return view.sheet(0.8 * view.height_mm, keys, *caption, "Beside the name: mean over the run, received / sent.")


def staleness(figure: Figure, view: View) -> Sheet:
    """Which share of the pushes was how stale."""
    groups, notes = view.first(MOST_LINES)
    bands = {group.label: band for group in groups if (band := data.staleness(group.runs)) is not None}
    notes += [f"{group.label} has no push." for group in groups if group.label not in bands]
    if not bands:
        raise nothing(groups, "staleness", "there is no push")
    axes = figure.subplots()
    drawn = [group for group in groups if group.label in bands]
    most = max(float(band.x[-1]) for band in bands.values())
    right = 1.05 * most + 1
    for place, group in enumerate(drawn):
        x, *values = bands[group.label]
        # Steps come up from 0 at the left and go on to the edge at the right.
        steps = (np.concatenate([[0.0], y, y[-1:]]) for y in values)
        stepped = data.Band(np.concatenate([[-1.0], x, [right]]), *steps)
        # Lines that lie on each other are told by their width.
        width = view.theme.line * (2.4 - 1.4 * place / len(drawn))
        _curve(axes, view, group, stepped, drawstyle="steps-post", linewidth=width)
    axes.set_xlim(-0.5, right - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("staleness, versions")
    axes.set_ylabel("pushes at most that stale, %")
    axes.set_ylim(0, 103)
    return view.sheet(view.height_mm, [view.key(group) for group in drawn], view.band, *notes)
