"""How long strategies take to a test loss on clusters that two cores cannot be: `python tests/bench_intervals.py`.

A command, not a test. It drives the real cores, trainer and strategies in virtual time: real gradients of an MLP on
mnist5k, steps of 50 ms that vary by 5 %, a state of 50 MB over one link that serves one transfer at a time in each
direction, 17 ms of server CPU an exchange. Prints, for each scenario and strategy, the median over the seeds of the
virtual seconds to a test loss of 0.45, 0.30 and 0.24, with their range.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sapus_cli import registry
from sapus_cli.codec import Push, State
from sapus_cli.protocol import Outgoing, Phase, ServerCore, WorkerCore
from sapus_cli.strategy import Setting, Vec
from sapus_cli.trainer import Evaluator, FlatModel, OptimizerSpec, Trainer
from sapus_cli.workloads.data import load, partition, prepare
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

N_WORKERS = 8
STEP_S, VARIATION = 0.05, 0.05
N_BYTES = 50e6
LATENCY_S = 0.5e-3
EVERY_S = 0.5
TARGETS = (0.45, 0.30, 0.24)


@dataclass(frozen=True)
class Scenario:
    """A cluster and a local optimizer."""

    link_bytes_per_s: float = 1.25e9
    server_cpu_s: float = 0.017
    slow: dict[int, float] = field(default_factory=dict)
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("sgd", 0.1))
    seconds: float = 32.0


MOMENTUM = OptimizerSpec("sgd", 0.02, momentum=0.9)
ADAMW = OptimizerSpec("adamw", 0.001)
FREE = {"link_bytes_per_s": 1e15, "server_cpu_s": 0.0}
SCENARIOS = {
    "10 Gbit/s": Scenario(),
    "10 Gbit/s, momentum 0.9": Scenario(optimizer=MOMENTUM),
    "10 Gbit/s, AdamW": Scenario(optimizer=ADAMW),
    "1 Gbit/s": Scenario(link_bytes_per_s=1.25e8, seconds=80.0),
    "free link": Scenario(**FREE),  # type: ignore[arg-type]
    "free link, momentum 0.9": Scenario(**FREE, optimizer=MOMENTUM),  # type: ignore[arg-type]
    "10 Gbit/s, half 10x slower": Scenario(slow=dict.fromkeys(range(4, 8), 10.0)),
}
CONTENDERS: list[tuple[str, dict[str, Any]]] = [
    *(("local-sgd-async", {"h": h}) for h in (1, 4, 8, 16, 32, 64)),
    ("local-sgd", {"h": 16}),
    ("sapus", {"overlap": False}),
    ("sapus", {"overlap": True}),
    ("sapus-weighted", {"overlap": True}),
]


class Run:
    """One strategy in one scenario with one seed."""

    def __init__(self, strategy: str, params: dict[str, Any], scenario: Scenario, seed: int) -> None:
        data = load(prepare("mnist5k", None, download=False))
        shards = partition(data.train_y, N_WORKERS, "iid", seed)
        model = build_model("mlp", data, seed)
        momentum = scenario.optimizer.momentum if scenario.optimizer.name == "sgd" else 0.9
        made = registry.build(strategy, params)
        self.scenario = scenario
        self.tests = Evaluator(model, data)
        self.trainers = [
            Trainer(model, data, shard, 32, scenario.optimizer, seed, rank) for rank, shard in enumerate(shards)
        ]
        self.workers = [WorkerCore(made, trainer.vector, rank) for rank, trainer in enumerate(self.trainers)]
        setting = Setting(link_bytes_per_s=scenario.link_bytes_per_s, momentum=momentum)
        self.server = ServerCore(made, FlatModel(model).vector.clone(), N_WORKERS, setting)
        self.noise = [np.random.default_rng([seed, rank]) for rank in range(N_WORKERS)]
        self.busy = [False] * N_WORKERS
        self.free_at = {"up": 0.0, "down": 0.0, "cpu": 0.0}
        self.cpu_s = 0.0
        self.intervals: list[int] = []
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()

    def curve(self) -> list[tuple[float, float]]:
        """Virtual seconds and test loss, every half second."""
        for rank, worker in enumerate(self.workers):
            worker.pull("f")
            self.reply(0.0, self.server.join(rank, 0.0))
        points: list[tuple[float, float]] = []
        while self.events:
            now, _, call, arguments = heapq.heappop(self.events)
            while len(points) * EVERY_S <= min(now, self.scenario.seconds):
                points.append((len(points) * EVERY_S, self.tests.evaluate(self.server.state.x)[0]))
            if now > self.scenario.seconds:
                break
            call(now, *arguments)
        return points

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when, next(self.order), call, arguments))

    def occupy(self, what: str, now: float, seconds: float) -> float:
        """When a transfer or a computation that asks for its turn now will be over."""
        self.free_at[what] = max(now, self.free_at[what]) + seconds
        return self.free_at[what]

    def begin(self, now: float, rank: int) -> None:
        if self.workers[rank].phase is not Phase.COMPUTING or self.busy[rank]:
            return
        self.busy[rank] = True
        sigma = math.sqrt(math.log(1 + VARIATION**2))
        factor = math.exp(sigma * self.noise[rank].standard_normal() - sigma**2 / 2)
        step_s = STEP_S * self.scenario.slow.get(rank, 1.0) * factor
        self.at(now + step_s, self.stepped, rank, step_s)

    def stepped(self, now: float, rank: int, step_s: float) -> None:
        self.busy[rank] = False
        loss, n_samples = self.trainers[rank].step()
        self.send(now, rank, self.workers[rank].after_step(loss, n_samples, step_s, now, last=False))
        self.begin(now, rank)

    def send(self, now: float, rank: int, push: Push | None) -> None:
        if push is not None:
            self.intervals.append(push.n_steps)
            sent = self.occupy("up", now, N_BYTES / self.scenario.link_bytes_per_s)
            self.at(sent + LATENCY_S, self.arrived, rank, push, self.workers[rank].outgoing.clone())

    def arrived(self, now: float, rank: int, push: Push, vector: Vec) -> None:
        self.cpu_s += self.scenario.server_cpu_s
        self.at(self.occupy("cpu", now, self.scenario.server_cpu_s), self.apply, rank, push, vector)

    def apply(self, now: float, rank: int, push: Push, vector: Vec) -> None:
        self.reply(now, self.server.push(rank, push, vector, now, int(N_BYTES), self.cpu_s))

    def reply(self, now: float, replies: list[Outgoing]) -> None:
        for reply in replies:
            if reply.vector is not None and isinstance(reply.message, State):
                sent = self.occupy("down", now, N_BYTES / self.scenario.link_bytes_per_s)
                self.at(sent + LATENCY_S, self.took, reply.worker, reply.message, reply.vector.clone())

    def took(self, now: float, rank: int, message: State, vector: Vec) -> None:
        self.workers[rank].incoming.copy_(vector)
        self.send(now, rank, self.workers[rank].on_state(message, now))
        self.begin(now, rank)


def time_to(points: list[tuple[float, float]], loss: float) -> float:
    """When the loss is first reached, interpolated; infinite if it is not."""
    for (t0, loss0), (t1, loss1) in itertools.pairwise(points):
        if loss1 <= loss:
            return t0 + (t1 - t0) * (loss0 - loss) / (loss0 - loss1)
    return math.inf


def cell(times: list[float], limit: float) -> str:
    """Median and range, or that the limit came first."""
    middle = statistics.median_low(times)
    if math.isinf(middle):
        return f"> {limit:g}"
    top = f"{max(times):.1f}" if math.isfinite(max(times)) else f"> {limit:g}"
    return f"{middle:.1f} ({min(times):.1f} to {top})"


def main() -> None:
    """Run the grid and print it as Markdown, a table a scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.scenario or SCENARIOS:
        scenario = SCENARIOS[name]
        sys.stdout.write(
            f"\n**{name}**\n\n| strategy | mean H | to 0.45 | to 0.30 | to 0.24 |\n|---|---|---|---|---|\n"
        )
        for strategy, params in CONTENDERS:
            runs = [Run(strategy, params, scenario, seed) for seed in range(1, arguments.seeds + 1)]
            curves = [run.curve() for run in runs]
            intervals = [h for run in runs for h in run.intervals[len(run.intervals) // 4 :]]
            text = " ".join(f"{key}={str(value).lower()}" for key, value in params.items())
            cells = [cell([time_to(curve, loss) for curve in curves], scenario.seconds) for loss in TARGETS]
            sys.stdout.write(f"| {strategy} {text} | {statistics.mean(intervals):.1f} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
