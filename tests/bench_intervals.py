"""How long strategies take to a test loss on clusters that two cores cannot be: `python tests/bench_intervals.py`.

A command, not a test. It runs `sapus simulate`'s driver over scenarios, strategies and seeds: an MLP on mnist5k whose
state counts as 50 MB on the link, 8 workers, steps of 50 ms that vary by 5 %, the server's stated CPU cost. Prints, for
each scenario and strategy, the median over the seeds of the virtual seconds to a test loss of 0.45, 0.30 and 0.24, with
their range.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapus_cli.cluster import ClusterProfile, Link, ServerCost
from sapus_cli.config import RunConfig
from sapus_cli.drivers.simulate import Simulation
from sapus_cli.traces import read_trace

if TYPE_CHECKING:
    import polars as pl

STATE_BYTES = 50e6
ELEMENTS = 269_322
TARGETS = (0.45, 0.30, 0.24)
SCALE = STATE_BYTES / (4 * ELEMENTS)
TEN_GBIT = ClusterProfile(step_s=0.05, variation=0.05, link=Link(1.25e9, 0.5e-3), wire_scale=SCALE)
ONE_GBIT = ClusterProfile(step_s=0.05, variation=0.05, link=Link(1.25e8, 0.5e-3), wire_scale=SCALE)
FREE = ClusterProfile(step_s=0.05, variation=0.05, server=ServerCost(0.0, 0.0))
HALF_SLOW = ClusterProfile(
    step_s=0.05, variation=0.05, link=TEN_GBIT.link, wire_scale=SCALE, slow=dict.fromkeys(range(4, 8), 10.0)
)
SGD: dict[str, Any] = {"lr": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.001, "optimizer": "adamw"}
SCENARIOS: dict[str, tuple[ClusterProfile, dict[str, Any], float]] = {
    "10 Gbit/s": (TEN_GBIT, SGD, 32.0),
    "10 Gbit/s, momentum 0.9": (TEN_GBIT, MOMENTUM, 32.0),
    "10 Gbit/s, AdamW": (TEN_GBIT, ADAMW, 32.0),
    "1 Gbit/s": (ONE_GBIT, SGD, 80.0),
    "free link": (FREE, SGD, 32.0),
    "free link, momentum 0.9": (FREE, MOMENTUM, 32.0),
    "10 Gbit/s, half of the workers 10x slower": (HALF_SLOW, SGD, 64.0),
}
CONTENDERS: list[tuple[str, dict[str, Any]]] = [
    *(("local-sgd-async", {"h": h}) for h in (1, 4, 8, 16, 32, 64)),
    ("local-sgd", {"h": 16}),
    ("sapus", {"overlap": False}),
    ("sapus", {"overlap": True}),
    ("sapus-weighted", {"overlap": True}),
]


def time_to(evals: pl.DataFrame, loss: float) -> float:
    """When the test loss is first reached, interpolated; infinite if it is not."""
    points = list(zip(evals["t_s"], evals["loss"], strict=True))
    for (t0, loss0), (t1, loss1) in itertools.pairwise(points):
        if loss1 <= loss:
            return float(t0 + (t1 - t0) * (loss0 - loss) / (loss0 - loss1))
    return math.inf


def cell(times: list[float], limit: float) -> str:
    """Median and range, or that the limit came first."""
    texts = [f"{t:.1f}" if math.isfinite(t) else f"> {limit:g}" for t in sorted(times)]
    return f"{texts[(len(texts) - 1) // 2]} ({texts[0]} to {texts[-1]})" if math.isfinite(min(times)) else texts[0]


def main() -> None:
    """Run the grid and print it as Markdown, a table a scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--strategy", default="", help="only strategies whose name begins like this")
    arguments = parser.parse_args()
    for name in arguments.scenario or SCENARIOS:
        profile, optimizer, seconds = SCENARIOS[name]
        sys.stdout.write(
            f"\n**{name}**\n\n| strategy | mean H | to 0.45 | to 0.30 | to 0.24 |\n|---|---|---|---|---|\n"
        )
        for strategy, params in [one for one in CONTENDERS if one[0].startswith(arguments.strategy)]:
            evals, intervals = [], []
            for seed in range(1, arguments.seeds + 1):
                config = RunConfig(
                    strategy=strategy,
                    params=params,
                    dataset="mnist5k",
                    model="mlp",
                    seconds=seconds,
                    seed=seed,
                    cluster=profile,
                    **optimizer,
                )
                with tempfile.TemporaryDirectory() as results:
                    folder, record = Simulation(config, Path(results), None, lambda *_: None).run()
                    evals.append(read_trace(folder, "evals"))
                    intervals.append(record["summary"]["mean_interval"])
            text = " ".join(f"{key}={str(value).lower()}" for key, value in params.items())
            cells = [cell([time_to(one, loss) for one in evals], seconds) for loss in TARGETS]
            sys.stdout.write(f"| {strategy} {text} | {statistics.mean(intervals):.1f} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
