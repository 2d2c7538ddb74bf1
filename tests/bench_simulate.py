"""What virtual time costs beside the arithmetic of training, on the CPU with one thread.

    OMP_NUM_THREADS=1 python tests/bench_simulate.py

The first table counts events a second where a step computes nothing (`--dataset null`, 1,000 elements): an event is a
step that ends, or a message at one of its stations. The second compares the seconds of a run of the digits CNN with
those of its steps alone, taken in turns by the same number of trainers; evaluations are taken out. Half of the bare
steps come before the run and half after it, so that a machine that changes its speed changes both. All seconds are
CPU time of this process, which has one thread. Each figure is the median of five, with the range.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from sapus_cli.cluster import ClusterProfile, Link
from sapus_cli.config import RunConfig
from sapus_cli.drivers.simulate import Simulation
from sapus_cli.trainer import FlatModel, OptimizerSpec, Trainer
from sapus_cli.workloads.data import load, partition, prepare
from sapus_cli.workloads.models import build_model

REPETITIONS = 5
PROFILE = ClusterProfile(step_s=0.05, variation=0.2, link=Link(bytes_per_s=1.25e9, latency_s=1e-4))
NULL_STEPS, CNN_STEPS = 32_000, 1_600
"""Of all workers together."""


class Timed(Simulation):
    """A run that says how many events there were, and what CPU time they took without the evaluations."""

    seconds = 0.0

    @property
    def events(self) -> int:
        """Events so far."""
        return next(self._order)

    def _simulate(self) -> None:
        begin = time.process_time()
        super()._simulate()
        self.seconds += time.process_time() - begin

    def _evaluate(self, t_s: float) -> None:
        begin = time.process_time()
        super()._evaluate(t_s)
        self.seconds -= time.process_time() - begin


def timed(strategy: str, workers: int, dataset: str, model: str, steps: int) -> Timed:
    """A finished run of so many steps of each worker."""
    config = RunConfig(
        strategy=strategy, workers=workers, dataset=dataset, model=model, steps=steps, cluster=PROFILE, eval_every_s=10
    )
    with tempfile.TemporaryDirectory() as results:
        run = Timed(config, Path(results), None, lambda _: None)
        run.run()
    return run


def bare_s(workers: int, steps: int) -> float:
    """CPU seconds of the same steps on the digits CNN, and of nothing else."""
    data = load(prepare("digits", None, download=False))
    flat = FlatModel(build_model("cnn", data, 0))
    trainers = [
        Trainer(flat, data, shard, 32, OptimizerSpec("sgd", 0.1), 0, rank)
        for rank, shard in enumerate(partition(data.train_y, workers, "iid", 0))
    ]
    trainers[-1].warm_up()
    begin = time.process_time()
    for _ in range(steps):
        for trainer in trainers:
            trainer.step()
    return time.process_time() - begin


def spread(values: list[float], form: str) -> str:
    """Median and range."""
    low, middle, high = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Measure and print two Markdown tables."""
    torch.set_num_threads(1)
    cases = [(strategy, workers) for strategy in ("sapus", "local-sgd", "asp", "bsp") for workers in (8, 64)]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(REPETITIONS):
        for strategy, workers in cases:
            run = timed(strategy, workers, "null", "null:1000", NULL_STEPS // workers)
            rates[strategy, workers].append(run.events / run.seconds)
    print("| strategy | workers | events a CPU second |")
    print("| --- | --- | --- |")
    for (strategy, workers), values in rates.items():
        print(f"| `{strategy}` | {workers} | {spread(values, ',.0f')} |")
    overheads: dict[tuple[str, int], list[float]] = {case: [] for case in cases[:4]}
    for _ in range(REPETITIONS):
        for (strategy, workers), values in overheads.items():
            steps = CNN_STEPS // workers
            before_s = bare_s(workers, steps // 2)
            run_s = timed(strategy, workers, "digits", "cnn", steps).seconds
            values.append(100 * (run_s / (before_s + bare_s(workers, steps - steps // 2)) - 1))
    print("\n| strategy | workers | over the bare steps of the digits CNN, % |")
    print("| --- | --- | --- |")
    for (strategy, workers), values in overheads.items():
        print(f"| `{strategy}` | {workers} | {spread(values, '.1f')} |")


if __name__ == "__main__":
    main()
