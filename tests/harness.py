"""A cluster without processes, sockets or time: drives one strategy by the contract of `sapus_cli.strategy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sapus_cli.strategy import STANDARD_INFO, Push, Received, Reply, ServerState, Step, Strategy, Vec

Move = Callable[[int, Vec, int], Vec]
"""The update of one local step, shape `(d,)`, from the worker's rank, its local state and its step number."""


def vec(*values: float) -> Vec:
    """A flat state vector."""
    return torch.tensor(values)


def quadratic(lr: float, curvature: float = 1.0, target: float = 0.0) -> Move:
    """Plain SGD on (curvature/2) |x - target|^2."""
    return lambda _rank, params, _t: (params - target) * (-lr * curvature)


@dataclass
class Worker:
    """One worker: its state, and what the server must know of it."""

    local: Vec
    pulled: Vec
    state: Any = None
    version: int = 0
    t: int = 0
    k: int = 0
    loss_sum: float = 0.0
    exchange_s: float = 0.0


@dataclass
class Pushed:
    """One push, how it looked at the server, and the reply that closed it."""

    received: Received
    reply: Reply | None = None

    @property
    def info(self) -> dict[str, float | str]:
        """What pushes.csv would say."""
        return {**self.received.info, **(self.reply.info if self.reply else {})}


class Cluster:
    """N workers and a server; every call is one event. Raises AssertionError where a strategy breaks the contract."""

    def __init__(
        self,
        strategy: Strategy[Any, Any],
        n_workers: int,
        move: Move,
        *,
        x0: Vec | None = None,
        loss: Callable[[int, int], float] = lambda _rank, _t: 1.0,
        step_s: Mapping[int, float] | None = None,
        exchange_s: float = 0.0,
    ) -> None:
        self.strategy = strategy
        self.x0 = vec(1.0) if x0 is None else x0
        self.move = move
        self.loss = loss
        self.step_s = step_s or {}
        self.exchange_s = exchange_s
        self.now = 0.0
        self.received = 0
        self.server: ServerState = strategy.init_server(self.x0.clone(), n_workers)
        self.workers: dict[int, Worker] = {}
        self.waiting: dict[int, Pushed | None] = {}
        self.pushes: list[Pushed] = []
        for rank in range(n_workers):
            self.join(rank)

    @property
    def x(self) -> Vec:
        """The global state."""
        return self.server.x

    @property
    def version(self) -> int:
        """Pushes that are in the global state."""
        return self.received - self.server.pending

    def join(self, rank: int) -> None:
        """A worker asks for its first pull."""
        assert rank not in self.workers
        self.workers[rank] = Worker(torch.empty_like(self.x0), torch.empty_like(self.x0))
        self.waiting[rank] = None
        self.server.members.add(rank)
        self._deliver(self.strategy.on_join(self.server, rank))

    def leave(self, rank: int) -> None:
        """A worker ends or dies, waiting or not."""
        del self.workers[rank]
        self.waiting.pop(rank, None)
        self.server.members.discard(rank)
        self._deliver(self.strategy.on_leave(self.server, rank))

    def step(self, rank: int, *, last: bool = False) -> Pushed | None:
        """One local step of a worker that does not wait, and the push that it may bring."""
        assert rank not in self.waiting
        w = self.workers[rank]
        w.t += 1
        w.k += 1
        loss = self.loss(rank, w.t)
        w.loss_sum += loss
        w.local.add_(self.move(rank, w.local.clone(), w.t))
        before = w.local.clone()
        taken = Step(
            w.t, w.k, w.local, w.pulled, loss, last, exchange_s=w.exchange_s, step_s=self.step_s.get(rank, 1.0)
        )
        push = self.strategy.after_step(w.state, taken)
        torch.testing.assert_close(w.local, before, atol=0, rtol=0, equal_nan=True, msg="after_step changed the state")
        if push is None and last:
            push = Push(info={"reason": "last"})
        return self._send(rank, push, last=last) if push else None

    def run(self, steps: int) -> Cluster:
        """Round robin until every worker has taken `steps` steps and has left."""
        while self.workers:
            ready = [rank for rank in sorted(self.workers) if rank not in self.waiting]
            assert ready, f"all wait: {sorted(self.waiting)}"
            for rank in ready:
                if self.workers[rank].t == steps:
                    self.leave(rank)
                else:
                    self.step(rank, last=self.workers[rank].t + 1 == steps)
        return self

    def locals(self) -> dict[int, float]:
        """First element of every local state."""
        return {rank: float(w.local[0]) for rank, w in self.workers.items()}

    def _send(self, rank: int, push: Push, *, last: bool) -> Pushed:
        w = self.workers[rank]
        vector = w.local - w.pulled if push.vector is None else push.vector.clone()
        received = Received(
            worker=rank,
            vector=vector,
            n_steps=w.k,
            loss=w.loss_sum / w.k,
            staleness=self.version - w.version,
            now=self.now,
            step_s=self.step_s.get(rank, 1.0),
            exchange_s=w.exchange_s,
            last=last,
            info=push.info,
        )
        w.k, w.loss_sum = 0, 0.0
        pushed = Pushed(received)
        self.pushes.append(pushed)
        self.waiting[rank] = pushed
        self.received += 1
        self._deliver(self.strategy.on_push(self.server, received))
        assert 0 <= self.server.pending <= self.received
        return pushed

    def _deliver(self, replies: Any) -> None:
        for reply in replies:
            assert reply.to in self.waiting, f"worker {reply.to} does not wait for a reply"
            pushed = self.waiting.pop(reply.to)
            w = self.workers[reply.to]
            w.pulled.copy_(self.x if reply.vector is None else reply.vector)
            w.version = self.version
            assert not any(math.isnan(value) for value in reply.hint.values())
            if pushed is None:
                w.local.copy_(w.pulled)
                w.state = self.strategy.init_worker(w.pulled, reply.to)
                if reply.hint:
                    self.strategy.after_reply(w.state, w.local, w.pulled, reply.hint)
                continue
            pushed.reply = reply
            w.exchange_s = self.exchange_s
            assert set(pushed.info) <= {*STANDARD_INFO, *self.strategy.columns}
            self.strategy.after_reply(w.state, w.local, w.pulled, reply.hint)
