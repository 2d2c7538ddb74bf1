"""Local SGD with a fixed update interval and without a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_whole
from strategies.asp import Weighted

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LocalSgdAsync(Strategy[None, Weighted]):
    """Asynchronous local SGD: every worker pushes after H local steps, and nobody waits for anybody.

    Rule: x <- x + (1/N) u_i at each push, u_i the update accumulated over H local steps; no barrier.
    Source: asp (Dean et al., NeurIPS 2012) with the interval of local-sgd (Stich, ICLR 2019). It stands here as the
        control of sapus: the same exchange, at an interval that nobody adapts.

    Hyper-parameters:
        h: the update interval H, local steps between two pushes; a whole number of at least 1. Default 16: as
            local-sgd.
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

    def init_server(self, x0: Vec, n_workers: int) -> Weighted:
        """Fix the weight of every push."""
        return Weighted(x0, weight=1 / n_workers)

    def on_push(self, s: Weighted, msg: Received) -> Sequence[Reply]:
        """Apply at once and answer at once."""
        s.x.add_(msg.vector, alpha=s.weight)
        return (Reply(msg.worker, info={"weight": s.weight}),)
