"""Contenders of `sapus bench transport` with a wrong result. Each of their processes imports this, so it is light."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import zmq

from sapus_cli.codec import raw
from sapus_cli.drivers.bench import bare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.child import Exchange
    from sapus_cli.drivers.bench.plan import Job
    from sapus_cli.strategy import Vec


def serve(parent: Connection, asked: Job) -> Vec:
    """As `bare.serve`, but wrong in the way that the transport is named after."""
    socket = bare.listen(parent, asked._replace(transport="tcp"))
    x = torch.zeros(asked.elements)
    before = x.clone()
    left = pushes = 0
    while left < asked.workers:
        identity, frame = socket.recv_multipart(copy=False)
        if not len(frame):
            left += 1
            continue
        pushes += 1
        before.copy_(x)
        vector = torch.frombuffer(frame.buffer, dtype=torch.float32)
        if not (asked.transport == "loses" and pushes == 5):
            x.add_(vector)
        if asked.transport == "doubles" and pushes == 5:
            x.add_(vector)
        if asked.transport == "misses one element" and pushes == 5:
            x[7] -= vector[7]
        answer = x.clone()
        if asked.transport == "tears" and pushes > 40:
            answer[-10:] = before[-10:]
        if asked.transport == "is stale":
            answer = before
        if asked.transport == "answers zeros":
            answer.zero_()
        socket.send(identity, zmq.SNDMORE)
        socket.send(raw(answer))
        if asked.transport == "dies" and pushes > 40:
            raise RuntimeError("the server has had enough")
    socket.close()
    return x


@contextmanager
def connect(address: str, asked: Job, rank: int) -> Iterator[Exchange]:
    with bare.connect(address, asked, rank) as exchange:
        yield exchange
