"""Figures with a panel a group: what every worker did."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sapus_cli.errors import UserError
from sapus_cli.figures import data
from sapus_cli.figures.style import mix
from sapus_cli.figures.view import View, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sapus_cli.analysis import Group
    from sapus_cli.figures.canvas import Sheet


MOST_PANELS = 12
MOST_TIMELINES = 6
MOST_WORKERS = 16
MOST_POINTS = 2000
"""Points in one panel, so that no file becomes unwieldy."""

MOST_SPANS = 5000
_PANEL_MM = 58
_MOST_COLUMNS = 4
_DASHED, _DOTTED = (0, (4.0, 1.5)), (0, (1.0, 1.0))


class _OfWorkers(NamedTuple):
    """A column of pushes.csv that is drawn for every worker.

    Attributes:
        column: its name.
        label: of the axis.
        bounds: columns that bound it: name, how those of several workers are joined, dash.
        thin: leaves no more points than a panel can bear.
        style: of the lines.
    """

    column: str
    label: str
    bounds: Sequence[tuple[str, Any, tuple[int, tuple[float, float]]]]
    thin: Callable[[Any, Any, int], tuple[Any, Any]]
    style: Mapping[str, Any]


def interval(figure: Figure, view: View) -> Sheet:
    """Update interval of every worker over time, with the bounds."""
    bounds = (("h_max", np.fmax, _DASHED), ("h_min", np.fmin, _DOTTED))
    what = _OfWorkers("n_steps", "update interval, steps", bounds, data.thinned, {"drawstyle": "steps-pre"})
    return _of_workers(figure, view, what)


def weights(figure: Figure, view: View) -> Sheet:
    """Weight of every push over time."""
    points = {"linestyle": "none", "marker": ".", "markersize": 2 * view.scale}
    return _of_workers(figure, view, _OfWorkers("weight", "weight of a push", (), data.every, points))


def _of_workers(figure: Figure, view: View, what: _OfWorkers) -> Sheet:
    groups, notes = view.first(MOST_PANELS)
    columns = ["t_s", what.column, *(bound for bound, *_ in what.bounds)]
    found = {group.label: data.pushes(group.runs[0], columns) for group in groups}
    drawn = [g for g in groups if any(np.isfinite(w[what.column]).any() for w in found[g.label].values())]
    if not drawn:
        raise nothing(groups, what.label.partition(",")[0], f"pushes.csv has no row with `{what.column}`")
    notes += [*_without(groups, drawn), *_hidden(found.values())]
    bounded: set[str] = set()
    panels = _panels(figure, view, drawn)
    for axes, group in zip(panels, drawn, strict=True):
        workers = _chosen(found[group.label])
        for place, (rank, worker) in enumerate(workers.items()):
            x, y = what.thin(worker["t_s"], worker[what.column], max(60, MOST_POINTS // len(workers)))
            if what.bounds and len(x):
                x, y = np.append(0, x), np.append(y[0], y)  # an interval begins with the push before, or at the start
            color = _shade(view, group, place, len(workers))
            axes.plot(x, y, color=color, linewidth=0.7 * view.theme.line, label=f"worker {rank}", **what.style)
        for bound, join, dash in what.bounds:
            line = data.envelope([(worker["t_s"], worker[bound]) for worker in workers.values()], join)
            if line is not None:
                ink, style = view.theme.ink, dict(what.style)
                axes.plot(*line, color=ink, linewidth=view.thin, linestyle=dash, label=bound, **style)
                bounded.add(bound)
        axes.margins(x=0.02)
    panels[0].set_ylim(0, 1.04 * panels[0].get_ylim()[1])
    figure.supylabel(what.label, size=view.theme.size)
    keys = [
        Line2D([], [], color=mix(view.theme.ink, view.theme.paper, 0.6), label="worker 0, the faintest"),
        Line2D([], [], color=view.theme.ink, label="to the last, the strongest"),
    ]
    for bound, join, dash in what.bounds:
        if bound in bounded:
            label = f"{bound}, the {'greatest' if join is np.fmax else 'least'} of them"
            keys.append(Line2D([], [], color=view.theme.ink, linestyle=dash, linewidth=view.thin, label=label))
    rows = math.ceil(len(drawn) / _columns(view, len(drawn)))
    return view.sheet((32 * rows + 8) * view.scale, keys, f"{_seeds_shown(drawn)}.", *notes)


def _columns(view: View, n: int) -> int:
    return max(1, min(n, round(view.width_mm / (_PANEL_MM * view.scale)), _MOST_COLUMNS))


def _panels(figure: Figure, view: View, groups: Sequence[Group]) -> list[Axes]:
    """Axes for every group, in as many columns as the width has room for."""
    columns = _columns(view, len(groups))
    grid = figure.subplots(math.ceil(len(groups) / columns), columns, squeeze=False, sharey=True).ravel()
    for axes in grid[len(groups) :]:
        axes.remove()
    letters = round(view.width_mm / columns / (0.24 * view.theme.size))
    for place, group in enumerate(groups):
        grid[place].set_title(textwrap.fill(group.name, letters))
        grid[place].xaxis.set_major_locator(MaxNLocator(5))
        if place + columns >= len(groups):
            grid[place].set_xlabel("time, s")
    return list(grid[: len(groups)])


def _without(groups: Sequence[Group], drawn: Sequence[Group]) -> list[str]:
    missing = [group.label for group in groups if group not in drawn]
    return [f"No push with a value: {', '.join(missing)}."] if missing else []


def _chosen(workers: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """No more workers than can be told."""
    return {rank: workers[rank] for rank in data.some(sorted(workers), MOST_WORKERS)}


def _hidden(found: Iterable[Sized]) -> list[str]:
    """A sentence if `_chosen` leaves some out."""
    if all(len(workers) <= MOST_WORKERS for workers in found):
        return []
    return [f"Of more than {MOST_WORKERS} workers, as many are shown, evenly spaced by rank."]


def _shade(view: View, group: Group, place: int, n: int) -> str:
    """The colour of the group, from faint to strong by worker."""
    color = view.looks[group.label].color
    middle = (n - 1) / 2
    if place < middle:
        return mix(color, view.theme.paper, 0.55 * (1 - place / middle))
    return mix(color, view.theme.ink, 0.3 * (place / middle - 1) if middle else 0.0)


def _seeds_shown(groups: Sequence[Group]) -> str:
    return f"Seed {' or '.join(str(seed) for seed in sorted({group.runs[0].seed for group in groups}))}"


def timeline(figure: Figure, view: View) -> Sheet:
    """Who computed, exchanged and waited."""
    groups, notes = view.first(MOST_TIMELINES)
    found = {group.label: data.pushes(group.runs[0], data.SPANS) for group in groups}
    drawn = [group for group in groups if found[group.label]]
    if not drawn:
        raise nothing(groups, "timeline", "pushes.csv has no row")
    notes += _without(groups, drawn)
    notes += _hidden(found.values())
    shown = [_chosen(found[group.label]) for group in drawn]
    windows = data.windows([list(workers.values()) for workers in shown], view.request.window)
    sizes = [len(workers) + 1 for workers in shown]
    panels = figure.subplots(len(drawn), 1, squeeze=False, gridspec_kw={"height_ratios": sizes}).ravel()
    for axes, group, workers, window in zip(panels, drawn, shown, windows, strict=True):
        _gantt(axes, view, group, list(workers.values()), window)
        axes.set_yticks(range(len(workers)), [str(rank) for rank in workers])
        axes.set_title(group.name)
    panels[-1].set_xlabel("time, s")
    figure.supylabel("worker", size=view.theme.size)
    ink, paper = view.theme.ink, view.theme.paper
    keys = [
        Patch(facecolor=mix(ink, paper, 0.25), label="computes"),
        Patch(facecolor=mix(ink, paper, 0.6), label="exchanges"),
        Patch(facecolor=paper, edgecolor=ink, hatch="//////", linewidth=0.5, label="waits, its reply withheld"),
    ]
    height_mm = (sum(sizes) * 3.2 + len(drawn) * 7 + 12) * view.scale
    return view.sheet(height_mm, keys, f"{_seeds_shown(drawn)}; reconstructed from pushes.csv.", *notes)


def _gantt(
    axes: Axes, view: View, group: Group, workers: Sequence[dict[str, Any]], window: tuple[float, float]
) -> None:
    color, (begin, end) = view.looks[group.label].color, window
    styles: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.8, {"facecolor": color}),
        (0.4, {"facecolor": mix(color, view.theme.paper, 0.6)}),
        (0.4, {"facecolor": view.theme.paper, "edgecolor": color, "hatch": "//////"}),
    )
    n = 0
    for place, worker in enumerate(workers):
        for spans, (height, style) in zip(data.spans(worker), styles, strict=True):
            seen = spans[(spans[:, 1] > begin) & (spans[:, 0] < end)]
            n += len(seen)
            if n > MOST_SPANS:
                raise UserError(
                    f"{group.label} has more than {MOST_SPANS:,} bars from {begin:.6g} to {end:.6g} s; "
                    "give a shorter --window"
                )
            bars = [(float(a), float(b - a)) for a, b in np.clip(seen, begin, end)]
            axes.broken_barh(bars, (place - height / 2, height), linewidth=0.3 if "hatch" in style else 0, **style)
    axes.set_xlim(begin, end if end > begin else begin + 1)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
