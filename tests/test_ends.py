"""How runs end when they do not end well: signals, kills, a launcher that vanishes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import all_gone, sapus, start

from sapus_cli.traces import read_run, read_trace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

LONG = ("run", "--strategy", "local-sgd", "--workers", "3", "--seconds", "100", "--param", "h=2", "--model", "mlp")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupt_keeps_what_was_written_and_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path, *LONG)
    run.wait_for_pushes()
    family = run.family()
    if number is signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does: to every process
    else:
        run.process.send_signal(number)
    code, _, err = run.end()
    assert code == 130
    assert f"interrupted by {number.name}" in err
    assert len(err.strip().splitlines()[-1]) < 200
    assert "Traceback" not in err
    assert all_gone(family, 5)
    record = run.record()
    assert record["status"] == "interrupted"
    assert record["totals"]["pushes"] == len(read_trace(run.folder, "pushes")) > 0
    assert "signal" in list(read_trace(run.folder, "events")["kind"])


def test_an_interrupt_before_training_leaves_nothing_behind(tmp_path: Path) -> None:
    run = start(tmp_path, *LONG)
    run.wait_for(run.family, "first child")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130
    assert "Traceback" not in err
    assert all_gone(family, 8)


@pytest.mark.parametrize(("role", "name"), [("server", "server"), ("evaluator", "evaluator")])
def test_a_process_that_is_killed_ends_a_run_that_cannot_do_without(tmp_path: Path, role: str, name: str) -> None:
    run = start(tmp_path, *LONG, "--max-restarts", "0", "--min-workers", "3", "--worker-timeout", "0.5")
    run.wait_for_pushes()
    family = run.family()
    killed_at = time.monotonic()
    os.kill(run.pid(role), signal.SIGKILL)
    code, _, err = run.end()
    assert time.monotonic() - killed_at < 10
    assert code == 1
    assert f"the {name} process was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert all_gone(family, 5)
    record = run.record()
    assert record["status"] == "failed"
    assert "SIGKILL" in record["failure"]
    assert len(read_trace(run.folder, "pushes")) > 0
    assert "crash" in list(read_trace(run.folder, "events")["kind"])


def test_a_process_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "from dataclasses import dataclass\n"
        "from strategies.asp import Asp\n"
        "@dataclass(frozen=True)\n"
        "class Faulty(Asp):\n"
        "    def after_step(self, w, step):\n"
        "        if step.t == 3: raise ArithmeticError('no third step')\n"
        "        return None\n"
    )
    done = sapus("run", "--strategy", "faulty:Faulty", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "process ended with exit code 1" in done.stderr
    assert "ArithmeticError: no third step" in done.stderr


def test_a_strategy_that_deadlocks_is_named(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(
        "from dataclasses import dataclass\n"
        "from strategies.asp import Asp\n"
        "@dataclass(frozen=True)\n"
        "class Silent(Asp):\n"
        "    def on_push(self, s, msg):\n"
        "        return ()\n"
    )
    done = sapus("run", "--strategy", "silent:Silent", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "the server process ended" in done.stderr
    assert "DeadlockError" in done.stderr


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    done = sapus("run", "--lr", "1e30", "--workers", "2", "-s", "asp", "--steps", "500", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sapus: diverged: no worker pushes finite numbers any more, worker ")
    assert last.endswith("try a smaller --lr")
    (folder,) = (tmp_path / "results").iterdir()
    assert read_run(folder)["status"] == "failed"
    events = read_trace(folder, "events")
    assert set(events.filter(events["kind"] == "declined")["rank"]) == {0, 1}
    assert len(events.filter(events["kind"] == "declined")) >= 18
    assert len(events.filter(events["kind"] == "fresh")) >= 1


def test_a_process_knows_when_it_was_created() -> None:
    before = time.monotonic()
    asked = [sys.executable, "-c", "from sapus_cli.drivers.process import created_s; print(created_s())"]
    said = float(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert before - 0.02 < said < time.monotonic() - 0.02, "Linux counts in hundredths; Python itself takes longer"


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path, *LONG)
    run.wait_for_pushes()
    run.wait_for(lambda: (run.folder / "resources.csv").read_text().count("\n") > 1, "first sample")
    family = run.family()
    assert len(family) >= 5
    run.process.kill()
    run.process.communicate(timeout=10)
    assert all_gone(family, 5), [process for process in family if process.is_running()]
    assert read_run(run.folder)["status"] == "running"
    assert len(read_trace(run.folder, "pushes")) > 0
    assert len(read_trace(run.folder, "resources")) > 0
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
