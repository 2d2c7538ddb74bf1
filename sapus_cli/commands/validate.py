"""`sapus validate`: the same runs in real processes under emulation and in virtual time, side by side."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sapus_cli.commands.options import AsJson, takes_run_options
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import UserError
from sapus_cli.traces import incomplete_traces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

    from sapus_cli.analysis import Run

EXAMPLES = (
    "Examples:\n\n"
    "sapus validate 8xgpu-1g\n\n"
    "sapus validate 8xgpu-10g --strategies bsp,ssp --wire-scale 100 --steps 100\n\n"
    "sapus validate my-cluster.toml --results validation --json"
)
STRATEGIES = "bsp,local-sgd,ssp,sapus-weighted"
CLOCKS = ("real", "virtual")
BELOW_BEST = 0.02
"""The target lies so far below what all runs reached: nearer to it, the moment is up to chance."""


@takes_run_options
def command(
    config: RunConfig,
    *,
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="A profile that ships, or the path of a TOML file.")
    ],
    strategy: Annotated[
        str, typer.Option("--strategies", metavar="A,B,...", help="Strategies, with their default hyper-parameters.")
    ] = STRATEGIES,
    param: Annotated[list[str] | None, typer.Option("--param", hidden=True)] = None,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FOLDER", help="Keep the run folders there.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check a cluster profile: run strategies in real processes and in virtual time, and compare the two."""
    del profile, strategy, param
    if config.cluster.step_s is None:
        raise UserError(f"cluster {config.cluster.name} does not say how long a step takes; give --step-time")
    names = [name.strip() for name in config.strategy.split(",")]
    configs = [msgspec.structs.replace(config, strategy=name) for name in names]
    from sapus_cli import registry  # noqa: PLC0415 - heavy imports wait until they are needed

    for one in configs:
        registry.build(one.strategy, one.params)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--strategies {config.strategy}: {name} is named twice; name each once")
        if results is not None and any((results / f"{name}-{clock}").exists() for clock in CLOCKS):
            raise UserError(f"--results {results}: has a run of {name} already; choose another folder")
    folder = results or Path(tempfile.mkdtemp(prefix="sapus-validate-"))
    try:
        pairs = _run(configs, folder)
        target, rows = _compare(pairs)
    finally:
        if results is None:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        from sapus_cli.commands.view import say_json  # noqa: PLC0415

        say_json({"target": target, "rows": rows})
    else:
        _print(config, rows)
    for run in (run for pair in pairs for run in pair):
        if lacking := incomplete_traces(run.record):
            typer.echo(f"sapus: {run.name}: the disk did not take all rows of {', '.join(lacking)}", err=True)
    return 0


def _run(configs: Sequence[RunConfig], folder: Path) -> list[tuple[Run, Run]]:
    """Every configuration by both clocks."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    from sapus_cli import analysis  # noqa: PLC0415

    pairs = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for config in configs:
            real = _real(config, folder, bar)
            virtual = _virtual(config, folder, bar)
            first, second = (analysis.load_runs([path])[0] for path in (real, virtual))
            # The folders may be gone when the figures are asked for.
            for run in (first, second):
                _ = run.evals, run.staleness
            pairs.append((first, second))
    return pairs


def _real(config: RunConfig, folder: Path, bar: Progress) -> Path:
    from sapus_cli.commands.view import Quiet  # noqa: PLC0415
    from sapus_cli.drivers.launch import Launcher  # noqa: PLC0415

    task = bar.add_task(f"{config.strategy}, real processes", total=None)
    outcome = Launcher(config, folder, f"{config.strategy}-real", Quiet).run()
    bar.remove_task(task)
    return outcome.folder


def _virtual(config: RunConfig, folder: Path, bar: Progress) -> Path:
    from sapus_cli.drivers.simulate import Simulation  # noqa: PLC0415

    task = bar.add_task(f"{config.strategy}, virtual time", total=1.0)
    path, _ = Simulation(
        config,
        folder,
        f"{config.strategy}-virtual",
        lambda progress: bar.update(task, completed=progress.fraction),
    ).run()
    bar.remove_task(task)
    return path


def _compare(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, list[dict[str, Any]]]:
    """The target accuracy, and a row for each strategy and metric."""
    from sapus_cli.analysis import best_accuracy, time_to  # noqa: PLC0415

    bests = [best for pair in pairs for run in pair if (best := best_accuracy(run)) is not None]
    target = max(0.0, int(200 * (min(bests) - BELOW_BEST)) / 200) if bests else 0.0
    rows = []
    for pair in pairs:
        for name, values in {
            f"time to {target:.1%}": [time_to(run, target).seconds for run in pair],
            "samples/s": [run.summary["samples_per_s"] for run in pair],
            "GB, both ways": [
                (run.record["totals"]["rx_bytes"] + run.record["totals"]["tx_bytes"]) / 1e9 for run in pair
            ],
            "pushes": [run.summary["pushes"] for run in pair],
            "mean interval": [run.summary["mean_interval"] for run in pair],
            "mean staleness": [run.staleness[0] if run.staleness else None for run in pair],
            "final accuracy": [run.summary["accuracy"] for run in pair],
            "late steps": [run.summary["overruns"] for run in pair],
        }.items():
            real, virtual = values
            percent = 100 * (real - virtual) / virtual if real is not None and virtual else None
            rows.append(
                {
                    "strategy": pair[0].strategy,
                    "metric": name,
                    "real": real,
                    "virtual": virtual,
                    "difference_percent": percent,
                }
            )
    return target, rows


def _print(config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("strategy", "metric"):
        table.add_column(column)
    for column in ("real", "virtual", "difference"):
        table.add_column(column, justify="right")
    before = None
    for row in rows:
        percent = row["difference_percent"]
        table.add_row(
            row["strategy"] if row["strategy"] != before else "",
            row["metric"],
            *("-" if row[clock] is None else f"{row[clock]:,.5g}" for clock in CLOCKS),
            "-" if percent is None else f"{percent:+.2f} %",
        )
        before = row["strategy"]
    console = Console()
    console.print(table)
    console.print(
        f"Cluster {config.cluster.name}, {config.workers} workers, {config.model} on {config.dataset}, "
        f"seed {config.seed}. The target lies two points below what all of these runs reached.",
        highlight=False,
    )
    late = sum(row["real"] for row in rows if row["metric"] == "late steps")
    if late:
        console.print(
            f"{late:,} steps really took longer than the profile says: this machine is too slow for it, or busy.",
            highlight=False,
        )


command.__name__ = "validate"
