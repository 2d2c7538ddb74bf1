"""Processes of a run die, hang and come back, the launcher among them; and runs that go on where they were."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from processes import all_gone, launch, sapus, start

from sapus_cli.checkpoint import read_state
from sapus_cli.cluster import ClusterProfile
from sapus_cli.traces import read_run, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inside import Said
    from processes import Background

# Each step adds 1 to the first element and takes 5 ms: what became of every push can be reckoned.
COUNTING = ("--dataset", "null", "--model", "null:5", "--step-time", "5ms", "--workers", "3", "--eval-every", "0.2")
TWICE_A_SECOND = ("--checkpoint-every", "0.5")


def events(run: Background) -> list[tuple[str, str, int]]:
    rows = read_trace(run.folder, "events").select("kind", "role", "rank").rows()
    return [(kind, role, rank) for kind, role, rank in rows]


def evaluators(run: Background) -> list[int]:
    """Processes that write the evaluator's log."""
    log = str(run.folder.resolve() / "logs" / "evaluator.log")
    return [process.pid for process in run.family() if os.path.realpath(f"/proc/{process.pid}/fd/1") == log]


def wait_for_event(run: Background, *event: object) -> None:
    run.wait_for(lambda: event in events(run), f"{event}")


def checked(folder: Path, steps: int, n_workers: int = 3) -> dict[str, Any]:
    """The record of a run that ended well, after what has to be true of its traces however it went."""
    record = read_run(folder)
    assert record["status"] == "finished", record.get("failure")
    pushes = read_trace(folder, "pushes")
    assert len(pushes) == record["totals"]["pushes"]
    for rank in range(n_workers):
        own = pushes.filter(pushes["worker"] == rank)
        assert sorted(own["seq"]) == list(range(1, len(own) + 1)), f"worker {rank}: no push twice, none left out"
        assert own["n_steps"].sum() == steps, f"worker {rank}"
    assert read_trace(folder, "evals")["t_s"].is_sorted()
    # Events come from the launcher and, over a pipe, from the server.
    assert (read_trace(folder, "events")["t_s"].diff().drop_nulls() > -0.5).all()
    server = read_trace(folder, "resources")
    server = server.filter(server["role"] == "server")
    assert all(server[name].is_sorted() for name in ("t_s", "cpu_s", "rx_bytes", "tx_bytes"))
    pushes = pushes.drop_nulls("weight")
    lost = steps * n_workers - sum(pushes["n_steps"])
    applied = sum(weight * n_steps for weight, n_steps in pushes.select("weight", "n_steps").rows())
    # The last push of a worker that left has no weight, as nobody is answered.
    assert 0.9999 * applied <= float(read_state(folder / "checkpoint")[0]) <= 1.0001 * (applied + lost)
    return record


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    run = start(tmp_path, "run", "-s", "local-sgd-async", *COUNTING, "--steps", "600")
    run.wait_for_pushes()
    os.kill(run.pid("worker-1"), signal.SIGKILL)
    code, _, err = run.end(60)
    assert code == 0, err
    lines = [line.split(" s ", 1)[1] for line in err.splitlines() if "worker 1" in line]
    assert lines[:2] == ["crash: worker 1 was killed by SIGKILL", "restart: worker 1 attempt 1 of 3"]
    assert lines[2].startswith("join: worker 1 goes on after ")
    assert [event for event in events(run) if event[2] == 1] == [
        (kind, "worker", 1) for kind in ("join", "crash", "leave", "restart", "join", "leave")
    ]
    checked(run.folder, 600)


@pytest.mark.slow
def test_a_worker_that_hangs_is_dropped_told_so_and_comes_back(tmp_path: Path) -> None:
    run = start(tmp_path, "run", "-s", "local-sgd", *COUNTING, "--steps", "600", "--worker-timeout", "1")
    run.wait_for_pushes()
    hanging = run.pid("worker-2")
    os.kill(hanging, signal.SIGSTOP)
    wait_for_event(run, "drop", "worker", 2)
    before = len(read_trace(run.folder, "pushes"))
    run.wait_for(lambda: len(read_trace(run.folder, "pushes")) > before + 4, "the barrier to go on without it")
    os.kill(hanging, signal.SIGCONT)
    code, _, err = run.end(60)
    assert code == 0, err
    assert [kind for kind, _, rank in events(run) if rank == 2] == ["join", "drop", "leave", "join", "leave"]
    assert "begins anew at step" in (run.folder / "logs" / "worker-2.log").read_text()
    checked(run.folder, 600)


@pytest.mark.slow
def test_a_worker_that_never_wakes_up_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    run = start(tmp_path, "run", "-s", "bsp", *COUNTING, "--steps", "300", "--worker-timeout", "0.6")
    run.wait_for_pushes()
    family = run.family()
    os.kill(run.pid("worker-0"), signal.SIGSTOP)
    code, _, err = run.end(60)
    assert code == 0, err
    assert all_gone(family, 5)
    steps = {worker["rank"]: worker["steps"] for worker in run.record()["totals"]["workers"]}
    assert steps[1] == steps[2] == 300 > steps[0]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "transport"), [("sapus-weighted", "tcp"), ("bsp", "shm")])
def test_a_server_that_is_killed_is_started_again_from_its_checkpoint(
    tmp_path: Path, strategy: str, transport: str
) -> None:
    words = ("run", "-s", strategy, *COUNTING, *TWICE_A_SECOND, "--steps", "800", "--transport", transport)
    run = start(tmp_path, *words)
    run.wait_for_pushes()
    for n in (1, 2):
        run.wait_for(lambda: events(run)[-1:] == [("checkpoint", "server", 0)], "a checkpoint")
        os.kill(run.pid("server"), signal.SIGKILL)
        run.wait_for(lambda n=n: events(run).count(("join", "worker", 1)) > n, "the workers to come back")  # type: ignore[misc]
    code, _, err = run.end(60)
    assert code == 0, err
    assert events(run).count(("restart", "server", 0)) == 2
    record = checked(run.folder, 800)
    assert record["totals"]["steps"] == 2400
    went_on = [
        detail for kind, detail in read_trace(run.folder, "events").select("kind", "detail").rows() if kind == "resume"
    ]
    lost = [int(detail.split("; ")[1].split()[0]) for detail in went_on]
    assert record["summary"]["lost_pushes"] == sum(lost)
    pushes = record["totals"]["pushes"] + sum(lost)
    assert pushes <= record["totals"]["rx_frames"] // (1 if transport == "shm" else 2)
    resources = read_trace(run.folder, "resources")
    assert record["totals"]["end_s"] == pytest.approx(resources["t_s"].max(), abs=1), "its time went on"


@pytest.mark.slow
def test_an_evaluator_that_hangs_or_is_killed_is_replaced(tmp_path: Path) -> None:
    run = start(tmp_path, "run", "-s", "asp", *COUNTING, "--steps", "600", "--worker-timeout", "0.6")
    run.wait_for_pushes()
    os.kill(run.pid("evaluator"), signal.SIGSTOP)
    wait_for_event(run, "restart", "evaluator", 0)
    run.wait_for(lambda: evaluators(run), "the next evaluator")
    os.kill(run.pid("evaluator"), signal.SIGKILL)
    code, _, err = run.end(60)
    assert code == 0, err
    kinds = [kind for kind, role, _ in events(run) if role == "evaluator"]
    assert kinds == ["drop", "crash", "restart", "crash", "restart"]
    assert read_trace(run.folder, "evals")["samples"][-1] == checked(run.folder, 600)["totals"]["samples"]


@pytest.mark.slow
def test_too_few_workers_end_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    words = (*COUNTING, "--steps", "500", "--max-restarts", "0", "--min-workers", "2", "--worker-timeout", "0.5")
    run = start(tmp_path, "run", "-s", "local-sgd-async", *words, "--name", "r")
    run.wait_for_pushes()
    os.kill(run.pid("worker-0"), signal.SIGKILL)
    wait_for_event(run, "leave", "worker", 0)
    os.kill(run.pid("worker-1"), signal.SIGKILL)
    code, _, err = run.end(60)
    assert code == 1
    assert err.splitlines()[-1] == "Next: sapus run --resume results/r"
    assert "sapus: 2 of 3 workers are lost, so that fewer than --min-workers 2 are left" in err
    assert "the worker 1 process was killed by SIGKILL" in err
    assert run.record()["status"] == "failed"
    done = sapus("run", "--resume", "results/r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checked(run.folder, 500)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "torn"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_a_run_is_resumed_without_a_gap_or_a_double_row(tmp_path: Path, number: signal.Signals, *, torn: bool) -> None:
    words = ("run", "-s", "sapus", *COUNTING, *TWICE_A_SECOND, "--steps", "700", "--name", "r")
    run = start(tmp_path, *words)
    run.wait_for_pushes()
    run.wait_for(lambda: events(run).count(("checkpoint", "server", 0)) > 2, "two checkpoints")
    family = run.family()
    os.kill(run.process.pid, number)
    run.end()
    assert all_gone(family, 5)
    if torn:
        *_, newest = sorted(run.folder.glob("checkpoint/*.json"))
        newest.with_suffix(".safetensors").write_bytes(b"torn")
    again = start(tmp_path, "run", "--resume", "results/r", "--json")
    again.wait_for(lambda: ("resume", "launcher", 0) in events(run), "the run to go on")
    busy = sapus("run", "--resume", "results/r", cwd=tmp_path)
    assert (busy.returncode, busy.stderr.count("\n")) == (2, 1)
    assert "still going on" in busy.stderr
    code, out, err = again.end(60)
    assert code == 0, err
    record = checked(run.folder, 700)
    assert json.loads(out)["status"] == "finished"
    assert record["totals"]["steps"] == 2100
    details = read_trace(run.folder, "events")["detail"].to_list()
    assert any(detail.startswith("passed over: ") for detail in details if detail) is torn
    (resumed,) = record["resumed"]
    times = read_trace(run.folder, "pushes")["t_s"]
    between = times.filter((times > resumed["t_s"] - 0.3) & (times < resumed["t_s"] + 0.3))
    assert len(between) > 2, "time went on from the checkpoint, whatever the clock on the wall says"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run whose record says that it was interrupted."""
    slow = ClusterProfile(step_s=0.01, slow={1: 2.0})
    folder = launch(
        tmp_path_factory.mktemp("runs"), strategy="asp", dataset="null", model="null:5", steps=3, cluster=slow
    ).folder
    record = read_run(folder)
    (folder / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    return folder


def change(folder: Path, **changes: Any) -> None:
    record = read_run(folder)
    (folder / "run.json").write_text(json.dumps(record | changes))


def test_what_cannot_be_resumed_is_refused_in_one_line(
    interrupted: Path, tmp_path: Path, inside: Callable[..., Said]
) -> None:
    def refused(*words: str) -> str:
        before = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()}
        said = inside("run", "--resume", *words)
        assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1), said.stderr
        assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == before
        return str(said.stderr)

    run = str(interrupted)
    assert "there is no run.json" in refused(str(tmp_path))
    assert f"--model: {run} was started with null:5, not null:6; leave it out" in refused(run, "--model", "null:6")
    assert "--strategy: " in refused(run, "--strategy", "bsp")
    assert "--step-time: " in refused(run, "--step-time", "5ms")
    assert "--results: the run goes on in its folder" in refused(run, "--results", str(tmp_path))
    record = read_run(interrupted)
    change(interrupted, status="finished")
    assert "this run is finished" in refused(run)
    change(interrupted, status="failed", clock="virtual")
    assert "only runs of sapus run can go on" in refused(run)
    change(interrupted, clock="real", own_workers=False)
    assert "only runs of sapus run can go on" in refused(run)
    # The checkpoint is that of another strategy, or of another model, than run.json says.
    config = record["config"]
    change(interrupted, own_workers=True, config=config | {"strategy": "bsp"})
    assert "is of Asp(scale='mean'), not of Bsp()" in refused(run)
    change(interrupted, config=config | {"model": "null:6"})
    assert "model with another layout" in refused(run)
    change(interrupted, config=config)
    for path in interrupted.glob("checkpoint/*.json"):
        path.write_bytes(b"{")
    assert "there is no checkpoint to go on from (" in refused(run)
    (interrupted / "run.json").write_text(json.dumps(record))
