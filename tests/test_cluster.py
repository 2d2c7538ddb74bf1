"""Cluster profiles: numbers worked out by hand, seeds, and every way to write one wrongly."""

from __future__ import annotations

import statistics
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapus_cli import cluster
from sapus_cli.cluster import ClusterProfile, Direction, Link, Pause, Period, StepTimes, load_profile, profile_of
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = ["8xgpu-1g", "8xgpu-10g", "8xgpu-10g-two-slow", "8xgpu-10g-stalls", "8xgpu-delay", "16x-lan", "64x-wan"]


def test_a_link_sends_one_message_after_the_other() -> None:
    up = Direction(Link(bytes_per_s=1000.0, latency_s=0.25))
    assert up.deliver_at(1.0, 500) == 1.75  # 0.5 s on the wire, 0.25 s under way
    assert up.deliver_at(1.0, 500) == 2.25  # waits for the first to leave at 1.5
    assert up.deliver_at(5.0, 1000) == 6.25
    assert Direction(Link(1000.0, 0.25), scale=10).deliver_at(0.0, 100) == 1.25
    assert Direction(Link(None, 0.25)).deliver_at(3.0, 10**12) == 3.25


def test_step_times_depend_on_seed_worker_and_step_alone() -> None:
    profile = ClusterProfile(step_s=0.05, variation=0.2)
    times = StepTimes(profile, 1, 2)
    straight = [times.draw(step) for step in range(600)]
    assert straight == [StepTimes(profile, 1, 2).draw(step) for step in reversed(range(600))][::-1]
    assert straight[0] != StepTimes(profile, 1, 3).draw(0)
    assert straight[0] != StepTimes(profile, 2, 2).draw(0)


def test_step_times_have_the_mean_and_the_variation_asked_for() -> None:
    times = StepTimes(ClusterProfile(step_s=0.05, variation=0.2, slow={3: 4.0}), 0, 3)
    drawn = [times.draw(step) for step in range(20_000)]
    # Standard error of the mean: 0.2 * 0.2 / sqrt(20000) = 0.00028
    assert statistics.mean(drawn) == pytest.approx(0.2, abs=0.0015)
    assert statistics.stdev(drawn) == pytest.approx(0.04, rel=0.05)
    assert StepTimes(ClusterProfile(step_s=0.05), 0, 0).draw(7) == 0.05


def test_pauses_come_as_often_and_last_as_long_as_asked() -> None:
    profile = ClusterProfile(step_s=0.05, pause=Pause(probability=0.1, mean_s=2.0, shape=3.0))
    times = StepTimes(profile, 0, 0)
    pauses = [drawn - 0.05 for step in range(20_000) if (drawn := times.draw(step)) > 0.05]
    assert len(pauses) == pytest.approx(2000, abs=170)  # 4 standard deviations
    assert statistics.mean(pauses) == pytest.approx(2.0, rel=0.15)
    assert min(pauses) >= 2.0 * 2 / 3  # the least of a Pareto distribution of shape 3 and mean 2


def test_on_and_off_periods_stop_the_clock_of_a_step() -> None:
    profile = ClusterProfile(step_s=1.0, period=Period(on_s=4.0, off_s=2.0, workers=(1,)))
    times = StepTimes(profile, 0, 1)
    assert times.finish(0.0, 3.0) == 3.0
    assert times.finish(3.0, 1.0) == 4.0  # just before the gap
    assert times.finish(3.0, 2.0) == 7.0  # a second before the gap from 4 to 6, a second after
    assert times.finish(5.0, 1.0) == 7.0  # begins within the gap
    assert times.finish(0.0, 9.0) == 13.0  # two gaps
    assert StepTimes(profile, 0, 0).finish(3.0, 2.0) == 5.0


@given(st.floats(0, 50), st.floats(0.01, 30))
def test_periods_never_take_less_than_the_computing(begin: float, seconds: float) -> None:
    times = StepTimes(ClusterProfile(step_s=1.0, period=Period(4.0, 2.0, (0,))), 0, 0)
    end = times.finish(begin, seconds)
    assert end >= begin + seconds - 1e-9
    assert end <= begin + seconds + 2.0 * (seconds / 4.0 + 2) + 1e-9


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_load(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert profile.step_s
    assert profile.link.bytes_per_s


def test_all_that_ships_is_listed_here() -> None:
    folder = resources.files("experiments").joinpath("clusters")
    assert sorted(path.name.removesuffix(".toml") for path in folder.iterdir()) == sorted(SHIPPED)
    assert load_profile("8xgpu-10g").link == Link(bytes_per_s=1.25e9, latency_s=0.1e-3)
    assert load_profile("8xgpu-delay").slow == {6: 20.0, 7: 40.0}


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'wire_scale = 2\n[step]\nmean = "1ms"\n[step.period]\non = "1s"\noff = "2s"\nworkers = [0]\n'
        '[step.pause]\nprobability = 0.5\nmean = "3s"\n[server]\nmessage_s = 0.0\n'
    )
    profile = load_profile(str(path))
    assert (profile.name, profile.step_s, profile.wire_scale) == ("mine", 0.001, 2.0)
    assert profile.period == Period(1.0, 2.0, (0,))
    assert profile.pause == Pause(0.5, 3.0)
    assert profile.server.message_s == 0.0


STEP = {"mean": "50ms"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"steps": STEP}, "unknown key of cluster mine 'steps'; did you mean step"),
        ({"step": STEP | {"slowly": 1}}, "'step.slowly'"),
        ({"link": {"rate": "1gbit", "speed": 1}}, "'link.speed'"),
        ({"step": {"mean": "50"}}, "step.mean 50: must be a number with a unit (us, ms, s, min), as in 50ms"),
        ({"step": {"mean": 50}}, "step.mean 50: must be a number with a unit"),
        ({"step": {"mean": "50 parsec"}}, "50 parsec"),
        ({"step": {"mean": "0ms"}}, "step 0: must be above 0"),
        ({"link": {"rate": "-1gbit"}}, "link.rate -1gbit"),
        ({"link": {"rate": "0gbit"}}, "link rate 0: must be above 0"),
        ({"step": STEP | {"slow": {"six": 2.0}}}, "step.slow six: must be the rank of a worker"),
        ({"step": STEP | {"slow": {"6": 0.0}}}, "slow 6 0: must be above 0"),
        ({"step": STEP | {"slow": {"6": "2x"}}}, "Expected `float`"),
        ({"step": STEP | {"pause": {"probability": 2.0, "mean": "1s"}}}, "pause probability 2: must lie in [0, 1]"),
        (
            {"step": STEP | {"pause": {"probability": 0.1, "mean": "1s", "shape": 1.0}}},
            "pause shape 1: must be above 1",
        ),
        ({"step": {"slow": {"1": 2.0}}}, "need a step time, as in --step-time 50ms"),
        ({"step": "50ms"}, "step must be a table, as in [step]"),
        ({"wire_scale": 0.0}, "wire_scale 0: must be above 0"),
        ({"server": {"message": 1.0}}, "unknown field `message`"),
    ],
)
def test_a_profile_that_is_wrong_names_the_key(table: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        profile_of("mine", table)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: load_profile("8xgpu-1"), "did you mean 8xgpu-1g"),
        (lambda: cluster.read_link("1"), "--link rate 1: must be a number with a unit (kbit, mbit, gbit)"),
        (lambda: cluster.read_link("1gbit,5"), "--link latency 5: must be a number with a unit"),
        (lambda: cluster.read_slow("6=2"), "--slow 6=2: must be WORKER:FACTORx, as in 6:2x,7:4x"),
        (lambda: cluster.read_pause("2:1s"), "--pause 2:1s: must be PROBABILITY:MEAN"),
        (lambda: ClusterProfile(step_s=1.0, slow={9: 2.0}).check_workers(8), "slow names worker 9"),
    ],
)
def test_an_option_that_is_wrong_says_what_is_right(call: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert says in str(caught.value)


def test_options_read() -> None:
    assert cluster.read_link("1gbit,0.5ms") == Link(125e6, 0.5e-3)
    assert cluster.read_link("100mbit") == Link(12.5e6, 0.0)
    assert cluster.read_slow("6:2x,7:4.5x") == {6: 2.0, 7: 4.5}
    assert cluster.read_pause("0.01:2s") == Pause(0.01, 2.0)
