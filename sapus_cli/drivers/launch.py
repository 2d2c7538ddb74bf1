"""The launcher: starts the processes of a run, watches them, writes what only it can know, and ends them all.

Children are forked from a fork server that has imported torch once, so that eight workers start in the time of one
import. A child that loses its pipe to the launcher ends itself: no process outlives the launcher, however it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from sapus_cli import registry, traces
from sapus_cli.drivers import children, process
from sapus_cli.drivers.control import (
    Begin,
    Bound,
    Ended,
    Failed,
    Gone,
    Halt,
    Happened,
    Line,
    Measured,
    Prepared,
    Released,
    Status,
    Unusable,
    hear,
    tell,
)
from sapus_cli.drivers.gpu import Gpus, Load
from sapus_cli.drivers.record import close_record, first_record
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError
from sapus_cli.workloads import check_names, check_partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, ForkServerProcess
    from pathlib import Path

    from sapus_cli.config import RunConfig, Transport
    from sapus_cli.strategy import AnyStrategy

POLL_S = 0.1
SAMPLE_EVERY_S = 0.5
HALT_S = 5.0
END_S = 5.0
TERMINATE_S = 1.0
LOG_LINES = 5


class Observer(Protocol):
    """Who is told how a run goes, in the launcher's own thread."""

    def released(self, startup_s: float) -> None:
        """All workers train since now; `startup_s` seconds after the command was given."""

    def status(self, status: Status, cpu_percent: float) -> None:
        """The server's state, with its CPU use since the last one in percent of one core."""

    def measured(self, result: Measured) -> None:
        """The evaluator tested a snapshot."""

    def happened(self, event: Happened) -> None:
        """An event of events.csv."""

    def close(self) -> None:
        """The run is over, well or not."""


@dataclass
class Plan:
    """What the observer can know before the start.

    `endpoint` is where the server listens; `steps_per_worker` is None if the budget is in seconds.
    """

    config: RunConfig
    folder: Path
    endpoint: str
    n_train: int
    elements: int
    steps_per_worker: int | None


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        folder: the run folder.
        record: what stands in run.json.
    """

    folder: Path
    record: dict[str, Any]


@dataclass
class _Child:
    role: str
    rank: int
    process: ForkServerProcess
    pipe: Connection
    watched: psutil.Process | None = None
    sample: tuple[float, float] | None = None
    silent: bool = False
    restarted: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}" if self.role == "worker" else self.role

    @property
    def log(self) -> str:
        return f"{self.role}-{self.rank}.log" if self.role == "worker" else f"{self.role}.log"


class Launcher:
    """One run from the call to the last row.

    Args:
        config: what to run.
        results: folder that gets the run folder.
        name: name of the run folder, or None for the automatic one.
        observe: makes whoever is told how it goes, once the plan is known.
        endpoint: where the server listens; None: anywhere on this machine, as the transport has it.
        own_workers: start the workers here; otherwise wait for them to connect.
    """

    def __init__(
        self,
        config: RunConfig,
        results: Path,
        name: str | None,
        observe: Callable[[Plan], Observer],
        *,
        endpoint: str | None = None,
        own_workers: bool = True,
    ) -> None:
        self._config = config
        self._results = results
        self._name = name
        self._observe = observe
        self._endpoint = endpoint or loopback(config.transport)
        self._own_workers = own_workers
        self._called_s = process.created_s()
        self._released_s: float | None = None
        self._startup_s = 0.0
        self._ended: Ended | None = None
        self._evals: list[Measured] = []
        self._children: list[_Child] = []
        self._signals: list[str] = []
        self._halt_by: float | None = None
        self._next_sample_s = 0.0
        self._gpus = Gpus()
        self._killed: set[int] = set()

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            UserError: the call was wrong; nothing has been created.
            RunFailedError: a process died; the run folder says what it had come to.
            InterruptedRunError: a signal asked for the end; likewise.
        """
        check_names(self._config.dataset, self._config.model)
        check_partition(self._config.partition, self._config.dataset)
        if self._config.cluster.faults and not self._own_workers:
            raise UserError("--fault: workers that are started by hand cannot be killed from here; use sapus run")
        strategy = registry.build(self._config.strategy, self._config.params)
        traces.check_results(self._results)
        context = fork_server(self._config.threads)
        with process.signals_noted(self._signals):
            try:
                return self._run(context, strategy)
            finally:
                self._end_children()

    def _run(self, context: ForkServerContext, strategy: AnyStrategy) -> Outcome:
        ready = self._prepare(context)
        bound = self._start_children(context, strategy, ready)
        self._record = first_record(self._config, strategy, ready, "real") | {"transport": {"endpoint": bound}}
        self._folder = traces.create_run_folder(
            self._results, self._name, self._config.strategy, self._config.workers, self._config.seed
        )
        traces.write_run(self._folder, self._record)
        steps = self._config.steps_per_worker(ready.n_train)
        self._observer = self._observe(Plan(self._config, self._folder, bound, ready.n_train, ready.elements, steps))
        self._faults = sorted(self._config.cluster.faults, key=lambda fault: fault.at_s)

        def restart(rank: int) -> None:
            child = self._start(context, "worker", rank, children.work, self._config, strategy, ready, rank)
            child.restarted = True
            self._tell(child, Begin(str(self._folder), bound))

        self._restart = restart
        with (
            traces.Trace(self._folder / "resources.csv", traces.RESOURCES) as self._resources,
            traces.Trace(self._folder / "events.csv", traces.EVENTS) as self._events,
        ):
            for child in self._children:
                self._tell(child, Begin(str(self._folder), bound))
            try:
                self._watch()
            except BaseException as error:
                status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
                self._close_record(status, str(error) or type(error).__name__)
                raise
            finally:
                self._observer.close()
        self._close_record("finished", None)
        return Outcome(self._folder, self._record)

    def _prepare(self, context: ForkServerContext) -> Prepared:
        child = self._start(context, "data", 0, children.prepare, self._config)
        line = self._first_line(child)
        if not isinstance(line, Prepared):
            raise RunFailedError(f"the data process said {line!r}")
        return line

    def _start_children(self, context: ForkServerContext, strategy: AnyStrategy, ready: Prepared) -> str:
        server = self._start(context, "server", 0, children.serve, self._config, strategy, ready, self._endpoint)
        if self._own_workers:
            for rank in range(self._config.workers):
                self._start(context, "worker", rank, children.work, self._config, strategy, ready, rank)
        self._start(context, "evaluator", 0, children.evaluate, self._config, ready)
        line = self._first_line(server)
        if not isinstance(line, Bound):
            raise RunFailedError(f"the server said {line!r}")
        return line.endpoint

    def _start(
        self, context: ForkServerContext, role: str, rank: int, main: Callable[..., None], *args: object
    ) -> _Child:
        ours, theirs = context.Pipe()
        started = context.Process(target=main, args=(theirs, *args), name=f"sapus-{role}-{rank}", daemon=True)
        started.start()
        theirs.close()
        child = _Child(role, rank, started, ours)
        self._children.append(child)
        return child

    def _first_line(self, child: _Child) -> Line:
        """What a child says before the run folder exists.

        Raises:
            UserError: it found that the call was wrong.
        """
        while not child.pipe.poll(POLL_S):
            if self._signals:
                raise InterruptedRunError(f"{self._signals[0]} before the run began; nothing was written")
        try:
            line = hear(child.pipe)
        except EOFError:
            child.process.join()
            raise RunFailedError(f"the {child.name} process {_how(child.process.exitcode)} before the run") from None
        if isinstance(line, Unusable):
            raise UserError(line.reason)
        if child.role == "data":
            child.process.join()
            child.pipe.close()
            self._children.remove(child)
        return line

    def _watch(self) -> None:
        """Listen to the children until the server has said its last word and all have ended.

        Raises:
            RunFailedError: one of them died.
            InterruptedRunError: a signal arrived.
        """
        while True:
            pipes = {child.pipe: child for child in self._children if not child.silent}
            sentinels = [child.process.sentinel for child in self._children if child.process.is_alive()]
            for ready in connection.wait([*pipes, *sentinels], POLL_S):
                if child := pipes.get(ready):  # type: ignore[call-overload]
                    self._listen(child)
            self._look_for_signals()
            dead = [child for child in self._children if child.process.exitcode not in {None, 0}]
            if dead and self._halt_by is None:
                self._fail(min(dead, key=lambda child: child.role != "server"))
            if self._ended is not None and not any(child.process.is_alive() for child in self._children):
                self._note_missed_faults()
                return
            self._cause_faults()
            self._sample()

    def _listen(self, child: _Child) -> None:
        try:
            line = hear(child.pipe)
        except (EOFError, OSError):
            child.silent = True
            return
        match line:
            case Released():
                self._released_s = line.monotonic_s
                self._startup_s = line.monotonic_s - self._called_s
                self._observer.released(self._startup_s)
            case Status():
                self._note_status(child, line)
            case Happened():
                self._note_event(line)
            case Measured():
                self._evals.append(line)
                self._observer.measured(line)
            case Ended():
                self._ended = line
                self._end_late_comers()
            case Failed():
                raise RunFailedError(line.reason)
            case _:
                raise RunFailedError(f"the {child.name} said {line!r}")

    @staticmethod
    def _tell(child: _Child, line: Line) -> None:
        # A child that is gone is found by its exit code.
        with suppress(BrokenPipeError):
            tell(child.pipe, line)

    def _look_for_signals(self) -> None:
        if not self._signals:
            return
        if self._released_s is None:
            raise InterruptedRunError(f"interrupted by {self._signals[0]} before training began")
        now = time.monotonic()
        if self._halt_by is None:
            self._halt_by = now + HALT_S
            self._note_event(Happened(self._now(), "signal", "launcher", 0, self._signals[0]))
            for child in self._children:
                if child.role == "server":
                    self._tell(child, Halt())
        server_gone = any(child.role == "server" and child.silent for child in self._children)
        if self._ended is not None or server_gone or now > self._halt_by or len(self._signals) > 1:
            raise InterruptedRunError(f"interrupted by {self._signals[0]}")

    def _fail(self, child: _Child) -> None:
        how = _how(child.process.exitcode)
        self._note_event(Happened(self._now(), "crash", child.role, child.rank, how))
        raise RunFailedError(
            f"the {child.name} process {how}\n{_last_lines(self._folder / 'logs' / child.log)}".strip()
        )

    def _cause_faults(self) -> None:
        """Kill and restart workers as the profile says."""
        while self._released_s is not None and self._ended is None and self._faults:
            fault = self._faults[0]
            if fault.at_s > self._now():
                return
            self._faults.pop(0)
            if fault.kind == "kill":
                self._kill(fault.worker)
            elif fault.worker in self._killed:
                self._killed.discard(fault.worker)
                self._note_event(Happened(self._now(), "restart", "worker", fault.worker, "by the profile"))
                self._restart(fault.worker)

    def _kill(self, rank: int) -> None:
        (child,) = [child for child in self._children if child.role == "worker" and child.rank == rank]
        if child.process.exitcode == 0:
            self._note_event(Happened(self._now(), "fault", "worker", rank, "was to be killed, but was done already"))
            return
        self._put_down(child)
        self._killed.add(rank)
        self._note_event(Happened(self._now(), "fault", "worker", rank, "killed by the profile"))
        for other in self._children:
            if other.role == "server":
                self._tell(other, Gone(rank))

    def _end_late_comers(self) -> None:
        """End the workers that were started again and found nothing left to do."""
        for child in [child for child in self._children if child.restarted]:
            self._put_down(child)

    def _put_down(self, child: _Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        self._children.remove(child)

    def _note_missed_faults(self) -> None:
        for fault in self._faults:
            detail = f"{fault.kind} at {fault.at_s:g} s did not happen: the run ended first"
            self._note_event(Happened(self._now(), "fault", "worker", fault.worker, detail))

    def _now(self) -> float:
        return time.monotonic() - self._released_s if self._released_s is not None else 0.0

    def _note_event(self, event: Happened) -> None:
        self._events.row((event.t_s, event.event, event.role, event.rank, event.detail))
        self._observer.happened(event)

    def _note_status(self, child: _Child, status: Status) -> None:
        percent = self._cpu_percent(child, status.t_s, status.cpu_s)
        self._resources.row(
            (
                status.t_s,
                "server",
                0,
                status.cpu_s,
                percent,
                status.rss_bytes,
                status.rx_bytes,
                status.tx_bytes,
                None,
                None,
            )
        )
        self._observer.status(status, percent)

    def _sample(self) -> None:
        now = time.monotonic()
        self._resources.tick(now)
        self._events.tick(now)
        if self._released_s is None or now < self._next_sample_s:
            return
        self._next_sample_s = now + SAMPLE_EVERY_S
        loads = self._gpus.loads() if self._record["device"] == "cuda" else {}
        for child in self._children:
            if child.role != "server" and child.process.is_alive():
                self._sample_child(child, loads.get(child.process.pid or 0, Load()))

    def _sample_child(self, child: _Child, gpu: Load) -> None:
        try:
            if child.watched is None:
                child.watched = psutil.Process(child.process.pid)
            with child.watched.oneshot():
                times = child.watched.cpu_times()
                rss = child.watched.memory_info().rss
        except psutil.NoSuchProcess:
            return
        t_s, cpu_s = self._now(), times.user + times.system
        percent = self._cpu_percent(child, t_s, cpu_s)
        self._resources.row((t_s, child.role, child.rank, cpu_s, percent, rss, None, None, *gpu))

    @staticmethod
    def _cpu_percent(child: _Child, t_s: float, cpu_s: float) -> float:
        """CPU use since the last sample in percent of one core; 0 for the first sample."""
        before, child.sample = child.sample, (t_s, cpu_s)
        if before is None or t_s <= before[0]:
            return 0.0
        return 100 * (cpu_s - before[1]) / (t_s - before[0])

    def _end_children(self) -> None:
        """End every child: wait a little for those that are about to, then insist."""
        deadline = time.monotonic() + (END_S if self._ended is not None and not self._signals else 0)
        for child in self._children:
            child.process.join(max(0, deadline - time.monotonic()))
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + TERMINATE_S
        for child in self._children:
            child.process.join(max(0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.pipe.close()

    def _close_record(self, status: str, failure: str | None) -> None:
        self._record["startup_s"] = self._startup_s
        if failure:
            self._record["failure"] = failure
        close_record(self._record, status, self._ended, self._evals)
        traces.write_run(self._folder, self._record)


def loopback(transport: Transport) -> str:
    """An endpoint of this machine for a server to listen at, which leaves no file behind.

    Raises:
        UserError: this system has no such transport.
    """
    if transport == "tcp":
        return "tcp://127.0.0.1:*"
    if sys.platform != "linux":
        raise UserError(f"--transport {transport}: only on Linux; leave it out, which takes tcp")
    return f"ipc://@sapus-{secrets.token_hex(8)}"


def fork_server(threads: int) -> ForkServerContext:
    """The context that children are started from. Its server begins to import torch now, while the launcher goes on."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sapus_cli.drivers.preload", "sapus_cli.cli"])
    forkserver.ensure_running()
    return context


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])
