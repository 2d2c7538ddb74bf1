"""The launcher: starts the processes of a run, watches them, writes what only it can know, and ends them all.

Children are forked from a fork server that has imported torch once, so that eight workers start in the time of one
import. A child that loses its pipe to the launcher ends itself: no process outlives the launcher, however it dies.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    Restart,
    Status,
    Unusable,
    hear,
    tell,
)
from sapus_cli.drivers.gpu import Gpus, Load
from sapus_cli.drivers.record import close_record, first_record, forget_end, resumed_record
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError
from sapus_cli.workloads import check_names, check_partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, ForkServerProcess
    from pathlib import Path

    from sapus_cli.config import RunConfig, Transport
    from sapus_cli.drivers.security import Security

POLL_S = 0.1
SAMPLE_EVERY_S = 0.5
HALT_S = 5.0
END_S = 5.0
HANGS_S = 60.0
"""A server that says nothing for so long, or for two worker timeouts, hangs; it says something ten times a second."""
MOST_AWAY_S = 1.0
LAST_CHECKPOINT_S = 60.0
"""So long a server may take from the final test to its last word."""
TERMINATE_S = 1.0
FIRST_PAUSE_S = 0.5
"""Before a process is started again the first time; twice as long before each further time."""
DOUBLINGS = 3
"""So often at most."""
LOG_LINES = 5
TRACE_OF = {"server": "pushes", "evaluator": "evals"}
"""The traces that a child process writes."""


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

    `endpoint` is where the server listens, `join` what starts a worker by hand; `steps_per_worker` is None if the
    budget is in seconds.
    """

    config: RunConfig
    folder: Path
    endpoint: str
    join: str
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


@dataclass(eq=False)
class _Child:
    role: str
    rank: int
    process: ForkServerProcess
    pipe: Connection
    watched: psutil.Process | None = None
    sample: tuple[float, float] | None = None
    silent: bool = False
    restarted: bool = False
    begun: bool = False
    ended_s: float | None = None

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
        security: keys without which nobody connects; None: anybody may.
        resume: folder of a run that is to go on from its newest checkpoint; `results` and `name` are not used then.
        invite: told where the server listens, before anything is written; returns what starts a worker by hand.
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
        security: Security | None = None,
        resume: Path | None = None,
        invite: Callable[[str], str] | None = None,
    ) -> None:
        self._config = config
        self._results = results
        self._name = name
        self._observe = observe
        self._endpoint = endpoint or loopback(config.transport)
        self._own_workers = own_workers
        self._security = security
        self._invite = invite or "sapus worker --connect {}".format
        self._resume = resume
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
        self._incomplete: set[tuple[str, int]] = set()
        self._killed: set[int] = set()
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._gone: dict[tuple[str, int], Gone] = {}
        self._absent: set[int] = set()
        self._silent: set[int] = set()
        self._here: set[int] = set()
        self._due: list[tuple[float, str, int]] = []
        self._last_failure = ""
        self._can_resume = own_workers
        self._server_silent_s = 0.0
        self._awake_s = time.monotonic()
        self._last_status: Status | None = None
        self._ended_s = math.inf

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
        if self._resume is None:
            traces.check_results(self._results)
        process.check_files(self._config.workers)
        self._strategy = strategy
        self._context = fork_server(self._config.threads)
        with process.signals_noted(self._signals), ExitStack() as self._stack:
            if self._resume is not None:
                self._stack.enter_context(traces.held(self._resume))
            self._stack.callback(self._end_children)
            return self._run()

    def _run(self) -> Outcome:
        self._ready = self._prepare()
        if self._resume is not None:
            self._check_data(traces.read_run(self._resume))
        bound = self._start_all()
        self._check_faults(bound.checkpoint_s)
        self._bound = bound.endpoint
        join = self._invite(self._bound)
        self._open_folder(bound)
        config, ready = self._config, self._ready
        steps = config.steps_per_worker(ready.n_train)
        self._observer = self._observe(
            Plan(config, self._folder, self._bound, join, ready.n_train, ready.elements, steps)
        )
        self._faults = sorted(
            (fault for fault in config.cluster.faults if fault.at_s >= bound.checkpoint_s), key=lambda fault: fault.at_s
        )
        with (
            self._trace("resources") as self._resources,
            self._trace("events") as self._events,
        ):
            if self._resume is not None:
                detail = f"from the checkpoint at {bound.checkpoint_s:.1f} s"
                self._note_event(Happened(bound.checkpoint_s, "resume", "launcher", 0, detail))
            for child in self._children:
                self._begin(child)
            try:
                self._watch()
            except BaseException as error:
                if isinstance(error, RunFailedError) and self._can_resume and self._released_s is not None:
                    error.next_step = f"Next: sapus run --resume {self._folder}"
                status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
                self._close_record(status, str(error) or type(error).__name__)
                raise
            finally:
                self._observer.close()
        self._close_record("finished", None)
        return Outcome(self._folder, self._record)

    def _trace(self, name: Literal["resources", "events"]) -> traces.Trace:
        warn = partial(self._note_trace, name, os.getpid(), "launcher")
        return traces.Trace(self._folder / f"{name}.csv", traces.TRACES[name], warn)

    def _open_folder(self, bound: Bound) -> None:
        """Make the run folder, or cut what stands in the one that is resumed back to its checkpoint."""
        record = first_record(self._config, self._strategy, self._ready, "real")
        record["transport"] = {"endpoint": self._bound, "curve": self._security is not None}
        record["own_workers"] = self._own_workers
        if self._resume is None:
            self._record = record
            self._folder = traces.create_run_folder(
                self._results, self._name, self._config.strategy, self._config.workers, self._config.seed
            )
            self._stack.enter_context(traces.held(self._folder))
        else:
            self._folder = self._resume
            self._record = resumed_record(traces.read_run(self._folder), record, bound.checkpoint_s)
            for name in ("evals", "resources", "events"):
                traces.cut_after(self._folder / f"{name}.csv", bound.checkpoint_s)
            evals = traces.read_trace(self._folder, "evals").drop("epoch", "worst_class")
            self._evals = [Measured(**row) for row in evals.iter_rows(named=True)]
        try:
            traces.write_run(self._folder, self._record)
        except RunFailedError:
            if self._resume is None:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reserve = traces.Reserve(self._folder)
        self._stack.callback(self._reserve.close)

    def _check_data(self, record: dict[str, Any]) -> None:
        before = (record.get("data") or {}).get("sha256")
        if before != self._ready.data_sha256:
            raise UserError(
                f"{self._resume}: the data set {self._config.dataset} is not what it was when this run began "
                f"(SHA-256 {self._ready.data_sha256}, was {before}); start a new run"
            )

    def _check_faults(self, checkpoint_s: float) -> None:
        """Refuse to resume a run of which the profile has killed a worker by then, and not started it again."""
        past = {
            fault.worker: fault
            for fault in sorted(self._config.cluster.faults, key=lambda fault: fault.at_s)
            if fault.at_s < checkpoint_s
        }
        for fault in past.values():
            if fault.kind == "kill":
                raise UserError(
                    f"{self._resume}: worker {fault.worker} is dead at the checkpoint, {checkpoint_s:.1f} s: --fault "
                    f"killed it at {fault.at_s:g} s; such a run cannot be resumed, start a new one"
                )

    def _prepare(self) -> Prepared:
        child = self._start("data", 0, children.prepare, self._config)
        line = self._first_line(child)
        if not isinstance(line, Prepared):
            raise RunFailedError(f"the data process said {line!r}")
        return line

    def _start_all(self) -> Bound:
        server = self._start_server(None if self._resume is None else Restart(str(self._resume)))
        if self._own_workers:
            for rank in range(self._config.workers):
                self._start_worker(rank)
        self._start_evaluator()
        line = self._first_line(server)
        if not isinstance(line, Bound):
            raise RunFailedError(f"the server said {line!r}")
        return line

    def _start_server(self, restart: Restart | None) -> _Child:
        keys = self._security and self._security.server
        asked = (self._config, self._strategy, self._ready, self._endpoint, keys, restart)
        return self._start("server", 0, children.serve, *asked)

    def _start_worker(self, rank: int) -> _Child:
        return self._start("worker", rank, children.work, self._config, self._strategy, self._ready, rank)

    def _start_evaluator(self) -> _Child:
        keys = self._security and self._security.evaluator
        return self._start("evaluator", 0, children.evaluate, self._config, self._ready, keys)

    def _start(self, role: str, rank: int, main: Callable[..., None], *args: object) -> _Child:
        ours, theirs = self._context.Pipe()
        started = self._context.Process(target=main, args=(theirs, *args), name=f"sapus-{role}-{rank}", daemon=True)
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
            self._look_for_silence()
            self._look_for_dead()
            alive = any(child.process.is_alive() for child in self._children)
            if self._ended is not None and (not alive or time.monotonic() > self._ended_s + END_S):
                self._note_missed_faults()
                return
            self._start_again()
            self._cause_faults()
            self._sample()

    def _hear_out(self, child: _Child) -> None:
        """Listen to all that a child has said."""
        while not child.silent and child.pipe.poll():
            self._listen(child)

    def _listen(self, child: _Child) -> None:
        try:
            line = hear(child.pipe)
        except (EOFError, OSError):
            child.silent = True
            return
        if child.role == "server":
            self._server_silent_s = 0.0
        match line:
            case Released():
                self._release(line)
            case Status():
                self._note_status(child, line)
            case Happened():
                self._hear_of(child, line)
            case Measured():
                self._evals.append(line)
                self._observer.measured(line)
            case Ended():
                self._ended = line
                self._ended_s = time.monotonic()
                self._end_late_comers()
            case Bound():
                self._begin(child)
                self._bring_back(set(range(self._config.workers)) - set(line.done))
            case Failed() | Unusable():
                self._fail(line)
            case _:
                raise RunFailedError(f"the {child.name} said {line!r}")

    def _release(self, line: Released) -> None:
        self._released_s = line.monotonic_s
        if self._resume is not None:
            forget_end(self._record)
            traces.write_run(self._folder, self._record, self._reserve)
        self._startup_s = time.monotonic() - self._called_s
        self._observer.released(self._startup_s)

    def _fail(self, line: Failed | Unusable) -> None:
        self._can_resume = self._can_resume and getattr(line, "resumable", True)
        raise RunFailedError(f"{line.reason}\n{self._last_failure}".strip())

    def _hear_of(self, child: _Child, event: Happened) -> None:
        if event.event in {"incomplete", "complete"}:
            self._note_trace(TRACE_OF[event.role], child.process.pid or 0, event.role, event.event, event.detail)
            return
        if event.event in {"join", "leave"}:
            self._absent.discard(event.rank)
        if event.event == "join":
            self._silent.discard(event.rank)
            self._here.add(event.rank)
        elif event.event == "leave":
            self._here.discard(event.rank)
        self._note_event(event)
        if event.event == "drop" and event.role == "worker":
            self._silent.add(event.rank)
        elif event.event == "drop":
            # A worker that hangs may come back as it is; nobody else can test states in the meantime.
            for hanging in [child for child in self._children if child.role == "evaluator"]:
                hanging.process.kill()

    def _begin(self, child: _Child) -> None:
        child.begun = True
        self._tell(child, Begin(str(self._folder), self._bound))
        if child.role == "server":
            for gone in self._gone.values():
                self._tell(child, gone)

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
            self._tell_server(Halt())
        server_gone = not any(child.role == "server" and child.begun and not child.silent for child in self._children)
        if self._ended is not None or server_gone or now > self._halt_by or len(self._signals) > 1:
            raise InterruptedRunError(f"interrupted by {self._signals[0]}")

    def _look_for_silence(self) -> None:
        """Kill a server that hangs, so that another takes its place. It is not blamed for time when we stood still."""
        now = time.monotonic()
        self._server_silent_s += min(now - self._awake_s, MOST_AWAY_S)
        self._awake_s = now
        limit_s = max(HANGS_S, 2 * self._config.recovery.worker_timeout_s)
        if self._released_s is None or self._is_ending() or self._server_silent_s < limit_s:
            return
        self._server_silent_s = 0.0
        for child in [child for child in self._children if child.role == "server"]:
            self._note_event(Happened(self._now(), "drop", "server", 0, f"silent for {limit_s:g} s"))
            child.process.kill()

    def _look_for_dead(self) -> None:
        """Let the run go on without those that have died, and see to it that they are started again.

        Raises:
            RunFailedError: it cannot go on.
        """
        dead = [child for child in self._children if child.process.exitcode not in {None, 0}]
        for child in dead:
            self._hear_out(child)
        if self._is_ending():
            return
        self._look_for_done()
        if self._is_ending():  # what was unread may have said so
            return
        for child in sorted(dead, key=lambda child: child.role != "server"):
            if child not in self._children:
                continue  # it has been put down meanwhile
            how = _how(child.process.exitcode)
            log = _last_lines(self._folder / "logs" / child.log)
            self._last_failure = failure = f"the {child.name} process {how}\n{log}".strip()
            why = "" if how.startswith("was killed") else log.rpartition("\n")[2].strip()[:200]
            self._note_event(Happened(self._now(), "crash", child.role, child.rank, f"{how}: {why}" if why else how))
            self._put_down(child)
            again = self._may_start_again(child)
            if not again and (child.role != "worker" or self._released_s is None or self._is_hopeless(child)):
                raise RunFailedError(failure)
            if again:
                key = (child.role, child.rank)
                self._due.append((time.monotonic() + pause_s(self._deaths[key]), *key))
                self._deaths[key] += 1
            self._tell_gone(Gone(child.role, child.rank, returns=again))

    def _is_ending(self) -> bool:
        return self._ended is not None or self._halt_by is not None

    def _look_for_done(self) -> None:
        """Start again who has come to its end without the server that runs now having heard of it.

        The last word of a worker is lost if the server dies or the connection breaks just then. The evaluator ends when
        it has tested the final state, and so does the server then, if it was told and has written its last checkpoint.
        """
        done = [child for child in self._children if child.process.exitcode == 0 and child.role != "server"]
        server = next((child for child in self._children if child.role == "server" and child.begun), None)
        if not done or server is None:
            return
        self._hear_out(server)  # that it has seen a worker may still be unread
        now = time.monotonic()
        for child in done:
            child.ended_s = child.ended_s or now
            if self._ended is None and self._is_unheard(child, now - child.ended_s):
                self._put_down(child)
                self._note_event(Happened(self._now(), "restart", child.role, child.rank, "it ended unheard"))
                if child.role == "worker" and child.rank in self._here:
                    self._tell_gone(Gone("worker", child.rank, returns=True))
                self._start_child_again(child.role, child.rank)

    def _is_unheard(self, child: _Child, seconds: float) -> bool:
        """Whether the server knows nothing of the end of a child, so many seconds ago."""
        if child.role == "worker":
            return child.rank in self._absent or (child.rank in self._here and seconds > END_S)
        return seconds > LAST_CHECKPOINT_S

    def _may_start_again(self, child: _Child) -> bool:
        """A server that ends by an error of its own would come to it again: it is started again only if it was killed.

        Before the first step it is not a fault of the moment either, and when no worker has got as far as a push.
        """
        if self._released_s is None or self._deaths[child.role, child.rank] >= self._config.recovery.max_restarts:
            return False
        return (child.process.exitcode or 0) < 0 or (child.role != "server" and not self._is_hopeless(child))

    def _is_hopeless(self, dead: _Child) -> bool:
        """Whether all workers have ended by errors of their own before anything came of them."""
        status = self._last_status
        pushed = status is not None and any(worker.pushes for worker in status.workers)
        living = any(child.role == "worker" and child.process.is_alive() for child in self._children)
        return (dead.process.exitcode or 0) > 0 and not pushed and not living

    def _start_again(self) -> None:
        """Start what has died and waited long enough."""
        if self._is_ending():
            return
        now = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, role, rank in due:
            self._note_event(Happened(self._now(), "restart", role, rank, self._how_often(role, rank)))
            if role == "server":
                self._restart_server()
            else:
                self._start_child_again(role, rank)

    def _how_often(self, role: str, rank: int) -> str:
        return f"attempt {self._deaths[role, rank]} of {self._config.recovery.max_restarts}"

    def _start_child_again(self, role: str, rank: int) -> None:
        self._gone.pop((role, rank), None)
        child = self._start_worker(rank) if role == "worker" else self._start_evaluator()
        child.restarted = True
        self._begin(child)

    def _restart_server(self) -> None:
        self._endpoint = self._bound
        self._start_server(Restart(str(self._folder), self._released_s, self._last_status))

    def _bring_back(self, ranks: set[int]) -> None:
        """See to it that a new server gets these workers: start those again that had ended or died meanwhile."""
        self._absent = ranks
        if not self._own_workers:
            return
        for rank in sorted(ranks - self._killed):
            child = next((c for c in self._children if c.role == "worker" and c.rank == rank), None)
            if child is not None and not child.process.is_alive():
                self._put_down(child)
                child = None
            if child is None and ("worker", rank) not in self._gone:
                self._start_child_again("worker", rank)

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
                self._start_child_again("worker", fault.worker)

    def _kill(self, rank: int) -> None:
        child = next((c for c in self._children if c.role == "worker" and c.rank == rank), None)
        if child is None or child.process.exitcode is not None:
            detail = "was to be killed, but was done already" if child else "was to be killed, but was dead already"
            self._note_event(Happened(self._now(), "fault", "worker", rank, detail))
            return
        self._put_down(child)
        self._killed.add(rank)
        self._note_event(Happened(self._now(), "fault", "worker", rank, "killed by the profile"))
        returns = any(fault.kind == "restart" and fault.worker == rank for fault in self._faults)
        self._tell_gone(Gone("worker", rank, returns=returns))

    def _tell_gone(self, gone: Gone) -> None:
        """Say who is missing, also to a server that takes the place of this one meanwhile."""
        if gone.role != "server":
            self._gone[gone.role, gone.rank] = gone
        self._tell_server(gone)

    def _tell_server(self, line: Line) -> None:
        for child in self._children:
            if child.role == "server" and child.begun:
                self._tell(child, line)

    def _end_late_comers(self) -> None:
        """End those that were started again and found nothing left to do, and the workers that hang."""
        for child in [
            child
            for child in self._children
            if child.restarted or (child.role == "worker" and child.rank in self._silent)
        ]:
            self._put_down(child)

    def _put_down(self, child: _Child) -> None:
        if child not in self._children:
            return
        child.process.kill()
        child.process.join()
        child.pipe.close()
        child.silent = True
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

    def _note_trace(self, name: str, pid: int, role: str, kind: str, detail: str) -> None:
        """The system does not take the rows of a trace, or takes them again. Those of a dead process are lost."""
        if kind == "incomplete":
            self._incomplete.add((name, pid))
        else:
            self._incomplete.discard((name, pid))
        self._note_event(Happened(self._now(), kind, role, 0, detail))

    def _note_status(self, child: _Child, status: Status) -> None:
        self._last_status = status
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
        self._resources.flush()
        self._events.flush()
        close_record(self._record, status, self._ended, self._evals, {name for name, _ in self._incomplete})
        traces.write_run(self._folder, self._record, self._reserve)


def pause_s(restarts: int) -> float:
    """Seconds to wait before a process is started again that has been so many times before."""
    return FIRST_PAUSE_S * 2.0 ** min(restarts, DOUBLINGS)


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
    return process.fork_server(["sapus_cli.drivers.preload", "sapus_cli.cli"])


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
