"""The entry points of the processes. Importing this is light; each imports what it needs when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.plan import Contender, Job


def serve(parent: Connection, job: Job, contender: Contender) -> None:
    """Be the server of a contender."""
    from sapus_cli.drivers.bench import child  # noqa: PLC0415

    child.serve(parent, job, contender)


def work(parent: Connection, job: Job, contender: Contender, rank: int) -> None:
    """Be a worker of a contender."""
    from sapus_cli.drivers.bench import child  # noqa: PLC0415

    child.work(parent, job, contender, rank)


def memory(parent: Connection, job: Job) -> None:
    """Measure memory."""
    from sapus_cli.drivers.bench import ceilings  # noqa: PLC0415

    ceilings.memory(parent, job)


def receive(parent: Connection, job: Job) -> None:
    """Receive one way."""
    from sapus_cli.drivers.bench import ceilings  # noqa: PLC0415

    ceilings.receive(parent, job)


def send(parent: Connection, job: Job, rank: int) -> None:
    """Send one way."""
    from sapus_cli.drivers.bench import ceilings  # noqa: PLC0415

    ceilings.send(parent, job, rank)
