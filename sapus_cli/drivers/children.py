"""The entry points of the child processes. Importing this is light; each imports what it needs when it runs.

The launcher passes these functions to its fork server by name, so the launcher itself never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sapus_cli.config import RunConfig
    from sapus_cli.drivers.control import Prepared, Restart
    from sapus_cli.drivers.security import ServerKeys
    from sapus_cli.join import ClientKeys
    from sapus_cli.strategy import AnyStrategy


def prepare(pipe: Connection, config: RunConfig) -> None:
    """Put the data into the cache, once, and try the model on them."""
    from sapus_cli.drivers import roles  # noqa: PLC0415

    roles.prepare(pipe, config)


def serve(
    pipe: Connection,
    config: RunConfig,
    strategy: AnyStrategy,
    ready: Prepared,
    endpoint: str,
    keys: ServerKeys | None = None,
    restart: Restart | None = None,
) -> None:
    """Be the server of a run, or the one that takes its place."""
    from sapus_cli.drivers import roles  # noqa: PLC0415

    roles.serve(pipe, config, strategy, ready, endpoint, keys, restart)


def work(pipe: Connection, config: RunConfig, strategy: AnyStrategy, ready: Prepared, rank: int) -> None:
    """Be one worker of a run."""
    from sapus_cli.drivers import roles  # noqa: PLC0415

    roles.work(pipe, config, strategy, ready, rank)


def evaluate(pipe: Connection, config: RunConfig, ready: Prepared, keys: ClientKeys | None = None) -> None:
    """Be the evaluator of a run."""
    from sapus_cli.drivers import roles  # noqa: PLC0415

    roles.evaluate(pipe, config, ready, keys)
