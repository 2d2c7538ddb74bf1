"""Figures of runs, drawn with matplotlib: what stands in the traces and what `sapus_cli.analysis` makes of it.

Nothing heavy is imported before something is drawn. `docs/figures.md` describes every kind.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from sapus_cli.analysis import Group

AXES: Mapping[str, str] = {
    "time": "time, s",
    "samples": "training samples",
    "bytes": "bytes over the server's link",
    "version": "version (pushes applied)",
}
"""What `accuracy` and `loss` can be drawn over, and the label of that axis."""

KINDS: Mapping[str, str] = {
    "speedup": "Speed-up in time to the target accuracy",
    "accuracy": "Test accuracy",
    "loss": "Test loss",
    "throughput": "Training throughput",
    "cpu": "CPU load of the server",
    "bandwidth": "Rate of the server's link",
    "interval": "Update interval of every worker",
    "staleness": "Staleness of the pushes",
    "weights": "Weight of every push",
    "timeline": "Who computed, exchanged and waited",
    "scaling": "Scaling with the number of workers",
    "tradeoff": "Time and bytes to the target accuracy",
}
"""Every kind of figure and its title."""

FORMATS = ("png", "pdf", "svg")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """How a figure is to be drawn.

    Attributes:
        x: what accuracy and loss are drawn over, a key of `AXES`.
        target: test accuracy that times are to, a fraction; None: the most that every run reached.
        baseline: what speed-ups are to, a label or a strategy.
        theme: name of the theme in `style.THEMES`.
        width_mm: width of the figure in millimetres; None: that of the theme.
        window: seconds from and to which a timeline is drawn; None: a few exchanges in the middle of the run.
    """

    x: str = "time"
    target: float | None = None
    baseline: str = "bsp"
    theme: str = "paper"
    width_mm: float | None = None
    window: tuple[float, float] | None = None


class CannotWriteError(UserError):
    """The place for a file is no good."""


def write(path: Path, data: bytes) -> None:
    """Write a file; folders that are missing are created.

    Raises:
        CannotWriteError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        what = f"{path.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise CannotWriteError(f"cannot write {path}: {what}; choose another place with --output") from error


def draw(kind: str, groups: Sequence[Group], request: Request | None = None) -> Figure:
    """Draw one figure of `groups`.

    Raises:
        UserError: the runs do not hold what the figure shows.
        DamagedFileError: a trace that is needed is damaged.
    """
    from sapus_cli.figures import canvas, kinds, view  # noqa: PLC0415 - who only asks for help does without matplotlib

    if not groups:
        raise UserError("there is no run to draw")
    return canvas.compose(kinds.DRAW[kind], view.View(list(groups), request or Request()))
