"""Post-local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PostLocalSgd(Strategy[None, Round]):
    """Post-local SGD: bulk-synchronous at first, local SGD with a fixed interval later.

    Rule: x <- x + (1/N) sum_i u_i every H_t local steps, H_t = 1 for t <= t0, H after; barrier.
    Source: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020, post-local SGD.

    Hyper-parameters:
        h: the update interval H after the switch, in local steps; a whole number of at least 1. Default 16: the paper's
            most used value (unverified).
        t0: local steps of a worker before the switch; a whole number of at least 0. Default 200: our choice. The paper
            switches at the first decay of the learning rate; a strategy knows neither that nor the budget.
    """

    h: int = 16
    t0: int = 200

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("h", self.h, 1)
        require_whole("t0", self.t0, 0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push at every step up to t0, at every H-th after it."""
        return Push() if step.t <= self.t0 or step.k >= self.h else None

    def init_server(self, x0: Vec, n_workers: int) -> Round:
        """Open the first round."""
        return Round(x0)

    def on_push(self, s: Round, msg: Received) -> Sequence[Reply]:
        """Hold the reply until every worker has pushed."""
        s.arrive(msg.worker, msg.vector)
        return s.average()

    def on_leave(self, s: Round, worker: int) -> Sequence[Reply]:
        """Close the round if it was only this worker that it waited for."""
        return s.average()
