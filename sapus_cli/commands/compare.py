"""`sapus compare`: groups of runs side by side."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapus_cli.commands.options import flag
from sapus_cli.commands.selection import Baseline, Target, accuracy, runs_argument
from sapus_cli.errors import UserError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from sapus_cli.analysis import Comparison, Estimate, Metric

EXAMPLES = (
    "Examples:\n\n"
    "sapus compare\n\n"
    "sapus compare results/2026*_w8_* --target 95% --baseline asp\n\n"
    "sapus compare results/suite --metrics time,bytes,staleness\n\n"
    "sapus compare --format csv > comparison.csv"
)
DEFAULT_METRICS = ("time", "speedup", "accuracy", "cpu", "bandwidth", "bytes")
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
            help="Columns: time, speedup, bytes, accuracy, best, throughput, cpu, bandwidth, peak, each of these three "
            "with -reduction, interval, staleness, staleness-p99, seeds, or all.",
            show_default=f"{', '.join(DEFAULT_METRICS)}; all for csv and json",
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="METRIC", help="Metric whose best value comes first.")
    ] = "time",
    form: Annotated[
        Format, typer.Option("--format", metavar="FORMAT", help="table, csv, json, markdown or latex.")
    ] = Format.table,
    force: Annotated[
        bool, flag("--force", text="Compare runs of different data, models or clocks all the same.")
    ] = False,
) -> int:
    """Compare runs: time to a target accuracy, speed-up, server load; with confidence intervals over seeds."""
    from sapus_cli import analysis  # noqa: PLC0415 - heavy imports wait until they are needed

    names = _metrics(metrics, form)
    if sort not in analysis.METRICS:
        raise unknown("metric in --sort", sort, analysis.METRICS)
    wanted = None if target is None else accuracy(target)
    found = analysis.load_runs(_paths(runs or []))
    result = analysis.compare(found, target=wanted, baseline=baseline, metrics=names, sort=sort, force=force)
    _PRINTERS[form](result)
    return 0


def _paths(runs: Sequence[str]) -> list[Path]:
    if runs:
        return [Path(run) for run in runs]
    if not Path("results").is_dir():
        raise UserError("there is no folder results here; name the runs to compare, or make some with: sapus run")
    return [Path("results")]


def _metrics(text: str | None, form: Format) -> list[str]:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    if text == "all" or (text is None and form in {Format.csv, Format.json}):
        return list(METRICS)
    names = list(DEFAULT_METRICS) if text is None else [name.strip() for name in text.split(",")]
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
    if metric.key in {"accuracy", "best_accuracy", "speedup"}:
        return f"{metric.scale * value:.2f}"
    return _number(metric.scale * value)


def _heading(metric: Metric) -> str:
    return f"{metric.header} {metric.unit}".strip()


def about(result: Comparison) -> list[str]:
    """What stands under the table, but for the notes."""
    from sapus_cli.analysis import LEAST_SEEDS  # noqa: PLC0415

    seeds = sorted({len(row.group.runs) for row in result.rows})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    lines = [f"target {100 * result.target.accuracy:.4g} %: {result.target.rule}"]
    if result.baseline is not None:
        lines.append(f"baseline: {result.baseline}")
    line = f"seeds a group: {count}; mean over seeds"
    if seeds[-1] >= LEAST_SEEDS:
        short = f"; too narrow below {ENOUGH_SEEDS} seeds" if seeds[0] < ENOUGH_SEEDS else ""
        line += f" [95 % bootstrap interval{short}]"
    lines.append(line)
    return lines


def _remarks(result: Comparison) -> list[str]:
    return [*result.notes, *(f"warning: {warning}" for warning in result.warnings)]


def _print_table(result: Comparison) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    for names in _that_fit(result, console.width):
        _print_columns(console, result, names)
    for line in about(result):
        console.print(line, style="dim", markup=False, highlight=False)
    for line in result.notes:
        console.print(line, markup=False, highlight=False)
    for line in result.warnings:
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)


def _heading_lines(metric: Metric) -> tuple[str, str]:
    first, _, last = metric.header.rpartition(" ")
    return (first, f"{last} {metric.unit}".strip()) if first else (last, metric.unit)


def _label_width(result: Comparison, width: int) -> int:
    return min(max(len(text) for text in ("strategy", *(row.group.name for row in result.rows))), max(12, width // 3))


def _that_fit(result: Comparison, width: int) -> list[list[str]]:
    """The metrics, split into tables that are no wider than the terminal."""
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    tables: list[list[str]] = []
    used = math.inf
    for name in result.metrics:
        metric = METRICS[name]
        texts = [*_heading_lines(metric)]
        for row in result.rows:
            texts += [_value(metric, row.cells[name]), _interval(metric, row.cells[name])]
        needed = GAP + max(map(len, texts))
        if used + needed > width:
            tables.append([])
            used = _label_width(result, width)
        tables[-1].append(name)
        used += needed
    return tables


def _print_columns(console: Console, result: Comparison, names: list[str]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    grid = Table(box=None, padding=(0, 0, 0, GAP), pad_edge=False, header_style="dim")
    grid.add_column("\nstrategy", max_width=_label_width(result, console.width), overflow="fold")
    for name in names:
        grid.add_column(Text("\n".join(_heading_lines(METRICS[name]))), justify="right", no_wrap=True)
    for row in result.rows:
        texts = ((_value(METRICS[name], row.cells[name]), _interval(METRICS[name], row.cells[name])) for name in names)
        cells = [Text.assemble(value, "\n", (ends, "dim")) if ends else Text(value) for value, ends in texts]
        grid.add_row(Text(row.group.name), *cells)
    console.print(grid)
    console.print()


def _print_csv(result: Comparison) -> None:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    names = [name for name in result.metrics if name != "seeds"]
    keys = [METRICS[name].key for name in names]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = [f"{key}{part}" for key in keys for part in ("", "_low", "_high", "_bound")]
    writer.writerow(["group", "strategy", "seeds", "finished", "target", "baseline", *parts])
    for row in result.rows:
        cells = [row.cells[name] for name in names]
        finished = sum(run.finished for run in row.group.runs)
        about = [row.group.label, row.group.strategy, len(row.group.runs), finished]
        figures = [part for cell in cells for part in (cell.value, cell.low, cell.high, cell.bound)]
        writer.writerow([*about, result.target.accuracy, result.baseline, *figures])
    sys.stdout.write(out.getvalue())
    for line in _remarks(result):
        typer.echo(line, err=True)


def _print_json(result: Comparison) -> None:
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    def group(row: Any) -> dict[str, Any]:
        return {
            "label": row.group.label,
            "strategy": row.group.strategy,
            "hyper_parameters": row.group.runs[0].hyper_parameters,
            "seeds": row.group.seeds,
            "runs": [str(run.folder) for run in row.group.runs],
            "unfinished": [str(run.folder) for run in row.group.runs if not run.finished],
            "metrics": {METRICS[name].key: row.cells[name]._asdict() for name in result.metrics if name != "seeds"},
        }

    document = {
        "target": result.target.accuracy,
        "target_rule": result.target.rule,
        "baseline": result.baseline,
        "groups": [group(row) for row in result.rows],
        "notes": result.notes,
        "warnings": result.warnings,
    }
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def texts(result: Comparison) -> list[list[str]]:
    """Heading and rows of a table of texts."""
    from sapus_cli.analysis import METRICS  # noqa: PLC0415

    metrics = [(name, METRICS[name]) for name in result.metrics]
    lines = [["strategy", *(_heading(metric) for _, metric in metrics)]]
    for row in result.rows:
        cells = [f"{_value(m, row.cells[name])} {_interval(m, row.cells[name])}".strip() for name, m in metrics]
        lines.append([row.group.name, *cells])
    return lines


def _print_markdown(result: Comparison) -> None:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_plain(cell) for cell in cells)} |"

    heading, *rows = texts(result)
    rule = f"| --- |{' ---: |' * (len(heading) - 1)}"
    remarks = [f"* {_plain(text)}" for text in (*about(result), *_remarks(result))]
    typer.echo("\n".join([line(heading), rule, *map(line, rows), "", *remarks]))


def _plain(text: str) -> str:
    return re.sub(r"([\\*_<>|\[\]~$`])", r"\\\1", text)


def _print_latex(result: Comparison) -> None:
    """A tabular for the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return f"{' & '.join(_tex(cell) for cell in cells)} \\\\"

    heading, *rows = texts(result)
    remarks = [f"% {text}" for text in (*about(result), *_remarks(result))]
    columns = "l" + "r" * (len(heading) - 1)
    body = [line(heading), r"\midrule", *map(line, rows)]
    lines = [*remarks, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
    typer.echo("\n".join(lines))


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
