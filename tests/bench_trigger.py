"""What the trigger of sapus costs: `watch` against the training step that it follows, on the CPU with one thread.

    OMP_NUM_THREADS=1 python tests/bench_trigger.py

Step and `watch` alternate, so that a machine that changes its speed changes both, and `watch` finds the caches as a
step leaves them. Each figure is the median over the rounds of a round's median; the range is that of the rounds. The
last column watches every element of the state instead of a sample.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from sapus_cli.strategy import Step
from sapus_cli.trainer import OptimizerSpec, Trainer
from sapus_cli.workloads.data import load, prepare
from sapus_cli.workloads.models import build_model
from strategies.sapus import Sapus, watch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

CASES = (
    ("digits", "mlp", 200),
    ("digits", "cnn", 100),
    ("fake:3x32x32:10", "resnet20", 5),
    ("fake:3x32x32:10", "torchvision:resnet18", 3),
)
"""Data set, model, steps a round."""
ROUNDS = 7
BATCH = 32
EXCHANGE_STEPS = 20.0
"""c, so that the trigger has something to decide; the bounds leave it all the room there is."""


@dataclass(frozen=True)
class Timing:
    """Seconds, one number a round."""

    step: list[float]
    sampled: list[float]
    whole: list[float]


class Watcher:
    """A worker half on its own, with the state that it pulled."""

    def __init__(self, trainer: Trainer, sample: int) -> None:
        self._strategy = Sapus(sample=sample)
        self._state = self._strategy.init_worker(trainer.vector, 0)
        self._state.h_max, self._state.c = 10**9, EXCHANGE_STEPS
        self._trainer = trainer
        self._pulled = trainer.vector.clone()
        self._k = 0

    def seconds(self, loss: float) -> float:
        """How long the decision after a step takes. A push that it makes is not carried out, but a pull follows it."""
        self._k += 1
        t = self._trainer.steps
        step = Step(t=t, k=self._k, params=self._trainer.vector, pulled=self._pulled, loss=loss, last=False)
        took, push = timed(lambda: watch(self._state, step, sample=self._strategy.sample, overlap=False))
        if push is not None:
            self._pulled.copy_(self._trainer.vector)
            self._k = 0
        return took


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds that a call takes, and what it returns."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(data_name: str, model: str, steps: int) -> tuple[int, Timing]:
    """Elements of the state, and the timings of one workload."""
    data = load(prepare(data_name, None, download=False))
    shard = torch.arange(len(data.train_x))
    trainer = Trainer(build_model(model, data, 0), data, shard, BATCH, OptimizerSpec("sgd", 0.05), 0, 0)
    watchers = (Watcher(trainer, Sapus().sample), Watcher(trainer, trainer.vector.numel()))
    timing = Timing([], [], [])
    for number in range(-1, ROUNDS):  # the first round warms up
        step_s: list[float] = []
        sampled_s: list[float] = []
        whole_s: list[float] = []
        for i in range(steps):
            took, (loss, _) = timed(trainer.step)
            step_s.append(took)
            # Whoever goes second finds part of the state in the cache: they take turns.
            for watcher, into in list(zip(watchers, (sampled_s, whole_s), strict=True))[:: 1 if i % 2 else -1]:
                into.append(watcher.seconds(loss))
        if number >= 0:
            timing.step.append(statistics.median(step_s))
            timing.sampled.append(statistics.median(sampled_s))
            timing.whole.append(statistics.median(whole_s))
    return trainer.vector.numel(), timing


def spread(values: list[float], unit: float, digits: int) -> str:
    """Median and range, in a unit."""
    low, middle, high = (
        f"{value / unit:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def share(part: list[float], whole: list[float]) -> str:
    """Median and range of the ratio, round by round, in percent."""
    return spread([a / b for a, b in zip(part, whole, strict=True)], 0.01, 2)


def main() -> None:
    """Measure all workloads and print a Markdown table."""
    torch.set_num_threads(1)
    print("| workload | state elements | step, ms | `watch`, ms | share of the step, % | every element, % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for data_name, model, steps in CASES:
        n, timing = measure(data_name, model, steps)
        cells = (
            f"`{data_name}` `{model}`",
            f"{n:,}",
            spread(timing.step, 1e-3, 2),
            spread(timing.sampled, 1e-3, 3),
            share(timing.sampled, timing.step),
            share(timing.whole, timing.step),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
