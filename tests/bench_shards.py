"""Whether several servers on one machine are faster than one: the bare exchange, its vector split over S processes.

    OMP_NUM_THREADS=1 python tests/bench_shards.py 2.5e7 4

Elements d and workers. Each of S servers has d // S elements; a worker sends every server its part, then receives all
parts. In each round every S is measured once; stated are exchanges a second of all workers, and the median and range of
their ratio to one server.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from typing import TYPE_CHECKING

from sapus_cli.drivers import process
from sapus_cli.drivers.bench.plan import Job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

SERVERS = (1, 2, 4)
ROUNDS = 5
SECONDS = 3.0
WARM_UP = 3


def serve(pipe: Connection, job: Job) -> None:
    """Be one server: its address first, in the end the least and greatest element of its sum."""
    process.settle(1)
    from sapus_cli.drivers.bench import bare  # noqa: PLC0415 - after the allocator has been told

    x = bare.serve(pipe, job)
    pipe.send((x.min().item(), x.max().item()))


def work(pipe: Connection, job: Job, addresses: Sequence[str]) -> None:
    """Exchange with all servers for some seconds, counting from when the parent says so."""
    process.settle(1)
    import torch  # noqa: PLC0415
    import zmq  # noqa: PLC0415

    from sapus_cli.codec import raw  # noqa: PLC0415
    from sapus_cli.drivers.bench import bare  # noqa: PLC0415
    from sapus_cli.drivers.transport import COPY_BYTES  # noqa: PLC0415

    context = zmq.Context()
    sockets = [bare.dial(context, address) for address in addresses]
    parts = [raw(part) for part in torch.ones(len(sockets), job.elements)]
    into = [raw(part) for part in torch.empty(len(sockets), job.elements)]
    small = len(parts[0]) < COPY_BYTES

    def exchange() -> None:
        for socket, part in zip(sockets, parts, strict=True):
            socket.send(part, 0, copy=small)
        for socket, part in zip(sockets, into, strict=True):
            socket.recv_into(part)

    for _ in range(WARM_UP):
        exchange()
    pipe.send("ready")
    pipe.recv()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < SECONDS:
        exchange()
        count += 1
    pipe.send((count, count / (time.monotonic() - began)))
    for socket in sockets:
        socket.send(b"")
        socket.close()
    context.term()


def measure(elements: int, workers: int, servers: int) -> float:
    """Exchanges a second of all workers together; the sum at every server is checked."""
    context = multiprocessing.get_context("spawn")
    job = Job(elements // servers, workers, SECONDS, "", "tcp")

    def start(main: object, *arguments: object) -> Connection:
        ours, theirs = context.Pipe()
        started = context.Process(target=main, args=(theirs, job, *arguments), daemon=True)  # type: ignore[arg-type]
        started.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return ours

    serving = [start(serve) for _ in range(servers)]
    addresses = [pipe.recv().address for pipe in serving]
    working = [start(work, addresses) for _ in range(workers)]
    for pipe in working:
        pipe.recv()
    for pipe in working:
        pipe.send("go")
    counted = [pipe.recv() for pipe in working]
    pushes = sum(count + WARM_UP for count, _ in counted)
    for pipe in serving:
        assert pipe.recv() == (pushes, pushes), "a push was lost"
    return float(sum(rate for _, rate in counted))


def main() -> None:
    elements, workers = int(float(sys.argv[1])), int(sys.argv[2])
    rates: dict[int, list[float]] = {servers: [] for servers in SERVERS}
    for turn in range(ROUNDS):
        for servers in SERVERS[:: 1 if turn % 2 else -1]:
            rates[servers].append(measure(elements, workers, servers))
    for servers in SERVERS:
        ratios = [rate / one for rate, one in zip(rates[servers], rates[1], strict=True)]
        print(
            f"{servers} servers: {statistics.median(rates[servers]):.1f} exchanges/s, "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of one server"
        )


if __name__ == "__main__":
    main()
