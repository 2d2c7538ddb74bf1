"""`sapus simulate`: one run in virtual time, on a cluster that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sapus_cli.commands.options import AsJson, Name, Quiet, Results, takes_run_options
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from sapus_cli.drivers.control import Measured

EXAMPLES = (
    "Examples:\n\n"
    "sapus simulate --strategy sapus --cluster 8xgpu-10g --workers 8\n\n"
    "sapus simulate -s ssp --step-time 50ms --link 1gbit,0.5ms --slow 6:2x,7:4x\n\n"
    "sapus simulate --cluster 64x-wan --workers 1000 --model mlp --steps 200"
)


@takes_run_options
def command(
    config: RunConfig,
    *,
    results: Results = Path("results"),
    name: Name = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Train in virtual time: real gradients, and the seconds of a cluster profile. Exact and repeatable."""
    return _simulate(config, results, name, quiet=quiet, as_json=as_json)


def _simulate(config: RunConfig, results: Path, name: str | None, *, quiet: bool, as_json: bool) -> int:
    from rich.console import Console  # noqa: PLC0415 - heavy imports wait until they are needed
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from sapus_cli.commands import view  # noqa: PLC0415
    from sapus_cli.drivers.launch import Outcome  # noqa: PLC0415
    from sapus_cli.drivers.simulate import Simulation  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or as_json or not console.is_terminal,
    ) as bar:
        task = bar.add_task("virtual time", total=1.0)

        def progress(t_s: float, fraction: float, result: Measured) -> None:
            bar.update(task, completed=fraction, description=f"virtual {t_s:.1f} s, accuracy {result.accuracy:.1%}")

        folder, record = Simulation(config, results, name, progress).run()
    outcome = Outcome(folder, record)
    if as_json:
        view.print_json(outcome)
    elif not quiet:
        view.print_outcome(outcome)
    return 0


command.__name__ = "simulate"
