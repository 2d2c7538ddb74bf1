"""Lazy aggregation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sapus_cli.strategy import Push, Received, Reply, Step, Strategy, Vec, require_between, require_whole
from strategies.asp import Weighted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass
class Memory:
    """What a worker compares with.

    `before` is the local state before the coming step, `sent` minus the step pushed last (zero at first), `seen` the
    state pulled last, all of shape `(d,)`; `moves` are the squares |dx|^2; `k` steps have been taken since the pull.
    """

    before: Vec
    sent: Vec
    seen: Vec
    moves: deque[float]
    k: int = 0


@dataclass(frozen=True)
class Lag(Strategy[Memory, Weighted]):
    """Lazy aggregation: a worker uploads when its step differs enough from the step it uploaded last.

    Rule: push when |v - v_sent|^2 >= xi sum_{d=1..D} |dx_d|^2, v the update of one local step, dx_d the latest moves of
        the global state; x <- x + (1/N) u_i at each push.
    Source: Chen et al., "LAG: lazily aggregated gradient for communication-efficient distributed learning", NeurIPS
        2018, the worker's condition (LAG-WK). It compares |g - g_sent|^2 with (1/(alpha^2 N^2)) xi sum |dx_d|^2, alpha
        the rate on the sum of gradients; with plain SGD v = -alpha N g, which makes it the rule above.

    Deviations: in LAG a silent worker still receives each new state, and the server repeats its last gradient. Here a
    worker receives a state only by pushing, so a silent one steps on from its own state, and what it accumulates goes
    out when the condition fires: nothing is repeated, and there is no barrier. A move dx is that between two pulls,
    divided by the steps in between. h_max is ours: a condition that is never met must not end all communication. With
    minibatches the noise of v meets the condition at almost every step (Chen, Sun and Yin, "LASG", 2020, take this up).

    Hyper-parameters:
        xi: weight of each move, at least 0; 0 is asp. Default 0.1: 1/D, as in the authors' code for LAG-WK.
        d: number of moves D, a whole number of at least 1. Default 10: the paper's.
        h_max: local steps after which a push goes out in any case; a whole number of at least 1. Default 100.
    """

    columns: ClassVar[tuple[str, ...]] = ("change", "bound")

    xi: float = 0.1
    d: int = 10
    h_max: int = 100

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_between("xi", self.xi, 0.0)
        require_whole("d", self.d, 1)
        require_whole("h_max", self.h_max, 1)

    def init_worker(self, x0: Vec, worker: int) -> Memory:
        """Start from what was pulled, with nothing sent."""
        return Memory(x0.clone(), x0.new_zeros(x0.shape), x0.clone(), deque(maxlen=self.d))

    def after_step(self, w: Memory, step: Step) -> Push | None:
        """Push if this step differs enough from the one pushed last."""
        minus_v = w.before.sub_(step.params)
        # |v|^2 - 2 <v, v_sent> + |v_sent|^2 needs no vector for the difference.
        change = max(float(minus_v.dot(minus_v) - 2 * minus_v.dot(w.sent) + w.sent.dot(w.sent)), 0.0)
        bound = self.xi * sum(w.moves)
        # Written so that a change that is no number calls for a push as well.
        due = not change < bound
        if pushes := due or step.k >= self.h_max:
            w.sent.copy_(minus_v)
        w.k = step.k
        w.before.copy_(step.params)
        reason = "change" if due else "h_max"
        return Push(info={"reason": reason, "change": change, "bound": bound}) if pushes else None

    def after_reply(self, w: Memory, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over the global state, and note how far it moved."""
        local.copy_(pulled)
        w.before.copy_(pulled)
        move = w.seen.sub_(pulled)
        w.moves.append(float(move.dot(move)) / w.k**2)
        w.seen.copy_(pulled)

    def init_server(self, x0: Vec, n_workers: int) -> Weighted:
        """Fix the weight of every push."""
        return Weighted(x0, weight=1 / n_workers)

    def on_push(self, s: Weighted, msg: Received) -> Sequence[Reply]:
        """Apply at once and answer at once."""
        s.x.add_(msg.vector, alpha=s.weight)
        return (Reply(msg.worker, info={"weight": s.weight}),)
