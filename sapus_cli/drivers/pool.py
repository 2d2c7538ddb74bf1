"""Runs in virtual time side by side: child processes that take one cell after the other, torch kept warm.

A child that loses its pipe to the parent ends itself. Ctrl-C reaches the parent alone: it asks the children to end with
SIGTERM, upon which a run closes its folder as interrupted. The parent never imports torch.
"""

from __future__ import annotations

import queue
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sapus_cli.drivers import process
from sapus_cli.drivers.launch import fork_server
from sapus_cli.drivers.record import close_for_the_dead
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, ForkServerProcess
    from types import FrameType

    from sapus_cli.config import RunConfig

POLL_S = 0.1
END_S = 5.0


class Cell(NamedTuple):
    """A run that is to be made: what, in which folder of results, and under which name (None: the usual one)."""

    config: RunConfig
    results: Path
    name: str | None = None


class Progress(NamedTuple):
    """How far a run is: virtual seconds, used part of the budget (0 to 1), and the newest accuracy, if there is one."""

    t_s: float
    fraction: float
    accuracy: float | None


class Result(NamedTuple):
    """How a cell ended.

    Attributes:
        folder: the run folder; None if it was not created.
        record: what stands in run.json, if the run finished.
        error: why it did not: a `UserError` if the call was wrong, a `RunFailedError` otherwise.
    """

    folder: Path | None
    record: dict[str, Any] | None = None
    error: UserError | RunFailedError | None = None


class Observer(Protocol):
    """Who is told how the cells go, in the parent's own thread. What it raises ends the pool."""

    def progress(self, number: int, cell: Cell, progress: Progress) -> None:
        """A cell that runs, a few times a second; `number` counts the cells from 0, in the order they were given."""

    def ended(self, number: int, cell: Cell, result: Result) -> None:
        """A cell has ended, well or not."""


@dataclass
class _Child:
    process: ForkServerProcess
    pipe: Connection
    number: int = 0
    cell: Cell | None = None
    folder: Path | None = None


class Pool:
    """So many child processes that run cells.

    Args:
        jobs: most cells that run at the same time.
        threads: torch threads of each process.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self._jobs = jobs
        self._threads = threads
        self._children: list[_Child] = []
        self._signals: list[str] = []

    def run(self, cells: Iterable[Cell], observer: Observer) -> None:
        """Run all cells. One that fails does not keep the others from running.

        Raises:
            InterruptedRunError: SIGINT, SIGTERM or SIGHUP arrived; the runs under way were closed as interrupted, and
                the observer has been told.
        """
        context = fork_server(self._threads)
        waiting = enumerate(cells)
        with process.signals_noted(self._signals):
            try:
                while self._assign(context, waiting):
                    self._listen(observer)
                    if self._signals:
                        self._interrupt(observer)
                        raise InterruptedRunError(f"interrupted by {self._signals[0]}")
            finally:
                self._end_children()

    def _assign(self, context: ForkServerContext, waiting: Iterator[tuple[int, Cell]]) -> bool:
        """Give every idle child a cell, and start children while there are cells for them. Returns whether any runs."""
        for number, cell in waiting if self._idle() else ():
            child = next((child for child in self._children if child.cell is None), None) or self._start(context)
            child.number, child.cell, child.folder = number, cell, None
            with suppress(BrokenPipeError):  # one that is gone is found by its silence
                child.pipe.send(cell)
            if not self._idle():
                break
        return any(child.cell is not None for child in self._children)

    def _idle(self) -> bool:
        return sum(child.cell is not None for child in self._children) < self._jobs

    def _start(self, context: ForkServerContext) -> _Child:
        ours, theirs = context.Pipe()
        # Not a daemon: a run on the real clock starts processes of its own.
        started = context.Process(target=work, args=(theirs, self._threads), name="sapus-pool", daemon=False)
        started.start()
        theirs.close()
        child = _Child(started, ours)
        self._children.append(child)
        return child

    def _listen(self, observer: Observer) -> None:
        pipes = {child.pipe: child for child in self._children}
        for ready in connection.wait(list(pipes), POLL_S):
            child = pipes[ready]  # type: ignore[index]
            try:
                news: Path | Progress | Result = child.pipe.recv()
            except (EOFError, ConnectionError):
                news = self._gone(child)
            if child.cell is None:
                continue
            if isinstance(news, Path):
                child.folder = news
            elif isinstance(news, Progress):
                observer.progress(child.number, child.cell, news)
            else:
                cell, child.cell = child.cell, None
                observer.ended(child.number, cell, news)

    def _gone(self, child: _Child) -> Result:
        child.process.join()
        child.pipe.close()
        self._children.remove(child)
        if self._signals:
            return Result(None, error=InterruptedRunError("interrupted"))
        code = child.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"the process of the run {how}"
        if child.folder is not None:
            close_for_the_dead(child.folder, reason)
        return Result(child.folder, error=RunFailedError(reason))

    def _interrupt(self, observer: Observer) -> None:
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + END_S
        while any(child.cell for child in self._children) and time.monotonic() < deadline and len(self._signals) == 1:
            self._listen(observer)

    def _end_children(self) -> None:
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + (END_S if len(self._signals) < 2 else 0)  # noqa: PLR2004 - Ctrl-C, and once more
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            child.process.kill()
            child.process.join()
            child.pipe.close()
        self._children.clear()


def work(pipe: Connection, threads: int) -> None:
    """Be a child of a pool: run cells until SIGTERM comes or the parent is gone."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    process.be_a_child()
    signal.signal(signal.SIGTERM, stop)
    cells: queue.SimpleQueue[Cell] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            cells.put(pipe.recv())

    process.end_with(listen)
    with suppress(KeyboardInterrupt):
        process.settle(threads)
        interrupted = False
        while not interrupted:
            result = _run(cells.get(), pipe)
            interrupted = isinstance(result.error, InterruptedRunError)
            pipe.send(result)


def _run(cell: Cell, pipe: Connection) -> Result:
    from sapus_cli.drivers.simulate import Simulation  # noqa: PLC0415 - imports torch

    # Should this process be killed, it is for the parent to say so in run.json.
    run = Simulation(cell.config, cell.results, cell.name, pipe.send, created=pipe.send)
    try:
        folder, record = run.run()
    except KeyboardInterrupt:
        return Result(run.folder, error=InterruptedRunError("interrupted"))
    except (UserError, RunFailedError) as error:
        return Result(run.folder, error=error)
    return Result(folder, record)
