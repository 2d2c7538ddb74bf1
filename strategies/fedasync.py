"""Asynchronous federated optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec, require_between, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class FedAsync(Strategy[None, ServerState]):
    """FedAsync: the global state is mixed with each worker's state as it comes in, less so if it is stale.

    Rule: x <- (1 - a_t) x + a_t w_i, a_t = mixing s(tau), every H local steps of worker i; no barrier. s(tau) is
        (1 + tau)^-exponent (poly), 1 up to tau = start and then 1/(1 + slope (tau - start)) (hinge), or 1 (constant).
    Source: Xie, Koyejo and Gupta, "Asynchronous federated optimization", OPT workshop 2020 (arXiv 1903.03934, 2019),
        Algorithm 1.

    Deviation: the workers' proximal term (rho/2) |w - x|^2 is left out (rho = 0): strategies do not touch the loss.

    Hyper-parameters:
        h: the update interval, local steps between two pushes; a whole number of at least 1. Default 16: as local-sgd;
            the paper trains for an epoch of the local data.
        mixing: the mixing rate of a fresh state, in (0, 1]. Default 0.6: the paper's (unverified).
        decay: the form of s: poly, hinge or constant. Default poly.
        exponent: of poly, at least 0. Default 0.5: the paper's.
        slope: of hinge, above 0. Default 10: the paper's (unverified).
        start: staleness up to which hinge is 1; a whole number of at least 0. Default 4: the paper's (unverified).
    """

    h: int = 16
    mixing: float = 0.6
    decay: Literal["poly", "hinge", "constant"] = "poly"
    exponent: float = 0.5
    slope: float = 10.0
    start: int = 4

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("h", self.h, 1)
        require_between("mixing", self.mixing, 0.0, 1.0, open_low=True)
        require_between("exponent", self.exponent, 0.0)
        require_between("slope", self.slope, 0.0, open_low=True)
        require_whole("start", self.start, 0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push the local state at every H-th step, and at the last: an accumulated update would be no state."""
        return Push(vector=step.params) if step.k >= self.h or step.last else None

    def init_server(self, x0: Vec, n_workers: int) -> ServerState:
        """Keep the global state only."""
        return ServerState(x0)

    def on_push(self, s: ServerState, msg: Received) -> Sequence[Reply]:
        """Mix at once and answer at once."""
        weight = self.mixing * self.freshness(msg.staleness)
        s.x.lerp_(msg.vector, weight)
        return (Reply(msg.worker, info={"weight": weight}),)

    def freshness(self, staleness: int) -> float:
        """The factor s, 1 for a state that is not stale."""
        if self.decay == "poly":
            return float((1 + staleness) ** -self.exponent)
        if self.decay == "hinge":
            return 1 / (1 + self.slope * max(0, staleness - self.start))
        return 1.0
