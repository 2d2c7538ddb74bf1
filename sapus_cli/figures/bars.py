"""Figures with a bar a group: speed-up and throughput."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from sapus_cli import analysis, pivot
from sapus_cli.figures import data
from sapus_cli.figures.style import looks, mix
from sapus_cli.figures.view import WHISKER, View, nothing, percent, plain_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sapus_cli.analysis import Estimate, Group, Row
    from sapus_cli.figures.canvas import Sheet


def _bars(axes: Axes, view: View, bars: Sequence[tuple[Group, Estimate]], unit: str) -> None:
    for place, (group, cell) in enumerate(bars):
        _bar(axes, view, place, cell, view.looks[group.label].color, unit)
    _name_bars(axes, [group.name for group, _ in bars])
    axes.set_xlim(0, 1.18 * _end([cell for _, cell in bars]))


def _bar(axes: Axes, view: View, place: int, cell: Estimate, color: str, unit: str, begin: float = 0.0) -> None:
    if cell.value is None:
        axes.text(begin, place, " ?" if cell.bound else " -", va="center", size=0.9 * view.theme.size)
        return
    face, hatch = (mix(color, view.theme.paper, 0.55), "////") if cell.bound else (color, "")
    axes.barh(
        place, cell.value - begin, left=begin, height=0.68, edgecolor=color, linewidth=view.thin, facecolor=face,
        hatch=hatch,
    )  # fmt: skip
    if cell.low is not None and cell.high is not None:
        spread = [[max(0.0, cell.value - cell.low)], [max(0.0, cell.high - cell.value)]]
        axes.errorbar(
            cell.value, place, xerr=spread, fmt="none", ecolor=view.theme.ink, elinewidth=0.8 * view.theme.line,
            capsize=0.3 * view.theme.size,
        )  # fmt: skip
    axes.annotate(
        f"{cell.bound} {data.number(cell.value)}{unit}".strip(), (max(cell.value, cell.high or 0, begin), place),
        (0.4 * view.theme.size, 0), textcoords="offset points", va="center", size=0.9 * view.theme.size,
    )  # fmt: skip


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _end(cells: Sequence[Estimate]) -> float:
    """The greatest value that is drawn."""
    return max((max(cell.value, cell.high or 0) for cell in cells if cell.value is not None), default=1) or 1


def _filled(view: View, label: str) -> str:
    """A label in as many lines as it needs beside the names of bars."""
    return textwrap.fill(label, max(12, round(0.6 * view.width_mm / (0.2 * view.theme.size))))


def _height_of_bars(axes: Axes, view: View) -> float:
    lines = axes.get_xlabel().count("\n") + 1
    return (5.2 * len(axes.get_yticks()) + 4 * lines + 8) * view.scale


def _best_first(bars: list[tuple[Group, Estimate]]) -> list[tuple[Group, Estimate]]:
    return sorted(bars, key=lambda bar: (bar[1].value is None, -(bar[1].value or 0)))


def speedup(figure: Figure, view: View) -> Sheet:
    """Speed-up of every group over the baseline in time to the target; a panel a cluster or number of workers."""
    rows = analysis.table(view.groups, view.target, view.request.baseline, ["speedup"])
    differing = pivot.conditions(view.groups)
    key = next((key for key in _PANELS if key in differing), None)
    if key is None:
        height_mm, notes = _one_panel(figure, view, rows)
    else:
        height_mm, notes = _panels(figure, view, rows, pivot.arrange(rows, key, "speedup"))
    bounds = {row.cells["speedup"].bound for row in rows}
    bounded = "Hatched: a run did not reach the target, so the true value is above (>) or below (<)."
    return view.sheet(
        height_mm,
        [],
        *notes,
        view.over_seeds(f"Bar: geometric mean over the seeds that both have; {WHISKER}"),
        *([bounded] if any(bounds) else []),
        *(["?: it cannot be told."] if "?" in bounds else []),
    )


def _one_panel(figure: Figure, view: View, rows: Sequence[Row]) -> tuple[float, list[str]]:
    bars = _best_first([(row.group, row.cells["speedup"]) for row in rows])
    axes = figure.subplots()
    _bars(axes, view, bars, "x")
    _mark_1(axes, view)
    axes.set_xlabel(_filled(view, f"speed-up over {_over(view)} in time to {percent(view.target)} accuracy"))
    choice = analysis.choice_of(rows, view.request.baseline)
    return _height_of_bars(axes, view), [f"{note[0].upper()}{note[1:]}." for note in choice]


_PANELS = ("cluster", "workers")
"""Conditions of which every value gets a panel; the first that differs."""

_PANEL_MM, _MOST_COLUMNS, _MOST_PANELS = 58, 3, 12
_BESIDE_MM = 33
"""About what the names of the bars take."""

_LOG_FROM = 10
"""Ratio of the greatest speed-up to the least from which on the axis is logarithmic."""


def _over(view: View) -> str:
    name = view.request.baseline
    one = len(analysis.named_baselines(view.groups, name)) == 1
    return name if one or "," not in name else f"the fastest of {', '.join(part.strip() for part in name.split(','))}"


def _mark_1(axes: Axes, view: View) -> None:
    axes.axvline(1, color=view.theme.ink, linewidth=view.thin, linestyle=(0, (3, 2)), zorder=0.9)


def _panels(figure: Figure, view: View, rows: Sequence[Row], grid: pivot.Grid) -> tuple[float, list[str]]:
    """A line of the grid has the same place in every panel; returns the height in mm and what is to be said of them."""
    n = min(len(grid.titles), _MOST_PANELS)
    columns = max(1, min(n, _MOST_COLUMNS, round(view.width_mm / (_PANEL_MM * view.scale))))
    n_rows = math.ceil(n / columns)
    panels = figure.subplots(n_rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    cells = [row.cells["speedup"] for line in grid.lines for row in line.rows[:n] if row is not None]
    begin = _scale_of(panels[0], cells, (view.width_mm / view.scale - _BESIDE_MM) / columns)
    colors = _colors(view, grid)
    for place, axes in enumerate(panels[:n]):
        for i, line in enumerate(grid.lines):
            if (row := line.rows[place]) is not None:
                _bar(axes, view, i, row.cells["speedup"], colors[line.label], "x", begin)
        _mark_1(axes, view)
        axes.set_title(_title(grid, place))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if place + columns >= n:
            axes.set_xlabel(f"speed-up in time to\n{percent(view.target)} accuracy")
            axes.tick_params(axis="x", labelbottom=True)
    for axes in panels[n:]:
        axes.remove()
    _name_bars(panels[0], [_name(line) for line in grid.lines])
    height_mm = (n_rows * (4.6 * len(grid.lines) + 14) + 8) * view.scale
    of = "cluster profile" if grid.key == "cluster" else f"number of {grid.key}"
    more = f" (the first {n} of {len(grid.titles)}; name the runs to choose others)" if n < len(grid.titles) else ""
    doubt = analysis.choice_of(rows, view.request.baseline)[1:]
    return height_mm, [f"Speed-up over {_over(view)}; a panel a {of}{more}.", *(f"{text}." for text in doubt)]


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


def _scale_of(axes: Axes, cells: Sequence[Estimate], width_mm: float) -> float:
    """Set the axis that all panels share, logarithmic where values lie far apart; returns where bars begin."""
    values = [cell.value for cell in cells if cell.value]
    high = max(_end(cells), 1)
    room = 11 / width_mm  # for the number behind a bar
    if not values or max(values) < _LOG_FROM * min(values):
        axes.set_xlim(0, high * (1.05 + room / (1 - room)))
        return 0.0
    low = min(1, *values, *(cell.low for cell in cells if cell.low)) / 1.15
    end = high * (high / low) ** (room / (1 - room))
    axes.set_xscale("log")
    axes.set_xlim(low, end)
    plain_log(axes.xaxis, (low, end), 10 ** (width_mm / 22))
    return 1.0


def _colors(view: View, grid: pivot.Grid) -> dict[str, str]:
    """The colour of each line, by its label: that of its strategy, in the order of the groups."""
    place = {group.label: i for i, group in enumerate(view.groups)}
    firsts = {line.label: next(row.group for row in line.rows if row is not None) for line in grid.lines}
    ordered = sorted(firsts.items(), key=lambda pair: place[pair[1].label])
    found = looks([group for _, group in ordered], view.theme)
    return {label: found[group.label].color for label, group in ordered}


def _name(line: pivot.Line) -> str:
    unfinished = any(row is not None and row.group.name != row.group.label for row in line.rows)
    return textwrap.fill(line.label, _MOST_LETTERS) + (" *" if unfinished else "")


_MOST_LETTERS = 28


def _title(grid: pivot.Grid, place: int) -> str:
    """The value of a panel and, where it is not the same everywhere, which baseline it has."""
    title = grid.titles[place] if grid.key == "cluster" else f"{grid.titles[place]} {grid.key}"
    label_of = {row.group.label: line.label for line in grid.lines for row in line.rows if row is not None}
    bases = [
        {label_of[row.baseline.label] for line in grid.lines if (row := line.rows[i]) is not None and row.baseline}
        for i in range(len(grid.titles))
    ]
    several = len(set().union(*bases)) > 1
    return "\n".join([title, *(f"over {name}" for name in sorted(bases[place]) if several)])
