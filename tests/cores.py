"""The real cores over a pretended link: every message crosses the codec, events happen in whatever order is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sapus_cli.codec import Declined, Pull, Push, State, decode_from_client, decode_from_server, encode
from sapus_cli.protocol import Outgoing, Phase, PushRow, ServerCore, WorkerCore
from sapus_cli.strategy import Setting, Vec

Gradient = Callable[[int, Vec], Vec]
"""Rank and local state -> gradient, shape `(d,)`."""
Choose = Callable[[Sequence[tuple[str, int]]], tuple[str, int]]
"""Which of the events that can happen now happens next."""


class Costs(NamedTuple):
    """What steps and exchanges are said to take. None: as many seconds as events passed; bytes as they are."""

    step_s: float = 1.0
    exchange_s: float | None = None
    cpu_s: float = 0.0
    n_bytes: int | None = None
    setting: Setting = Setting()


UNIT = Costs()


@dataclass
class InMemory:
    """N workers that descend a gradient, and a server. Time is the number of events so far.

    `wire` is what vectors are made of between them. With `shared` the server gets a worker's own buffer, as it does
    through shared memory, and that buffer is spoilt as soon as the worker is replied to.
    """

    strategy: Any
    x0: Vec
    n_workers: int
    gradient: Gradient
    lr: float
    steps: int
    costs: Costs = UNIT
    wire: torch.dtype = torch.float32
    shared: bool = False
    workers: list[WorkerCore] = field(init=False)
    server: ServerCore = field(init=False)
    rows: list[PushRow] = field(default_factory=list)
    now: int = 0
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.server = ServerCore(self.strategy, self.x0.clone(), self.n_workers, self.costs.setting)
        self.workers = [self._worker(rank) for rank in range(self.n_workers)]
        self.to_server: list[list[tuple[bytes, Vec]]] = [[] for _ in self.workers]
        self.to_worker: list[list[tuple[bytes, Vec]]] = [[] for _ in self.workers]
        self.sent_at: list[float] = [0.0 for _ in self.workers]
        self.left: set[int] = set()
        for rank, worker in enumerate(self.workers):
            self.to_server[rank].append((encode(worker.pull("f")), torch.empty(0)))

    def _worker(self, rank: int) -> WorkerCore:
        return WorkerCore(self.strategy, torch.zeros_like(self.x0), rank, wire=self.wire)

    @property
    def x(self) -> Vec:
        """Global state."""
        return self.server.state.x

    def possible(self) -> list[tuple[str, int]]:
        """Every event that can happen now."""
        events = [("send", r) for r, queue in enumerate(self.to_server) if queue]
        events += [("reply", r) for r, queue in enumerate(self.to_worker) if queue]
        events += [("step", r) for r, w in enumerate(self.workers) if w.phase is Phase.COMPUTING]
        events += [("leave", r) for r, w in enumerate(self.workers) if w.phase is Phase.DONE and r not in self.left]
        return events

    def run(self, choose: Choose = lambda events: events[0]) -> InMemory:
        """Go on until everybody has left."""
        while len(self.left) < self.n_workers:
            events = self.possible()
            assert events, f"nothing can happen, but only {self.left} have left"
            self.happen(*choose(events))
        return self

    def happen(self, event: str, rank: int) -> None:
        """One event."""
        self.now += 1
        if event == "send":
            header, vector = self.to_server[rank].pop(0)
            sent = decode_from_client(header)
            if isinstance(sent, Pull):
                self._deliver(self.server.join(rank, self.now))
            elif isinstance(sent, Push):
                self.cpu_s += self.costs.cpu_s
                n_bytes = self.costs.n_bytes or len(header) + 4 * vector.numel()
                self._deliver(self.server.push(rank, sent, vector, self.now, n_bytes, self.cpu_s))
        elif event == "reply":
            header, vector = self.to_worker[rank].pop(0)
            message = decode_from_server(header)
            if isinstance(message, Declined):
                self.workers[rank].on_declined(message)
            elif isinstance(message, State):
                self.workers[rank].incoming.copy_(vector)
                exchange_s = self.costs.exchange_s
                now = self.now if exchange_s is None else self.sent_at[rank] + exchange_s
                self._send(rank, self.workers[rank].on_state(message, now))
        elif event == "step":
            worker = self.workers[rank]
            gradient = self.gradient(rank, worker.local)
            worker.local.sub_(gradient, alpha=self.lr)
            last = worker.steps + 1 == self.steps
            loss = float(gradient.square().sum())
            self._send(rank, worker.after_step(loss, 1, self.costs.step_s, self.now, last=last))
        else:
            self.left.add(rank)
            replies, row = self.server.leave(rank, self.now)
            self.rows += [row] if row else []
            self._deliver(replies)

    def _send(self, rank: int, push: Push | None) -> None:
        if push is not None:
            self.sent_at[rank] = self.now
            vector = self.workers[rank].outgoing
            self.to_server[rank].append((encode(push), vector if self.shared else vector.clone()))

    def _deliver(self, replies: list[Outgoing]) -> None:
        for reply in replies:
            vector = torch.empty(0) if reply.vector is None else reply.vector.clone()
            if self.shared:
                self.workers[reply.worker].outgoing.fill_(torch.nan)
            self.to_worker[reply.worker].append((encode(reply.message), vector))
            self.rows += [reply.row] if reply.row else []
