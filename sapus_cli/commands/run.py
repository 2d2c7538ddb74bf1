"""`sapus run`: one run, all processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sapus_cli.commands.options import (
    AsJson,
    Name,
    Quiet,
    Results,
    Transport,
    check_port,
    option,
    takes_run_options,
    whole,
)
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
    results: Results = Path("results"),
    name: Name = None,
    transport: Annotated[
        Transport,
        option(
            "--transport",
            text="How messages travel: tcp (a real network stack, so that server CPU means something), ipc, or shm: "
            "vectors through shared memory.",
        ),
    ] = Transport.tcp,
    port: Annotated[int | None, whole("--port", text="Port of the server; a free one by default.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Train a model with one strategy: a server, N workers and an evaluator on this machine."""
    config = msgspec.structs.replace(config, transport=transport.value)
    endpoint = None
    if port is not None:
        check_port(f"--port {port}", str(port), "; leave it out for a free one")
        if transport is not Transport.tcp:
            raise UserError(f"--port {port}: {transport} has no ports; leave one of the two out")
        endpoint = f"tcp://127.0.0.1:{port}"
    return launch(config, results, name, endpoint, own_workers=True, quiet=quiet, as_json=as_json)


def launch(
    config: RunConfig,
    results: Path,
    name: str | None,
    endpoint: str | None,
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
