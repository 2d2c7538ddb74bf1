"""Selective synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_between, require_whole
from strategies.asp import Weighted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass
class Trend:
    """The local state before the coming step, shape `(d,)`, and the smoothed squared norm of past steps."""

    before: Vec
    square: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class SelSync(Strategy[Trend, Weighted]):
    """SelSync: a worker synchronises when the norm of its gradient changes much, and works locally otherwise.

    Rule: E <- E + smoothing (|v|^2 - E), v the update of one local step; push when |E - E_before| / E_before >= delta;
        x <- x + (1/N) u_i at each push.
    Source: Tyagi and Swany, "Accelerating distributed ML training via selective synchronization", IEEE CLUSTER 2023,
        Algorithm 1. With plain SGD |v|^2 = eta^2 |g|^2, and eta cancels from the ratio.

    Deviations: there, workers exchange a flag of one bit after every step, and all average their states if any raised
    it. A parameter server reaches a worker only by replying to a push, and a push carries the state, so that exchange
    would cost as much as it saves. Here a worker acts on its own flag, alone and without a barrier; the others meet its
    progress at their own next push. h_max is ours: a delta that is never reached must not end all communication.

    Hyper-parameters:
        delta: relative change that calls for a push, at least 0; 0 pushes at every step. Default 0.3: of the authors'
            code and the paper's experiments.
        smoothing: weight of the newest step in E, in (0, 1]. Default 0.16: the paper's N/100 at its 16 workers
            (unverified).
        window: steps at the start that are pushed each, until E has settled; a whole number of at least 1. Default 25:
            the authors' code, which synchronises until its smoothing window is full.
        h_max: local steps after which a push goes out in any case; a whole number of at least 1. Default 100.
    """

    columns: ClassVar[tuple[str, ...]] = ("change",)

    delta: float = 0.3
    smoothing: float = 0.16
    window: int = 25
    h_max: int = 100

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_between("delta", self.delta, 0.0)
        require_between("smoothing", self.smoothing, 0.0, 1.0, open_low=True)
        require_whole("window", self.window, 1)
        require_whole("h_max", self.h_max, 1)

    def init_worker(self, x0: Vec, worker: int) -> Trend:
        """Start from what was pulled."""
        return Trend(x0.clone())

    def after_step(self, w: Trend, step: Step) -> Push | None:
        """Push if the squared norm of the steps moved enough."""
        minus_v = w.before.sub_(step.params)
        square = float(minus_v.dot(minus_v))
        w.before.copy_(step.params)
        settled = w.square if w.steps else square
        w.square = settled + self.smoothing * (square - settled)
        w.steps += 1
        if w.steps <= self.window or settled <= 0:
            return Push(info={"reason": "warm-up"})
        change = abs(w.square - settled) / settled
        # Written so that a change that is no number calls for a push as well.
        if not change < self.delta:
            return Push(info={"reason": "change", "change": change})
        return Push(info={"reason": "h_max", "change": change}) if step.k >= self.h_max else None

    def after_reply(self, w: Trend, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over the global state; the next step starts from it."""
        local.copy_(pulled)
        w.before.copy_(pulled)

    def init_server(self, x0: Vec, n_workers: int) -> Weighted:
        """Fix the weight of every push."""
        return Weighted(x0, weight=1 / n_workers)

    def on_push(self, s: Weighted, msg: Received) -> Sequence[Reply]:
        """Apply at once and answer at once."""
        s.x.add_(msg.vector, alpha=s.weight)
        return (Reply(msg.worker, info={"weight": s.weight}),)
