"""Several runs side by side: the pool of child processes, and the options of `sapus simulate` that use it."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from processes import Background, all_gone, sapus, start

from sapus_cli.cluster import ClusterProfile
from sapus_cli.config import RunConfig
from sapus_cli.drivers.pool import Cell, Pool, Progress, Result
from sapus_cli.drivers.simulate import Simulation
from sapus_cli.errors import DivergedError, RunFailedError, UserError
from sapus_cli.traces import read_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inside import Inside

pytestmark = pytest.mark.slow

LONG = ("simulate", "--step-time", "50ms", "--model", "mlp", "--epochs", "100000", "--seeds", "3", "--jobs", "2")


def cell(results: Path, name: str | None = None, **fields: Any) -> Cell:
    asked: dict[str, Any] = {"strategy": "asp", "workers": 2, "model": "mlp", "steps": 10} | fields
    return Cell(RunConfig(**asked, cluster=ClusterProfile(step_s=0.05)), results, name)


class Noted:
    """Keeps what it is told; may do something at the first progress."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.results: dict[int, Result] = {}
        self.told: list[tuple[int, Progress]] = []
        self._act = act

    def progress(self, number: int, cell: Cell, progress: Progress) -> None:
        self.told.append((number, progress))
        if len(self.told) == 1:
            self._act()

    def ended(self, number: int, cell: Cell, result: Result) -> None:
        assert number not in self.results
        self.results[number] = result


def fork_children() -> list[psutil.Process]:
    """The processes that run cells, below the fork server."""
    servers: list[psutil.Process] = psutil.Process().children()
    return [child for server in servers for child in server.children()]


def test_more_cells_than_jobs_give_what_each_gives_alone(tmp_path: Path) -> None:
    cells = [cell(tmp_path / "pool", f"run{seed}", seed=seed) for seed in range(5)]
    noted = Noted()
    Pool(2, 1).run(iter(cells), noted)
    assert sorted(noted.results) == list(range(5))
    assert {number for number, _ in noted.told} == set(range(5))
    for number, result in noted.results.items():
        assert result.folder == tmp_path / "pool" / f"run{number}"
        assert result.error is None
        assert result.record is not None
        assert result.record["config"]["seed"] == number
        config = cells[number].config
        _, alone = Simulation(config, tmp_path / "alone", None, lambda _: None).run()
        assert result.record["state_sha256"] == alone["state_sha256"]
    assert fork_children() == []


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    cells = [
        cell(tmp_path, lr=1e30, steps=100),
        cell(tmp_path, dataset="nothing"),
        cell(tmp_path, "there"),
        cell(tmp_path, "there"),
    ]
    noted = Noted()
    Pool(1, 1).run(cells, noted)
    diverged, wrong, well, again = (noted.results[number] for number in range(4))
    assert isinstance(diverged.error, DivergedError)
    assert diverged.folder is not None
    assert read_run(diverged.folder)["status"] == "failed"
    assert isinstance(wrong.error, UserError)
    assert "unknown data set 'nothing'" in str(wrong.error)
    assert wrong.folder is None
    assert well.record is not None
    assert "exists already" in str(again.error)


def test_a_killed_child_fails_its_cell_alone(tmp_path: Path) -> None:
    def kill() -> None:
        fork_children()[0].kill()

    noted = Noted(kill)
    Pool(1, 1).run([cell(tmp_path, steps=None, epochs=1e5), cell(tmp_path)], noted)
    assert isinstance(noted.results[0].error, RunFailedError)
    assert "was killed by SIGKILL" in str(noted.results[0].error)
    assert noted.results[0].folder is not None
    record = read_run(noted.results[0].folder)
    assert (record["status"], record["failure"]) == ("failed", "the process of the run was killed by SIGKILL")
    assert noted.results[1].record is not None


def test_what_the_observer_raises_ends_the_pool(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        Pool(2, 1).run([cell(tmp_path, steps=None, epochs=1e5)] * 3, Noted(refuse))
    assert fork_children() == []
    assert [read_run(folder)["status"] for folder in tmp_path.iterdir()] == ["interrupted"] * len([*tmp_path.iterdir()])


# --- The command ---


def test_several_seeds_are_what_each_of_them_is(tmp_path: Path, inside: Inside) -> None:
    line = ("simulate", "--cluster", "8xgpu-1g", "--model", "mlp", "-w", "2", "--steps", "10")
    done = sapus(*line, "--seeds", "3", "--jobs", "2", "--seed", "5", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads(done.stdout)
    assert [run["seed"] for run in runs] == [5, 6, 7]
    alone = json.loads(inside(*line, "--seed", "6", "--json").stdout)
    assert runs[1]["state_sha256"] == alone["state_sha256"]
    assert read_run(tmp_path / runs[2]["run"])["config"]["seed"] == 7


def test_the_last_lines_are_the_runs_and_their_mean(tmp_path: Path, inside: Inside) -> None:
    line = ("simulate", "--cluster", "8xgpu-1g", "--model", "mlp", "-w", "2", "--steps", "10", "--seeds", "2")
    done = inside(*line)
    assert done.returncode == 0
    head, *runs, mean = done.stdout.splitlines()
    assert head.split() == ["accuracy", "virtual", "time", "run", "folder"]
    assert len(runs) == 2
    assert all((tmp_path / run.split()[-1] / "run.json").exists() for run in runs)
    accuracies = [float(text.split("%")[0]) for text in (*runs, mean)]
    assert accuracies[2] == pytest.approx((accuracies[0] + accuracies[1]) / 2, abs=0.011)
    assert mean.endswith("mean of 2 runs")
    assert "seed 1  virtual" in done.stderr


def test_a_run_that_fails_is_reported_and_the_exit_code_is_1(inside: Inside) -> None:
    line = ("simulate", "-s", "asp", "--step-time", "50ms", "--lr", "1e30", "--model", "mlp", "-w", "2")
    done = inside(*line, "--steps", "100", "--seeds", "2", "--json")
    assert done.returncode == 1
    assert done.stderr.startswith("sapus: 2 of 2 runs failed\nseed 0: diverged")
    assert [run["status"] for run in json.loads(done.stdout)] == ["failed"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--jobs", "0"), "--jobs 0"),
        (("--seeds", "0"), "--seeds 0"),
        (("--seeds", "x"), "--seeds x: must be a whole number"),
        (("--seeds", "2", "--name", "one"), "--name one"),
        (("--seeds", "2", "--seed", str(2**63 - 1)), f"--seed {2**63}"),
        (("--seeds", "2", "--jobs", "2", "--dataset", "digit"), "did you mean digits"),
    ],
)
def test_a_wrong_call_creates_nothing(tmp_path: Path, options: tuple[str, ...], message: str, inside: Inside) -> None:
    done = inside("simulate", "--step-time", "50ms", "--quiet", *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def under_way(run: Background) -> list[psutil.Process]:
    """Every process of a pool of two, once both write."""
    run.wait_for(lambda: len([*run.results.glob("*/pushes.csv")]) == 2, "two runs")
    return run.family()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_closes_the_runs_under_way(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path, *LONG)
    family = under_way(run)
    begin = time.monotonic()
    run.process.send_signal(number)
    code, _, err = run.end()
    assert time.monotonic() - begin < 4
    assert code == 130
    assert f"interrupted by {number.name}" in err
    assert all_gone(family, 5)
    assert [read_run(folder)["status"] for folder in run.results.iterdir()] == ["interrupted"] * 2


def test_no_child_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path, *LONG)
    family = under_way(run)
    run.process.kill()
    run.end()
    assert all_gone(family, 5)
