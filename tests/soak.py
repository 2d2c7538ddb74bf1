"""Runs under random faults: a plan drawn from a seed, the real processes it is carried out on, and what must hold."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from processes import SAPUS
from test_membership import AT_ONCE, FAST, MIXING

import strategies
from sapus_cli import traces
from sapus_cli.checkpoint import read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S = 0.01
TIMEOUT_S = 1.0
CALM_S = 1.5
"""Training that is left when the last fault is over: time to come back for who has been let go."""
END_S = 60.0
"""A run that has not ended so long after its budget allowed it hangs."""
NULL = ["--dataset", "null", "--model", "null:16", "--step-time", f"{1000 * STEP_S:g}ms"]
OFTEN = {
    "cut worker": 24,
    "cut server": 8,
    "pause worker": 16,
    "pause server": 6,
    "pause evaluator": 3,
    "pause launcher": 3,
    "kill worker": 24,
    "kill server": 5,
    "kill evaluator": 5,
    "kill any": 6,
    "hang worker": 4,
    "hang server": 1,
}
"""How often each fault is drawn. Who hangs is stopped for longer than the worker timeout, who pauses for less."""
SHORT = {kind: n for kind, n in OFTEN.items() if not kind.startswith("hang")}
PIDFD_GETFD = 438


class Fault(NamedTuple):
    """What happens to a running run: `pause_s` after the one before, for `seconds` if it is one that ends."""

    pause_s: float
    kind: str
    rank: int
    seconds: float


class Case(NamedTuple):
    """A run and what happens to it."""

    name: str
    strategy: str
    workers: int
    options: list[str]
    faults: list[Fault]
    calm_s: float = CALM_S

    @property
    def steps(self) -> int:
        """A budget that lasts so much longer than the faults."""
        return math.ceil((self.calm_s + sum(fault.pause_s + fault.seconds for fault in self.faults)) / STEP_S)


def faults(rng: random.Random, n: int, workers: int, ends: int = 0, *, often: dict[str, int] = OFTEN) -> list[Fault]:
    """So many faults, of which the launcher's own end comes `ends` times."""
    often = {kind: weight for kind, weight in often.items() if can_cut() or not kind.startswith("cut")}
    kinds = rng.choices(list(often), list(often.values()), k=n - ends)
    for _ in range(ends):
        kinds.insert(rng.randrange(1, len(kinds) + 1), rng.choice(["kill launcher", "end launcher"]))
    return [_fault(rng, kind, workers) for kind in kinds]


def _fault(rng: random.Random, kind: str, workers: int) -> Fault:
    seconds = 0.0
    if kind.startswith("pause"):
        seconds = round(rng.uniform(0.05, 0.5), 2)
    elif kind.startswith("hang"):
        seconds = round(TIMEOUT_S * rng.uniform(1.3, 1.8), 2)
    return Fault(round(rng.uniform(0.05, 0.35), 2), kind, rng.randrange(workers), seconds)


def cases(seed: int, round_no: int, n_faults: int) -> list[Case]:
    """One run for each strategy, with so many faults; the same for the same numbers."""
    rng = random.Random(f"{seed}.{round_no}")  # noqa: S311 - it is to be the same every time
    drawn = []
    for place, strategy in enumerate(sorted(strategies.REGISTRY)):
        workers = rng.choice([3, 3, 4])
        options = ["--transport", rng.choice(["tcp", "tcp", "ipc", "shm"]), *NULL]
        if rng.random() < 0.2:
            options += ["--link", "100mbit,0.5ms"]
        for key, value in FAST.get(strategy, {}).items():
            options += ["-p", f"{key}={value}"]
        ends = int(place % 6 == round_no % 6)
        # Every other run meets its last faults while it ends. Who hangs then is not waited for.
        late = place % 2 == round_no % 2
        happens = faults(rng, n_faults, workers, ends, often=SHORT if late else OFTEN)
        calm_s = -1.0 if late else CALM_S
        drawn.append(Case(f"{strategy}-{round_no}", strategy, workers, options, happens, calm_s))
    return drawn


@dataclass
class Sample:
    """What a process takes at a moment: resident memory in bytes, descriptors, threads."""

    t_s: float
    pid: int
    rss_bytes: int
    files: int
    threads: int


@dataclass
class Soaked:
    """A run with its faults: what was done and what was seen."""

    case: Case
    folder: Path
    scratch: Path
    done: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    zombies: Counter[int] = field(default_factory=Counter)
    alive_s: float = 0.0


class HungError(AssertionError):
    """A run did not end, or a process of it outlived it."""


class Soak:
    """Carries out a case.

    Args:
        case: the run and its faults.
        cwd: an empty folder for it and its temporary files.
    """

    def __init__(self, case: Case, cwd: Path) -> None:
        self._cwd = cwd
        cwd.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="soak-"))  # not below cwd: it has to hold sockets
        self._log = cwd / "err"
        self.result = Soaked(case, cwd / "results" / case.name, self._scratch)
        self._case = case
        self._n_starts = 0
        self._begun, self._over = threading.Event(), threading.Event()

    def run(self) -> Soaked:
        """Start it, let all faults happen, wait for its end."""
        case = self._case
        begin = ["-s", case.strategy, "-w", str(case.workers), "--name", case.name, *case.options]
        if not {"--epochs", "--seconds"} & set(case.options):
            begin += ["--steps", str(case.steps)]
        timeout_s = TIMEOUT_S if case.calm_s > 0 else 4 * TIMEOUT_S
        begin += ["--worker-timeout", f"{timeout_s:g}", "--checkpoint-every", "0.5", "--max-restarts", "1000"]
        watch = threading.Thread(target=self._watch)
        watch.start()
        try:
            self._start(*begin)
            self._begun.set()
            for fault in case.faults:
                time.sleep(fault.pause_s)
                if self._launcher.poll() is not None:
                    self.result.missed[fault.kind] += 1
                else:
                    self._happen(fault)
            self._end(case.steps * STEP_S + END_S, {0})
        finally:
            self._over.set()
            left = self._members()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            watch.join()
            self._launcher.wait()
        if left:
            raise HungError(f"{case.name}: outlived its launcher: {left}")
        return self.result

    # Processes.

    def _start(self, *arguments: str) -> None:
        self._n_starts += 1
        self._started_s = time.monotonic()
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [*SAPUS, "run", *arguments],
                cwd=self._cwd,
                env=os.environ | {"TMPDIR": str(self._scratch)},
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        until_s = time.monotonic() + END_S
        while self._log.read_text().count("at their first step") < self._n_starts:
            if self._launcher.poll() is not None or time.monotonic() > until_s:
                raise HungError(f"{self._case.name}: did not begin:\n{self._log.read_text()}")
            time.sleep(0.05)

    def _end(self, seconds: float, codes: set[int]) -> None:
        try:
            code = self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            what = f"{self._case.name}: has not ended {seconds:.0f} s after the last fault"
            raise HungError(f"{what}\n{self._state()}") from None
        self.result.alive_s += time.monotonic() - self._started_s
        assert code in codes, f"{self._case.name}: exit code {code}\n{self._log.read_text()[-2000:]}"
        until_s = time.monotonic() + 10
        while self._members() and time.monotonic() < until_s:
            time.sleep(0.05)

    def _members(self) -> list[int]:
        """Every process of this run, by the folder of temporary files in its environment."""
        mine = f"TMPDIR={self._scratch}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mine in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def _children(self) -> list[int]:
        """The processes that were forked from the fork server."""
        return [child for server in children(self._launcher.pid) for child in children(server)]

    def _roles(self) -> dict[str, int]:
        """Process by the name of its log."""
        logs = f"{self.result.folder.resolve() / 'logs'}/"
        found = {}
        for pid in self._children():
            with suppress(OSError):
                path = str(Path(f"/proc/{pid}/fd/1").readlink())
                if path.startswith(logs):
                    found[path.removeprefix(logs).removesuffix(".log")] = pid
        return found

    def _watch(self) -> None:
        """Look at server and launcher now and then."""
        while not self._over.wait(0.2):
            for role, pid in [*self._roles().items(), ("launcher", self._launcher.pid)]:
                if role in {"server", "launcher"} and self._begun.is_set():
                    with suppress(OSError, IndexError):
                        self.result.samples[role].append(sample(pid))
            for pid in self._children():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                        self.result.zombies[pid] += 1

    def _state(self) -> str:
        """What can be said of a run that hangs."""
        logs = sorted((self.result.folder / "logs").glob("*"))
        tails = [f"--- {log.name}\n{log.read_text()[-600:]}" for log in logs]
        events = (self.result.folder / "events.csv").read_text()[-1500:]
        return "\n".join([str(self._roles()), *tails, events, self._log.read_text()[-500:]])

    # Faults.

    def _happen(self, fault: Fault) -> None:
        verb, _, whom = fault.kind.partition(" ")
        if whom == "launcher" and verb != "pause":
            self._replace(verb)
        else:
            pid = self._whom(whom, fault.rank)
            if pid is None or not self._harm(verb, pid, fault.seconds):
                self.result.missed[fault.kind] += 1
                return
        self.result.done[fault.kind] += 1

    def _whom(self, whom: str, rank: int) -> int | None:
        if whom == "launcher":
            return self._launcher.pid
        if whom == "any":
            pids = self._children()
            return pids[rank % len(pids)] if pids else None
        roles = self._roles()
        if whom == "worker":
            workers = [roles[name] for name in sorted(roles) if name.startswith("worker")]
            return workers[rank % len(workers)] if workers else None
        return roles.get(whom)

    @staticmethod
    def _harm(verb: str, pid: int, seconds: float) -> bool:
        """Do it; returns whether there was anything to do it to."""
        try:
            if verb == "kill":
                os.kill(pid, signal.SIGKILL)
            elif verb == "cut":
                return cut(pid) > 0
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return False
        return True

    def _replace(self, verb: str) -> None:
        """End the launcher, and go on in its folder."""
        self._launcher.send_signal(signal.SIGKILL if verb == "kill" else signal.SIGTERM)
        self._end(END_S, {0, 130, -signal.SIGKILL})
        if left := self._members():
            raise HungError(f"{self._case.name}: {len(left)} processes outlived their launcher after {verb}")
        if traces.read_run(self.result.folder)["status"] != "finished":
            self._start("--resume", str(self.result.folder))


def children(pid: int) -> list[int]:
    """Processes that this one has started and that are not gone."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def sample(pid: int) -> Sample:
    """What a process takes now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    n_files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only the number is wanted
    n_threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    return Sample(time.monotonic(), pid, pages * os.sysconf("SC_PAGE_SIZE"), n_files, n_threads)


def cut(pid: int) -> int:
    """Shut down the connections of another process, TCP or ipc; returns how many.

    A socket is fetched from there by its descriptor. Pipes of multiprocessing are pairs without a name and stay.
    """
    n_cut = 0
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        for entry in _entries(pid):
            file = _fetched(handle, entry)
            if file >= 0:
                with socket.socket(fileno=file) as connection, suppress(OSError):
                    named = connection.getsockname() or connection.getpeername()
                    if named and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
                        n_cut += 1
    finally:
        os.close(handle)
    return n_cut


def can_cut() -> bool:
    """Whether this system lets descriptors of other processes be fetched; some containers do not."""
    if not hasattr(os, "pidfd_open"):
        return False
    handle = os.pidfd_open(os.getpid())
    file = _fetched(handle, handle)
    os.close(handle)
    if file >= 0:
        os.close(file)
    return file >= 0


def _fetched(handle: int, file: int) -> int:
    return int(ctypes.CDLL(None).syscall(PIDFD_GETFD, handle, file, 0))


def _entries(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith("socket:"):
                    yield int(entry.name)


# What must hold.


def check(soaked: Soaked) -> None:
    """Everything that can be told from what a run has left."""
    case, folder = soaked.case, soaked.folder
    record = traces.read_run(folder)
    assert record["status"] == "finished", record.get("failure")
    assert record["traces"] == "complete"
    frames = {name: traces.read_trace(folder, name) for name in traces.TRACES}
    crashes = frames["events"].filter(kind="crash")["detail"].to_list()
    assert set(crashes) <= {"was killed by SIGKILL"}, f"a process ended by an error of its own: {crashes}"
    pushes, totals = frames["pushes"], record["totals"]
    assert len(pushes) == totals["pushes"] == totals["version"]
    assert pushes["n_steps"].sum() == totals["steps"], "steps"
    by_steps = "--seconds" not in case.options
    for worker in totals["workers"]:
        rows = pushes.filter(pl.col("worker") == worker["rank"]).sort("seq")
        assert rows["seq"].to_list() == list(range(1, len(rows) + 1)), f"worker {worker['rank']}"
        assert rows["t_s"].is_sorted(), f"worker {worker['rank']}"
        assert rows["n_steps"].sum() == worker["steps"]
        if by_steps:
            assert worker["steps"] == record["steps_per_worker"], f"worker {worker['rank']}"
    assert frames["evals"]["t_s"].is_sorted(), "evals.csv"
    assert totals["end_s"] < soaked.alive_s, "the time of the run goes faster than the clock"
    assert frames["evals"]["version"][-1] == totals["version"], "the final state was not tested"
    for log in (folder / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.name
    assert not list(soaked.scratch.iterdir()), "temporary files are left"
    soaked.scratch.rmdir()
    assert not list(folder.glob("**/*.tmp"))
    assert all(n < 15 for n in soaked.zombies.values()), f"a zombie stayed for 3 s: {soaked.zombies}"
    if case.strategy not in MIXING and "null" in case.options:
        check_state(case, folder, pushes)


def check_state(case: Case, folder: Path, pushes: pl.DataFrame) -> None:
    """The state is the sum of weight * update over the rows, each step having added 1 to its first element.

    The sum is exact up to the rounding of float32, half a unit in the last place for each addition. That has to be
    less than what nearly each of the pushes brings, or one could be missing.
    """
    scale = 0.7 if case.strategy == "diloco" else 1.0
    if case.strategy in AT_ONCE:  # who left before its reply
        alone: pl.Expr = pl.lit(1 / case.workers)
    else:  # a round has one version, from its first push to its last
        alone = scale / pl.len().over("version")
    rows = pushes.with_columns(pl.col("weight").fill_null(alone))
    brought = rows["weight"] * rows["n_steps"]
    x = read_state(folder / "checkpoint")
    room = 0.6 * float(np.spacing(brought.cum_sum().to_numpy().astype(np.float32)).sum())
    least = float(np.quantile(brought.to_numpy(), 0.05))
    assert room < 0.9 * least, f"the run is too long to tell that a push is missing: room for {room}, {least} each"
    difference = float(x[0]) - float(brought.sum())
    assert abs(difference) <= room, f"the state is {difference:+.4f} off, of {float(x[0]):.2f}; room for {room:.5f}"
    assert not x[1:].any()


def growth(samples: list[Sample]) -> tuple[int, int, int]:
    """By how much the last third is above the first: most descriptors, most threads, bytes of memory in the middle."""
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    files = max(each.files for each in last) - max(each.files for each in first)
    threads = max(each.threads for each in last) - max(each.threads for each in first)
    return files, threads, int(np.median([each.rss_bytes for each in last]) - np.median([s.rss_bytes for s in first]))


def summary(done: list[Soaked]) -> dict[str, Any]:
    """Figures for the reader."""
    totals: Counter[str] = sum((each.done for each in done), Counter())
    missed: Counter[str] = sum((each.missed for each in done), Counter())
    files = [one.files for each in done for one in each.samples["server"]]
    rss = [one.rss_bytes for each in done for one in each.samples["server"]]
    return {
        "runs": len(done),
        "faults": sum(totals.values()),
        "by kind": dict(totals.most_common()),
        "nothing to do it to": dict(missed.most_common()),
        "server's most descriptors": max(files, default=0),
        "server's most MiB": max(rss, default=0) >> 20,
    }
