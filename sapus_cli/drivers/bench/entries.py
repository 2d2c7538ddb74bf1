"""The entry point of the processes. Importing this is light; what it calls imports what it needs."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.plan import Job


def call(parent: Connection, job: Job, part: str, *arguments: object) -> None:
    """Do a part of a measurement, as "module:function" within this package."""
    pkgutil.resolve_name(f"{__package__}.{part}")(parent, job, *arguments)
