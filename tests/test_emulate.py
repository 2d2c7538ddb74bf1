"""Real processes under a cluster profile: padded steps, the delay line, faults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import launch

from sapus_cli.cluster import ClusterProfile, Direction, Fault, Link, ServerCost, StepTimes
from sapus_cli.codec import Push, State, Welcome
from sapus_cli.drivers.delay import Arrivals, DelayLine
from sapus_cli.drivers.worker import Worker as EmulatedWorker
from sapus_cli.strategy import Push as Intent
from sapus_cli.strategy import Received, Reply, ServerState, Step, Strategy, Vec
from sapus_cli.traces import read_run, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=30), st.integers(0, 6))
def test_the_delay_line_gives_what_is_due_in_order(puts: list[tuple[int, int]], now: int) -> None:
    line, seen = DelayLine(), []
    for number, (due, _) in enumerate(puts):
        line.put(due, lambda number=number: seen.append(number))  # type: ignore[misc]
    times: list[float] = []
    while line.next_due <= now:
        at, call = line.take()
        times.append(at)
        call()
    expected = sorted((due, number) for number, (due, _) in enumerate(puts) if due <= now)
    assert (times, seen) == ([due for due, _ in expected], [number for _, number in expected])
    later = [due for due, _ in puts if due > now]
    assert line.next_due == min(later, default=math.inf)


def test_a_late_message_goes_before_those_sent_after_it() -> None:
    # 10 bytes take 1 s, and then 0.5 s more. Sent at 0, 0.2 and 0.1, and handed over in that order.
    line, seen = Arrivals(Direction(Link(10.0, 0.5))), []
    for name, sent in (("a", 0.0), ("c", 0.2), ("b", 0.1)):
        line.put(sent, 10, lambda name=name: seen.append(name))  # type: ignore[misc]
    times = []
    while line.next_due < math.inf:
        due, call = line.take()
        times.append(due)
        call()
    assert (times, seen) == ([1.5, 2.5, 3.5], ["a", "b", "c"])


@pytest.mark.slow
def test_steps_take_what_the_profile_says(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.03, slow={1: 2.0})
    outcome = launch(tmp_path, strategy="local-sgd", params={"h": 5}, steps=20, cluster=profile)
    pushes = read_trace(outcome.folder, "pushes")
    for worker, step_s in ((0, 0.03), (1, 0.06)):
        shown = pushes.filter(pl.col("worker") == worker)["step_s"].to_list()
        # A step that is late on a busy machine is counted, and never shorter.
        assert all(seconds >= step_s - 1e-9 for seconds in shown)
        if outcome.record["summary"]["overruns"] == 0:
            assert shown == pytest.approx([step_s] * 4, abs=1e-6)
    assert outcome.record["summary"]["seconds"] >= 20 * 0.06


@pytest.mark.slow
def test_a_step_that_takes_longer_than_the_profile_says_is_counted(tmp_path: Path) -> None:
    outcome = launch(tmp_path, steps=10, cluster=ClusterProfile(step_s=1e-6))
    assert outcome.record["summary"]["overruns"] == 20
    log = (outcome.folder / "logs" / "worker-0.log").read_text()
    assert log.count("longer than its profile says") == 1


@pytest.mark.slow
def test_messages_take_what_the_link_says(tmp_path: Path) -> None:
    # One worker, so that nothing waits behind anything: exchange = both messages over the rate, two latencies, and the
    # server's time for the two thirds of their bytes that are not real.
    server = ServerCost(message_s=9.0, byte_s=1e-7)
    profile = ClusterProfile(step_s=0.02, link=Link(2e6, 0.015), wire_scale=3, server=server)
    outcome = launch(tmp_path, strategy="local-sgd", params={"h": 2}, workers=1, steps=16, cluster=profile)
    pushes = read_trace(outcome.folder, "pushes")
    elements = outcome.record["model"]["elements"]
    assert all(n > 3 * 4 * elements for n in pushes["bytes_in"])
    expected = (pushes["bytes_in"][0] + pushes["bytes_out"][0]) * (1 / 2e6 + 1e-7 * 2 / 3) + 2 * 0.015
    shown = pushes["exchange_s"].to_list()[1:]
    assert min(shown) >= expected - 1e-4
    assert sorted(shown)[len(shown) // 2] == pytest.approx(expected, rel=0.05)
    totals = outcome.record["totals"]
    assert totals["rx_bytes"] >= pushes["bytes_in"].sum()


@pytest.mark.slow
def test_a_budget_in_seconds_counts_from_the_release_and_not_from_the_first_state(tmp_path: Path) -> None:
    # The first states take 0.5 s and 1 s on the link.
    elements = 4 * 4000
    profile = ClusterProfile(step_s=0.05, link=Link(elements / 0.5))
    outcome = launch(tmp_path, strategy="asp", dataset="null", model="null:4000", seconds=2.0, cluster=profile)
    steps = read_trace(outcome.folder, "pushes").group_by("worker").agg(pl.col("n_steps").sum(), pl.col("t_s").max())
    # No worker begins a step after 2 s; the last push may still be on its way then, behind that of the other.
    assert steps["t_s"].max() <= 2.0 + 0.05 + 2 * 0.5 + 0.2  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "bsp", "transport": "tcp"},
        {"strategy": "local-sgd-async", "params": {"h": 4}, "transport": "shm"},
        {"strategy": "sapus", "transport": "tcp"},
        {"strategy": "easgd", "params": {"h": 4}, "transport": "shm"},
    ],
    ids=lambda fields: f"{fields['strategy']}-{fields['transport']}",
)
def test_a_worker_that_is_killed_is_missed_and_comes_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    faults = (Fault("kill", 1, 0.7), Fault("restart", 1, 1.0))
    profile = ClusterProfile(step_s=0.02, link=Link(1e7, 0.001), faults=faults)
    outcome = launch(tmp_path, workers=3, steps=70, cluster=profile, **fields)
    events = read_trace(outcome.folder, "events").filter(pl.col("rank") == 1)
    assert events["kind"].to_list() == ["join", "fault", "leave", "restart", "join", "leave"]
    pushes = read_trace(outcome.folder, "pushes").group_by("worker").agg(pl.col("n_steps").sum())
    # What the worker had not pushed it does again, so that all steps of the budget arrive.
    assert sorted(pushes.rows()) == [(0, 70), (1, 70), (2, 70)]
    assert outcome.record["totals"]["steps"] == 210
    seqs = read_trace(outcome.folder, "pushes").filter(pl.col("worker") == 1)["seq"].to_list()
    assert sorted(seqs) == list(range(1, len(seqs) + 1)), "pushes are counted over both lives"


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_is_killed_on_its_way_back_is_not_waited_for(tmp_path: Path, again: bool) -> None:  # noqa: FBT001
    # The second kill follows its start at once, so that it has not greeted yet.
    faults = [Fault("kill", 1, 0.5), Fault("restart", 1, 0.6), Fault("kill", 1, 0.6000001)]
    faults += [Fault("restart", 1, 0.7)] if again else []
    profile = ClusterProfile(step_s=0.02, faults=tuple(faults))
    outcome = launch(tmp_path, strategy="bsp", workers=2, steps=60, cluster=profile)
    assert outcome.record["status"] == "finished"
    steps = {worker["rank"]: worker["steps"] for worker in outcome.record["totals"]["workers"]}
    assert steps[0] == 60
    assert (steps[1] == 60) is again


@pytest.mark.slow
def test_a_worker_that_is_killed_for_good_leaves_the_rest_to_finish(tmp_path: Path) -> None:
    profile = ClusterProfile(step_s=0.02, faults=(Fault("kill", 0, 0.5), Fault("kill", 1, 60.0)))
    outcome = launch(tmp_path, strategy="bsp", steps=60, cluster=profile)
    assert outcome.record["status"] == "finished"
    assert outcome.record["totals"]["steps"] < 120
    details = read_trace(outcome.folder, "events").filter(pl.col("kind") == "fault")["detail"].to_list()
    assert details == ["killed by the profile", "kill at 60 s did not happen: the run ended first"]


@pytest.mark.slow
def test_faults_need_workers_of_our_own(tmp_path: Path, inside: Inside) -> None:
    done = inside("server", "--fault", "kill:worker=0,at=1s", "--workers", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "started by hand" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_run_takes_a_profile_and_says_so(tmp_path: Path, inside: Inside) -> None:
    line = "run -s bsp --workers 2 --model mlp --steps 5 --cluster 16x-lan --step-time 20ms --name r -q"
    assert inside(*line.split()).returncode == 0
    cluster: dict[str, Any] = read_run(tmp_path / "results" / "r")["cluster"]
    assert (cluster["name"], cluster["step_s"]) == ("16x-lan, changed", 0.02)


class Late:
    """A connection to a server that answers at once, though its link takes 30 ms."""

    def __init__(self, link_s: float) -> None:
        self.welcome = Welcome(protocol=1, rank=0, elements=1, fingerprint="f", beat_s=1.0)
        self.pushes: list[Push] = []
        self._link_s = link_s
        self._replies = [State(version=0, t_s=0.0, fresh=True)]

    buffers = (None, None)
    dtype = torch.float32

    def send(self, message: Any, vector: Any = None) -> None:
        if isinstance(message, Push):
            self.pushes.append(message)
            self._replies.append(State(version=len(self.pushes), t_s=message.sent_s, link_s=self._link_s))

    def receive(self, into: Any, timeout_ms: int | None) -> State | None:
        return self._replies.pop(0) if self._replies else None


class Nothing:
    """Steps that take no time."""

    vector = torch.zeros(1)
    steps = 0

    def step(self) -> tuple[float, int]:
        return 1.0, 1

    def forget(self) -> None:
        pass


class Overlapping(Strategy[None, ServerState]):
    """A push after every step that finds none under way."""

    def init_worker(self, x0: Vec, worker: int) -> None:
        return None

    def after_step(self, w: None, step: Step) -> Intent | None:
        return Intent(wait=False)

    def init_server(self, x0: Vec, n_workers: int) -> ServerState:
        return ServerState(x0)

    def on_push(self, s: ServerState, msg: Received) -> list[Reply]:
        return [Reply(msg.worker)]


def test_what_arrives_during_a_step_is_taken_after_it() -> None:
    # Pushes overlap with computing. The reply takes 30 ms and a step 20 ms: it is taken after the second step that
    # follows the push, 40 ms later, although the machine brings it at once.
    client = Late(0.03)
    profile = ClusterProfile(step_s=0.02)
    worker = EmulatedWorker(
        client,  # type: ignore[arg-type]
        Overlapping(),
        Nothing(),
        fingerprint="f",
        n_params=1,
        steps=9,
        seconds=None,
        times=StepTimes(profile, 0, 0),
    )
    assert worker.run() == "done"
    assert [push.n_steps for push in client.pushes] == [1, 3, 3, 2]
    assert [push.exchange_s for push in client.pushes[1:]] == pytest.approx([0.04, 0.04, 0.04], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("restart", [0.5, 0.52, 30.0])
def test_a_target_ends_the_run_whoever_is_dead_or_on_the_way_back(tmp_path: Path, restart: float) -> None:
    faults = (Fault("kill", 1, 0.5), Fault("restart", 1, restart))
    profile = ClusterProfile(step_s=0.03, faults=faults)
    outcome = launch(tmp_path, strategy="asp", steps=2000, target_accuracy=0.3, eval_every_s=0.7, cluster=profile)
    summary = outcome.record["summary"]
    assert outcome.record["status"] == "finished"
    assert summary["reached_s"] <= summary["seconds"] < 10
