"""A suite's folder, and the runs that fill it: those that are there stay, those that are half-done are made again.

The folder holds suite.json, a run folder a cell, and two folders that readers of runs pass over, as their names begin
with a dot: `.tuning` with the runs that chose the learning rates, `.aside` with runs that are no longer asked for.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from sapus_cli import analysis, suite, traces
from sapus_cli.drivers.launch import Launcher
from sapus_cli.drivers.pool import Cell as PoolCell
from sapus_cli.drivers.pool import Pool, Progress, Result
from sapus_cli.drivers.record import utc
from sapus_cli.errors import DamagedFileError, InterruptedRunError, RunFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Sequence
    from pathlib import Path

    from sapus_cli.drivers.control import Happened, Measured, Status
    from sapus_cli.drivers.launch import Plan
    from sapus_cli.suite import Asked, Cell, Choice, Suite, Tried

SCHEMA_VERSION = 1
FILE, LOCK, TUNING, ASIDE = "suite.json", ".lock", ".tuning", ".aside"

State = Literal["waiting", "running", "finished", "failed", "interrupted"]


class Entry(msgspec.Struct, kw_only=True):
    """What suite.json says of a run."""

    name: str
    state: State = "waiting"
    attempts: int = 0
    strategy: str
    params: dict[str, bool | int | float | str]
    workers: int
    cluster: str
    lr: float
    seed: int
    target: float | None = None
    failure: str | None = None


class Observer(Protocol):
    """Who is told how a suite goes."""

    def expect(self, waiting: int, done: int) -> None:
        """So many runs are to be made, so many more are there already; once for tuning, once for what is measured."""

    def note(self, text: str) -> None:
        """One line that matters."""

    def progress(self, name: str, progress: Progress) -> None:
        """How far a run is, a few times a second."""

    def ended(self, name: str, record: dict[str, Any] | None, error: Exception | None) -> None:
        """A run has ended: with its record, or with why it did not."""


class Failure(NamedTuple):
    """A run that failed, now or before, and the first line of why."""

    name: str
    reason: str


class Shelf:
    """The run folders below one folder, and what is to be done for the cells that are wanted there."""

    def __init__(self, folder: Path, clock: str) -> None:
        self._folder = folder
        self._clock = clock

    def standing(self, cell: Cell) -> State:
        """What the folder of a cell comes to, if it is the very run that is asked for; else it waits."""
        try:
            record = _record(self._folder / cell.name)
        except DamagedFileError:
            record = None
        return "waiting" if record is None or not self._is(record, cell) else record["status"]

    def tidy(self, cells: Sequence[Cell], *, retry: bool, only: Container[str] | None = None) -> list[str]:
        """Leave nothing but finished runs of these cells, and failed ones unless they are to be tried again.

        A finished run that has another name than its cell is given the cell's.

        Args:
            cells: what is wanted.
            retry: whether failed runs are to be tried again.
            only: names; folders that are called otherwise are left as they are, unless they are to be renamed.

        Returns:
            The names of the runs that were put aside.
        """
        wanted = {cell.name: cell for cell in cells}
        aside: dict[Path, str] = {}
        for place in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if place.name.startswith(".") or not place.is_dir() or (only is not None and place.name not in only):
                continue
            try:
                record = _record(place)
            except DamagedFileError:
                # A newer sapus may have written it: it is in the way, and not for this one to delete.
                if place.name in wanted:
                    aside[self._put_aside(place)] = place.name
                continue
            cell = wanted.get(place.name)
            if cell is not None and (record is None or record["status"] not in {"finished", "failed"}):
                _remove(place)
            elif record is None:
                continue
            elif cell is None or not self._is(record, cell):
                aside[self._put_aside(place)] = place.name
            elif record["status"] == "failed" and retry:
                _remove(place)
        self._fetch([cell for cell in cells if not (self._folder / cell.name).exists()], wanted)
        return [name for place, name in aside.items() if place.exists()]

    def _is(self, record: dict[str, Any], cell: Cell) -> bool:
        return record.get("clock") == self._clock and traces.config_of(record) == suite.as_recorded(cell.config)

    def _put_aside(self, place: Path) -> Path:
        shelf = self._folder / ASIDE
        shelf.mkdir(exist_ok=True)
        names = itertools.chain([place.name], (f"{place.name}_{n}" for n in itertools.count(2)))
        return place.rename(next(shelf / name for name in names if not (shelf / name).exists()))

    def _fetch(self, missing: Sequence[Cell], wanted: Container[str]) -> None:
        """Take what was put aside, or was left under another name, and is asked for."""
        if not missing or not self._folder.is_dir():
            return
        shelf = self._folder / ASIDE
        places = [place for place in sorted(self._folder.iterdir()) if place.is_dir() and place.name not in wanted]
        places += sorted(shelf.iterdir()) if shelf.is_dir() else []
        finished = {}
        for place in places:
            with suppress(DamagedFileError):
                record = _record(place)
                if record is not None and record["status"] == "finished":
                    finished[place] = record
        for cell in missing:
            for place, record in finished.items():
                if self._is(record, cell):
                    place.rename(self._folder / cell.name)
                    del finished[place]
                    break


class SuiteRun:
    """A suite from where it stands to its end.

    Args:
        asked: the suite.
        folder: its folder.
        jobs: most runs in virtual time that go on at the same time; on the real clock one follows the other.
        retry: whether runs that failed are made again.
        observer: who is told.
        only: texts or patterns; only runs are made of which the name contains one. Without any all are.
    """

    def __init__(
        self, asked: Suite, folder: Path, *, jobs: int, retry: bool, observer: Observer, only: Sequence[str] = ()
    ) -> None:
        self._suite = asked
        self._only = only
        self._folder = folder
        self._jobs = jobs
        self._retry = retry
        self._observer = observer
        self._tuning: list[Entry] = []
        self._cells: list[Entry] = [_entry(cell) for cell in ([] if asked.tunings else asked.cells())]
        self._chosen: list[dict[str, Any]] = []
        self._started_at = utc()
        self._attempts: dict[str, int] = {}

    def run(self) -> list[Failure]:
        """Make what is missing. Returns the cells that failed, those of earlier times among them.

        Raises:
            UserError: the folder is not one of a suite, another command works in it, or `only` matches nothing.
            RunFailedError: a run that chooses a learning rate failed for another reason than that it diverged.
            InterruptedRunError: a signal arrived; what was written is kept.
        """
        wanted = self._suite.matching(self._only)
        check_folder(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked(self._folder):
            self._recall()
            self._write()
            cells = self._suite.cells(self._tuned(wanted) if self._suite.tunings else None)
            self._cells = [_entry(cell) for cell in cells]
            names = {cell.name for cell in cells if suite.matches(cell.name, self._only)}
            if not names:
                raise suite.none_matches(self._only, cells)
            return self._make(cells, self._cells, self._folder, names)

    def _tuned(self, wanted: Sequence[Asked]) -> dict[str, float]:
        """Choose the learning rate of each group that has a run among `wanted`, or that has been tuned before."""
        choices, cells = self._suite.choices(), self._suite.tuning_cells()
        self._tuning = [_entry(cell) for cell in cells]
        groups = {one.tuning.group_of(one.config) for one in wanted if one.tuning}
        names = {cell.name for choice in choices if choice.group in groups for cell in choice.cells}
        failures = self._make(cells, self._tuning, self._folder / TUNING, names)
        broken = [failure for failure in failures if not _has_diverged(failure.reason)]
        if broken:
            lines = [f"{failure.name}: {failure.reason}" for failure in broken]
            raise RunFailedError("\n".join([f"{len(broken)} of {len(names)} runs that choose lr failed", *lines]))
        known = {entry.name for entry in self._tuning if entry.state == "finished" or _has_diverged(entry.failure)}
        rates = {}
        for choice in choices:
            if all(cell.name in known for cell in choice.cells):
                tried = [self._tried(cell, choice.target) for cell in choice.cells]
                rates[choice.group] = suite.best_rate(tried)
                self._note_choice(choice, rates[choice.group], tried)
        return rates

    def _tried(self, cell: Cell, target: float) -> Tried:
        folder = self._folder / TUNING / cell.name
        run = analysis.Run(folder, traces.read_run(folder))
        reached = analysis.time_to(run, target)
        return suite.Tried(
            cell.config.lr,
            None if reached.censored or not run.finished else reached.seconds,
            analysis.best_accuracy(run),
            diverged=not run.finished,
        )

    def _note_choice(self, choice: Choice, lr: float, tried: Sequence[Tried]) -> None:
        config = choice.cells[0].config
        of = {"strategy": config.strategy, "params": config.params, "workers": config.workers}
        what = {**of, "cluster": config.cluster.name, "partition": config.partition, "batch_size": config.batch_size}
        what |= {"momentum": config.momentum, "wire": config.wire, "dataset": config.dataset, "model": config.model}
        what |= {"optimizer": config.optimizer, "weight_decay": config.weight_decay, "target": choice.target}
        self._chosen.append({**what, "lr": lr, "tried": [one._asdict() for one in tried]})
        best = next(one for one in tried if one.lr == lr)
        why = "diverged at every lr" if best.diverged else "never got to the target, this lr came nearest"
        if best.reached_s is not None:
            why = f"{best.reached_s:.1f} s to the target"
        group = suite.name_of(suite.with_usual_lr(config), self._suite.told).removesuffix(f"_s{config.seed}")
        self._observer.note(f"tuned {group}: lr {lr:g} ({why})")

    def _make(
        self, cells: Sequence[Cell], entries: Sequence[Entry], folder: Path, names: Collection[str]
    ) -> list[Failure]:
        """Make the runs of `cells` that are among `names` and not there. Returns those of them that failed."""
        shelf = Shelf(folder, self._suite.clock)
        aside = shelf.tidy(cells, retry=self._retry, only=names if self._only else None)
        if aside:
            where = folder / ASIDE
            self._observer.note(f"{len(aside)} runs no longer asked for, put aside into {where}: {_some(aside)}")
        todo: list[tuple[Cell, Entry]] = []
        for cell, entry in zip(cells, entries, strict=True):
            entry.attempts = self._attempts.get(entry.name, 0)
            entry.state = shelf.standing(cell)
            if entry.state == "running":  # one that was killed, and is not to be made now
                entry.state = "interrupted"
            elif entry.state == "waiting" and entry.name in names:
                todo.append((cell, entry))
            elif entry.state == "failed":
                entry.failure = _first_line(str(traces.read_run(folder / cell.name).get("failure") or "failed"))
        self._write()
        self._observer.expect(len(todo), len(names) - len(todo))
        if todo:
            make = self._in_pool if self._suite.clock == "virtual" else self._in_turn
            try:
                make(todo, folder)
            except BaseException:
                for entry in entries:
                    entry.state = "interrupted" if entry.state == "running" else entry.state
                self._write()
                raise
        return [
            Failure(entry.name, entry.failure or "")
            for entry in entries
            if entry.state == "failed" and entry.name in names
        ]

    def _in_pool(self, todo: Sequence[tuple[Cell, Entry]], folder: Path) -> None:
        def started() -> Iterator[PoolCell]:
            # The pool takes a cell when it has a child for it.
            for cell, entry in todo:
                self._begin(entry)
                yield PoolCell(cell.config, folder, cell.name)

        threads = todo[0][0].config.threads
        Pool(min(self._jobs, len(todo)), threads).run(started(), _PoolEars(self, [entry for _, entry in todo]))

    def _in_turn(self, todo: Sequence[tuple[Cell, Entry]], folder: Path) -> None:
        for cell, entry in todo:
            self._begin(entry)
            ears = _LaunchEars(cell.name, self._observer)
            try:
                outcome = _Launcher(cell.config, folder, cell.name, ears.about).run()
            except KeyboardInterrupt:
                raise InterruptedRunError("interrupted by SIGINT") from None
            except InterruptedRunError:
                raise
            except (UserError, RunFailedError) as error:
                self.end(entry, None, error)
            else:
                self.end(entry, outcome.record, None)

    def _begin(self, entry: Entry) -> None:
        entry.state, entry.failure = "running", None
        entry.attempts += 1
        self._write()

    def progress(self, entry: Entry, progress: Progress) -> None:
        """A run goes on."""
        self._observer.progress(entry.name, progress)

    def end(self, entry: Entry, record: dict[str, Any] | None, error: Exception | None) -> None:
        """A run has ended."""
        if isinstance(error, InterruptedRunError):
            entry.state = "interrupted"
        elif error is not None:
            entry.state, entry.failure = "failed", _first_line(str(error))
        else:
            entry.state = "finished"
        self._write()
        self._observer.ended(entry.name, record, error)

    def _recall(self) -> None:
        """How often each run was begun before, and when the first of all was."""
        try:
            before = msgspec.json.decode((self._folder / FILE).read_bytes())
            runs = [*before["cells"], *((before.get("tuning") or {}).get("runs") or [])]
            self._attempts = {run["name"]: int(run["attempts"]) for run in runs}
            if not self._cells:  # they wait for their learning rates, and what is known of them stays until then
                self._cells = msgspec.convert(before["cells"], list[Entry])
            self._started_at = before["started_at"]
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
            return  # nothing that matters to the runs

    def _write(self) -> None:
        asked = self._suite
        tuning = None
        if asked.tunings:
            rates, targets = ({getattr(one, key) for one in asked.tunings} for key in ("rates", "target"))
            about = {"rates": _one(rates), "seed": asked.tunings[0].seed, "target": _one(targets)}
            tuning = {**about, "chosen": self._chosen, "runs": self._tuning}
        document = {
            "schema_version": SCHEMA_VERSION,
            "suite": asked.name,
            "file": asked.source,
            "sha256": asked.sha256,
            "clock": asked.clock,
            "started_at": self._started_at,
            "written_at": utc(),
            "n_cells": len(asked.asked),
            "compare": asked.compare,
            "tuning": tuning,
            "cells": self._cells,
        }
        path, temporary = self._folder / FILE, self._folder / f"{FILE}.tmp"
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunFailedError(f"cannot write {path}: {error.strerror}") from error


class _PoolEars:
    """Passes on what the pool says."""

    def __init__(self, run: SuiteRun, entries: Sequence[Entry]) -> None:
        self._run = run
        self._entries = entries

    def progress(self, number: int, _cell: PoolCell, progress: Progress) -> None:
        self._run.progress(self._entries[number], progress)

    def ended(self, number: int, _cell: PoolCell, result: Result) -> None:
        self._run.end(self._entries[number], result.record, result.error)


class _LaunchEars:
    """Passes on what a launcher says."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        self._observer = observer
        self._accuracy: float | None = None
        self._plan: Plan | None = None

    def about(self, plan: Plan) -> _LaunchEars:
        self._plan = plan
        return self

    def released(self, startup_s: float) -> None:
        pass

    def status(self, status: Status, cpu_percent: float) -> None:
        del cpu_percent
        fraction = 0.0
        if self._plan is not None and self._plan.config.seconds is not None:
            fraction = status.t_s / self._plan.config.seconds
        elif self._plan is not None and self._plan.steps_per_worker is not None:
            steps = sum(worker.steps for worker in status.workers)
            fraction = steps / (self._plan.steps_per_worker * self._plan.config.workers)
        self._observer.progress(self._name, Progress(status.t_s, min(1.0, fraction), self._accuracy))

    def measured(self, result: Measured) -> None:
        self._accuracy = result.accuracy

    def happened(self, event: Happened) -> None:
        pass

    def close(self) -> None:
        pass


class _Launcher(Launcher):
    """One of several runs of a command, whose start-up begins with itself and not with the command."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._called_s = time.monotonic()


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a suite, without creating anything.

    Raises:
        UserError: says what to do.
    """
    traces.check_results(folder)
    if folder.is_dir() and not (folder / FILE).is_file():
        # A first command that was killed may have left these.
        others = [path for path in folder.iterdir() if path.name not in {LOCK, f"{FILE}.tmp"}]
        if others:
            raise UserError(f"{folder} exists and is no suite's folder; rename it, or choose another with --results")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another sapus suite is at work in {folder}; wait for its end") from None
        yield


def _remove(place: Path) -> None:
    """Remove a run folder; of one that lies elsewhere the link."""
    if place.is_symlink():
        place.unlink()
    else:
        shutil.rmtree(place)


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = traces.read_run(folder)
    except UserError:
        return None  # there is no run
    return record if record.get("status") in traces.STATUSES else None


def _entry(cell: Cell) -> Entry:
    config = cell.config
    return Entry(
        name=cell.name,
        strategy=config.strategy,
        params=config.params,
        workers=config.workers,
        cluster=config.cluster.name,
        lr=config.lr,
        seed=config.seed,
        target=cell.target,
    )


def _one(values: Collection[Any]) -> Any:
    """The value that all have, or None."""
    return next(iter(values)) if len(values) == 1 else None


def _has_diverged(reason: str | None) -> bool:
    return reason is not None and reason.startswith("diverged")


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
