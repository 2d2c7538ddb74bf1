"""Hand-made run folders: a run.json and traces with the numbers that a test wants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sapus_cli import traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "workers": 4,
    "dataset": "digits",
    "model": "mlp",
    "data_dir": None,
    "download": False,
    "partition": "iid",
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "epochs": None,
    "steps": 100,
    "seconds": None,
    "target_accuracy": None,
    "eval_every_s": 1.0,
    "device": "auto",
    "threads": 1,
}
LINEAR = tuple((float(t), t / 10) for t in range(11))
"""Accuracy t / 10 at second t, from 0 to 10."""


def record(strategy: str = "bsp", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What run.json holds; `changes` go into the entry of that name, a table into the table that stands there."""
    hyper_parameters = changes.pop("hyper_parameters", {})
    config = {"strategy": strategy, "seed": seed, "params": {}, **CONFIG}
    whole: dict[str, Any] = {
        "status": "finished",
        "started_at": "2026-01-01T00:00:00.000+00:00",
        "clock": "real",
        "config": config,
        "strategy": {"name": strategy, "class": f"strategies:{strategy}", "hyper_parameters": hyper_parameters},
        "cluster": {"name": "none", "description": "", "step_s": None, "link": {"bytes_per_s": None}},
        "data": {"sha256": "ab" * 32, "n_train": 1438, "n_test": 359},
        "model": {"elements": 10, "fingerprint": "cd" * 32},
        "device": "cpu",
        "effective_batch_size": 32,
        "environment": {"versions": {"torch": "2.0"}, "host": {"cpu": "a cpu", "usable_cores": 2}, "git": None},
        "totals": {},
        "summary": {},
    }
    for key, value in changes.items():
        whole[key] = {**whole[key], **value} if isinstance(value, dict) else value
    return whole


def make_run(
    folder: Path,
    strategy: str = "bsp",
    seed: int = 0,
    *,
    evals: Iterable[tuple[float, ...]] = LINEAR,
    server: Iterable[tuple[float, float, int, int]] = (),
    staleness: Sequence[int] = (),
    **changes: Any,
) -> Path:
    """Write a run folder.

    Args:
        folder: where; created with what lies above it.
        strategy: its name.
        seed: its seed.
        evals: second and accuracy of each evaluation, and that of its worst class if known; samples are 100 a second.
        server: second, CPU seconds, bytes received and sent of each of the server's samples.
        staleness: of each push, one a second, of two steps.
        changes: see `record`.
    """
    folder.mkdir(parents=True)
    traces.write_run(folder, record(strategy, seed, **changes))
    with traces.Trace(folder / "evals.csv", traces.EVALS) as trace:
        for t_s, accuracy, *worst_class in evals:
            worst = worst_class[0] if worst_class else None
            trace.row((t_s, 0, round(100 * t_s), 0.0, 1 - accuracy, accuracy, worst))
    with traces.Trace(folder / "resources.csv", traces.RESOURCES) as trace:
        for t_s, cpu_s, rx_bytes, tx_bytes in server:
            trace.row((t_s, "worker", 0, 0.0, 0.0, 1, None, None, None, None))
            trace.row((t_s, "server", 0, cpu_s, 0.0, 1, rx_bytes, tx_bytes, None, None))
    with traces.Trace(folder / "pushes.csv", traces.PUSHES) as trace:
        for i, stale in enumerate(staleness):
            push: Mapping[str, object] = {"t_s": float(i), "worker": 0, "seq": i + 1, "n_steps": 2, "staleness": stale}
            trace.row(push)
    return folder
