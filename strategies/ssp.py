"""Stale-synchronous parallel training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sapus_cli.strategy import Push, Received, Reply, ServerState, Step, Strategy, Vec, require_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Clocks(ServerState):
    """The global state, how many pushes every live worker has made, and who waits for a reply."""

    weight: float = 1.0
    clock: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def join(self, worker: int) -> None:
        """Start the clock of a worker at the lowest one, so that nobody waits for a newcomer to catch up."""
        self.clock[worker] = min(self.clock.values(), default=0)

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        self.clock.pop(worker, None)
        self.waiting.discard(worker)

    def tick(self, msg: Received) -> int:
        """Apply a push; returns by how much its worker now leads the slowest."""
        self.x.add_(msg.vector, alpha=self.weight)
        self.clock[msg.worker] += 1
        self.waiting.add(msg.worker)
        return self.clock[msg.worker] - min(self.clock.values())

    def release(self, slack: int) -> list[Reply]:
        """Replies to all that wait and lead the slowest by no more than `slack`."""
        lowest = min(self.clock.values(), default=0)
        free = [worker for worker in sorted(self.waiting) if self.clock[worker] - lowest <= slack]
        self.waiting.difference_update(free)
        return [Reply(worker, info={"weight": self.weight}) for worker in free]


@dataclass(frozen=True)
class Ssp(Strategy[None, Clocks]):
    """Stale-synchronous: asynchronous, but nobody runs more than s steps ahead of the slowest worker.

    Rule: x <- x + (1/N) u_i at each push of one local step; worker i waits while clock_i - min_j clock_j > s.
    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013,
        section 2 (there updates are summed; here each weighs 1/N, as in asp).

    Hyper-parameters:
        s: how many steps a worker may lead the slowest, a whole number of at least 0. Default 3: common in later
            comparisons; Ho et al. recommend no single value (unverified).
    """

    s: int = 3

    def __post_init__(self) -> None:
        """Check the range."""
        require_whole("s", self.s, 0)

    def init_worker(self, x0: Vec, worker: int) -> None:
        """Keep nothing."""

    def after_step(self, w: None, step: Step) -> Push | None:
        """Push always."""
        return Push()

    def init_server(self, x0: Vec, n_workers: int) -> Clocks:
        """Fix the weight of every push."""
        return Clocks(x0, weight=1 / n_workers)

    def on_push(self, s: Clocks, msg: Received) -> Sequence[Reply]:
        """Apply at once, and answer everybody who is not too far ahead."""
        s.tick(msg)
        return s.release(self.s)

    def on_join(self, s: Clocks, worker: int) -> Sequence[Reply]:
        """Start the newcomer's clock."""
        s.join(worker)
        return (Reply(worker),)

    def on_leave(self, s: Clocks, worker: int) -> Sequence[Reply]:
        """Let those go who waited for this worker."""
        s.leave(worker)
        return s.release(self.s)
