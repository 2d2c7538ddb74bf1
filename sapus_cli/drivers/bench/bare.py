"""ZeroMQ alone: the loop that the whole server is measured against, with nothing in it that is not needed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import zmq

from sapus_cli.codec import raw
from sapus_cli.drivers.bench.plan import Serving
from sapus_cli.drivers.transport import COPY_BYTES, prefer_reno

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.child import Exchange
    from sapus_cli.drivers.bench.plan import Job
    from sapus_cli.strategy import Vec


def endpoint(job: Job) -> str:
    """Where a server listens that knows only sockets: loopback, or a name without a file where there are such."""
    if job.transport == "tcp":
        return "tcp://127.0.0.1:*"
    return f"ipc://@{Path(job.folder).name}" if sys.platform == "linux" else f"ipc://{job.folder}/socket"


def serve(parent: Connection, job: Job) -> Vec:
    """Add what comes and send the sum back, until all workers have sent an empty message."""
    socket = listen(parent, job)
    x = torch.zeros(job.elements)
    state = raw(x)
    left = 0
    while left < job.workers:
        identity, frame = socket.recv_multipart(copy=False)
        if not len(frame):
            left += 1
            continue
        x.add_(torch.frombuffer(frame.buffer, dtype=torch.float32))
        socket.send(identity, zmq.SNDMORE)
        socket.send(state)
    socket.close()
    return x


def listen(parent: Connection, job: Job) -> zmq.Socket[bytes]:
    """A ROUTER socket to which all workers are connected, set up as the project's own."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(endpoint(job))
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    parent.send(Serving(address))
    greeted = [socket.recv_multipart() for _ in range(job.workers)]
    prefer_reno(address)
    for message in greeted:
        socket.send_multipart(message)
    return socket


def dial(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A DEALER socket that is connected to such a server."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    socket.send(b"hello")
    socket.recv()
    prefer_reno(address)
    return socket


@contextmanager
def connect(address: str, job: Job, _rank: int) -> Iterator[Exchange]:
    """A DEALER socket that sends large vectors without a copy and receives into memory that is there already."""
    context = zmq.Context()
    socket = dial(context, address)
    pulled = torch.empty(job.elements)
    into = raw(pulled)
    small = len(into) < COPY_BYTES

    def exchange(push: Vec) -> Vec:
        socket.send(raw(push), 0, copy=small)
        socket.recv_into(into)
        return pulled

    yield exchange
    socket.send(b"")
    socket.close()
    context.term()
