"""`sapus worker`: one worker, started by hand, for a server that runs already."""

from __future__ import annotations

import datetime as dt
import socket
from pathlib import Path
from typing import Annotated

import typer

from sapus_cli import join as join_file
from sapus_cli.commands.options import check_port, endpoint_parts, whole
from sapus_cli.config import check_threads
from sapus_cli.errors import UserError

EXAMPLES = "Examples:\n\nsapus worker --connect tcp://127.0.0.1:5555\n\nsapus worker --join join.toml"


def command(
    *,
    connect: Annotated[
        str | None,
        typer.Option("--connect", metavar="ENDPOINT", help="Where a server without keys listens, as tcp://HOST:PORT."),
    ] = None,
    join: Annotated[
        Path | None,
        typer.Option("--join", metavar="FILE", help="The join file of a server: where it listens, and keys for it."),
    ] = None,
    rank: Annotated[int, whole("--rank", text="Rank of this worker; -1 lets the server choose.")] = -1,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="FOLDER", help="Folder of the torchvision data sets on this machine."),
    ] = None,
    threads: Annotated[int, whole("--threads", text="Torch threads of this process.")] = 1,
) -> int:
    """Join a run as one worker; everything else comes from the server."""
    if rank < -1:
        raise UserError(f"--rank {rank}: must be at least 0, or -1 to let the server choose")
    check_threads(threads)
    endpoint, keys = _server(connect, join)
    from sapus_cli.drivers import by_hand  # noqa: PLC0415 - heavy imports wait until they are needed

    reason, joined = by_hand.join(endpoint, rank, data_dir, threads, keys)
    typer.echo(f"worker {joined}: {reason}", err=True)
    return 0


def _server(connect: str | None, join: Path | None) -> tuple[str, join_file.ClientKeys | None]:
    """Where to connect, and with which keys.

    Raises:
        UserError: none or both of the two are given, or what is given is not usable.
    """
    if connect is not None and join is not None:
        raise UserError(f"--connect {connect} and --join {join}: the join file says where; leave one of the two out")
    if join is not None:
        invitation = join_file.read(join, dt.datetime.now(dt.UTC))
        remedy = "correct it in the file, or start the server again with --advertise HOST"
        _check_endpoint(f"join file {join}: endpoint", invitation.endpoint, remedy)
        return invitation.endpoint, invitation.keys
    if connect is not None:
        _check_endpoint("--connect", connect, "correct it")
        return connect, None
    raise UserError("give --join FILE if the server has written a join file, else --connect ENDPOINT")


def _check_endpoint(what: str, endpoint: str, remedy: str) -> None:
    host, port = endpoint_parts(what, endpoint)
    check_port(f"{what} {endpoint}", port)
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError):
        raise UserError(f"{what} {endpoint}: this machine knows no IPv4 address of {host}; {remedy}") from None


command.__name__ = "worker"
