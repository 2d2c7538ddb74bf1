"""`sapus simulate`: runs in virtual time, on a cluster that need not be here."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec

from sapus_cli.commands.options import AsJson, Name, Quiet, Results, takes_run_options, whole
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import RunFailedError, UserError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from sapus_cli.drivers.pool import Cell, Progress, Result

EXAMPLES = (
    "Examples:\n\n"
    "sapus simulate --strategy sapus --cluster 8xgpu-10g --workers 8\n\n"
    "sapus simulate -s ssp --step-time 50ms --link 1gbit,0.5ms --slow 6:2x,7:4x\n\n"
    "sapus simulate --cluster 64x-wan --workers 1000 --model mlp --steps 200\n\n"
    "sapus simulate --cluster 8xgpu-10g --seeds 5 --jobs 2"
)
MOST_SEEDS = 10_000
MOST_JOBS = 1024


@takes_run_options
def command(
    config: RunConfig,
    *,
    seeds: Annotated[int, whole("--seeds", text="Number of runs, with the seeds --seed, --seed + 1, ...")] = 1,
    jobs: Annotated[int, whole("--jobs", "-j", text="Most runs at the same time, each in its own process.")] = 1,
    results: Results = Path("results"),
    name: Name = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Train in virtual time: real gradients, and the seconds of a cluster profile. Exact and repeatable."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds {seeds}: must be a whole number from 1 to {MOST_SEEDS}")
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs {jobs}: must be a whole number from 1 to {MOST_JOBS}")
    if name is not None and seeds > 1:
        raise UserError(f"--name {name}: {seeds} runs cannot share one name; leave out --name or --seeds")
    if seeds == 1:
        return _one(config, results, name, quiet=quiet, as_json=as_json)
    configs = [msgspec.structs.replace(config, seed=config.seed + i) for i in range(seeds)]
    return _several(configs, results, jobs, quiet=quiet, as_json=as_json)


def _one(config: RunConfig, results: Path, name: str | None, *, quiet: bool, as_json: bool) -> int:
    from sapus_cli.commands import view  # noqa: PLC0415 - heavy imports wait until they are needed

    with _View(1, silent=quiet or as_json) as shown:
        from sapus_cli.drivers.launch import Outcome  # noqa: PLC0415
        from sapus_cli.drivers.simulate import Simulation  # noqa: PLC0415

        outcome = Outcome(*Simulation(config, results, name, lambda progress: shown.show("", progress)).run())
    if as_json:
        view.print_json(outcome)
    elif not quiet:
        view.print_outcome(outcome)
    return 0


def _several(configs: list[RunConfig], results: Path, jobs: int, *, quiet: bool, as_json: bool) -> int:
    from sapus_cli.commands.view import say_json  # noqa: PLC0415 - heavy imports wait until they are needed
    from sapus_cli.drivers.pool import Cell, Pool  # noqa: PLC0415

    with _View(len(configs), silent=quiet or as_json) as shown:
        observer = _Collected(shown)
        Pool(min(jobs, len(configs)), configs[0].threads).run([Cell(config, results) for config in configs], observer)
    ended = [observer.results[config.seed] for config in configs]
    if as_json:
        facts = [_facts(config, result) for config, result in zip(configs, ended, strict=True)]
        say_json(facts)
    elif not quiet:
        _print_table(ended)
    failed = [
        f"seed {config.seed}: {result.error}" for config, result in zip(configs, ended, strict=True) if result.error
    ]
    if failed:
        raise RunFailedError("\n".join([f"{len(failed)} of {len(configs)} runs failed", *failed]))
    return 0


class _Collected:
    """Shows how the runs of several seeds go, and keeps how they ended."""

    def __init__(self, shown: _View) -> None:
        self._shown = shown
        self.results: dict[int, Result] = {}

    def progress(self, _number: int, cell: Cell, progress: Progress) -> None:
        """Show it."""
        self._shown.show(f"seed {cell.config.seed}  ", progress)

    def ended(self, _number: int, cell: Cell, result: Result) -> None:
        """Keep the result; a call that is wrong for one seed is wrong for all of them.

        Raises:
            UserError: the call was wrong.
        """
        if isinstance(result.error, UserError):
            raise result.error
        self.results[cell.config.seed] = result
        self._shown.end(f"seed {cell.config.seed}  ")


class _View:
    """How far the runs are: bars on a terminal, a line of each run every two seconds elsewhere, or nothing."""

    def __init__(self, n_runs: int, *, silent: bool) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        console = Console(stderr=True)
        self._is_plain = not silent and not console.is_terminal
        self._begun_s = time.monotonic()
        self._next_line_s: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._n_runs, self._n_ended = n_runs, 0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=silent or self._is_plain,
        )
        self._all = self._bars.add_task("starting: loading torch, preparing data", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, run: str, progress: Progress) -> None:
        """Take note of how far a run is; `run` is what tells it from others."""
        accuracy = "-" if progress.accuracy is None else f"{100 * progress.accuracy:.1f} %"
        text = f"{run}virtual {progress.t_s:.1f} s  accuracy {accuracy}"
        if self._is_plain:
            self._say(run, progress.fraction, text)
        elif self._n_runs == 1:
            self._bars.update(self._all, description=text, total=1.0, completed=progress.fraction)
        else:
            if run not in self._tasks:
                self._tasks[run] = self._bars.add_task(run, total=1.0)
                self._count()
            self._bars.update(self._tasks[run], description=text, completed=progress.fraction)

    def end(self, run: str) -> None:
        """Take note that one of several runs has ended."""
        self._n_ended += 1
        self._count()
        if run in self._tasks:
            self._bars.remove_task(self._tasks.pop(run))

    def _count(self) -> None:
        text = f"{self._n_ended} of {self._n_runs} runs"
        self._bars.update(self._all, description=text, total=self._n_runs, completed=self._n_ended)

    def _say(self, run: str, fraction: float, text: str) -> None:
        from sapus_cli.commands.view import PLAIN_EVERY_S  # noqa: PLC0415

        elapsed_s = time.monotonic() - self._begun_s
        if elapsed_s >= self._next_line_s.get(run, 0.0):
            self._next_line_s[run] = elapsed_s + PLAIN_EVERY_S
            sys.stderr.write(f"{elapsed_s:7.1f} s {100 * fraction:3.0f} %  {text}\n")
            sys.stderr.flush()


def _facts(config: RunConfig, result: Result) -> dict[str, Any]:
    from sapus_cli.commands import view  # noqa: PLC0415
    from sapus_cli.drivers.launch import Outcome  # noqa: PLC0415

    if result.folder is not None and result.record is not None:
        return {"seed": config.seed, **view.facts(Outcome(result.folder, result.record))}
    folder = None if result.folder is None else str(result.folder)
    return {"seed": config.seed, "run": folder, "status": "failed", "failure": str(result.error)}


def _print_table(results: list[Result]) -> None:
    """A line a run, and their mean."""
    summaries = [result.record["summary"] for result in results if result.record is not None]
    lines = [
        f"{result.record['summary']['accuracy']:8.2%}  {result.record['summary']['seconds']:10.2f} s  {result.folder}"
        if result.record is not None
        else f"  failed                {result.folder or 'no run folder'}"
        for result in results
    ]
    if summaries:
        accuracy, seconds = (statistics.fmean(one[key] for one in summaries) for key in ("accuracy", "seconds"))
        lines.append(f"{accuracy:8.2%}  {seconds:10.2f} s  mean of {len(summaries)} runs")
    sys.stdout.write("\n".join(["accuracy  virtual time  run folder", *lines]) + "\n")


command.__name__ = "simulate"
