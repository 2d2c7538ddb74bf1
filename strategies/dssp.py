"""Dynamic stale-synchronous parallel training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_whole
from strategies.ssp import Clocks

if TYPE_CHECKING:
    from collections.abc import Sequence


LEAST_CYCLE_S, MOST_CYCLE_S = 1e-9, 1e9
"""Cycles outside of this are no measurement and predict nothing."""


@dataclass
class TimedClocks(Clocks):
    """Clocks, when every worker pushed last, how long its cycle takes, and the steps it may still run ahead."""

    pushed_s: dict[int, float] = field(default_factory=dict)
    cycle_s: dict[int, float] = field(default_factory=dict)
    extra: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Dssp(Strategy[None, TimedClocks]):
    """Dynamic stale-synchronous: ssp whose fastest worker may run ahead to where it should wait least.

    Rule: as ssp with s = s_low + r; the fastest worker i, once it leads by more than s_low, gets the r in [0, r_max]
        that minimises the predicted wait min_k (t_q + k c_q) - (t_i + r c_i) >= 0, q the slowest, t last push, c cycle.
    Source: Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning", ICDCS 2019,
        Algorithms 1 and 2.

    Deviations: a cycle is the time of step and exchange; the paper's, between two pushes, counts the waiting as well.
    s_low + r_max is a hard bound, also when the fastest worker is granted steps anew.

    Hyper-parameters:
        s_low: the least slack, a whole number of at least 0. Default 3: as the paper's range 3 to 15 (unverified).
        r_max: most steps on top of s_low, a whole number of at least 0; 0 is ssp. Default 12: the same range.
    """

    columns: ClassVar[tuple[str, ...]] = ("extra_steps",)

    s_low: int = 3
    r_max: int = 12

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("s_low", self.s_low, 0)
        require_whole("r_max", self.r_max, 0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push always."""
        return Push()

    def init_server(self, x0: Vec, n_workers: int) -> TimedClocks:
        """Fix the weight of every push."""
        return TimedClocks(x0, weight=1 / n_workers)

    def on_push(self, s: TimedClocks, msg: Received) -> Sequence[Reply]:
        """Apply at once; let the fastest worker run ahead if that saves it waiting."""
        worker = msg.worker
        lead = s.tick(msg)
        s.pushed_s[worker] = msg.now
        s.cycle_s[worker] = msg.n_steps * msg.step_s + msg.exchange_s
        extra = s.extra.pop(worker, 0)
        if extra == 0 and lead > self.s_low and s.clock[worker] == max(s.clock.values()):
            extra = self.choose(s, worker, lead)
        if extra == 0:
            return s.release(self.s_low)
        s.extra[worker] = extra - 1
        s.waiting.discard(worker)
        return [Reply(worker, info={"weight": s.weight, "extra_steps": extra}), *s.release(self.s_low)]

    def choose(self, s: TimedClocks, worker: int, lead: int) -> int:
        """How many further steps, from now on, make the predicted wait of this worker least; the fewest of equals."""
        slowest = min(s.clock, key=lambda rank: (s.clock[rank], rank))
        theirs, own = s.cycle_s.get(slowest, 0.0), s.cycle_s[worker]
        if not (LEAST_CYCLE_S <= theirs <= MOST_CYCLE_S and own <= MOST_CYCLE_S):
            return 0

        def wait_s(r: int) -> float:
            behind = s.pushed_s[worker] + r * own - s.pushed_s[slowest]
            return max(1, math.ceil(behind / theirs)) * theirs - behind

        return min(range(self.s_low + self.r_max - lead + 2), key=wait_s, default=0)

    def on_join(self, s: TimedClocks, worker: int) -> Sequence[Reply]:
        """Start the newcomer's clock."""
        s.join(worker)
        return (Reply(worker),)

    def on_leave(self, s: TimedClocks, worker: int) -> Sequence[Reply]:
        """Let those go who waited for this worker."""
        s.leave(worker)
        for known in (s.pushed_s, s.cycle_s, s.extra):
            known.pop(worker, None)
        return s.release(self.s_low)
