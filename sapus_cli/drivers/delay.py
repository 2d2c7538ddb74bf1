"""Delay lines: what has been handed over and has not arrived yet. Times are seconds on any one clock."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from sapus_cli.cluster import Direction


class Line(Protocol):
    """Calls that become due one after the other."""

    @property
    def next_due(self) -> float:
        """When the next call is due; infinity if there is none."""

    def take(self) -> tuple[float, Callable[[], object]]:
        """The next call, and when it is due."""


class DelayLine:
    """Calls that are due at a time; what is due at the same time keeps its order."""

    def __init__(self) -> None:
        self._held: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def put(self, due: float, call: Callable[[], object]) -> None:
        """Hold a call until it is due."""
        heapq.heappush(self._held, (due, next(self._order), call))

    @property
    def next_due(self) -> float:
        """When the earliest call is due; infinity if there is none."""
        return self._held[0][0] if self._held else math.inf

    def take(self) -> tuple[float, Callable[[], object]]:
        """The earliest call, and when it is due."""
        due, _, call = heapq.heappop(self._held)
        return due, call


class Arrivals:
    """Messages on their way over one direction of a link, in the order in which they were sent.

    A busy machine may bring a message late: it still goes before those that were sent after it and are on their way.
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._held: list[tuple[float, int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def put(self, sent: float, n_bytes: int, call: Callable[[], object]) -> None:
        """Hold what is to be done with a message of so many bytes until it has arrived."""
        heapq.heappush(self._held, (sent, next(self._order), n_bytes, call))

    @property
    def next_due(self) -> float:
        """When the next message arrives; infinity if there is none."""
        if not self._held:
            return math.inf
        sent, _, n_bytes, _ = self._held[0]
        return self._direction.arrival(sent, n_bytes)

    def take(self) -> tuple[float, Callable[[], object]]:
        """What is to be done with the next message, and when it arrives."""
        sent, _, n_bytes, call = heapq.heappop(self._held)
        return self._direction.deliver_at(sent, n_bytes), call
