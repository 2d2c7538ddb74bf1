"""`sapus worker`: one worker, started by hand, for a server that runs already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.commands.options import check_port, endpoint_parts, whole
from sapus_cli.config import check_threads
from sapus_cli.errors import UserError

EXAMPLES = "Example:\n\nsapus worker --connect tcp://127.0.0.1:5555"


def command(
    connect: Annotated[
        str, typer.Option("--connect", metavar="ENDPOINT", help="Where the server listens, as tcp://HOST:PORT.")
    ],
    *,
    rank: Annotated[int, whole("--rank", text="Rank of this worker; -1 lets the server choose.")] = -1,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="FOLDER", help="Folder of the torchvision data sets on this machine."),
    ] = None,
    threads: Annotated[int, whole("--threads", text="Torch threads of this process.")] = 1,
) -> int:
    """Join a run as one worker; everything else comes from the server."""
    _, port = endpoint_parts("--connect", connect)
    check_port(f"--connect {connect}", port)
    if rank < -1:
        raise UserError(f"--rank {rank}: must be at least 0, or -1 to let the server choose")
    check_threads(threads)
    from sapus_cli.drivers import by_hand  # noqa: PLC0415 - heavy imports wait until they are needed

    reason, joined = by_hand.join(connect, rank, data_dir, threads)
    typer.echo(f"worker {joined}: {reason}", err=True)
    return 0


command.__name__ = "worker"
