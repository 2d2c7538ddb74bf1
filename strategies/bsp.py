"""Bulk-synchronous parallel training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Bsp(Strategy[None, Round]):
    """Bulk-synchronous: every worker pushes after every step, and all wait for the slowest.

    Rule: x <- x + (1/N) sum_i u_i, u_i the update of one local step; barrier after each step.
    Source: Valiant, "A bridging model for parallel computation", Communications of the ACM 33(8), 1990.
    """

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push always."""
        return Push()

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
