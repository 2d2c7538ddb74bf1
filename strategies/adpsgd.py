"""Local SGD whose update interval keeps the variance among workers constant."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec, require_between, require_whole
from strategies.adacomm import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass
class VarianceRound(Round):
    """A round, the interval now in force, the rounds so far, C, and |u_i|^2 of this round."""

    h: int = 1
    rounds: int = 0
    target: float = 0.0
    squares: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class AdpSgd(Strategy[Interval, VarianceRound]):
    """Adaptive periodic averaging: local SGD whose interval follows the variance of the states it averages.

    Rule: x <- x + (1/N) sum_i u_i every H local steps, barrier; S = (1/N) sum_i |u_i - mean u|^2, C the mean of S over
        the first rounds; then H <- H + 1 if S < low C, H <- max(1, H - 1) if S > high C.
    Source: Jiang and Agrawal, "Adaptive periodic averaging", arXiv 2007.06134, 2020, its main algorithm.

    Deviation: the paper compares S with gamma C, gamma the learning rate and C the mean of S/gamma. Strategies do not
    know gamma. While it is constant it cancels; when it decays, the target here stays that of the first rounds.

    Hyper-parameters:
        h0: the first update interval, in local steps; a whole number of at least 1. Default 4 (unverified).
        warmup: first rounds, at interval h0, over which C is the mean; a whole number of at least 1. Default 25: ours.
        low: below this multiple of the target the interval grows; in [0, 1]. Default 0.7: the paper's.
        high: above this multiple of the target it shrinks; at least 1. Default 1.3: the paper's.
    """

    columns: ClassVar[tuple[str, ...]] = ("variance", "target")

    h0: int = 4
    warmup: int = 25
    low: float = 0.7
    high: float = 1.3

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("h0", self.h0, 1)
        require_whole("warmup", self.warmup, 1)
        require_between("low", self.low, 0.0, 1.0)
        require_between("high", self.high, 1.0)

    def init_worker(self, x0: Vec, worker: int) -> Interval:
        """Start with the first interval."""
        return Interval(self.h0)

    def after_step(self, w: Interval, step: Step) -> Push | None:
        """Push at every H-th step."""
        return Push() if step.k >= w.h else None

    def after_reply(self, w: Interval, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over the global state and the interval."""
        local.copy_(pulled)
        w.h = int(hint.get("h", w.h))

    def init_server(self, x0: Vec, n_workers: int) -> VarianceRound:
        """Open the first round."""
        return VarianceRound(x0, h=self.h0)

    def on_push(self, s: VarianceRound, msg: Received) -> Sequence[Reply]:
        """Hold the reply until every worker has pushed."""
        s.squares.append(float(msg.vector.dot(msg.vector)))
        s.arrive(msg.worker, msg.vector)
        return self._close(s)

    def on_leave(self, s: VarianceRound, worker: int) -> Sequence[Reply]:
        """Close the round if it was only this worker that it waited for."""
        return self._close(s)

    def _close(self, s: VarianceRound) -> list[Reply]:
        if not s.complete():
            return []
        weight = 1 / len(s.squares)
        mean = s.mean()
        s.x.add_(mean)
        # All started from the same state, so the spread of the updates is the spread of the states.
        variance = max(0.0, fmean(s.squares) - float(mean.dot(mean)))
        s.squares.clear()
        s.rounds += 1
        if s.rounds <= self.warmup:
            s.target += (variance - s.target) / s.rounds
        elif variance < self.low * s.target:
            s.h += 1
        elif variance > self.high * s.target:
            s.h = max(1, s.h - 1)
        return s.release({"weight": weight, "variance": variance, "target": s.target}, {"h": s.h})
