"""What the machine can do at most: copy, add, and send one way through the loopback device."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from sapus_cli.codec import raw
from sapus_cli.drivers.bench import child
from sapus_cli.drivers.bench.plan import FLOAT32_BYTES
from sapus_cli.drivers.transport import prefer_reno
from sapus_cli.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.plan import Job

LEAST_CALLS, MOST_S = 3, 0.5
"""In half a second no more calls fit than float32 can count."""


def memory(parent: Connection, job: Job) -> None:
    """Tell the parent the rates of a copy and of an in-place x + u, in GB/s of a vector's bytes."""
    child.begin(job, "memory")
    x, u = torch.zeros(job.elements), torch.ones(job.elements)
    axpy, calls = _rate(lambda: x.add_(u), job)
    if not bool((x == calls).all()):
        raise RunFailedError(f"{calls} additions of 1 do not add up")
    copy, _ = _rate(lambda: x.copy_(u), job)
    if not torch.equal(x, u):
        raise RunFailedError("a copy is not equal to what was copied")
    parent.send((copy, axpy))


def _rate(call: Callable[[], object], job: Job) -> tuple[float, int]:
    """GB/s of calls that each take a vector, and how many calls there were; one is not timed."""
    call()
    calls = 0
    begin = now = time.monotonic()
    while calls < LEAST_CALLS or now < begin + min(job.seconds / 2, MOST_S):
        call()
        calls += 1
        now = time.monotonic()
    return 1e-9 * FLOAT32_BYTES * job.elements * calls / (now - begin), calls + 1


def receive(parent: Connection, job: Job) -> None:
    """Take in what all workers send; tell the parent the port first, then the rate in GB/s."""
    child.begin(job, "receiver")
    buffers = [torch.zeros(job.elements) for _ in range(job.workers)]
    with socket.create_server(("127.0.0.1", 0), backlog=job.workers) as listener:
        parent.send(listener.getsockname()[1])
        streams = [_Stream(listener.accept()[0], memoryview(raw(buffer))) for buffer in buffers]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while not all(stream.n_bytes >= len(stream.buffer) for stream in streams):
            _take(selector)
        before = sum(stream.n_bytes for stream in streams)
        begin = now = time.monotonic()
        while now < begin + job.seconds:
            _take(selector)
            now = time.monotonic()
    n_bytes = sum(stream.n_bytes for stream in streams) - before
    for stream in streams:
        stream.socket.close()
    found = sorted(buffer[0].item() for buffer in buffers if bool((buffer == buffer[0]).all()))
    if found != list(range(1, job.workers + 1)):
        raise RunFailedError(f"what arrived is not what was sent: {found}")
    parent.send(1e-9 * n_bytes / (now - begin))


class _Stream:
    """A connection that delivers one vector after another into the same memory."""

    def __init__(self, connection: socket.socket, buffer: memoryview) -> None:
        self.socket = connection
        self.buffer = buffer
        self.n_bytes = 0

    def take(self) -> None:
        """Take what is there."""
        got = self.socket.recv_into(self.buffer[self.n_bytes % len(self.buffer) :])
        if not got:
            raise RunFailedError("a sender is gone")
        self.n_bytes += got


def _take(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select():
        key.data.take()


def send(parent: Connection, job: Job, rank: int) -> None:
    """Send one vector again and again until the receiver has had enough."""
    child.begin(job, f"sender-{rank}")
    vector = raw(torch.full((job.elements,), float(rank + 1)))
    port = parent.recv()
    with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ConnectionError):
        prefer_reno(f"tcp://127.0.0.1:{port}")
        while True:
            connection.sendall(vector)
