"""`sapus validate` and `sapus calibrate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapus_cli.cli import run_line
from sapus_cli.cluster import ClusterProfile, Fault, Link, Pause, Period, ServerCost, load_profile, to_toml
from sapus_cli.commands import calibrate
from sapus_cli.commands.calibrate import _Measured, cost_of
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside


def test_costs_solve_both_measurements() -> None:
    # 30 us a message and 0.2 ns a byte: 1,000 messages of 4 kB and 100 messages of 16 MB.
    small = _Measured(1000 * 30e-6 + 4e6 * 0.2e-9, 1000, 4_000_000)
    large = _Measured(100 * 30e-6 + 1.6e9 * 0.2e-9, 100, 1_600_000_000)
    cost = cost_of(small, large)
    assert (cost.message_s, cost.byte_s) == pytest.approx((30e-6, 0.2e-9))
    assert cost_of(_Measured(1.0, 1000, 4_000_000), _Measured(0.0, 100, 1_600_000_000)).byte_s == 0


positive = st.floats(1e-6, 1e6)
profiles = st.builds(
    ClusterProfile,
    description=st.text(st.characters(codec="ascii"), max_size=20),
    step_s=positive,
    variation=st.floats(0, 3),
    slow=st.dictionaries(st.integers(0, 9), positive, max_size=3),
    pause=st.none() | st.builds(Pause, st.floats(0, 1), positive, st.floats(1.1, 5)),
    period=st.none() | st.builds(Period, positive, positive, st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    link=st.builds(Link, st.none() | st.floats(1.0, 1e11), st.floats(0, 10)),
    wire_scale=positive,
    server=st.builds(ServerCost, st.floats(0, 1), st.floats(0, 1)),
    faults=st.sampled_from([(), (Fault("kill", 1, 2.5), Fault("restart", 1, 7.25))]),
)


@given(profiles)
def test_a_profile_that_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, profile: Any) -> None:
    path = tmp_path_factory.mktemp("profiles") / "none.toml"
    path.write_text(to_toml(profile))
    back = load_profile(str(path))
    assert back.link.bytes_per_s == pytest.approx(profile.link.bytes_per_s)
    assert to_toml(back).replace("\n", " ").split() == to_toml(profile).replace("\n", " ").split() or (
        back.link.bytes_per_s != profile.link.bytes_per_s
    )
    for name in ("description", "step_s", "variation", "slow", "pause", "period", "wire_scale", "server", "faults"):
        assert getattr(back, name) == getattr(profile, name)


def test_a_profile_without_a_step_time_cannot_be_validated(inside: Inside) -> None:
    done = inside("validate", "none")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give --step-time" in done.stderr


def test_unknown_strategies_and_profiles_create_nothing(tmp_path: Path, inside: Inside) -> None:
    for line in ("validate 8xgpu-1g --strategies bsp,nosuch --results kept", "validate nosuch"):
        done = inside(*line.split())
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "nosuch" in done.stderr
    assert not list(tmp_path.iterdir())


def test_runs_that_would_collide_are_refused_before_any_is_made(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "kept" / "ssp-real").mkdir(parents=True)
    for line, text in (
        ("validate 8xgpu-1g --strategies bsp,bsp", "bsp is named twice"),
        ("validate 8xgpu-1g --strategies bsp,ssp --results kept", "has a run of ssp already"),
    ):
        done = inside(*line.split())
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert text in done.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["ssp-real"]


def test_calibrate_refuses_a_file_that_is_there(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "mine.toml").write_text("")
    done = inside("calibrate", "-o", "mine.toml")
    assert (done.returncode, done.stderr) == (2, "sapus: --output mine.toml: exists already; give another path\n")


@pytest.mark.slow
def test_validate_shows_both_clocks_side_by_side(tmp_path: Path, inside: Inside) -> None:
    line = "validate none --step-time 40ms --link 100mbit --strategies bsp,local-sgd --workers 2 --model mlp --steps 20"
    done = inside(*line.split(), "--results", "kept", "--json")
    assert done.returncode == 0, done.stderr
    rows = {(row["strategy"], row["metric"]): row for row in json.loads(done.stdout)["rows"]}
    assert rows["bsp", "pushes"]["real"] == rows["bsp", "pushes"]["virtual"] == 40
    assert rows["bsp", "pushes"]["difference_percent"] == 0
    # The same bytes, but for the digits of a time in a header.
    assert abs(rows["bsp", "GB, both ways"]["difference_percent"]) < 0.1
    # A barrier orders the pushes, so that training is the same to the last bit.
    assert rows["bsp", "final accuracy"]["difference_percent"] == 0
    assert rows["local-sgd", "samples/s"]["real"] <= rows["local-sgd", "samples/s"]["virtual"] * 1.01
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["bsp-real", "bsp-virtual", "local-sgd-real", "local-sgd-virtual"]


@pytest.mark.slow
def test_calibrate_writes_a_profile_that_simulate_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("REPETITIONS", 1), ("SMALL_STEPS", 1000), ("LARGE_STEPS", 20)):
        monkeypatch.setattr(calibrate, name, number)
    monkeypatch.chdir(tmp_path)
    assert run_line(["calibrate", "--cluster", "8xgpu-1g", "-o", "mine.toml"]) == 0
    mine = load_profile("mine.toml")
    assert mine.step_s == 0.05
    assert mine.server != ServerCost()
    # No machine needs a millisecond for a message of 4 kB, or a second for a gigabyte and ten.
    assert 0 < mine.server.message_s < 1e-2
    assert 0 <= mine.server.byte_s < 1e-8
    assert run_line(["simulate", "--cluster", "mine.toml", "--steps", "2", "--model", "mlp", "-q"]) == 0


def test_faults_in_a_profile_are_checked() -> None:
    with pytest.raises(UserError, match="fault kill of worker 1 at 5 s comes after the budget of 4 s"):
        ClusterProfile(faults=(Fault("kill", 1, 5.0),)).check_budget(4.0)
    ClusterProfile(faults=(Fault("kill", 1, 5.0),)).check_budget(None)
    for faults, text in (
        ((Fault("restart", 1, 5.0),), "it is alive then"),
        ((Fault("kill", 1, 5.0), Fault("kill", 1, 6.0)), "it is dead then"),
        ((Fault("kill", 1, 0.0),), "must be above 0"),
    ):
        with pytest.raises(UserError, match=text):
            ClusterProfile(faults=faults)
    with pytest.raises(UserError, match="fault names worker 9"):
        ClusterProfile(faults=(Fault("kill", 9, 5.0),)).check_workers(8)
