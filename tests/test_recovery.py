"""What is left when connections and processes go: the cores and the drivers, without processes of their own."""

from __future__ import annotations

import math
import multiprocessing
import random
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
import zmq

from sapus_cli import registry, traces
from sapus_cli.checkpoint import Checkpoints, read_state
from sapus_cli.cluster import ClusterProfile, Link
from sapus_cli.codec import (
    PROTOCOL_VERSION,
    Beat,
    Declined,
    Evaluated,
    FromClient,
    Hello,
    Leave,
    Pull,
    Push,
    Snapshot,
    State,
    Stop,
    Welcome,
    decode_from_server,
    encode,
    raw,
)
from sapus_cli.commands.view import Quiet
from sapus_cli.config import Recovery, RunConfig
from sapus_cli.drivers import roles
from sapus_cli.drivers.attendance import Attendance
from sapus_cli.drivers.client import SILENCE_S, Client
from sapus_cli.drivers.control import Begin, Ended, Gone, Happened, Released, Restart, hear, tell
from sapus_cli.drivers.evaluator import run as run_evaluator
from sapus_cli.drivers.launch import END_S, HANGS_S, LAST_CHECKPOINT_S, Launcher, _Child, pause_s
from sapus_cli.drivers.server import Server, Traffic, bind
from sapus_cli.drivers.worker import Worker
from sapus_cli.errors import DroppedError, UserError
from sapus_cli.protocol import Outgoing, ServerCore
from sapus_cli.strategy import ServerState, Setting
from strategies.adacomm import AdaComm
from strategies.asp import Asp
from strategies.bsp import Bsp
from strategies.easgd import Easgd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from sapus_cli.strategy import AnyStrategy, Vec


def push(seq: int, version: int = 0, **more: Any) -> Push:
    fields: dict[str, Any] = {"n_steps": 1, "n_samples": 1, "loss": 1.0, "step_s": 0.1, "exchange_s": 0.0} | more
    return Push(seq=seq, version=version, **fields)


def started(strategy: AnyStrategy, n_workers: int = 2, x0: float = 0.0) -> ServerCore:
    core = ServerCore(strategy, torch.tensor([x0]), n_workers)
    for rank in range(n_workers):
        core.join(rank, 0.0)
    return core


def sent(replies: list[Outgoing]) -> State:
    """The header of the one reply."""
    (reply,) = replies
    assert isinstance(reply.message, State)
    return reply.message


# What is sent again.


def test_a_push_that_is_sent_again_counts_once_and_is_answered_with_the_state_of_now() -> None:
    core = started(Asp())
    assert sent(core.push(0, push(1), torch.tensor([2.0]), 1.0, 0)).version == 1
    core.push(1, push(1), torch.tensor([4.0]), 2.0, 0)
    (again,) = core.push(0, push(1), torch.tensor([2.0]), 3.0, 0)
    assert again.vector is core.state.x
    assert (core.state.x.item(), core.received, sent([again]).version, again.row) == (3.0, 2, 2, None)
    assert core.push(0, push(2, 2), torch.tensor([2.0]), 4.0, 0)[0].row is not None
    assert core.push(0, push(1), torch.tensor([2.0]), 5.0, 0) == [], "an older one is not answered"


def test_a_push_that_is_sent_again_while_it_waits_still_waits() -> None:
    core = started(Bsp())
    assert core.push(0, push(1), torch.tensor([2.0]), 1.0, 0) == []
    assert core.push(0, push(1), torch.tensor([2.0]), 2.0, 0) == []
    replies = core.push(1, push(1), torch.tensor([4.0]), 3.0, 0)
    assert [reply.worker for reply in replies] == [0, 1]
    assert (core.state.x.item(), core.received) == (3.0, 2)


def test_what_a_strategy_sent_is_sent_again_as_it_was() -> None:
    # alpha = 0.8 / 2: w = 10 - 0.4 (10 - 0) = 6.
    core = started(Easgd(beta=0.8, h=1))
    for now in (1.0, 2.0):
        (reply,) = core.push(0, push(1), torch.tensor([10.0]), now, 0)
        assert reply.vector is not None
        assert reply.vector.item() == pytest.approx(6.0)
    assert core.state.x.item() == pytest.approx(4.0)

    core = started(AdaComm(h0=8, t0_s=1.0), 1)
    first = sent(core.push(0, push(1), torch.tensor([1.0]), 5.0, 0))
    assert first.hint == {"h": 4.0}
    assert sent(core.push(0, push(1), torch.tensor([1.0]), 6.0, 0)).hint == {"h": 4.0}


def test_what_was_declined_is_declined_again() -> None:
    core = started(Asp())
    for now in (1.0, 2.0):
        (reply,) = core.push(0, push(1, loss=math.nan), torch.tensor([1.0]), now, 0)
        assert reply.message == Declined(seq=1)
    assert (core.declined, core.state.x.item()) == (1, 0.0)


def test_a_pull_that_is_sent_again_is_answered_again_until_the_first_push() -> None:
    core = ServerCore(Asp(), torch.zeros(1), 2)
    assert core.join(0, 0.0) == []
    assert core.join(0, 0.1) == [], "it is still too early"
    assert [reply.worker for reply in core.join(1, 0.2)] == [0, 1]
    core.push(1, push(1), torch.tensor([4.0]), 1.0, 0)
    again = sent(core.join(0, 2.0))
    assert (again.fresh, again.version, core.state.members) == (True, 1, {0, 1})


# What is kept.


def test_a_core_goes_on_in_another_one(tmp_path: Path) -> None:
    strategy = Bsp()
    core = started(strategy, 4)
    for seq in (1, 2):
        for rank in range(4):
            core.push(rank, push(seq, 4 * (seq - 1), n_samples=8), torch.tensor([1.0 + rank]), seq, 10)
    assert core.state.x.item() == 2 * 2.5
    core.push(2, push(3, 8, n_samples=8), torch.tensor([10.0]), 3.5, 10)
    core.push(0, push(3, 8, n_samples=8), torch.tensor([20.0]), 3.0, 10)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(core.saved())
    core.push(1, push(3, 8), torch.tensor([77.0]), 4.0, 10)  # is lost

    found = checkpoints.load().newest
    assert found is not None
    after = ServerCore(strategy, torch.zeros(1), 4)
    rows = after.restore(found.tree, 6.0, started=True)
    # The round ends without those that are gone: the mean of 10 and 20.
    assert after.state.x.item() == 5.0 + 15.0
    assert (after.version, after.received, after.samples, after.steps) == (10, 10, 80, 10)
    assert [(row.worker, row.seq, row.held_s) for row in rows] == [(0, 3, 3.0), (2, 3, 2.5)]
    assert [row.info["weight"] for row in rows] == [0.5, 0.5]
    assert after.state.members == after.waiting == set()
    assert [after.progress(rank).seq for rank in range(4)] == [3, 2, 3, 2]

    assert sent(after.join(1, 7.0)).fresh, "it need not wait for the others"
    assert sent(after.push(1, push(3, 10), torch.tensor([1.0]), 8.0, 10)).version == 11
    assert after.state.x.item() == 21.0


def test_a_whole_run_goes_on_when_all_are_there() -> None:
    core = started(Asp())
    core.push(0, push(1), torch.tensor([2.0]), 1.0, 0)
    after = ServerCore(Asp(), torch.zeros(1), 2)
    assert after.restore(core.saved(), 1.0, started=False) == []
    assert after.join(1, 1.0) == []
    assert [reply.worker for reply in after.join(0, 1.0)] == [0, 1]
    assert (after.state.x.item(), after.version) == (1.0, 1)


# Who is there.


def test_attendance() -> None:
    attendance = Attendance(3, least=2, patience_s=10.0)
    assert attendance.enough
    attendance.lose(0)
    assert attendance.is_missing(0)
    assert (attendance.enough, attendance.fails(1.0)) == (True, False)
    attendance.expect(1)
    assert (attendance.enough, attendance.expects, attendance.is_missing(1)) == (True, True, True)
    attendance.lose(1)
    assert (attendance.enough, attendance.expects) == (False, False)
    assert [attendance.fails(now) for now in (5.0, 15.0, 15.1)] == [False, False, True]
    attendance.arrive(0)
    assert not attendance.is_missing(0)
    assert [attendance.fails(now) for now in (16.0, 99.0)] == [False, False]
    attendance.lose(0)
    assert [attendance.fails(now) for now in (100.0, 109.0)] == [False, False], "it counts from when they are too few"


def test_who_is_expected_until_then_is_overdue_afterwards() -> None:
    attendance = Attendance(2, least=1, patience_s=10.0)
    attendance.expect(0, 5.0)
    attendance.expect(1)
    assert (attendance.overdue(5.0), attendance.overdue(5.1)) == ([], [0])


# What the drivers make of it.


class Counting:
    """Steps that add 1 to the first element."""

    def __init__(self, elements: int = 3, step_s: float = 0.0) -> None:
        self.vector = torch.zeros(elements)
        self.steps = 0
        self._step_s = step_s

    def step(self) -> tuple[float, int]:
        self.vector[0] += 1
        self.steps += 1
        time.sleep(self._step_s)
        return 1.0, 1

    def forget(self) -> None:
        pass


class Script:
    """A connection whose server says what stands in a list; None is the news that it knows us no more."""

    buffers = (None, None)
    dtype = torch.float32

    def __init__(self, said: list[State | Stop | None], after: Welcome) -> None:
        self.welcome = Welcome(protocol=1, rank=0, elements=3, fingerprint="f", beat_s=1.0)
        self.heard: list[tuple[Any, float | None]] = []
        self._said = said
        self._after = after

    def send(self, message: Any, vector: Any = None) -> None:
        self.heard.append((message, None if vector is None else vector[0].item()))

    def receive(self, into: Any, timeout_ms: int | None) -> State | Stop | None:
        if timeout_ms == 0:
            return None
        said = self._said.pop(0)
        if said is None:
            raise DroppedError
        return said

    def renew(self) -> None:
        self.welcome = self._after


def worked(script: Script, steps: int) -> list[tuple[Any, float | None]]:
    worker = Worker(script, Asp(), Counting(), fingerprint="f", n_params=3, steps=steps, seconds=None)  # type: ignore[arg-type]
    assert worker.run() == "done"
    return script.heard


def test_who_is_taken_up_again_says_again_what_was_not_answered() -> None:
    after = Welcome(protocol=1, rank=0, elements=3, fingerprint="f", beat_s=1.0, resumed=True)
    fresh, plain = State(version=0, t_s=0.0, fresh=True), State(version=1, t_s=0.1)
    heard = worked(Script([None, fresh, None, plain, plain], after), 2)
    kinds = [type(message).__name__ for message, _ in heard]
    assert kinds == ["Pull", "Pull", "Push", "Push", "Push", "Leave"]
    assert heard[2] == heard[3], "the same push, the same vector"
    assert [message.seq for message, _ in heard[2:5]] == [1, 1, 2]


def test_who_was_let_go_begins_anew_where_the_server_has_got_to() -> None:
    after = Welcome(protocol=1, rank=0, elements=3, fingerprint="f", beat_s=1.0, steps=4, seq=2)
    fresh, plain = State(version=0, t_s=0.0, fresh=True), State(version=1, t_s=0.1)
    heard = worked(Script([fresh, None, fresh, plain, plain], after), 6)
    assert [type(message).__name__ for message, _ in heard] == ["Pull", "Push", "Pull", "Push", "Push", "Leave"]
    assert [message.seq for message, _ in heard if isinstance(message, Push)] == [1, 3, 4]
    assert heard[4][0].last, "step 6 of 6"


class Proxy:
    """A TCP relay whose connections can be cut."""

    def __init__(self, endpoint: str) -> None:
        self._to = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._other: dict[socket.socket, socket.socket] = {}
        self._cut = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._cut.is_set():
                self._cut.clear()
                for end in list(self._other):
                    self._drop(end)
            ready, _, _ = select.select([self._listener, *self._other], [], [], 0.01)
            for end in ready:
                if end is self._listener:
                    ours, _ = end.accept()
                    theirs = socket.create_connection(self._to)
                    self._other |= {ours: theirs, theirs: ours}
                elif end in self._other:
                    self._relay(end)
        for end in [*self._other, self._listener]:
            end.close()

    def _relay(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._other[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        other = self._other.pop(end, None)
        if other is not None:
            self._other.pop(other, None)
            end.close()
            other.close()


class Serving:
    """A server in a thread, and what it tells its launcher."""

    def __init__(self, folder: Path, strategy: AnyStrategy, n_workers: int, **more: Any) -> None:
        self._socket, self.endpoint = bind(more.pop("endpoint", "tcp://127.0.0.1:*"), 3)
        self.pipe, theirs = multiprocessing.Pipe()
        self.trace = traces.Trace(folder / "pushes.csv", traces.push_columns(strategy.columns))
        self.server = Server(
            self._socket,
            strategy,
            torch.zeros(3),
            n_workers=n_workers,
            profile=ClusterProfile(),
            setting=Setting(),
            fingerprint="f",
            config=b"{}",
            launcher=theirs,
            pushes=self.trace,
            target_accuracy=None,
            recovery=more.pop("recovery", Recovery()),
            checkpoints=more.pop("checkpoints", None),
        )
        self.said: list[Any] = []
        self.ended: list[Ended] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with suppress(EOFError, OSError):  # the launcher is gone
            self.ended.append(self.server.run())
        self._socket.close(linger=0)

    def start(self) -> None:
        self._thread.start()

    def listen(self, seconds: float = 0.0) -> list[Any]:
        """What has been said so far."""
        while self.pipe.poll(seconds):
            self.said.append(hear(self.pipe))
        return self.said

    def events(self, kind: str) -> list[Happened]:
        return [line for line in self.listen() if isinstance(line, Happened) and line.event == kind]

    def finish(self) -> Ended:
        """Play the evaluator that ends the run, and wait for the end."""
        evaluator(self.endpoint)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.trace.close()
        (ended,) = self.ended
        return ended

    def kill(self) -> None:
        """End without a word, as far as a thread can."""
        self.pipe.close()
        self._thread.join(20)
        assert not self._thread.is_alive()


def evaluator(endpoint: str) -> None:
    client = Client(endpoint, "evaluator")
    while True:
        client.send(Snapshot())
        state = client.receive(torch.empty(3), 20_000)
        while not isinstance(state, State):
            state = client.receive(torch.empty(3), 20_000)
        said = Evaluated(state.t_s, state.version, state.samples, loss=1.0, accuracy=0.5, final=state.final)
        client.send(said)
        if state.final:
            break
        time.sleep(0.05)
    client.close()


@contextmanager
def working(
    endpoint: str, strategy: AnyStrategy, n: int, steps: int, step_s: float
) -> Iterator[list[threading.Thread]]:
    """So many workers in threads; waits for their end."""

    def work(rank: int) -> None:
        client = Client(endpoint, "worker", rank)
        Worker(client, strategy, Counting(3, step_s), fingerprint="f", n_params=3, steps=steps, seconds=None).run()
        client.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local-sgd-async", "bsp", "easgd", "sapus"])
def test_no_push_is_lost_or_counted_twice_however_often_connections_break(tmp_path: Path, name: str) -> None:
    rng = random.Random(7)  # noqa: S311 - it is to be the same every time
    strategy = registry.build(name, {"h": 2} if name in {"local-sgd-async", "easgd"} else {})
    serving = Serving(tmp_path, strategy, 3)
    serving.start()
    proxy = Proxy(serving.endpoint)
    with working(proxy.endpoint, strategy, 3, 300, 0.003):
        while not serving.server.core.started:
            time.sleep(0.01)
        for _ in range(8):
            proxy.cut()
            time.sleep(rng.uniform(0.02, 0.3))
    ended = serving.finish()
    proxy.close()
    assert (ended.steps, ended.samples) == (900, 900)
    assert len(serving.events("reconnect")) > 0
    assert not serving.events("drop")
    rows = traces.read_trace(tmp_path, "pushes")
    assert len(rows) == ended.pushes
    for rank in range(3):
        seqs = sorted(rows.filter(rows["worker"] == rank)["seq"])
        assert seqs == list(range(1, len(seqs) + 1))
    if name != "easgd":  # which sends states, not updates
        assert float(serving.server.core.state.x[0]) == pytest.approx(float((rows["weight"] * rows["n_steps"]).sum()))


@pytest.mark.slow
def test_a_server_goes_on_in_the_place_of_another(tmp_path: Path) -> None:
    strategy = registry.build("local-sgd-async", {"h": 2})
    checkpoints = Checkpoints(tmp_path)
    first = Serving(tmp_path, strategy, 2, checkpoints=checkpoints, recovery=Recovery(checkpoint_every_s=0.3))
    first.start()
    with working(first.endpoint, strategy, 2, 500, 0.004):
        while len(first.events("checkpoint")) < 3:
            time.sleep(0.02)
        time.sleep(0.2)
        first.kill()
        first.trace.close()
        released = next(line.monotonic_s for line in first.said if isinstance(line, Released))
        found = checkpoints.load().newest
        assert found is not None
        traces.cut(tmp_path / "pushes.csv", found.tree["pushes_csv_bytes"])
        second = Serving(tmp_path, strategy, 2, checkpoints=checkpoints, endpoint=first.endpoint)
        second.server.restore(found.tree, Restart("", released))
        second.start()
    ended = second.finish()
    assert (ended.steps, ended.samples) == (1000, 1000)
    assert len(second.events("join")) == 2
    rows = traces.read_trace(tmp_path, "pushes")
    assert len(rows) == ended.pushes == len(rows.unique(["worker", "seq"]))
    assert rows["t_s"].is_sorted()
    assert float(second.server.core.state.x[0]) == pytest.approx(float((rows["weight"] * rows["n_steps"]).sum()))


@pytest.mark.slow
def test_who_is_silent_is_dropped_and_a_barrier_goes_on(tmp_path: Path) -> None:
    strategy = registry.build("bsp", {})
    serving = Serving(tmp_path, strategy, 2, recovery=Recovery(worker_timeout_s=0.6))
    serving.start()
    silent = Client(serving.endpoint, "worker", 1)
    silent.send(Pull(fingerprint="f"))
    with working(serving.endpoint, strategy, 1, 5, 0.0):
        assert silent._heart is not None
        while not serving.server.core.started:
            time.sleep(0.01)
        silent._heart.stop()
    assert [event.rank for event in serving.events("drop")] == [1]
    assert isinstance(silent.receive(torch.empty(3), 5000), State)
    with pytest.raises(DroppedError):
        silent.receive(torch.empty(3), 5000)
    silent._heart = None
    silent.close()
    ended = serving.finish()
    assert ended.steps == 5


class Frame(bytes):
    """A frame as the socket hands it over."""

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)

    @property
    def bytes(self) -> bytes:
        return self


@contextmanager
def server_alone(folder: Path, n_workers: int, **more: Any) -> Iterator[Server]:
    """A server that nobody runs."""
    serving = Serving(folder, Asp(), n_workers, **more)
    try:
        yield serving.server
    finally:
        serving._socket.close(linger=0)
        serving.trace.close()


def greet(server: Server, incarnation: int, rank: int = -1, role: Any = "worker") -> None:
    hello = Hello(protocol=PROTOCOL_VERSION, role=role, incarnation=incarnation, rank=rank)
    server._receive(cast("Any", [Frame(bytes([incarnation])), Frame(encode(hello))]))


def test_two_who_come_for_two_that_died_get_two_ranks(tmp_path: Path) -> None:
    with server_alone(tmp_path, 3) as server:
        for rank in range(3):
            greet(server, 1 + rank, rank)
        for rank in (0, 2):
            server._bury(rank, returns=False)
        greet(server, 11)
        greet(server, 12)  # before the other has pulled
        assert {rank: peer.incarnation for rank, peer in server._workers.items()} == {0: 11, 1: 2, 2: 12}


def test_who_says_that_it_leaves_is_not_silent_however_long_a_link_holds_that(tmp_path: Path) -> None:
    with server_alone(tmp_path, 1, recovery=Recovery(worker_timeout_s=1.0)) as server:
        greet(server, 1)
        peer = server._workers[0]
        server._profile = ClusterProfile(step_s=0.1, link=Link(1.0))
        server._released = time.monotonic()
        server._receive(cast("Any", [Frame(b"\1"), Frame(encode(Leave(reason="done")))]))
        assert (peer.held, peer.left) == (1, False)
        server._look_for_silence(time.monotonic() + 100)
        assert not server._attendance.lost


def test_a_checkpoint_keeps_what_the_evaluator_and_the_time_before_have_cost(tmp_path: Path) -> None:
    with server_alone(tmp_path, 1) as server:
        greet(server, 1, role="evaluator")
        evaluator_bytes = server._remembered()["evaluator_bytes"]
        assert isinstance(evaluator_bytes, int)
        assert evaluator_bytes > 40
        server._forget(server._incarnations[1])
        assert server._remembered()["evaluator_bytes"] == evaluator_bytes
        server._cpu_before_s = 12.0
        assert server._remembered()["cpu_s"] == 12.0, "before the release of a run that is resumed"


def test_a_server_waits_for_nobody_who_was_done_before_the_one_whose_place_it_takes(tmp_path: Path) -> None:
    with server_alone(tmp_path, 2) as server:
        for rank in (0, 1):
            greet(server, 1 + rank, rank)
            server._pull(server._workers[rank], Pull(fingerprint="f"))
        server._leave(server._workers[0], Leave(reason="done"))
        remembered = server._remembered()
    assert remembered["done"] == [0]
    (tmp_path / "next").mkdir()
    with server_alone(tmp_path / "next", 2) as server:
        server.restore(cast("Any", remembered), Restart("", time.monotonic()))
        assert [server._attendance.is_missing(rank) for rank in (0, 1)] == [False, True]
        greet(server, 5, 1)
        server._pull(server._workers[1], Pull(fingerprint="f"))
        server._leave(server._workers[1], Leave(reason="done"))
        assert server._end_s is not None


def test_what_a_dead_server_had_sent_and_lost_is_counted(tmp_path: Path) -> None:
    with server_alone(tmp_path, 1) as server:
        greet(server, 1)
        server._pull(server._workers[0], Pull(fingerprint="f"))
        remembered = server._remembered() | {"pushes": {0: 5}}
        status = server._status()
    worker = msgspec.structs.replace(status.workers[0], pushes=8, rx_bytes=900, tx_bytes=800, rx_frames=9, tx_frames=7)
    status = msgspec.structs.replace(status, cpu_s=3.0, evaluator_bytes=70, workers=[worker])
    (tmp_path / "next").mkdir()
    with server_alone(tmp_path / "next", 1) as server:
        server.restore(cast("Any", remembered), Restart("", time.monotonic(), status))
        assert server._lost_pushes == 3
        assert server._traffic[0] == Traffic(900, 800, 9, 7)
        assert (server._evaluator_bytes(), server._cpu_before_s) == (70, 3.0)


@dataclass
class Secretive(ServerState):
    """Keeps what no checkpoint can hold."""

    secret: object = field(default_factory=object)


@dataclass(frozen=True)
class Unsavable(Asp):
    """asp with a state that cannot be saved."""

    def init_server(self, x0: Vec, n_workers: int) -> Any:
        return Secretive(x0)


def test_a_state_that_cannot_be_saved_is_told_and_the_model_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    serving = Serving(tmp_path, Unsavable(), 1, checkpoints=checkpoints)
    serving.server.core.state.x.fill_(3.0)
    serving.server.save()
    (event,) = serving.events("checkpoint")
    assert event.detail.startswith("without the strategy's state: ")
    assert "secret" in event.detail
    assert serving.server._next_checkpoint_s == math.inf, "it would be said again and again"
    assert read_state(tmp_path).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(UserError, match="holds the model alone"):
        roles.recall(checkpoints, Unsavable(), cast("Any", None))
    serving._socket.close(linger=0)
    serving.trace.close()


def test_news_of_a_worker_that_never_came_is_taken(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Asp(), 2)
    tell(serving.pipe, Gone("worker", 1, returns=True))
    serving.server._hear()
    assert serving.server._attendance.is_missing(1)
    tell(serving.pipe, Gone("worker", 1))
    serving.server._hear()
    assert serving.server._attendance.lost == {1}
    serving._socket.close(linger=0)
    serving.trace.close()


@contextmanager
def dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A bare connection."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)


def say(socket: zmq.Socket[bytes], message: FromClient, vector: torch.Tensor | None = None) -> None:
    socket.send_multipart([encode(message), *([] if vector is None else [raw(vector)])])


def hear_kind(socket: zmq.Socket[bytes]) -> str:
    return type(decode_from_server(socket.recv_multipart()[0])).__name__


def test_a_push_over_a_connection_that_broke_is_dropped_wherever_its_vector_lies(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Asp(), 1)
    serving.start()
    with dealer(serving.endpoint) as client:
        for frames in ([], [b"x" * 12], [b"x" * 6]):  # shared memory, float32, float16
            client.send_multipart([encode(push(1)), *frames])
            assert hear_kind(client) == "Dropped"
    serving.kill()
    serving.trace.close()


def test_who_has_had_its_reply_over_the_new_connection_gets_no_second_one(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Bsp(), 2)
    serving.start()
    vector = torch.ones(3)
    greeting = Hello(protocol=PROTOCOL_VERSION, role="worker", incarnation=7, rank=0)
    with dealer(serving.endpoint) as first, dealer(serving.endpoint) as second, dealer(serving.endpoint) as other:
        say(first, greeting)
        say(first, Pull(fingerprint="f"))
        say(first, Beat(incarnation=7, main=True))
        assert [hear_kind(first), hear_kind(first)] == ["Welcome", "Alive"], "so that its pull has been read"
        say(second, greeting)  # its connection is gone before the start
        assert hear_kind(second) == "Welcome"
        say(other, Hello(protocol=PROTOCOL_VERSION, role="worker", incarnation=8, rank=1))
        say(other, Pull(fingerprint="f"))
        assert [hear_kind(other), hear_kind(other), hear_kind(second)] == ["Welcome", "State", "State"]
        say(second, Pull(fingerprint="f"))
        say(second, push(1), vector)
        say(second, Beat(incarnation=7, main=True))
        assert hear_kind(second) == "Alive"
        say(first, greeting)  # and once more, while it waits for the round
        assert hear_kind(first) == "Welcome"
        say(other, push(1), vector)
        assert [hear_kind(other), hear_kind(first)] == ["State", "State"]
        say(first, push(1), vector)
        say(first, Beat(incarnation=7, main=True))
        assert hear_kind(first) == "Alive"
        say(second, Beat(incarnation=7, main=True))
        assert hear_kind(second) == "Dropped"
    serving.kill()
    serving.trace.close()


def test_who_was_stopped_for_long_does_not_take_the_server_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(tmp_path, Asp(), 1)
    serving.start()
    away_s = 0.0
    monkeypatch.setattr("sapus_cli.drivers.heart.time", SimpleNamespace(monotonic=lambda: time.monotonic() + away_s))
    client = Client(serving.endpoint, "worker", 0)
    heart = client._heart
    assert heart is not None
    before_s, away_s = heart._awake_s, SILENCE_S + 1
    while heart._awake_s < before_s + SILENCE_S:
        assert client.receive(None, 10) is None
    assert heart.silent_s < SILENCE_S
    client.close()
    serving.kill()
    serving.trace.close()


@pytest.mark.slow
def test_who_comes_back_after_the_end_is_sent_away(tmp_path: Path) -> None:
    strategy = registry.build("asp", {})
    serving = Serving(tmp_path, strategy, 2, recovery=Recovery(worker_timeout_s=0.6))
    serving.start()
    silent = Client(serving.endpoint, "worker", 1)
    silent.send(Pull(fingerprint="f"))
    with working(serving.endpoint, strategy, 1, 5, 0.0):
        assert silent._heart is not None
        silent._heart.stop()
    while len(serving.events("leave")) < 2:
        time.sleep(0.02)
    silent._heart = None
    silent.renew()
    silent.send(Pull(fingerprint="f"))
    assert silent.receive(torch.empty(3), 5000) == Stop(flush=False)
    silent.send(Leave())
    silent.close()
    assert serving.finish().steps == 5


def test_a_late_leave_does_not_open_again_what_is_over(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Asp(), 1)
    serving.server.core.started = True
    serving.server._end_if_all_left()
    serving.server._evaluated(Evaluated(0.0, 0, 0, loss=1.0, accuracy=0.5, final=True))
    serving.server._end_if_all_left()
    assert serving.server._over
    serving._socket.close(linger=0)
    serving.trace.close()


@pytest.mark.parametrize("role", ["worker", "evaluator"])
def test_who_takes_the_place_of_a_dead_one_may_come_before_the_news_of_the_death(tmp_path: Path, role: str) -> None:
    serving = Serving(tmp_path, Asp(), 1)
    for incarnation in (1, 2):
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, incarnation=incarnation, rank=0)  # type: ignore[arg-type]
        serving.server._greet(bytes([incarnation]), hello, 0)
        tell(serving.pipe, Gone(role, 0, returns=True))
    assert set(serving.server._incarnations) == {2}
    serving._socket.close(linger=0)
    serving.trace.close()


def test_the_last_result_is_on_disk_before_the_server_hears_of_it(tmp_path: Path) -> None:
    rows: list[int] = []

    def send(message: Any) -> None:
        if isinstance(message, Evaluated):
            rows.append(len(traces.read_trace(tmp_path, "evals")))

    state = State(version=3, t_s=1.0, final=True)
    client: Any = SimpleNamespace(welcome=SimpleNamespace(elements=1), send=send, receive=lambda *_: state)
    tests: Any = SimpleNamespace(evaluate=lambda _: (1.0, 0.5, 0.25))
    with traces.Trace(tmp_path / "evals.csv", traces.EVALS) as trace:
        trace.tick(time.monotonic())
        run_evaluator(client, tests, trace, every_s=0.1, n_train=10)
    assert rows == [1]


# What the launcher makes of it.


def launcher(tmp_path: Path) -> Launcher:
    launcher = Launcher(RunConfig(strategy="asp", steps=1, workers=2), tmp_path, None, Quiet)
    launcher._folder, launcher._bound = tmp_path, "tcp://127.0.0.1:1"
    return launcher


def child(launcher: Launcher, role: str, exitcode: int | None, rank: int = 0) -> tuple[Any, Connection]:
    """A child that was, and its end of the pipe."""
    ours, theirs = multiprocessing.Pipe()
    process: Any = SimpleNamespace(exitcode=exitcode, pid=1, kill=int, join=int, is_alive=lambda: exitcode is None)
    launcher._children.append(_Child(role, rank, process, ours))
    return launcher._children[-1], theirs


def test_a_server_that_has_not_begun_hears_afterwards_who_died_meanwhile(tmp_path: Path) -> None:
    launched = launcher(tmp_path)
    server, pipe = child(launched, "server", None)
    launched._tell_gone(Gone("worker", 1, returns=True))
    assert not pipe.poll()
    launched._begin(server)
    assert [hear(pipe), hear(pipe)] == [Begin(str(tmp_path), "tcp://127.0.0.1:1"), Gone("worker", 1, returns=True)]
    launched._tell_gone(Gone("worker", 0))
    assert hear(pipe) == Gone("worker", 0)


def test_the_last_words_of_a_dead_server_count(tmp_path: Path) -> None:
    launched = launcher(tmp_path)
    _, pipe = child(launched, "server", -9)
    core = ServerCore(Asp(), torch.zeros(1), 1)
    ended = Ended(1.0, core.version, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, "", 0, None)
    tell(pipe, ended)
    launched._look_for_dead()
    assert launched._ended == ended


def test_who_ended_without_being_heard_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launcher(tmp_path)
    again: list[tuple[str, int]] = []
    monkeypatch.setattr(launched, "_start_child_again", lambda *who: again.append(who))
    monkeypatch.setattr(launched, "_note_event", lambda _: None)
    server, pipe = child(launched, "server", None)
    for rank in (0, 1):
        child(launched, "worker", 0, rank)
    evaluator, _ = child(launched, "evaluator", 0)
    launched._absent = {0, 1}
    launched._look_for_done()
    assert again == [], "there is no server yet that could have heard them"
    server.begun = True
    tell(pipe, Happened(0.0, "join", "worker", 1))  # not read yet
    launched._look_for_done()
    assert again == [("worker", 0)]
    evaluator.ended_s -= LAST_CHECKPOINT_S + 1
    launched._look_for_done()
    assert again == [("worker", 0), ("evaluator", 0)], "a server that has its final result ends within this time"


def test_a_last_word_that_got_lost_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launcher(tmp_path)
    again: list[tuple[str, int]] = []
    monkeypatch.setattr(launched, "_start_child_again", lambda *who: again.append(who))
    monkeypatch.setattr(launched, "_note_event", lambda _: None)
    server, pipe = child(launched, "server", None)
    server.begun = True
    worker, _ = child(launched, "worker", 0, 1)
    tell(pipe, Happened(0.0, "join", "worker", 1))
    launched._look_for_done()
    worker.ended_s -= END_S + 1
    launched._look_for_done()
    assert again == [("worker", 1)]
    assert hear(pipe) == Gone("worker", 1, returns=True)


def test_a_server_that_hangs_is_killed_unless_we_stood_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launcher(tmp_path)
    events: list[str] = []
    monkeypatch.setattr(launched, "_note_event", lambda event: events.append(event.event))
    server, _ = child(launched, "server", None)
    killed: list[str] = []
    server.process.kill = lambda: killed.append("server")
    launched._released_s = launched._awake_s = 0.0  # a long time ago, in which nobody looked
    launched._look_for_silence()
    assert (killed, events) == ([], [])
    launched._server_silent_s = HANGS_S
    launched._look_for_silence()
    assert (killed, events) == (["server"], ["drop"])
    launched._look_for_silence()
    assert killed == ["server"], "the next one has its own time"


def test_a_worker_that_is_due_with_the_server_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launcher(tmp_path)
    started: list[int] = []

    def start_worker(rank: int) -> Any:
        started.append(rank)
        return child(launched, "worker", None, rank)[0]

    monkeypatch.setattr(launched, "_start_worker", start_worker)
    monkeypatch.setattr(launched, "_start_server", lambda _: None)
    monkeypatch.setattr(launched, "_note_event", lambda _: None)
    child(launched, "worker", 0, 0)  # had ended
    launched._due = [(0.0, "server", 0), (0.0, "worker", 1)]
    launched._start_again()
    assert started == [1]
    launched._bring_back({0, 1})
    assert started == [1, 0]
    launched._gone["worker", 1] = Gone("worker", 1)  # it is lost for good
    launched._children.clear()
    launched._bring_back({1})
    assert started == [1, 0]


def test_the_pause_before_a_restart_has_a_bound() -> None:
    assert [pause_s(n) for n in (0, 1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
