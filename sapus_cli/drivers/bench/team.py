"""Starts the processes of a measurement, measures, checks the result, and ends them all."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psutil

from sapus_cli.doctor import cgroup_limits
from sapus_cli.drivers.bench import entries
from sapus_cli.drivers.bench.plan import (
    FLOAT32_BYTES,
    Ceilings,
    Contender,
    Done,
    Final,
    Job,
    Ready,
    Room,
    Sample,
    Serving,
    Window,
    counted,
    pushed,
)
from sapus_cli.drivers.process import fork_server
from sapus_cli.errors import InterruptedRunError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, ForkServerProcess
    from types import FrameType

PRELOAD = [
    "sapus_cli.cli",  # the main module of the children
    *(f"sapus_cli.drivers.bench.{module}" for module in ("child", "bare", "full", "ceilings")),
]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 120.0
POLL_S = 0.2
TERMINATE_S = 2.0
LEAST_EXCHANGES = 4
"""The window is long enough for so many exchanges of every worker, whatever --seconds says."""

SETTLE_S = 0.05
MIB = 2**20
LOG_LINES = 5


def missing(contender: Contender) -> str | None:
    """One line if a contender cannot take part because it is not installed."""
    if not contender.needs or importlib.util.find_spec(contender.needs) is not None:
        return None
    return f"{contender.name} left out: {contender.needs} is not installed; python -m pip install '{contender.install}'"


def room() -> Room:
    """What this machine has left."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    n_bytes = psutil.virtual_memory().available
    free_bytes = cgroup_limits().free_bytes
    return Room(n_bytes if free_bytes is None else min(n_bytes, free_bytes), sys.maxsize if unlimited else files)


class Bench:
    """Measures one thing after the other; as a context, it sees to it that a signal ends everything.

    Raises from every measurement:
        RunFailedError: a process failed, or a result was wrong.
        InterruptedRunError: a signal arrived; all processes are gone.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._folder = Path(tempfile.mkdtemp(prefix="sapus-bench-"))
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = fork_server(PRELOAD, str(self._folder))
        self._teams = itertools.count()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        def interrupt(number: int, _frame: FrameType | None) -> None:
            for other in SIGNALS:  # to end takes seconds at most, and must not be cut short
                signal.signal(other, signal.SIG_IGN)
            raise InterruptedRunError(f"interrupted by {signal.Signals(number).name}")

        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def contender(self, contender: Contender, elements: int, workers: int, turn: int) -> Sample:
        """Measure one contender once and check its result."""
        who = f"{contender.name}, {elements:,} elements, {counted(workers)}"
        with self._team(who, elements, workers, contender.transport) as team:
            return _measured(team, contender, turn)

    def ceilings(self, elements: int, workers: int, turn: int) -> Ceilings:
        """Measure the ceilings once."""
        who = f"ceilings, {elements:,} elements, {counted(workers)}"
        with self._team(who, elements, workers) as team:
            (memory,) = team.hear([team.start("memory", "ceilings:memory")])
        with self._team(who, elements, workers) as team:
            receiver = team.start("receiver", "ceilings:receive")
            senders = [team.start(f"sender-{rank}", "ceilings:send", rank) for rank in range(workers)]
            (port,) = team.hear([receiver])
            tell(senders, port)
            (one_way,) = team.hear([receiver])
        return Ceilings(
            elements=elements,
            workers=workers,
            round=turn,
            copy_gb_per_s=memory[0],
            axpy_gb_per_s=memory[1],
            one_way_gb_per_s=one_way,
        )

    @contextmanager
    def _team(self, who: str, elements: int, workers: int, transport: str = "") -> Iterator[Team]:
        folder = self._folder / str(next(self._teams))
        folder.mkdir()
        team = Team(self._context, who, Job(elements, workers, self._seconds, str(folder), transport))
        try:
            yield team
        finally:
            with _signals_wait():
                team.end()
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A signal that arrives meanwhile takes effect afterwards: it must not leave a process behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Member:
    """A process of a team and the pipe to it."""

    def __init__(self, name: str, process: ForkServerProcess, pipe: Connection) -> None:
        self.name = name
        self.process = process
        self.pipe = pipe


def tell(members: Sequence[Member], message: object) -> None:
    """Send a message to each of these. That one is gone is found by who waits for its answer."""
    for member in members:
        with suppress(BrokenPipeError):
            member.pipe.send(message)


class Team:
    """The processes of one measurement.

    Args:
        context: where they are forked from.
        who: who is measured, for errors.
        job: the measurement.
    """

    def __init__(self, context: ForkServerContext, who: str, job: Job) -> None:
        self.job = job
        self._who = who
        self._context = context
        self._members: list[Member] = []

    def start(self, name: str, part: str, *args: object) -> Member:
        """Start a process that does `part`, a "module:function" of this package, as `part(pipe, job, *args)`."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=entries.call, args=(theirs, self.job, part, *args), name=f"sapus-{name}", daemon=True
        )
        member = Member(name, process, ours)
        with _signals_wait():
            process.start()
            self._members.append(member)
        theirs.close()
        return member

    def hear(self, members: Sequence[Member]) -> list[Any]:
        """What each of these says next, in their order.

        Raises:
            RunFailedError: a process of the team died, or says nothing for too long.
        """
        heard: dict[Member, Any] = {}
        deadline = time.monotonic() + PATIENCE_S + self.job.seconds
        while len(heard) < len(members):
            pipes: dict[Any, Member] = {member.pipe: member for member in members if member not in heard}
            for pipe in connection.wait(list(pipes), POLL_S):
                try:
                    heard[pipes[pipe]] = pipes[pipe].pipe.recv()
                except (EOFError, OSError):
                    pipes[pipe].process.join(TERMINATE_S)
                    self._look_for_dead()
                    raise self._failure(pipes[pipe], "said nothing") from None
            self._look_for_dead()
            if time.monotonic() > deadline:
                raise self._failure(next(iter(pipes.values())), f"has said nothing for {PATIENCE_S:g} s")
        return [heard[member] for member in members]

    def failure(self, reason: str) -> RunFailedError:
        """The error of a measurement whose numbers are void."""
        return RunFailedError(f"{self._who}: {reason}; nothing of this is to be trusted")

    def _look_for_dead(self) -> None:
        # The server first: that the others died may follow from it.
        for member in self._members:
            if member.process.exitcode not in {None, 0}:
                raise self._failure(member, f"ended with exit code {member.process.exitcode}")

    def _failure(self, member: Member, how: str) -> RunFailedError:
        try:
            log = (Path(self.job.folder) / f"{member.name}.log").read_text(errors="replace").splitlines()
        except OSError:
            log = []
        lines = "".join(f"\n  {line}" for line in log[-LOG_LINES:])
        return RunFailedError(f"{self._who}: the process {member.name} {how}{lines}")

    def end(self) -> None:
        """End every process, and what these have started."""
        family = [process for member in self._members for process in _descendants(member.process.pid)]
        for member in self._members:
            member.process.terminate()
        deadline = time.monotonic() + TERMINATE_S
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.pipe.close()
        _, left = psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=TERMINATE_S)


def _descendants(pid: int | None) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def _measured(team: Team, contender: Contender, turn: int) -> Sample:
    job = team.job
    server = team.start("server", "child:serve", contender) if contender.serve else None
    workers = [team.start(f"worker-{rank}", "child:work", contender, rank) for rank in range(job.workers)]
    serving: Serving | None = team.hear([server])[0] if server else None
    tell(workers, serving.address if serving else None)
    pid = (serving.pid or server.process.pid) if serving and server else None
    ready: list[Ready] = team.hear(workers)
    window = _window(ready, job.seconds)
    tell(workers, window)
    load = _load(pid, window)
    done: list[Done] = team.hear(workers)
    finals = _finals(team, server, workers)
    _check(team, done, finals)
    seconds = window.end - window.begin
    exchanges = sum(worker.exchanges for worker in done)
    gb_per_s = 1e-9 * 2 * FLOAT32_BYTES * job.elements * exchanges / seconds
    return Sample(
        contender=contender.name,
        elements=job.elements,
        workers=job.workers,
        round=turn,
        seconds=seconds,
        exchanges=exchanges,
        exchanges_per_s=exchanges / seconds,
        gb_per_s=gb_per_s,
        server_cpu_s_per_gb=None if load.cpu_per_s is None else load.cpu_per_s / gb_per_s,
        server_rss_mib=load.rss_mib,
        server_peak_rss_mib=load.peak_rss_mib,
    )


def _window(ready: list[Ready], seconds: float) -> Window:
    """From when everybody has made an exchange among all others, for `seconds` or for a few exchanges of everybody."""
    slowest_s = max(worker.exchange_s for worker in ready)
    begin = time.monotonic() + max(SETTLE_S, slowest_s)
    return Window(begin, begin + max(seconds, LEAST_EXCHANGES * slowest_s))


class _Load(NamedTuple):
    """What the server's process used over the window; None where nobody is the server."""

    cpu_per_s: float | None = None
    rss_mib: float | None = None
    peak_rss_mib: float | None = None


def _load(pid: int | None, window: Window) -> _Load:
    """Wait until the window is over, and see what a process uses meanwhile."""
    try:
        process = None if pid is None else psutil.Process(pid)
        _sleep_until(window.begin)
        begin, before_s = time.monotonic(), _cpu_s(process)
        _sleep_until(window.end)
        end, after_s = time.monotonic(), _cpu_s(process)
        if process is None:
            return _Load()
        rss_mib = process.memory_info().rss / MIB
        return _Load((after_s - before_s) / (end - begin), rss_mib, _peak_rss_mib(process.pid))
    except psutil.NoSuchProcess:
        return _Load()  # what it died of is told by whoever waits for it


def _sleep_until(instant: float) -> None:
    time.sleep(max(0.0, instant - time.monotonic()))


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_rss_mib(pid: int) -> float | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) / 1024 if peak else None


def _finals(team: Team, server: Member | None, workers: list[Member]) -> list[Final]:
    """End a measurement in good order; returns the final state, from everyone who has it."""
    if server is None:
        return team.hear(workers)
    tell([server], "measured")
    team.hear(workers)
    tell([server], "all have left")
    return team.hear([server])


def _check(team: Team, done: list[Done], finals: list[Final]) -> None:
    torn = sum(worker.torn for worker in done)
    if torn:
        raise team.failure(f"{torn} of the vectors pulled were torn: not all of their elements were the same")
    expected = sum(pushed(team.job, rank, worker.pushes) for rank, worker in enumerate(done))
    for low, high in finals:
        if not low == high == expected:
            raise team.failure(
                f"the final vector has elements from {low:g} to {high:g}, but all that was pushed adds up to {expected}"
            )
    # Whoever's push was added last got the sum of everything.
    if all(worker.last.low != expected for worker in done):
        last = ", ".join(f"{worker.last.low:g}" for worker in done)
        raise team.failure(f"the vectors pulled last were {last}, but all that was pushed adds up to {expected}")
