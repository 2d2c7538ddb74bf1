"""What is measured, who takes part, what it needs, and the arithmetic behind the numbers. Nothing here needs torch."""

from __future__ import annotations

import bisect
import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

GIB = 2**30

FLOAT32_BYTES = 4
EXACT = 2**24
"""float32 holds every whole number up to here."""

MOST_WORKERS = 1000
PROCESS_BYTES = 100 * 2**20
"""Memory that a process takes for itself, roughly."""

FILES, FILES_A_WORKER = 64, 6
"""Open files of the parent and of the busiest child: for themselves, and for each worker."""


class Job(NamedTuple):
    """One measurement.

    Attributes:
        elements: d, the size of a vector.
        workers: W.
        seconds: least length of the timed window.
        folder: place for files of this measurement alone.
        transport: "tcp" or the like, for contenders that have several.
    """

    elements: int
    workers: int
    seconds: float
    folder: str
    transport: str

    @property
    def turn(self) -> int:
        """After so many pushes a worker changes the sign of what it pushes, so that all sums stay exact."""
        return max(1, EXACT // 2 // (self.workers * (self.workers + 1) // 2))


class Contender(NamedTuple):
    """Who does the work.

    Attributes:
        name: as in the table.
        serve: the server's part, as "module:function": `serve(parent, job)` returns the final state, shape `(d,)`.
            Empty: the workers do it among themselves.
        connect: a worker's part, as "module:function": `connect(address, job, rank)` is a context that gives
            `exchange(push)`, which returns what was pulled, shape `(d,)`.
        transport: goes into the job.
        needs: a module that must be installed.
        install: what to give to pip where it is not.
        vectors: how many vectors there can be in memory at once for each worker, in all processes.
        least_workers: with fewer it would exchange nothing.
    """

    name: str
    serve: str
    connect: str
    transport: str = ""
    needs: str = ""
    install: str = ""
    vectors: int = 4
    least_workers: int = 1


_HERE = "sapus_cli.drivers.bench"
_TRANSPORTS = ("tcp", "ipc", "shm") if sys.platform == "linux" else ("tcp",)
BASE = "zeromq tcp"
"""The contender that ratios are to."""

CONTENDERS = (
    *(Contender(f"zeromq {how}", f"{_HERE}.bare:serve", f"{_HERE}.bare:connect", how) for how in ("tcp", "ipc")),
    *(Contender(f"sapus {how}", f"{_HERE}.full:serve", f"{_HERE}.full:connect", how) for how in _TRANSPORTS),
)
PEERS = (
    Contender(
        "ray actor",
        f"{_HERE}.peers:serve_ray",
        f"{_HERE}.peers:connect_ray",
        needs="ray",
        install="ray>=2.40",
        vectors=8,
    ),
    Contender("torch rpc", f"{_HERE}.peers:serve_rpc", f"{_HERE}.peers:connect_rpc", needs="torch", vectors=8),
    Contender("gloo", "", f"{_HERE}.peers:connect_gloo", needs="torch", vectors=5, least_workers=2),
    Contender(
        "grpc",
        f"{_HERE}.peers:serve_grpc",
        f"{_HERE}.peers:connect_grpc",
        needs="grpc",
        install="grpcio>=1.60",
        vectors=8,
    ),
)


class Serving(NamedTuple):
    """The server is ready. `pid` is the process that does its work; None: the one that says this."""

    address: object
    pid: int | None = None


class Ready(NamedTuple):
    """A worker is warm and goes on exchanging. `exchange_s` is what an exchange took it, median."""

    exchange_s: float


class Window(NamedTuple):
    """What counts, from `begin` to `end`, on the clock of time.monotonic(), which is one for all processes."""

    begin: float
    end: float


class Final(NamedTuple):
    """Least and greatest element of a vector when all is over."""

    low: float
    high: float


class Done(NamedTuple):
    """A worker has been through the window.

    Attributes:
        exchanges: completed within it; one that lies across an edge counts by its part within.
        pushes: in all.
        torn: pulled vectors whose elements were not all the same.
        last: what was pulled last.
    """

    exchanges: float
    pushes: int
    torn: int
    last: Final


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one contender; what does not apply is None.

    Attributes:
        round: from 0.
        seconds: length of the window.
        exchanges: of all workers in it.
        gb_per_s: 8d bytes for each exchange, in 10^9 bytes.
        server_cpu_s_per_gb: user and system time of the server's process.
        server_rss_mib: its resident memory at the end of the window.
        server_peak_rss_mib: the most that it was.
    """

    contender: str
    elements: int
    workers: int
    round: int
    seconds: float
    exchanges: float
    exchanges_per_s: float
    gb_per_s: float
    server_cpu_s_per_gb: float | None = None
    server_rss_mib: float | None = None
    server_peak_rss_mib: float | None = None


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine can do at most, in 10^9 bytes a second of the vector that is copied, added or sent."""

    elements: int
    workers: int
    round: int
    copy_gb_per_s: float
    axpy_gb_per_s: float
    one_way_gb_per_s: float


def pushed(job: Job, rank: int, pushes: int) -> int:
    """What the pushes of a worker add up to, in every element.

    It pushes `rank + 1` for `job.turn` pushes, then minus that for as many, and so on: any push that is lost or applied
    twice shows in the sum, and no sum is ever beyond what float32 holds exactly.
    """
    place = pushes % (2 * job.turn)
    return (rank + 1) * min(place, 2 * job.turn - place)


def exchanges_within(completed: Sequence[float], window: Window) -> float:
    """How many exchanges lie within the window, given the instants when each one ended and the next began."""
    return _progress(completed, window.end) - _progress(completed, window.begin)


def _progress(completed: Sequence[float], now: float) -> float:
    after = bisect.bisect_right(completed, now)
    if after == 0 or after == len(completed):
        raise ValueError(f"the exchanges do not span {now}")
    before = completed[after - 1]
    return after - 1 + (now - before) / (completed[after] - before)


class Spread(NamedTuple):
    """Median and range over the rounds."""

    median: float
    low: float
    high: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a contender came to over all rounds; what does not apply is None.

    Attributes:
        to_base: its exchanges a second over those of `BASE` in the same round.
        of_floor: its GB/s over what went one way through the loopback device in the same round.
    """

    contender: str
    elements: int
    workers: int
    exchanges_per_s: Spread
    gb_per_s: Spread
    server_cpu_s_per_gb: Spread | None
    server_rss_mib: Spread | None
    server_peak_rss_mib: Spread | None
    to_base: Spread | None
    of_floor: Spread | None


class CeilingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ceilings over all rounds. `floor_s` is what an exchange takes at least: 8d bytes at the rate of one way."""

    elements: int
    workers: int
    copy_gb_per_s: Spread
    axpy_gb_per_s: Spread
    one_way_gb_per_s: Spread
    floor_s: Spread


def spread(values: Iterable[float]) -> Spread:
    """Median and range."""
    known = sorted(values)
    return Spread(statistics.median(known), known[0], known[-1])


def _known(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def rows(samples: Sequence[Sample], ceilings: Sequence[Ceilings]) -> list[Row]:
    """A row for each contender and pair of elements and workers, in the order in which they were measured first.

    Ratios are taken within each round, and then their median: what slows the machine for a while slows both.
    """
    base = {(s.elements, s.workers, s.round): s.exchanges_per_s for s in samples if s.contender == BASE}
    one_way = {(c.elements, c.workers, c.round): c.one_way_gb_per_s for c in ceilings}
    together: dict[tuple[int, int, str], list[Sample]] = {}
    for s in sorted(samples, key=lambda s: s.round):
        together.setdefault((s.elements, s.workers, s.contender), []).append(s)
    return [
        Row(
            contender=name,
            elements=elements,
            workers=workers,
            exchanges_per_s=spread(s.exchanges_per_s for s in group),
            gb_per_s=spread(s.gb_per_s for s in group),
            server_cpu_s_per_gb=_known(s.server_cpu_s_per_gb for s in group),
            server_rss_mib=_known(s.server_rss_mib for s in group),
            server_peak_rss_mib=_known(s.server_peak_rss_mib for s in group),
            to_base=_known(_over(s.exchanges_per_s, base.get((elements, workers, s.round))) for s in group),
            of_floor=_known(_over(s.gb_per_s, one_way.get((elements, workers, s.round))) for s in group),
        )
        for (elements, workers, name), group in together.items()
    ]


def _over(value: float, other: float | None) -> float | None:
    return value / other if other else None


def ceiling_rows(ceilings: Sequence[Ceilings]) -> list[CeilingRow]:
    """A row for each pair of elements and workers, in the order in which they were measured first."""
    together: dict[tuple[int, int], list[Ceilings]] = {}
    for c in ceilings:
        together.setdefault((c.elements, c.workers), []).append(c)
    return [
        CeilingRow(
            elements=elements,
            workers=workers,
            copy_gb_per_s=spread(c.copy_gb_per_s for c in group),
            axpy_gb_per_s=spread(c.axpy_gb_per_s for c in group),
            one_way_gb_per_s=spread(c.one_way_gb_per_s for c in group),
            floor_s=spread(1e-9 * 2 * FLOAT32_BYTES * elements / c.one_way_gb_per_s for c in group),
        )
        for (elements, workers), group in together.items()
    ]


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """The order of a round: it begins one further with each, so that nobody is always first."""
    turn %= len(names)
    return [*names[turn:], *names[:turn]]


def obstacle(elements: int, workers: int, contenders: Sequence[Contender], room: Room) -> str | None:
    """Why a pair cannot be measured, if it cannot: what is needed, and what there is."""
    need = files(workers)
    who = counted(workers)
    if need > room.files:
        return (
            f"{who} need about {need} open files, and the limit is {room.files}; "
            "raise it with ulimit -n, or give fewer --workers"
        )
    vectors = max(contender.vectors for contender in contenders)
    n_bytes = FLOAT32_BYTES * elements * (1 + vectors * workers) + PROCESS_BYTES * (1 + workers)
    if n_bytes > room.memory_bytes:
        return (
            f"{elements:,} elements with {who} need about {n_bytes / GIB:,.1f} GiB of memory, and "
            f"{room.memory_bytes / GIB:,.1f} GiB are available; give fewer --elements or --workers"
        )
    return None


class Room(NamedTuple):
    """What the machine has left: bytes of memory, and open files that a process may have."""

    memory_bytes: int
    files: int


def counted(workers: int) -> str:
    """1 worker, 2 workers."""
    return "1 worker" if workers == 1 else f"{workers} workers"


def files(workers: int) -> int:
    """Open files that a process needs at most, roughly."""
    return FILES + FILES_A_WORKER * workers
