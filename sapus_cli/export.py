"""Runs in the formats of other tools: TensorBoard, MLflow, Weights & Biases, Parquet, and Chrome's trace events.

Only the traces are read. A tool's own package writes its format; none is imported before it is needed, and none may
call home. `docs/export.md` says what is written under which name.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import logging
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sapus_cli import analysis
from sapus_cli.errors import DamagedFileError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import polars as pl

    from sapus_cli.analysis import Run

_MICROSECOND = 1e6
_LEAST_SPAN_US = 1e-3


class Point(NamedTuple):
    """Figures at one moment of a run.

    Attributes:
        t_s: seconds since the start.
        samples: training samples behind all pushes received by then.
        values: figures by name; a NaN is what a diverged run had.
    """

    t_s: float
    samples: int
    values: dict[str, float]


def points(run: Run) -> list[Point]:
    """The figures of evaluations, pushes and resource samples of a run, in order of time.

    Raises:
        DamagedFileError: a trace is damaged.
    """
    import polars as pl  # noqa: PLC0415 - who only asks for help does without it

    evals = run.evals.sort("t_s", maintain_order=True)
    found = [
        Point(row["t_s"], row["samples"] or 0, _numbers(row, {"loss": "eval/loss", "accuracy": "eval/accuracy"}))
        for row in evals.iter_rows(named=True)
    ]
    pushes = run.pushes.sort("t_s", maintain_order=True)
    own = [name for name, dtype in zip(pushes.columns, pushes.dtypes, strict=True) if dtype == pl.Float64]
    names = {name: f"push/{name}" for name in ("staleness", "bytes_in", "bytes_out", *own) if name != "t_s"}
    received = _samples(run, pushes)
    for row, samples in zip(pushes.iter_rows(named=True), received.tolist(), strict=True):
        by_worker = _numbers(row, {"n_steps": f"interval/worker {row['worker']}"})
        found.append(Point(row["t_s"], samples, _numbers(row, names) | by_worker))
    found += _loads(run, pushes["t_s"].to_numpy(), received)
    return sorted((point for point in found if point.values), key=lambda point: point.t_s)


def _loads(run: Run, received_s: npt.NDArray[np.float64], received: npt.NDArray[np.int64]) -> Iterator[Point]:
    figures = ("cpu_s", "cpu_percent", "rss_bytes", "rx_bytes", "tx_bytes", "gpu_percent", "gpu_mem_bytes")
    resources = run.resources.sort("t_s", maintain_order=True)
    places = received_s.searchsorted(resources["t_s"].to_numpy(), side="right")
    for row, place in zip(resources.iter_rows(named=True), places.tolist(), strict=True):
        who = f"worker {row['rank']}" if row["role"] == "worker" else row["role"]
        names = {figure: f"{who}/{figure}" for figure in figures}
        yield Point(row["t_s"], int(received[place - 1]) if place else 0, _numbers(row, names))


def _numbers(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    return {name: float(row[column]) for column, name in names.items() if row[column] is not None}


def _samples(run: Run, pushes: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Training samples behind the pushes up to each, in order of receipt.

    No trace has them: it is the local steps times the samples of a step, which is the mean of the run where its
    totals are known, else the size of a minibatch.
    """
    import numpy as np  # noqa: PLC0415

    totals = run.record.get("totals") or {}
    per_step = float(run.record.get("effective_batch_size") or run.record["config"].get("batch_size") or 1)
    if totals.get("steps") and totals.get("samples"):
        per_step = totals["samples"] / totals["steps"]
    steps = np.cumsum(pushes["n_steps"].fill_null(0).to_numpy())
    return np.round(steps * per_step).astype(np.int64)


def conditions(run: Run) -> dict[str, str | int | float | bool]:
    """What a run was asked, flat: strategy, seed, hyper-parameters under `param.`, and `analysis.setting_of`."""
    hyper = {f"param.{key}": value for key, value in run.hyper_parameters.items()}
    flat = {"strategy": run.strategy, "seed": run.seed, **hyper, **analysis.setting_of(run)}
    known = {key: value for key, value in flat.items() if value is not None}
    return {key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in known.items()}


def _summary(run: Run) -> dict[str, float]:
    return {key: float(value) for key, value in run.summary.items() if isinstance(value, int | float)}


def _started(run: Run) -> float:
    """When the run began, seconds since 1970; `t_s` is added to it."""
    try:
        return dt.datetime.fromisoformat(run.record["started_at"]).timestamp()
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{run.folder / 'run.json'}: has no valid 'started_at'") from error


# --- the formats: each has the places that it will write, and writes one run


def _tensorboard(run: Run, folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    started = _started(run)
    with _whole(folder) as place:
        writer = EventFileWriter(str(place))
        asked = hparams_pb(conditions(run), trial_id=run.name, start_time_secs=started)
        writer.add_event(Event(wall_time=started, summary=asked))
        for point in points(run):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            summary = Summary(value=values)
            writer.add_event(Event(wall_time=started + point.t_s, step=point.samples, summary=summary))
        writer.close()


def _mlflow(run: Run, folder: Path) -> None:
    started = _started(run)
    client, experiment = _mlflow_experiment(folder)
    from mlflow.entities import Metric, Param  # noqa: PLC0415 - after the environment has been set

    found = points(run)
    end_s, end_samples = (found[-1].t_s, found[-1].samples) if found else (0.0, 0)
    ended = round(1000 * (started + end_s))
    metrics = [
        Metric(_mlflow_name(name), value, round(1000 * (started + point.t_s)), point.samples)
        for point in found
        for name, value in point.values.items()
    ]
    metrics += [Metric(f"summary/{name}", value, ended, end_samples) for name, value in _summary(run).items()]
    params = [Param(_mlflow_name(key), str(value)) for key, value in conditions(run).items()]
    tags = {_MLFLOW_TAG: run.name, "sapus.status": run.status, "sapus.clock": run.clock}
    run_id = client.create_run(experiment, round(1000 * started), tags, run.name).info.run_id
    try:
        for begin in range(0, len(params), _MLFLOW_PARAMS):
            client.log_batch(run_id, params=params[begin : begin + _MLFLOW_PARAMS])
        for begin in range(0, len(metrics), _MLFLOW_METRICS):
            client.log_batch(run_id, metrics=metrics[begin : begin + _MLFLOW_METRICS])
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}.get(run.status, "RUNNING")
        client.set_terminated(run_id, status, ended)
    except BaseException:
        client.delete_run(run_id)  # or it would count as being there
        raise


_MLFLOW_TAG = "sapus.run"
_MLFLOW_METRICS, _MLFLOW_PARAMS = 1000, 100  # the most that one call takes


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow_experiment(folder: Path) -> tuple[Any, str]:
    """The tracking database in a folder, created if it is missing, and the experiment in it."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    logging.getLogger("alembic").setLevel(logging.WARNING)  # names each table that it makes
    _make(folder)
    # MLflow no longer takes a plain folder: its file store is closed to new data.
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sapus")
    if experiment is not None:
        return client, experiment.experiment_id
    return client, client.create_experiment("sapus", artifact_location=(folder.resolve() / "artifacts").as_uri())


def _mlflow_taken(run: Run, folder: Path) -> str | None:
    if not (folder / "mlflow.db").exists():
        return None
    client, experiment = _mlflow_experiment(folder)
    quote = '"' if "'" in run.name else "'"
    there = client.search_runs([experiment], f"tags.`{_MLFLOW_TAG}` = {quote}{run.name}{quote}", max_results=1)
    if not there:
        return None
    return f"{folder / 'mlflow.db'} has the run {run.name} already; delete it there, or choose another --output"


def _wandb(run: Run, folder: Path) -> None:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # noqa: PLC0415

    _make(folder)
    started = _started(run)
    settings = wandb.Settings(
        mode="offline",
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        # What it would tell is of the machine that exports.
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    environment = run.record.get("environment") or {}
    config = {**conditions(run), "environment": environment, "status": run.status}
    group = " ".join([run.label, str(run.record["config"].get("dataset")), str(run.record["config"].get("model"))])
    made = wandb.init(
        dir=str(folder),
        project="sapus",
        id=_wandb_id(run),
        name=run.name,
        group=group,
        config=config,
        settings=settings,
    )
    made.define_metric("samples")
    made.define_metric("*", step_metric="samples")
    for point in points(run):
        made.log({**point.values, "samples": point.samples, "t_s": point.t_s, "_timestamp": started + point.t_s})
    for key, value in _summary(run).items():
        made.summary[key] = value
    made.finish(exit_code=0 if run.status in {"finished", "running"} else 1)


def _wandb_id(run: Run) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run.name)


def _wandb_taken(run: Run, folder: Path) -> str | None:
    made = _wandb_id(run)
    there = next(folder.glob(f"wandb/offline-run-*-{made}/run-{made}.wandb"), None)
    return None if there is None else _exists(there.parent)


def _parquet(run: Run, folder: Path) -> None:
    with _whole(folder) as place:
        for name, frame in (
            ("evals", run.evals),
            ("pushes", run.pushes),
            ("resources", run.resources),
            ("events", run.events),
        ):
            frame.write_parquet(place / f"{name}.parquet")
        shutil.copyfile(run.folder / "run.json", place / "run.json")


def _chrome(run: Run, file: Path) -> None:
    from sapus_cli.figures import write  # noqa: PLC0415

    document = {
        "traceEvents": trace_events(run),
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "clock": run.clock, **conditions(run)},
    }
    write(file, json.dumps(document, allow_nan=False).encode())


_SERVER_PID = 1
_FIRST_WORKER_PID = 2
_TRACKS = ("compute", "exchange", "wait")


def trace_events(run: Run) -> list[dict[str, Any]]:
    """A run as events of Chrome's trace format, one process a worker with a track for each thing that it does.

    Raises:
        DamagedFileError: a trace is damaged.
    """
    from sapus_cli.figures import data  # noqa: PLC0415 - numpy and polars wait until something is exported

    events = [*_named(_SERVER_PID, "server", 0, ())]
    for rank in range(run.workers):
        events += _named(_FIRST_WORKER_PID + rank, f"worker {rank}", rank + 1, _TRACKS)
    notes = ("staleness", "loss")
    pushes = run.pushes.sort("worker", "seq", maintain_order=True)
    for rank, worker in data.pushes(run, [*data.SPANS, *notes]).items():
        pid = _FIRST_WORKER_PID + rank
        spans = data.spans(worker)
        about = [
            {"push": seq, "steps": int(worker["n_steps"][i])}
            | {name: float(worker[name][i]) for name in notes if _finite(worker[name][i])}
            for i, seq in enumerate(pushes.filter(pushes["worker"] == rank)["seq"])
        ]
        tracks = (spans.computed, spans.exchanged, spans.waited)
        for tid, (track, parts) in enumerate(zip(_TRACKS, tracks, strict=True), start=1):
            events += _slices(pid, tid, track, parts, about if track == "compute" else None)
        for t_s, n_steps in zip(worker["t_s"], worker["n_steps"], strict=True):
            events += _counter(pid, "interval", float(t_s), {"steps": float(n_steps)})
    for row in run.evals.iter_rows(named=True):
        for name in ("accuracy", "loss"):
            events += _counter(_SERVER_PID, name, row["t_s"], {name: row[name]})
    for row in run.resources.filter(run.resources["role"] == "server").iter_rows(named=True):
        events += _counter(_SERVER_PID, "CPU", row["t_s"], {"percent of a core": row["cpu_percent"]})
    events += [_instant(row) for row in run.events.iter_rows(named=True)]
    # A viewer takes them in any order, but what a person reads is in that of time.
    return sorted(events, key=lambda event: event.get("ts", -1.0))


def _named(pid: int, name: str, place: int, tracks: Iterable[str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
    for tid, track in enumerate(tracks, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _slices(
    pid: int, tid: int, name: str, spans: npt.NDArray[np.float64], about: Sequence[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """Slices of a track; where the reconstruction has two overlap, the later one begins where the earlier ends.

    A viewer takes slices of a track to be nested, and drops what is not.
    """
    free = 0.0
    for i in sorted(range(len(spans)), key=lambda i: (float(spans[i][0]), float(spans[i][1]))):
        begin, end = max(float(spans[i][0]), free), float(spans[i][1])
        ts, dur = _us(begin), round(_us(end) - _us(begin), 3)
        if dur < _LEAST_SPAN_US:
            continue
        free = end
        args = {} if about is None else {"args": about[i]}
        yield {"ph": "X", "name": name, "cat": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **args}


def _counter(pid: int, name: str, t_s: float, args: dict[str, float | None]) -> Iterator[dict[str, Any]]:
    if all(_finite(value) for value in args.values()):  # JSON has no NaN
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(t_s), "args": args}


def _instant(row: Mapping[str, Any]) -> dict[str, Any]:
    pid = _FIRST_WORKER_PID + row["rank"] if row["role"] == "worker" else _SERVER_PID
    args = {"detail": row["detail"] or ""}
    return {"ph": "i", "name": row["kind"], "pid": pid, "tid": 0, "ts": _us(row["t_s"]), "s": "p", "args": args}


def _finite(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")


def _us(t_s: float) -> float:
    return round(float(t_s) * _MICROSECOND, 3)


# --- all of them


class Format(NamedTuple):
    """A format that runs can be exported to.

    Attributes:
        write: writes one run to its place.
        place: from the given place to that of a run, by the run's name.
        package: what has to be installed for it, and
        extra: the extra of sapus that installs it; empty: it comes with sapus.
        taken: why a run cannot go to its place, or None.
        following: what to do with the result, with `{place}` for the given place.
    """

    write: Callable[[Run, Path], None]
    place: Callable[[Path, str], Path]
    package: str
    extra: str
    taken: Callable[[Run, Path], str | None]
    following: str


def _exists(path: Path) -> str:
    return f"{path} exists already; remove it, or choose another place with --output"


def _taken(_run: Run, path: Path) -> str | None:
    return _exists(path) if path.exists() else None


FORMATS: Mapping[str, Format] = {
    "tensorboard": Format(
        _tensorboard,
        lambda place, name: place / name,
        "tensorboard",
        "tensorboard",
        _taken,
        "tensorboard --logdir {place}",
    ),
    "mlflow": Format(
        _mlflow,
        lambda place, _: place,
        "mlflow",
        "mlflow",
        _mlflow_taken,
        "mlflow ui --backend-store-uri sqlite:///{place}/mlflow.db",
    ),
    "wandb-offline": Format(
        _wandb, lambda place, _: place, "wandb", "wandb", _wandb_taken, "wandb sync {place}/wandb/offline-run-*"
    ),
    "parquet": Format(
        _parquet,
        lambda place, name: place / name,
        "polars",
        "",
        _taken,
        "polars.read_parquet('{place}/*/evals.parquet')",
    ),
    "chrome": Format(
        _chrome,
        lambda place, name: place if place.suffix == ".json" else place / f"{name}.json",
        "json",
        "",
        _taken,
        "open it at https://ui.perfetto.dev",
    ),
}
"""Every format by the name that the command line takes."""


def export(runs: Sequence[Run], to: str, place: Path) -> Iterator[tuple[Run, Path]]:
    """Write runs to `place` in the format `to`, a key of `FORMATS`; gives each run and where it went, once it is there.

    Raises:
        UserError: a package is missing, or a run cannot go there; nothing has been written then.
        DamagedFileError: a trace is damaged.
    """
    form = FORMATS[to]
    if importlib.util.find_spec(form.package) is None:
        raise UserError(
            f"--to {to}: needs the package {form.package}, which is not installed; pip install 'sapus[{form.extra}]'"
        )
    names: dict[Path | str, Run] = {}
    for run in runs:
        path = form.place(place, run.name)
        key: Path | str = run.name if path == place and to != "chrome" else path
        if key in names:
            raise UserError(
                f"--to {to}: {names[key].folder} and {run.folder} would both go to {path}; export them apart"
            )
        names[key] = run
        if place.exists() and not place.is_dir() and path != place:
            raise UserError(f"--output {place}: is a file; choose a folder")
        if reason := form.taken(run, path):
            raise UserError(reason)
    for run in runs:
        path = form.place(place, run.name)
        form.write(run, path)
        yield run, path


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name when it is whole, and vanishes if it does not come to that."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    _make(part)
    try:
        yield part
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write to {folder}: {what}; choose another place with --output") from error
