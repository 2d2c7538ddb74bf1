"""What the figures draw: series of numbers from the traces. Nothing here needs matplotlib or torch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl

from sapus_cli import analysis
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sapus_cli.analysis import Group, Run

    Floats: TypeAlias = npt.NDArray[np.float64]

GRID = 300
"""Most points of a mean curve."""

BINS = 30
"""Most intervals that rates are averaged over."""


class Band(NamedTuple):
    """Mean of the seeds, and the least and the greatest of them, at `x`; all of shape (k,)."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band:
    """Seeds side by side where all of them have begun and none has ended, at every x of any of them up to `GRID`."""
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    if len(grid) > GRID:
        grid = grid[np.linspace(0, len(grid) - 1, GRID).round().astype(int)]
    x, mean, values = analysis.average([(x.tolist(), y.tolist()) for x, y in curves], grid.tolist())
    if not len(x):
        return Band(x, mean, mean, mean)
    return Band(x, mean, values.min(axis=0), values.max(axis=0))


def evaluations(run: Run, y: str, x: str) -> tuple[Floats, Floats]:
    """A column of evals.csv over `time`, `samples`, `bytes` or `version`; rows that are not finite are left out.

    Of several evaluations at one x the last one counts.
    """
    frame = run.evals.select("t_s", "samples", "version", y).drop_nulls().filter(pl.col(y).is_finite())
    frame = frame.sort("t_s", maintain_order=True)
    seconds = frame["t_s"].to_numpy().astype(float)
    if x == "bytes":
        t_s, n_bytes = analysis.bytes_over_time(run)
        if not len(t_s):
            return np.empty(0), np.empty(0)
        across = np.interp(seconds, t_s, n_bytes)
    else:
        across = seconds if x == "time" else frame[x].to_numpy().astype(float)
    values = frame[y].to_numpy().astype(float)
    last = np.append(across[1:] != across[:-1], True) if len(across) else np.zeros(0, dtype=bool)
    return across[last], values[last]


def rates(runs: Sequence[Run], column: str, scale: float) -> Band | None:
    """How fast a total of the server grows, a second, times `scale`: mean over each of up to `BINS` equal intervals.

    The total is interpolated between samples, so that the mean over the intervals is the mean rate. Runs with fewer
    than two samples are left out; None if that leaves none.
    """
    known = [run.server for run in runs if len(run.server) > 1 and run.server["t_s"][-1] > run.server["t_s"][0]]
    if not known:
        return None
    begin, end = max(frame["t_s"][0] for frame in known), min(frame["t_s"][-1] for frame in known)
    n = min(BINS, *(len(frame) - 1 for frame in known)) if end > begin else 0
    if not n:
        return None
    edges = np.linspace(begin, end, n + 1)
    values = np.stack(
        [np.diff(np.interp(edges, frame["t_s"].to_numpy(), frame[column].to_numpy().astype(float))) for frame in known]
    )
    values *= scale * n / (end - begin)
    return Band((edges[1:] + edges[:-1]) / 2, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def staleness(runs: Sequence[Run]) -> Band | None:
    """Share of the pushes, in percent, whose staleness is x or less; None if no run has a push."""
    counts = []
    for run in runs:
        column = analysis.read_frame(run.folder, "pushes", ["staleness"])["staleness"].drop_nulls()
        if len(column):
            counts.append(np.unique(column.to_numpy(), return_counts=True))
    if not counts:
        return None
    x = np.unique(np.concatenate([values for values, _ in counts]))
    if len(x) > GRID:
        x = x[np.linspace(0, len(x) - 1, GRID).round().astype(int)]
    shares = []
    for values, n in counts:
        below = np.concatenate([[0], np.cumsum(n)])
        shares.append(100 * below[np.searchsorted(values, x, side="right")] / n.sum())
    y = np.stack(shares)
    return Band(x.astype(float), y.mean(axis=0), y.min(axis=0), y.max(axis=0))


def pushes(run: Run, columns: Sequence[str]) -> dict[int, dict[str, Floats]]:
    """Columns of pushes.csv by worker, in the order of their numbers; an empty cell is NaN."""
    wanted = ["worker", "seq", *columns]
    frame = analysis.read_frame(run.folder, "pushes", wanted).sort("worker", "seq", maintain_order=True)
    parts = frame.partition_by("worker", as_dict=True, maintain_order=True)
    return {
        int(key[0]): {name: part[name].cast(pl.Float64).fill_null(math.nan).to_numpy() for name in columns}
        for key, part in parts.items()
    }


def some(ranks: Sequence[int], most: int) -> list[int]:
    """All of them, or `most` that are evenly spaced, the first and the last among them."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[i] for i in np.linspace(0, len(ranks) - 1, most).round().astype(int)]


def thinned(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """At most about `most` points, in order: of every stretch its least and its greatest. NaN is left out."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= most:
        return x, y
    edges = np.linspace(0, len(x), max(1, most // 2) + 1).round().astype(int)[:-1]
    stretches = list(zip(edges, [*edges[1:], len(x)], strict=True))
    chosen = {i for begin, end in stretches for i in (begin + y[begin:end].argmin(), begin + y[begin:end].argmax())}
    keep = np.array(sorted(chosen | {0, len(x) - 1}))
    return x[keep], y[keep]


def every(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` points, evenly spaced in their order. NaN is left out."""
    known = np.flatnonzero(np.isfinite(y))
    chosen = known[:: max(1, -(-len(known) // most))]
    return x[chosen], y[chosen]


def envelope(curves: Sequence[tuple[Floats, Floats]], join: Any) -> tuple[Floats, Floats] | None:
    """One curve of several: at each x of any of them, up to `GRID`, what `join` makes of them, as `np.fmax`.

    A value holds from the x before it to its own, as what a row of pushes.csv says holds for the interval that it ends.
    """
    known = [(x[ok], y[ok]) for x, y in curves if (ok := np.isfinite(y)).any()]
    if not known:
        return None
    grid = np.unique(np.concatenate([x for x, _ in known]))
    if len(grid) > GRID:
        grid = grid[np.linspace(0, len(grid) - 1, GRID).round().astype(int)]
    return grid, functools.reduce(join, [np.append(y, np.nan)[np.searchsorted(x, grid)] for x, y in known])


class Spans(NamedTuple):
    """What a worker did: begin and end in seconds, each of shape (k, 2); see docs/figures.md for how it is found."""

    computed: Floats
    exchanged: Floats
    waited: Floats


def spans(worker: dict[str, Floats]) -> Spans:
    """Reconstruct what one worker did from its rows of pushes.csv.

    A row says when the server received a push and how long the exchange before took, so the exchange of a push
    stands in the next row. Half of it is put before the moment of receipt and half behind what the reply was held; the
    steps end where the exchange begins. Of the last push the exchange is not known: it is taken to be the last one's.
    """
    received, held = worker["t_s"], np.nan_to_num(worker["held_s"])
    exchange = np.nan_to_num(worker["exchange_s"])
    took = np.append(exchange[1:], exchange[-1:])
    sent = np.maximum(received - took / 2, 0)
    began = np.maximum(sent - worker["n_steps"] * np.nan_to_num(worker["step_s"]), 0)
    released = received + held
    before = np.stack([sent, received], axis=1)
    after = np.stack([released, released + took / 2], axis=1)
    return Spans(
        np.stack([began, sent], axis=1),
        np.concatenate([before, after]),
        np.stack([received, released], axis=1)[held > 0],
    )


SPANS = ["t_s", "n_steps", "step_s", "exchange_s", "held_s"]
"""The columns that `spans` needs."""

_LEAST_CYCLES, _MOST_CYCLES = 3, 40


def windows(
    runs: Sequence[Sequence[dict[str, Floats]]], asked: tuple[float, float] | None = None
) -> list[tuple[float, float]]:
    """Seconds from and to which the workers of each run are shown; each run has one with a push at least.

    All windows are equally long: three exchanges of the slowest run, but no more than forty of the quickest. Each
    begins in the middle of the time in which all workers of its run were at work.
    """
    if asked is not None:
        return [asked] * len(runs)
    ends = [min(float(worker["t_s"].max()) for worker in workers) for workers in runs]
    cycles = [max(float(worker["t_s"].max()) / len(worker["t_s"]) for worker in workers) for workers in runs]
    length = min(_LEAST_CYCLES * max(cycles), _MOST_CYCLES * min(cycles))
    begins = [max(0.0, min(end / 2, end - length)) for end in ends]
    return [(begin, begin + length) for begin in begins]


class Series(NamedTuple):
    """Groups that differ in the number of workers alone, ascending in it."""

    label: str
    groups: list[Group]


def by_workers(groups: Sequence[Group]) -> list[Series]:
    """Groups joined to series over the number of workers.

    Raises:
        UserError: all of the groups have the same number.
    """
    found: dict[str, list[Group]] = {}
    for group in groups:
        setting = {k: v for k, v in group.setting.items() if k != "workers"}
        key = repr((group.strategy, sorted(group.runs[0].hyper_parameters.items()), sorted(setting.items(), key=str)))
        found.setdefault(key, []).append(group)
    if len({group.runs[0].workers for group in groups}) < 2:  # noqa: PLR2004 - a line needs two points
        raise UserError(
            f"all runs have {groups[0].runs[0].workers} workers, so there is no scaling to draw; "
            "add runs with another --workers"
        )
    joined = [sorted(members, key=lambda group: group.runs[0].workers) for members in found.values()]
    return [Series(_without_workers(members), members) for members in joined]


def _without_workers(members: Sequence[Group]) -> str:
    words = [word for word in members[0].label.split() if not word.startswith("workers=")]
    return " ".join(words)


def conditions(groups: Sequence[Group]) -> str:
    """What the runs were made under, in words: workload, workers, clock, cluster profile, wire scale, what differs."""
    runs = [run for group in groups for run in group.runs]
    parts = [
        _all(f"{run.record['config'].get('model')} on {run.record['config'].get('dataset')}" for run in runs),
        _workers([run.workers for run in runs]),
        _all(f"{run.clock} clock" for run in runs),
        _all(cluster(run) for run in runs),
    ]
    scales = sorted({float((run.record.get("cluster") or {}).get("wire_scale", 1.0)) for run in runs})
    if scales != [1.0]:
        parts.append(f"wire scale {_joined(f'{scale:g}' for scale in scales)}")
    return "; ".join(parts) + "."


def _workers(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    if least != most:
        return f"{least} to {most} workers"
    return f"{most} worker{'s' if most != 1 else ''}"


def _all(texts: Any) -> str:
    return _joined(dict.fromkeys(texts))


def _joined(texts: Any) -> str:
    several = list(texts)
    shown = several[:3]
    more = f" or {len(several) - 3} others" if len(several) > len(shown) else ""
    return " or ".join(shown) + more


def cluster(run: Run) -> str:
    """The cluster profile in a few words: its name, and what it says of steps and link."""
    profile = run.record.get("cluster") or {}
    name = profile.get("name") or "none"
    own = name in {"none", "custom"}
    parts = []
    if profile.get("step_s") is not None:
        parts.append(f"{_si(profile['step_s'], 's')} a step")
    slow = profile.get("slow") or {}
    if slow:
        parts.append("slow " + " ".join(f"{rank}:{factor:g}x" for rank, factor in slow.items()))
    parts += [f"with {key}s" for key in ("pause", "period", "fault") if profile.get(key) or profile.get(f"{key}s")]
    link = profile.get("link") or {}
    if link.get("bytes_per_s"):
        parts.append(f"link {_si(8 * link['bytes_per_s'], 'bit/s')}")
    if link.get("latency_s"):
        parts.append(f"latency {_si(link['latency_s'], 's')}")
    if not parts:
        return "no cluster profile" if own else f"cluster {name}"
    return f"cluster: {', '.join(parts)}" if own else f"cluster {name} ({', '.join(parts)})"


_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def _si(value: float, unit: str) -> str:
    factor, prefix = next((pair for pair in _PREFIXES if value >= pair[0]), _PREFIXES[-1])
    return f"{value / factor:.4g}\N{NO-BREAK SPACE}{prefix}{unit}"


def have_several_seeds(groups: Sequence[Group]) -> bool:
    """Whether a group has more than one run."""
    return any(len(group.runs) > 1 for group in groups)


def seeds(groups: Sequence[Group]) -> str:
    """How many seeds a group has, as in "n = 3" or "n = 1 to 3", which no line break parts."""
    counts = sorted({len(group.runs) for group in groups})
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def number(value: float) -> str:
    """Three digits that say something, and none behind the point from 100 on."""
    if value and abs(value) < 1e-3:  # noqa: PLR2004 - more zeros than digits
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3  # noqa: PLR2004
    return f"{value:,.{digits}f}"


class Cost(NamedTuple):
    """What a run spent until it reached the target, or, `censored`, up to its last evaluation."""

    seconds: float
    n_bytes: float
    censored: bool


def cost_to(group: Group, target: float) -> list[Cost]:
    """Seconds and bytes to the target of every run whose bytes are known."""
    found = []
    for run in group.runs:
        reached = analysis.time_to(run, target)
        n_bytes = analysis.bytes_by(run, reached.seconds)
        if n_bytes is not None:
            found.append(Cost(reached.seconds, n_bytes, reached.censored))
    return found
