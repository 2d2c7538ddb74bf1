"""Hostile and wrong bytes at the server: nobody notices but who sent them.

The fuzzer drives a real `Server` without a socket: messages that are cut short, flipped, mistyped, replayed, out of
order or sent by strangers, and among them some workers that do what they should. One rank of the run is hostile: what
it sends counts if it keeps to the protocol, as from anybody. All of it comes from a seed; a failure shows the seed, the
number of the case and its bytes.
"""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import math
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from processes import SAPUS, Background, launch

import strategies
from sapus_cli import registry, traces
from sapus_cli.cluster import ClusterProfile, Link
from sapus_cli.codec import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Beat,
    Declined,
    Evaluated,
    Hello,
    Leave,
    Message,
    Pull,
    Push,
    Refused,
    Snapshot,
    State,
    Stop,
    Welcome,
    check_payload,
    decode_from_client,
    decode_from_server,
    encode,
)
from sapus_cli.config import Recovery
from sapus_cli.drivers import control
from sapus_cli.drivers.server import Server
from sapus_cli.errors import RemoteProtocolError
from sapus_cli.protocol import ServerCore
from sapus_cli.strategy import STANDARD_INFO, Setting
from sapus_cli.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

D = 4
N_WORKERS = 4
WEIGHT = 1 / N_WORKERS
HOSTILE = 3
"""The rank whose worker sends whatever comes to its mind; the ranks below it behave."""
EVALUATOR = b"evaluator"
SECRET = 0x2B1D_5E6F_7081_92A3
"""From here on, the incarnations of those that behave: numbers that nobody else knows."""
CHECK_EVERY = 10_000
MOST_GROWTH_BYTES = 48 << 20


class Frame:
    """What the server needs of a frame of zmq."""

    __slots__ = ("buffer", "more")

    def __init__(self, data: bytes | bytearray) -> None:
        self.buffer = data
        self.more = False

    @property
    def bytes(self) -> bytes:
        """Its content."""
        return bytes(self.buffer)

    def __len__(self) -> int:
        return len(self.buffer)


class Answer(NamedTuple):
    """What the server sent to a client: a message, and the bytes of its vector, if it has one."""

    message: Message
    vector: bytes


class PretendedSocket:
    """Takes what the server sends. Who is called `gone...` is gone, who is called `deaf...` does not listen."""

    def __init__(self) -> None:
        self.read: dict[bytes, list[Answer]] = {}
        self._parts: list[bytes] = []

    def send(self, data: Any, flags: int = 0, **_: object) -> None:
        """A frame of a message."""
        if not self._parts and data.startswith((b"gone", b"deaf")):
            raise zmq.ZMQError(zmq.EHOSTUNREACH if data.startswith(b"gone") else zmq.EAGAIN)
        self._parts.append(bytes(data))
        if flags & zmq.SNDMORE:
            return
        identity, header, *vector = self._parts
        self._parts = []
        if identity in self.read:
            try:
                message = decode_from_server(header)
            except RemoteProtocolError as error:
                raise AssertionError(f"a client could not read what it was sent: {error}") from error
            self.read[identity].append(Answer(message, vector[0] if vector else b""))

    def getsockopt_string(self, _: int) -> str:
        """An endpoint that is none."""
        return "inproc://fuzz"


class PretendedPipe:
    """Takes the lines for the launcher, and brings those that it would have sent."""

    def __init__(self) -> None:
        self.heard: list[control.Line] = []
        self.lines = 0

    def send_bytes(self, line: bytes) -> None:
        """A line from the server."""
        self.lines += 1

    def poll(self) -> bool:
        """Whether there is a line to the server."""
        return bool(self.heard)

    def recv_bytes(self) -> bytes:
        """A line to the server."""
        return msgspec.msgpack.encode(self.heard.pop(0))


class LinesASecond(logging.Handler):
    """Counts what is logged, and looks at the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.begun_s = time.monotonic()
        self.longest = ""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self.count += 1
        self.longest = max(self.longest, record.getMessage(), key=len)


class Good:
    """A worker that keeps to the protocol: it pushes whole numbers and compares every state with what it must be."""

    def __init__(self, rank: int) -> None:
        self.identity = b"worker-%d" % rank
        self.rank = rank
        self.version = 0
        self.seq = 0
        self.waits = True

    def update(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """What it pushes next, shape `(D,)`; pushes cancel out in time."""
        return np.full(D, (1 + self.rank) * (-1) ** self.seq, np.float32)


class Cluster:
    """A server, those of its clients that behave, and what its state must be: exactly, for asp."""

    def __init__(self, name: str, folder: Path, **more: Any) -> None:
        self.strategy = registry.build(name, {})
        self.pushes = folder / "pushes.csv"
        self.trace = traces.Trace(self.pushes, traces.push_columns(self.strategy.columns))
        self.socket = PretendedSocket()
        self.pipe = PretendedPipe()
        fields: dict[str, Any] = {
            "n_workers": N_WORKERS,
            "profile": ClusterProfile(),
            "setting": Setting(),
            "fingerprint": "f",
            "config": b"{}",
            "launcher": self.pipe,
            "pushes": self.trace,
            "target_accuracy": None,
            "recovery": Recovery(worker_timeout_s=1e9, checkpoint_every_s=1e9),
        }
        pretended: Any = self.socket
        self.server = Server(pretended, self.strategy, torch.zeros(D), **fields | more)
        self.exact = name == "asp"
        self.expected = np.zeros(D)
        self.good = [Good(rank) for rank in range(HOSTILE)]
        self.rows = 0
        self._incarnation = itertools.count(2**40)
        self._csv = self.pushes.open("rb")
        self._header_seen = False
        for identity in (EVALUATOR, *(worker.identity for worker in self.good)):
            self.socket.read[identity] = []
        self._begin()

    def close(self) -> None:
        """Close the files and remove them."""
        self._csv.close()
        self.trace.close()
        self.pushes.unlink()

    def give(self, identity: bytes, *frames: bytes) -> None:
        """Let a message arrive. What may be a vector is in memory that the server may write to."""
        header, *payload = frames
        arrived: Any = [Frame(identity), Frame(header), *map(Frame, map(bytearray, payload))]
        self.server._receive(arrived)

    def say(self, identity: bytes, message: Message, *payload: bytes) -> None:
        """Let a message arrive that is one."""
        self.give(identity, encode(message), *payload)

    def _begin(self) -> None:
        self.say(EVALUATOR, hello("evaluator", SECRET))
        for worker in self.good:
            self.say(worker.identity, hello("worker", SECRET + 1 + worker.rank, worker.rank))
            self.say(worker.identity, Pull(fingerprint="f"))
        self.hostile_joins()
        while self.server._line.next_due < math.inf:  # under a profile with a link only
            self.server._deliver()
        for worker in self.good:
            welcome, state = self.socket.read[worker.identity]
            assert isinstance(welcome.message, Welcome)
            assert isinstance(state.message, State)
            self._take(worker)

    @property
    def hostile(self) -> bytes:
        """Who has the hostile rank now, or had it last."""
        peer = self.server._workers.get(HOSTILE)
        return b"nobody" if peer is None else peer.identity

    def hostile_may_return(self) -> None:
        """If the hostile worker has left, the launcher says that its rank is free for whoever comes."""
        if not self.server.core.has(HOSTILE):
            self.pipe.heard.append(control.Gone(role="worker", rank=HOSTILE, returns=True))
            self.server._hear()

    def hostile_joins(self) -> None:
        """Somebody takes the hostile rank, if nobody has."""
        if self.server.core.has(HOSTILE):
            return
        if self.server.core.started:
            self.hostile_may_return()
        incarnation = next(self._incarnation)
        identity = b"hostile-%d" % incarnation
        self.say(identity, hello("worker", incarnation, HOSTILE))
        self.say(identity, Pull(fingerprint="f"))
        assert self.server.core.has(HOSTILE)

    def account(self, before: int, payload: Sequence[bytes]) -> None:
        """Expect the update of a push, if one more has been received than before."""
        received = self.server.core.received - before
        assert 0 <= received <= 1
        if received:
            self.expected += WEIGHT * np.frombuffer(payload[0], np.float32)

    def train(self) -> None:
        """Everybody who behaves and does not wait takes a step."""
        for worker in self.good:
            if worker.waits:
                self._take(worker)
            if worker.waits:
                continue
            before = self.server.core.received
            self.socket.read[worker.identity].clear()
            update = worker.update().tobytes()
            worker.seq += 1
            worker.waits = True
            push = Push(
                seq=worker.seq,
                version=worker.version,
                n_steps=1,
                n_samples=32,
                loss=1.0,
                step_s=0.1,
                exchange_s=0.01,
            )
            self.say(worker.identity, push, update)
            assert self.server.core.received == before + 1, f"a push of worker {worker.rank} was not accepted"
            self.account(before, [update])
            self._take(worker)
            assert not (self.exact and worker.waits), f"no answer to worker {worker.rank}"

    def _take(self, worker: Good) -> None:
        for message, vector in self.socket.read[worker.identity]:
            if isinstance(message, State):
                worker.version, worker.waits = message.version, False
                state = np.frombuffer(vector, np.float32)
                if self.exact:
                    assert (state == self.expected).all(), f"worker {worker.rank} got {state}, not {self.expected}"
        self.socket.read[worker.identity].clear()

    def check(self) -> None:
        """Compare the server with what it must be."""
        server = self.server
        server._next_status = 0.0
        server._tick()
        self.trace.flush()
        assert not server._over
        assert server._end_s is None
        assert len(server._peers) <= N_WORKERS + 1
        assert len(server._incarnations) <= N_WORKERS + 1
        assert set(server._workers) <= set(range(N_WORKERS))
        for worker in self.good:
            assert server.core.has(worker.rank)
        x = server.core.state.x.numpy()
        assert np.isfinite(x).all()
        if self.exact:
            assert (x == self.expected).all(), f"{x}, not {self.expected}"
        self.rows += self._csv.read().count(b"\n") - (not self._header_seen)
        self._header_seen = True
        open_rows = sum(member.row is not None for member in server.core._members.values())
        assert self.rows == server.core.received - open_rows
        self.say(EVALUATOR, Snapshot())
        answer = self.socket.read[EVALUATOR].pop()
        assert isinstance(answer.message, State)
        assert answer.vector == x.tobytes()
        self.socket.read[EVALUATOR].clear()


# What is sent.

Case = tuple[bytes, tuple[bytes, ...]]
"""A sender's identity, and the frames behind it."""

VECTORS = tuple(np.full(D, value, np.float32).tobytes() for value in (1, -1, 2, -2, 0, 3, -3))
EXTREME = (0, 1, -1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1e-320, 1e-9, 0.5, 1e9, 1e300, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan)

SECONDS = (0.0, 1e-320, 1e-12, 0.01, 0.1, 1e9)


def hello(role: Literal["worker", "evaluator"], incarnation: int, rank: int = -1) -> Hello:
    """The first word of a client."""
    return Hello(protocol=PROTOCOL_VERSION, role=role, incarnation=incarnation, rank=rank)


def valid() -> list[tuple[bytes, ...]]:
    """Messages of every kind, in an order that makes sense."""
    push: dict[str, Any] = {"n_steps": 1, "n_samples": 32, "loss": 1.0, "step_s": 0.1, "exchange_s": 0.01}
    infos: list[dict[str, float | str]] = [{}, {"reason": "upper", "h_min": 1.0}]
    return [
        *((encode(hello("worker", 12345 + rank, rank)),) for rank in (-1, 0, HOSTILE, 99)),
        (encode(hello("worker", 12345, HOSTILE)),),
        (encode(hello("evaluator", 12345)),),
        (encode(Hello(protocol=PROTOCOL_VERSION - 1, role="worker", incarnation=1)),),
        (encode(Pull(fingerprint="f")),),
        (encode(Pull(fingerprint="another")),),
        *(
            (encode(Push(seq=seq, version=version, info=info, **push)), VECTORS[seq % 7])
            for seq, version, info in itertools.product((1, 2, 3, 100), (0, 1, 50), infos)
        ),
        (encode(Snapshot()),),
        (encode(Evaluated(t_s=1.0, version=1, samples=1, loss=0.1, accuracy=1.0, final=True)),),
        (encode(Beat(incarnation=12345)),),
        (encode(Leave(reason="done")),),
    ]


def garbage() -> list[bytes]:
    """Headers that are no message of a client, or hardly one."""
    pack = msgspec.msgpack.encode
    wrong: list[Any] = [*EXTREME, *FLOATS, None, True, "", "x" * 2000, b"\0", [], [[]], {}, {"kind": "push"}]
    headers = []
    for frames in valid():
        fields = msgspec.msgpack.decode(frames[0])
        for key in fields:
            headers += [pack(fields | {key: value}) for value in wrong]
            headers.append(pack({other: value for other, value in fields.items() if other != key}))
        headers.append(pack(fields | {"a\n\x1b[31m" * 500: 1}))
    facts: list[dict[Any, Any]] = [{"reason": value} for value in wrong] + [{"h_min": value} for value in wrong]
    facts += [{"weight": "much"}, {"x" * 33: 1.0}, {str(i): 1.0 for i in range(33)}, {"": 1.0}, {1: 1.0}]
    push = msgspec.msgpack.decode(
        encode(Push(seq=1, version=0, n_steps=1, n_samples=1, loss=1, step_s=1, exchange_s=1))
    )
    headers += [pack(push | {"info": info}) for info in facts]
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    from_server = (
        State(version=1, t_s=0.0),
        Declined(seq=1),
        Stop(flush=True),
        Refused(reason="r"),
        Welcome(protocol=3, rank=0, elements=D, fingerprint="f", beat_s=1.0),
    )
    whole = [
        b"",
        b"\xc1",
        b"\x81" * 60_000,
        b"\x91" * 60_000,
        b"\x81\xa4kind" * 5000,
        b"\x82\xa1a" + b"\x91" * 60_000 + b"\xc0\xa4kind\xa5leave",
        b"\x82\xa1a" + b"\x81\xa1a" * 20_000 + b"\xc0\xa4kind\xa5leave",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff" + b"x" * 100,
        b"\0" * MAX_HEADER_BYTES,
        b"\x80" * (MAX_HEADER_BYTES + 1),
        pickle.dumps({"kind": "push"}),
        pickle.dumps(dt.datetime.now),
        b"cos\nsystem\n(S'true'\ntR.",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + b"\0" * 48,
        b'{"kind": "push", "seq": 1}',
        pack(deep),
        pack({"kind": deep}),
        pack([1, 2, 3]),
        pack({"kind": "push" * 1000}),
        pack({"kind": "leave", "reason": "\ud7ff\0\r\n" * 200}),
        b"\x82\xa4kind\xa5leave\xa6reason\xa2\xff\xfe",
        b"\x82\xa4kind\xa5leave\xa4kind\xa5leave",
        pack(msgspec.msgpack.Ext(5, b"x")),
        pack(dt.datetime(2000, 1, 1, tzinfo=dt.UTC)),
    ]
    return headers + whole + [encode(message) for message in from_server]


class Hostility:
    """Cases without an end, from a seed."""

    def __init__(self, seed: str, cluster: Cluster) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._cluster = cluster
        self._valid = valid()
        self._garbage = garbage()
        self._seconds = (0.1, 0.01)
        self._sick = False
        self._columns = (*STANDARD_INFO, *cluster.strategy.columns, "unknown")
        self._kinds = (
            *([self._mistyped] * 4),
            *([self._flipped] * 4),
            *([self._cut] * 2),
            self._random,
            *([self._misframed] * 2),
            *([self._in_place] * 2),
            *([self._extreme] * 3),
        )

    def next(self) -> Case:
        """The next case."""
        rng = self._rng.random
        kind = self._kinds[int(rng() * len(self._kinds))]
        frames = kind()
        who = rng()
        if kind == self._extreme or who < 0.3:
            return self._cluster.hostile, frames
        if who < 0.45 and self._is_harmless(rank := int(rng() * HOSTILE), frames):
            return self._cluster.good[rank].identity, frames
        if who < 0.5 and self._is_harmless(None, frames):
            return EVALUATOR, frames
        if who < 0.8:
            return b"\0%d" % int(rng() * 2**32), frames
        return (b"gone", b"deaf", b"stranger", b"", b"x" * 255)[int(rng() * 5)], frames

    def _is_harmless(self, rank: int | None, frames: tuple[bytes, ...]) -> bool:
        """Whether this says nothing in the name of a worker (None: the evaluator) that would count."""
        try:
            message = decode_from_client(frames[0])
            check_payload(message, 4 * D, [len(frame) for frame in frames[1:]])
        except RemoteProtocolError:
            return True
        if isinstance(message, Push):
            return rank is None or message.seq <= self._cluster.good[rank].seq
        return not isinstance(message, Evaluated if rank is None else Leave)

    def _one(self, of: Sequence[Any]) -> Any:
        return of[int(self._rng.random() * len(of))]

    def _mistyped(self) -> tuple[bytes, ...]:
        header = self._one(self._garbage)
        return (header, self._one(VECTORS)) if self._rng.random() < 0.5 else (header,)

    def _flipped(self) -> tuple[bytes, ...]:
        header, *payload = self._one(self._valid)
        flipped = bytearray(header)
        for _ in range(1 + int(self._rng.random() * 4)):
            flipped[int(self._rng.random() * len(flipped))] ^= 1 << int(self._rng.random() * 8)
        return bytes(flipped), *payload

    def _cut(self) -> tuple[bytes, ...]:
        header, *payload = self._one(self._valid)
        place = int(self._rng.random() * len(header))
        if self._rng.random() < 0.5:
            return header[:place], *payload
        return header[:place] + self._one(self._valid)[0][place:], *payload

    def _random(self) -> tuple[bytes, ...]:
        return (self._rng.randbytes(int(self._rng.random() * 100)),)

    def _misframed(self) -> tuple[bytes, ...]:
        header = self._one(self._valid)[0]
        sizes = (0, 1, 4 * D - 1, 4 * D + 1, 8 * D, 2 * D, 1000)
        payload = [bytes(self._one(sizes)) for _ in range(int(self._rng.random() * 3))]
        return header, *payload, *([self._one(VECTORS)] if self._rng.random() < 0.3 else [])

    def _in_place(self) -> tuple[bytes, ...]:
        """What would be right at another time, or from another."""
        frames: tuple[bytes, ...] = self._one(self._valid)
        return frames

    def _extreme(self) -> tuple[bytes, ...]:
        """A push of the hostile rank that keeps to the protocol, with whatever numbers that allows, or nearly."""
        core, one, rng = self._cluster.server.core, self._one, self._rng.random
        if rng() < 0.05:  # what is measured is believed after several times only
            self._seconds = (one(SECONDS), one(SECONDS))
            self._sick = rng() < 0.2
        push = Push(
            seq=core.progress(HOSTILE).seq + 1,
            version=one((0, core.version, core.version, core.version + 1)),
            n_steps=one(EXTREME) if rng() < 0.2 else 1,
            n_samples=one(EXTREME) if rng() < 0.2 else 32,
            loss=one(FLOATS) if rng() < 0.3 else 1.0,
            step_s=one(FLOATS) if rng() < 0.1 else self._seconds[0],
            exchange_s=one(FLOATS) if rng() < 0.1 else self._seconds[1],
            last=rng() < 0.1,
            finite=rng() < 0.95 and not self._sick,
            sent_s=one(FLOATS) if rng() < 0.1 else 0.0,
            info={one(self._columns): one((*FLOATS, "x", 'a,"b\n'))} if rng() < 0.3 else {},
        )
        return encode(push), one(VECTORS)


def fuzz(cluster: Cluster, seed: str, n_cases: int) -> None:
    """Send cases, and let those who behave train in between."""
    hostility = Hostility(seed, cluster)
    process = psutil.Process()
    rss_bytes = math.inf
    log = LinesASecond()
    logger = logging.getLogger("sapus_cli.drivers.server")
    logger.addHandler(log)
    case: Case = (b"", ())
    number = 0
    try:
        for number in range(1, n_cases + 1):
            case = hostility.next()
            before = cluster.server.core.received
            cluster.give(case[0], *case[1])
            if cluster.server.core.received != before:
                assert case[0] == cluster.hostile
                cluster.account(before, case[1][1:])
            if number % 50 == 0:
                cluster.train()
            if number % 1000 == 0:
                cluster.hostile_may_return()
            elif number % 1000 == 500:
                cluster.hostile_joins()
            if number % CHECK_EVERY == 0 or number == n_cases:
                cluster.check()
                assert process.memory_info().rss - rss_bytes < MOST_GROWTH_BYTES
                rss_bytes = min(rss_bytes, process.memory_info().rss) if number > CHECK_EVERY else math.inf
    except Exception as error:
        raise AssertionError(f"seed {seed!r}, case {number}: {case[1]!r} from {case[0]!r}: {error!r}") from error
    finally:
        logger.removeHandler(log)
    seconds = time.monotonic() - log.begun_s
    assert log.count <= 2 * seconds + 2, f"{log.count} lines in {seconds:.1f} s"
    assert len(log.longest) < 2000


def push_of(seq: int, **more: Any) -> bytes:
    """The header of a push of the hostile rank."""
    fields: dict[str, Any] = {"n_steps": 1, "n_samples": 32, "loss": 1.0, "step_s": 0.1, "exchange_s": 0.01}
    return encode(Push(seq=seq, version=0, **fields | more))


FOUND: dict[str, list[tuple[bytes, ...]]] = {
    "a pull with another model while training": [(encode(Pull(fingerprint="another")),)],
    "a pull with another model while waiting": [(push_of(1), VECTORS[0]), (encode(Pull(fingerprint="another")),)],
    "samples that add up to more than 64 bits": [(push_of(seq, n_samples=2**62), VECTORS[4]) for seq in range(1, 7)],
    "steps that add up to more than 64 bits": [(push_of(seq, n_steps=2**62), VECTORS[4]) for seq in range(1, 7)],
    "a text where a column has numbers": [(push_of(1, info={"h_min": "abc"}), VECTORS[4])],
    "a weight that is a text": [(push_of(1, info={"weight": "abc"}), VECTORS[4])],
    "a number where a column has texts": [(push_of(1, info={"reason": 1.5}), VECTORS[4])],
    "a reason that is not plain": [(push_of(1, info={"reason": 'a,"b\n\r'}), VECTORS[4])],
    "a step without an end": [(push_of(seq, step_s=math.inf), VECTORS[4]) for seq in range(1, 7)],
    "a step without a beginning": [(push_of(seq, step_s=1e-320, exchange_s=1.0), VECTORS[4]) for seq in range(1, 7)],
    "values in values in values": [(b"\x82\xa1a" + b"\x81\xa1a" * 20_000 + b"\xc0\xa4kind\xa5leave",)],
    "a second role": [(encode(hello("evaluator", 2**40)),)],
    "a second leave": [(encode(Leave()),), (encode(Leave()),)],
    "ten sick pushes": [(push_of(seq, finite=False), VECTORS[0]) for seq in range(1, 12)],
}
"""What servers have died or hung of, or might: what a worker sends that has pulled once."""


@pytest.mark.parametrize("cluster", ["asp", "bsp", "sapus", "dssp"], indirect=True)
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_harms_nobody(cluster: Cluster, name: str) -> None:
    for frames in FOUND[name]:
        before = cluster.server.core.received
        cluster.give(cluster.hostile, *frames)
        cluster.account(before, frames[1:])
    cluster.train()
    cluster.say(cluster.hostile, Leave())
    received = cluster.server.core.received
    for _ in range(3):
        cluster.train()
    assert cluster.server.core.received == received + 3 * len(cluster.good)
    cluster.check()


def extreme_numbers(core: ServerCore, rng: random.Random, columns: Sequence[str]) -> None:
    """Push with numbers that the protocol allows and nobody means, from all ranks but the first."""
    seconds = [(0.1, 0.01), *((rng.choice(SECONDS), rng.choice(SECONDS)) for _ in range(1, N_WORKERS))]
    now = 0.0
    for rank in range(N_WORKERS):
        core.join(rank, now)
    for _ in range(60):
        now += rng.choice((0.0, 0.001, 1.0))
        rank = rng.choice([rank for rank in range(N_WORKERS) if rank not in core.waiting])
        tame = rank == 0
        push = Push(
            seq=core.progress(rank).seq + 1,
            version=core.version if tame else rng.choice((0, core.version)),
            n_steps=1 if tame else rng.choice((1, 1, 2**31)),
            n_samples=32,
            loss=1.0 if tame else rng.choice((0.0, 1.0, -1.0, 1e155, 1.7e308, -1.7e308)),
            step_s=seconds[rank][0],
            exchange_s=seconds[rank][1],
            info={} if tame else {key: rng.choice(FLOATS) for key in columns if rng.random() < 0.3},
        )
        for reply in core.push(rank, decoded(push), torch.full((D,), 0.01), now, 100, 0.1 * now):
            assert decode_from_server(encode(reply.message)) == reply.message
    assert (core.state.x.abs() < 60).all(), "each push has moved it by 0.01 at most"


def decoded(push: Push) -> Push:
    message = decode_from_client(encode(push))
    assert isinstance(message, Push)
    return message


@pytest.mark.parametrize(
    ("name", "params"),
    [*((name, {}) for name in sorted(strategies.REGISTRY)), ("sapus-weighted", {"weighting": "loss-share"})],
)
def test_extreme_numbers_break_no_strategy(name: str, params: dict[str, Any]) -> None:
    strategy = registry.build(name, params)
    columns = [key for key in (*STANDARD_INFO, *strategy.columns) if key != "reason"]
    for seed in range(40):
        setting = Setting(link_bytes_per_s=(None, 1e6)[seed % 2], momentum=(0.0, 0.9)[seed // 2 % 2])
        rng = random.Random(seed)  # noqa: S311 - no secret
        extreme_numbers(ServerCore(strategy, torch.zeros(D), N_WORKERS, setting), rng, columns)


@pytest.mark.parametrize("cluster", ["asp"], indirect=True)
def test_what_a_stranger_says_stays_one_line_in_the_log(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        cluster.give(b"stranger", msgspec.msgpack.encode({"kind": "leave", "a\n\x1b[31m\u2028" * 5000: 1}))
    (line,) = caplog.messages
    assert line.isprintable()
    assert line.isascii()
    assert len(line) < 2000


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(request.param, tmp_path)
    with torch.no_grad():
        yield made
    made.close()


@pytest.mark.parametrize("cluster", sorted(strategies.REGISTRY), indirect=True)
def test_wrong_bytes_harm_nobody_under_any_strategy(cluster: Cluster) -> None:
    fuzz(cluster, "any", 4000)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["asp"], indirect=True)
def test_a_million_wrong_messages_harm_nobody(cluster: Cluster) -> None:
    fuzz(cluster, "million", 1_000_000)
    n_good = (N_WORKERS - 1) * 1_000_000 // 50
    assert cluster.server.core.received > 1.3 * n_good, "much of what was hostile has to keep to the protocol"


def test_a_flood_over_an_emulated_link_is_not_kept(tmp_path: Path) -> None:
    with torch.no_grad():
        cluster = Cluster("asp", tmp_path, profile=ClusterProfile(link=Link(1e5)))
        push = Push(seq=1, version=0, n_steps=1, n_samples=32, loss=1.0, step_s=0.1, exchange_s=0.01)
        for _ in range(5000):
            cluster.say(cluster.hostile, push, VECTORS[0])
        assert len(cluster.server._up._held) < 20
        while cluster.server._up.next_due < math.inf or cluster.server._line.next_due < math.inf:
            cluster.server._deliver()
        assert cluster.server.core.received == 1
    cluster.close()


# Over real sockets, while a run goes on.

CALM: dict[str, Any] = {"strategy": "local-sgd", "workers": 2, "model": "mlp", "steps": 800}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
READY = GREETING + bytes((4, len(_READY))) + _READY
PATIENT = (b"", GREETING[:1], GREETING[:11], GREETING, READY)
"""What those say who connect to the port and then wait: nothing, a part of the greeting of ZMTP, all of it."""
OPENINGS = (
    *PATIENT,
    READY + b"\x01\x05hello",
    READY + b"\x02" + (2**62).to_bytes(8, "big"),
    READY + b"\0\x05hello" * 1000,
    GREETING + bytes(range(256)) * 100,
    GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
    b"\xff" * 1000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\0",
)
"""What anybody may say: that, garbage behind it, and what is for other servers."""


@pytest.fixture(scope="module")
def calm_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state that a run of these options ends in, to the last bit."""
    return str(launch(tmp_path_factory.mktemp("calm"), **CALM).record["state_sha256"])


@contextmanager
def training(cwd: Path, limits: str = "true") -> Iterator[tuple[Background, psutil.Process, int]]:
    """The same run, which takes eight seconds at least: the run, its server's process, and the port of that."""
    asked = ("-s", "local-sgd", "-w", "2", "--model", "mlp", "--steps", "800", "--step-time", "10ms")
    command = ["sh", "-c", f'{limits} && exec "$@"', "sh", *SAPUS, "run", *asked]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    run = Background(process, cwd / "results")
    try:
        run.wait_for_pushes(2)
        server = psutil.Process(run.pid("server"))
        (port,) = {at.laddr.port for at in server.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
        yield run, server, port
        assert process.poll() is None, "it was over before everything had been tried"
        code, _, stderr = run.end(60)
        assert code == 0, stderr
        events = read_trace(run.folder, "events")["kind"]
        assert set(events) <= {"join", "leave", "checkpoint"}, "nobody died, or was thought to have died"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def connections(port: int, n: int, openings: Sequence[bytes]) -> Iterator[None]:
    """So many connections, each with one of the openings; who is not let in at once goes on trying in silence."""
    with ExitStack() as stack:
        for number in range(n):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(0.2)
            with suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(openings[number % len(openings)])
            if number % 50 == 0:
                time.sleep(0.005)  # the queue of the system is short
        yield


def wait_for_more(run: Background) -> None:
    """Wait until training has gone on for about a second."""
    run.wait_for_pushes((run.folder / "pushes.csv").read_text().count("\n") + 12)


@contextmanager
def descriptors(n: int) -> Iterator[None]:
    """Have so many, or skip the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        pytest.skip(f"a process may have {hard} open files here, {n} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shout(stranger: zmq.Socket[bytes], port: int, number: int) -> None:
    """Send messages that are none, without reading an answer."""
    rng = random.Random(number)  # noqa: S311 - no secret
    headers = garbage()
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://127.0.0.1:{port}")
    for _ in range(200):
        with suppress(zmq.Again):
            stranger.send_multipart([rng.choice(headers), *([b"x" * 100] * (number % 7))], zmq.NOBLOCK)


@pytest.mark.slow
def test_a_run_goes_on_amid_strangers(tmp_path: Path, calm_sha256: str) -> None:
    with training(tmp_path) as (run, server, port), connections(port, 10 * len(OPENINGS), OPENINGS):
        rss_bytes = server.memory_info().rss
        with ExitStack() as stack:
            for number in range(20):
                shout(stack.enter_context(zmq.Context.instance().socket(zmq.DEALER)), port, number)
            wait_for_more(run)
            assert server.memory_info().rss - rss_bytes < 100 << 20
    assert run.record()["state_sha256"] == calm_sha256
    assert (run.folder / "logs" / "server.log").stat().st_size < 100_000


@pytest.mark.slow
def test_a_run_goes_on_with_ten_thousand_connections(tmp_path: Path, calm_sha256: str) -> None:
    with descriptors(11_000), training(tmp_path) as (run, server, port), connections(port, 10_000, PATIENT):
        run.wait_for(lambda: server.num_fds() > 10_000, "connections")
        wait_for_more(run)
        assert server.memory_info().rss < 2 << 30
    assert run.record()["state_sha256"] == calm_sha256


@pytest.mark.slow
def test_a_run_goes_on_when_its_server_has_no_descriptors_left(tmp_path: Path, calm_sha256: str) -> None:
    with training(tmp_path, "ulimit -n 256") as (run, server, port), connections(port, 300, PATIENT):
        run.wait_for(lambda: server.num_fds() == 256, "connections")
        wait_for_more(run)
    assert run.record()["state_sha256"] == calm_sha256
