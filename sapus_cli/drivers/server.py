"""The server process: receives pushes, applies them through the strategy, answers; measures what crosses its socket."""

from __future__ import annotations

import hashlib
import logging
import math
import select
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch
import zmq

from sapus_cli.checkpoint import Checkpoints, UnsavableError
from sapus_cli.cluster import Direction, ServerTime
from sapus_cli.codec import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Alive,
    Beat,
    Declined,
    Dropped,
    Evaluated,
    FromClient,
    FromServer,
    Hello,
    Leave,
    Pull,
    Push,
    Raw,
    Refused,
    Snapshot,
    State,
    Stop,
    Welcome,
    check_payload,
    decode_from_client,
    encode,
    payload_bytes,
    raw,
)
from sapus_cli.config import Recovery
from sapus_cli.drivers.attendance import Attendance
from sapus_cli.drivers.control import (
    Ended,
    Gone,
    Halt,
    Happened,
    Measured,
    Released,
    Restart,
    Status,
    WorkerStatus,
    WorkerTotals,
    hear,
    tell,
)
from sapus_cli.drivers.delay import Arrivals, DelayLine, Line
from sapus_cli.drivers.security import CURVE_BYTES, secure_server
from sapus_cli.drivers.transport import COPY_BYTES, Segment, prefer_reno
from sapus_cli.errors import RemoteProtocolError, RunFailedError, UserError
from sapus_cli.protocol import Outgoing, PushRow, ServerCore
from sapus_cli.strategy import STANDARD_INFO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from sapus_cli.cluster import ClusterProfile, Wire
    from sapus_cli.drivers.security import ServerKeys
    from sapus_cli.strategy import AnyStrategy, Setting, Vec
    from sapus_cli.traces import Trace

STATUS_EVERY_S = 0.1
CPU_EVERY_S = 0.005
HALT_S = 3.0
BEATS = 4
"""So many beats go into the time after which a worker counts as silent."""
MOST_BEAT_S = 1.0
AWAY_S = 1.0
"""A server that did nothing for longer was itself kept from listening: nobody is blamed for that time."""
RETURN_S = 60.0
"""So long a server that has been started again waits for the workers that it had."""
BACKLOG = 4096
"""Connections that wait to be accepted; with libzmq's 100 a worker among many strangers waits for seconds."""
MOST_FRAMES = 3
MOST_HELD = 4
"""Messages of one worker that an emulated link holds; one that keeps to the protocol has no more on their way."""
WARNING_CHARACTERS = 300
QUEUE = 16
"""Messages of one client that wait to be received, or sent: more than any that keeps to the protocol has."""
LAG_S, LAG_STEPS = 0.01, 0.2
"""An emulated server stays so many seconds behind, but no more than this part of a step: what a busy machine brings
late still finds its place, and workers make up for it in the time that they would sleep."""

REMEMBERED = frozenset(
    {
        "core",
        "cpu_s",
        "done",
        "evaluator_bytes",
        "fingerprint",
        "lost_pushes",
        "overruns",
        "pushes",
        "pushes_csv_bytes",
        "reached_s",
        "strategy",
        "t_s",
        "traffic",
        "version",
        "x",
    }
)
"""What a checkpoint of a server says, by name."""

log = logging.getLogger(__name__)


class Complaints:
    """Warnings in the log, one a second at most: what comes from outside must not fill a disk."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._kept_back = 0

    def warn(self, text: str) -> None:
        """Log a warning in one line of printable characters, or count it if the last one was less than a second ago."""
        now = time.monotonic()
        if now < self._next_s:
            self._kept_back += 1
            return
        self._next_s = now + 1
        others = f" (and {self._kept_back} more warnings since the last one)" if self._kept_back else ""
        self._kept_back = 0
        log.warning("%s%s", text[:WARNING_CHARACTERS].encode("unicode_escape").decode(), others)


@dataclass(slots=True)
class Traffic:
    """Bytes of messages, header and payload, and their frames.

    A vector in shared memory counts its bytes as if it crossed the socket, but is no frame.
    """

    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_frames: int = 0
    tx_frames: int = 0


@dataclass(slots=True)
class Peer:
    """A client of the server and what is known of it.

    `incarnation` is a number that only it has; `heard_s` is when it was heard last, on the monotonic clock.
    `dtype` is what its vectors are made of, `segment` the memory that it shares with the server, if it does; `held` is
    how many of its messages an emulated link has; `answered` is over which connection the last reply went, and to which
    push.
    """

    identity: bytes
    role: str
    rank: int
    incarnation: int
    heard_s: float
    dtype: torch.dtype = torch.float32
    segment: Segment | None = None
    traffic: Traffic = field(default_factory=Traffic)
    held: int = 0
    interval: int = 0
    loss: float = float("nan")
    left: bool = False
    reconnected_s: float = 0.0
    answered: tuple[bytes, int] | None = None


def bind(endpoint: str, elements: int, security: ServerKeys | None = None) -> tuple[zmq.Socket[bytes], str]:
    """A listening ROUTER socket and the endpoint it really got (port 0 lets the system choose).

    With keys, nobody's messages get in but those of clients that the keys admit.

    Raises:
        UserError: the endpoint cannot be bound.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.setsockopt(zmq.SNDHWM, QUEUE)
    socket.setsockopt(zmq.RCVHWM, QUEUE)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    # What CURVE adds to a frame counts, too.
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, torch.float32.itemsize * elements) + CURVE_BYTES)
    if security is not None:
        secure_server(socket, security)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        remedy = "choose another port, or leave it out"
        if error.errno == zmq.EADDRNOTAVAIL:
            remedy = "give an address of this machine"
        raise UserError(f"cannot listen at {endpoint}: {error}; {remedy}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Server:
    """Drives a `ServerCore` over a ROUTER socket, in one thread.

    A push is received without a copy and, unless the wire is narrow, added as it lies in the message or in the memory
    shared with its worker. A reply is copied once, when it is handed to the socket or written into shared memory, or
    before, for all workers that get the same; that makes it a consistent snapshot. Under a profile with a link, a
    message of a worker is held as it came until the link would have delivered it, and so is a reply, which is copied
    before.

    Args:
        socket: from `bind`.
        strategy: the run's strategy.
        x0: initial global state, shape `(d,)`.
        n_workers: workers to wait for.
        profile: the cluster to emulate.
        setting: what the strategy may know of where it runs.
        fingerprint: layout that every worker's model must have.
        config: the run's configuration, JSON, for workers started by hand.
        wire: what the elements of a worker's vectors are on their way.
        shared: a worker's vectors go through memory shared with it, not through the socket; they count as if they did.
        launcher: pipe to the launcher.
        pushes: pushes.csv.
        target_accuracy: accuracy at which the run ends, or None.
        recovery: when to let workers go, and how often to write a checkpoint.
        checkpoints: where those go; None: none are written.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        strategy: AnyStrategy,
        x0: Vec,
        *,
        n_workers: int,
        profile: ClusterProfile,
        setting: Setting,
        fingerprint: str,
        config: bytes,
        wire: Wire = "float32",
        shared: bool = False,
        launcher: Connection,
        pushes: Trace,
        target_accuracy: float | None,
        recovery: Recovery | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.core = ServerCore(strategy, x0, n_workers, setting)
        self._socket = socket
        self._strategy = strategy
        self._elements = x0.numel()
        self._wire = wire
        self._dtype: torch.dtype = getattr(torch, wire)
        self._shared = shared
        self._n_workers = n_workers
        self._profile = profile
        self._up = Arrivals(Direction(profile.link, profile.wire_scale))
        self._down = Direction(profile.link, profile.wire_scale)
        self._thread = ServerTime()
        self._line = DelayLine()
        self._raw = Raw()
        self._lag_s = min(LAG_S, LAG_STEPS * (profile.step_s or 0.0))
        self._due: float | None = None
        self._overruns = 0
        self._recovery = recovery or Recovery()
        self._checkpoints = checkpoints
        self._next_checkpoint_s = 0.0
        self._attendance = Attendance(n_workers, self._recovery.min_workers, self._recovery.worker_timeout_s)
        self._stopped = False
        self._fingerprint = fingerprint
        self._config = config
        self._launcher = launcher
        self._trace = pushes
        self._info_names = (*STANDARD_INFO, *strategy.columns)
        self._target_accuracy = target_accuracy
        self._peers: dict[bytes, Peer] = {}
        self._workers: dict[int, Peer] = {}
        self._incarnations: dict[int, Peer] = {}
        self._traffic = {rank: Traffic() for rank in range(n_workers)}
        self._pushes: Counter[int] = Counter()
        self._complaints = Complaints()
        self._awake_s = time.monotonic()
        self._cpu_before_s = 0.0
        self._evaluator_bytes_before = 0
        self._lost_pushes = 0
        self._resumed_s = 0.0
        self._released = 0.0
        self._cpu_read_s = 0.0
        self._next_cpu_s = 0.0
        self._end_s: float | None = None
        self._end_cpu_s = 0.0
        self._reached_s: float | None = None
        self._over = False
        self._halt_by: float | None = None
        self._next_status = 0.0
        self._process = psutil.Process()
        self._last_rss_bytes = 0

    @property
    def now(self) -> float:
        """Seconds since all workers were released; 0 before. For what was held up, when it was due."""
        if self._due is not None:
            return self._due
        return time.monotonic() - self._released if self._released else self._resumed_s

    def save(self) -> None:
        """Write a checkpoint, if there is a place for it. That it cannot be written does not end the run."""
        if self._checkpoints is None:
            self._next_checkpoint_s = math.inf
            return
        begun_s = time.monotonic()
        said = f"version {self.core.version}"
        pause_s = self._recovery.checkpoint_every_s
        try:
            self._trace.flush()
            try:
                self._checkpoints.save(self._remembered())
            except UnsavableError as error:
                pause_s = math.inf
                said = f"without the strategy's state: {error}"
                self._checkpoints.save(state_only(self.core, self.now))
        except OSError as error:
            said = f"failed: {error.strerror}"
        self._tell_event("checkpoint", 0, said, "server")
        # However long it took, half of the time is for the run.
        self._next_checkpoint_s = max(begun_s + pause_s, 2 * time.monotonic() - begun_s)

    def _remembered(self) -> dict[str, object]:
        return {
            "strategy": repr(self._strategy),
            "fingerprint": self._fingerprint,
            "x": self.core.state.x,
            "core": self.core.saved(),
            "t_s": self.now,
            "version": self.core.version,
            "traffic": self._traffic,
            "pushes": dict(self._pushes),
            "done": sorted(self._attendance.done),
            "evaluator_bytes": self._evaluator_bytes(),
            "reached_s": self._reached_s,
            "overruns": self._overruns,
            "lost_pushes": self._lost_pushes,
            "cpu_s": self._cpu_now_s() if self._released else self._cpu_before_s,
            "pushes_csv_bytes": self._trace.size,
        }

    def restore(self, remembered: dict[str, Any], restart: Restart) -> None:
        """Go on from a checkpoint in the place of a server that has died, or of a whole run."""
        resumed = restart.released_s is None
        self._resumed_s = remembered["t_s"]
        if restart.released_s is not None:
            self._released = restart.released_s
        rows = self.core.restore(remembered["core"], self.now, started=not resumed)
        self._traffic, self._pushes = remembered["traffic"], Counter(remembered["pushes"])
        self._evaluator_bytes_before, self._overruns = remembered["evaluator_bytes"], remembered["overruns"]
        self._lost_pushes = remembered["lost_pushes"]
        self._attendance.done = set(remembered["done"])
        self._reached_s = remembered["reached_s"]
        self._stopped = self._reached_s is not None
        self._cpu_before_s = remembered["cpu_s"]
        lost = self._take_from_the_dead(restart.status) if restart.status else 0
        until_s = math.inf if resumed else time.monotonic() + RETURN_S
        for rank in set(range(self._n_workers)) - self._attendance.done:
            self._attendance.expect(rank, until_s)
        self._next_checkpoint_s = time.monotonic() + self._recovery.checkpoint_every_s
        for row in rows:
            self._write(row, 0)
        if not resumed:
            saved = f"from version {self.core.version}, saved at {remembered['t_s']:.1f} s"
            self._tell_event("resume", 0, f"{saved}; {lost} later pushes are lost", "server")
        self._end_if_all_left()

    def _take_from_the_dead(self, status: Status) -> int:
        """Count what the server before this one had cost until it died; returns how many of its pushes are lost."""
        self._cpu_before_s = status.cpu_s
        self._evaluator_bytes_before = status.evaluator_bytes
        for worker in status.workers:
            self._traffic[worker.rank] = Traffic(worker.rx_bytes, worker.tx_bytes, worker.rx_frames, worker.tx_frames)
        lost = max(0, sum(worker.pushes for worker in status.workers) - self._pushes.total())
        self._lost_pushes += lost
        return lost

    @torch.no_grad()
    def run(self) -> Ended:
        """Serve until all workers have left and the final state has been evaluated, or the launcher halts the run.

        Raises:
            EOFError: the launcher is gone.
        """
        while not self._over:
            launcher_spoke = self._wait()
            self._drain()  # first, so that what a dead worker had sent is here before the news of its death
            if launcher_spoke:
                self._hear()
            self._deliver()
            self._tick()
        return self._ended()

    def _wait(self) -> bool:
        """Wait for a message, the launcher, or what is due next; returns whether the launcher spoke.

        The socket's descriptor tells of a change only, so that its state has to be asked for first. The timeout of
        zmq's own poller is in whole milliseconds, too coarse for a link.
        """
        due = min(self._up.next_due, self._line.next_due)
        timeout = min(STATUS_EVERY_S, max(0.0, due + self._lag_s - self.now))
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            timeout = 0.0
        launcher = self._launcher.fileno()
        ready, _, _ = select.select([self._socket.fileno(), launcher], [], [], timeout)
        return launcher in ready

    def _hear(self) -> None:
        line = hear(self._launcher)
        if isinstance(line, Halt):
            self._halt()
        elif isinstance(line, Gone) and line.role == "worker":
            self._bury(line.rank, returns=line.returns)
        elif isinstance(line, Gone):
            for peer in [peer for peer in self._peers.values() if peer.role == line.role]:
                self._forget(peer)

    def _deliver(self) -> None:
        """Take what the link has delivered by now, less the lag."""
        lines: list[Line] = [self._up, self._line]
        while (source := min(lines, key=lambda line: line.next_due)).next_due <= self.now - self._lag_s:
            self._due, call = source.take()
            call()
            self._due = None

    def _drain(self) -> None:
        for _ in range(2 * self._n_workers):
            try:
                frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            more = frames[0].more
            while more:
                frame = self._socket.recv(copy=False)
                more = frame.more
                if len(frames) <= MOST_FRAMES:
                    frames.append(frame)
            if len(frames) > 1:
                self._receive(frames)

    def _receive(self, frames: Sequence[zmq.Frame]) -> None:
        identity = frames[0].bytes
        peer = self._peers.get(identity)
        header, payload = frames[1], frames[2:]
        vector_bytes = self._vector_bytes(peer)
        try:
            message = decode_from_client(header.buffer)
            if peer is None and not isinstance(message, Hello | Beat):
                self._send(identity, Dropped())  # whatever size its vector has, or where that lies
                return
            check_payload(message, 0 if peer and peer.segment else vector_bytes, [len(frame) for frame in payload])
        except RemoteProtocolError as error:
            self._refuse(identity, peer, error)
            return
        if isinstance(message, Beat):
            self._beat(identity, message)
            return
        n_bytes = len(header) + payload_bytes(message, vector_bytes)
        if peer is not None:
            # Nothing is to be heard any more of who says that it leaves, however long a link holds that up.
            peer.heard_s = math.inf if isinstance(message, Leave) else time.monotonic()
            peer.traffic.rx_bytes += self._profile.scaled(n_bytes)
            peer.traffic.rx_frames += 1 + len(payload)
        if self._shapes(peer):
            take = partial(self._take, identity, peer, message, payload, n_bytes)
            # What a busy machine brings late was sent when its worker says.
            sent_s = min(self.now, message.sent_s or self.now) if isinstance(message, Push) else self.now
            self._hold(peer, sent_s, n_bytes, take)
        else:
            self._take(identity, peer, message, payload, n_bytes)

    def _beat(self, identity: bytes, beat: Beat) -> None:
        """Note that a client lives, and answer. Beats are not counted as traffic."""
        peer = self._incarnations.get(beat.incarnation)
        if peer is None or (beat.main and peer.identity != identity):
            self._send(identity, Dropped())
            return
        peer.heard_s = time.monotonic()
        self._pass_on(identity, encode(Alive()), None)

    def _vector_bytes(self, peer: Peer | None) -> int:
        """Size of a vector on its way from or to a client."""
        return self._elements * (torch.float32 if peer is None else peer.dtype).itemsize

    def _shapes(self, peer: Peer | None) -> bool:
        """Whether the link holds up what this client sends and gets: a worker does, and only in training."""
        return self._profile.shapes and self._released > 0 and peer is not None and peer.role == "worker"

    def _hold(self, peer: Peer | None, sent_s: float, n_bytes: int, take: Callable[[], None]) -> None:
        """Keep a message until the link has delivered it."""
        if peer is None or peer.held >= MOST_HELD:
            self._complaints.warn("left out a message of a worker that sends more than the protocol has room for")
            return
        peer.held += 1

        def arrive() -> None:
            peer.held -= 1
            self._arrived(n_bytes, take)

        self._up.put(sent_s, n_bytes, arrive)

    def _arrived(self, n_bytes: int, take: Callable[[], None]) -> None:
        done = self._thread.done_at(self.now, self._unreal_s(n_bytes))
        if done > self.now:
            self._line.put(done, take)
        else:
            take()

    def _unreal_s(self, n_bytes: int) -> float:
        """Seconds that the bytes of a message would cost which `wire_scale` adds to it."""
        return self._profile.server.byte_s * (self._profile.scaled(n_bytes) - n_bytes)

    def _take(
        self, identity: bytes, peer: Peer | None, message: FromClient, payload: Sequence[zmq.Frame], n_bytes: int
    ) -> None:
        if peer is not None and peer.left and not isinstance(message, Leave):
            self._send(identity, Dropped())
            return
        try:
            self._handle(identity, peer, message, payload, n_bytes)
        except RemoteProtocolError as error:
            self._refuse(identity, peer, error)

    def _refuse(self, identity: bytes, peer: Peer | None, error: RemoteProtocolError) -> None:
        who = f"{peer.role} {peer.rank}" if peer else "a stranger"
        self._complaints.warn(f"refused a message of {who}: {error}")
        self._send(identity, Refused(reason=str(error)[:1000]))

    def _handle(
        self, identity: bytes, peer: Peer | None, message: FromClient, payload: Sequence[zmq.Frame], n_bytes: int
    ) -> None:
        if peer is None and isinstance(message, Hello):
            self._greet(identity, message, n_bytes)
        elif peer is None:
            self._send(identity, Dropped())
        elif isinstance(message, Push) and peer.role == "worker":
            self._push(peer, message, payload, n_bytes)
        elif isinstance(message, Pull) and peer.role == "worker":
            self._pull(peer, message)
        elif isinstance(message, Leave) and peer.role == "worker" and not peer.left:
            self._leave(peer, message)
        elif isinstance(message, Snapshot) and peer.role == "evaluator":
            self._send(identity, self.core.snapshot(self.now, final=self._end_s is not None), self.core.state.x)
        elif isinstance(message, Evaluated) and peer.role == "evaluator":
            self._evaluated(message)
        else:
            raise RemoteProtocolError(
                f"a {type(message).__name__.lower()} is out of place from {peer.role} {peer.rank}"
            )

    def _greet(self, identity: bytes, hello: Hello, n_bytes: int) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {hello.protocol}, but this server speaks {PROTOCOL_VERSION}: "
                "install the same sapus on both sides"
            )
        known = self._incarnations.get(hello.incarnation)
        if known is not None and known.role == hello.role:
            self._greet_again(known, identity)
            return
        while not self._has_place(hello) and self._launcher.poll():
            self._hear()  # that somebody is dead, whose place this one is to take
        rank = self._rank(hello) if hello.role == "worker" else 0
        if not self._has_place(hello):
            raise RemoteProtocolError("the evaluator is here already")
        peer = Peer(identity, hello.role, rank, hello.incarnation, time.monotonic())
        if hello.role == "worker":
            peer.dtype = self._dtype
            peer.segment = self._segment() if self._shared else None
            peer.traffic = self._traffic[rank]
            if before := self._workers.get(rank):
                self._forget(before)
            self._workers[rank] = peer
        self._peers[identity] = self._incarnations[peer.incarnation] = peer
        peer.traffic.rx_bytes += self._profile.scaled(n_bytes)
        peer.traffic.rx_frames += 1
        self._welcome(peer)
        prefer_reno(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _greet_again(self, peer: Peer, identity: bytes) -> None:
        """Go on over a new connection with a client that has lost its old one."""
        del self._peers[peer.identity]
        peer.identity = identity
        peer.heard_s = time.monotonic()
        self._peers[identity] = peer
        self._welcome(peer, resumed=peer.role == "worker" and self.core.has(peer.rank))
        if time.monotonic() - peer.reconnected_s > 1:
            peer.reconnected_s = time.monotonic()
            self._tell_event("reconnect", peer.rank, role=peer.role)
        if self._stopped:
            self._send(identity, Stop(flush=self._halt_by is None))

    def _free_ranks(self) -> list[int]:
        """Ranks that nobody has: a worker has its own from its hello on, though it is missed until it pulls."""
        return [
            r
            for r in range(self._n_workers)
            if r not in self._workers or (self._workers[r].left and self._attendance.is_missing(r))
        ]

    def _has_place(self, hello: Hello) -> bool:
        if hello.role == "evaluator":
            return not any(peer.role == "evaluator" for peer in self._peers.values())
        free = self._free_ranks()
        return hello.rank in free or (hello.rank < 0 and bool(free))

    def _rank(self, hello: Hello) -> int:
        """The rank of a new worker."""
        free = self._free_ranks()
        if not free:
            raise RemoteProtocolError(f"all {self._n_workers} workers are here already")
        rank = free[0] if hello.rank < 0 else hello.rank
        if rank not in free:
            raise RemoteProtocolError(f"rank {rank} is taken, or not below {self._n_workers}")
        return rank

    def _welcome(self, peer: Peer, *, resumed: bool = False) -> None:
        is_worker = peer.role == "worker"
        progress = self.core.progress(peer.rank)
        self._send(
            peer.identity,
            Welcome(
                protocol=PROTOCOL_VERSION,
                rank=peer.rank,
                elements=self._elements,
                fingerprint=self._fingerprint,
                beat_s=min(MOST_BEAT_S, self._recovery.worker_timeout_s / BEATS),
                resumed=resumed,
                config=self._config,
                steps=progress.steps if is_worker else 0,
                seq=progress.seq if is_worker else 0,
                wire=self._wire if is_worker else "float32",
                segment=peer.segment.path if peer.segment and not resumed else "",
            ),
        )

    def _forget(self, peer: Peer) -> None:
        """Have nothing more to do with a client; what it still says is answered with Dropped."""
        if peer.role == "evaluator" and peer.identity in self._peers:
            self._evaluator_bytes_before += peer.traffic.rx_bytes + peer.traffic.tx_bytes
        self._peers.pop(peer.identity, None)
        self._incarnations.pop(peer.incarnation, None)
        if peer.segment is not None:
            peer.segment.close()

    def _segment(self) -> Segment:
        try:
            return Segment.create(self._elements, self._dtype)
        except OSError as error:
            raise RemoteProtocolError(f"the server has no memory to share: {error}; use --transport tcp") from error

    def _pull(self, peer: Peer, message: Pull) -> None:
        if message.fingerprint != self._fingerprint:
            if not self.core.has(peer.rank):
                self._forget(peer)
                del self._workers[peer.rank]
            raise RemoteProtocolError(
                "your model has another layout than the server's: use the same options and versions"
            )
        if self._end_s is not None:
            self._tell_event("leave", peer.rank, "came after the end")
            self._send(peer.identity, Stop(flush=False))
            return
        rejoins = self.core.has(peer.rank)
        replies = self.core.join(peer.rank, self.now)
        if rejoins and self._is_answered(peer, self.core.progress(peer.rank).seq):
            return
        self._attendance.arrive(peer.rank)
        if peer.segment is not None:
            peer.segment.close()
        first = self.core.started and not self._released
        if first:
            self._release()
        self._answer(replies)
        if rejoins:
            return
        steps = self.core.progress(peer.rank).steps
        self._tell_event("join", peer.rank, f"goes on after {steps} steps" if steps else "")
        if self._stopped:
            self._send(peer.identity, Stop(flush=True))
        if first:
            tell(self._launcher, Released(self._released))

    @staticmethod
    def _is_answered(peer: Peer, seq: int) -> bool:
        """Whether what a worker sends again, having connected again, had its reply on this connection meanwhile."""
        return peer.answered == (peer.identity, seq)

    def _release(self) -> None:
        self.save()
        self._released = time.monotonic() - self._resumed_s
        self._cpu_before_s -= time.process_time()  # what setting up took counts for nothing

    def _push(self, peer: Peer, message: Push, payload: Sequence[zmq.Frame], n_bytes: int) -> None:
        if self._is_answered(peer, message.seq):
            return
        vector = peer.segment.push if peer.segment else torch.frombuffer(payload[0].buffer, dtype=peer.dtype)
        declined, received = self.core.declined, self.core.received
        replies = self.core.push(
            peer.rank,
            message,
            vector,
            self.now,
            self._profile.scaled(n_bytes),
            self._cpu_s(),
        )
        if self.core.declined > declined:
            self._tell_event("declined", peer.rank, f"push {message.seq} is not finite")
            if not any(isinstance(reply.message, Declined) for reply in replies):
                self._tell_event("fresh", peer.rank, "told to pull afresh")
        elif self.core.received > received:
            self._pushes[peer.rank] += 1
            peer.interval = message.n_steps
            peer.loss = message.loss
        self._answer(replies)

    def _cpu_s(self) -> float:
        """CPU seconds used since the release, read now and then: reading costs as much as adding a small vector."""
        now = time.monotonic()
        if now >= self._next_cpu_s:
            self._next_cpu_s = now + CPU_EVERY_S
            self._cpu_read_s = self._cpu_now_s()
        return self._cpu_read_s

    def _cpu_now_s(self) -> float:
        """CPU seconds that the run has cost the server since the release, a server that this one replaces included."""
        return self._cpu_before_s + time.process_time()

    def _leave(self, peer: Peer, message: Leave) -> None:
        self._overruns += message.overruns
        if message.reason == "done":
            self._attendance.done.add(peer.rank)
        self._let_go(peer, message.reason)

    def _bury(self, rank: int, *, returns: bool) -> None:
        """Go on without a worker that is dead. What it had sent and the link still holds is lost with it."""
        if returns:
            self._attendance.expect(rank)
        else:
            self._attendance.lose(rank)
        peer = self._workers.get(rank)
        if peer is not None and not peer.left:
            self._let_go(peer, "dead")
        else:
            self._end_if_all_left()

    def _let_go(self, peer: Peer, reason: str) -> None:
        peer.left = True
        self._incarnations.pop(peer.incarnation, None)
        if self.core.has(peer.rank):
            replies, row = self.core.leave(peer.rank, self.now)
            if row is not None:
                self._write(row, 0)
            self._answer(replies)
            self._tell_event("leave", peer.rank, reason)
        self._end_if_all_left()

    def _look_for_silence(self, now: float) -> None:
        """Let go who has not been heard of for too long, and end the run as failed if too few are left."""
        limit_s = self._recovery.worker_timeout_s
        for peer in [peer for peer in self._workers.values() if not peer.left and now - peer.heard_s > limit_s]:
            self._attendance.lose(peer.rank)
            self._tell_event("drop", peer.rank, f"silent for {limit_s:g} s")
            self._let_go(peer, "silent")
        evaluators = [peer for peer in self._peers.values() if peer.role == "evaluator"]
        for peer in [peer for peer in evaluators if now - peer.heard_s > limit_s]:
            self._forget(peer)
            self._tell_event("drop", 0, f"silent for {limit_s:g} s", "evaluator")
        for rank in self._attendance.overdue(now):
            self._tell_event("drop", rank, f"has not come back within {RETURN_S:g} s")
            self._bury(rank, returns=False)
        trains = self.core.started and not self._stopped and self._end_s is None
        if trains and self._attendance.fails(now):
            raise RunFailedError(
                f"{len(self._attendance.lost)} of {self._n_workers} workers are lost, so that fewer than --min-workers "
                f"{self._recovery.min_workers} are left"
            )

    def _end_if_all_left(self) -> None:
        nobody_comes = self._stopped or (not self._attendance.expects and self._attendance.enough)
        all_left = self.core.started and all(worker.left for worker in self._workers.values())
        if all_left and nobody_comes and self._end_s is None:
            self._end()

    def _evaluated(self, message: Evaluated) -> None:
        tell(self._launcher, Measured(message.t_s, message.version, message.samples, message.loss, message.accuracy))
        self._over = self._over or message.final
        target = self._target_accuracy
        if target is not None and message.accuracy >= target and self._reached_s is None:
            self._reached_s = message.t_s
            self._stop(flush=True)

    def _halt(self) -> None:
        self._halt_by = time.monotonic() + HALT_S
        self._stop(flush=False)

    def _stop(self, *, flush: bool) -> None:
        self._stopped = True
        for peer in self._peers.values():
            if not peer.left and (peer.role == "worker" or not flush):
                self._send(peer.identity, Stop(flush=flush))
        self._end_if_all_left()

    def _end(self) -> None:
        self._mark_end()
        self._over = self._halt_by is not None
        for peer in self._peers.values():
            if peer.role == "evaluator":
                self._send(peer.identity, Stop(flush=True))

    def _mark_end(self) -> None:
        if self._end_s is None:
            self._end_s = self.now
            self._end_cpu_s = self._cpu_now_s()

    def _answer(self, replies: Sequence[Outgoing]) -> None:
        snapshot = self._snapshot(replies)
        for reply in replies:
            peer = self._workers[reply.worker]
            peer.answered = (peer.identity, self.core.progress(peer.rank).seq)
            sent = self._reply(peer, reply.message, reply.vector, snapshot)
            if reply.row is not None:
                self._write(reply.row, sent)

    def _snapshot(self, replies: Sequence[Outgoing]) -> Vec | None:
        """A copy of what goes to many at once, so that the socket need not copy it for each of them; else None."""
        small = self._elements * self._dtype.itemsize < COPY_BYTES
        copied_by_each = (small or self._shared) and not self._profile.shapes
        vector = replies[0].vector if len(replies) > 1 and not copied_by_each else None
        if vector is None or any(reply.vector is not vector for reply in replies):
            return None
        return vector.to(self._dtype, copy=True)

    def _reply(self, peer: Peer, message: State | Declined, vector: Vec | None, snapshot: Vec | None) -> int:
        """Answer a worker, over the link; returns what it counts as there. A snapshot of the vector will not change."""
        if not self._shapes(peer):
            return self._send(peer.identity, message, vector, snapshot)
        n_bytes = len(encode(message)) + (0 if vector is None else self._vector_bytes(peer))
        handed_over = self._thread.done_at(self.now, self._unreal_s(n_bytes))
        due = self._down.deliver_at(handed_over, n_bytes)
        if isinstance(message, State):
            message = msgspec.structs.replace(message, link_s=due - self.now)
        if vector is not None and snapshot is None:
            snapshot = vector.to(peer.dtype, copy=True)
        self._line.put(due, partial(self._pass_on, peer.identity, encode(message), snapshot))
        return self._count_sent(peer, n_bytes, vector)

    def _send(
        self, identity: bytes, message: FromServer, vector: Vec | None = None, snapshot: Vec | None = None
    ) -> int:
        """Send a message, `vector` as it is now; returns what it counts as on the link."""
        header = encode(message)
        peer = self._peers.get(identity)
        if not self._pass_on(identity, header, vector if snapshot is None else snapshot, copy=snapshot is None):
            return 0
        return self._count_sent(peer, len(header) + (0 if vector is None else self._vector_bytes(peer)), vector)

    def _pass_on(self, identity: bytes, header: bytes, vector: Vec | None, *, copy: bool = False) -> bool:
        """Hand a message to the socket; returns whether its client is there. What is not copied must not change."""
        peer = self._peers.get(identity)
        if vector is not None and peer is not None:
            if peer.segment is not None:
                peer.segment.state.copy_(vector)
                vector = None
            elif peer.dtype != vector.dtype:
                vector, copy = vector.to(peer.dtype), False
        try:
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
            if vector is None:
                self._socket.send(header)
            else:
                self._socket.send(header, zmq.SNDMORE)
                frame = self._raw.of(vector) if vector is self.core.state.x else raw(vector)
                self._socket.send(frame, 0, copy=copy or frame.nbytes < COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            self._complaints.warn("a client is gone or does not listen, it misses a message")
            return False
        return True

    def _count_sent(self, peer: Peer | None, n_bytes: int, vector: Vec | None) -> int:
        scaled = self._profile.scaled(n_bytes)
        if peer is not None:
            peer.traffic.tx_bytes += scaled
            peer.traffic.tx_frames += 1 if vector is None or peer.segment else 2
        return scaled

    def _write(self, row: PushRow, bytes_out: int) -> None:
        self._trace.row(push_values(row, bytes_out, self._info_names))

    def _tick(self) -> None:
        now = time.monotonic()
        if self._halt_by is not None and now > self._halt_by:
            self._over = True
        if now - self._awake_s > AWAY_S:
            for peer in self._peers.values():
                peer.heard_s += now - self._awake_s
        self._awake_s = now
        if now < self._next_status:
            return
        self._next_status = now + STATUS_EVERY_S
        self._trace.tick(now)
        self._look_for_silence(now)
        if self._released:
            tell(self._launcher, self._status())
            if now >= self._next_checkpoint_s:
                self.save()

    def _status(self) -> Status:
        return Status(
            t_s=self.now,
            version=self.core.version,
            samples=self.core.samples,
            cpu_s=self._cpu_now_s(),
            rss_bytes=self._rss_bytes(),
            rx_bytes=sum(traffic.rx_bytes for traffic in self._traffic.values()),
            tx_bytes=sum(traffic.tx_bytes for traffic in self._traffic.values()),
            evaluator_bytes=self._evaluator_bytes(),
            workers=[self._worker_status(rank) for rank in range(self._n_workers)],
        )

    def _worker_status(self, rank: int) -> WorkerStatus:
        peer, traffic = self._workers.get(rank), self._traffic[rank]
        return WorkerStatus(
            rank=rank,
            steps=self.core.progress(rank).steps,
            pushes=self._pushes[rank],
            interval=peer.interval if peer else 0,
            loss=peer.loss if peer else math.nan,
            rx_bytes=traffic.rx_bytes,
            tx_bytes=traffic.tx_bytes,
            rx_frames=traffic.rx_frames,
            tx_frames=traffic.tx_frames,
            waiting=rank in self.core.waiting,
            away=peer is None or peer.left,
        )

    def _evaluator_bytes(self) -> int:
        """Bytes of the snapshots in the whole run, both ways."""
        here = (peer.traffic for peer in self._peers.values() if peer.role == "evaluator")
        return self._evaluator_bytes_before + sum(traffic.rx_bytes + traffic.tx_bytes for traffic in here)

    def _rss_bytes(self) -> int:
        """Resident memory; what it was last if that cannot be read, as when strangers hold all descriptors."""
        with suppress(OSError):
            self._last_rss_bytes = self._process.memory_info().rss
        return self._last_rss_bytes

    def _tell_event(self, event: str, rank: int, detail: str = "", role: str = "worker") -> None:
        tell(self._launcher, Happened(self.now, event, role, rank, detail))

    def _ended(self) -> Ended:
        self._mark_end()
        self._trace.flush()
        tell(self._launcher, self._status())
        workers = self._traffic.values()
        return Ended(
            end_s=self._end_s or 0.0,
            version=self.core.version,
            samples=self.core.samples,
            steps=self.core.steps,
            pushes=self.core.received,
            rx_bytes=sum(traffic.rx_bytes for traffic in workers),
            tx_bytes=sum(traffic.tx_bytes for traffic in workers),
            rx_frames=sum(traffic.rx_frames for traffic in workers),
            tx_frames=sum(traffic.tx_frames for traffic in workers),
            evaluator_bytes=self._evaluator_bytes(),
            server_cpu_s=self._end_cpu_s,
            state_sha256=state_sha256(self.core.state.x),
            declined=self.core.declined,
            reached_s=self._reached_s,
            overruns=self._overruns,
            lost_pushes=self._lost_pushes,
            workers=[
                WorkerTotals(rank, self.core.progress(rank).steps, traffic.rx_bytes, traffic.tx_bytes)
                for rank, traffic in self._traffic.items()
            ],
        )


def push_values(row: PushRow, bytes_out: int, names: Sequence[str]) -> tuple[float | str | None, ...]:
    """A row of pushes.csv, in the order of `traces.push_columns`; `names` are the keys of the info it holds."""
    weight, *others = map(row.info.get, names)
    return (
        row.t_s,
        row.worker,
        row.seq,
        row.n_steps,
        row.loss,
        row.version,
        row.staleness,
        weight,
        row.bytes_in,
        bytes_out,
        row.step_s,
        row.exchange_s,
        row.held_s,
        *others,
    )


def state_only(core: ServerCore, t_s: float) -> dict[str, object]:
    """What a checkpoint holds from which no run can go on: the global state and when it was that."""
    return {"x": core.state.x, "t_s": t_s, "version": core.version, "samples": core.samples, "steps": core.steps}


def state_sha256(x: Vec) -> str:
    """SHA-256, in hexadecimal, of a state of shape `(d,)` as little-endian float32."""
    return hashlib.sha256(x.numpy().astype("<f4", copy=False).tobytes()).hexdigest()
