"""Buffered asynchronous aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec, require_between, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Buffer(ServerState):
    """The global state and the sum of the `pending` updates that are not in it yet, shape `(d,)`."""

    total: Vec = field(kw_only=True)

    def apply(self, weight: float) -> None:
        """Move the global state by `weight` times the sum of the updates held, and hold none."""
        if self.pending:
            self.x.add_(self.total, alpha=weight)
            self.total.zero_()
            self.pending = 0


@dataclass(frozen=True)
class FedBuff(Strategy[None, Buffer]):
    """FedBuff: pushes are collected, and K of them make one update of the global state; nobody waits.

    Rule: x <- x + eta_g (1/K) sum_k s(tau_k) u_k after every K pushes of H local steps, s(tau) = 1/sqrt(1 + tau), tau
        counted in updates of x.
    Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, Algorithm 1, with
        the polynomial staleness scaling of Xie et al. (2019).

    Deviation: what is left in the buffer when the last worker leaves is applied too, each push with the
        weight that it was announced with.

    Hyper-parameters:
        k: pushes to an update, a whole number of at least 1. Default 10: the paper's.
        server_lr: the server's learning rate eta_g, above 0. Default 0.7: our choice; the paper tunes it for each task
            (unverified).
        h: the update interval, local steps between two pushes; a whole number of at least 1. Default 16: as local-sgd;
            the paper trains for an epoch of the local data.
    """

    k: int = 10
    server_lr: float = 0.7
    h: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("k", self.k, 1)
        require_between("server_lr", self.server_lr, 0.0, open_low=True)
        require_whole("h", self.h, 1)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push at every H-th step."""
        return Push() if step.k >= self.h else None

    def init_server(self, x0: Vec, n_workers: int) -> Buffer:
        """Start with an empty buffer."""
        return Buffer(x0, total=x0.new_zeros(x0.shape))

    def on_push(self, s: Buffer, msg: Received) -> Sequence[Reply]:
        """Collect; apply with every K-th push; answer at once in any case."""
        # Staleness comes counted in pushes, of which K make an update.
        freshness = float((1 + msg.staleness / self.k) ** -0.5)
        s.total.add_(msg.vector, alpha=freshness)
        s.pending += 1
        if s.pending >= self.k:
            s.apply(self.server_lr / self.k)
        return (Reply(msg.worker, info={"weight": self.server_lr * freshness / self.k}),)

    def on_leave(self, s: Buffer, worker: int) -> Sequence[Reply]:
        """Apply the rest once nobody is left."""
        if not s.members:
            s.apply(self.server_lr / self.k)
        return ()
