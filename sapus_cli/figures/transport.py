"""The figure of `sapus bench transport`: GB/s over the size of the vector, an axes for each number of workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from sapus_cli.figures import Request, canvas
from sapus_cli.figures.canvas import Sheet
from sapus_cli.figures.style import DASH_DOT, DASHED, DOTTED, SOLID, Look, legible, look_of
from sapus_cli.figures.view import View, plain_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS: Mapping[str, Look] = {
    "zeromq tcp": Look("#333333", "o", SOLID),
    "zeromq ipc": Look("#333333", "s", DOTTED),
    "sapus tcp": Look("#d55e00", "o", SOLID),
    "sapus ipc": Look("#d55e00", "s", DOTTED),
    "sapus shm": Look("#d55e00", "D", DASH_DOT),
    "ray actor": Look("#1f4fb5", "^", SOLID),
    "torch rpc": Look("#009e73", "v", SOLID),
    "gloo": Look("#8f2d6b", "P", DASH_DOT),
    "grpc": Look("#cf9a51", "X", SOLID),
}
MOST_COLUMNS = 4
HEIGHT_MM = 58


def draw(rows: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw what stands under `medians` in the JSON of `sapus bench transport`: `contenders` and `ceilings`.

    A value is a list: median, least, greatest.
    """

    def fill(figure: Figure, view: View) -> Sheet:
        return _fill(figure, view, rows, ceilings)

    return canvas.compose(fill, View([], Request()))


def _fill(
    figure: Figure, view: View, rows: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]]
) -> Sheet:
    numbers = sorted({row["workers"] for row in rows})
    columns = min(MOST_COLUMNS, len(numbers))
    lines = math.ceil(len(numbers) / columns)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    sizes = sorted({row["elements"] for row in rows})
    for axes, workers in zip(panels.flat, numbers, strict=False):
        for name in names:
            _line(axes, view, name, [row for row in rows if (row["contender"], row["workers"]) == (name, workers)])
        _ceiling(axes, view, [row for row in ceilings if row["workers"] == workers])
        axes.set_title(f"{workers} worker{'s' if workers > 1 else ''}")
    for axes in panels.flat[len(numbers) :]:
        axes.set_visible(False)
    _scales(panels[0, 0], sizes)
    for axes in panels[:, 0]:
        axes.set_ylabel("GB/s (10⁹ bytes)")
    for place in range(columns):
        panels[(len(numbers) - 1 - place) // columns, place].set_xlabel("elements")
        panels[(len(numbers) - 1 - place) // columns, place].tick_params(labelbottom=True)
    keys = [_key(name, view) for name in names]
    keys.append(Line2D([], [], color=view.theme.ink, linestyle=DASHED, label="one way through loopback TCP"))
    return Sheet(
        HEIGHT_MM * lines,
        keys,
        [
            "An exchange carries 8 bytes an element: a vector to the server, and its state back.",
            "Marker: median of the rounds; whisker: least to greatest.",
            "Dashed: what raw sockets carry to one receiver, the ceiling of whatever goes through loopback TCP.",
            "Both axes are logarithmic.",
        ],
    )


def _scales(axes: Axes, sizes: Sequence[int]) -> None:
    """Both logarithmic; the axes of all panels are shared."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.1)
    decades = sorted({10.0 ** math.floor(math.log10(size)) for size in sizes})
    axes.xaxis.set_major_locator(FixedLocator(decades if len(decades) > 1 else [float(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_power)
    plain_log(axes.yaxis, axes.get_ylim())


def _power(value: float, _: object) -> str:
    exponent = math.floor(math.log10(value))
    mantissa = value / 10.0**exponent
    sign = f"10$^{{{exponent}}}$"
    return sign if math.isclose(mantissa, 1) else f"{mantissa:.3g}·{sign}"


def _line(axes: Axes, view: View, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    look = _look(name, view)
    axes.plot(*_points(rows, "gb_per_s"), color=look.color, linestyle=look.dash, marker=look.marker)
    for row in rows:
        _, low, high = row["gb_per_s"]
        axes.vlines(row["elements"], low, high, color=look.color, linewidth=0.8 * view.theme.line)


def _ceiling(axes: Axes, view: View, rows: Sequence[Mapping[str, Any]]) -> None:
    x, y = _points(rows, "one_way_gb_per_s")
    if len(x) == 1:
        axes.axhline(y[0], color=view.theme.ink, linestyle=DASHED)
    else:
        axes.plot(x, y, color=view.theme.ink, linestyle=DASHED)


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    ordered = sorted(rows, key=lambda row: row["elements"])
    return [row["elements"] for row in ordered], [row[key][0] for row in ordered]


def _look(name: str, view: View) -> Look:
    look = _LOOKS.get(name) or look_of(name, theme=view.theme)
    return look._replace(color=legible(look.color, view.theme.paper))


def _key(name: str, view: View) -> Line2D:
    look = _look(name, view)
    return Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, label=name)
