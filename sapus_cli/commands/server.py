"""`sapus server`: the server and the evaluator of a run whose workers are started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.commands.options import AsJson, Name, Quiet, Results, check_port, endpoint_parts, takes_run_options
from sapus_cli.commands.run import launch
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import UserError

EXAMPLES = (
    "Examples:\n\n"
    "sapus server --bind tcp://127.0.0.1:5555 --strategy asp --workers 2\n\n"
    "sapus worker --connect tcp://127.0.0.1:5555"
)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


@takes_run_options
def command(
    config: RunConfig,
    *,
    bind: Annotated[
        str,
        typer.Option("--bind", metavar="ENDPOINT", help="Where to listen, as tcp://HOST:PORT; port * is a free one."),
    ] = "tcp://127.0.0.1:*",
    results: Results = Path("results"),
    name: Name = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Start the server and the evaluator of a run, and wait for workers started by hand."""
    endpoint = checked_endpoint(bind)
    return launch(config, results, name, endpoint, own_workers=False, quiet=quiet, as_json=as_json)


def checked_endpoint(bind: str) -> str:
    """The endpoint, if it is one that the server may listen at.

    Raises:
        UserError: it is malformed, or open to other machines, which needs encryption that is not there yet.
    """
    host, port = endpoint_parts("--bind", bind)
    if host not in LOOPBACK_HOSTS:
        raise UserError(f"--bind {bind}: the server listens on loopback only; give tcp://127.0.0.1:{port}")
    if port != "*":
        check_port(f"--bind {bind}", port, ", or * for a free one")
    return f"tcp://127.0.0.1:{port}"


command.__name__ = "server"
