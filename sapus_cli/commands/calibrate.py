"""`sapus calibrate`: what a message costs the server on this machine."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from sapus_cli import cluster
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from sapus_cli.cluster import ServerCost

EXAMPLES = (
    "Examples:\n\nsapus calibrate\n\nsapus calibrate --cluster 8xgpu-10g --output mine.toml\n\n"
    "sapus simulate --cluster mine.toml"
)
WORKERS = 2
SMALL, SMALL_STEPS = 1_000, 2_000
LARGE, LARGE_STEPS = 4_000_000, 60
REPETITIONS = 5


class _Measured(NamedTuple):
    """The server of one run: its CPU seconds, its messages both ways, and their bytes."""

    cpu_s: float
    messages: int
    n_bytes: int


def command(
    *,
    profile: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="The profile that gets the figures.")
    ] = "none",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile there, as TOML.")
    ] = None,
) -> int:
    """Measure what a message costs the server here, for virtual time: CPU seconds a message and a byte."""
    chosen = cluster.load_profile(profile)
    if output is not None and (output.exists() or not output.absolute().parent.is_dir()):
        why = "exists already" if output.exists() else "lies in no folder"
        raise UserError(f"--output {output}: {why}; give another path")
    costs = _measure()
    middle = cluster.ServerCost(
        message_s=statistics.median(cost.message_s for cost in costs),
        byte_s=statistics.median(cost.byte_s for cost in costs),
    )
    for name, unit, scale in (("message_s", "us a message", 1e6), ("byte_s", "s a gigabyte", 1e9)):
        values = sorted(scale * getattr(cost, name) for cost in costs)
        sys.stdout.write(
            f"{name:9} {scale * getattr(middle, name):8.3f} {unit} "
            f"(median of {len(costs)}, {values[0]:.3f} to {values[-1]:.3f})\n"
        )
    if output is not None:
        output.write_text(cluster.to_toml(msgspec.structs.replace(chosen, server=middle)))
        sys.stdout.write(f"Written: {output}\n")
    return 0


def _measure() -> list[ServerCost]:
    from rich.console import Console  # noqa: PLC0415 - heavy imports wait until they are needed
    from rich.progress import Progress  # noqa: PLC0415

    costs = []
    folder = Path(tempfile.mkdtemp(prefix="sapus-calibrate-"))
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring the server", total=2 * REPETITIONS)
            for _ in range(REPETITIONS):
                small = _run(folder, SMALL, SMALL_STEPS)
                bar.advance(task)
                large = _run(folder, LARGE, LARGE_STEPS)
                bar.advance(task)
                costs.append(cost_of(small, large))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return costs


def _run(folder: Path, elements: int, steps: int) -> _Measured:
    from sapus_cli.commands.view import Quiet  # noqa: PLC0415
    from sapus_cli.config import RunConfig  # noqa: PLC0415
    from sapus_cli.drivers.launch import Launcher  # noqa: PLC0415

    config = RunConfig(
        strategy="asp",
        workers=WORKERS,
        dataset="null",
        model=f"null:{elements}",
        steps=steps,
        eval_every_s=1e6,
    )
    totals = Launcher(config, folder, None, Quiet).run().record["totals"]
    return _Measured(totals["server_cpu_s"], 2 * totals["pushes"], totals["rx_bytes"] + totals["tx_bytes"])


def cost_of(small: _Measured, large: _Measured) -> ServerCost:
    """The cost of a message and of a byte that give both CPU times; a byte never costs less than nothing."""
    # cpu = messages * message_s + n_bytes * byte_s, twice.
    determinant = small.messages * large.n_bytes - large.messages * small.n_bytes
    message_s = (small.cpu_s * large.n_bytes - large.cpu_s * small.n_bytes) / determinant
    byte_s = (small.messages * large.cpu_s - large.messages * small.cpu_s) / determinant
    return cluster.ServerCost(message_s=max(0.0, message_s), byte_s=max(0.0, byte_s))


command.__name__ = "calibrate"
