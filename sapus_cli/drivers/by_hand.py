"""A worker that nobody launched: it asks the server what to train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sapus_cli import registry
from sapus_cli.config import RunConfig
from sapus_cli.drivers import process, roles
from sapus_cli.drivers.client import Client
from sapus_cli.errors import RemoteProtocolError, RunFailedError

if TYPE_CHECKING:
    from pathlib import Path

    from sapus_cli.join import ClientKeys


def join(
    endpoint: str, rank: int, data_dir: Path | None, threads: int, keys: ClientKeys | None = None
) -> tuple[str, int]:
    """Train for the server at an endpoint until its run ends.

    Args:
        endpoint: where the server listens.
        rank: rank to ask for; -1 takes what is free.
        data_dir: folder of the torchvision data sets on this machine, or None.
        threads: torch threads of this process.
        keys: those of the server's join file; None for a server that has none.

    Returns:
        Why it ended, and the rank that it had.

    Raises:
        RunFailedError: nobody answers, or the server refused.
        UserError: the data cannot be had here.
    """
    process.settle(threads)
    process.load_torch()
    try:
        client = Client(endpoint, "worker", rank, keys)
        config = msgspec.json.decode(client.welcome.config, type=RunConfig)
        config = msgspec.structs.replace(config, data_dir=str(data_dir) if data_dir else None, threads=threads)
        strategy = registry.build(config.strategy, config.params)
        reason = roles.train(client, config, strategy, roles.prepared(config))
    except (RemoteProtocolError, msgspec.ValidationError) as error:
        raise RunFailedError(f"{endpoint}: {error}") from error
    return reason, client.welcome.rank
