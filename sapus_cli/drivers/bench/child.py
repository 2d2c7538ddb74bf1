"""What every process of a measurement does, whoever the contender is."""

from __future__ import annotations

import multiprocessing
import pkgutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sapus_cli.drivers import process
from sapus_cli.drivers.bench.plan import Done, Final, Job, Ready, Window, exchanges_within

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from sapus_cli.drivers.bench.plan import Contender
    from sapus_cli.strategy import Vec

    Exchange: TypeAlias = Callable[[Vec], Vec]

WARM_UP, WARM_UP_S = 3, 0.1
"""Exchanges and seconds before a worker calls itself warm, at least."""


def begin(job: Job, name: str) -> None:
    """Set this process up: it ends with its parent, writes into a log, and computes on one thread."""
    process.be_a_child()
    parent = multiprocessing.parent_process()
    if parent is not None:
        process.end_with(parent.join)
    process.log_to(Path(job.folder) / f"{name}.log")
    process.settle(1)


def serve(parent: Connection, job: Job, contender: Contender) -> None:
    """Be the server of a contender."""
    begin(job, "server")
    state = pkgutil.resolve_name(contender.serve)(parent, job)
    parent.send(_extremes(state))


def work(parent: Connection, job: Job, contender: Contender, rank: int) -> None:
    """Be a worker of a contender."""
    begin(job, f"worker-{rank}")
    address = parent.recv()
    with pkgutil.resolve_name(contender.connect)(address, job, rank) as exchange:
        pulled = drive(parent, exchange, job, rank)
    # Without a server the state is the worker's own, and went on changing until all were done.
    parent.send(None if contender.serve else _extremes(pulled))


def drive(parent: Connection, exchange: Exchange, job: Job, rank: int) -> Vec:
    """Exchange without a pause from the warm-up until the window is over; returns what was pulled last.

    The exchange that lies across the end is followed by one more, so that nothing that counts has the machine for
    itself.
    """
    worker = _Worker(exchange, job, rank)
    exchange_s = worker.warm_up()
    # Before the parent hears of it: its window may begin before the system lets this process go on.
    completed = [time.monotonic()]
    parent.send(Ready(exchange_s))
    while not parent.poll():
        worker.exchange()
        completed.append(time.monotonic())
    window: Window = parent.recv()
    began = completed[-1]
    while began <= window.end:
        worker.exchange()
        began = completed[-1]
        completed.append(time.monotonic())
    last = worker.look_closely()
    parent.send(Done(exchanges_within(completed, window), worker.pushes, worker.torn, last))
    return worker.pulled


class _Worker:
    """Pushes one whole number in all elements, and looks at what it pulls: that must be the same in all elements."""

    pulled: Vec

    def __init__(self, exchange: Exchange, job: Job, rank: int) -> None:
        import torch  # noqa: PLC0415 - after the allocator has been told

        self._vector = torch.full((job.elements,), float(rank + 1))
        self._exchange = exchange
        self._turn = job.turn
        self._middle = job.elements // 2
        self.pushes = 0
        self.torn = 0

    def exchange(self) -> None:
        """Exchange, and compare three elements: a vector that changes while it is copied differs in its ends."""
        self.pulled = self._exchange(self._vector)
        self.pushes += 1
        if self.pushes % self._turn == 0:
            self._vector.neg_()
        pulled = self.pulled.numpy()
        if not pulled[0] == pulled[self._middle] == pulled[-1]:
            self.torn += 1

    def look_closely(self) -> Final:
        """Compare all elements of what was pulled last; returns the least and the greatest."""
        last = _extremes(self.pulled)
        if last.low != last.high:
            self.torn += 1
        return last

    def warm_up(self) -> float:
        """Exchange until warm; returns the median time of an exchange in seconds."""
        took: list[float] = []
        while len(took) < WARM_UP or sum(took) < WARM_UP_S:
            before = time.monotonic()
            self.exchange()
            took.append(time.monotonic() - before)
            self.look_closely()
        return statistics.median(took)


def _extremes(vector: Vec) -> Final:
    low, high = vector.aminmax()
    return Final(low.item(), high.item())
