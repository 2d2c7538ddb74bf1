"""Local SGD with a fixed update interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LocalSgd(Strategy[None, Round]):
    """Local SGD: every worker takes H local steps, then all average.

    Rule: x <- x + (1/N) sum_i u_i, u_i the update accumulated over H local steps; barrier after H steps.
    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019, Algorithm 1.

    Hyper-parameters:
        h: the update interval H, local steps between two pushes; a whole number of at least 1. Default 16: our
            choice, the middle of the grid 1, 4, 16, 64.
    """

    h: int = 16

    def __post_init__(self) -> None:
        """Check the range."""
        require_whole("h", self.h, 1)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push at every H-th step."""
        return Push() if step.k >= self.h else None

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
