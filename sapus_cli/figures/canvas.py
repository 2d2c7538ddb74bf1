"""Sheets to draw on: fixed fonts and colours, legend and caption below the axes, files that are the same each time."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sapus_cli.figures import write
from sapus_cli.figures.style import THEMES, Theme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from sapus_cli.figures.view import View

INCH_MM = 25.4
DPI = 200
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Creator": None, "Date": None},
}
_PAD_IN = 0.06
_CAPTION = "caption"
_LEAST_BODY_IN = 0.6


class Sheet(NamedTuple):
    """What a kind of figure leaves behind beside its axes.

    Attributes:
        height_mm: of the axes with their labels.
        handles: lines and patches for the legend, with their labels.
        caption: sentences that say how to read it.
    """

    height_mm: float
    handles: Sequence[Any]
    caption: Sequence[str]


@contextlib.contextmanager
def look(theme: Theme) -> Iterator[None]:
    """Matplotlib's settings for a theme, whatever the user's own are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.family": "DejaVu Sans",
                "font.size": theme.size,
                "axes.labelsize": theme.size,
                "axes.titlesize": theme.size,
                "axes.titlelocation": "left",
                "axes.titlepad": 0.4 * theme.size,
                "xtick.labelsize": 0.875 * theme.size,
                "ytick.labelsize": 0.875 * theme.size,
                "legend.fontsize": 0.9 * theme.size,
                "text.color": theme.ink,
                "axes.labelcolor": theme.ink,
                "axes.titlecolor": theme.ink,
                "xtick.color": theme.ink,
                "ytick.color": theme.ink,
                "axes.edgecolor": theme.ink,
                "axes.facecolor": theme.paper,
                "figure.facecolor": theme.paper,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.linewidth": 0.5 * theme.line,
                "xtick.major.width": 0.5 * theme.line,
                "ytick.major.width": 0.5 * theme.line,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": theme.faint,
                "grid.linewidth": 0.4 * theme.line,
                "lines.linewidth": theme.line,
                "lines.markersize": 0.5 * theme.size,
                "hatch.linewidth": 0.6,
                "figure.constrained_layout.h_pad": _PAD_IN,
                "figure.constrained_layout.w_pad": _PAD_IN,
                "svg.hashsalt": "sapus",
                "pdf.fonttype": 42,
                "axes.unicode_minus": True,
            }
        )
        yield


def compose(fill: Callable[[Figure, View], Sheet], view: View) -> Figure:
    """Let `fill` draw the axes, then put legend and caption below them and give the figure its height."""
    theme = THEMES[view.request.theme]
    width_in = (view.request.width_mm or theme.width_mm) / INCH_MM
    with look(theme):
        figure = Figure(figsize=(width_in, 3), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        sheet = fill(figure, view)
        caption = figure.text(0, 0, "", size=0.8 * theme.size, va="bottom", linespacing=1.25, alpha=0.85)
        caption.set_in_layout(False)
        caption.set_label(_CAPTION)
        caption.set_text(_wrapped(caption, " ".join(sheet.caption), (width_in - 2 * _PAD_IN) * DPI))
        caption_in = _height_in(caption) + 2 * _PAD_IN
        legend_in = _add_legend(figure, sheet.handles, width_in)
        body_in = max(sheet.height_mm / INCH_MM, _LEAST_BODY_IN)
        height_in = body_in + legend_in + caption_in
        figure.set_size_inches(width_in, height_in)
        caption.set_position((_PAD_IN / width_in, _PAD_IN / height_in))
        for legend in figure.legends:
            legend.set_bbox_to_anchor((0.5, caption_in / height_in), figure.transFigure)
        below = (caption_in + legend_in) / height_in
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0, below, 1, 1 - below))
        # Ticks and the like take the settings that hold when they are made, which is at the latest now.
        figure.draw_without_rendering()
        # What has its place keeps it, whatever the resolution of the file.
        figure.set_layout_engine("none")
    return figure


def caption_of(figure: Figure) -> str:
    """The caption of a figure from `compose`, in one line."""
    (text,) = (text for text in figure.texts if text.get_label() == _CAPTION)
    return text.get_text().replace("\n", " ")


def _wrapped(text: Any, words: str, width_px: float) -> str:
    """The words in lines that are no wider; the width of a line is that of its words and the spaces between them."""
    renderer = _renderer(text.figure)
    widths: dict[str, float] = {}
    for word in {*words.split(" "), "n n", "nn"}:
        text.set_text(word)
        widths[word] = float(text.get_window_extent(renderer).width)
    space = widths["n n"] - widths["nn"]
    lines: list[list[str]] = [[]]
    used = 0.0
    for word in words.split(" "):
        if lines[-1] and used + space + widths[word] > width_px:
            lines.append([])
        used = used + space + widths[word] if lines[-1] else widths[word]
        lines[-1].append(word)
    return "\n".join(" ".join(line) for line in lines)


def _add_legend(figure: Figure, handles: Sequence[Any], width_in: float) -> float:
    """Add it with as many columns as fit; returns its height in inches."""
    if not handles:
        return 0.0
    for columns in range(min(len(handles), 6), 0, -1):
        legend = figure.legend(
            handles=list(handles),
            loc="lower center",
            ncols=columns,
            frameon=False,
            borderpad=0,
            handlelength=3.2,
            columnspacing=1.6,
        )
        legend.set_in_layout(False)
        box = legend.get_window_extent(_renderer(figure))
        if box.width <= (width_in - 2 * _PAD_IN) * DPI or columns == 1:
            break
        legend.remove()
    return float(box.height) / DPI + 2 * _PAD_IN


def _height_in(text: Any) -> float:
    return float(text.get_window_extent(_renderer(text.figure)).height) / DPI


def _renderer(figure: Figure) -> Any:
    canvas: Any = figure.canvas
    return canvas.get_renderer()


def encode(figure: Figure, form: str, theme: str) -> bytes:
    """The bytes of a file of the format `form`: the same figure gives the same bytes, with no date or version in it."""
    out = io.BytesIO()
    with look(THEMES[theme]):
        figure.savefig(out, format=form, dpi=DPI, metadata=_METADATA[form])
    return out.getvalue()


def save(figure: Figure, path: Path, theme: str) -> None:
    """Write a file in the format that its suffix names; missing folders are created.

    Raises:
        UserError: it cannot be written.
    """
    write(path, encode(figure, path.suffix[1:].lower(), theme))


def pixels(figure: Figure, columns: int) -> npt.NDArray[np.uint8]:
    """The picture, shrunk to `columns` pixels across and an even number down, shape (rows, columns, 3)."""
    from PIL import Image  # noqa: PLC0415 - matplotlib brings it

    canvas: Any = figure.canvas
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    rows = 2 * max(1, round(picture.height * columns / picture.width / 2))
    import numpy as np  # noqa: PLC0415

    return np.asarray(picture.resize((columns, rows), Image.Resampling.LANCZOS), dtype=np.uint8)
