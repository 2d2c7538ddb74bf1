"""`sapus server`: the server and the evaluator of a run whose workers are started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.commands.options import takes_run_options
from sapus_cli.commands.run import launch, loopback_endpoint
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
        str, typer.Option("--bind", help="Where to listen; port * means a free one.")
    ] = "tcp://127.0.0.1:*",
    results: Annotated[Path, typer.Option("--results", help="Folder that gets the run folder.")] = Path("results"),
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run folder, in place of the usual one.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing unless something goes wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary, and only it, as JSON on stdout.")] = False,
) -> int:
    """Start the server and the evaluator of a run, and wait for workers started by hand."""
    endpoint = checked_endpoint(bind)
    return launch(config, results, name, endpoint, own_workers=False, quiet=quiet, as_json=as_json)


def checked_endpoint(bind: str) -> str:
    """The endpoint, if it is one that the server may listen at.

    Raises:
        UserError: it is malformed, or open to other machines, which needs encryption that is not there yet.
    """
    scheme, _, address = bind.partition("://")
    host, colon, port = address.rpartition(":")
    if scheme != "tcp" or not host or not colon:
        raise UserError(f"--bind {bind}: must be tcp://HOST:PORT, as in tcp://127.0.0.1:5555")
    if host not in LOOPBACK_HOSTS:
        raise UserError(f"--bind {bind}: the server listens on loopback only ({' or '.join(LOOPBACK_HOSTS)})")
    return loopback_endpoint(port)


command.__name__ = "server"
