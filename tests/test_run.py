"""Whole runs: real processes, real sockets, real data."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from processes import SAPUS, launch, sapus

from sapus_cli.checkpoint import read_state
from sapus_cli.drivers.server import state_sha256
from sapus_cli.traces import read_run, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def main_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """README's command, with --json to read its summary."""
    here = tmp_path_factory.mktemp("main")
    done = sapus("run", "--strategy", "local-sgd", "--workers", "8", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    return here / summary["run"], summary, done.stderr


def test_the_main_command_reaches_95_percent(main_run: tuple[Path, dict[str, Any], str]) -> None:
    _, summary, stderr = main_run
    assert summary["status"] == "finished"
    assert summary["accuracy"] >= 0.95
    assert stderr == ""


def test_the_run_folder_is_complete(main_run: tuple[Path, dict[str, Any], str]) -> None:
    folder, summary, _ = main_run
    record = read_run(folder)
    checkpoints = sorted(path.stem for path in folder.glob("checkpoint/*.json"))
    assert len(checkpoints) == 2, "the newest and the one before it"
    logs = {f"logs/worker-{rank}.log" for rank in range(8)} | {"logs/server.log", "logs/evaluator.log"}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == logs | {
        "run.json",
        "evals.csv",
        "pushes.csv",
        "resources.csv",
        "events.csv",
        *(f"checkpoint/{name}.{kind}" for name in checkpoints for kind in ("safetensors", "json")),
    }
    assert all((folder / log).read_text() == "" for log in logs)
    assert folder.name.endswith("Z_local-sgd_w8_s0")
    assert record["status"] == "finished"
    assert record["threads_per_process"] == 1
    assert record["strategy"]["hyper_parameters"] == {"h": 16}
    assert record["clock"] == "real"
    assert record["environment"]["versions"]["torch"]
    assert record["state_sha256"] == summary["state_sha256"]
    assert state_sha256(read_state(folder / "checkpoint")) == record["state_sha256"]


def test_the_traces_agree_with_each_other(main_run: tuple[Path, dict[str, Any], str]) -> None:
    folder, summary, _ = main_run
    totals = read_run(folder)["totals"]
    steps = read_run(folder)["steps_per_worker"]
    pushes, evals = read_trace(folder, "pushes"), read_trace(folder, "evals")
    resources, events = read_trace(folder, "resources"), read_trace(folder, "events")

    assert pushes["n_steps"].sum() == 8 * steps == totals["steps"]
    assert len(pushes) == totals["pushes"] == totals["version"] == 8 * -(-steps // 16)
    assert pushes["staleness"].max() == 0
    assert pushes["weight"].unique().to_list() == [0.125]
    per_worker = pushes.sort("worker", "seq").group_by("worker", maintain_order=True).agg("seq", "n_steps")
    for seqs, intervals in zip(per_worker["seq"], per_worker["n_steps"], strict=True):
        assert list(seqs) == list(range(1, len(seqs) + 1))
        assert list(intervals[:-1]) == [16] * (len(seqs) - 1)
    d = read_run(folder)["model"]["elements"]
    assert (pushes["bytes_in"] > 4 * d).all()
    # What is not a push or its reply: hello, welcome, pull, first state and leave of each worker.
    assert 0 < totals["rx_bytes"] - pushes["bytes_in"].sum() < 8 * 300
    assert 8 * 4 * d < totals["tx_bytes"] - pushes["bytes_out"].sum() < 8 * (4 * d + 3000)

    assert evals["version"].to_list()[-1] == totals["version"]
    assert evals["accuracy"].to_list()[-1] == summary["accuracy"]
    assert 0 < evals["worst_class"][-1] <= summary["accuracy"]
    assert evals["t_s"].is_sorted()
    assert set(resources["role"]) == {"server", "worker", "evaluator"}
    server = resources.filter(resources["role"] == "server")
    assert server["cpu_s"].is_sorted()
    assert server["rx_bytes"].to_list()[-1] == totals["rx_bytes"]
    events = events.filter(events["kind"] != "checkpoint")
    assert sorted(events["kind"]) == ["join"] * 8 + ["leave"] * 8
    assert set(events["detail"]) == {"", "done"}


def test_show_reads_it(main_run: tuple[Path, dict[str, Any], str]) -> None:
    folder, summary, _ = main_run
    shown = sapus("show", str(folder), cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert folder.name in shown.stdout
    assert f"{summary['accuracy']:.2%}" in shown.stdout
    assert "finished" in shown.stdout


def test_two_barrier_runs_with_one_seed_end_in_the_same_bits(tmp_path: Path) -> None:
    def sha(**fields: Any) -> str:
        return str(launch(tmp_path, workers=3, **fields).record["state_sha256"])

    one = sha(params={"h": 4}, steps=10)
    assert one == sha(params={"h": 4}, steps=10)
    assert one != sha(params={"h": 4}, steps=10, seed=1)
    assert sha(strategy="local-sgd", params={"h": 1}) == sha(strategy="bsp")


def test_batch_norm_models_are_averaged_right(tmp_path: Path) -> None:
    fields = {"dataset": "fake:1x8x8:4", "model": "resnet20", "lr": 0.1, "batch_size": 16, "steps": 48}
    alone = launch(tmp_path, workers=1, params={"h": 4}, **fields).record["summary"]["accuracy"]
    four = launch(tmp_path, workers=4, params={"h": 4}, **fields).record["summary"]["accuracy"]
    assert alone > 0.8, "the twin must have learned for the comparison to say anything"
    assert four > alone - 0.05


def test_the_target_ends_the_run_early_and_the_tail_is_flushed(tmp_path: Path) -> None:
    outcome = launch(tmp_path, strategy="asp", epochs=2000.0, target_accuracy=0.6)
    totals, summary = outcome.record["totals"], outcome.record["summary"]
    evals, pushes = read_trace(outcome.folder, "evals"), read_trace(outcome.folder, "pushes")
    assert totals["steps"] < 2 * outcome.record["steps_per_worker"]
    first = evals.filter(evals["accuracy"] >= 0.6).row(0, named=True)
    assert summary["reached_s"] == first["t_s"]
    assert evals["version"].to_list()[-1] == totals["version"] == len(pushes)
    assert pushes["n_steps"].sum() == totals["steps"]


def test_a_batch_larger_than_a_shard_does_not_cut_the_epochs(tmp_path: Path) -> None:
    outcome = launch(tmp_path, epochs=3.0, batch_size=5000)
    # 1438 training samples, 719 a worker: a step of two workers is a pass, of the whole shard each.
    assert outcome.record["effective_batch_size"] == 719
    assert outcome.record["totals"]["samples"] == 3 * 1438


def test_a_worker_that_diverges_alone_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Inside) -> None:
    (tmp_path / "poison.py").write_text(
        "from dataclasses import dataclass\n"
        "from strategies.asp import Asp\n"
        "@dataclass(frozen=True)\n"
        "class Poison(Asp):\n"
        "    def init_worker(self, x0, worker):\n"
        "        return worker\n"
        "    def after_step(self, w, step):\n"
        "        if w == 0 and step.t == 5:\n"
        "            step.params[0] = float('nan')\n"
        "        return super().after_step(None, step)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = inside(
        *["run", "-s", "poison:Poison", "-w", "2", "--momentum", "0.9", "--lr", "0.01", "--steps", "100", "--json"]
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["declined"] == 10
    assert summary["pushes"] == 2 * 100 - 10
    events = read_trace(tmp_path / summary["run"], "events")
    assert list(events.filter(events["kind"] == "fresh")["rank"]) == [0]


def test_a_budget_of_seconds_ends_the_run(tmp_path: Path) -> None:
    outcome = launch(tmp_path, params={"h": 5}, seconds=0.7)
    assert outcome.record["summary"]["seconds"] >= 0.7
    pushes = read_trace(outcome.folder, "pushes")
    assert pushes["n_steps"].sum() == outcome.record["totals"]["steps"]
    assert set(pushes["n_steps"][:-2]) == {5}


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": "pydoc", "model": "gpt", "optimizer": "adamw", "lr": 1e-3, "steps": 4},
        {"dataset": "mnist5k", "model": "lenet5", "partition": "dirichlet:0.5", "momentum": 0.9},
        {"dataset": "digits", "model": "torchvision:resnet18", "steps": 2},
    ],
    ids=lambda fields: f"{fields['dataset']}-{fields['model']}",
)
def test_other_workloads_run(tmp_path: Path, fields: dict[str, Any]) -> None:
    outcome = launch(tmp_path, **fields)
    assert outcome.record["status"] == "finished"
    evals = read_trace(outcome.folder, "evals")
    assert evals["loss"].to_list()[-1] < evals["loss"].to_list()[0] * 1.5


def test_names_of_folders_do_not_collide(tmp_path: Path) -> None:
    folders = {launch(tmp_path, steps=1).folder for _ in range(2)}
    assert len(folders) == 2


def test_a_terminal_gets_a_live_view_and_a_pipe_gets_lines(tmp_path: Path, inside: Inside) -> None:
    command = [*SAPUS, "run", "-s", "local-sgd", "--workers", "2", "--steps", "300", "--param", "h=2"]
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, text=True, env=environment)
    os.close(theirs)
    seen = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:
                break
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, seen
    text = seen.decode()
    assert "\x1b[" in text, "it is redrawn in place"
    for word in ("training", "samples/s", "server CPU", "computes"):
        assert word in text
    assert "Next: sapus show results/" in out

    piped = sapus("run", "--workers", "2", "--steps", "10", cwd=tmp_path)
    assert piped.returncode == 0
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "2 workers at their first step after" in piped.stderr
    quiet = inside("run", "--workers", "2", "--steps", "10", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
