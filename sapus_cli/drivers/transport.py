"""How messages travel on one machine: sockets set up for loopback, and memory shared with a worker.

The server makes a segment of memory for each worker that has no name anywhere: when its processes are gone, however
they ended, so is the segment. A worker opens it through the server's entry in /proc.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch

from sapus_cli.errors import RunFailedError

COPY_BYTES = 1 << 22
"""A smaller vector is copied into the socket: to hear when the socket needs it no longer wakes a thread, which takes
longer. Measured with 0.4 MB, where copying gave 1.2 times the exchanges, and 4 MB, where there was no difference."""


class Segment:
    """Two vectors that a worker and the server share: one for its pushes, one for the states that it gets.

    A message tells the other side that a vector is there, and whose turn it is: the worker writes `push` before it
    sends a push, and not again before the reply; the server writes `state` before it replies.

    Attributes:
        push: shape `(d,)`.
        state: shape `(d,)`.
    """

    def __init__(self, file: int, elements: int, dtype: torch.dtype) -> None:
        size = elements * dtype.itemsize
        self._file = file
        memory = mmap.mmap(file, 2 * size)
        self.push = torch.frombuffer(memory, dtype=dtype, count=elements)
        self.state = torch.frombuffer(memory, dtype=dtype, count=elements, offset=size)

    @classmethod
    def create(cls, elements: int, dtype: torch.dtype) -> Segment:
        """Memory for vectors of shape `(elements,)`.

        Raises:
            OSError: there is none.
        """
        file = os.memfd_create("sapus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, 2 * elements * dtype.itemsize)
            # Nobody can take away memory that somebody else is reading.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(file, elements, dtype)
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def open(cls, path: str, elements: int, dtype: torch.dtype) -> Segment:
        """The segment that a server offers at `path`.

        Raises:
            RunFailedError: it is not there, for instance because server and worker see different processes.
        """
        if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
            raise RunFailedError(f"the server offers shared memory at {path!r}, which is no place for it")
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                segment = cls(file, elements, dtype)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise RunFailedError(
                f"cannot open the shared memory of the server, {path}: {error}; use --transport tcp"
            ) from error
        segment._file = -1
        return segment

    @property
    def path(self) -> str:
        """Where a worker of this machine can open it while the server has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Take back the path. The memory stays as long as somebody uses it, with a descriptor of its own."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def prefer_reno(endpoint: str) -> None:
    """Take this process's TCP connections of a loopback endpoint off bbr, to reno.

    There is no congestion on loopback; bbr paces there all the same. Sockets stay as they are where they have something
    else, and where the system does not have reno, or not for us.
    """
    if sys.platform != "linux" or not endpoint.startswith(("tcp://127.", "tcp://localhost:")):
        return
    port = int(endpoint.rpartition(":")[2])
    with suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                _prefer_reno(file, port)


def _prefer_reno(file: Path, port: int) -> None:
    if not str(file.readlink()).startswith("socket:"):
        return
    with socket.socket(fileno=os.dup(int(file.name))) as connection:
        if connection.family != socket.AF_INET or connection.type != socket.SOCK_STREAM:
            return
        ends = [connection.getsockname(), connection.getpeername()]
        paces = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
        if paces and port in {end[1] for end in ends}:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
