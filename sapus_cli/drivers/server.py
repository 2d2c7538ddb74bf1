"""The server process: receives pushes, applies them through the strategy, answers; measures what crosses its socket."""

from __future__ import annotations

import hashlib
import logging
import select
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch
import zmq
from safetensors.torch import save_file

from sapus_cli.cluster import Direction, ServerTime
from sapus_cli.codec import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Declined,
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
from sapus_cli.drivers.control import (
    Ended,
    Gone,
    Halt,
    Happened,
    Measured,
    Released,
    Status,
    WorkerStatus,
    WorkerTotals,
    hear,
    tell,
)
from sapus_cli.drivers.delay import Arrivals, DelayLine, Line
from sapus_cli.drivers.transport import COPY_BYTES, Segment, prefer_reno
from sapus_cli.errors import RemoteProtocolError, UserError
from sapus_cli.protocol import Outgoing, PushRow, ServerCore
from sapus_cli.strategy import STANDARD_INFO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from sapus_cli.cluster import ClusterProfile, Wire
    from sapus_cli.strategy import AnyStrategy, Setting, Vec
    from sapus_cli.traces import Trace

STATUS_EVERY_S = 0.1
CPU_EVERY_S = 0.005
HALT_S = 3.0
LAG_S, LAG_STEPS = 0.01, 0.2
"""An emulated server stays so many seconds behind, but no more than this part of a step: what a busy machine brings
late still finds its place, and workers make up for it in the time that they would sleep."""

log = logging.getLogger(__name__)


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

    `dtype` is what its vectors are made of, `segment` the memory that it shares with the server, if it does.
    """

    identity: bytes
    role: str
    rank: int
    dtype: torch.dtype = torch.float32
    segment: Segment | None = None
    traffic: Traffic = field(default_factory=Traffic)
    steps: int = 0
    pushes: int = 0
    interval: int = 0
    loss: float = float("nan")
    left: bool = False


def bind(endpoint: str, elements: int) -> tuple[zmq.Socket[bytes], str]:
    """A listening ROUTER socket and the endpoint it really got (port 0 lets the system choose).

    Raises:
        UserError: the endpoint cannot be bound.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, torch.float32.itemsize * elements))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise UserError(f"cannot listen at {endpoint}: {error}; choose another port, or leave it out") from error
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
    ) -> None:
        self.core = ServerCore(strategy, x0, n_workers, setting)
        self._socket = socket
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
        self._returning: set[int] = set()
        self._kills: Counter[int] = Counter()
        self._stopped = False
        self._fingerprint = fingerprint
        self._config = config
        self._launcher = launcher
        self._trace = pushes
        self._info_names = (*STANDARD_INFO, *strategy.columns)
        self._target_accuracy = target_accuracy
        self._peers: dict[bytes, Peer] = {}
        self._workers: dict[int, Peer] = {}
        self._released = 0.0
        self._released_cpu_s = 0.0
        self._cpu_read_s = 0.0
        self._next_cpu_s = 0.0
        self._end_s: float | None = None
        self._end_cpu_s = 0.0
        self._reached_s: float | None = None
        self._over = False
        self._halt_by: float | None = None
        self._next_status = 0.0
        self._process = psutil.Process()

    @property
    def now(self) -> float:
        """Seconds since all workers were released; 0 before. For what was held up, when it was due."""
        if self._due is not None:
            return self._due
        return time.monotonic() - self._released if self._released else 0.0

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
        elif isinstance(line, Gone):
            self._bury(self._workers[line.rank])

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
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            self._receive(frames)

    def _receive(self, frames: Sequence[zmq.Frame]) -> None:
        identity = frames[0].bytes
        peer = self._peers.get(identity)
        header, payload = frames[1], frames[2:]
        vector_bytes = self._vector_bytes(peer)
        try:
            message = decode_from_client(header.buffer)
            check_payload(message, 0 if peer and peer.segment else vector_bytes, [len(frame) for frame in payload])
        except RemoteProtocolError as error:
            self._refuse(identity, peer, error)
            return
        n_bytes = len(header) + payload_bytes(message, vector_bytes)
        if peer is not None:
            peer.traffic.rx_bytes += self._profile.scaled(n_bytes)
            peer.traffic.rx_frames += 1 + len(payload)
        if self._shapes(peer):
            take = partial(self._take, identity, peer, message, payload, n_bytes)
            # What a busy machine brings late was sent when its worker says.
            sent_s = min(self.now, message.sent_s or self.now) if isinstance(message, Push) else self.now
            self._up.put(sent_s, n_bytes, partial(self._arrived, n_bytes, take))
        else:
            self._take(identity, peer, message, payload, n_bytes)

    def _vector_bytes(self, peer: Peer | None) -> int:
        """Size of a vector on its way from or to a client."""
        return self._elements * (torch.float32 if peer is None else peer.dtype).itemsize

    def _shapes(self, peer: Peer | None) -> bool:
        """Whether the link holds up what this client sends and gets: a worker does, and only in training."""
        return self._profile.shapes and self._released > 0 and peer is not None and peer.role == "worker"

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
        if peer is not None and peer.left:
            return  # what a dead worker had sent
        try:
            self._handle(identity, peer, message, payload, n_bytes)
        except RemoteProtocolError as error:
            self._refuse(identity, peer, error)

    def _refuse(self, identity: bytes, peer: Peer | None, error: RemoteProtocolError) -> None:
        who = f"{peer.role} {peer.rank}" if peer else "a stranger"
        log.warning("refused a message of %s: %s", who, error)
        self._send(identity, Refused(reason=str(error)[:1000]))

    def _handle(
        self, identity: bytes, peer: Peer | None, message: FromClient, payload: Sequence[zmq.Frame], n_bytes: int
    ) -> None:
        if peer is None:
            if not isinstance(message, Hello):
                raise RemoteProtocolError("the first message must be a hello")
            self._greet(identity, message, n_bytes)
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
        rank = 0
        if hello.role == "evaluator" and any(peer.role == "evaluator" for peer in self._peers.values()):
            raise RemoteProtocolError("the evaluator is here already")
        if hello.role == "worker":
            free = [r for r in range(self._n_workers) if r not in self._workers or r in self._returning]
            if not free:
                raise RemoteProtocolError(f"all {self._n_workers} workers are here already")
            rank = free[0] if hello.rank < 0 else hello.rank
            if rank not in free:
                raise RemoteProtocolError(f"rank {rank} is taken, or not below {self._n_workers}")
        peer = Peer(identity, hello.role, rank)
        if hello.role == "worker":
            peer.dtype = self._dtype
            peer.segment = self._segment() if self._shared else None
        self._peers[identity] = peer
        if hello.role == "worker" and rank in self._workers:
            before = self._workers[rank]
            peer.traffic, peer.steps, peer.pushes = before.traffic, before.steps, before.pushes
            del self._peers[before.identity]
            if before.segment is not None:
                before.segment.close()
        peer.traffic.rx_bytes += self._profile.scaled(n_bytes)
        peer.traffic.rx_frames += 1
        if hello.role == "worker":
            self._workers[rank] = peer
        self._send(
            identity,
            Welcome(
                protocol=PROTOCOL_VERSION,
                rank=rank,
                elements=self._elements,
                fingerprint=self._fingerprint,
                config=self._config,
                steps=peer.steps,
                wire=self._wire if hello.role == "worker" else "float32",
                segment=peer.segment.path if peer.segment else "",
            ),
        )
        prefer_reno(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _segment(self) -> Segment:
        try:
            return Segment.create(self._elements, self._dtype)
        except OSError as error:
            raise RemoteProtocolError(f"the server has no memory to share: {error}; use --transport tcp") from error

    def _pull(self, peer: Peer, message: Pull) -> None:
        if message.fingerprint != self._fingerprint:
            raise RemoteProtocolError(
                "your model has another layout than the server's: use the same options and versions"
            )
        replies = self.core.join(peer.rank, self.now)
        self._returning.discard(peer.rank)
        if peer.segment is not None:
            peer.segment.close()
        first = self.core.started and not self._released
        if first:
            self._released = time.monotonic()
            self._released_cpu_s = time.process_time()
        self._answer(replies)
        self._tell_event("join", peer.rank)
        if self._stopped:
            self._send(peer.identity, Stop(flush=True))
        if first:
            tell(self._launcher, Released(self._released))

    def _push(self, peer: Peer, message: Push, payload: Sequence[zmq.Frame], n_bytes: int) -> None:
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
            peer.pushes += 1
            peer.steps += message.n_steps
            peer.interval = message.n_steps
            peer.loss = message.loss
        self._answer(replies)

    def _cpu_s(self) -> float:
        """CPU seconds used since the release, read now and then: reading costs as much as adding a small vector."""
        now = time.monotonic()
        if now >= self._next_cpu_s:
            self._next_cpu_s = now + CPU_EVERY_S
            self._cpu_read_s = time.process_time() - self._released_cpu_s
        return self._cpu_read_s

    def _leave(self, peer: Peer, message: Leave) -> None:
        self._overruns += message.overruns
        self._let_go(peer, message.reason)

    def _bury(self, peer: Peer) -> None:
        """Go on without a worker that is dead. What it had sent and the link still holds is lost with it."""
        self._kills[peer.rank] += 1
        self._returning.discard(peer.rank)
        if self._profile.comes_back(peer.rank, self._kills[peer.rank]):
            self._returning.add(peer.rank)
        if self.core.has(peer.rank):
            self._let_go(peer, "dead")
        else:  # it was on its way back
            peer.left = True
            self._end_if_all_left()

    def _let_go(self, peer: Peer, reason: str) -> None:
        replies, row = self.core.leave(peer.rank, self.now)
        peer.left = True
        if row is not None:
            self._write(row, 0)
        self._answer(replies)
        self._tell_event("leave", peer.rank, reason)
        self._end_if_all_left()

    def _end_if_all_left(self) -> None:
        nobody_comes = self._stopped or not self._returning
        if all(worker.left for worker in self._workers.values()) and self.core.started and nobody_comes:
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
        if self._end_s is None:
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
            self._end_cpu_s = time.process_time()

    def _answer(self, replies: Sequence[Outgoing]) -> None:
        snapshot = self._snapshot(replies)
        for reply in replies:
            sent = self._reply(self._workers[reply.worker], reply.message, reply.vector, snapshot)
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
            self._socket.send(identity, zmq.SNDMORE)
            if vector is None:
                self._socket.send(header)
            else:
                self._socket.send(header, zmq.SNDMORE)
                frame = self._raw.of(vector) if vector is self.core.state.x else raw(vector)
                self._socket.send(frame, 0, copy=copy or frame.nbytes < COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.warning("a client is gone, a message of %d bytes was not sent", len(header))
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
        if now < self._next_status:
            return
        self._next_status = now + STATUS_EVERY_S
        self._trace.tick(now)
        if self._released:
            tell(self._launcher, self._status())

    def _status(self) -> Status:
        waiting = self.core.waiting
        return Status(
            t_s=self.now,
            version=self.core.version,
            samples=self.core.samples,
            cpu_s=time.process_time(),
            rss_bytes=self._process.memory_info().rss,
            rx_bytes=sum(peer.traffic.rx_bytes for peer in self._workers.values()),
            tx_bytes=sum(peer.traffic.tx_bytes for peer in self._workers.values()),
            workers=[
                WorkerStatus(
                    rank=rank,
                    steps=peer.steps,
                    pushes=peer.pushes,
                    interval=peer.interval,
                    loss=peer.loss,
                    rx_bytes=peer.traffic.rx_bytes,
                    tx_bytes=peer.traffic.tx_bytes,
                    waiting=rank in waiting,
                )
                for rank, peer in sorted(self._workers.items())
            ],
        )

    def _tell_event(self, event: str, rank: int, detail: str = "") -> None:
        tell(self._launcher, Happened(self.now, event, "worker", rank, detail))

    def _ended(self) -> Ended:
        self._mark_end()
        self._trace.flush()
        tell(self._launcher, self._status())
        workers = [peer.traffic for peer in self._workers.values()]
        others = [peer.traffic for peer in self._peers.values() if peer.role == "evaluator"]
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
            evaluator_bytes=sum(traffic.rx_bytes + traffic.tx_bytes for traffic in others),
            server_cpu_s=self._end_cpu_s - self._released_cpu_s,
            state_sha256=state_sha256(self.core.state.x),
            declined=self.core.declined,
            reached_s=self._reached_s,
            overruns=self._overruns,
            workers=[
                WorkerTotals(rank, peer.steps, peer.traffic.rx_bytes, peer.traffic.tx_bytes)
                for rank, peer in sorted(self._workers.items())
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


def save_checkpoint(folder: Path, core: ServerCore, t_s: float) -> None:
    """Write the global state as safetensors and what belongs to it as JSON, each under a temporary name first."""
    meta = {"t_s": t_s, "version": core.version, "samples": core.samples, "steps": core.steps}
    tensors = folder / "state.safetensors.tmp"
    save_file({"x": core.state.x}, tensors)
    tensors.replace(folder / "state.safetensors")
    text = folder / "state.json.tmp"
    text.write_bytes(msgspec.json.encode(meta))
    text.replace(folder / "state.json")


def state_sha256(x: Vec) -> str:
    """SHA-256, in hexadecimal, of a state of shape `(d,)` as little-endian float32."""
    return hashlib.sha256(x.numpy().astype("<f4", copy=False).tobytes()).hexdigest()
