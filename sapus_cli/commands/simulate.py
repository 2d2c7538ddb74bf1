"""`sapus simulate`: one run in virtual time, on a cluster that need not be here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from sapus_cli import cluster
from sapus_cli.commands.options import AsJson, Name, Quiet, Results, takes_run_options
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from sapus_cli.drivers.control import Measured

EXAMPLES = (
    "Examples:\n\n"
    "sapus simulate --strategy sapus --cluster 8xgpu-10g --workers 8\n\n"
    "sapus simulate -s ssp --step-time 50ms --link 1gbit,0.5ms --slow 6:2x,7:4x --wire-scale 300\n\n"
    "sapus simulate -s sapus --cluster 64x-wan --workers 1000 --model mlp --steps 200 --eval-every 20"
)


def _option(*names: str, text: str, metavar: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=text, metavar=metavar, rich_help_panel="Cluster")
    return option


@takes_run_options
def command(
    config: RunConfig,
    *,
    profile: Annotated[
        str, _option("--cluster", text="A profile that ships, or the path of a TOML file.", metavar="NAME")
    ] = "none",
    step_time: Annotated[
        str | None, _option("--step-time", text="Mean time of a local step, as in 50ms.", metavar="TIME")
    ] = None,
    link: Annotated[
        str | None, _option("--link", text="The server's link, as in 1gbit,0.5ms.", metavar="RATE[,LATENCY]")
    ] = None,
    slow: Annotated[
        str | None, _option("--slow", text="Slower workers, as in 6:2x,7:4x.", metavar="RANK:FACTORx,...")
    ] = None,
    pause: Annotated[
        str | None, _option("--pause", text="Pauses after steps, as in 0.01:2s.", metavar="PROBABILITY:MEAN")
    ] = None,
    wire_scale: Annotated[
        str | None,
        _option(
            "--wire-scale", text="Count every byte on the link as so many, to stand for a larger model.", metavar="X"
        ),
    ] = None,
    results: Results = Path("results"),
    name: Name = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Train in virtual time: real gradients, and the seconds of a cluster profile. Exact and repeatable."""
    changes: dict[str, object] = {}
    if step_time is not None:
        changes["step_s"] = cluster.seconds("--step-time", step_time)
    if link is not None:
        changes["link"] = cluster.read_link(link)
    if slow is not None:
        changes["slow"] = cluster.read_slow(slow)
    if pause is not None:
        changes["pause"] = cluster.read_pause(pause)
    if wire_scale is not None:
        changes["wire_scale"] = _positive("--wire-scale", wire_scale)
    chosen = cluster.load_profile(profile)
    if changes:
        chosen = msgspec.structs.replace(chosen, **changes)
    config = msgspec.structs.replace(config, cluster=chosen)
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


def _positive(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{option} {text}: must be a number above 0")
    return value


command.__name__ = "simulate"
