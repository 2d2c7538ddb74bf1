"""Workers that come and go at any moment, under every strategy: nobody waits for ever, nothing is lost or kept."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cores import InMemory
from hypothesis import given, note, settings
from hypothesis import strategies as st

import strategies
from sapus_cli import registry
from sapus_cli.codec import Push, decode_from_client, encode
from sapus_cli.errors import DivergedError

if TYPE_CHECKING:
    from sapus_cli.protocol import Outgoing, WorkerCore
    from sapus_cli.strategy import AnyStrategy, Vec

STEPS = 24
FAST: dict[str, dict[str, Any]] = {
    "adacomm": {"h0": 3, "t0_s": 20.0},
    "adpsgd": {"h0": 2, "warmup": 2},
    "dc-asgd": {"lam": 0.0},
    "diloco": {"h": 2, "momentum": 0.0},
    "dssp": {"s_low": 1, "r_max": 3},
    "easgd": {"h": 2},
    "fedasync": {"h": 2},
    "fedbuff": {"k": 3, "h": 2},
    "local-sgd": {"h": 2},
    "local-sgd-async": {"h": 2},
    "post-local-sgd": {"h": 2, "t0": 4},
    "selsync": {"window": 3},
    "ssp": {"s": 1},
}
"""Hyper-parameters that make a rule act within a few steps, and that leave out what moves the state beside `weight`."""
MIXING = {"easgd", "fedasync"}
"""These push a state w and add weight * (w - x); all others push an update u and add weight * u."""
AT_ONCE = {"ssp", "dssp"}
"""These apply a push when it arrives and withhold its reply; who leaves before that has been applied at 1/N."""
KEPT = {"steps"}
"""What the server remembers of a rank that left, on purpose: the steps behind the bound sqrt(T/N) of sapus."""


@dataclass
class Held:
    """A push that was received: whose, its vector, shape `(d,)` in float64, and its row of pushes.csv, once closed."""

    worker: int
    vector: Vec
    weight: float | None = None
    closed: bool = False


@dataclass
class Crowd(InMemory):
    """A cluster whose workers may die, come back, end early or compute nonsense, and what must hold after each event.

    `accepted` are the local steps of each rank that the server has accounted for, `sick` the ranks that compute
    nothing finite until they are told to pull afresh, `cut_short` those that may end before their budget does, `dead`
    those that died and are not back.
    """

    name: str = ""
    accepted: Counter[int] = field(default_factory=Counter)
    pushes: int = 0
    sick: set[int] = field(default_factory=set)
    cut_short: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    open: dict[int, Held] = field(default_factory=dict)
    held: deque[Held] = field(default_factory=deque)
    lent: list[tuple[int, weakref.ref[Vec]]] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Expect the state where it begins."""
        super().__post_init__()
        self.expected = self.x.double()
        self._n_rows = 0

    # What may happen.

    def act(self, byte: int) -> None:
        """Let one thing happen that can happen now: mostly messages and steps, now and then one of the other kinds."""
        kind, which = divmod(byte, 16)
        alive = [rank for rank in range(self.n_workers) if rank not in self.left]
        gone = [rank for rank in sorted(self.left) if self.accepted[rank] < self.steps]
        others: dict[int, tuple[str, list[int]]] = {
            12: ("die", alive),
            13: ("return", gone),
            14: ("return", gone),
            15: ("sicken" if which % 2 else "stop", alive),
        }
        event, ranks = others.get(kind, ("", []))
        events = [(event, rank) for rank in ranks] or self.possible()
        if events:
            self.happen(*events[which % len(events)])

    def possible(self) -> list[tuple[str, int]]:
        """Every message and step of those who are alive."""
        return [(event, rank) for event, rank in super().possible() if rank not in self.left]

    def finish(self) -> None:
        """Let everybody who is here run to the budget; before the start, all have to be here."""
        n_events = 0
        while len(self.left) < self.n_workers:
            if not self.server.started and self.left:
                self.happen("return", min(self.left))
            events = self.possible()
            self.happen(*events[n_events % len(events)])
            n_events += 1
            assert n_events < 50 * self.n_workers * self.steps, "it never ends"

    def happen(self, event: str, rank: int) -> None:
        """One event, then every check."""
        self.history.append(f"{event} {rank}")
        if event == "die":
            self._die(rank)
        elif event == "return":
            self._return(rank)
        elif event == "sicken":
            self.sick.add(rank)
            self.cut_short.add(rank)
        elif event == "stop":
            self.workers[rank].stop()
            self.cut_short.add(rank)
        elif event == "send":
            self._receive(rank)
        else:
            super().happen(event, rank)
        self._account()
        self._check()

    def _die(self, rank: int) -> None:
        self.left.add(rank)
        self.dead.add(rank)
        self.to_worker[rank].clear()
        self.to_server[rank].clear()
        self.sick.discard(rank)
        if self.server.has(rank):
            replies, row = self.server.leave(rank, self.now)
            self.rows += [row] if row else []
            self._deliver(replies)

    def _return(self, rank: int) -> None:
        self.left.remove(rank)
        self.dead.discard(rank)
        self.workers[rank] = self._replacement(rank)
        self.to_server[rank].append((encode(self.workers[rank].pull("f")), torch.empty(0)))

    def _replacement(self, rank: int) -> WorkerCore:
        """Who takes the place of a worker that is gone: it goes on from what the server has had of the rank."""
        worker = self._worker(rank)
        progress = self.server.progress(rank)
        worker.begin(progress.steps, progress.seq)
        return worker

    def _receive(self, rank: int) -> None:
        header, vector = self.to_server[rank][0]
        message = decode_from_client(header)
        received = self.server.received
        copy, lent = vector.double(), weakref.ref(vector)
        del vector
        super().happen("send", rank)
        if self.server.received > received:
            assert isinstance(message, Push)
            self.pushes += 1
            self.accepted[rank] += message.n_steps
            self.open[rank] = Held(rank, copy)
            self.held.append(self.open[rank])
            self.lent.append((rank, lent))

    def _deliver(self, replies: list[Outgoing]) -> None:
        for reply in replies:
            assert reply.worker not in self.left, f"worker {reply.worker} has left and gets a reply"
            if getattr(reply.message, "fresh", False):
                self.sick.discard(reply.worker)
        super()._deliver(replies)

    # What must hold.

    def _account(self) -> None:
        """Close the pushes that got their rows, and apply to `expected` those that must be in the state now."""
        for row in self.rows[self._n_rows :]:
            push = self.open.pop(row.worker)
            weight = row.info.get("weight")
            assert weight is not None or row.worker in self.left, f"no weight in {row}"
            if isinstance(weight, float):
                assert push.weight in {None, weight}, f"applied with {push.weight}, but the row says {weight}"
                push.weight = weight
        self._n_rows = len(self.rows)
        n_applied = len(self.held) - self.server.state.pending
        for _ in range(n_applied):
            push = self.held.popleft()
            if push.weight is None:
                scale = getattr(self.strategy, "outer_lr", 1.0)
                push.weight = scale / (self.n_workers if self.name in AT_ONCE else n_applied)
            target = push.vector - self.expected if self.name in MIXING else push.vector
            self.expected += push.weight * target

    def _check(self) -> None:
        server, state = self.server, self.server.state
        assert server.received == self.pushes
        assert server.version == self.pushes - len(self.held)
        torch.testing.assert_close(self.x.double(), self.expected, atol=1e-4, rtol=0)
        here = {rank for rank in range(self.n_workers) if server.has(rank)}
        assert not here & self.left
        assert server.waiting <= here
        assert state.members == (here if server.started else set())
        if server.started and len(self.left) < self.n_workers:
            assert self.possible(), f"nothing can happen, but only {self.left} have left"
        for each in dataclasses.fields(state):
            known = getattr(state, each.name)
            if isinstance(known, dict | set) and each.name not in KEPT:
                assert set(known) <= state.members, f"{each.name} holds {set(known)}, alive are {state.members}"
            elif isinstance(known, list):
                assert len(known) <= state.pending, f"{each.name} holds {len(known)} of {state.pending} pushes"
        self.lent = [(rank, vector) for rank, vector in self.lent if vector() is not None]
        for rank, vector in self.lent:
            assert rank in server.waiting or self._is_last_reply(rank, vector()), f"a vector of worker {rank} is kept"

    def _is_last_reply(self, rank: int, vector: Vec | None) -> bool:
        """Whether it is what the worker was answered with, which may have to be sent again."""
        member = self.server._members.get(rank)
        return member is not None and member.last is not None and member.last.vector is vector


@pytest.mark.parametrize("name", sorted(strategies.REGISTRY))
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.binary(min_size=60, max_size=240))
def test_any_coming_and_going_ends_well(name: str, n_workers: int, events: bytes) -> None:
    crowd = make(name, n_workers)
    try:
        for byte in events:
            crowd.act(byte)
        crowd.finish()
    except DivergedError:
        assert crowd.sick
        return
    finally:
        note(", ".join(crowd.history))
    assert crowd.left == set(range(n_workers))
    assert crowd.server.state.pending == 0
    assert len(crowd.rows) == crowd.pushes == len({(row.worker, row.seq) for row in crowd.rows})
    assert not crowd.open
    assert not crowd.lent
    assert crowd.server.steps == sum(row.n_steps for row in crowd.rows) == sum(crowd.accepted.values())
    for rank in crowd.left - crowd.cut_short - crowd.dead:
        assert crowd.accepted[rank] == STEPS, f"worker {rank} was well and came back each time it died"


def make(name: str, n_workers: int) -> Crowd:
    strategy: AnyStrategy = registry.build(name, FAST.get(name, {}))
    crowd = Crowd(strategy, torch.tensor([5.0, -1.0]), n_workers, toward_one, lr=0.1, steps=STEPS, name=name)

    def gradient(rank: int, y: Vec) -> Vec:
        return torch.full_like(y, math.nan) if rank in crowd.sick else toward_one(rank, y)

    crowd.gradient = gradient
    return crowd


def toward_one(rank: int, y: Vec) -> Vec:
    """Gradient of |y - c|^2 / 2, c near 1, a little different for every worker."""
    return y - 1 - 0.1 * rank
