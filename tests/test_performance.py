"""The performance model: every function against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from sapus_cli.performance import (
    CPU_WEIGHT,
    MOST_STEPS,
    STEP_WEIGHT,
    Average,
    Load,
    LowerBound,
    ServerLoad,
    WorkerTimes,
    curvature_upper,
    fair_cycle,
    marginal_due,
    marginal_elasticity,
    momentum_bound,
    resource_bound,
    theoretical_lower,
    theoretical_upper,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FREE_LOAD = Load(n_bytes=1e6, link_bytes_per_s=math.inf, cpu_s=0.0, cores=1.0, memory_bytes=math.inf)
"""An exchange that costs the server nothing."""


def filled(weight: float, *values: float) -> Average:
    average = Average(weight)
    for value in values:
        average.add(value)
    return average


def value(average: Average) -> float:
    assert average.value is not None
    return average.value


def known(times: WorkerTimes) -> tuple[float | None, float | None]:
    return times.step_s.value, times.exchange_s


def cpu_s(load: ServerLoad) -> float | None:
    return load.cpu_s.value


def link_rate(load: ServerLoad) -> float | None:
    return load.measured_bytes_per_s


def bound(
    load: Load, *, workers: int = 8, exchange_s: float = 0.0, rho: float = 0.9, overlap: bool = False
) -> LowerBound:
    """The bound of workers whose step takes 0.1 s."""
    return resource_bound(workers=workers, step_s=0.1, exchange_s=exchange_s, load=load, rho=rho, overlap=overlap)


def fires_at(a: Callable[[int], float], c: float, most: int = 2000) -> int | None:
    """The first k at which the trigger fires on a(1), a(2), ..."""
    history: list[float] = []
    for k in range(1, most + 1):
        history.append(a(k))
        if marginal_due(history, c):
            return k
    return None


# Average


def test_the_first_value_is_taken_as_it_is() -> None:
    assert Average(0.1).value is None
    assert filled(0.1, 7.5).value == 7.5


def test_each_value_moves_the_average_by_its_weight() -> None:
    # 10 + 0.3 (20 - 10) = 13; 13 + 0.3 (5 - 13) = 10.6
    assert filled(0.3, 10.0, 20.0).value == pytest.approx(13.0)
    assert filled(0.3, 10.0, 20.0, 5.0).value == pytest.approx(10.6)


@pytest.mark.parametrize(("weight", "half_life"), [(STEP_WEIGHT, 6.6), (CPU_WEIGHT, 1.9)])
def test_half_life(weight: float, half_life: float) -> None:
    # ln 2 / -ln(1 - w): 0.6931 / 0.10536 = 6.58 and 0.6931 / 0.35667 = 1.94. From 1 to 2, half of the way is left when
    # (1 - w)^n = 1/2: after floor(n) values the average is still below 1.5, after ceil(n) it is above.
    assert math.log(2) / -math.log(1 - weight) == pytest.approx(half_life, abs=0.05)
    before, after = math.floor(half_life), math.ceil(half_life)
    assert value(filled(weight, 1.0, *[2.0] * before)) < 1.5 < value(filled(weight, 1.0, *[2.0] * after))


@pytest.mark.parametrize("weight", [STEP_WEIGHT, CPU_WEIGHT, 1.0])
@pytest.mark.parametrize("outlier", [4.0, 5.0, 1e3, 1e300])
def test_one_outlier_moves_the_average_by_a_bounded_share(weight: float, outlier: float) -> None:
    # Up: 2 -> 2 + w (4 * 2 - 2) = 2 (1 + 3 w). Down: 2 -> 2 + w (2/4 - 2) = 2 (1 - 0.75 w).
    assert filled(weight, 2.0, 2.0 * outlier).value == pytest.approx(2 * (1 + 3 * weight))
    assert filled(weight, 2.0, 2.0 / outlier).value == pytest.approx(2 * (1 - 0.75 * weight))
    assert filled(weight, 2.0, 0.0).value == pytest.approx(2 * (1 - 0.75 * weight))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_duration_is_left_out(wrong: float) -> None:
    assert filled(0.3, wrong).value is None
    assert filled(0.3, 2.0, wrong).value == 2.0


def test_a_first_value_of_zero_is_replaced() -> None:
    # Nothing can be brought into [0 / 4, 4 * 0].
    assert filled(0.3, 0.0, 3.0).value == 3.0


def test_a_lasting_change_is_followed() -> None:
    # Ten times as long, weight 0.3. While 4 v < 10, each value counts as 4 v: v <- 1.9 v, so 1, 1.9, 3.61. From there
    # 10 counts: 3.61 + 0.3 * 6.39 = 5.527, then 6.8689, then 7.80823.
    steps = [value(filled(0.3, 1.0, *[10.0] * n)) for n in range(6)]
    assert steps == pytest.approx([1, 1.9, 3.61, 5.527, 6.8689, 7.80823])
    # Ten times as short. While v / 4 > 1: v <- 0.775 v, so 10, 7.75, 6.00625, 4.65484, 3.60750; then 1 counts:
    # 3.60750 - 0.3 * 2.60750 = 2.82525.
    steps = [value(filled(0.3, 10.0, *[1.0] * n)) for n in range(6)]
    assert steps == pytest.approx([10, 7.75, 6.00625, 4.65484375, 3.60750390625, 2.825252734375])


# What is measured


def test_times_of_a_worker() -> None:
    times = WorkerTimes()
    assert known(times) == (None, None)
    # The first push comes before any exchange: the 0.0 that it carries is no measurement.
    times.add(2.0, 0.0)
    assert known(times) == (2.0, None)
    # 2 + 0.1 (3 - 2) = 2.1
    times.add(3.0, 8.0)
    assert known(times) == (2.1, 8.0)
    # The shorter of the two.
    times.add(2.1, 4.0)
    assert known(times)[1] == 4.0


def exchanges(*seconds: float) -> float | None:
    times = WorkerTimes()
    times.add(1.0, 0.0)
    for exchange_s in seconds:
        times.add(1.0, exchange_s)
    return times.exchange_s


def test_an_exchange_takes_the_shortest_of_the_latest_sixteen() -> None:
    # 0.5 is the seventeenth last.
    assert exchanges(0.5, *range(1, 17)) == 1.0
    assert exchanges(*[50.0] * 10, 2.0, *[50.0] * 5) == 2.0


def test_a_lasting_change_of_the_exchange_is_followed() -> None:
    # Longer: when no old one is left of 16. Shorter: at once.
    assert [exchanges(*[1.0] * 16, *[9.0] * n) for n in (15, 16)] == [1.0, 9.0]
    assert exchanges(*[9.0] * 16, 1.0) == 1.0


def test_cpu_seconds_that_were_not_read_anew_are_shared_by_the_pushes_since() -> None:
    load = ServerLoad()
    for server_cpu_s in (2.0, 2.0, 2.0, 2.75):
        load.add(server_cpu_s, 0.0, 8)
    assert cpu_s(load) == 0.25
    load.add(2.75, 0.0, 8)
    assert cpu_s(load) == 0.25


def test_cpu_seconds_of_a_push_are_differences() -> None:
    load = ServerLoad()
    # 5 s had gone into starting up, before the first push.
    load.add(5.0, 0.0, 1000)
    assert cpu_s(load) is None
    load.add(5.25, 0.0, 1000)
    assert cpu_s(load) == 0.25
    # 0.25 + 0.3 (0.5 - 0.25) = 0.325
    load.add(5.75, 0.0, 1000)
    assert cpu_s(load) == pytest.approx(0.325)


def test_the_rate_of_the_link_comes_from_the_exchanges_that_hardly_queued() -> None:
    load = ServerLoad()
    load.add(0.0, 0.0, 1000)
    assert link_rate(load) is None, "a worker without an exchange says nothing"
    for exchange_s in (9.0, 0.5, 7.0, 8.0, 0.25, 6.0, 5.0, 4.0):
        load.add(0.0, exchange_s, 1000)
    # Sorted: 0.25, 0.5, 4, ...; index 8 // 4 = 2 is 4 s for 1000 bytes there and 1000 back.
    assert link_rate(load) == 500.0
    # 64 more push the old ones out: 2000 / 2.
    for _ in range(64):
        load.add(0.0, 2.0, 1000)
    assert link_rate(load) == 1000.0


# Fair shares


@pytest.mark.parametrize("least", [(), (0.1,), (0.1,) * 8, (0.8,) * 8])
def test_of_workers_that_are_alike_each_gets_the_same_share(least: tuple[float, ...]) -> None:
    # Eight exchanges of 0.1 s: 0.8 s, of which all are capable; of whom nothing is known, too.
    assert fair_cycle(least, 8, 0.1) == pytest.approx(0.8)


def test_what_slow_workers_leave_goes_to_the_others() -> None:
    # Ten exchanges a second. Two workers can make one a second at most, so two others have 4 a second each.
    assert fair_cycle((1.0, 0.05, 1.0, 0.05), 4, 0.1) == pytest.approx(0.25)
    # The others are not known yet.
    assert fair_cycle((1.0, 1.0), 4, 0.1) == pytest.approx(0.25)
    # One a second and 4 a second; the fastest, of 100, gets the 5 that are left.
    assert fair_cycle((0.01, 1.0, 0.25), 3, 0.1) == pytest.approx(0.2)
    # 0.5 s is less than the equal share allows: 4 / 10 = 0.4 s; then 3 divide 8 among them.
    assert fair_cycle((0.5, 0.1, 0.1, 0.1), 4, 0.1) == pytest.approx(3 / 8)
    assert fair_cycle((0.4, 0.1, 0.1, 0.1), 4, 0.1) == pytest.approx(0.4)


def test_one_worker_has_all_of_it_and_what_costs_nothing_is_not_shared() -> None:
    assert fair_cycle((7.0,), 1, 0.1) == 0.1
    assert fair_cycle((0.5, 0.5), 2, 0.0) == 0.0


LEAST = st.lists(st.floats(1e-3, 1e2), min_size=1, max_size=10)


@settings(deadline=None)
@given(least=LEAST, unknown=st.integers(0, 3), hold_s=st.floats(1e-3, 10))
def test_fair_shares_use_up_the_resource_and_no_more(least: list[float], unknown: int, hold_s: float) -> None:
    cycle = fair_cycle(least, len(least) + unknown, hold_s)
    used = unknown / cycle + sum(1 / max(cycle, one) for one in least)
    if unknown or cycle >= min(least):
        assert used == pytest.approx(1 / hold_s)
    else:
        # Even the fastest cannot use what is left for it.
        assert used < 1 / hold_s


@settings(deadline=None)
@given(least=LEAST, slower=st.floats(1, 100), hold_s=st.floats(1e-3, 10))
def test_a_slower_worker_leaves_more_and_one_more_leaves_less(least: list[float], slower: float, hold_s: float) -> None:
    n = len(least)
    cycle = fair_cycle(least, n, hold_s)
    assert fair_cycle([least[0] * slower, *least[1:]], n, hold_s) <= cycle * (1 + 1e-9)
    assert fair_cycle([*least, 0.5], n + 1, hold_s) >= cycle * (1 - 1e-9)
    assert fair_cycle(least, n, 2 * hold_s) >= cycle * (1 - 1e-9)


# Resource-aware lower bound: eight workers, 0.1 s a step


def test_the_processor_binds() -> None:
    # Waiting: 8 * 0.18 / 2 / 0.9 = 0.8 s a cycle; less t_x 0.2 and a quarter step 0.025: 0.575 s = 5.75 steps -> 6.
    load = FREE_LOAD._replace(cpu_s=0.18, cores=2.0)
    assert bound(load, exchange_s=0.2) == (6, "cpu")
    # Overlapping: 0.8 s less 0.025 s: 7.75 -> 8 steps. (The guard asks for 1.5 * 0.2 = 0.3 s.)
    assert bound(load, exchange_s=0.2, overlap=True) == (8, "cpu")
    # One core: 1.6 s a cycle: 1.375 s = 13.75 -> 14, and 1.575 s -> 16.
    load = load._replace(cores=1.0)
    assert bound(load, exchange_s=0.2) == (14, "cpu")
    assert bound(load, exchange_s=0.2, overlap=True) == (16, "cpu")


def test_the_network_binds() -> None:
    # b / B = 1e6 / 1e7 = 0.1 s. 8 * 0.1 / 0.9 = 0.8889 s; waiting: less 0.2 and 0.025: 0.6639 -> 7; overlapping: 9.
    load = FREE_LOAD._replace(link_bytes_per_s=1e7)
    assert bound(load, exchange_s=0.2) == (7, "network")
    assert bound(load, exchange_s=0.2, overlap=True) == (9, "network")
    # The dearer of the two counts: s_cpu = 0.09 s is less than 0.1 s of the link, 0.11 s more.
    assert bound(load._replace(cpu_s=0.09), exchange_s=0.2).resource == "network"
    assert bound(load._replace(cpu_s=0.11), exchange_s=0.2).resource == "cpu"


def test_the_memory_binds() -> None:
    # A push and its reply hold 2e6 bytes: 5.9e6 bytes take floor(2.95) = 2 of them. A cycle of 8 * 0.3 / 2 = 1.2 s;
    # waiting: less the exchange itself, 0.9 s = 9 steps; overlapping: 12 (the guard: 0.45 s).
    load = FREE_LOAD._replace(memory_bytes=5.9e6)
    assert bound(load, exchange_s=0.3) == (9, "memory")
    assert bound(load, exchange_s=0.3, overlap=True) == (12, "memory")
    # Less than one exchange: one is let in all the same. 8 * 0.3 - 0.3 = 2.1 s.
    assert bound(load._replace(memory_bytes=1.0), exchange_s=0.3) == (21, "memory")
    # As many as there are workers: it never binds.
    assert bound(load._replace(memory_bytes=16e6), exchange_s=0.3) == (1, "none")


def test_the_guard_binds_with_overlap_alone() -> None:
    # 1.5 * 0.5 = 0.75 s = 7.5 steps -> 8.
    assert bound(FREE_LOAD, exchange_s=0.5, overlap=True) == (8, "guard")
    assert bound(FREE_LOAD, exchange_s=0.5) == (1, "none")


def test_no_resource_binds_when_one_step_is_enough() -> None:
    assert bound(FREE_LOAD) == (1, "none")
    assert bound(FREE_LOAD, exchange_s=0.05, overlap=True) == (1, "none")
    # 8 * 0.01 / 0.9 = 0.089 s: less than a step of 0.1 s.
    assert bound(FREE_LOAD._replace(cpu_s=0.01), overlap=True) == (1, "none")


@pytest.mark.parametrize("overlap", [False, True])
def test_less_than_a_quarter_step_is_let_go(*, overlap: bool) -> None:
    # 8 * 0.036 / 0.9 = 0.32 s = 3.2 steps: 3 with the quarter step; 3.3 steps (s = 0.037125) are 4.
    assert bound(FREE_LOAD._replace(cpu_s=0.036), overlap=overlap).steps == 3
    assert bound(FREE_LOAD._replace(cpu_s=0.037125), overlap=overlap).steps == 4


def test_slow_workers_let_the_others_push_more_often() -> None:
    # s / rho = 0.09 / 0.9 = 0.1 s, N = 4. Two others take a second a step: 0.25 s, less 0.025: 2.25 -> 3 steps in the
    # place of 0.4 - 0.025 = 3.75 -> 4.
    load = FREE_LOAD._replace(cpu_s=0.09)

    def steps(*least: float) -> int:
        return resource_bound(
            workers=4, step_s=0.1, exchange_s=0.0, load=load, rho=0.9, overlap=True, least=least
        ).steps

    assert steps(0.1, 0.1, 0.1, 0.1) == steps() == 4
    assert steps(0.1, 1.0, 0.1, 1.0) == 3


@pytest.mark.parametrize(("rho", "steps"), [(1.0, 8), (0.5, 16), (0.1, 80)])
def test_a_resource_is_busy_for_the_share_rho(rho: float, steps: int) -> None:
    # 8 * 0.1 / rho seconds.
    assert bound(FREE_LOAD._replace(cpu_s=0.1), rho=rho, overlap=True).steps == steps


def test_fewer_workers_may_push_more_often() -> None:
    # 4 * 0.1 / 0.9 = 0.444 s, less 0.025: 4.19 -> 5 steps; 2: 0.222 s -> 2; 1: 0.111 s -> 1.
    load = FREE_LOAD._replace(cpu_s=0.1)
    assert [bound(load, workers=n, overlap=True).steps for n in (4, 2, 1)] == [5, 2, 1]


def test_no_bound_is_longer_than_the_most_steps() -> None:
    assert bound(FREE_LOAD._replace(cpu_s=1e9)) == (MOST_STEPS, "cpu")
    assert theoretical_lower(1e12, 40) == MOST_STEPS
    assert theoretical_lower(0.7 * MOST_STEPS, 40) <= MOST_STEPS
    assert curvature_upper(1e-9) == MOST_STEPS


# Theoretical lower bound


@settings(deadline=None)
@given(c=st.floats(0, 300), horizon=st.floats(0.5, 5000))
def test_the_lower_bound_is_the_first_k_that_satisfies_the_inequality(c: float, horizon: float) -> None:
    def satisfied(k: int) -> bool:
        r = math.sqrt(k / horizon)
        return c / (k + c) <= 0.5 * r / (1 + r)

    found = theoretical_lower(c, horizon)
    assert found == next(k for k in range(1, MOST_STEPS) if satisfied(k))


@settings(deadline=None)
@given(c=st.floats(0.1, 100), horizon=st.floats(1, 1000))
def test_the_lower_bound_is_where_work_a_second_is_greatest(c: float, horizon: float) -> None:
    def work(k: int) -> float:
        return k / (1 + math.sqrt(k / horizon)) / (k + c)

    # The real-valued maximum lies in (k - 1, k], so one of these two is the best whole number.
    k = theoretical_lower(c, horizon)
    best = max(work(k), work(max(1, k - 1)))
    assert all(work(other) <= best * (1 + 1e-12) for other in range(1, 4 * k + 10))


def test_the_lower_bound_by_hand() -> None:
    # c = 4, h = 40. k = 16: r = sqrt(0.4) = 0.6325, right side 0.1937, left side 4/20 = 0.2: not yet.
    # k = 17: r = 0.6519, right side 0.1973, left side 4/21 = 0.1905: yes.
    assert theoretical_lower(4.0, 40.0) == 17
    assert [theoretical_lower(c, 40.0) for c in (1, 10, 20, 100)] == [7, 33, 55, 192]


def test_far_below_the_horizon_the_lower_bound_goes_with_the_two_thirds_power_of_the_cost() -> None:
    # Both c << k and k << h: (4 h c^2)^(1/3), h = 1e12: c = 1 -> 15,874.01; c = 2 -> 25,198.4.
    assert theoretical_lower(1.0, 1e12) == pytest.approx(15_874, rel=2e-3)
    assert theoretical_lower(2.0, 1e12) == pytest.approx(25_198, rel=2e-3)


def test_an_exchange_that_costs_nothing_needs_no_interval() -> None:
    assert [theoretical_lower(0.0, h) for h in (0.01, 40.0, 1e9)] == [1, 1, 1]


@settings(deadline=None)
@given(c=st.floats(0, 1000), horizon=st.floats(0.1, 1e6))
def test_the_lower_bound_is_longer_than_the_exchange(c: float, horizon: float) -> None:
    # The right side is below 1/2, so c / (k + c) < 1/2.
    assert theoretical_lower(c, horizon) > c


# Momentum


def test_an_interval_between_one_and_the_memory_of_the_velocity_is_not_taken() -> None:
    # mu 0.9: 1 / (1 - 0.9) = 10 steps.
    assert [momentum_bound(h_min, 1.0, 0.9) for h_min in (2, 9, 10, 11)] == [10, 10, 10, 11]
    # One step only where an exchange is a tenth of a step or less.
    assert [momentum_bound(1, c, 0.9) for c in (0.0, 0.1, 0.2)] == [1, 1, 10]
    # mu 0.5: 2 steps. mu 0: whatever the bound was.
    assert [momentum_bound(h_min, 1.0, 0.5) for h_min in (1, 2, 3)] == [2, 2, 3]
    assert [momentum_bound(h_min, 1.0, 0.0) for h_min in (1, 2, 3)] == [1, 2, 3]


# Theoretical upper bounds


def test_the_upper_bound_is_the_root_of_steps_by_workers() -> None:
    # sqrt(800 / 8) = 10; sqrt(799 / 8) = 9.99; sqrt(7 / 8) < 1.
    assert [theoretical_upper(t, 8) for t in (0, 7, 8, 31, 32, 799, 800)] == [1, 1, 1, 1, 2, 9, 10]
    assert theoretical_upper(10_000, 1) == 100


@settings(deadline=None)
@given(steps=st.integers(0, 10**9), workers=st.integers(1, 1000))
def test_the_upper_bound_is_the_longest_that_satisfies_it(steps: int, workers: int) -> None:
    h = theoretical_upper(steps, workers)
    assert h == 1 or h * h * workers <= steps
    assert (h + 1) ** 2 * workers > steps


def test_the_upper_bound_of_a_known_curvature() -> None:
    # eta L = 0.1: 0.1 + 0.01 H (H - 1) <= 1, H (H - 1) <= 90 = 10 * 9.
    # 0.01: 0.0001 H (H - 1) <= 0.99, H (H - 1) <= 9900 = 100 * 99. 0.2: 0.04 H (H - 1) <= 0.8, <= 20 = 5 * 4.
    # 0.5: 0.25 H (H - 1) <= 0.5, <= 2 = 2 * 1. 0.3: 0.09 H (H - 1) <= 0.7, <= 7.8 (3 * 2 = 6, 4 * 3 = 12).
    assert [curvature_upper(b) for b in (0.01, 0.1, 0.2, 0.3, 0.5)] == [100, 10, 5, 3, 2]
    assert [curvature_upper(b) for b in (0.99, 1.0, 1.5, 100.0)] == [1, 1, 1, 1]


@settings(deadline=None)
@given(b=st.floats(1e-4, 3))
def test_the_curvature_bound_is_the_longest_that_satisfies_it(b: float) -> None:
    def satisfied(h: int) -> bool:
        return b + b * b * h * (h - 1) <= 1 + 1e-6

    h = curvature_upper(b)
    assert h == 1 or satisfied(h)
    assert b + b * b * (h + 1) * h > 1 - 1e-6


# Trigger


def test_the_elasticity_by_hand() -> None:
    # One point: 1. Two points: ln(3/2) / ln 2.
    assert marginal_elasticity([5.0]) == 1.0
    assert marginal_elasticity([2.0, 3.0]) == pytest.approx(math.log(1.5) / math.log(2))
    # Three points, 1, 2, 3, with ln a = (ln k)^2: the parabola is that one, and its slope at ln 3 is 2 ln 3.
    assert marginal_elasticity([math.exp(math.log(k) ** 2) for k in (1, 2, 3)]) == pytest.approx(2 * math.log(3))


def test_the_elasticity_reads_a_quarter_of_the_interval() -> None:
    # k = 16: window 4, points 12, 14 and 16; nothing before 12 counts.
    history = [float(k) ** 0.7 for k in range(1, 17)]
    assert marginal_elasticity(history) == pytest.approx(0.7)
    assert marginal_elasticity([9.0] * 11 + history[11:]) == pytest.approx(0.7)
    assert marginal_elasticity([*history[:11], 9.0, *history[12:]]) != pytest.approx(0.7)


@settings(deadline=None)
@given(power=st.floats(-2, 3), k=st.integers(2, 400), scale=st.floats(1e-6, 1e6))
def test_the_elasticity_of_a_power_is_its_exponent(power: float, k: int, scale: float) -> None:
    assert marginal_elasticity([scale * i**power for i in range(1, k + 1)]) == pytest.approx(power, abs=1e-8)


@pytest.mark.parametrize("c", [0.01, 0.5, 1.0, 20.0, 1000.0])
def test_agreeing_gradients_never_fire(c: float) -> None:
    # a = 3 k: elasticity 1 > k / (k + c) for every k.
    assert fires_at(lambda k: 3.0 * k, c) is None


@settings(deadline=None)
@given(c=st.floats(2, 200))
def test_noise_alone_fires_at_the_cost_of_an_exchange(c: float) -> None:
    # 1/2 <= k / (k + c), so k >= c. Next to a whole number the rounding of the logarithms decides.
    assume(c == round(c) or abs(c - round(c)) > 1e-6 * c)
    assert fires_at(math.sqrt, c) == math.ceil(c)


@pytest.mark.parametrize(("power", "c"), [(0.25, 30.0), (0.25, 7.0), (0.75, 4.0), (0.75, 11.1), (0.9, 5.0)])
def test_a_power_fires_where_it_should(power: float, c: float) -> None:
    # p <= k / (k + c), so k >= c p / (1 - p): 10; 2.33; 12; 33.3; 45.
    assert fires_at(lambda k: k**power, c) == math.ceil(c * power / (1 - power) - 1e-6)


@pytest.mark.parametrize("c", [0.5, 1.0, 4.0, 20.0, 100.0])
@pytest.mark.parametrize("tau", [5.0, 10.0, 30.0, 100.0, 300.0])
def test_saturation_fires_at_the_best_interval(tau: float, c: float) -> None:
    # a = A (1 - exp(-k / tau)): a'(k) = (A / tau) exp(-k / tau) meets a(k) / (k + c) at one k.
    def excess(k: float) -> float:
        return math.exp(-k / tau) / tau - (1 - math.exp(-k / tau)) / (k + c)

    best = brentq(excess, 1e-6, 100 * (tau + c))
    fired = fires_at(lambda k: 7.0 * (1 - math.exp(-k / tau)), c)
    assert fired is not None
    # The first whole number from there on, give or take one.
    assert abs(fired - max(1, math.ceil(best))) <= 1


@settings(deadline=None)
@given(
    history=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    c=st.floats(0, 100),
    scale=st.floats(1e-6, 1e6),
)
def test_scale_changes_nothing(history: list[float], c: float, scale: float) -> None:
    scaled = [scale * a for a in history]
    elasticity = marginal_elasticity(history)
    assert marginal_elasticity(scaled) == pytest.approx(elasticity, rel=1e-6, abs=1e-6)
    # Where both sides are equal up to rounding, either answer is right.
    k = len(history)
    assume(abs(elasticity - k / (k + c)) > 1e-7 * (1 + abs(elasticity)) or k == 1)
    assert marginal_due(scaled, c) == marginal_due(history, c)


@pytest.mark.parametrize("c", [0.0, 1.0, 1e6])
def test_a_shrinking_update_fires(c: float) -> None:
    assert marginal_due([3.0, 2.0], c)
    assert marginal_due([3.0, 2.0, 1.0], c)
    assert marginal_due([float(k) for k in range(1, 20)] + [17.0, 14.0, 10.0], c)
    assert marginal_due([1.0] * 8, c), "nor does one that stands still bring anything"


def test_a_cost_of_nothing_fires_at_once() -> None:
    # a'(k) <= a(k) / k, and the first step has nothing to compare with: 1 <= 1 / (1 + 0).
    assert fires_at(lambda k: 2.0 * k, 0.0) == 1


@settings(deadline=None)
@given(
    history=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e9)), min_size=1, max_size=40),
    c=st.floats(0.01, 100),
)
def test_zeros_do_not_matter(history: list[float], c: float) -> None:
    assert math.isfinite(marginal_elasticity(history))
    assert not marginal_due([*history[:-1], 0.0], c), "a worker that has not moved goes on"


@pytest.mark.parametrize("missing", [1, 2, 5, 30])
@pytest.mark.parametrize("c", [0.5, 4.0, 20.0])
def test_norms_that_are_missing_do_not_fire(missing: int, c: float) -> None:
    # Steps taken in flight left no norm. The jump from 0 to the first known one is not growth, and the steps after it
    # are judged by known norms alone: linear growth does not fire, however much is missing.
    assert fires_at(lambda k: 0.0 if k <= missing else 2.0 * k, c, most=200) is None
    # Noise fires at k >= c as always, or as soon as three norms are known: then the window of max(2, k/4) is filled.
    fired = fires_at(lambda k: 0.0 if k <= missing else math.sqrt(k), c, most=200)
    window_filled = next(k for k in range(1, 200) if k - max(2, k // 4) > missing)
    assert fired == max(math.ceil(c), window_filled)
