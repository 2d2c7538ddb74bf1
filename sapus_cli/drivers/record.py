"""What both drivers write into run.json."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sapus_cli import registry, traces
from sapus_cli.errors import DamagedFileError, RunFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from sapus_cli.config import RunConfig
    from sapus_cli.drivers.control import Ended, Measured, Prepared
    from sapus_cli.strategy import AnyStrategy


def first_record(
    config: RunConfig, strategy: AnyStrategy, ready: Prepared, clock: Literal["real", "virtual"]
) -> dict[str, Any]:
    """What is known of a run when it begins."""
    cls = type(strategy)
    return {
        "status": "running",
        "started_at": utc(),
        "clock": clock,
        "config": msgspec.to_builtins(config),
        "strategy": {
            "name": config.strategy,
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "hyper_parameters": {key: getattr(strategy, key) for key in registry.hyper_parameters(cls)},
        },
        "cluster": msgspec.to_builtins(config.cluster, str_keys=True),
        "data": {"sha256": ready.data_sha256, "n_train": ready.n_train, "n_test": ready.n_test},
        "model": {"elements": ready.elements, "fingerprint": ready.fingerprint},
        "device": ready.device,
        "threads_per_process": config.threads,
        "effective_batch_size": config.effective_batch(ready.n_train),
        "steps_per_worker": config.steps_per_worker(ready.n_train),
        "environment": traces.environment(),
    }


def resumed_record(before: dict[str, Any], now: dict[str, Any], t_s: float) -> dict[str, Any]:
    """The record of a run that goes on at `t_s`: as it began, with what is found where it goes on."""
    again = {"at": now["started_at"], "t_s": t_s, "environment": now["environment"], "transport": now["transport"]}
    record = before | {"status": "running", "resumed": [*before.get("resumed", []), again]}
    for key in ("failure", "ended_at"):
        record.pop(key, None)
    return record


def forget_end(record: dict[str, Any]) -> None:
    """Take away what an earlier end said: from now on it is no longer true."""
    for key in ("totals", "summary", "state_sha256"):
        record.pop(key, None)


def close_record(
    record: dict[str, Any],
    status: str,
    ended: Ended | None,
    evals: list[Measured],
    incomplete: Collection[str] = (),
) -> None:
    """Add how a run ended; without `ended` it never got to count its totals.

    Args:
        record: what is known of the run; changed in place.
        status: one of `traces.STATUSES`.
        ended: the server's last word.
        evals: all results of the evaluator.
        incomplete: names of the traces whose rows were not all taken by the system; those that the record names
            already stay there.
    """
    lacking = sorted({*incomplete, *record.get("incomplete_traces", ())})
    record |= {"status": status, "ended_at": utc(), "traces": "incomplete" if lacking else "complete"}
    if lacking:
        record["incomplete_traces"] = lacking
    if ended is not None:
        record["totals"] = msgspec.to_builtins(ended)
        record["state_sha256"] = ended.state_sha256
        record["summary"] = summary(ended, evals)


def close_for_the_dead(folder: Path, failure: str) -> None:
    """Say in run.json that a run failed whose own process was killed before it could; nothing if it had said how."""
    with suppress(UserError, DamagedFileError, RunFailedError):
        record = traces.read_run(folder)
        if record.get("status") == "running":
            traces.write_run(folder, record | {"status": "failed", "ended_at": utc(), "failure": failure})


def summary(ended: Ended, evals: list[Measured]) -> dict[str, float | int | None]:
    """The figures of a run that a reader looks for first. Seconds count from the release of all workers."""
    seconds = ended.end_s
    last = evals[-1] if evals else None

    def rate(amount: float) -> float | None:
        return amount / seconds if seconds > 0 else None

    return {
        "accuracy": last.accuracy if last else None,
        "best_accuracy": max((result.accuracy for result in evals), default=None),
        "loss": last.loss if last else None,
        "seconds": seconds,
        "reached_s": ended.reached_s,
        "samples_per_s": rate(ended.samples),
        "steps_per_s": rate(ended.steps),
        "pushes": ended.pushes,
        "declined": ended.declined,
        "overruns": ended.overruns,
        "lost_pushes": ended.lost_pushes,
        "mean_interval": ended.steps / ended.pushes if ended.pushes else None,
        "server_cpu_s": ended.server_cpu_s,
        "server_cpu_percent": rate(100 * ended.server_cpu_s),
        "gbit_per_s_in": rate(8e-9 * ended.rx_bytes),
        "gbit_per_s_out": rate(8e-9 * ended.tx_bytes),
    }


def utc() -> str:
    """Now, to the millisecond."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
