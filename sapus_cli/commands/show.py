"""`sapus show`: what a run folder says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapus_cli.commands.options import flag
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

EXAMPLES = "Example:\n\nsapus show results/20260101T120000Z_local-sgd_w8_s0"
MOST_EVALS = 12


def command(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder.")],
    *,
    as_json: Annotated[bool, flag("--json", text="Print run.json as it is.")] = False,
) -> int:
    """Show one run: what it was asked, how it ended, and a line a worker."""
    from sapus_cli import traces  # noqa: PLC0415 - heavy imports wait until they are needed

    try:
        record = traces.read_run(run)
    except UserError as error:
        raise UserError(f"{error}; give the folder of a run, as in results/NAME") from error
    if as_json:
        typer.echo((run / "run.json").read_text())
        return 0
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    _headline(console, run, record)
    _evals(console, traces.read_trace(run, "evals"))
    _workers(console, traces.read_trace(run, "pushes"))
    _events(console, traces.read_trace(run, "events"))
    return 0


def _headline(console: Console, run: Path, record: dict[str, Any]) -> None:
    from sapus_cli.commands.view import summary_table  # noqa: PLC0415
    from sapus_cli.traces import incomplete_traces, is_held  # noqa: PLC0415

    config = record["config"]
    params = " ".join(f"{key}={value}" for key, value in record["strategy"]["hyper_parameters"].items())
    console.print(f"[bold]{run.name}[/bold]  {record['status']}", highlight=False)
    if record["status"] == "running" and record["clock"] == "real" and not is_held(run):
        console.print(f"[yellow]its launcher is gone; to go on: sapus run --resume {run}[/yellow]", highlight=False)
    console.print(
        f"{config['strategy']} {params}".strip()
        + f": {config['model']} on {config['dataset']} ({config['partition']}), "
        f"{record['model']['elements']:,} elements, {config['workers']} workers, "
        f"batch {record.get('effective_batch_size', config['batch_size'])}, "
        f"{config['optimizer']} lr {config['lr']:g}, seed {config['seed']}",
        highlight=False,
    )
    if record["clock"] == "virtual":
        console.print(f"virtual time on the cluster profile {record['cluster']['name']}", highlight=False)
    if record.get("failure"):
        console.print(f"[red]{record['failure']}[/red]", highlight=False)
    if lacking := incomplete_traces(record):
        console.print(f"[yellow]rows are missing, the disk did not take them: {', '.join(lacking)}[/yellow]")
    console.print(summary_table(record))


def _evals(console: Console, evals: pl.DataFrame) -> None:
    from rich.table import Table  # noqa: PLC0415

    if evals.is_empty():
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("time s", "epoch", "version", "loss", "accuracy"):
        table.add_column(column, justify="right")
    every = max(1, -(-len(evals) // MOST_EVALS))
    chosen = {*range(0, len(evals), every), len(evals) - 1}
    for i, row in enumerate(evals.iter_rows(named=True)):
        if i in chosen:
            table.add_row(
                f"{row['t_s']:.2f}",
                f"{row['epoch']:.1f}",
                str(row["version"]),
                f"{row['loss']:.4f}",
                f"{row['accuracy']:.2%}",
            )
    console.print(table)


def _workers(console: Console, pushes: pl.DataFrame) -> None:
    import polars as pl  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    if pushes.is_empty():
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ["worker", "pushes", "steps", "H", "stale", "step_ms", "exch_ms", "held_ms", "in_MB", "out_MB"]:
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    per_worker = pushes.group_by("worker").agg(
        pl.len().alias("pushes"),
        pl.col("n_steps").sum().alias("steps"),
        pl.col("n_steps").mean().alias("interval"),
        pl.col("staleness").mean(),
        *(pl.col(seconds).mean() * 1000 for seconds in ("step_s", "exchange_s", "held_s")),
        *(pl.col(n_bytes).sum() / 1e6 for n_bytes in ("bytes_in", "bytes_out")),
    )
    for worker, n, steps, *others in per_worker.sort("worker").iter_rows():
        table.add_row(str(worker), str(n), str(steps), *(f"{value:.1f}" for value in others))
    console.print(table)


def _events(console: Console, events: pl.DataFrame) -> None:
    for row in events.iter_rows(named=True):
        detail = row["detail"] or ""
        if row["kind"] in {"join", "leave"} or (row["kind"] == "checkpoint" and detail.startswith("version")):
            continue
        who = f"{row['role']} {row['rank']}" if row["role"] == "worker" else row["role"]
        console.print(f"{row['t_s']:.2f} s  {row['kind']}: {who} {detail}".rstrip(), highlight=False)


command.__name__ = "show"
