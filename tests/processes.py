"""Real runs for tests: the command in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from sapus_cli.commands.view import Quiet
from sapus_cli.config import RunConfig
from sapus_cli.drivers.launch import Launcher, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STARTED: list[Background] = []
"""All that were started, so that none is left behind by a test that fails."""
SAPUS = [sys.executable, "-c", "from sapus_cli.cli import main; main()"]


def launch(results: Path, **fields: Any) -> Outcome:
    """One run from within this process; its children come from a fork server that stays warm between tests."""
    asked: dict[str, Any] = {"strategy": "local-sgd", "workers": 2, "model": "mlp", "eval_every_s": 0.1} | fields
    if not {"epochs", "steps", "seconds"} & set(asked):
        asked["steps"] = 20
    return Launcher(RunConfig(**asked), results, None, Quiet).run()


def sapus(*arguments: str, cwd: Path, limits: str = "true", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line, run to its end; `limits` are set by a shell before."""
    return subprocess.run(
        ["sh", "-c", f'{limits} && exec "$@"', "sh", *SAPUS, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@dataclass
class Background:
    """A run that goes on while the test does something to it."""

    process: subprocess.Popen[str]
    results: Path

    def __post_init__(self) -> None:
        STARTED.append(self)

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 40) -> None:
        """Wait until something can be seen."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.end()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s"
            time.sleep(0.05)

    @property
    def folder(self) -> Path:
        """The one run folder."""
        (folder,) = self.results.iterdir()
        return folder

    def wait_for_pushes(self, n: int = 4) -> None:
        """Wait until training is under way and its first rows are on disk."""
        self.wait_for(
            lambda: any(f.read_text().count("\n") > n for f in self.results.glob("*/pushes.csv")), f"{n} pushes"
        )

    def family(self) -> list[psutil.Process]:
        """Every process of the run but the launcher."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def pid(self, role: str) -> int:
        """The process that writes logs/<role>.log."""
        log = str(self.folder.resolve() / "logs" / f"{role}.log")
        for process in self.family():
            if os.path.realpath(f"/proc/{process.pid}/fd/1") == log:
                return int(process.pid)
        raise AssertionError(f"nobody is {role}")

    def end(self, seconds: float = 20) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def record(self) -> dict[str, Any]:
        """run.json as it is now."""
        record: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return record


def start(cwd: Path, *arguments: str, **environment: str) -> Background:
    """A command line that goes on."""
    process = subprocess.Popen(
        [*SAPUS, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Background(process, cwd / "results")


def end_all() -> None:
    """End what still runs."""
    while STARTED:
        process = STARTED.pop().process
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of these end within so many seconds."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
