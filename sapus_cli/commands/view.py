"""How a run is shown while it lasts and when it has ended."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sapus_cli.traces import incomplete_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

    from sapus_cli.drivers.control import Happened, Measured, Status, WorkerStatus
    from sapus_cli.drivers.launch import Observer, Outcome, Plan

PLAIN_EVERY_S = 2.0
RATE_WINDOW_S = 2.0
MOST_WORKERS_SHOWN = 16
FIGURES_A_LINE = 3


class Views:
    """Makes the view that suits where the output goes: live on a terminal, plain lines elsewhere, or none.

    Until the run can be described, a terminal shows that something is under way. With workers started by hand the view
    is always lines, and the first says where to connect.
    """

    def __init__(self, *, quiet: bool, as_json: bool, by_hand: bool = False) -> None:
        console = Console(stderr=True)
        self._kind: Callable[[Plan], Observer] = PlainView
        if by_hand:
            self._kind = ByHandView
        elif quiet or as_json:
            self._kind = Quiet
        elif console.is_terminal:
            self._kind = LiveView
        self._starting = console.status("starting: loading torch, preparing data") if self._kind is LiveView else None

    def __enter__(self) -> Self:
        if self._starting:
            self._starting.start()
        return self

    def __call__(self, plan: Plan) -> Observer:
        """The view of a run that is about to start."""
        self._stop()
        return self._kind(plan)

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._starting:
            self._starting.stop()


class Quiet:
    """Says nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def released(self, startup_s: float) -> None:
        """Nothing."""

    def status(self, status: Status, cpu_percent: float) -> None:
        """Nothing."""

    def measured(self, result: Measured) -> None:
        """Nothing."""

    def happened(self, event: Happened) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Figures(Quiet):
    """Keeps what both views show: rates over the last seconds, the newest accuracy, how far the budget is used."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.latest: Status | None = None
        self.result: Measured | None = None
        self.cpu_percent = 0.0
        self.startup_s = 0.0
        self._window: deque[Status] = deque()

    def released(self, startup_s: float) -> None:
        """Remember how long start-up took."""
        self.startup_s = startup_s

    def measured(self, result: Measured) -> None:
        """Remember the newest result."""
        self.result = result

    def status(self, status: Status, cpu_percent: float) -> None:
        """Take in the server's state."""
        self.latest = status
        self.cpu_percent += 0.2 * (cpu_percent - self.cpu_percent)
        self._window.append(status)
        while len(self._window) > 2 and status.t_s - self._window[0].t_s > RATE_WINDOW_S:  # noqa: PLR2004 - two ends
            self._window.popleft()

    @property
    def fraction(self) -> float:
        """Used part of the budget, 0 to 1."""
        if self.latest is None:
            return 0.0
        config = self.plan.config
        if config.seconds is not None:
            return min(1.0, self.latest.t_s / config.seconds)
        steps = sum(worker.steps for worker in self.latest.workers)
        return min(1.0, steps / ((self.plan.steps_per_worker or 1) * config.workers))

    def figures(self) -> dict[str, str]:
        """What is known now, ready to print."""
        status = self.latest
        if status is None:
            return {}
        losses = [worker.loss for worker in status.workers if math.isfinite(worker.loss)]
        return {
            "epoch": f"{status.samples / self.plan.n_train:.1f}",
            "loss": f"{sum(losses) / len(losses):.3f}" if losses else "-",
            "accuracy": f"{100 * self.result.accuracy:.1f} %" if self.result else "-",
            "samples/s": f"{self._rate('samples'):,.0f}",
            "server CPU": f"{self.cpu_percent:.0f} %",
            "Gbit/s in/out": f"{8e-9 * self._rate('rx_bytes'):.2f}/{8e-9 * self._rate('tx_bytes'):.2f}",
        }

    def _rate(self, what: str) -> float:
        first, last = self._window[0], self._window[-1]
        if last.t_s <= first.t_s:
            return 0.0
        # A server that went on from a checkpoint has had less than the one before it.
        return max(0.0, float((getattr(last, what) - getattr(first, what)) / (last.t_s - first.t_s)))


class PlainView(_Figures):
    """One line every two seconds on stderr, for logs and pipes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._next_s = 0.0
        _say(headline(plan))

    def released(self, startup_s: float) -> None:
        """Say that training begins."""
        super().released(startup_s)
        _say(f"{self.plan.config.workers} workers at their first step after {startup_s:.1f} s")

    def status(self, status: Status, cpu_percent: float) -> None:
        """Say how it goes, now and then."""
        super().status(status, cpu_percent)
        if status.t_s >= self._next_s:
            self._next_s = status.t_s + PLAIN_EVERY_S
            figures = "  ".join(f"{name} {value}" for name, value in self.figures().items())
            _say(f"{status.t_s:7.1f} s {100 * self.fraction:3.0f} %  {figures}")

    def happened(self, event: Happened) -> None:
        """Say what is out of the ordinary."""
        if not _is_ordinary(event):
            _say(_line(event))


def _doing(worker: WorkerStatus) -> str:
    if worker.away:
        return "[dim]away[/dim]"
    return "[yellow]waits[/yellow]" if worker.waiting else "[green]computes[/green]"


def _is_ordinary(event: Happened) -> bool:
    """Whether an event is one of every run that nothing happens to."""
    return (
        (event.event == "join" and not event.detail)
        or (event.event == "leave")
        or (event.event == "checkpoint" and event.detail.startswith("version"))
    )


def _line(event: Happened) -> str:
    who = f"{event.role} {event.rank}" if event.role == "worker" else event.role
    return f"{event.t_s:7.1f} s {event.event}: {who} {event.detail}".rstrip()


class ByHandView(PlainView):
    """Plain lines, after one that says how workers join."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        _say(f"waiting for {plan.config.workers} workers: {plan.join}")

    def happened(self, event: Happened) -> None:
        """Say everything but what comes every half minute."""
        if event.event != "checkpoint" or not _is_ordinary(event):
            _say(_line(event))


class LiveView(_Figures):
    """A progress bar, the figures, and a line a worker, redrawn in place on stderr."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._console = Console(stderr=True)
        self._console.print(headline(plan), highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=1.0)
        self._live = Live(self._draw(), console=self._console, refresh_per_second=8, transient=True)
        self._live.start()
        self._next_draw_s = 0.0

    def released(self, startup_s: float) -> None:
        """Begin to count the time of training."""
        super().released(startup_s)
        self._bar.reset(self._task, description="training", total=1.0)

    def status(self, status: Status, cpu_percent: float) -> None:
        """Redraw, a few times a second."""
        super().status(status, cpu_percent)
        now = time.monotonic()
        if now >= self._next_draw_s:
            self._next_draw_s = now + 0.2
            self._bar.update(self._task, completed=self.fraction)
            self._live.update(self._draw())

    def happened(self, event: Happened) -> None:
        """Put what is out of the ordinary above the bar, where it stays."""
        if not _is_ordinary(event):
            # A Text, not markup=False, which the bar would be drawn with as well.
            self._console.print(Text(_line(event)))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        figures = self.figures()
        parts: list[RenderableType] = [self._bar]
        if figures:
            grid = Table.grid(padding=(0, 3))
            cells = [f"[dim]{name}[/dim] [bold]{value}[/bold]" for name, value in figures.items()]
            for first in range(0, len(cells), FIGURES_A_LINE):
                grid.add_row(*cells[first : first + FIGURES_A_LINE])
            parts.append(grid)
        if self.latest is not None:
            parts.append(self._workers(self.latest))
        return Group(*parts)

    def _workers(self, status: Status) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for column in ("worker", "steps", "pushes", "interval", "loss", "in MB", "out MB"):
            table.add_column(column, justify="right")
        table.add_column("", no_wrap=True)
        for worker in status.workers[:MOST_WORKERS_SHOWN]:
            loss = f"{worker.loss:.3f}" if math.isfinite(worker.loss) else "-"
            table.add_row(
                str(worker.rank),
                str(worker.steps),
                str(worker.pushes),
                str(worker.interval),
                loss,
                f"{worker.rx_bytes / 1e6:.1f}",
                f"{worker.tx_bytes / 1e6:.1f}",
                _doing(worker),
            )
        if len(status.workers) > MOST_WORKERS_SHOWN:
            table.add_row(f"+{len(status.workers) - MOST_WORKERS_SHOWN} more", *[""] * 7)
        return table


def headline(plan: Plan) -> str:
    """What runs, in one line."""
    config = plan.config
    params = "".join(f" {key}={value}" for key, value in config.params.items())
    return (
        f"{config.strategy}{params}: {config.model} on {config.dataset}, {plan.elements:,} elements, "
        f"{config.workers} workers, batch {config.effective_batch(plan.n_train)}, seed {config.seed}"
    )


def print_outcome(outcome: Outcome) -> None:
    """The summary of a finished run, where it lies, and what to type next."""
    console = Console()
    console.print(summary_table(outcome.record))
    if lacking := incomplete_traces(outcome.record):
        console.print(f"[yellow]rows are missing, the disk did not take them: {', '.join(lacking)}[/yellow]")
    console.print(f"Run folder: [bold]{outcome.folder}[/bold]", highlight=False, soft_wrap=True)
    console.print(f"Next: [bold]sapus show {shlex.quote(str(outcome.folder))}[/bold]", highlight=False, soft_wrap=True)


def print_json(outcome: Outcome) -> None:
    """The summary as one JSON object on stdout."""
    say_json(facts(outcome))


def say_json(value: object) -> None:
    """A value as JSON on stdout; what is not finite becomes null, as in run.json."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def facts(outcome: Outcome) -> dict[str, Any]:
    """The summary, for scripts."""
    record = outcome.record
    return {
        "run": str(outcome.folder),
        "status": record["status"],
        "clock": record["clock"],
        "startup_s": record.get("startup_s"),
        "state_sha256": record["state_sha256"],
        "traces": record["traces"],
        **record["summary"],
    }


def summary_table(record: Mapping[str, Any]) -> Table:
    """What run.json says of the result, for people."""
    summary = record.get("summary") or {}
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()

    def add(name: str, key: str, form: str) -> None:
        if summary.get(key) is not None:
            table.add_row(name, form.format(summary[key]))

    add("test accuracy", "accuracy", "{:.2%}")
    add("best accuracy", "best_accuracy", "{:.2%}")
    add("test loss", "loss", "{:.4f}")
    add("time", "seconds", "{:.2f} s")
    add("target reached after", "reached_s", "{:.2f} s")
    if record.get("startup_s"):
        table.add_row("start-up", f"{record['startup_s']:.2f} s")
    add("throughput", "samples_per_s", "{:,.0f} samples/s")
    add("pushes", "pushes", "{:,}")
    if summary.get("declined"):
        table.add_row("declined pushes", f"[yellow]{summary['declined']:,}[/yellow] (not finite; see events.csv)")
    if summary.get("lost_pushes"):
        table.add_row(
            "lost pushes", f"[yellow]{summary['lost_pushes']:,}[/yellow] (a server was killed; see events.csv)"
        )
    if summary.get("overruns"):
        table.add_row(
            "late steps", f"[yellow]{summary['overruns']:,}[/yellow] took longer than the cluster profile says"
        )
    add("mean interval", "mean_interval", "{:.1f} steps")
    add("server CPU", "server_cpu_percent", "{:.1f} % of a core")
    add("network in", "gbit_per_s_in", "{:.3f} Gbit/s")
    add("network out", "gbit_per_s_out", "{:.3f} Gbit/s")
    return table


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
