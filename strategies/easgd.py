"""Elastic averaging SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_between, require_whole
from strategies.asp import Weighted

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Easgd(Strategy[None, Weighted]):
    """Elastic averaging: the worker's state and the global state are drawn towards each other, and stay two.

    Rule: e = alpha (w_i - x); w_i <- w_i - e; x <- x + e, every H local steps of worker i; alpha = beta/N; no barrier.
    Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015, Algorithm 1.

    The worker pushes w_i itself and the server replies with the new w_i, so what the worker has "pulled" is its own
    state and not x. Deviation: the paper takes the gradient that follows an exchange at the old w_i, here it is taken
    at the new one.

    Hyper-parameters:
        beta: N times the moving rate alpha, in (0, 1]. Default 0.9: the paper's.
        h: the update interval, local steps between two exchanges; a whole number of at least 1. Default 10: one of the
            paper's communication periods (unverified).
    """

    beta: float = 0.9
    h: int = 10

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_between("beta", self.beta, 0.0, 1.0, open_low=True)
        require_whole("h", self.h, 1)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push the local state at every H-th step, and at the last: an accumulated update would be no state."""
        return Push(vector=step.params) if step.k >= self.h or step.last else None

    def init_server(self, x0: Vec, n_workers: int) -> Weighted:
        """Fix the moving rate."""
        return Weighted(x0, weight=self.beta / n_workers)

    def on_push(self, s: Weighted, msg: Received) -> Sequence[Reply]:
        """Draw the two states together; answer with what becomes of the worker's."""
        apart = msg.vector.sub_(s.x)
        s.x.add_(apart, alpha=s.weight)
        # w - alpha (w - x) written with the new x: it needs no vector besides these two.
        new = apart.mul_(1 - 2 * s.weight).add_(s.x)
        return (Reply(msg.worker, vector=new, info={"weight": s.weight}),)
