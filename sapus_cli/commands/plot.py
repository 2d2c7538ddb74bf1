"""`sapus plot`: figures of runs."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapus_cli.commands.options import flag
from sapus_cli.commands.selection import Baseline, Drawn, Target, accuracy
from sapus_cli.errors import UserError, unknown
from sapus_cli.figures import FORMATS, KINDS, CannotWriteError, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from sapus_cli.analysis import Group, Run

EXAMPLES = (
    "Examples:\n\n"
    "sapus plot accuracy\n\n"
    "sapus plot speedup results/suite --target 95% -o speedup.pdf --width one\n\n"
    "sapus plot loss --x bytes --theme slides\n\n"
    "sapus plot timeline results/2026*_s0 --window 20,30\n\n"
    "sapus plot all -o figures --format svg"
)
WIDTHS = {"one": 89.0, "two": 183.0}
"""The usual columns of print in mm."""

LEAST_MM, MOST_MM = 60, 1000
SUITE_FILES = ("suite.json", "suite.toml")
MOST_NAMES = 3


class Theme(StrEnum):
    """What a figure is for."""

    paper = "paper"
    slides = "slides"
    dark = "dark"


class Across(StrEnum):
    """What accuracy and loss are drawn over."""

    time = "time"
    samples = "samples"
    bytes = "bytes"
    version = "version"


def command(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="speedup, accuracy, loss, throughput, cpu, bandwidth, interval, staleness, weights, timeline, "
            "scaling, tradeoff, or all.",
        ),
    ],
    runs: Drawn = None,
    *,
    x: Annotated[Across, typer.Option("--x", help="What accuracy and loss are drawn over.")] = Across.time,
    target: Target = None,
    baseline: Baseline = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File, or folder that gets KIND.FORMAT.",
            show_default="the folder figures",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="png, pdf or svg.", show_default="by the name of --output, else png"
        ),
    ] = None,
    theme: Annotated[Theme, typer.Option("--theme", help="What the figure is for.")] = Theme.paper,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="WIDTH",
            help="one or two columns (89, 183 mm), or as in 120mm, 5in.",
            show_default="two; slides: 254mm",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="FROM,TO",
            help="Seconds that a timeline shows.",
            show_default="a few exchanges in the middle",
        ),
    ] = None,
    show: Annotated[bool, flag("--show", text="Print a small preview in the terminal as well.")] = False,
) -> int:
    """Draw figures of runs: speed-up, accuracy, server load, intervals, who waited for whom."""
    if kind not in {*KINDS, "all"}:
        raise unknown("kind of figure", kind, [*KINDS, "all"])
    if show:
        _check_terminal()
    place = _place(kind, output, form)
    from sapus_cli.analysis import suite_view  # noqa: PLC0415 - heavy imports wait until they are needed

    groups = groups_of(runs or [])
    request = Request(
        x=x.value,
        target=None if target is None else accuracy(target),
        baseline=baseline or suite_view(groups).get("baseline", "bsp"),
        theme=theme.value,
        width_mm=None if width is None else _millimetres(width),
        window=None if window is None else _window(window),
    )
    for name, path in place.items():
        try:
            figure = _drawn(name, groups, request, path)
        except UserError as error:
            if kind != "all" or isinstance(error, CannotWriteError):
                raise
            typer.echo(f"sapus: {name} left out: {error}", err=True)
            continue
        typer.echo(f"Wrote {path}")
        if show:
            _preview(figure)
    return 0


def _drawn(kind: str, groups: Sequence[Group], request: Request, path: Path) -> Figure:
    from sapus_cli.figures import canvas, draw  # noqa: PLC0415 - matplotlib waits until something is drawn

    figure = draw(kind, groups, request)
    canvas.save(figure, path, request.theme)
    return figure


def _place(kind: str, output: Path | None, form: str | None) -> dict[str, Path]:
    """Where each figure goes."""
    if form is not None and form not in FORMATS:
        raise unknown("format", form, FORMATS)
    kinds = list(KINDS) if kind == "all" else [kind]
    suffix = "" if output is None or output.is_dir() else output.suffix[1:].lower()
    if output is None or not suffix:
        folder = output or Path("figures")
        return {name: folder / f"{name}.{form or FORMATS[0]}" for name in kinds}
    if suffix not in FORMATS:
        raise UserError(f"--output {output}: is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file")
    if form not in {None, suffix}:
        raise UserError(f"--output {output}: is no {form} file; leave --format {form} out, or name the file .{form}")
    if kind == "all":
        raise UserError(f"--output {output}: all of the figures need a folder, not a file")
    return {kind: output}


def _millimetres(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+) ?(mm|in)", text.strip())
    try:
        value = WIDTHS.get(text) or (float(match[1]) * {"mm": 1, "in": 25.4}[match[2]] if match else None)
    except ValueError:
        value = None
    if value is None:
        raise UserError(f"--width {text}: must be one, two, or a width as in 120mm or 5in")
    if not LEAST_MM <= value <= MOST_MM:
        raise UserError(f"--width {text}: must be from {LEAST_MM} to {MOST_MM} mm")
    return value


def _window(text: str) -> tuple[float, float]:
    try:
        begin, end = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--window {text}: must be two numbers of seconds, as in 20,30") from None
    if not 0 <= begin < end < float("inf"):
        raise UserError(f"--window {text}: must begin at 0 or later and end after that")
    return begin, end


def groups_of(runs: Sequence[str]) -> list[Group]:
    """Groups of the runs that were named; without any, of the newest suite in results, or of the runs like the newest.

    Says on stderr what it chose and what conditions differ.

    Raises:
        UserError: there are none, or those that were named cannot be compared.
    """
    from sapus_cli import analysis  # noqa: PLC0415 - heavy imports wait until they are needed

    found = analysis.load_runs([Path(run) for run in runs]) if runs else _usual()
    groups = analysis.group_runs(found)
    differences = analysis.fairness(groups)
    refused = [str(difference) for difference in differences if difference.refuses]
    if refused:
        raise UserError(f"the runs cannot be compared: {'; '.join(refused)}; choose runs that agree")
    for group in groups:
        if group.repeats:
            names = ", ".join(run.name for run in group.repeats)
            typer.echo(f"sapus: of several runs of a seed the newest is drawn, so not {names}", err=True)
    for difference in differences:
        typer.echo(f"sapus: warning: {difference}", err=True)
    return groups


def _usual() -> list[Run]:
    from sapus_cli import analysis  # noqa: PLC0415

    results = Path("results")
    if not results.is_dir():
        raise UserError("there is no folder results here; name the runs to draw, or make some with: sapus run")
    suites = [file for name in SUITE_FILES for file in results.glob(f"*/{name}")]
    if suites:
        newest = max(suites, key=lambda file: (file.stat().st_mtime, str(file))).parent
        typer.echo(f"sapus: drawn is the newest suite, {newest}", err=True)
        return analysis.load_runs([newest])
    runs = analysis.load_runs([results])
    last = max(runs, key=lambda run: (str(run.record.get("started_at") or ""), run.name))
    alike = [run for run in runs if _workload(run) == _workload(last)]
    others = [run.name for run in runs if run not in alike]
    if others:
        more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
        typer.echo(
            f"sapus: {len(others)} of {len(runs)} runs left out, whose data, model or clock are not those of the "
            f"newest, {last.name}: {', '.join(others[:MOST_NAMES])}{more}",
            err=True,
        )
    return alike


def _workload(run: Run) -> tuple[Any, ...]:
    record = run.record
    config = record["config"]
    parts = ((record.get("data") or {}).get("sha256"), (record.get("model") or {}).get("fingerprint"))
    return (config.get("dataset"), config.get("model"), run.clock, *parts)


def _check_terminal() -> None:
    from rich.console import Console  # noqa: PLC0415

    if not Console().is_terminal:
        raise UserError("--show: there is no terminal here to print a preview in; leave it out")


def _preview(figure: Figure) -> None:
    """The figure in blocks of two pixels a letter."""
    from rich.console import Console  # noqa: PLC0415
    from rich.segment import Segment, Segments  # noqa: PLC0415
    from rich.style import Style  # noqa: PLC0415

    from sapus_cli.figures import canvas  # noqa: PLC0415

    console = Console()
    picture = canvas.pixels(figure, console.width).tolist()
    parts = []
    for upper, lower in zip(picture[::2], picture[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            colors = [f"rgb({r},{g},{b})" for r, g, b in (above, below)]
            parts.append(Segment("▀", Style(color=colors[0], bgcolor=colors[1])))
        parts.append(Segment.line())
    console.print(Segments(parts))


command.__name__ = "plot"
