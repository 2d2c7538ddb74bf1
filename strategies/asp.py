"""Asynchronous parallel training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Weighted(ServerState):
    """The global state and the constant weight of a push."""

    weight: float = 1.0


@dataclass(frozen=True)
class Asp(Strategy[None, Weighted]):
    """Asynchronous: every worker pushes after every step, and nobody waits for anybody.

    Rule: x <- x + (1/N) u_i with scale "mean", x <- x + u_i with scale "sum", at each push; no barrier.
    Source: Dean et al., "Large scale distributed deep networks" (Downpour SGD, which is scale "sum"), NeurIPS 2012.

    Hyper-parameters:
        scale: "mean" weighs a push by 1/N, so that one round of pushes moves as far as one of bsp; "sum" weighs it
            by 1. Default "mean": comparable with the rest at the same learning rate.
    """

    scale: Literal["mean", "sum"] = "mean"

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push always."""
        return Push()

    def init_server(self, x0: Vec, n_workers: int) -> Weighted:
        """Fix the weight of every push."""
        return Weighted(x0, weight=1 / n_workers if self.scale == "mean" else 1.0)

    def on_push(self, s: Weighted, msg: Received) -> Sequence[Reply]:
        """Apply at once and answer at once."""
        s.x.add_(msg.vector, alpha=s.weight)
        return (Reply(msg.worker, info={"weight": s.weight}),)
