"""A delay line: what has been handed over and has not arrived yet."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class DelayLine:
    """Calls that are due at a time, in seconds on any clock; what is due at the same time keeps its order."""

    def __init__(self) -> None:
        self._held: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def put(self, due: float, call: Callable[[], object]) -> None:
        """Hold a call until it is due."""
        heapq.heappush(self._held, (due, next(self._order), call))

    @property
    def next_due(self) -> float | None:
        """When the earliest call is due; None if there is none."""
        return self._held[0][0] if self._held else None

    def take(self, now: float) -> tuple[float, Callable[[], object]] | None:
        """The earliest call that is due by now, and when it was; None if there is none."""
        if not self._held or self._held[0][0] > now:
            return None
        due, _, call = heapq.heappop(self._held)
        return due, call
