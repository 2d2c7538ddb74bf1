"""Virtual time: closed forms, repeatability, and the same bits as real processes where a barrier orders the pushes."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import pytest
from processes import launch, sapus

from sapus_cli.checkpoint import read_state
from sapus_cli.cluster import ClusterProfile, Fault, Link, ServerCost
from sapus_cli.config import RunConfig
from sapus_cli.drivers.roles import setting
from sapus_cli.drivers.simulate import Simulation
from sapus_cli.errors import RunFailedError, UserError
from sapus_cli.traces import read_run, read_trace
from strategies import REGISTRY

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside

    from sapus_cli.drivers.pool import Progress

FREE_SERVER = ServerCost(message_s=0.0, byte_s=0.0)


def simulate(results: Path, profile: ClusterProfile, **fields: Any) -> Path:
    asked: dict[str, Any] = {"strategy": "bsp", "workers": 2, "model": "mlp", "eval_every_s": 1.0} | fields
    if not {"epochs", "steps", "seconds"} & set(asked):
        asked["steps"] = 6
    folder, _ = Simulation(RunConfig(**asked, cluster=profile), results, None, lambda _: None).run()
    return folder


def test_the_round_time_of_bsp_is_the_closed_form(tmp_path: Path) -> None:
    rate, latency = 1e7, 0.003
    profile = ClusterProfile(step_s=0.05, link=Link(rate, latency), server=FREE_SERVER)
    pushes = read_trace(simulate(tmp_path, profile, workers=4), "pushes").sort("t_s")
    # The first reply passes, its worker takes a step, and then the four pushes pass one after the other: they are a
    # little larger than the replies, so that each finds the one before it still on the way. Two latencies.
    rounds = [pushes[i : i + 4] for i in range(0, len(pushes), 4)]
    assert len(rounds) == 6
    for before, after in itertools.pairwise(rounds):
        seconds = before.sort("worker")["bytes_out"][0] / rate + 0.05 + sum(after["bytes_in"]) / rate + 2 * latency
        assert after["t_s"][-1] - before["t_s"][-1] == pytest.approx(seconds, abs=1e-9)
    # A reply is withheld until the last push of its round has arrived.
    for one in rounds:
        held = one["t_s"][-1] - one["t_s"]
        assert one["held_s"].to_list() == pytest.approx(held.to_list(), abs=1e-9)


def test_the_waiting_of_ssp_is_the_closed_form(tmp_path: Path) -> None:
    # Steps of 0.1 and 0.3 s, no link. With slack 1, worker 0 is held at clock 2 from 0.2 until worker 1 reaches 1 at
    # 0.3, and from then on, a step of 0.1 after each release, until the next step of worker 1: 0.4 to 0.6, 0.7 to 0.9.
    profile = ClusterProfile(step_s=0.1, slow={1: 3.0}, server=FREE_SERVER)
    folder = simulate(tmp_path, profile, strategy="ssp", params={"s": 1}, steps=5)
    pushes = read_trace(folder, "pushes").sort("worker", "seq")
    quick = pushes.filter(pl.col("worker") == 0)
    assert quick["t_s"].to_list() == pytest.approx([0.1, 0.2, 0.4, 0.7, 1.0])
    assert quick["held_s"].to_list() == pytest.approx([0.0, 0.1, 0.2, 0.2, 0.2])
    slow = pushes.filter(pl.col("worker") == 1)
    assert slow["t_s"].to_list() == pytest.approx([0.3, 0.6, 0.9, 1.2, 1.5])
    assert slow["held_s"].sum() == 0


def test_exchange_time_is_the_way_there_and_back(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.05, link=Link(1e7, 0.002), server=ServerCost(message_s=0.001, byte_s=1e-9))
    pushes = read_trace(simulate(tmp_path, profile, strategy="local-sgd-async", params={"h": 2}, workers=1), "pushes")
    for before, after in zip(pushes.iter_rows(named=True), pushes[1:].iter_rows(named=True), strict=False):
        both = before["bytes_in"] + before["bytes_out"]
        assert after["exchange_s"] == pytest.approx(both / 1e7 + 2 * 0.002 + 2 * 0.001 + both * 1e-9, abs=1e-9)
        assert after["step_s"] == pytest.approx(0.05)


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.05, variation=0.3, slow={1: 2.0}, link=Link(1e8, 0.001), wire_scale=20)
    fields = {"strategy": "sapus-weighted", "workers": 4, "steps": 60, "seed": 3}
    one, other = (simulate(tmp_path, profile, **fields) for _ in range(2))
    for name in ("pushes.csv", "evals.csv", "resources.csv", "events.csv", "checkpoint/000001.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    drop = {"started_at", "ended_at", "environment"}
    records = [{k: v for k, v in read_run(folder).items() if k not in drop} for folder in (one, other)]
    assert records[0] == records[1]
    assert read_run(simulate(tmp_path, profile, **fields | {"seed": 4}))["state_sha256"] != records[0]["state_sha256"]


@pytest.mark.parametrize(
    ("strategy", "params"), [("bsp", {}), ("local-sgd", {"h": 4}), ("post-local-sgd", {"t0": 4, "h": 3})]
)
def test_a_barrier_ends_in_the_same_bits_in_real_and_in_virtual_time(
    tmp_path: Path, strategy: str, params: dict[str, Any]
) -> None:
    fields = {"strategy": strategy, "params": params, "workers": 3, "steps": 10}
    real = launch(tmp_path / "real", **fields).record["state_sha256"]
    profile = ClusterProfile(step_s=0.05, variation=0.5, slow={0: 3.0}, link=Link(1e6, 0.01))
    assert read_run(simulate(tmp_path / "virtual", profile, **fields))["state_sha256"] == real


def test_totals_and_rows_agree(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.05, link=Link(1e8, 0.001), wire_scale=10)
    folder = simulate(tmp_path, profile, strategy="asp", workers=3, steps=8)
    record, pushes = read_run(folder), read_trace(folder, "pushes")
    totals = record["totals"]
    assert record["clock"] == "virtual"
    assert record["cluster"]["wire_scale"] == 10
    assert len(pushes) == totals["pushes"] == totals["version"] == 24
    assert totals["rx_bytes"] == pushes["bytes_in"].sum()
    for worker in totals["workers"]:
        mine = pushes.filter(pl.col("worker") == worker["rank"])
        assert (worker["steps"], worker["rx_bytes"]) == (8, mine["bytes_in"].sum())
    assert sum(worker["tx_bytes"] for worker in totals["workers"]) == totals["tx_bytes"]
    d = record["model"]["elements"]
    assert (pushes["bytes_in"] > 10 * 4 * d).all()
    # Beside the replies, the three first states.
    assert 3 * 10 * 4 * d < totals["tx_bytes"] - pushes["bytes_out"].sum() < 3 * 10 * (4 * d + 100)
    assert read_trace(folder, "evals")["version"].to_list()[-1] == 24
    assert sorted(read_trace(folder, "events")["kind"]) == ["join"] * 3 + ["leave"] * 3


def test_budgets_in_virtual_seconds_and_targets(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.05)
    timed = read_run(simulate(tmp_path, profile, strategy="asp", seconds=2.02))
    assert timed["totals"]["steps"] == 2 * 41  # the first step that ends after 2.02 s is the last
    aimed = simulate(tmp_path, profile, strategy="local-sgd", steps=5000, target_accuracy=0.6, eval_every_s=0.5)
    evals, record = read_trace(aimed, "evals"), read_run(aimed)
    assert record["totals"]["steps"] < 2 * 5000
    assert record["summary"]["reached_s"] == evals.filter(pl.col("accuracy") >= 0.6)["t_s"][0]


def test_divergence_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="diverged"):
        simulate(tmp_path, ClusterProfile(step_s=0.05), strategy="asp", lr=1e30, steps=100)
    (folder,) = tmp_path.iterdir()
    assert read_run(folder)["status"] == "failed"
    kinds = list(read_trace(folder, "events")["kind"])
    assert kinds.count("declined") >= 19
    assert kinds.count("fresh") == 1


def test_what_cannot_be_simulated_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--step-time"):
        simulate(tmp_path, ClusterProfile())
    with pytest.raises(UserError, match="slow names worker 5"):
        simulate(tmp_path, ClusterProfile(step_s=0.05, slow={5: 2.0}))
    with pytest.raises(UserError, match="at most 4096"):
        simulate(tmp_path, ClusterProfile(step_s=0.05), workers=5000)
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path, inside: Inside) -> None:
    line = ("simulate", "-s", "ssp", "--cluster", "8xgpu-1g", "--slow", "1:2x", "-w", "3", "--steps", "12", "--json")
    done = sapus(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["clock"] == "virtual"
    profile = read_run(tmp_path / summary["run"])["cluster"]
    assert (profile["name"], profile["slow"], profile["step_s"]) == ("8xgpu-1g, changed", {"1": 2.0}, 0.05)
    assert msgspec.convert(profile, ClusterProfile, strict=False).link == Link(1.25e8, 0.1e-3)
    shown = inside("show", summary["run"])
    assert "virtual time" in shown.stdout
    wrong = inside("simulate", "--link", "fast")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "--link rate fast" in wrong.stderr


def test_a_strategy_is_told_of_the_link_and_not_of_the_memory_of_this_machine(tmp_path: Path) -> None:
    # 4 workers, 85,002 elements on 10 Mbit/s: an exchange holds the link for 0.272 s each way, so four of them hold it
    # for 1.09 s, which is 1.21 s at rho 0.9 and 24.2 steps of 50 ms: 24, for a quarter step is let go.
    profile = ClusterProfile(step_s=0.05, link=Link(1.25e6, 0.0), server=FREE_SERVER)
    folder = simulate(tmp_path, profile, strategy="sapus", workers=4, steps=200)
    last = read_trace(folder, "pushes").sort("t_s").filter(pl.col("reason") != "last").tail(4)
    assert all(h_min >= 24 for h_min in last["h_min"].to_list())
    linked = ClusterProfile(step_s=0.05, link=Link(1.25e6, 0.002), wire_scale=3.0)
    told = setting(RunConfig(strategy="sapus", steps=1, cluster=linked, wire="float16"))
    # Two bytes an element, three times.
    assert (told.link_bytes_per_s, told.link_latency_s, told.element_bytes) == (1.25e6, 0.002, 6.0)


@pytest.mark.parametrize(
    ("fields", "momentum"),
    [({}, 0.0), ({"momentum": 0.8}, 0.8), ({"optimizer": "adamw"}, 0.9)],
    ids=["sgd", "momentum", "adamw"],
)
def test_a_strategy_is_told_the_momentum_of_the_local_optimizer(fields: dict[str, Any], momentum: float) -> None:
    assert setting(RunConfig(strategy="sapus", steps=1, **fields)).momentum == momentum


def test_the_null_workload_in_both_drivers(tmp_path: Path) -> None:
    # Each step adds 1 to the first element, and nothing to the others.
    fields = {"strategy": "local-sgd", "params": {"h": 4}, "dataset": "null", "model": "null:5", "steps": 12}
    real = launch(tmp_path / "real", **fields)
    folder = simulate(tmp_path / "virtual", ClusterProfile(step_s=0.05), **fields)
    assert read_run(folder)["state_sha256"] == real.record["state_sha256"]
    for where in (folder, real.folder):
        assert read_state(where / "checkpoint").tolist() == [12, 0, 0, 0, 0]
        assert set(read_trace(where, "evals").select("loss", "accuracy").iter_rows()) == {(1.0, 0.0)}
        assert set(read_trace(where, "pushes")["loss"]) == {1.0}


@pytest.mark.parametrize("strategy", REGISTRY)
def test_the_null_workload_suits_every_strategy(tmp_path: Path, strategy: str) -> None:
    profile = ClusterProfile(step_s=0.05, variation=0.2, link=Link(1e8, 0.001))
    fields = {"strategy": strategy, "dataset": "null", "model": "null:70", "workers": 3, "steps": 30}
    one, other = (simulate(tmp_path, profile, **fields) for _ in range(2))
    record = read_run(one)
    assert (record["status"], record["totals"]["steps"], record["totals"]["declined"]) == ("finished", 90, 0)
    assert (one / "pushes.csv").read_bytes() == (other / "pushes.csv").read_bytes()
    assert record["state_sha256"] == read_run(other)["state_sha256"]


def test_a_batch_too_small_for_the_model_creates_nothing(tmp_path: Path) -> None:
    fields = {"dataset": "fake:1x1x1:2", "model": "resnet20", "batch_size": 1}
    with pytest.raises(UserError, match="batch size 1: the model cannot be trained on it"):
        simulate(tmp_path, ClusterProfile(step_s=0.05), **fields)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_by_the_clock_of_the_real_world(tmp_path: Path) -> None:
    told: list[Progress] = []
    config = RunConfig(
        strategy="asp", workers=2, model="cnn", steps=400, eval_every_s=1e6, cluster=ClusterProfile(step_s=0.05)
    )
    Simulation(config, tmp_path, None, told.append).run()
    assert 2 <= len(told) < 400
    assert [progress.t_s for progress in told] == sorted(progress.t_s for progress in told)
    assert all(0 <= progress.fraction <= 1 for progress in told)
    assert told[-1].fraction > 0
    assert told[-1].accuracy is not None


def test_on_no_terminal_progress_is_a_line_now_and_then(inside: Inside) -> None:
    line = ("simulate", "-s", "asp", "--cluster", "8xgpu-1g", "-w", "2", "--steps", "20")
    lines = inside(*line).stderr.splitlines()
    assert lines
    assert all(re.fullmatch(r" +\d+\.\d s +\d+ %  virtual \d+\.\d s  accuracy \d+\.\d %", text) for text in lines)
    for option in ("--quiet", "--json"):
        assert inside(*line, option).stderr == ""


@pytest.mark.parametrize("strategy", ["bsp", "local-sgd-async", "ssp", "sapus-weighted", "easgd", "fedbuff"])
def test_a_worker_that_is_killed_is_missed_and_comes_back(tmp_path: Path, strategy: str) -> None:
    # Its steps end at 0.1, 0.2, ...; what it took after its last push that arrived is lost and done again.
    profile = ClusterProfile(step_s=0.1, faults=(Fault("restart", 1, 2.05), Fault("kill", 1, 1.05)))
    folder = simulate(tmp_path, profile, strategy=strategy, workers=3, steps=40)
    events = read_trace(folder, "events").filter(pl.col("rank") == 1)
    assert events["kind"].to_list() == ["join", "fault", "leave", "restart", "join", "leave"]
    assert events["t_s"].to_list()[:5] == [0.0, 1.05, 1.05, 2.05, 2.05]
    pushes = read_trace(folder, "pushes")
    totals = pushes.group_by("worker").agg(pl.col("n_steps").sum()).sort("worker")
    assert totals["n_steps"].to_list() == [40, 40, 40]
    mine = pushes.filter(pl.col("worker") == 1)["t_s"]
    assert mine.filter((mine > 1.06) & (mine < 2.05)).is_empty()
    # Thirty steps or more are left at 2.05 s; a rest of the first ten may have to be done again.
    assert read_run(folder)["summary"]["seconds"] >= 2.05 + 30 * 0.1 - 1e-9


def test_workers_that_are_killed_for_good_and_faults_that_come_too_late(tmp_path: Path) -> None:
    faults = (Fault("kill", 0, 0.25), Fault("kill", 1, 99.0), Fault("restart", 1, 100.0))
    folder = simulate(tmp_path, ClusterProfile(step_s=0.1, server=FREE_SERVER, faults=faults), strategy="asp", steps=10)
    record = read_run(folder)
    assert record["totals"]["steps"] == 2 + 10
    assert record["summary"]["seconds"] == pytest.approx(1.0)
    faults_seen = read_trace(folder, "events").filter(pl.col("kind") == "fault")
    assert faults_seen["detail"].to_list() == [
        "killed by the profile",
        "kill at 99 s did not happen: the run ended first",
        "restart at 100 s did not happen: the run ended first",
    ]


def test_all_workers_may_be_dead_for_a_while(tmp_path: Path) -> None:
    faults = (Fault("kill", 0, 0.15), Fault("kill", 1, 0.15), Fault("restart", 0, 1.0))
    profile = ClusterProfile(step_s=0.1, server=FREE_SERVER, faults=faults)
    folder = simulate(tmp_path, profile, strategy="bsp", steps=10, eval_every_s=0.5)
    # One step of each before; then worker 0 takes its other nine alone.
    assert read_run(folder)["totals"]["steps"] == 2 + 9
    assert read_run(folder)["summary"]["seconds"] == pytest.approx(1.9)
    assert read_trace(folder, "evals")["t_s"].to_list() == pytest.approx([0.0, 0.5, 1.0, 1.5, 1.9])


@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_a_target_that_is_reached_within_the_first_step_of_an_interval_ends_the_run(
    tmp_path: Path, strategy: str
) -> None:
    # Every step is the first of its interval, and every evaluation but the one at 0 s falls into one.
    fields: dict[str, Any] = {"strategy": strategy, "steps": 5000, "target_accuracy": 0.6, "eval_every_s": 0.07}
    record = read_run(simulate(tmp_path, ClusterProfile(step_s=0.05), **fields))
    reached = record["summary"]["reached_s"]
    assert reached is not None
    # The step under way is the last one of each worker.
    assert record["totals"]["steps"] == record["totals"]["pushes"] == 2 * (int(reached / 0.05) + 1)


def test_a_target_that_is_reached_ends_the_run_without_those_that_are_dead(tmp_path: Path) -> None:
    faults = (Fault("kill", 1, 0.12), Fault("restart", 1, 300.0))
    fields: dict[str, Any] = {"strategy": "asp", "steps": 5000, "target_accuracy": 0.3, "eval_every_s": 0.25}
    folder = simulate(tmp_path, ClusterProfile(step_s=0.05, faults=faults), **fields)
    summary = read_run(folder)["summary"]
    assert summary["reached_s"] <= summary["seconds"] <= summary["reached_s"] + 0.06
    last = read_trace(folder, "events")["detail"].to_list()[-1]
    assert last == "restart at 300 s did not happen: the run ended first"


def test_a_restart_at_the_time_of_the_kill_counts(tmp_path: Path) -> None:
    faults = (Fault("kill", 1, 0.12), Fault("restart", 1, 0.12), Fault("kill", 1, 0.3))
    folder = simulate(tmp_path, ClusterProfile(step_s=0.05, server=FREE_SERVER, faults=faults), strategy="asp", steps=9)
    kinds = read_trace(folder, "events").filter(pl.col("rank") == 1)["kind"].to_list()
    assert kinds == ["join", "fault", "leave", "restart", "join", "fault", "leave"]
    # Steps at 0.05 and 0.1, and from 0.12 on at 0.17, 0.22 and 0.27.
    assert read_run(folder)["totals"]["steps"] == 9 + 2 + 3
