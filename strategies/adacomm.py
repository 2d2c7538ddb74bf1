"""Local SGD whose update interval shrinks with the training loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, Round, Step, Strategy, Vec, require_between, require_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MOST_LOSS = 1e300
"""Larger ones may have no mean that is a float; they say nothing of the progress."""


@dataclass
class Interval:
    """The update interval that a worker was told last."""

    h: int


@dataclass
class TimedRound(Round):
    """A round, the interval now in force, and what the next decision on it needs."""

    h: int = 1
    now: float = 0.0
    due_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    first_loss: float | None = None


@dataclass(frozen=True)
class AdaComm(Strategy[Interval, TimedRound]):
    """AdaComm: local SGD that starts with a long interval and shortens it as the loss falls.

    Rule: x <- x + (1/N) sum_i u_i every H local steps, barrier; every T0 seconds H' = ceil(sqrt(F/F0) H0), and
        H <- H' if H' < H, else max(1, floor(gamma H)).
    Source: Wang and Joshi, "Adaptive communication strategies to achieve the best error-runtime trade-off in
        local-update SGD", SysML 2019, section 4.

    Deviations: F and F0 are the mean training losses reported with the round that ends a block of T0 seconds and with
    the first; the paper evaluates the averaged model. Its variant for a varying learning rate is left out.

    Hyper-parameters:
        h0: the first interval H0, in local steps; a whole number of at least 1. Default 16: as local-sgd; the paper
            finds it by trial for each model.
        t0_s: seconds between two decisions, above 0. Default 60: the paper's.
        gamma: factor on the interval if the loss calls for no shorter one, in [0, 1]. Default 0.5: the paper's.
    """

    h0: int = 16
    t0_s: float = 60.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("h0", self.h0, 1)
        require_between("t0_s", self.t0_s, 0.0, open_low=True)
        require_between("gamma", self.gamma, 0.0, 1.0)

    def init_worker(self, x0: Vec, worker: int) -> Interval:
        """Start with H0."""
        return Interval(self.h0)

    def after_step(self, w: Interval, step: Step) -> Push | None:
        """Push at every H-th step."""
        return Push() if step.k >= w.h else None

    def after_reply(self, w: Interval, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over the global state and the interval."""
        local.copy_(pulled)
        w.h = int(hint.get("h", w.h))

    def init_server(self, x0: Vec, n_workers: int) -> TimedRound:
        """Open the first round."""
        return TimedRound(x0, h=self.h0, due_s=self.t0_s)

    def on_push(self, s: TimedRound, msg: Received) -> Sequence[Reply]:
        """Hold the reply until every worker has pushed."""
        s.now = msg.now
        s.losses.append(msg.loss)
        s.arrive(msg.worker, msg.vector)
        return self._close(s)

    def on_leave(self, s: TimedRound, worker: int) -> Sequence[Reply]:
        """Close the round if it was only this worker that it waited for."""
        return self._close(s)

    def next_interval(self, h: int, loss_ratio: float) -> int:
        """The interval after h, given F/F0; never longer than h."""
        # A ratio that is no number or below 0 says nothing of the progress: then only gamma shortens.
        wanted = math.ceil(math.sqrt(loss_ratio) * self.h0) if 0 <= loss_ratio < math.inf else h
        return max(1, wanted if wanted < h else math.floor(self.gamma * h))

    def _close(self, s: TimedRound) -> list[Reply]:
        if not s.complete():
            return []
        loss = fmean(s.losses) if max(map(abs, s.losses)) <= MOST_LOSS else math.nan
        s.losses.clear()
        s.first_loss = loss if s.first_loss is None else s.first_loss
        if s.now >= s.due_s:
            s.h = self.next_interval(s.h, loss / s.first_loss if s.first_loss else math.nan)
            s.due_s = (s.now // self.t0_s + 1) * self.t0_s
        return [reply._replace(hint={"h": s.h}) for reply in s.average()]
