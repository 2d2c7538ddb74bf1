"""What the measurement itself costs: the server's traces against its CPU time, the worker's timing against a step.

    OMP_NUM_THREADS=1 python tests/bench_traces.py

At the server, a round is a real run: four workers push after every step of no work (`asp`, data set `null`), which is
as many pushes as the server can take. Then its rows and as many status lines are written
once more, one by one, an update of the state before each, so that they find the caches as the server's work leaves
them. The share is of the CPU time that the server of this very run used. At the worker, two readings of the
clock and the sums over the interval follow each step of `digits` `cnn`. All of it is CPU time of the process, what
reading that costs taken off. Figures are medians over the rounds, with their range.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import zmq
from processes import launch

from sapus_cli import registry
from sapus_cli.cluster import ClusterProfile
from sapus_cli.drivers.control import tell
from sapus_cli.drivers.server import Peer, Server, bind
from sapus_cli.protocol import PushRow, _Interval
from sapus_cli.strategy import Setting
from sapus_cli.traces import FLUSH_EVERY_S, PUSHES, Trace, read_trace
from sapus_cli.trainer import OptimizerSpec, Trainer
from sapus_cli.workloads.data import load, prepare
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

ROUNDS = 5
WORKERS = 4
CASES = ((100_000, 2000), (1_000_000, 300))
"""Parameters, and steps of each worker."""

TRAINING_STEPS = 300


class AtServer(NamedTuple):
    """One real run, and what its tracing costs; CPU seconds."""

    push_s: float  # of the server, a push, all in all
    row_s: float
    status_s: float
    share: float  # of the server's CPU time


def cpu_s(call: Callable[[], object]) -> float:
    """CPU time of a call, what reading the clock costs included."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def reading_s() -> float:
    """What `cpu_s` says of nothing."""
    return statistics.median(cpu_s(lambda: None) for _ in range(2000))


def at_server(folder: Path, elements: int, steps: int) -> AtServer:
    """Measure one run."""
    workload = {"dataset": "null", "model": f"null:{elements}", "workers": WORKERS, "steps": steps}
    outcome = launch(folder, strategy="asp", eval_every_s=0.5, **workload)
    used_s, seconds = outcome.record["totals"]["server_cpu_s"], outcome.record["summary"]["seconds"]
    pushes = read_trace(outcome.folder, "pushes")
    samples = read_trace(outcome.folder, "resources")
    n_status = len(samples.filter(samples["role"] == "server"))
    flush_every = max(1, math.floor(len(pushes) * FLUSH_EVERY_S / seconds))
    rows_s, statuses_s = written_again(folder, elements, pushes, n_status, flush_every)
    share = (rows_s + statuses_s) / used_s
    return AtServer(used_s / len(pushes), rows_s / len(pushes), statuses_s / n_status, share)


def write(server: Server, row: tuple[Any, ...], reason: str, bytes_out: int) -> None:
    """What the server does for a row."""
    server._write(PushRow(*row, {"reason": reason}), bytes_out)  # type: ignore[call-arg]


def written_again(
    folder: Path, elements: int, pushes: pl.DataFrame, n_status: int, flush_every: int
) -> tuple[float, float]:
    """CPU seconds of all rows with their flushes, and of the status lines."""
    ours, theirs = multiprocessing.Pipe()
    x, update = torch.zeros(elements), torch.full((elements,), 1e-9)
    socket, _ = bind("tcp://127.0.0.1:*", elements)
    nothing = reading_s()
    with Trace(folder / "again.csv", PUSHES) as trace:
        server = Server(
            socket,
            registry.build("asp", {}),
            x,
            n_workers=WORKERS,
            profile=ClusterProfile(),
            setting=Setting(link_bytes_per_s=None, memory_bytes=1e9),
            fingerprint="",
            config=b"",
            launcher=ours,
            pushes=trace,
            target_accuracy=None,
        )
        server._workers = {rank: Peer(b"", "worker", rank, 1 + rank, 0.0) for rank in range(WORKERS)}

        names = [name for name in PushRow.__slots__ if name != "info"]
        rows = list(pushes.select(names).iter_rows())
        others = list(pushes.select("reason", "bytes_out").iter_rows())
        rows_s = statuses_s = 0.0
        for i, (row, other) in enumerate(zip(rows, others, strict=True)):
            x.add_(update)
            rows_s += cpu_s(partial(write, server, row, *other)) - nothing
            if i % flush_every == 0:
                rows_s += cpu_s(trace.flush) - nothing
        for _ in range(n_status):
            x.add_(update)
            statuses_s += cpu_s(lambda: tell(ours, server._status())) - nothing
            theirs.recv_bytes()
    socket.close(linger=0)
    ours.close()
    theirs.close()
    return rows_s, statuses_s


def at_worker() -> tuple[float, float]:
    """Median CPU seconds of a step, and of timing it."""
    data = load(prepare("digits", None, download=False))
    shard = torch.arange(len(data.train_x))
    trainer = Trainer(build_model("cnn", data, 0), data, shard, 32, OptimizerSpec("sgd", 0.05), 0, 0)
    interval = _Interval()
    nothing = reading_s()

    def clocked() -> None:
        begin = time.monotonic()
        interval.take(1.0, 32, time.monotonic() - begin)

    for _ in range(20):
        trainer.step()
    both = [(cpu_s(trainer.step) - nothing, cpu_s(clocked) - nothing) for _ in range(TRAINING_STEPS)]
    steps, clocks = zip(*both, strict=True)
    return statistics.median(steps), statistics.median(clocks)


def spread(values: list[float], unit: float, digits: int) -> str:
    """Median and range, in a unit."""
    three = (statistics.median(values), min(values), max(values))
    middle, low, high = (f"{value / unit:.{digits}f}" for value in three)
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Measure and print a Markdown table."""
    torch.set_num_threads(1)
    runs: dict[int, list[AtServer]] = {elements: [] for elements, _ in CASES}
    steps = []
    for _ in range(ROUNDS):
        for elements, n_steps in CASES:
            with tempfile.TemporaryDirectory() as folder:
                runs[elements].append(at_server(Path(folder), elements, n_steps))
        steps.append(at_worker())
    zmq.Context.instance().term()
    print("| parameters | a row, µs | a status line, µs | all that a push costs the server, µs | share of its CPU, % |")
    print("| --- | --- | --- | --- | --- |")
    for elements, done in runs.items():
        row, status = (spread([getattr(run, name) for run in done], 1e-6, 1) for name in ("row_s", "status_s"))
        whole, share = spread([run.push_s for run in done], 1e-6, 0), spread([run.share for run in done], 0.01, 2)
        print(f"| {elements:,} | {row} | {status} | {whole} | {share} |")
    print("\n| timing a step, µs | a step of `digits` `cnn`, µs | share, % |\n| --- | --- | --- |")
    clock, step = spread([c for _, c in steps], 1e-6, 2), spread([s for s, _ in steps], 1e-6, 0)
    share = spread([c / s for s, c in steps], 0.01, 3)
    print(f"| {clock} | {step} | {share} |")


if __name__ == "__main__":
    main()
