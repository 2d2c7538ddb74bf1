"""`sapus compare`: groups of runs side by side."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sapus_cli.commands.options import flag
from sapus_cli.commands.selection import Baseline, Target, accuracy, runs_argument
from sapus_cli.errors import UserError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from sapus_cli.analysis import Comparison, Estimate, Metric, Row
    from sapus_cli.pivot import Grid

EXAMPLES = (
    "Examples:\n\n"
    "sapus compare\n\n"
    "sapus compare results/2026*_w8_* --target 95% --baseline asp\n\n"
    "sapus compare results/suite --metrics time,bytes,staleness\n\n"
    'sapus compare results/suite --pivot cluster --baseline "ssp,dssp,local-sgd"\n\n'
    "sapus compare --format csv > comparison.csv"
)
DEFAULT_METRICS = ("time", "speedup", "accuracy", "cpu", "bandwidth", "bytes")
PIVOT_METRICS = ("time", "speedup")
GAP = 2
"""Columns of the terminal between two columns of the table."""

ENOUGH_SEEDS = 10
"""From so many on the interval covers the mean about as often as it says; docs/compare.md has the numbers."""


class Format(StrEnum):
    """What the comparison is printed as."""

    table = "table"
    csv = "csv"
    json = "json"
    markdown = "markdown"
    latex = "latex"


def command(
    runs: Annotated[list[str] | None, runs_argument("results")] = None,
    *,
    target: Target = None,
    baseline: Baseline = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="A,B,...",
            help="Columns: time, speedup, bytes, accuracy, best, worst-class, loss, throughput, cpu, cpu-time, "
            "bandwidth, peak, each of these four with -reduction, interval, staleness, staleness-p99, seeds, or all.",
            show_default=f"{', '.join(DEFAULT_METRICS)}; with --pivot time, speedup; all for csv and json",
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="METRIC", help="Metric whose best value comes first.")
    ] = "time",
    pivot: Annotated[
        str | None,
        typer.Option(
            "--pivot",
            metavar="KEY",
            help="A table a metric, a column a value of KEY: cluster, workers, wire, partition, dataset, ... or none.",
            show_default="the suite's",
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", metavar="FORMAT", help="table, csv, json, markdown or latex.")
    ] = Format.table,
    force: Annotated[
        bool, flag("--force", text="Compare runs of different data, models or clocks all the same.")
    ] = False,
) -> int:
    """Compare runs: time to a target accuracy, speed-up, server load; with confidence intervals over seeds."""
    from sapus_cli import analysis  # noqa: PLC0415 - heavy imports wait until they are needed
    from sapus_cli.pivot import arrange, conditions, split  # noqa: PLC0415

    if sort not in analysis.METRICS:
        raise unknown("metric in --sort", sort, analysis.METRICS)
    wanted = None if target is None else accuracy(target)
    _metrics(metrics, form, ())  # a wrong name is told before anything is read
    found = analysis.load_runs(_paths(runs or []))
    groups = analysis.group_runs(found)
    view = analysis.suite_view(groups)
    baseline = baseline or view.get("baseline")
    if pivot is None and view.get("pivot") in conditions(groups):
        pivot = view["pivot"]
    elif pivot == "none":
        pivot = None
    names = _metrics(metrics, form, DEFAULT_METRICS if pivot is None else PIVOT_METRICS)
    request: dict[str, Any] = {"target": wanted, "baseline": baseline, "metrics": names, "sort": sort, "force": force}
    if pivot is None:
        _PRINTERS[form](analysis.compare(found, **request), None)
        return 0
    result = analysis.compare(found, split=partial(split, key=pivot), **request)
    _PRINTERS[form](result, arrange(result.rows, pivot, sort))
    return 0


def _paths(runs: Sequence[str]) -> list[Path]:
    if runs:
        return [Path(run) for run in runs]
    if not Path("results").is_dir():
        raise UserError("there is no folder results here; name the runs to compare, or make some with: sapus run")
    return [Path("results")]


def _metrics(text: str | None, form: Format, usual: Sequence[str]) -> list[str]:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    if text == "all" or (text is None and form in {Format.csv, Format.json}):
        return list(METRICS)
    names = list(usual) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise unknown("metric in --metrics", name, [*METRICS, "all"])
    return list(dict.fromkeys(names))


def _number(value: float) -> str:
    """Three digits that say something, and no more than two behind the point from 1 on."""
    size = abs(value)
    if size >= 100:  # noqa: PLR2004 - a number of digits
        return f"{value:,.0f}"
    if size >= 10:  # noqa: PLR2004
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:#.3g}"


def _value(metric: Metric, cell: Estimate) -> str:
    if cell.value is None:
        return "?" if cell.bound else "-"
    return f"{cell.bound} {_shown(metric, cell.value)}".strip()


def _interval(metric: Metric, cell: Estimate) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return f"[{_shown(metric, cell.low)}, {_shown(metric, cell.high)}]"


def _shown(metric: Metric, value: float) -> str:
    if metric.key == "seeds":
        return f"{value:.0f}"
    if metric.key.endswith("reduction_percent"):
        return f"{value:.1f}"
    if metric.key in {"accuracy", "best_accuracy", "worst_class_accuracy", "speedup"}:
        return f"{metric.scale * value:.2f}"
    return _number(metric.scale * value)


class Sheet(NamedTuple):
    """A table of texts.

    Attributes:
        title: what all of its figures are, if it is one.
        headings: two lines over each column of figures.
        rows: a name, and value and interval of every figure; an empty value where there is none.
    """

    title: str
    headings: list[tuple[str, str]]
    rows: list[tuple[str, list[tuple[str, str]]]]


def _sheets(result: Comparison, grid: Grid | None) -> list[Sheet]:
    """One with a column a metric; of a grid one a metric."""
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    if grid is None:
        rows = [
            (row.group.name, [_texts(METRICS[name], row.cells[name]) for name in result.metrics]) for row in result.rows
        ]
        return [Sheet("", [_heading_lines(METRICS[name]) for name in result.metrics], rows)]
    return [_grid_sheet(grid, name, METRICS[name]) for name in result.metrics]


def _grid_sheet(grid: Grid, name: str, metric: Metric) -> Sheet:
    def texts_of(row: Row | None) -> tuple[str, str]:
        if row is None:
            return "", ""
        value, ends = _texts(metric, row.cells[name])
        return value + row.group.name.removeprefix(row.group.label), ends

    rows = [(line.label, [texts_of(row) for row in line.rows]) for line in grid.lines]
    return Sheet(" ".join(_heading_lines(metric)).strip(), [("", title) for title in grid.titles], rows)


def _texts(metric: Metric, cell: Estimate) -> tuple[str, str]:
    return _value(metric, cell), _interval(metric, cell)


def about(result: Comparison, grid: Grid | None = None) -> list[str]:
    """What stands under the table, but for the notes."""
    from sapus_cli.analysis import LEAST_SEEDS  # noqa: PLC0415

    seeds = sorted({len(row.group.runs) for row in result.rows})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    lines = _about_targets(result, grid)
    if result.baseline is not None:
        lines.append(f"baseline: {result.baseline}")
    line = f"seeds a group: {count}; mean over seeds"
    if seeds[-1] >= LEAST_SEEDS:
        short = f"; too narrow below {ENOUGH_SEEDS} seeds" if seeds[0] < ENOUGH_SEEDS else ""
        line += f" [95 % bootstrap interval{short}]"
    lines.append(line)
    return lines


def _about_targets(result: Comparison, grid: Grid | None) -> list[str]:
    if grid is None or len(set(result.targets)) == 1:
        return [f"target {100 * result.target.accuracy:.4g} %: {result.target.rule}"]
    columns = zip(grid.titles, result.targets, strict=True)
    return [f"target of {title}: {100 * target.accuracy:.4g} %, {target.rule}" for title, target in columns]


def _remarks(result: Comparison) -> list[str]:
    return [*result.notes, *(f"warning: {warning}" for warning in result.warnings)]


def _print_table(result: Comparison, grid: Grid | None) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    for sheet in _sheets(result, grid):
        for places in _that_fit(sheet, console.width):
            if sheet.title:
                console.print(sheet.title, style="bold", markup=False, highlight=False)
            _print_columns(console, sheet, places)
    for line in about(result, grid):
        console.print(line, style="dim", markup=False, highlight=False)
    for line in result.notes:
        console.print(line, markup=False, highlight=False)
    for line in result.warnings:
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)


def _heading_lines(metric: Metric) -> tuple[str, str]:
    first, _, last = metric.header.rpartition(" ")
    return (first, f"{last} {metric.unit}".strip()) if first else (last, metric.unit)


def _label_width(sheet: Sheet, width: int) -> int:
    return min(max(len(text) for text in ("strategy", *(name for name, _ in sheet.rows))), max(12, width // 3))


def _that_fit(sheet: Sheet, width: int) -> list[list[int]]:
    """The columns, split into tables that are no wider than the terminal."""
    tables: list[list[int]] = []
    used = math.inf
    for place, heading in enumerate(sheet.headings):
        texts = [*heading, *(text for _, cells in sheet.rows for text in cells[place])]
        needed = GAP + max(map(len, texts))
        if used + needed > width:
            tables.append([])
            used = _label_width(sheet, width)
        tables[-1].append(place)
        used += needed
    return tables


def _print_columns(console: Console, sheet: Sheet, places: list[int]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Table(box=None, padding=(0, 0, 0, GAP), pad_edge=False, header_style="dim")
    headings = [list(sheet.headings[place]) for place in places]
    if not any(first for first, _ in headings):
        headings = [lines[1:] for lines in headings]
    grid.add_column(
        "\n" * (len(headings[0]) - 1) + "strategy", max_width=_label_width(sheet, console.width), overflow="fold"
    )
    for lines in headings:
        grid.add_column(Text("\n".join(lines)), justify="right", no_wrap=True)
    for name, texts in sheet.rows:
        cells = [
            Text.assemble(value, "\n", (ends, "dim")) if ends else Text(value)
            for value, ends in (texts[place] for place in places)
        ]
        grid.add_row(Text(name), *cells)
    console.print(grid)
    console.print()


def _places(grid: Grid | None) -> dict[str, tuple[str, str]]:
    """The line and the column of each group, by its label."""
    if grid is None:
        return {}
    return {
        row.group.label: (line.label, title)
        for line in grid.lines
        for title, row in zip(grid.titles, line.rows, strict=True)
        if row is not None
    }


def _print_csv(result: Comparison, grid: Grid | None) -> None:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    places = _places(grid)
    names = [name for name in result.metrics if name != "seeds"]
    keys = [METRICS[name].key for name in names]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = [f"{key}{part}" for key in keys for part in ("", "_low", "_high", "_bound")]
    own = [] if grid is None else ["line", grid.key]
    writer.writerow(["group", *own, "strategy", "seeds", "finished", "target", "baseline", *parts])
    for row in result.rows:
        cells = [row.cells[name] for name in names]
        finished = sum(run.finished for run in row.group.runs)
        place = places.get(row.group.label, ())
        about = [row.group.label, *place, row.group.strategy, len(row.group.runs), finished]
        base = row.baseline.label if row.baseline else None
        figures = [part for cell in cells for part in (cell.value, cell.low, cell.high, cell.bound)]
        writer.writerow([*about, row.target, base, *figures])
    sys.stdout.write(out.getvalue())
    for line in _remarks(result):
        typer.echo(line, err=True)


def _print_json(result: Comparison, grid: Grid | None) -> None:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    places = _places(grid)

    def group(row: Row) -> dict[str, Any]:
        place = dict(zip(("line", "column"), places.get(row.group.label, ()), strict=False))
        return {
            "label": row.group.label,
            **place,
            "strategy": row.group.strategy,
            "hyper_parameters": row.group.runs[0].hyper_parameters,
            "seeds": row.group.seeds,
            "runs": [str(run.folder) for run in row.group.runs],
            "target": row.target,
            "baseline": row.baseline.label if row.baseline else None,
            "unfinished": [str(run.folder) for run in row.group.runs if not run.finished],
            "metrics": {METRICS[name].key: row.cells[name]._asdict() for name in result.metrics if name != "seeds"},
        }

    document = {
        "target": result.target.accuracy,
        "target_rule": result.target.rule,
        "baseline": result.baseline,
        **({} if grid is None else {"pivot": grid.key}),
        "groups": [group(row) for row in result.rows],
        "notes": result.notes,
        "warnings": result.warnings,
    }
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def texts(result: Comparison) -> list[list[str]]:
    """Heading and rows of a table of texts."""
    (sheet,) = _sheets(result, None)
    return _lines(sheet)


def _lines(sheet: Sheet) -> list[list[str]]:
    lines = [["strategy", *(" ".join(heading).strip() for heading in sheet.headings)]]
    return lines + [[name, *(" ".join(cell).strip() for cell in cells)] for name, cells in sheet.rows]


def _print_markdown(result: Comparison, grid: Grid | None) -> None:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_plain(cell) for cell in cells)} |"

    for sheet in _sheets(result, grid):
        heading, *rows = _lines(sheet)
        rule = f"| --- |{' ---: |' * (len(heading) - 1)}"
        title = [f"**{_plain(sheet.title)}**", ""] if sheet.title else []
        typer.echo("\n".join([*title, line(heading), rule, *map(line, rows), ""]))
    remarks = [f"* {_plain(text)}" for text in (*about(result, grid), *_remarks(result))]
    typer.echo("\n".join(remarks))


def _plain(text: str) -> str:
    return re.sub(r"([\\*_<>|\[\]~$`])", r"\\\1", text)


def _print_latex(result: Comparison, grid: Grid | None) -> None:
    """A tabular for the package booktabs, or several."""

    def line(cells: Sequence[str]) -> str:
        return f"{' & '.join(_tex(cell) for cell in cells)} \\\\"

    typer.echo("\n".join(f"% {text}" for text in (*about(result, grid), *_remarks(result))))
    for sheet in _sheets(result, grid):
        heading, *rows = _lines(sheet)
        title = [f"% {sheet.title}"] if sheet.title else []
        begin = rf"\begin{{tabular}}{{{'l' + 'r' * (len(heading) - 1)}}}"
        body = [line(heading), r"\midrule", *map(line, rows)]
        typer.echo("\n".join([*title, begin, r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]))


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


_PRINTERS = {
    Format.table: _print_table,
    Format.csv: _print_csv,
    Format.json: _print_json,
    Format.markdown: _print_markdown,
    Format.latex: _print_latex,
}

command.__name__ = "compare"
