"""The cores: numbers worked out by hand, every rule, and any order of events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from cores import InMemory
from hypothesis import given, settings
from hypothesis import strategies as st

from sapus_cli.codec import Declined, State
from sapus_cli.codec import Push as PushMessage
from sapus_cli.errors import DeadlockError, DivergedError, LocalProtocolError, ProtocolError, RemoteProtocolError
from sapus_cli.protocol import Phase, ServerCore, WorkerCore
from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec
from strategies.asp import Asp
from strategies.bsp import Bsp
from strategies.local_sgd import LocalSgd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TARGETS = (2.0, 4.0)


def toward_targets(rank: int, y: Vec) -> Vec:
    """Gradient of (y - c)^2 / 2 with c = 2 at worker 0 and 4 at worker 1."""
    return y - TARGETS[rank]


def two_workers(strategy: object, steps: int) -> InMemory:
    return InMemory(strategy, torch.zeros(1), 2, toward_targets, lr=0.5, steps=steps)


def push(seq: int, version: int = 0, n_steps: int = 1, **more: object) -> PushMessage:
    fields = {"n_samples": 32, "loss": 1.0, "step_s": 0.1, "exchange_s": 0.0} | more
    return PushMessage(seq=seq, version=version, n_steps=n_steps, **fields)  # type: ignore[arg-type]


def started(strategy: object, n: int = 2) -> ServerCore:
    core = ServerCore(strategy, torch.zeros(1), n)  # type: ignore[arg-type]
    for rank in range(n):
        core.join(rank, 0.0)
    return core


# Numbers by hand. lr 0.5, from 0: each step halves the distance to the worker's own target.


def test_bsp_two_rounds() -> None:
    # round 1: 0 -> 1 and 0 -> 2, mean 1.5; round 2: 1.5 -> 1.75 and 1.5 -> 2.75, mean 2.25
    assert two_workers(Bsp(), 1).run().x.item() == 1.5
    run = two_workers(Bsp(), 2).run()
    assert run.x.item() == 2.25
    assert [(row.worker, row.n_steps, row.staleness, row.info["weight"]) for row in run.rows] == [
        (0, 1, 0, 0.5),
        (1, 1, 0, 0.5),
    ] * 2


@dataclass
class Heard:
    """Worker state: the hints that came, with the local state at that moment, and what steps and exchanges took."""

    hints: list[tuple[dict[str, float], float]]
    steps: list[tuple[float, float]]


@dataclass(frozen=True)
class Greeting(Strategy[Heard, ServerState]):
    """Pushes every step; the first state comes with a hint, if there is one to give."""

    hint: float | None

    def init_worker(self, x0: Vec, worker: int) -> Heard:
        return Heard([], [])

    def after_step(self, w: Heard, step: Step) -> Push:
        w.steps.append((step.step_s, step.exchange_s))
        return Push()

    def after_reply(self, w: Heard, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        w.hints.append((dict(hint), local.item()))
        local.copy_(pulled)

    def init_server(self, x0: Vec, n_workers: int) -> ServerState:
        return ServerState(x0)

    def on_push(self, s: ServerState, msg: Received) -> Sequence[Reply]:
        return (Reply(msg.worker),)

    def on_join(self, s: ServerState, worker: int) -> Sequence[Reply]:
        return (Reply(worker, hint={} if self.hint is None else {"first": self.hint}),)


@pytest.mark.parametrize(("hint", "first"), [(7.5, [({"first": 7.5}, 3.0)]), (None, [])])
def test_a_hint_on_the_first_state_reaches_the_worker(
    hint: float | None, first: list[tuple[dict[str, float], float]]
) -> None:
    strategy = Greeting(hint)
    server = ServerCore(strategy, torch.full((1,), 3.0), 1)
    for _ in range(2):  # the second time as after a death
        worker = WorkerCore(strategy, torch.zeros(1), 0)
        worker.begin(server.progress(0).steps, server.progress(0).seq)
        worker.pull("f")
        (joined,) = server.join(0, 0.0)
        assert isinstance(joined.message, State)
        assert joined.vector is not None
        worker.incoming.copy_(joined.vector)
        worker.on_state(joined.message, 0.0)
        heard = worker._state
        assert isinstance(heard, Heard)
        assert heard.hints == first
        # A step of 2 s; the exchange takes from 10 s to 14 s.
        sent = worker.after_step(1.0, 32, 2.0, 10.0, last=False)
        assert sent is not None
        (replied,) = server.push(0, sent, worker.outgoing, 12.0, 8)
        assert isinstance(replied.message, State)
        worker.on_state(replied.message, 14.0)
        assert heard.hints == [*first, ({}, 3.0)]
        worker.after_step(1.0, 32, 0.5, 15.0, last=False)
        assert heard.steps == [(2.0, 0.0), (0.5, 4.0)]
        server.leave(0, 20.0)


def test_local_sgd_two_rounds_of_two_steps() -> None:
    # round 1: 0 -> 1 -> 1.5 and 0 -> 2 -> 3, mean 2.25; round 2: 2.25 -> 2.0625 and 2.25 -> 3.5625, mean 2.8125
    assert two_workers(LocalSgd(h=2), 4).run().x.item() == 2.8125


def test_the_last_push_carries_the_tail() -> None:
    # 3 steps with H = 2: the third is pushed alone. From 2.25: -> 2.125 and -> 3.125, mean 2.625
    run = two_workers(LocalSgd(h=2), 3).run()
    assert run.x.item() == 2.625
    assert [row.n_steps for row in run.rows] == [2, 2, 1, 1]
    assert [row.info.get("reason") for row in run.rows] == [None, None, "last", "last"]


def test_asp_applies_each_push_at_once_at_weight_one_half() -> None:
    run = two_workers(Asp(), 2)
    order = iter(
        [("send", 0), ("send", 1), ("reply", 0), ("reply", 1)]
        + [("step", 0), ("step", 1), ("send", 0), ("send", 1), ("reply", 0), ("reply", 1)] * 2
        + [("leave", 0), ("leave", 1)]
    )
    # u0 = 1: x = 0.5; u1 = 2: x = 1.5. Worker 0 pulled 0.5, u0 = 0.75: x = 1.875; worker 1 pulled 1.5, u1 = 1.25: 2.5
    run.run(lambda _: next(order))
    assert run.x.item() == 2.5
    assert [(row.worker, row.version, row.staleness) for row in run.rows] == [
        (0, 0, 0),
        (1, 1, 1),
        (0, 2, 1),
        (1, 3, 1),
    ]


def test_asp_sum_moves_twice_as_far() -> None:
    run = two_workers(Asp(scale="sum"), 1).run()
    # u0 = 1: x = 1; worker 1 had pulled 0: u1 = 2: x = 3
    assert run.x.item() == 3.0
    assert {row.info["weight"] for row in run.rows} == {1.0}


def test_local_sgd_with_h_1_equals_bsp_to_the_last_bit() -> None:
    torch.manual_seed(3)
    x0, centre = torch.randn(50), torch.randn(4, 50)
    make = {"gradient": lambda rank, y: torch.sin(y) * 0.3 + y - centre[rank], "lr": 0.07, "steps": 20}
    one = InMemory(Bsp(), x0, 4, **make).run()  # type: ignore[arg-type]
    other = InMemory(LocalSgd(h=1), x0, 4, **make).run()  # type: ignore[arg-type]
    assert torch.equal(one.x, other.x)
    assert not torch.equal(one.x, x0)


@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_barrier_gives_the_same_bits_in_any_order_of_events(random: object, h: int) -> None:
    torch.manual_seed(1)
    x0, centre = torch.randn(9), torch.randn(3, 9)
    make = {"gradient": lambda rank, y: torch.sin(y) + y - centre[rank], "lr": 0.07, "steps": 7}
    straight = InMemory(LocalSgd(h=h), x0, 3, **make).run()  # type: ignore[arg-type]
    shuffled = InMemory(LocalSgd(h=h), x0, 3, **make).run(random.choice)  # type: ignore[arg-type, attr-defined]
    assert torch.equal(straight.x, shuffled.x)


# Overlap: the worker keeps stepping while its push is in flight.


@dataclass(frozen=True)
class Overlapped(Strategy[None, ServerState]):
    """Pushes every second step, and does not wait."""

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        return Push(wait=False) if step.k >= 2 else None

    def init_server(self, x0: Vec, n_workers: int) -> ServerState:
        return ServerState(x0)

    def on_push(self, s: ServerState, msg: Received) -> Sequence[Reply]:
        s.x.add_(msg.vector)
        return (Reply(msg.worker, hint={"n": 1.0}),)


def test_steps_in_flight_are_put_on_top_of_what_is_pulled() -> None:
    worker = WorkerCore(Overlapped(), torch.zeros(1), 0)
    worker.pull("f")
    worker.incoming.copy_(torch.tensor([10.0]))
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)

    def step(move: float, *, last: bool = False) -> PushMessage | None:
        worker.local.add_(move)
        return worker.after_step(2.0, 32, 0.5, 1.0, last=last)

    assert step(1.0) is None
    first = step(1.0)
    assert first is not None
    assert (first.n_steps, worker.outgoing.item(), worker.phase) == (2, 2.0, Phase.COMPUTING)
    assert step(0.25) is None
    assert step(0.25) is None, "one exchange at most is in flight"
    worker.incoming.copy_(torch.tensor([20.0]))
    assert worker.on_state(State(version=5, t_s=0.0), 3.0) is None
    assert worker.local.item() == 20.5
    second = step(0.25)
    assert second is not None
    assert (second.n_steps, second.version, worker.outgoing.item(), second.exchange_s) == (3, 5, 0.75, 2.0)


def test_the_tail_taken_in_flight_is_pushed_after_the_reply() -> None:
    run = InMemory(Overlapped(), torch.zeros(1), 1, lambda _r, _y: torch.ones(1), lr=1.0, steps=5)
    order = iter([("send", 0), ("reply", 0), *[("step", 0)] * 5, *[("send", 0), ("reply", 0)] * 2, ("leave", 0)])
    run.run(lambda _: next(order))
    assert run.x.item() == -5.0
    assert [row.n_steps for row in run.rows] == [2, 3]


@given(st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 4))
def test_every_step_reaches_the_server_once_with_overlap_in_any_order(random: object, steps: int, n: int) -> None:
    run = InMemory(Overlapped(), torch.zeros(1), n, lambda _r, _y: torch.ones(1), lr=1.0, steps=steps)
    run.run(random.choice)  # type: ignore[attr-defined]
    assert run.x.item() == -steps * n
    assert run.server.steps == steps * n == sum(row.n_steps for row in run.rows)


# The worker's rules.


def test_a_worker_that_is_told_to_stop_pushes_what_it_has_and_ends() -> None:
    worker = WorkerCore(LocalSgd(h=100), torch.zeros(1), 0)
    worker.pull("f")
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    worker.after_step(1.0, 32, 0.1, 0.0, last=False)
    worker.stop()
    tail = worker.after_step(1.0, 32, 0.1, 0.0, last=False)
    assert tail is not None
    assert tail.last
    assert tail.n_steps == 2
    worker.on_state(State(version=1, t_s=0.0), 0.0)
    assert worker.phase is Phase.DONE


def test_a_worker_with_nothing_to_push_stops_at_once() -> None:
    worker = WorkerCore(LocalSgd(), torch.zeros(1), 0)
    worker.pull("f")
    worker.stop()
    phases = [worker.phase]
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    assert [*phases, worker.phase] == [Phase.WAITING, Phase.DONE]


def test_time_the_server_withheld_is_not_exchange_time() -> None:
    worker = WorkerCore(Bsp(), torch.zeros(1), 0)
    worker.pull("f")
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    worker.after_step(1.0, 32, 0.1, 10.0, last=False)
    worker.on_state(State(version=1, t_s=0.0, held_s=3.0), 15.0)
    message = worker.after_step(1.0, 32, 0.1, 16.0, last=False)
    assert message is not None
    assert message.exchange_s == 2.0


def test_a_worker_refuses_what_it_did_not_ask_for() -> None:
    worker = WorkerCore(Bsp(), torch.zeros(1), 0)
    with pytest.raises(RemoteProtocolError):
        worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    with pytest.raises(LocalProtocolError):
        worker.after_step(1.0, 1, 0.1, 0.0, last=False)
    worker.pull("f")
    with pytest.raises(LocalProtocolError):
        worker.pull("f")
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    with pytest.raises(RemoteProtocolError):
        worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)


# The server's rules.


def test_nobody_starts_before_all_have_pulled_and_then_all_do() -> None:
    core = ServerCore(Asp(), torch.zeros(1), 3)
    assert core.join(2, 0.0) == []
    assert core.join(0, 0.0) == []
    assert [reply.worker for reply in core.join(1, 0.0)] == [0, 1, 2]


def test_a_retransmitted_push_is_applied_once() -> None:
    core = started(Asp())
    core.push(0, push(1), torch.tensor([4.0]), 1.0, 0)
    again = core.push(0, push(1), torch.tensor([4.0]), 2.0, 0)
    assert core.state.x.item() == 2.0
    assert [(reply.worker, reply.row) for reply in again] == [(0, None)]
    core.push(0, push(2, 1), torch.tensor([4.0]), 3.0, 0)
    assert core.push(0, push(1), torch.tensor([4.0]), 4.0, 0) == []
    assert (core.state.x.item(), core.version, core.received) == (4.0, 2, 2)


def test_a_retransmitted_push_that_still_waits_goes_on_waiting() -> None:
    core = started(Bsp())
    assert core.push(0, push(1), torch.tensor([4.0]), 1.0, 0) == []
    assert core.push(0, push(1), torch.tensor([4.0]), 2.0, 0) == []
    assert len(core.push(1, push(1), torch.tensor([2.0]), 3.0, 0)) == 2
    assert core.state.x.item() == 3.0


@pytest.mark.parametrize(
    ("worker", "message", "says"),
    [
        (5, push(1), "before it pulled"),
        (0, push(2), "after push 0"),
        (0, push(1, version=1), "claims version 1"),
    ],
)
def test_a_push_that_breaks_a_rule_is_refused_and_changes_nothing(worker: int, message: PushMessage, says: str) -> None:
    core = started(Asp())
    with pytest.raises(RemoteProtocolError, match=says):
        core.push(worker, message, torch.tensor([1.0]), 0.0, 0)
    assert core.state.x.item() == 0.0
    assert core.version == 0
    core.push(0, push(1), torch.tensor([1.0]), 0.0, 0)
    assert core.state.x.item() == 0.5


def test_facts_that_the_strategy_does_not_know_are_refused_and_change_nothing() -> None:
    core = started(Asp())
    with pytest.raises(RemoteProtocolError, match=r"'zzz' is not in Asp.columns"):
        core.push(0, push(1, info={"zzz": 1.0}), torch.tensor([1.0]), 0.0, 0)
    assert (core.state.x.item(), core.version) == (0.0, 0)
    core.push(0, push(1, info={"reason": "mine"}), torch.tensor([1.0]), 0.0, 0)
    assert core.state.x.item() == 0.5


def test_the_last_push_of_a_strategy_without_reasons_says_that_it_is_the_last() -> None:
    run = two_workers(Bsp(), 2).run()
    assert [row.info.get("reason") for row in run.rows] == [None, None, "last", "last"]


def test_no_second_push_before_the_reply() -> None:
    core = started(Bsp())
    core.push(0, push(1), torch.tensor([1.0]), 0.0, 0)
    with pytest.raises(RemoteProtocolError, match="while it waited"):
        core.push(0, push(2), torch.tensor([1.0]), 0.0, 0)


def test_who_leaves_is_not_waited_for_and_held_time_is_recorded() -> None:
    core = started(Bsp(), 3)
    core.push(0, push(1), torch.tensor([1.0]), 1.0, 0)
    core.push(2, push(1), torch.tensor([3.0]), 2.0, 0)
    replies, row = core.leave(1, 4.0)
    assert row is None
    assert [(reply.worker, reply.row.held_s if reply.row else None) for reply in replies] == [(0, 3.0), (2, 2.0)]
    assert core.state.x.item() == 2.0


def test_the_push_of_who_leaves_before_its_reply_still_counts() -> None:
    core = started(Bsp(), 2)
    core.push(0, push(1), torch.tensor([1.0]), 1.0, 0)
    replies, row = core.leave(0, 4.0)
    assert replies == []
    assert row is not None
    assert row.held_s == 3.0
    core.push(1, push(1), torch.tensor([3.0]), 5.0, 0)
    assert core.state.x.item() == 2.0


def test_joins_and_leaves_that_cannot_be_are_refused() -> None:
    core = started(Asp())
    core.push(0, push(1), torch.tensor([2.0]), 1.0, 0)
    for rank in (0, 2, -1):
        with pytest.raises(RemoteProtocolError):
            core.join(rank, 0.0)
    core.leave(0, 0.0)
    with pytest.raises(RemoteProtocolError):
        core.leave(0, 0.0)


# Pushes that are not finite.


@pytest.mark.parametrize(("loss", "finite"), [(math.nan, True), (math.inf, True), (1.0, False)])
def test_a_push_that_is_not_finite_is_declined_and_changes_nothing(loss: float, *, finite: bool) -> None:
    core = started(Asp())
    (reply,) = core.push(0, push(1, loss=loss, finite=finite), torch.tensor([math.nan]), 1.0, 0)
    assert (reply.worker, reply.message, reply.vector, reply.row) == (0, Declined(seq=1), None, None)
    assert (core.state.x.item(), core.version, core.steps, core.declined) == (0.0, 0, 0, 1)
    core.push(0, push(2), torch.tensor([4.0]), 2.0, 0)
    assert core.state.x.item() == 2.0


@pytest.mark.parametrize(
    ("wire", "y", "finite"),
    [
        (torch.float32, 7.0, True),
        (torch.float32, math.nan, False),
        (torch.float32, math.inf, False),
        (torch.float32, 70_000.0, True),
        (torch.bfloat16, 70_000.0, True),
        (torch.float16, 65_504.0, True),  # the largest
        (torch.float16, 70_000.0, False),
        (torch.float16, -math.inf, False),
    ],
)
def test_a_worker_says_whether_what_it_sends_is_finite(wire: torch.dtype, y: float, *, finite: bool) -> None:
    worker = pulled(torch.zeros(2), wire)
    worker.local[1] = y
    sent = worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    assert sent is not None
    assert sent.finite is finite


def pulled(x0: torch.Tensor, wire: torch.dtype) -> WorkerCore:
    """A worker that has pulled x0 and pushes after every step."""
    worker = WorkerCore(Asp(), torch.zeros_like(x0), 0, wire=wire)
    worker.pull("f")
    worker.incoming.copy_(x0)
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    return worker


def test_what_a_narrow_wire_cuts_off_is_in_the_next_push() -> None:
    # bfloat16 has 8 bits of significand: next to 1 its numbers are 1/128 apart, next to 2 they are 1/64.
    worker = pulled(torch.zeros(1), torch.bfloat16)
    sent = []
    for _ in range(4):
        worker.local.add_(1 + 1 / 512)
        worker.after_step(1.0, 8, 0.1, 1.0, last=False)
        sent.append(worker.outgoing.item())
        worker.incoming.zero_()
        worker.on_state(State(version=0, t_s=0.0), 1.0)
    # 1 + 1/512 becomes 1 and leaves 1/512, 2/512, 3/512 (nearer to 4/512 = 1/128, then -1/512), 0
    assert sent == [1.0, 1.0, 1 + 1 / 128, 1.0]


def test_what_was_cut_off_a_push_that_is_declined_is_not_forgotten() -> None:
    worker = pulled(torch.zeros(1), torch.bfloat16)
    worker.local.fill_(1 + 1 / 512)
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0), 1.0)
    for value, loss in ((math.nan, 1.0), (1 + 1 / 512, math.nan)):
        worker.local.fill_(value)
        sent = worker.after_step(loss, 8, 0.1, 1.0, last=False)
        assert sent is not None
        worker.on_declined(Declined(seq=sent.seq))
    worker.local.fill_(1 + 1 / 512)
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    assert worker.outgoing.item() == 1.0  # 1 + 2/512 lies half-way, which goes to the even one
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0), 1.0)
    worker.local.fill_(1.0)
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    assert worker.outgoing.item() == 1.0  # 1 + 2/512 again
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0), 1.0)
    worker.local.fill_(1 + 1 / 512)
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    assert worker.outgoing.item() == 1 + 1 / 128


def test_what_was_cut_off_before_a_fresh_state_is_forgotten() -> None:
    worker = pulled(torch.zeros(1), torch.bfloat16)
    worker.local.fill_(1 + 2 / 512)  # half-way, goes to 1 and leaves 2/512
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 1.0)
    worker.local.fill_(1 + 1 / 512)
    worker.after_step(1.0, 8, 0.1, 1.0, last=False)
    assert worker.outgoing.item() == 1.0, "1 + 3/512 would have become 1 + 1/128"


def test_a_worker_takes_over_what_a_narrow_wire_left_of_the_state() -> None:
    worker = pulled(torch.tensor([1 + 1 / 512, 3.0]), torch.bfloat16)
    assert worker.local.tolist() == [1.0, 3.0]
    assert worker.local.dtype == torch.float32


def test_the_server_adds_narrow_vectors_in_full_precision() -> None:
    core = started(Asp(scale="sum"))
    core.push(0, push(1), torch.tensor([256.0], dtype=torch.bfloat16), 1.0, 0)
    core.push(1, push(1, 1), torch.tensor([1.0], dtype=torch.bfloat16), 1.0, 0)
    assert core.state.x.item() == 257.0


def test_the_tenth_in_a_row_is_answered_with_a_fresh_state() -> None:
    core = started(Asp())
    core.push(1, push(1), torch.tensor([6.0]), 0.0, 0)
    answers = [core.push(0, push(seq, loss=math.nan), torch.ones(1), 1.0, 0)[0] for seq in range(1, 11)]
    assert [type(answer.message) for answer in answers] == [Declined] * 9 + [State]
    last = answers[-1]
    assert isinstance(last.message, State)
    assert last.message.fresh
    assert last.vector is not None
    assert last.vector.item() == 3.0
    core.push(0, push(11, 1), torch.ones(1), 2.0, 0)
    assert core.push(0, push(12, 2, loss=math.nan), torch.ones(1), 1.0, 0)[0].message == Declined(seq=12)


def test_a_barrier_does_not_wait_for_who_is_told_to_pull_afresh() -> None:
    core = started(Bsp(), 3)
    core.push(1, push(1), torch.tensor([1.0]), 0.0, 0)
    core.push(2, push(1), torch.tensor([3.0]), 0.0, 0)
    for seq in range(1, 10):
        core.push(0, push(seq, loss=math.nan), torch.ones(1), 1.0, 0)
    replies = core.push(0, push(10, loss=math.nan), torch.ones(1), 1.0, 0)
    assert [(reply.worker, reply.message.version) for reply in replies if isinstance(reply.message, State)] == [
        (1, 2),
        (2, 2),
        (0, 2),
    ]
    assert core.state.x.item() == 2.0


def test_all_workers_without_a_finite_push_is_divergence() -> None:
    core = started(Asp())
    for seq in range(1, 11):
        core.push(0, push(seq, n_steps=3, loss=math.nan), torch.ones(1), 1.0, 0)
    for seq in range(1, 10):
        core.push(1, push(seq, n_steps=3, loss=math.nan), torch.ones(1), 2.0, 0)
    with pytest.raises(DivergedError, match=r"worker 1 since its step 3, for 10 pushes until 2.5 s"):
        core.push(1, push(10, n_steps=3, loss=math.nan), torch.ones(1), 2.5, 0)


def test_divergence_over_float16_may_be_the_wire_s() -> None:
    core = started(Asp(), 1)
    vector = torch.ones(1, dtype=torch.float16)
    for seq in range(1, 10):
        core.push(0, push(seq, finite=False), vector, 1.0, 0)
    with pytest.raises(DivergedError, match=r"try a smaller --lr, or --wire bfloat16$"):
        core.push(0, push(10, finite=False), vector, 1.0, 0)


def test_the_steps_of_a_declined_push_count_into_the_next() -> None:
    worker = WorkerCore(LocalSgd(h=2), torch.zeros(1), 0)
    worker.pull("f")
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    losses = iter([1.0, math.nan, 2.0, 4.0])

    def step() -> PushMessage | None:
        worker.local.add_(1.0)
        return worker.after_step(next(losses), 32, 0.5, 0.0, last=False)

    assert step() is None
    first = step()
    assert first is not None
    assert math.isnan(first.loss)
    worker.on_declined(Declined(seq=1))
    with pytest.raises(RemoteProtocolError):
        worker.on_declined(Declined(seq=1))
    second = step()
    assert second is not None
    assert (second.seq, second.n_steps, second.n_samples, second.loss) == (2, 3, 96, 2.0)
    assert worker.outgoing.item() == 3.0


def test_a_worker_that_is_told_to_begin_afresh_forgets_its_state() -> None:
    worker = WorkerCore(LocalSgd(h=2), torch.zeros(1), 0)
    worker.pull("f")
    worker.incoming.zero_()
    worker.on_state(State(version=0, t_s=0.0, fresh=True), 0.0)
    for _ in range(2):
        worker.local.fill_(math.nan)
        worker.after_step(math.nan, 32, 0.5, 0.0, last=False)
    worker.incoming.fill_(7.0)
    worker.on_state(State(version=3, t_s=0.0, fresh=True), 0.0)
    assert worker.local.item() == 7.0
    assert worker.after_step(1.0, 32, 0.5, 0.0, last=False) is None


# What a faulty strategy does.


@dataclass(frozen=True)
class Faulty(Overlapped):
    """Does one thing wrong."""

    how: str = ""

    def after_step(self, w: None, step: Step) -> Push | None:
        return Push()

    def on_push(self, s: ServerState, msg: Received) -> Sequence[Reply]:
        faults: Mapping[str, Sequence[Reply]] = {
            "silent": (),
            "other": (Reply(1 - msg.worker),),
            "twice": (Reply(msg.worker), Reply(msg.worker)),
            "column": (Reply(msg.worker, info={"colour": 1.0}),),
            "nan": (Reply(msg.worker, hint={"h_min": math.nan}),),
        }
        return faults[self.how]


@pytest.mark.parametrize(
    ("how", "says"), [("other", "does not wait"), ("twice", "does not wait"), ("column", "columns"), ("nan", "h_min")]
)
def test_a_strategy_that_breaks_a_rule_is_named(how: str, says: str) -> None:
    core = started(Faulty(how))
    with pytest.raises(LocalProtocolError, match=says):
        core.push(0, push(1), torch.zeros(1), 0.0, 0)


def test_a_strategy_that_answers_nobody_is_a_deadlock() -> None:
    core = started(Faulty("silent"))
    core.push(0, push(1), torch.zeros(1), 0.0, 0)
    with pytest.raises(DeadlockError, match=r"\[0, 1\]"):
        core.push(1, push(1), torch.zeros(1), 0.0, 0)


events = st.one_of(
    st.tuples(st.just("join"), st.integers(-1, 3), st.just(0), st.just(0)),
    st.tuples(st.just("push"), st.integers(-1, 3), st.integers(1, 4), st.integers(0, 6)),
    st.tuples(st.just("leave"), st.integers(-1, 3), st.just(0), st.just(0)),
)


@settings(max_examples=300)
@given(st.sampled_from([Asp(), Bsp(), LocalSgd(h=2)]), st.lists(events, max_size=40))
def test_any_order_of_events_ends_in_a_protocol_error_or_a_sound_state(
    strategy: object, order: list[tuple[str, int, int, int]]
) -> None:
    core = ServerCore(strategy, torch.zeros(2), 3)  # type: ignore[arg-type]
    accepted = answered = 0
    for event, rank, seq, version in order:
        before = core.state.x.clone()
        try:
            if event == "join":
                core.join(rank, 0.0)
            elif event == "push":
                info = {"reason": "r", "zzz": 1.0} if version == 6 else {"reason": "r"}
                replies = core.push(rank, push(seq, version, info=info), torch.ones(2), 0.0, 0)
                answered += sum(reply.row is not None for reply in replies)
            else:
                replies, row = core.leave(rank, 0.0)
                answered += sum(reply.row is not None for reply in replies) + (row is not None)
        except RemoteProtocolError:
            assert torch.equal(core.state.x, before)
        except ProtocolError as error:  # pragma: no cover - the message is the point
            pytest.fail(f"a shipped strategy broke a rule: {error}")
        accepted = core.steps
        assert 0 <= core.version <= accepted
        assert torch.isfinite(core.state.x).all()
    waiting_with_push = sum(1 for member in core._members.values() if member.row is not None)
    assert accepted == answered + waiting_with_push
