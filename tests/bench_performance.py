"""How near the server comes to the wire, what a worker costs beside its training, how fast things start: as JSON.

    OMP_NUM_THREADS=1 python tests/bench_performance.py transport worker start > performance.json

Each figure is a ratio within one round or a time; stated are the median of the rounds and their range. On a machine
that does something else meanwhile the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import SAPUS
from runs import make_run

from sapus_cli import traces
from sapus_cli.config import RunConfig
from sapus_cli.drivers import process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 5
H = 16
CYCLES = 1
MODEL, DATASET = "torchvision:resnet18", "fake:3x32x32:10"
PAIRS = (("1e5", "8"), ("1e6", "4,8"), ("2.5e7", "4"))
PUSHES = 5000
SAMPLED_S = range(0, PUSHES, 16)
"""Of the runs that are compared: pushes, one a second, and when they were evaluated and the server was sampled."""
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("local-sgd", {"h": H}),
    ("sapus", {}),
)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


# --- transport


def transport() -> list[dict[str, Any]]:
    """The full server over the bare loop, over the floor, and its CPU, by `sapus bench transport`."""
    found = []
    for elements, workers in PAIRS:
        asked = ("bench", "transport", "--elements", elements, "--workers", workers, "--rounds", str(ROUNDS), "--json")
        done = subprocess.run([*SAPUS, *asked], stdout=subprocess.PIPE, text=True, check=True)
        found += [
            {
                key: row[key]
                for key in ("contender", "elements", "workers", "to_base", "of_floor", "server_cpu_s_per_gb")
            }
            for row in json.loads(done.stdout)["medians"]["contenders"]
        ]
    return found


# --- worker


def worker() -> list[dict[str, Any]]:
    """A step of a worker with all that belongs to it over a step of the same model alone, at intervals of H steps."""
    from sapus_cli import registry  # noqa: PLC0415 - torch comes after the allocator has been told
    from sapus_cli.drivers import roles  # noqa: PLC0415

    process.settle(1)
    config = RunConfig(strategy="asp", workers=1, dataset=DATASET, model=MODEL, steps=H * CYCLES + 1)
    ready = roles.prepared(config)
    trainer = Timed(ready)
    trainer.warm_up()
    ratios: dict[str, list[float]] = {name: [] for name, _ in STRATEGIES}
    intervals: dict[str, list[float]] = {name: [] for name, _ in STRATEGIES}
    alone = [trainer.alone(H * CYCLES)]
    for _ in range(ROUNDS):
        for name, params in STRATEGIES:
            step_s, interval = trainer.at_work(config, registry.build(name, params), ready)
            alone.append(trainer.alone(H * CYCLES))
            ratios[name].append(step_s / statistics.mean(alone[-2:]))
            intervals[name].append(interval)
    return [
        {
            "strategy": name,
            "model": MODEL,
            "step_s": statistics.median(alone),
            "over_alone": spread(ratios[name]),
            "mean_interval": spread(intervals[name]),
        }
        for name, _ in STRATEGIES
    ]


class Timed:
    """A trainer that notes when its steps begin."""

    def __init__(self, ready: Any) -> None:
        import torch  # noqa: PLC0415

        from sapus_cli.trainer import OptimizerSpec, trainer_of  # noqa: PLC0415
        from sapus_cli.workloads import data as workload_data  # noqa: PLC0415
        from sapus_cli.workloads.models import build_model  # noqa: PLC0415

        data = workload_data.load(Path(ready.data))
        model = build_model(MODEL, data, 0)
        indices = torch.arange(len(data.train_y))
        spec = OptimizerSpec("sgd", 1e-4, 0.0, 0.0)
        self._trainer: Any = trainer_of(data)(model, data, indices, 32, spec, 0, 0)
        self._begun: list[float] = []
        self.vector = self._trainer.vector
        self.warm_up: Callable[[], None] = self._trainer.warm_up
        self.forget: Callable[[], None] = self._trainer.forget

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(self._trainer.steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._trainer.steps = steps

    def step(self) -> tuple[float, int]:
        """One local step."""
        self._begun.append(time.perf_counter())
        result: tuple[float, int] = self._trainer.step()
        return result

    def alone(self, steps: int) -> float:
        """Seconds a step, without a server."""
        self._begun.clear()
        for _ in range(steps + 1):
            self.step()
        return self._step_s()

    def at_work(self, config: RunConfig, strategy: Any, ready: Any) -> tuple[float, float]:
        """Seconds a step as the one worker of a server in another process, and its mean interval."""
        from sapus_cli.drivers import children  # noqa: PLC0415
        from sapus_cli.drivers.client import Client  # noqa: PLC0415
        from sapus_cli.drivers.control import Begin, Bound, Ended, Halt, hear, tell  # noqa: PLC0415
        from sapus_cli.drivers.launch import fork_server  # noqa: PLC0415
        from sapus_cli.drivers.worker import Worker  # noqa: PLC0415

        self._begun.clear()
        ours, theirs = multiprocessing.Pipe()
        with tempfile.TemporaryDirectory() as results:
            folder = traces.create_run_folder(Path(results), None, "bench", 1, 0)
            arguments = (theirs, config, strategy, ready, "tcp://127.0.0.1:*")
            server = fork_server(1).Process(target=children.serve, args=arguments, daemon=True)
            server.start()
            bound = hear(ours)
            assert isinstance(bound, Bound)
            tell(ours, Begin(str(folder), bound.endpoint))
            said: list[Any] = []

            def listen() -> None:
                while not said or not isinstance(said[-1], Ended):
                    said.append(hear(ours))

            listener = threading.Thread(target=listen, daemon=True)
            listener.start()
            client = Client(bound.endpoint, "worker", 0)
            Worker(
                client,
                strategy,
                self,
                fingerprint=ready.fingerprint,
                n_params=self._trainer.flat.n_params,
                steps=config.steps,
                seconds=None,
            ).run()
            client.close()
            tell(ours, Halt())
            listener.join(60)
            server.join(60)
        # The last push ends no interval: it carries the one step that is left over.
        return self._step_s(), (said[-1].steps - 1) / max(1, said[-1].pushes - 1)

    def _step_s(self) -> float:
        """From the begin of the first step to the begin of the last, a step."""
        return (self._begun[-1] - self._begun[0]) / (len(self._begun) - 1)


# --- start


def start() -> dict[str, Any]:
    """Seconds to the first step of 8 workers, to the help, and to the comparison of 10 runs."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        for seed in range(10):
            make_run(
                results / f"compared/{seed}",
                seed=seed % 5,
                strategy=("bsp", "asp")[seed // 5],
                evals=[(t, 1 - 0.99**i) for i, t in enumerate(SAMPLED_S)],
                server=[(t, t / 2, 1000 * i, 1000 * i) for i, t in enumerate(SAMPLED_S)],
                staleness=[i % 8 for i in range(PUSHES)],
            )
        run = ("run", "--workers", "8", "--steps", "16", "--json", "--results", str(results / "runs"))
        compare = ("compare", str(results / "compared"))
        timed(run)  # it prepares the data set, and reads what is not yet in the page cache
        first_step, help_s, compare_s = [], [], []
        for _ in range(ROUNDS):
            first_step.append(json.loads(timed(run)[1])["startup_s"])
            help_s.append(timed(("--help",))[0])
            compare_s.append(timed(compare)[0])
    return {
        "first_step_of_8_workers_s": spread(first_step),
        "help_s": spread(help_s),
        "compare_10_runs_s": spread(compare_s),
    }


def timed(arguments: Sequence[str]) -> tuple[float, str]:
    """A command's time in seconds from its start to its end, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run([*SAPUS, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[], Any]] = {"transport": transport, "worker": worker, "start": start}
    parser.add_argument("parts", nargs="+", choices=parts)
    asked = parser.parse_args().parts
    found = traces.environment() | {"rounds": ROUNDS} | {name: parts[name]() for name in asked}
    json.dump(found, sys.stdout, indent=2, default=str)
    print()


if __name__ == "__main__":
    main()
