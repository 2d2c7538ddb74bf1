"""What all kinds of figures share: the view, and axes with plain numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from sapus_cli import analysis
from sapus_cli.errors import UserError
from sapus_cli.figures import data
from sapus_cli.figures.canvas import Sheet
from sapus_cli.figures.style import THEMES, Look, Theme, looks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sapus_cli.analysis import Group
    from sapus_cli.figures import Request

MOST_LINES = 24
"""More lines in one axes cannot be told."""

WHISKER = "whisker: 95 % bootstrap interval, from 3 seeds on"
_LEAST_MM, _MOST_MM, _SIZE = 52, 80, 8


@dataclasses.dataclass(frozen=True)
class View:
    """What is drawn, and how."""

    groups: list[Group]
    request: Request

    @property
    def theme(self) -> Theme:
        """The theme."""
        return THEMES[self.request.theme]

    @property
    def width_mm(self) -> float:
        """Width of the figure."""
        return self.request.width_mm or self.theme.width_mm

    @functools.cached_property
    def looks(self) -> dict[str, Look]:
        """How each group looks, by label."""
        return looks(self.groups, self.theme)

    @functools.cached_property
    def target(self) -> float:
        """The accuracy that times are to, a fraction."""
        if self.request.target is None:
            return analysis.default_target(self.groups).accuracy
        analysis.check_target(self.groups, self.request.target)
        return self.request.target

    def sheet(self, height_mm: float, handles: Sequence[Any], *caption: str) -> Sheet:
        """A sheet whose caption ends with what the runs were made under."""
        unfinished = any(not run.finished for group in self.groups for run in group.runs)
        differing = [difference.field for difference in analysis.fairness(self.groups)]
        return Sheet(
            height_mm,
            handles,
            [
                *caption,
                *(["* with a run that is not finished, used up to its last row."] if unfinished else []),
                data.conditions(self.groups),
                *([f"Not the same for all: {', '.join(differing)}."] if differing else []),
            ],
        )

    def over_seeds(self, several: str) -> str:
        """How seeds are shown, if there are several, and how many."""
        if not data.have_several_seeds(self.groups):
            return "One seed (n = 1)."
        return f"{several}; {data.seeds(self.groups)}."

    @property
    def band(self) -> str:
        """What line and band are."""
        return self.over_seeds("Line: mean of the seeds; band: least to greatest, as far as all seeds go")

    @property
    def scale(self) -> float:
        """How much larger than in print a line of text is."""
        return self.theme.size / _SIZE

    @property
    def height_mm(self) -> float:
        """Of axes with curves or points."""
        return max(_LEAST_MM * self.scale, min(0.55 * self.width_mm, _MOST_MM * self.scale))

    @property
    def thin(self) -> float:
        """Width of a line that is not one of the data."""
        return 0.6 * self.theme.line

    def key(self, group: Group, text: str = "", **more: Any) -> Line2D:
        """The entry of a group in the legend."""
        color, marker, dash = self.looks[group.label]
        style = {"color": color, "marker": marker, "linestyle": dash} | more
        return Line2D([], [], label=f"{group.name}{text}", **style)

    def first(self, most: int) -> tuple[list[Group], list[str]]:
        """No more groups than fit, and a sentence if that leaves some out."""
        if len(self.groups) <= most:
            return self.groups, []
        return self.groups[:most], [f"The first {most} of {len(self.groups)} groups; name the runs to choose others."]


def percent(fraction: float) -> str:
    """As in "93.5 %", which no line break parts."""
    return f"{100 * fraction:.4g}\N{NO-BREAK SPACE}%"


def nothing(groups: Sequence[Group], what: str, why: str) -> UserError:
    """The error for a figure that would be empty."""
    labels = ", ".join(group.label for group in groups[:5])
    return UserError(f"no {what} to draw: {why} ({labels})")


def plain_log(axis: Any, limits: tuple[float, float], dense: float = 500) -> None:
    """Ticks at 1, 2, 5 within every decade, in plain numbers; at the decades alone if ends are `dense` times apart."""
    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high <= dense * low else (1,)
    axis.set_major_locator(FixedLocator([digit * 10.0**decade for decade in decades for digit in digits]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,g}")


_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_axis(axis: Any, most: float) -> None:
    """Numbers and label in GB or whatever suits values up to `most`."""
    factor, unit = next((pair for pair in _BYTES if most >= pair[0]), (1.0, "bytes"))
    axis.set_major_formatter(lambda value, _: f"{value / factor:g}")
    axis.set_label_text(axis.get_label_text().replace("bytes", unit, 1))
