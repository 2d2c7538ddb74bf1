"""Where a process prints to: what nobody takes, on a full disk or a terminal that is gone, ends no process."""

from __future__ import annotations

import io
from typing import Any


class Careless(io.FileIO):
    """A file that drops what the system does not take."""

    def write(self, data: Any) -> int:
        """Write; returns the number of bytes, also of those that are lost."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def careless(descriptor: int, encoding: str | None = None) -> io.TextIOWrapper:
    """A text stream to a descriptor, line by line, which never fails and does not close it."""
    raw = Careless(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
