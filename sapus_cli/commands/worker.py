"""`sapus worker`: one worker, started by hand, for a server that runs already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.errors import UserError

EXAMPLES = "Example:\n\nsapus worker --connect tcp://127.0.0.1:5555"


def command(
    connect: Annotated[str, typer.Option("--connect", help="Endpoint of the server.")],
    *,
    rank: Annotated[int, typer.Option("--rank", help="Rank of this worker; -1 lets the server choose.")] = -1,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder of the torchvision data sets on this machine.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Torch threads of this process.")] = 1,
) -> int:
    """Join a run as one worker; everything else comes from the server."""
    if not connect.startswith("tcp://") or not connect.rpartition(":")[2].isdecimal():
        raise UserError(f"--connect {connect}: must be tcp://HOST:PORT, as in tcp://127.0.0.1:5555")
    if rank < -1:
        raise UserError(f"--rank {rank}: must be at least 0, or -1 to let the server choose")
    if threads < 1:
        raise UserError(f"--threads {threads}: must be a whole number of at least 1")
    from sapus_cli.drivers import by_hand  # noqa: PLC0415 - heavy imports wait until they are needed

    reason, joined = by_hand.join(connect, rank, data_dir, threads)
    typer.echo(f"worker {joined}: {reason}", err=True)
    return 0


command.__name__ = "worker"
