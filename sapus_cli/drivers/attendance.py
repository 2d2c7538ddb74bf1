"""Which workers of a run are lost and which are expected back. Without I/O; times are seconds on any steady clock."""

from __future__ import annotations

import math


class Attendance:
    """Keeps count of the workers that did not leave of their own will.

    Args:
        n_workers: workers of the run.
        least: so many must not be lost.
        patience_s: how long fewer are put up with.

    Attributes:
        lost: ranks of those that nobody expects back. They may come all the same.
        done: ranks of those that left of their own will, with nothing left to do.
    """

    def __init__(self, n_workers: int, least: int, patience_s: float) -> None:
        self.lost: set[int] = set()
        self.done: set[int] = set()
        self._n_workers = n_workers
        self._least = least
        self._patience_s = patience_s
        self._expected: dict[int, float] = {}
        self._short_since_s: float | None = None

    @property
    def expects(self) -> bool:
        """Whether somebody is expected back."""
        return bool(self._expected)

    @property
    def enough(self) -> bool:
        """Whether as many as are needed are not lost."""
        return self._n_workers - len(self.lost) >= self._least

    def is_missing(self, rank: int) -> bool:
        """Whether a worker is lost or expected back, so that its place is free."""
        return rank in self.lost or rank in self._expected

    def arrive(self, rank: int) -> None:
        """A worker has come, or come back."""
        self.lost.discard(rank)
        self.done.discard(rank)
        self._expected.pop(rank, None)

    def lose(self, rank: int) -> None:
        """A worker is gone, and nothing is known of a return."""
        self._expected.pop(rank, None)
        self.lost.add(rank)

    def expect(self, rank: int, until_s: float = math.inf) -> None:
        """A worker is gone, but will be back; at `until_s` it is lost."""
        self.lost.discard(rank)
        self._expected[rank] = until_s

    def overdue(self, now: float) -> list[int]:
        """Those that were expected by now."""
        return [rank for rank, until_s in self._expected.items() if now > until_s]

    def fails(self, now: float) -> bool:
        """Whether there have been too few for longer than is put up with. To be asked again and again."""
        if self.enough:
            self._short_since_s = None
            return False
        if self._short_since_s is None:
            self._short_since_s = now
        return now - self._short_since_s > self._patience_s
