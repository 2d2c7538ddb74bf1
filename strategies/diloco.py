"""Local SGD with an outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec, require_between, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class OuterRound(Round):
    """A round and the momentum of the outer optimizer, shape `(d,)`."""

    momentum: Vec = field(kw_only=True)


@dataclass(frozen=True)
class DiLoCo(Strategy[None, OuterRound]):
    """DiLoCo: workers take H inner steps; an outer Nesterov optimizer steps along the mean of their updates.

    Rule: u = (1/N) sum_i u_i; m <- mu m + u; x <- x + eta_o (u + mu m), every H local steps; barrier.
    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", arXiv 2311.08105,
        2023, Algorithm 1; Nesterov momentum as torch.optim.SGD has it, -u in the place of the gradient.

    The paper's inner optimizer is AdamW, whose state stays with the worker; it is chosen with the workload.

    Hyper-parameters:
        h: inner steps between two rounds; a whole number of at least 1. Default 500: the paper's. A run needs many
            times as many steps.
        outer_lr: the outer learning rate eta_o, above 0. Default 0.7: the paper's.
        momentum: the outer momentum mu, in [0, 1]. Default 0.9: the paper's. With outer_lr 1 and momentum 0 this is
            local-sgd.
    """

    h: int = 500
    outer_lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("h", self.h, 1)
        require_between("outer_lr", self.outer_lr, 0.0, open_low=True)
        require_between("momentum", self.momentum, 0.0, 1.0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push at every H-th step."""
        return Push() if step.k >= self.h else None

    def init_server(self, x0: Vec, n_workers: int) -> OuterRound:
        """Open the first round, at rest."""
        return OuterRound(x0, momentum=x0.new_zeros(x0.shape))

    def on_push(self, s: OuterRound, msg: Received) -> Sequence[Reply]:
        """Hold the reply until every worker has pushed."""
        s.arrive(msg.worker, msg.vector)
        return self._close(s)

    def on_leave(self, s: OuterRound, worker: int) -> Sequence[Reply]:
        """Close the round if it was only this worker that it waited for."""
        return self._close(s)

    def _close(self, s: OuterRound) -> list[Reply]:
        if not s.complete():
            return []
        weight = self.outer_lr / s.pending
        mean = s.mean()
        s.momentum.mul_(self.momentum).add_(mean)
        s.x.add_(mean, alpha=self.outer_lr).add_(s.momentum, alpha=self.outer_lr * self.momentum)
        return s.release({"weight": weight})
