"""The performance model: measured timings of a worker and of the server -> bounds of the update interval.

Everything here is a pure function of numbers, or a running average of them. The formulas are this project's own
construction of the parts that Zhang and Wang (IEEE TPDS 33(7), 2022) name in their abstract; `docs/algorithm.md`
derives them.

Units: seconds, bytes, bytes a second; intervals in local steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

STEP_WEIGHT = 0.1
"""Weight of a new step time: half-life ln 2 / -ln(1 - 0.1) = 6.6 pushes."""
CPU_WEIGHT = 0.3
"""Weight of a new server CPU time: half-life 1.9 exchanges."""
OUTLIER = 4.0
"""A new value counts as at most this many times the average, and at least its reciprocal."""
GUARD = 1.5
"""With overlap an interval lasts at least this many exchanges, so that a worker does not push at every reply."""
FREE = 0.1
"""An exchange of at most this many steps costs next to nothing."""
MOST_STEPS = 100_000
"""No bound is ever longer."""
_RATES = 64
_OWN_EXCHANGES = 16

Resource = Literal["cpu", "network", "memory", "guard", "none"]


@dataclass
class Average:
    """An exponential average of a positive quantity that one outlier cannot carry away.

    Each new value moves the average by `weight` of the difference, after the value has been brought into
    [average / 4, 4 average]: a single outlier, however wild, raises it by at most 3 `weight`, or lowers it by at most
    0.75 `weight`. The first value is taken as it is.
    """

    weight: float
    value: float | None = None

    def add(self, new: float) -> None:
        """Take a measurement. Negative and non-finite ones are left out."""
        if not math.isfinite(new) or new < 0:
            return
        if not self.value:
            self.value = new
            return
        inside = min(max(new, self.value / OUTLIER), OUTLIER * self.value)
        self.value += self.weight * (inside - self.value)


@dataclass
class WorkerTimes:
    """What is known of one worker: seconds a step, and seconds an exchange that does not queue.

    An exchange takes from the push sent to the reply received, less the time that the server withheld the reply. A
    bound that counted the time in queues would grow with the queue that it is there to prevent, so the shortest of
    the latest 16 exchanges stands for all: it follows a lasting change after at most 16.
    """

    step_s: Average = field(default_factory=lambda: Average(STEP_WEIGHT))
    _pushes: int = 0
    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=_OWN_EXCHANGES))

    @property
    def exchange_s(self) -> float | None:
        """Seconds of an exchange; None before the first."""
        return min(self._exchanges) if self._exchanges else None

    def add(self, step_s: float, exchange_s: float) -> None:
        """Take note of a push: its mean step time, and how long the exchange before it took, if there was one."""
        self._pushes += 1
        self.step_s.add(step_s)
        if self._pushes > 1:
            self._exchanges.append(exchange_s)


@dataclass
class ServerLoad:
    """What one exchange costs the server, and how fast the link has proved to be.

    The link's rate is measured where nobody has said what it is: twice the bytes of an exchange (push and reply)
    over the lower quartile of the latest 64 exchange times, those that hardly queued. It holds CPU and scheduling
    time too, so it is what the link has achieved, not what it could.
    """

    cpu_s: Average = field(default_factory=lambda: Average(CPU_WEIGHT))
    _last_cpu_s: float | None = None
    _since: int = 0
    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    _bytes: int = 0

    def add(self, server_cpu_s: float, exchange_s: float, n_bytes: int) -> None:
        """Take note of a push: the server's CPU seconds so far, its worker's last exchange, its size.

        CPU seconds that have not changed were not read anew: what the next reading adds is that of all pushes since.
        """
        if self._last_cpu_s is None:
            self._last_cpu_s = server_cpu_s
        else:
            self._since += 1
        if server_cpu_s > self._last_cpu_s:
            each_s = (server_cpu_s - self._last_cpu_s) / self._since
            for _ in range(self._since):
                self.cpu_s.add(each_s)
            self._last_cpu_s, self._since = server_cpu_s, 0
        self._bytes = n_bytes
        if exchange_s > 0:
            self._exchanges.append(exchange_s)

    @property
    def measured_bytes_per_s(self) -> float | None:
        """The link's rate in each direction as it has shown; None before the first exchange."""
        if not self._exchanges:
            return None
        return 2 * self._bytes / _lower_quartile(self._exchanges)


class Load(NamedTuple):
    """One exchange at the server: bytes in each direction, link rate, CPU seconds, and what it may hold in flight."""

    n_bytes: float
    link_bytes_per_s: float
    cpu_s: float
    cores: float
    memory_bytes: float


class LowerBound(NamedTuple):
    """A lower bound of the interval in steps, and the resource that binds ("none" if one step is enough)."""

    steps: int
    resource: Resource


def fair_cycle(least: Sequence[float], workers: int, hold_s: float) -> float:
    """How long the cycle of a worker must be that takes no more than its share of a resource, in seconds.

    Max-min fair shares (Bertsekas and Gallager, Data Networks, 1992): who cannot use an equal share takes less, and
    the others divide what is left among them. C is the solution of

        sum over the workers of 1 / max(C, least_j) = 1 / hold_s

    Args:
        least: a cycle for each worker than which it is capable of none shorter (its step), in seconds, >= 0; of fewer
            workers than there are if not all are known: the others are taken to be capable of any.
        workers: how many there are, >= 1.
        hold_s: for how long an exchange holds the resource, >= 0.
    """
    if hold_s <= 0:
        return 0.0
    room, sharing = 1 / hold_s, workers
    for cycle in sorted(least, reverse=True):
        if sharing == 1 or cycle * room <= sharing:
            break
        room -= 1 / cycle
        sharing -= 1
    return sharing / room


def resource_bound(
    *,
    workers: int,
    step_s: float,
    exchange_s: float,
    load: Load,
    rho: float,
    overlap: bool,
    least: Sequence[float] = (),
) -> LowerBound:
    """The shortest interval at which the server keeps up with all workers.

    A worker that waits for its reply starts a cycle every k t_s + t_x seconds; one that overlaps, every k t_s. An
    exchange occupies the link for b/B seconds in each direction and the processor for s_cpu/cores; neither may be
    busy for more than the share rho of the time, and each worker has its fair share of that (`fair_cycle`). Of workers
    that are alike:

        waiting:      k t_s + t_x >= N s / rho - t_s / 4            for s = b/B (network) and s = s_cpu/cores (cpu)
        overlapping:  k t_s >= N s / rho - t_s / 4, and k t_s >= 1.5 t_x (guard)

    The quarter step is for rounding: a bound that is missed by less than that is met. Of pushes in flight,
    N t_x / cycle on average, at most L = floor(memory / bytes of a push, received and answered) may be held:

        memory:       cycle >= N t_x / L

    Args:
        workers: N, live workers.
        step_s: t_s of the worker, > 0.
        exchange_s: t_x of the worker.
        load: what an exchange costs.
        rho: share of time that a resource may be busy, in (0, 1].
        overlap: whether the worker steps on while an exchange is in flight.
        least: what each worker's cycle takes at least, in seconds, as for `fair_cycle`.
    """
    waiting = 0.0 if overlap else exchange_s
    spare = waiting + step_s / 4
    in_flight = max(1, math.floor(load.memory_bytes / (2 * load.n_bytes))) if math.isfinite(load.memory_bytes) else None
    seconds: dict[Resource, float] = {
        "cpu": fair_cycle(least, workers, load.cpu_s / load.cores / rho) - spare,
        "network": fair_cycle(least, workers, load.n_bytes / load.link_bytes_per_s / rho) - spare,
        "memory": workers * exchange_s / in_flight - waiting if in_flight else 0.0,
        "guard": GUARD * exchange_s if overlap else 0.0,
    }
    resource = max(seconds, key=lambda name: seconds[name])
    steps = _steps(seconds[resource] / step_s)
    return LowerBound(steps, resource if steps > 1 else "none")


def theoretical_lower(c: float, horizon: float) -> int:
    """The interval at which work done a second is greatest, given what a step is worth within its interval.

    Of H steps at a cost of H + c step times, c = t_x / t_s, each is worth e(H) = 1 / (1 + sqrt(H / h)) on average:
    steep directions reach the noise of their own worker within a few steps. H e(H) / (H + c) is greatest at the first
    k with

        c / (k + c) <= (1/2) r / (1 + r),   r = sqrt(k / h)         (for k << h: k = (4 h c^2)^(1/3)).

    Args:
        c: exchange time in steps, >= 0.
        horizon: h, in steps, > 0.
    """

    def falls_short(k: int) -> bool:
        r = math.sqrt(k / horizon)
        return c / (k + c) > 0.5 * r / (1 + r)

    low, high = 0, 1
    while high < MOST_STEPS and falls_short(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if falls_short(middle) else (low, middle)
    return min(high, MOST_STEPS)


def momentum_bound(h_min: int, c: float, momentum: float) -> int:
    """The interval to take in the place of a lower bound that local momentum makes a bad one.

    A velocity outlives about 1 / (1 - mu) steps. Intervals above 1 and below that were measured to be bad, longer ones
    and 1 were not (docs/algorithm.md): so it is 1 where an exchange costs next to nothing, and 1 / (1 - mu) elsewhere.

    Args:
        h_min: the lower bound without regard to momentum.
        c: exchange time in steps.
        momentum: mu, in [0, 1).
    """
    memory = _steps(1 / (1 - momentum))
    if h_min >= memory:
        return h_min
    return 1 if h_min == 1 and c <= FREE else memory


def theoretical_upper(steps_taken: float, workers: int) -> int:
    """The longest interval at which local SGD still converges at the rate of minibatch SGD, up to constants.

    H <= sqrt(T / N) (Stich, ICLR 2019), T the local steps of a worker. T is taken as the steps so far, so that the
    bound holds at every moment and needs no budget; at least 1.
    """
    return max(1, math.isqrt(max(0, math.floor(steps_taken / workers))))


def curvature_upper(lr_curvature: float) -> int:
    """The longest interval with eta L + (eta L)^2 H (H - 1) <= 1 (Wang and Joshi 2018); at least 1.

    For a problem whose curvature is known. L of a network cannot be had from its noisy gradients, and the bound is 1
    wherever eta L is 1 or more.

    Args:
        lr_curvature: eta L, learning rate times the largest eigenvalue of the Hessian, > 0.
    """
    room = (1 - lr_curvature) / lr_curvature**2
    return max(1, min(MOST_STEPS, math.floor(0.5 + math.sqrt(0.25 + room) + 1e-9))) if room > 0 else 1


def marginal_elasticity(history: list[float]) -> float:
    """How fast the accumulated update grows: d ln a / d ln k at the last of a(1) ... a(k).

    1 while gradients agree (a ~ k), 1/2 where only noise is left (a ~ sqrt(k)), 0 where a stands still. The slope in
    logarithms of a parabola through three points, k, k - m/2 and k - m with m = max(2, k/4), which is exact for every
    power of k, does not depend on the scale of a, and keeps up with a slope that changes.

    Args:
        history: a(1), ..., a(k), k >= 1, none negative.
    """
    if not slope_known(history):
        return 1.0
    points = _points(history)
    x = [math.log(point) for point in points]
    y = [math.log(history[point - 1]) for point in points]
    newest = (y[-1] - y[-2]) / (x[-1] - x[-2])
    if len(points) == 2:  # noqa: PLR2004 - no third point yet
        return newest
    older = (y[1] - y[0]) / (x[1] - x[0])
    return newest + (newest - older) * (x[2] - x[1]) / (x[2] - x[0])


def slope_known(history: list[float]) -> bool:
    """Whether there are two points at least to take a slope from, and none of them is missing (0)."""
    points = _points(history)
    return len(points) > 1 and all(history[point - 1] > 0 for point in points)


def _points(history: list[float]) -> list[int]:
    k = len(history)
    window = min(max(2, k // 4), k - 1)
    return sorted({k, k - window // 2, k - window})


def marginal_due(history: list[float], c: float) -> bool:
    """Whether a'(k) <= a(k) / (k + c): another step would bring less a second than the interval did on average.

    Charnov's marginal value theorem (1976), for an interval that costs k step times and an exchange of c.
    """
    k = len(history)
    return marginal_elasticity(history) <= k / (k + c) * (1 + 1e-9)


def _lower_quartile(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 4]


def _steps(k: float) -> int:
    """The least whole number of steps that is at least k, within 1 and the most."""
    return max(1, math.ceil(min(MOST_STEPS, k - 1e-9)))
