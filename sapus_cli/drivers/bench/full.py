"""The project's own server with all that belongs to it, and clients without a model."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sapus_cli import registry, traces
from sapus_cli.cluster import ClusterProfile
from sapus_cli.codec import Leave, Pull, Push, State, Stop
from sapus_cli.drivers import control, server
from sapus_cli.drivers.bench.bare import endpoint
from sapus_cli.drivers.bench.plan import Serving
from sapus_cli.drivers.client import Client
from sapus_cli.errors import RemoteProtocolError
from sapus_cli.strategy import Setting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.child import Exchange
    from sapus_cli.drivers.bench.plan import Job
    from sapus_cli.strategy import Vec

LAYOUT = "bench"


def serve(parent: Connection, job: Job) -> Vec:
    """Serve as in a run of `asp`, pushes.csv included, until the parent says that all is measured."""
    launcher, ours = multiprocessing.Pipe()
    strategy = registry.build("asp", {"scale": "sum"})
    with traces.Trace(Path(job.folder) / "pushes.csv", traces.push_columns(strategy.columns)) as pushes:
        socket, address = server.bind(endpoint(job), job.elements)
        role = server.Server(
            socket,
            strategy,
            torch.zeros(job.elements),
            n_workers=job.workers,
            profile=ClusterProfile(),
            setting=Setting(),
            fingerprint=LAYOUT,
            config=b"",
            shared=job.transport == "shm",
            launcher=ours,
            pushes=pushes,
            target_accuracy=None,
        )
        threading.Thread(target=_launch, args=(parent, launcher), daemon=True).start()
        parent.send(Serving(address))
        role.run()
    socket.close()
    return role.core.state.x


def _launch(parent: Connection, server: Connection) -> None:
    """Be the launcher to the server: listen to it, and halt it when the parent says so."""
    waiting = [parent, server]
    while waiting:
        for pipe in connection.wait(waiting):
            if pipe is server:
                control.hear(server)
            else:
                parent.recv()
                control.tell(server, control.Halt())
                waiting.remove(parent)


@contextmanager
def connect(address: str, job: Job, rank: int) -> Iterator[Exchange]:
    """A worker's connection, with its real headers. To shared memory it copies what it pushes, each time."""
    client = Client(address, "worker", rank)
    outgoing, incoming = client.buffers
    pulled = torch.empty(job.elements) if incoming is None else incoming
    client.send(Pull(fingerprint=LAYOUT))
    state = _state(client, pulled)
    seq = 0

    def exchange(push: Vec) -> Vec:
        nonlocal seq, state
        seq += 1
        header = Push(seq=seq, version=state.version, n_steps=1, n_samples=1, loss=0.0, step_s=0.0, exchange_s=0.0)
        client.send(header, push if outgoing is None else outgoing.copy_(push))
        state = _state(client, pulled)
        return pulled

    yield exchange
    # The server ends when it has been halted and all have left, in this order.
    while not isinstance(client.receive(None, None), Stop):
        pass
    client.send(Leave(reason="measured"))
    client.close()


def _state(client: Client, into: Vec) -> State:
    message = client.receive(into, None)
    if not isinstance(message, State):
        raise RemoteProtocolError(f"a state was due, but the server sent {message!r}")
    return message
