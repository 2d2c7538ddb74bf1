"""`sapus run`: one run, all processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.commands.options import takes_run_options
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import UserError

EXAMPLES = (
    "Examples:\n\n"
    "sapus run --strategy local-sgd --param h=4 --workers 8\n\n"
    "sapus run -s bsp --dataset mnist5k --model lenet5 --target-accuracy 0.95\n\n"
    "sapus run -s asp --dataset pydoc --seconds 60 --optimizer adamw --lr 0.001\n\n"
    "sapus run -s my_module:MyStrategy --json"
)


@takes_run_options
def command(
    config: RunConfig,
    *,
    results: Annotated[Path, typer.Option("--results", help="Folder that gets the run folder.")] = Path("results"),
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run folder, in place of the usual one.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port of the server; a free one by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing unless something goes wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary, and only it, as JSON on stdout.")] = False,
) -> int:
    """Train a model with one strategy: a server, N workers and an evaluator on this machine."""
    endpoint = loopback_endpoint("*" if port is None else str(port))
    return launch(config, results, name, endpoint, own_workers=True, quiet=quiet, as_json=as_json)


def loopback_endpoint(port: str) -> str:
    """The endpoint on loopback with this port; * lets the system choose.

    Raises:
        UserError: no such port.
    """
    if port != "*" and not (port.isdecimal() and 1 <= int(port) <= 65535):  # noqa: PLR2004 - the range of TCP ports
        raise UserError(f"port {port}: must be a number from 1 to 65535")
    return f"tcp://127.0.0.1:{port}"


def launch(
    config: RunConfig,
    results: Path,
    name: str | None,
    endpoint: str,
    *,
    own_workers: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run to the end and print how it went."""
    from sapus_cli.commands import view  # noqa: PLC0415 - heavy imports wait until they are needed
    from sapus_cli.drivers.launch import Launcher  # noqa: PLC0415

    with view.Views(quiet=quiet, as_json=as_json, by_hand=not own_workers) as views:
        outcome = Launcher(config, results, name, views, endpoint=endpoint, own_workers=own_workers).run()
    if as_json:
        view.print_json(outcome)
    elif not quiet:
        view.print_outcome(outcome)
    return 0


command.__name__ = "run"
