"""What run folders say together: runs grouped by everything but the seed, and what is computed from their traces.

It reads traces only and never imports torch. `docs/compare.md` defines every figure.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from sapus_cli import traces
from sapus_cli.errors import DamagedFileError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    import polars as pl

DEPTH = 3
"""How many folders below a given one runs are looked for."""

_CANNOT_MATTER = frozenset({"strategy", "params", "seed", "data_dir", "download", "device", "cluster"})
"""Entries of the config that say where data lie, or that the record holds in a resolved form."""

OPTIONS = ("optimizer", "wire", "weight_decay", "momentum", "lr")
"""Conditions that a strategy may have its own of, the one that matters most first."""

REFERENCE = "reference"
"""The folder of the runs that come with the repository."""

MOST_NAMED = 12
"""Of so many groups that missed the target each has a note of its own."""

_STALE_FRACTION = 0.99

_SHORT = {"batch_size": "batch", "eval_every_s": "eval-every", "target_accuracy": "stop-at"}


@dataclasses.dataclass(eq=False)
class Run:
    """One run folder. Traces are read when they are asked for, and kept.

    Attributes:
        folder: the run folder.
        record: what its run.json says.
    """

    folder: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def strategy(self) -> str:
        """Name of the strategy, or package.module:Class."""
        return str(self.record["config"]["strategy"])

    @property
    def label(self) -> str:
        """The strategy and the hyper-parameters that were given, as in "local-sgd h=16"."""
        resolved = self.hyper_parameters
        given = self.record["config"].get("params") or {}
        return " ".join(
            [self.strategy, *(f"{key}={value_text(resolved.get(key, given[key]))}" for key in sorted(given))]
        )

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """All hyper-parameters of the strategy with their values."""
        return dict(self.record["strategy"].get("hyper_parameters") or {})

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.record["config"]["seed"])

    @property
    def workers(self) -> int:
        """Number of workers."""
        return int(self.record["config"]["workers"])

    @property
    def clock(self) -> str:
        """`real` or `virtual`."""
        return str(self.record["clock"])

    @property
    def status(self) -> str:
        """One of `traces.STATUSES`."""
        return str(self.record["status"])

    @property
    def finished(self) -> bool:
        """Whether it ended as asked."""
        return self.status == "finished"

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of run.json; empty if the run did not end as asked."""
        return dict(self.record.get("summary") or {}) if self.finished else {}

    @functools.cached_property
    def evals(self) -> pl.DataFrame:
        """evals.csv. Raises DamagedFileError, as all of the traces do."""
        return read_frame(self.folder, "evals")

    @functools.cached_property
    def pushes(self) -> pl.DataFrame:
        """pushes.csv, with the strategy's own columns."""
        return read_frame(self.folder, "pushes")

    @functools.cached_property
    def resources(self) -> pl.DataFrame:
        """resources.csv."""
        return read_frame(self.folder, "resources")

    @functools.cached_property
    def events(self) -> pl.DataFrame:
        """events.csv."""
        return read_frame(self.folder, "events")

    @functools.cached_property
    def server(self) -> pl.DataFrame:
        """The server's rows of resources.csv in order of time: t_s, rx_bytes, tx_bytes and cpu_s, all of them known."""
        import polars as pl  # noqa: PLC0415 - who only asks for help does without it

        columns = ["t_s", "rx_bytes", "tx_bytes", "cpu_s"]
        frame = read_frame(self.folder, "resources", ["role", *columns])
        rows = frame.filter(pl.col("role") == "server").select(columns)
        return rows.drop_nulls().sort("t_s", maintain_order=True)

    @functools.cached_property
    def staleness(self) -> tuple[float, float] | None:
        """Mean and 99th percentile of the staleness of its pushes, in versions; None without pushes.

        The percentile is the least staleness that 99 % of the pushes do not exceed, so a whole number.
        """
        # Not from `pushes`, which would keep all columns of many long runs in memory.
        column = read_frame(self.folder, "pushes", ["staleness"])["staleness"].drop_nulls().sort()
        mean = _mean(column)
        return None if mean is None else (mean, float(column[math.ceil(_STALE_FRACTION * len(column)) - 1]))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and up to `DEPTH` folders below them, each once, in the order of their names.

    A path that does not exist may be a pattern with `*`, `?` or `[...]`. Files beside given folders do not matter, and
    a folder `reference`, as the repository has one, counts only if none beside it is given: a shell's `results/*` means
    one's own runs.

    Raises:
        UserError: there is none behind one of the paths.
    """
    found: dict[Path, Path] = {}
    for path in _own(paths):
        places = [path]
        if not path.exists() and re.search(r"[*?\[]", str(path)):
            try:
                matches = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            except ValueError as error:
                raise UserError(f"{path}: is no pattern: {error}") from error
            # What a folder keeps out of sight is not meant by "*", as in a shell.
            places = sorted(match for match in matches if path.name.startswith(".") or not match.name.startswith("."))
            places = _own(places)
            if not places:
                raise UserError(f"{path}: no path matches this pattern; give run folders, or folders of runs")
        if not all(place.exists() for place in places):
            raise UserError(f"{path}: there is no such folder; give run folders, or folders of runs")
        below = [run for place in places for run in _runs_below(place, DEPTH)]
        if not below:
            raise UserError(f"{path}: there is no run in it, nor up to {DEPTH} folders below; make one with: sapus run")
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _own(paths: Sequence[Path]) -> list[Path]:
    """All but files, and the runs that come with the repository, beside a folder that is given as well."""
    plain = [path for path in paths if path.name != REFERENCE and not path.is_file()]
    beside = {path.parent for path in plain}
    return [path for path in paths if path in plain or path.parent not in beside]


def _runs_below(place: Path, depth: int) -> Iterator[Path]:
    if (place / "run.json").is_file():
        yield place
    elif depth and place.is_dir():
        try:
            inner = sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
            inner = [path for path in inner if path.name != REFERENCE]
        except OSError as error:
            raise UserError(f"{place}: cannot be read: {error.strerror}") from error
        for path in inner:
            yield from _runs_below(path, depth - 1)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run behind `paths` (see `find_runs`); only run.json is read at once.

    Raises:
        UserError: there is none behind one of the paths.
        DamagedFileError: a run.json is damaged, or was written by a newer sapus.
    """
    return [_load(folder) for folder in find_runs(paths)]


def _load(folder: Path) -> Run:
    record = traces.read_run(folder)
    entry = record.get("config")
    config: dict[str, Any] = entry if isinstance(entry, dict) else {}
    fine = {
        "config.strategy": isinstance(config.get("strategy"), str),
        "config.seed": type(config.get("seed")) is int,
        "config.workers": type(config.get("workers")) is int,
        "strategy": isinstance(record.get("strategy"), dict),
        "status": record.get("status") in traces.STATUSES,
        "clock": record.get("clock") in {"real", "virtual"},
    }
    for key, valid in fine.items():
        if not valid:
            raise DamagedFileError(f"{folder / 'run.json'}: has no valid '{key}'")
    return Run(folder, record)


@dataclasses.dataclass(eq=False)
class Group:
    """Runs that are equal in everything but the seed.

    Attributes:
        label: what people call it; no two groups that were made together have the same.
        runs: by seed, one a seed.
        repeats: older runs of a seed that a newer one replaced.
        plain: its strategy and the hyper-parameters that were given; what the label begins with.
    """

    label: str
    runs: list[Run]
    repeats: list[Run] = dataclasses.field(default_factory=list)
    plain: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.plain = self.label

    @property
    def seeds(self) -> list[int]:
        """The seeds, ascending."""
        return [run.seed for run in self.runs]

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self.runs[0].strategy

    @property
    def name(self) -> str:
        """The label, marked if a run of the group is not finished."""
        return self.label + ("" if all(run.finished for run in self.runs) else " *")

    @functools.cached_property
    def setting(self) -> dict[str, Any]:
        """What all of its runs share, strategy and hyper-parameters aside; see `setting_of`."""
        return setting_of(self.runs[0])

    @functools.cached_property
    def conditions(self) -> str:
        """The same without `OPTIONS`, as one text."""
        return _key({key: value for key, value in self.setting.items() if key not in OPTIONS})


def setting_of(run: Run) -> dict[str, Any]:
    """What a run was made under but for strategy, hyper-parameters and seed, flat: `lr`, `cluster.link.latency_s`, ...

    Left out is what cannot matter: where the data lay, whether they were fetched, the words that describe a profile.
    """
    record = run.record
    config = {key: value for key, value in traces.config_of(record).items() if key not in _CANNOT_MATTER}
    profile = record.get("cluster") or {}
    cluster = {key: value for key, value in profile.items() if key not in {"name", "description"}}
    return {
        "clock": run.clock,
        **_flat(config),
        "device": record.get("device"),
        "curve": bool((record.get("transport") or {}).get("curve")),
        "data": (record.get("data") or {}).get("sha256"),
        "model_layout": (record.get("model") or {}).get("fingerprint"),
        **_flat(cluster, "cluster."),
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return flat


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs that differ in the seed alone, in the order of strategy, hyper-parameters and setting.

    Of several runs of one group with the same seed the newest is kept; the others are its `repeats`. Groups of the
    same strategy and hyper-parameters get in their labels what they differ in.
    """
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        key = _key({"strategy": run.strategy, "hyper": run.hyper_parameters, "setting": setting_of(run)})
        by_key.setdefault(key, []).append(run)
    groups = sorted((_group(members) for members in by_key.values()), key=_order)
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        by_label.setdefault(group.label, []).append(group)
    for same in by_label.values():
        if len(same) > 1:
            _tell_apart(same)
    return groups


def _plain_values(value: Any) -> Any:
    """The same with 1 for 1.0, and without what is None: a version that does not know a key means that."""
    if isinstance(value, dict):
        return {key: _plain_values(inner) for key, inner in value.items() if inner is not None}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _group(members: list[Run]) -> Group:
    by_seed: dict[int, list[Run]] = {}
    for run in sorted(members, key=lambda run: (str(run.record.get("started_at") or ""), run.name)):
        by_seed.setdefault(run.seed, []).append(run)
    kept = [by_seed[seed][-1] for seed in sorted(by_seed)]
    repeats = [run for seed in sorted(by_seed) for run in by_seed[seed][:-1]]
    # One run may have been given a value that is the default of another.
    return Group(min((run.label for run in members), key=lambda label: (len(label), label)), kept, repeats)


def _order(group: Group) -> tuple[Any, ...]:
    values = {**group.runs[0].hyper_parameters, **group.setting}
    return (group.strategy, [(key, *_sortable(values[key])) for key in values])


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (0, 0.0, "") if value is None else (2, 0.0, str(value))


def _tell_apart(same: list[Group]) -> None:
    facts = [{**group.runs[0].hyper_parameters, **named_setting(group.runs[0])} for group in same]
    keys = differing(facts)
    for group, fact in zip(same, facts, strict=True):
        group.label = " ".join([group.label, *label_words(fact, keys)])


def label_words(facts: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """What is behind the name of a group: some of its conditions, each as in "workers=4"."""
    return [f"{_SHORT.get(key, key)}={value_text(facts.get(key))}" for key in keys]


def named_setting(run: Run) -> dict[str, Any]:
    """What `setting_of` gives, and the name of the cluster profile."""
    return {**setting_of(run), "cluster": (run.record.get("cluster") or {}).get("name")}


def differing(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that have more than one value; of cluster profiles the name alone, if it says it all."""
    values: dict[str, set[str]] = {}
    for fact in facts:
        for key in fact:
            values.setdefault(key, set())
    for key, seen in values.items():
        seen.update(value_text(fact.get(key)) for fact in facts)
    keys = [key for key, seen in values.items() if len(seen) > 1]
    inner = [key for key in keys if key.startswith("cluster.")]
    names = {value_text(fact.get("cluster")) for fact in facts}
    pairs = {(value_text(fact.get("cluster")), *(value_text(fact.get(key)) for key in inner)) for fact in facts}
    contents = {pair[1:] for pair in pairs}
    by_name = len(names) == len(pairs) == len(contents)
    return [key for key in keys if key not in (inner if by_name else ["cluster"])]


def value_text(value: Any) -> str:
    """The value of a condition in few letters."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:8]
    return "none" if value is None else str(value)


def read_frame(folder: Path, name: traces.TraceName, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """The rows of a trace as `traces.read_trace` gives them, several times as fast where the file is sound.

    Args:
        folder: the run folder.
        name: the file's name without `.csv`.
        columns: only these, or all of them.

    Raises:
        DamagedFileError: as `traces.read_trace`. Cells of columns that are not asked for are not parsed.
    """
    frame = _read_sound(folder / f"{name}.csv", name, columns)
    if frame is None:
        # The careful reader decides what is torn and what is damage, and finds the row.
        frame = traces.read_trace(folder, name)
    return frame.select(columns) if columns is not None else frame


def _read_sound(path: Path, name: traces.TraceName, columns: Sequence[str] | None) -> pl.DataFrame | None:
    """A file without quotes in which every row is whole and every cell of its type, else None."""
    import polars as pl  # noqa: PLC0415 - who only asks for help does without it

    try:
        data = path.read_bytes()
    except OSError:
        return None
    header = data[: data.find(b"\n") + 1]
    names = header[:-1].decode("utf-8", "replace").split(",")
    standard = [column.name for column in traces.TRACES[name]]
    own = names[len(standard) :]
    if not header or names[: len(standard)] != standard or (own and name != "pushes") or len({*names}) < len(names):
        return None
    # Polars refuses a row that is too long, and fills up one that is too short: then commas are missing.
    sound = data.endswith(b"\n") and b'"' not in data
    if not sound or data.count(b",") != data.count(b"\n") * (len(names) - 1):
        return None
    kinds = {column.name: getattr(pl, column.dtype) for column in traces.TRACES[name]} | dict.fromkeys(own, pl.String)
    try:
        frame = pl.read_csv(data, schema=kinds, columns=None if columns is None else list(columns))
    except (pl.exceptions.PolarsError, ValueError):
        return None
    return frame.with_columns(_number_or_text(frame[column]) for column in frame.columns if column in own)


def _number_or_text(texts: pl.Series) -> pl.Series:
    import polars as pl  # noqa: PLC0415

    numbers = texts.cast(pl.Float64, strict=False)
    return texts if (numbers.is_null() & texts.is_not_null()).any() else numbers


# --- figures of one run


class Reached(NamedTuple):
    """When a run reached an accuracy, in seconds since its start.

    `censored`: it did not, up to its last evaluation; `seconds` is the time of that one, so the true time is above it.
    """

    seconds: float
    censored: bool


def curve(run: Run) -> tuple[list[float], list[float]]:
    """Seconds and test accuracy of every evaluation of a run, in order of time."""
    frame = run.evals.select("t_s", "accuracy").drop_nulls().drop_nans().sort("t_s", maintain_order=True)
    return frame["t_s"].to_list(), frame["accuracy"].to_list()


def time_to(run: Run, target: float) -> Reached:
    """When `run` reached the test accuracy `target`, a fraction.

    That is on the straight line from the evaluation before the first one at or above the target to that one. A run
    without evaluations is censored at 0 s.
    """
    seconds, accuracy = curve(run)
    first = next((i for i, value in enumerate(accuracy) if value >= target), None)
    if first is None:
        return Reached(seconds[-1] if seconds else 0.0, censored=True)
    if first == 0:
        return Reached(seconds[0], censored=False)
    share = (target - accuracy[first - 1]) / (accuracy[first] - accuracy[first - 1])
    before, after = seconds[first - 1], seconds[first]
    return Reached(min(max(before, before + share * (after - before)), after), censored=False)


def best_accuracy(run: Run) -> float | None:
    """Greatest test accuracy of any evaluation; None if there is no evaluation."""
    return max(curve(run)[1], default=None)


def bytes_over_time(run: Run) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds since the start, and the bytes that the server had received and sent by then, shapes (n,) each.

    These are its samples and, if they end before the run did, what the run ended with.
    """
    import numpy as np  # noqa: PLC0415

    t_s = run.server["t_s"].to_numpy()
    n_bytes = (run.server["rx_bytes"] + run.server["tx_bytes"]).to_numpy()
    totals, end_s = run.record.get("totals") or {}, run.summary.get("seconds")
    if end_s is not None and "rx_bytes" in totals and (not len(t_s) or end_s > t_s[-1]):
        t_s = np.append(t_s, end_s)
        n_bytes = np.append(n_bytes, totals["rx_bytes"] + totals["tx_bytes"])
    return t_s, n_bytes.astype(float)


def bytes_by(run: Run, seconds: float) -> float | None:
    """Bytes that the server had received and sent `seconds` after the start, interpolated between its samples.

    Before the first sample it is the first, after the last one what the run ended with. None without samples.
    """
    import numpy as np  # noqa: PLC0415

    t_s, n_bytes = bytes_over_time(run)
    return float(np.interp(seconds, t_s, n_bytes)) if len(t_s) else None


def server_cpu_by(run: Run, seconds: float) -> float | None:
    """CPU seconds of the server's process up to `seconds` after the start, interpolated between its samples.

    What it had used before the start is not in them: that is the last sample less the total of run.json, or what the
    first sample says in a run without one. After the last sample it is what the run ended with. None without samples.
    """
    import numpy as np  # noqa: PLC0415

    t_s, cpu_s = (run.server[name].to_numpy().astype(float) for name in ("t_s", "cpu_s"))
    if not len(t_s):
        return None
    total, end_s = (run.record.get("totals") or {}).get("server_cpu_s"), run.summary.get("seconds")
    before = float(cpu_s[0])
    if total is not None and end_s is not None:
        if end_s <= t_s[-1]:
            before = float(np.interp(end_s, t_s, cpu_s)) - total
        else:
            t_s, cpu_s = np.append(t_s, end_s), np.append(cpu_s, total + before)
    return float(np.interp(seconds, np.append(0.0, t_s), np.append(0.0, np.maximum(cpu_s - before, 0))))


WINDOW_S = 1.0
"""Least length of the window over which a peak rate is taken, seconds."""


def peak_gbit_per_s(run: Run) -> float | None:
    """Greatest rate of the server's link in one direction over `WINDOW_S`, or over what lies between two samples.

    A run that is shorter than the window is taken as a whole. None with fewer than two samples.
    """
    import numpy as np  # noqa: PLC0415

    t_s = run.server["t_s"].to_numpy()
    if len(t_s) < 2 or t_s[-1] <= t_s[0]:  # noqa: PLR2004 - a rate needs two samples
        return None
    begin = np.searchsorted(t_s, t_s - WINDOW_S, side="right") - 1
    (end,) = np.nonzero(begin >= 0)
    begin = begin[end]
    if not len(end):
        begin, end = np.array([0]), np.array([len(t_s) - 1])
    seconds = t_s[end] - t_s[begin]
    totals = (run.server[name].to_numpy() for name in ("rx_bytes", "tx_bytes"))
    return 8e-9 * float(max(((total[end] - total[begin]) / seconds).max() for total in totals))


def _mean_gbit_per_s(run: Run) -> float | None:
    rates = [run.summary.get("gbit_per_s_in"), run.summary.get("gbit_per_s_out")]
    known = [rate for rate in rates if rate is not None]
    if known:
        return float(max(known))
    if run.server.is_empty() or run.server["t_s"][-1] <= 0:
        return None
    t_s, rx_bytes, tx_bytes, _ = run.server.row(-1)
    return 8e-9 * float(max(rx_bytes, tx_bytes)) / float(t_s)


def _cpu_percent(run: Run) -> float | None:
    if (percent := run.summary.get("server_cpu_percent")) is not None:
        return float(percent)
    if len(run.server) < 2:  # noqa: PLR2004 - a rate needs two samples
        return None
    (first_s, *_, first_cpu_s), (last_s, *_, last_cpu_s) = run.server.row(0), run.server.row(-1)
    # What the process had used before the start is in both samples.
    return 100 * (last_cpu_s - first_cpu_s) / (last_s - first_s) if last_s > first_s else None


def _samples_per_s(run: Run) -> float | None:
    if (rate := run.summary.get("samples_per_s")) is not None:
        return float(rate)
    if run.evals.is_empty() or run.evals["t_s"][-1] <= 0:
        return None
    return float(run.evals["samples"][-1] / run.evals["t_s"][-1])


def _mean_interval(run: Run) -> float | None:
    if (steps := run.summary.get("mean_interval")) is not None:
        return float(steps)
    return _mean(read_frame(run.folder, "pushes", ["n_steps"])["n_steps"])


def _mean(column: pl.Series) -> float | None:
    numbers = column.drop_nulls()
    return None if numbers.is_empty() else float(numbers.sum()) / len(numbers)


# --- the statistics of several runs

Bound: TypeAlias = Literal["", ">", "<", "?"]
"""Whether a figure is the value itself, below the true one, above it, or says nothing of it."""

LEAST_SEEDS = 3
"""With fewer values no interval is given."""

_RESAMPLES = 9999
_FLIPPED: Mapping[Bound, Bound] = {"": "", ">": "<", "<": ">", "?": "?"}


class Estimate(NamedTuple):
    """A figure of a group.

    Attributes:
        value: mean over the seeds, or geometric mean of ratios; None: it cannot be told.
        low: lower end of the 95 % confidence interval; None with fewer than `LEAST_SEEDS` seeds or with a bound.
        high: its upper end.
        n: number of seeds behind it.
        bound: ">" if the true value is above `value`, "<" if it is below.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    bound: Bound = ""


def interval(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its 95 % bootstrap interval, bias-corrected and accelerated (BCa).

    The resampling is seeded: the same values give the same interval. Values that are all equal give [x, x], and where
    BCa has no answer because all resamples lie on one side, the percentiles of the resampling are taken.
    """
    if not values:
        return Estimate(None)
    mean = values[0] if min(values) == max(values) else math.fsum(values) / len(values)
    if len(values) < LEAST_SEEDS:
        return Estimate(mean, n=len(values))
    if max(values) - min(values) <= 1e-12 * max(map(abs, values)):
        return Estimate(mean, mean, mean, len(values))
    low, high = _bootstrap(tuple(values))
    return Estimate(mean, low, high, len(values))


@functools.cache
def _bootstrap(values: tuple[float, ...]) -> tuple[float, float]:
    import warnings  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415
    from scipy import stats  # noqa: PLC0415 - it takes as long to import as everything else together

    ends = (math.nan, math.nan)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that the data are degenerate, and gives NaN
            done = stats.bootstrap(
                (np.asarray(values),),
                np.mean,
                n_resamples=_RESAMPLES,
                method=method,
                rng=np.random.default_rng(0),
            )
        ends = (float(done.confidence_interval.low), float(done.confidence_interval.high))
        if math.isfinite(ends[0]) and math.isfinite(ends[1]):
            break
    return ends


def ratio_interval(a_by_seed: Mapping[int, float], b_by_seed: Mapping[int, float]) -> Estimate:
    """Geometric mean of a / b over the seeds that both have, and its 95 % interval.

    The interval is that of the mean logarithm, see `interval`. A seed whose b is 0 has no ratio; a ratio of 0 makes the
    mean 0 and leaves it without an interval.
    """
    common = sorted(a_by_seed.keys() & b_by_seed.keys())
    ratios = [a_by_seed[seed] / b_by_seed[seed] for seed in common if b_by_seed[seed] != 0]
    if not ratios:
        return Estimate(None)
    if min(ratios) <= 0:
        return Estimate(0.0, n=len(ratios))
    logs = interval([math.log(ratio) for ratio in ratios])
    return Estimate(_exp(logs.value), _exp(logs.low), _exp(logs.high), logs.n)


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


class Average(NamedTuple):
    """Curves on a common grid.

    Attributes:
        x: points of the grid that every curve covers, shape (k,).
        mean: mean of the curves there, shape (k,).
        values: each curve there, shape (curves, k).
    """

    x: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


def average(curves: Sequence[tuple[Sequence[float], Sequence[float]]], grid: Sequence[float]) -> Average:
    """Average curves of unequal length, each interpolated linearly on `grid`.

    Only the points are kept that all curves cover: from where the last one begins to where the shortest ends. Beyond
    that the mean would be of other runs than before.

    Args:
        curves: x, ascending, and y of each; one without points leaves no common part.
        grid: points to interpolate at, ascending.
    """
    import numpy as np  # noqa: PLC0415

    points = np.asarray(grid, dtype=float)
    begin = max((x[0] if len(x) else math.inf for x, _ in curves), default=math.inf)
    end = min((x[-1] if len(x) else -math.inf for x, _ in curves), default=-math.inf)
    points = points[(points >= begin) & (points <= end)]
    if not len(points):
        return Average(points, points, np.empty((len(curves), 0)))
    values = np.stack([np.interp(points, x, y) for x, y in curves])
    return Average(points, values.mean(axis=0), values)


class Target(NamedTuple):
    """An accuracy, a fraction, and how it was chosen, for the reader."""

    accuracy: float
    rule: str


class Asked(NamedTuple):
    """What the suite says of a run that lies in its folder.

    Attributes:
        suite: name of the suite.
        place: which of its runs it is, from 0.
        target: the accuracy that times are to, a fraction, if it says one.
    """

    suite: str
    place: int
    target: float | None


def asked_by_suites(runs: Iterable[Run]) -> dict[Run, Asked]:
    """What suite.json in the folder above says of each run; runs that are in none are left out."""
    suites: dict[Path, dict[str, Asked]] = {}
    found = {}
    for run in runs:
        folder = run.folder.resolve().parent
        if folder not in suites:
            suites[folder] = _cells_of(folder)
        if run.name in suites[folder]:
            found[run] = suites[folder][run.name]
    return found


def _cells_of(folder: Path) -> dict[str, Asked]:
    try:
        suite = json.loads((folder / "suite.json").read_bytes())
        cells = list(suite.get("cells") or [])
        targets = [value if isinstance(value := one.get("target"), float) and 0 < value <= 1 else None for one in cells]
        name = str(suite.get("suite", folder.name))
        return {one["name"]: Asked(name, i, target) for i, (one, target) in enumerate(zip(cells, targets, strict=True))}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}  # the runs say all that is needed


def suite_view(groups: Sequence[Group]) -> dict[str, str]:
    """How the one suite that all runs are of wants them compared: its `baseline` and `pivot`, as far as it says any.

    A baseline of which not all groups are among these is left out.
    """
    runs = [run for group in groups for run in group.runs]
    folders = {run.folder.resolve().parent for run in runs}
    asked = asked_by_suites(runs)
    if len(folders) != 1 or not all(run in asked for run in runs):
        return {}
    view = json.loads((folders.pop() / "suite.json").read_bytes()).get("compare")
    found = {key: value for key, value in view.items() if isinstance(value, str)} if isinstance(view, dict) else {}
    if "baseline" in found:
        try:
            named_baselines(groups, found["baseline"])
        except UserError:
            del found["baseline"]
    return found


def suite_target(groups: Sequence[Group]) -> Target | None:
    """The target that the suite says, if it says the same one of every run."""
    runs = [run for group in groups for run in group.runs]
    asked = asked_by_suites(runs)
    targets = {asked[run].target if run in asked else None for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    if target is None:
        return None
    return Target(target, f"set by the suite {' and '.join(sorted({one.suite for one in asked.values()}))}")


def default_target(groups: Sequence[Group]) -> Target:
    """The target of the suite that all runs are of, see `suite_target`, or what every run reached.

    That is the greatest accuracy, in steps of half a percentage point, that every run reached which was evaluated.

    Raises:
        UserError: no run was evaluated, or one did not reach even half a point.
    """
    if (target := suite_target(groups)) is not None:
        return target
    best = [(value, run) for group in groups for run in group.runs if (value := best_accuracy(run)) is not None]
    if not best:
        raise UserError("none of the runs was evaluated, so there is no accuracy to compare; train for longer")
    least, run = min(best, key=lambda pair: pair[0])
    accuracy = math.floor(least * 200 + 1e-9) / 200
    if accuracy <= 0:
        raise UserError(f"{run.folder} got no further than {least:.2%}; leave it out, or give --target")
    return Target(
        accuracy, f"the most, in steps of half a point, that every run reached; set by {run.label} seed {run.seed}"
    )


def check_target(groups: Sequence[Group], target: float) -> None:
    """Refuse a target that no run reached.

    Raises:
        UserError: lists the best accuracy of each group.
    """
    best = {
        group.label: max((value for run in group.runs if (value := best_accuracy(run)) is not None), default=0.0)
        for group in groups
    }
    if max(best.values()) < target:
        tops = ", ".join(f"{label} {value:.2%}" for label, value in best.items())
        raise UserError(f"--target {target:g}: no run reached {target:.2%}; best: {tops}")


# --- metrics


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column of the comparison.

    Attributes:
        key: its name in CSV and JSON, with its unit.
        header: its name for people; the unit stands behind it.
        unit: as shown to people; empty for a bare number.
        scale: factor from the value to what is shown to people.
        better: whether less or more of it is better.
        of: the figure of a run, given the target.
        relative_to: the metric whose ratio to the baseline this is.
        inverse: of a relative one: baseline over group (a speed-up), else 100 (1 - group over baseline) (a reduction).
    """

    key: str
    header: str
    unit: str = ""
    scale: float = 1.0
    better: Literal["less", "more"] = "less"
    of: Callable[[Run, float], tuple[float | None, Bound]] | None = None
    relative_to: str | None = None
    inverse: bool = False


def _plain(figure: Callable[[Run], float | None]) -> Callable[[Run, float], tuple[float | None, Bound]]:
    return lambda run, _target: (figure(run), "")


def _time(run: Run, target: float) -> tuple[float | None, Bound]:
    reached = time_to(run, target)
    return reached.seconds, ">" if reached.censored else ""


def _bytes(run: Run, target: float) -> tuple[float | None, Bound]:
    reached = time_to(run, target)
    return bytes_by(run, reached.seconds), ">" if reached.censored else ""


def _server_cpu(run: Run, target: float) -> tuple[float | None, Bound]:
    reached = time_to(run, target)
    return server_cpu_by(run, reached.seconds), ">" if reached.censored else ""


def _final(run: Run) -> float | None:
    accuracy = curve(run)[1]
    return accuracy[-1] if accuracy else None


def _final_loss(run: Run, _target: float) -> tuple[float | None, Bound]:
    """That of the last evaluation; of a run that diverged all that is known is that it is above the last number."""
    losses = run.evals.sort("t_s", maintain_order=True)["loss"].drop_nulls()
    if losses.is_empty():
        return None, ""
    numbers = losses.filter(losses.is_finite())
    bound: Bound = "" if math.isfinite(losses[-1]) else ">"
    return (float(numbers[-1]) if len(numbers) else None), bound


def _worst_class(run: Run) -> float | None:
    known = run.evals.sort("t_s", maintain_order=True)["worst_class"].drop_nulls()
    return None if known.is_empty() else float(known[-1])


def _stale(place: int) -> Callable[[Run, float], tuple[float | None, Bound]]:
    return _plain(lambda run: None if (both := run.staleness) is None else both[place])


def _reduction(of: str, header: str, key: str) -> Metric:
    return Metric(key, header, "%", better="more", relative_to=of)


METRICS: Mapping[str, Metric] = {
    "time": Metric("time_s", "time to target", "s", of=_time),
    "speedup": Metric("speedup", "speed-up", "x", better="more", relative_to="time", inverse=True),
    "accuracy": Metric("accuracy", "final accuracy", "%", 100, "more", _plain(_final)),
    "best": Metric("best_accuracy", "best accuracy", "%", 100, "more", _plain(best_accuracy)),
    "worst-class": Metric("worst_class_accuracy", "worst class", "%", 100, "more", _plain(_worst_class)),
    "loss": Metric("final_loss", "final loss", of=_final_loss),
    "throughput": Metric("samples_per_s", "throughput", "samples/s", better="more", of=_plain(_samples_per_s)),
    "cpu": Metric("server_cpu_percent", "server CPU", "%", of=_plain(_cpu_percent)),
    "cpu-reduction": _reduction("cpu", "server CPU saved", "server_cpu_reduction_percent"),
    "cpu-time": Metric("server_cpu_s_to_target", "server CPU to target", "s", of=_server_cpu),
    "cpu-time-reduction": _reduction("cpu-time", "CPU time saved", "server_cpu_s_to_target_reduction_percent"),
    "bandwidth": Metric("gbit_per_s", "bandwidth", "Gbit/s", of=_plain(_mean_gbit_per_s)),
    "bandwidth-reduction": _reduction("bandwidth", "bandwidth saved", "gbit_per_s_reduction_percent"),
    "peak": Metric("peak_gbit_per_s", "peak bandwidth", "Gbit/s", of=_plain(peak_gbit_per_s)),
    "peak-reduction": _reduction("peak", "peak saved", "peak_gbit_per_s_reduction_percent"),
    "bytes": Metric("bytes_to_target", "bytes to target", "MB", 1e-6, of=_bytes),
    "interval": Metric("mean_interval_steps", "mean interval", "steps", better="more", of=_plain(_mean_interval)),
    "staleness": Metric("mean_staleness", "mean staleness", of=_stale(0)),
    "staleness-p99": Metric("p99_staleness", "p99 staleness", of=_stale(1)),
    "seeds": Metric("seeds", "seeds", better="more"),
}
"""Every metric by the name that the command line takes."""


class Row(NamedTuple):
    """A group and its figures by name of the metric.

    Attributes:
        group: the group.
        cells: its figures.
        target: the accuracy that its times are to, a fraction.
        baseline: the group that its ratios are to, if there is one.
    """

    group: Group
    cells: dict[str, Estimate]
    target: float
    baseline: Group | None


Targets: TypeAlias = "float | Mapping[str, float]"
"""The accuracy that times are to, a fraction; or that of every group by its label."""


def _target_of(group: Group, targets: Targets) -> float:
    return targets if isinstance(targets, float | int) else targets[group.label]


def named_baselines(groups: Sequence[Group], name: str) -> list[Group]:
    """The groups that `--baseline name` means: those of a label, of its plain part, or of a strategy, in this order.

    Several names stand with commas between them.

    Raises:
        UserError: there is no such group.
    """

    def called(one: str) -> list[Group]:
        ways = ([group for group in groups if one == own(group)] for own in _NAMES)
        return next(filter(None, ways), [])

    if whole := called(name):
        return whole
    found: list[Group] = []
    for one in (part.strip() for part in name.split(",")):
        if not (same := called(one)):
            plain = ", ".join(dict.fromkeys(group.plain for group in groups))
            raise UserError(f"--baseline {one}: there is no such group; there are: {plain}")
        found += [group for group in same if group not in found]
    return found


_NAMES: Sequence[Callable[[Group], str]] = (
    lambda group: group.label,
    lambda group: group.plain,
    lambda group: group.strategy,
)


def baselines(groups: Sequence[Group], name: str, target: Targets, *, unlike: bool = False) -> dict[str, Group]:
    """Which group each group is compared with: label -> baseline.

    If `name` means one group (`named_baselines`), that is it. Of several, a group is compared with the one that ran in
    its own setting; `OPTIONS` may be a strategy's own, so of each strategy those are taken whose options are nearest.
    Where that leaves several, it is the fastest: the one of the least mean time to the target. One that reached it with
    every seed goes before one that did not. If none did, it is not known which is the fastest; then it is the one with
    the least geometric mean of the times that it took at least, so that what bounds a ratio to it from below bounds
    the ratio to the fastest.

    A group without a baseline is left out; so are those whose target or, but for `unlike`, data, model or clock are not
    those of the one group.

    Raises:
        UserError: there is no such group.
    """
    named = named_baselines(groups, name)
    if len(named) == 1:
        (base,) = named
        alike = [group for group in groups if unlike or _workload(group) == _workload(base)]
        return {group.label: base for group in alike if _target_of(group, target) == _target_of(base, target)}
    candidates = {group.label: _in_the_setting_of(group, named) for group in groups}
    return {label: _fastest(there, target) for label, there in candidates.items() if there}


def _workload(group: Group) -> list[Any]:
    return [group.setting[key] for key in _REFUSING]


def _in_the_setting_of(group: Group, named: Iterable[Group]) -> list[Group]:
    """Those that ran in the same setting but for `OPTIONS`; of each strategy those with the nearest options."""
    by_strategy: dict[str, list[Group]] = {}
    for base in named:
        if base.conditions == group.conditions:
            by_strategy.setdefault(_key([base.strategy, base.runs[0].hyper_parameters]), []).append(base)
    found = []
    for same in by_strategy.values():
        alike = [tuple(base.setting.get(key) == group.setting.get(key) for key in OPTIONS) for base in same]
        found += [base for base, one in zip(same, alike, strict=True) if one == max(alike)]
    return found


def _key(value: Any) -> str:
    return json.dumps(_plain_values(value), sort_keys=True, default=str)


def _fastest(groups: Sequence[Group], target: Targets) -> Group:
    def rank(group: Group) -> tuple[bool, float]:
        times = _by_seed(group, METRICS["time"], _target_of(group, target)).values()
        seconds = [value for value, _ in times]
        if not any(bound for _, bound in times):
            return (False, math.fsum(seconds) / len(seconds))
        return (True, math.prod(value ** (1 / len(seconds)) for value in seconds))

    return min(groups, key=rank) if len(groups) > 1 else groups[0]


def table(
    groups: Sequence[Group],
    target: Targets,
    baseline: str | None = "bsp",
    metrics: Iterable[str] = METRICS,
    *,
    unlike: bool = False,
) -> list[Row]:
    """The figures of every group.

    Args:
        groups: from `group_runs`.
        target: test accuracy, a fraction, of all or of each.
        baseline: what ratios are to, see `baselines`; None: no ratios.
        metrics: which figures, names of `METRICS`.
        unlike: the baseline may have other data, another model or another clock.

    Raises:
        UserError: there is no such baseline.
        DamagedFileError: a trace that is needed is damaged.
    """
    bases = baselines(groups, baseline, target, unlike=unlike) if baseline is not None else {}
    found: dict[tuple[str, str], dict[int, tuple[float, Bound]]] = {}

    def values(group: Group, name: str) -> dict[int, tuple[float, Bound]]:
        if (group.label, name) not in found:
            found[group.label, name] = _by_seed(group, METRICS[name], _target_of(group, target))
        return found[group.label, name]

    def estimate(group: Group, name: str) -> Estimate:
        metric = METRICS[name]
        if name == "seeds":
            return Estimate(float(len(group.runs)), n=len(group.runs))
        if metric.relative_to is None:
            return _mean_of(list(values(group, name).values()))
        if group.label not in bases:
            return Estimate(None)
        return _relative(metric, values(group, metric.relative_to), values(bases[group.label], metric.relative_to))

    names = list(metrics)
    return [
        Row(
            group,
            {name: estimate(group, name) for name in names},
            _target_of(group, target),
            bases.get(group.label),
        )
        for group in groups
    ]


def _by_seed(group: Group, metric: Metric, target: float) -> dict[int, tuple[float, Bound]]:
    assert metric.of is not None  # noqa: S101 - only a relative metric has none
    figures = {run.seed: metric.of(run, target) for run in group.runs}
    return {seed: (value, bound) for seed, (value, bound) in figures.items() if value is not None}


def _mean_of(figures: list[tuple[float, Bound]]) -> Estimate:
    values = [value for value, _ in figures]
    bound = _joint({bound for _, bound in figures})
    # With a value that is only known to be greater, the mean is only known to be greater, and so would be its interval.
    return interval(values) if not bound else Estimate(math.fsum(values) / len(values), n=len(values), bound=bound)


def _joint(bounds: set[Bound]) -> Bound:
    real = bounds - {""}
    if not real:
        return ""
    return real.pop() if len(real) == 1 else "?"


def _relative(metric: Metric, own: dict[int, tuple[float, Bound]], base: dict[int, tuple[float, Bound]]) -> Estimate:
    if own is base:
        return Estimate(1.0 if metric.inverse else 0.0, n=len(own))
    over, under = (base, own) if metric.inverse else (own, base)
    common = sorted(over.keys() & under.keys())
    bound = _joint({_bound_of_ratio(over[seed][1], under[seed][1]) for seed in common})
    # Of a divisor that is only known to be above 0 nothing follows.
    if bound == "?" or any(under[seed] == (0.0, ">") for seed in common):
        return Estimate(None, n=len(common), bound="?")
    ratio = ratio_interval({seed: over[seed][0] for seed in common}, {seed: under[seed][0] for seed in common})
    if bound:
        ratio = ratio._replace(low=None, high=None, bound=bound)
    if metric.inverse or ratio.value is None:
        return ratio
    low, high = (None if end is None else 100 * (1 - end) for end in (ratio.high, ratio.low))
    return Estimate(100 * (1 - ratio.value), low, high, ratio.n)


def _bound_of_ratio(over: Bound, under: Bound) -> Bound:
    if over and under:
        return "?"
    return over or _FLIPPED[under]


# --- fairness


_MOST_NAMED = 6


class Difference(NamedTuple):
    """A condition that was not the same for all runs.

    Attributes:
        field: what it is.
        values: its values -> labels of the groups that had them.
        refuses: it makes the figures incomparable.
    """

    field: str
    values: dict[str, list[str]]
    refuses: bool

    def __str__(self) -> str:
        """One line, as in "lr differs: 0.1 (bsp, asp), 0.2 (sapus)"."""
        parts = (
            f"{value} ({', '.join(labels) if len(labels) <= _MOST_NAMED else f'{len(labels)} groups'})"
            for value, labels in self.values.items()
        )
        return f"{self.field} differs: {', '.join(parts)}"


_REFUSING = {"clock": "clock", "data": "data set", "model_layout": "model"}
_TITLES = {"batch_size": "batch size", "cluster": "cluster profile"}


def fairness(groups: Sequence[Group]) -> list[Difference]:
    """What was not the same for all runs, strategy, hyper-parameters and seed aside; those that refuse come first.

    Data, model and clock refuse: accuracies on other data and seconds of another kind say nothing of each other. The
    host is left out where all time is virtual.
    """
    labels = [group.label for group in groups for _ in group.runs]
    facts = [_conditions(run) for group in groups for run in group.runs]
    virtual = all(run.clock == "virtual" for group in groups for run in group.runs)
    found: list[Difference] = []
    for key in differing(facts):
        if virtual and key.startswith("host "):
            continue
        values: dict[str, list[str]] = {}
        for label, fact in zip(labels, facts, strict=True):
            same = values.setdefault(value_text(fact.get(key)), [])
            if label not in same:
                same.append(label)
        title = _REFUSING.get(key) or _TITLES.get(key, key)
        found.append(Difference(title, values, key in _REFUSING))
    return sorted(found, key=lambda difference: not difference.refuses)


def _conditions(run: Run) -> dict[str, Any]:
    record = run.record
    facts = named_setting(run)
    environment = record.get("environment") or {}
    host = environment.get("host") or {}
    data, model = facts.pop("dataset", None), facts.pop("model", None)
    return {
        **facts,
        "data": f"{data} {value_text(facts['data'])}",
        "model_layout": f"{model} {value_text(facts['model_layout'])}",
        "batch_size": record.get("effective_batch_size", facts.get("batch_size")),
        "host cpu": host.get("cpu"),
        "host usable_cores": host.get("usable_cores"),
        **{f"version of {name}": version for name, version in (environment.get("versions") or {}).items()},
    }


# --- all of it


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side.

    Attributes:
        rows: one a group, the best first.
        targets: the accuracy that times are to, of each part that `compare` was to take apart; one if there was none.
        baseline: name of what ratios are to, or None.
        metrics: names of the figures in the rows.
        notes: what a reader must know, one sentence each.
        warnings: conditions that were not the same, one sentence each.
    """

    rows: list[Row]
    targets: list[Target]
    baseline: str | None
    metrics: list[str]
    notes: list[str]
    warnings: list[str]

    @property
    def target(self) -> Target:
        """The accuracy that times are to, of the first part."""
        return self.targets[0]


def compare(
    runs: Iterable[Run],
    *,
    target: float | None = None,
    baseline: str | None = None,
    metrics: Sequence[str] = tuple(METRICS),
    sort: str = "time",
    force: bool = False,
    alone: bool = False,
    split: Callable[[Sequence[Group]], Sequence[Sequence[Group]]] = lambda groups: [groups],
) -> Comparison:
    """Compare groups of runs; see `table` for the figures.

    Args:
        runs: from `load_runs`.
        target: test accuracy, a fraction; None: `default_target`.
        baseline: what ratios are to, see `baselines`; None: bsp if there is one.
        metrics: figures wanted.
        sort: metric whose best value comes first.
        force: compare what `fairness` refuses.
        alone: a single group will do; it gets no ratios.
        split: takes groups apart whose times and accuracies are not to be held against each other: what differs between
            the parts alone is no matter, and each may have its own target.

    Raises:
        UserError: there is one group only, or runs that cannot be compared, or no such target or baseline.
        DamagedFileError: a trace that is needed is damaged.
    """
    groups = group_runs(runs)
    if len(groups) == 1 and not alone:
        (group,) = groups
        raise UserError(
            f"there is one group only, {group.label} ({_counted(len(group.runs), 'seed')}), so nothing to compare; "
            f"look at one run with: sapus show {group.runs[-1].folder}"
        )
    parts = split(groups)
    differences = _differences_within(parts)
    refused = [str(difference) for difference in differences if difference.refuses]
    if refused and not force:
        raise UserError(f"the runs cannot be compared: {'; '.join(refused)}; choose runs that agree, or give --force")
    targets = _targets(parts, target)
    missing = baseline is None and not any(group.strategy == "bsp" for group in groups)
    base = None if missing else baseline or "bsp"
    if len(groups) == 1:
        base, metrics = None, [name for name in metrics if not METRICS[name].relative_to]
    names = list(dict.fromkeys([*metrics, sort]))
    own = {group.label: one.accuracy for part, one in zip(parts, targets, strict=True) for group in part}
    rows = table(groups, own, base, names, unlike=force)
    rows.sort(key=lambda row: _rank(row, sort))
    notes = [*_notes(rows), *_notes_on_ratios(rows, base, metrics)]
    return Comparison(rows, targets, base, list(metrics), notes, [str(difference) for difference in differences])


def _differences_within(parts: Sequence[Sequence[Group]]) -> list[Difference]:
    found: dict[str, Difference] = {}
    for difference in (difference for part in parts for difference in fairness(part)):
        so_far = found.setdefault(difference.field, difference._replace(values={}))
        for value, labels in difference.values.items():
            so_far.values.setdefault(value, []).extend(labels)
    return sorted(found.values(), key=lambda difference: not difference.refuses)


def _targets(parts: Sequence[Sequence[Group]], asked: float | None) -> list[Target]:
    """The target of each part. Parts of the same data and model share it, unless the suite says otherwise."""
    groups = [group for part in parts for group in part]
    if asked is not None:
        check_target(groups, asked)
        return [Target(asked, "as asked")] * len(parts)
    of_suite = [target for part in parts if (target := suite_target(part)) is not None]
    if len(of_suite) == len(parts):
        return of_suite
    if any(_workload(group) != _workload(groups[0]) for group in groups):
        return [default_target(part) for part in parts]
    return [default_target(groups)] * len(parts)


def _rank(row: Row, sort: str) -> tuple[bool, bool, float]:
    cell = row.cells[sort]
    value = 0.0 if cell.value is None else cell.value
    # What is bounded on its bad side only may be worse than anything.
    return (cell.value is None, cell.bound != "", value if METRICS[sort].better == "less" else -value)


def _notes_on_rows(runs: Sequence[Run]) -> list[str]:
    notes = []
    lacking = [(run.name, names) for run in runs if (names := traces.incomplete_traces(run.record))]
    if lacking:
        listed = ", ".join(f"{name} ({', '.join(names)})" for name, names in lacking)
        notes.append(f"rows are missing, the disk did not take them: {listed}")
    undone = [(run.name, lost) for run in runs if (lost := (run.record.get("summary") or {}).get("lost_pushes"))]
    if undone:
        listed = ", ".join(f"{name} ({lost})" for name, lost in undone)
        notes.append(f"a server was killed and pushes lost, evaluations of what they had made count: {listed}")
    return notes


def _notes_on_missed(rows: list[Row]) -> list[str]:
    missed = {row.group.label: [run for run in row.group.runs if time_to(run, row.target).censored] for row in rows}
    missed = {label: runs for label, runs in missed.items() if runs}
    if len(missed) > MOST_NAMED:
        n_runs = _counted(sum(map(len, missed.values())), "run")
        return [f"> and < are bounds: {n_runs} of {len(missed)} groups did not reach the target"]
    targets = {row.group.label: row.target for row in rows}
    notes = []
    for label, runs in missed.items():
        seeds = ", ".join(f"{run.seed} (> {time_to(run, targets[label]).seconds:.4g} s)" for run in runs)
        notes.append(f"{label}: did not reach the target with seed {seeds}; > and < are bounds")
    return notes


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    unfinished = [run for row in rows for run in row.group.runs if not run.finished]
    if unfinished:
        names = ", ".join(f"{run.name} ({run.status})" for run in unfinished)
        notes.append(f"* not finished, used up to its last row: {names}")
    notes += _notes_on_rows([run for row in rows for run in row.group.runs])
    notes += _notes_on_missed(rows)
    few: dict[int, list[str]] = {}
    for row in rows:
        if len(row.group.runs) < LEAST_SEEDS:
            few.setdefault(len(row.group.runs), []).append(row.group.label)
    notes += [f"n={n}, no interval: {', '.join(labels)}" for n, labels in sorted(few.items())]
    for row in rows:
        known = min((cell.n for cell in row.cells.values() if cell.n), default=0)
        if 0 < known < len(row.group.runs):
            n_seeds = _counted(len(row.group.runs), "seed")
            notes.append(f"{row.group.label}: some figures are of {known} of {n_seeds} only, for want of data")
    for row in rows:
        if row.group.repeats:
            names = ", ".join(run.name for run in row.group.repeats)
            notes.append(f"{row.group.label}: of several runs of a seed the newest is used, so not {names}")
    return notes


def _notes_on_ratios(rows: list[Row], baseline: str | None, metrics: Sequence[str]) -> list[str]:
    if not any(METRICS[name].relative_to for name in metrics):
        return []
    if baseline is None:
        return ["no group of the strategy bsp, so no speed-up and no reduction; choose another with --baseline"]
    notes: dict[str, list[str]] = {}
    for group, base in ((row.group, row.baseline) for row in rows):
        if base is None:
            what = f"no group of {baseline} ran in the same setting, so no speed-up and no reduction"
        elif not (common := sorted({*group.seeds} & {*base.seeds})):
            what = f"no seed in common with {base.label}, so no speed-up and no reduction"
        elif len(common) < max(len(group.seeds), len(base.seeds)):
            what = f"ratios to {base.label} over the seeds that both have: {', '.join(map(str, common))}"
        else:
            continue
        notes.setdefault(what, []).append(group.label)
    return [*choice_of(rows, baseline), *(f"{', '.join(labels)}: {what}" for what, labels in notes.items())]


def choice_of(rows: Sequence[Row], baseline: str) -> list[str]:
    """Which baselines were the fastest of several, in a sentence, and of which of them that is not known.

    Empty if there was no choice.
    """
    chosen = list(dict.fromkeys(row.baseline for row in rows if row.baseline is not None))
    if len(named_baselines([row.group for row in rows], baseline)) <= len(chosen):
        return []
    targets = {row.group.label: row.target for row in rows}
    unsure = [base.label for base in chosen if any(time_to(run, targets[base.label]).censored for run in base.runs)]
    labels = ", ".join(sorted(base.label for base in chosen))
    doubt = "need not be the fastest, as none there reached the target with every seed"
    return [
        f"baseline, the fastest of {baseline} in its setting: {labels}",
        *([f"{', '.join(sorted(unsure))}: {doubt}"] if unsure else []),
    ]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
