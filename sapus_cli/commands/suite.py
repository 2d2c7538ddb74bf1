"""`sapus suite`: a grid of runs from a TOML file, that can be interrupted and goes on where it was."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from sapus_cli.commands.options import Quiet, Results, flag, whole
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import TaskID

    from sapus_cli.drivers.pool import Progress
    from sapus_cli.suite import Asked, Cell, Suite, Tuning

EXAMPLES = (
    "Examples:\n\n"
    "sapus suite quick\n\n"
    "sapus suite experiments/scaling.toml --dry-run\n\n"
    "sapus suite my.toml --jobs 4 --results /data/results\n\n"
    "sapus suite quick --retry\n\n"
    "sapus suite my.toml --only 'sapus*_w8' --only bsp"
)
MOST_JOBS = 1024
LINE_EVERY_S = 30.0
HEADS = ("strategy", "workers", "cluster", "partition", "batch", "lr", "momentum", "wire", "optimizer", "decay")


class Clock(StrEnum):
    """What the seconds of a run are."""

    virtual = "virtual"
    real = "real"


def command(
    name: Annotated[
        str, typer.Argument(metavar="SUITE", help="Path of a TOML file, or a suite that ships, by its name.")
    ],
    *,
    jobs: Annotated[
        int | None,
        whole(
            "--jobs",
            "-j",
            text="Most runs at the same time, each in its own process; 1 on the real clock.",
            show_default="the usable cores",
        ),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", text="Print what would run, and create nothing.")] = False,
    clock: Annotated[
        Clock | None,
        typer.Option("--clock", help="Clock to run on, into a folder of its own.", show_default="as the suite says"),
    ] = None,
    retry: Annotated[bool, flag("--retry", text="Make runs that failed once more.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Only runs whose name contains this, as in sapus_h8 or 'w8*_s0'; may be given more than once.",
            show_default="all",
        ),
    ] = None,
    results: Results = Path("results"),
    quiet: Quiet = False,
) -> int:
    """Run a grid of strategies, clusters, workers and seeds; started again, it goes on where it was."""
    from sapus_cli import suite as suites  # noqa: PLC0415 - heavy imports wait until they are needed

    suite = suites.read(name, None if clock is None else clock.value)
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs {jobs}: must be a whole number from 1 to {MOST_JOBS}")
    if suite.clock == "real" and jobs not in {None, 1}:
        raise UserError(f"--jobs {jobs}: on the real clock runs would slow each other down; leave it out")
    width = 1 if suite.clock == "real" else jobs or _usable_cores()
    folder = results / suite.name
    chosen = only or []
    if dry_run:
        _print_plan(suite, folder, width, chosen)
        return 0
    again = ["sapus", "suite", name, *(["--clock", clock.value] if clock else [])]
    again += [] if results == Path("results") else ["--results", str(results)]
    again += [word for text in chosen for word in ("--only", text)]
    _run(suite, folder, width, shlex.join(again), chosen, retry=retry, quiet=quiet)
    return 0


def _run(suite: Suite, folder: Path, jobs: int, again: str, only: Sequence[str], *, retry: bool, quiet: bool) -> None:
    from sapus_cli.drivers.suite import SuiteRun  # noqa: PLC0415

    with _View(jobs, silent=quiet) as view:
        try:
            failures = SuiteRun(suite, folder, jobs=jobs, retry=retry, observer=view, only=only).run()
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; what is finished is kept; go on with: {again}") from error
    n_cells = view.n_cells
    if not quiet:
        before = f", {view.n_before} of them before" if view.n_before else ""
        others = len(suite.asked) - n_cells
        left = f"; {others} others left as they are" if others else ""
        _print(f"{n_cells - len(failures)} of {n_cells} runs finished{before}{left}")
        _print(f"Suite folder: {folder}")
        if len(failures) < n_cells:
            for place in [folder / f"*_{word}_*" for word in suite.workloads] or [folder]:
                _print(f"Next: sapus compare {shlex.quote(str(place))}")
    if failures:
        lines = [f"{failure.name}: {failure.reason}" for failure in failures]
        head = f"{len(failures)} of {n_cells} runs failed; to make them once more: {again} --retry"
        raise RunFailedError("\n".join([head, *lines]))


class _View:
    """How far a suite is: bars on a terminal, a line a run elsewhere, or nothing."""

    def __init__(self, jobs: int, *, silent: bool) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as Bars  # noqa: PLC0415

        console = Console(stderr=True)
        self._silent = silent
        self._jobs = jobs
        self._is_plain = not silent and not console.is_terminal
        self._begun_s = self._phase_s = time.monotonic()
        self._next_line_s = LINE_EVERY_S
        self._n_waiting = self._n_ended = 0
        self.n_cells = self.n_before = 0
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.percentage:3.0f} %"),
            console=console,
            transient=True,
            disable=silent or self._is_plain,
        )
        self._all = self._bars.add_task("starting: loading torch, preparing data", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def expect(self, waiting: int, done: int) -> None:
        """Begin to count."""
        self._n_waiting, self._n_ended, self.n_before = waiting, 0, done
        self.n_cells = waiting + done
        self._phase_s = time.monotonic()
        if done:
            self.note(f"{done} of {waiting + done} runs are there already")
        self._count()

    def note(self, text: str) -> None:
        """Say it."""
        from rich.text import Text  # noqa: PLC0415

        if self._is_plain:
            self._say(text)
        elif not self._silent:
            # A Text, not markup=False, which the bars would be drawn with as well.
            self._bars.console.print(Text(text), soft_wrap=True)

    def progress(self, name: str, progress: Progress) -> None:
        """Show it on a terminal, and now and then elsewhere."""
        accuracy = "-" if progress.accuracy is None else f"{100 * progress.accuracy:.1f} %"
        text = f"{name}  {progress.t_s:.1f} s  {accuracy}"
        if self._is_plain:
            elapsed_s = time.monotonic() - self._begun_s
            if elapsed_s >= self._next_line_s:
                self._next_line_s = elapsed_s + LINE_EVERY_S
                self._say(f"{100 * progress.fraction:3.0f} %  {text}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1.0)
        self._bars.update(self._tasks[name], description=text, completed=progress.fraction)

    def ended(self, name: str, record: dict[str, Any] | None, error: Exception | None) -> None:
        """Count it, and say how it ended."""
        self._n_ended += 1
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        self._count()
        if isinstance(error, InterruptedRunError):
            return
        how = "failed: " + str(error).split("\n", 1)[0]
        if record is not None:
            summary = record["summary"]
            accuracy = summary["accuracy"]
            how = f"{summary['seconds']:.1f} s  " + ("-" if accuracy is None else f"{100 * accuracy:.1f} %")
        if self._is_plain or error is not None:
            self.note(f"{self._n_ended} of {self._n_waiting}{self._left()}  {name}  {how}")

    def _count(self) -> None:
        text = f"{self._n_ended} of {self._n_waiting} runs{self._left()}"
        self._bars.update(self._all, description=text, total=max(1, self._n_waiting), completed=self._n_ended)

    def _left(self) -> str:
        waiting = self._n_waiting - self._n_ended
        if not self._n_ended or not waiting:
            return ""
        return f", {_duration((time.monotonic() - self._phase_s) / self._n_ended * waiting)} left"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._begun_s:7.1f} s  {text}\n")
        sys.stderr.flush()


def _print_plan(suite: Suite, folder: Path, jobs: int, only: Sequence[str]) -> None:
    """What would run."""
    from sapus_cli.drivers.suite import TUNING, Shelf, check_folder  # noqa: PLC0415
    from sapus_cli.suite import matches  # noqa: PLC0415

    check_folder(folder)
    wanted = suite.matching(only)
    for part in range(1, suite.n_parts + 1):
        _print_part(part, [one for one in wanted if one.part == part])
    if not suite.n_parts:
        _print_grid(wanted)
    into = f"on the {suite.clock} clock, {jobs} at a time, into {folder}"
    if suite.tunings:
        groups = {one.tuning.group_of(one.config) for one in wanted if one.tuning}
        tried = {cell.name: cell for choice in suite.choices() if choice.group in groups for cell in choice.cells}
        there = sum(Shelf(folder / TUNING, suite.clock).standing(cell) == "finished" for cell in tried.values())
        among = "" if suite.n_parts else f" among {_rates(suite.tunings[0])}"
        _print(f"{len(tried)} runs choose lr{among} on seed {suite.tunings[0].seed}; {there} of them are finished")
        _print(f"{len(wanted)} runs {into}")
        return
    shelf = Shelf(folder, suite.clock)
    cells = [cell for cell in suite.cells() if matches(cell.name, only)]
    finished = [cell for cell in cells if shelf.standing(cell) == "finished"]
    _print(f"{len(cells)} runs {into}; {len(finished)} are finished")
    if finished and len(finished) < len(cells):
        seconds = sum(_took_s(folder, cell) for cell in finished) / len(finished) * (len(cells) - len(finished)) / jobs
        _print(f"The rest takes {_duration(seconds)}, if it is like what is finished")


def _print_grid(wanted: Sequence[Asked]) -> None:
    """A row for all seeds of a group."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    rows = Counter(map(_row, wanted))
    several = [
        column
        for column, head in enumerate(HEADS)
        if head in {"strategy", "workers"} or len({row[column] for row in rows}) > 1
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in several:
        table.add_column(HEADS[column], overflow="fold")
    table.add_column("runs", justify="right")
    for row, count in rows.items():
        table.add_row(*(row[column] for column in several), str(count))
    Console().print(table)


def _print_part(part: int, runs: Sequence[Asked]) -> None:
    if not runs:
        _print(f"part {part}: no runs\n")
        return
    config = runs[0].config
    budget = {"epochs": config.epochs, "steps": config.steps, "s": config.seconds}
    length = next(f"{value:g} {unit}" for unit, value in budget.items() if value is not None)
    tuning = next((one.tuning for one in runs if one.tuning), None)
    tuned = f", lr among {_rates(tuning)}" if tuning else ""
    _print(f"part {part}: {config.model} on {config.dataset}, {length}, {len(runs)} runs{tuned}")
    _print_grid(runs)
    _print("")


def _rates(tuning: Tuning) -> str:
    where = f" on {tuning.on.name}" if tuning.on else ""
    return ", ".join(f"{lr:g}" for lr in tuning.rates) + where


def _row(one: Asked) -> tuple[str, ...]:
    config = one.config
    params = "".join(f" {key}={value}" for key, value in config.params.items())
    return (
        f"{config.strategy}{params}",
        str(config.workers),
        config.cluster.name,
        config.partition,
        str(config.batch_size),
        "tuned" if one.tuning else f"{config.lr:g}",
        f"{config.momentum:g}",
        config.wire,
        config.optimizer,
        f"{config.weight_decay:g}",
    )


def _took_s(folder: Path, cell: Cell) -> float:
    from sapus_cli.traces import read_run  # noqa: PLC0415

    record = read_run(folder / cell.name)
    begin, end = (dt.datetime.fromisoformat(record[key]) for key in ("started_at", "ended_at"))
    return max(0.0, (end - begin).total_seconds())  # the clock may have been set back meanwhile


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - seconds up to a minute and a half
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes / 60:.1f} h"  # noqa: PLR2004


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


command.__name__ = "suite"
