"""`sapus report`: one HTML page of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.commands.compare import DEFAULT_METRICS, about, texts
from sapus_cli.commands.plot import groups_of
from sapus_cli.commands.selection import Baseline, Drawn, Target, accuracy
from sapus_cli.figures import Request, write

EXAMPLES = "Examples:\n\nsapus report results/suite\n\nsapus report results/2026* --target 95% -o comparison.html"
METRICS = (*DEFAULT_METRICS, "throughput", "interval", "staleness")


def command(
    runs: Drawn = None,
    *,
    target: Target = None,
    baseline: Baseline = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
) -> int:
    """Write one HTML page of runs, to send around: the comparison, the figures, and what each run was made with."""
    from sapus_cli import analysis, report  # noqa: PLC0415 - heavy imports wait until they are needed

    wanted = None if target is None else accuracy(target)
    groups = groups_of(runs or [])
    baseline = baseline or analysis.suite_view(groups).get("baseline")
    runs_of = [run for group in groups for run in (*group.runs, *group.repeats)]
    result = analysis.compare(runs_of, target=wanted, baseline=baseline, metrics=METRICS, alone=True)
    drawn, left_out = report.draw_all(groups, Request(target=wanted, baseline=baseline or "bsp"))
    facts = [*about(result), *result.notes]
    page = report.html(report.Page(texts(result), facts, result.warnings, groups, drawn, left_out))
    write(output, page.encode())
    typer.echo(f"Wrote {output}")
    return 0


command.__name__ = "report"
