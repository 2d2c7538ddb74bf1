"""What one run is asked to do: checked, frozen, and written into run.json as it is."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from sapus_cli.cluster import ClusterProfile, Wire
from sapus_cli.errors import UserError

MOST = 10**9
"""More of anything that is counted is a slip of the finger, and would overflow somewhere."""

MOST_THREADS = 1024

Transport: TypeAlias = Literal["tcp", "ipc", "shm"]


class Recovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when processes of a run die or fall silent; it says nothing of what is computed.

    A worker that was not heard of for `worker_timeout_s` seconds is let go. The run ends as failed when fewer than
    `min_workers` have not been lost for as long. A process that dies is started again at most `max_restarts` times, 0
    for never. The server writes a checkpoint every `checkpoint_every_s` seconds.
    """

    worker_timeout_s: float = 10.0
    min_workers: int = 1
    max_restarts: int = 3
    checkpoint_every_s: float = 30.0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run: one strategy on one workload with one seed.

    Exactly one of `epochs`, `steps` and `seconds` is the budget of every worker; `target_accuracy` ends it earlier.
    `epochs` counts passes of all workers together over the training set; `steps` are local steps of each worker;
    `batch_size` is that of one worker; `eval_every_s` is the least time between two evaluations in seconds. `wire` is
    what the elements of vectors are between server and workers; `transport` is how real processes exchange messages.
    """

    strategy: str
    params: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    workers: int = 8
    dataset: str = "digits"
    model: str = "cnn"
    data_dir: str | None = None
    download: bool = False
    partition: str = "iid"
    batch_size: int = 32
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: float | None = None
    steps: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    eval_every_s: float = 0.5
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    wire: Wire = "float32"
    transport: Transport = "tcp"
    recovery: Recovery = msgspec.field(default_factory=Recovery)
    cluster: ClusterProfile = msgspec.field(default_factory=ClusterProfile)

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UserError: names the option, the value and the range.
        """
        _whole("--workers", self.workers, 1, MOST)
        _whole("--batch-size", self.batch_size, 1, MOST)
        check_threads(self.threads)
        _whole("--seed", self.seed, 0, 2**63 - 1)
        _between("--lr", self.lr, 0, math.inf, open_low=True)
        _between("--momentum", self.momentum, 0, 0.9999)
        _between("--weight-decay", self.weight_decay, 0, math.inf)
        _between("--eval-every", self.eval_every_s, 0, MOST)
        if self.optimizer == "adamw" and self.momentum:
            raise UserError(f"--momentum {self.momentum:g}: adamw has no such momentum; leave it out, or take sgd")
        budgets = {"--epochs": self.epochs, "--steps": self.steps, "--seconds": self.seconds}
        given = [name for name, value in budgets.items() if value is not None]
        if len(given) != 1:
            raise UserError(f"give one of --epochs, --steps and --seconds as the budget, not {' and '.join(given)}")
        if self.epochs is not None:
            _between("--epochs", self.epochs, 0, MOST, open_low=True)
        if self.steps is not None:
            _whole("--steps", self.steps, 1, MOST)
        if self.seconds is not None:
            _between("--seconds", self.seconds, 0, MOST, open_low=True)
        if self.target_accuracy is not None:
            _between("--target-accuracy", self.target_accuracy, 0, 1, open_low=True)
        self.cluster.check_workers(self.workers)
        self.cluster.check_budget(self.seconds)
        _between("--worker-timeout", self.recovery.worker_timeout_s, 0.5, MOST)
        _whole("--min-workers", self.recovery.min_workers, 1, self.workers)
        _whole("--max-restarts", self.recovery.max_restarts, 0, MOST)
        _between("--checkpoint-every", self.recovery.checkpoint_every_s, 0.1, MOST)

    def steps_per_worker(self, n_train: int) -> int | None:
        """Local steps of each worker on a training set of `n_train` samples; None if the budget is in seconds."""
        if self.epochs is None:
            return self.steps
        return max(1, math.ceil(self.epochs * n_train / (self.workers * self.effective_batch(n_train))))

    def effective_batch(self, n_train: int) -> int:
        """Samples in a worker's minibatch: what was asked for, or its whole share of `n_train` if that is smaller."""
        return min(self.batch_size, max(1, n_train // self.workers))


def check_threads(threads: int) -> None:
    """Refuse a number of torch threads that no process can have.

    Raises:
        UserError: names the value and the range.
    """
    _whole("--threads", threads, 1, MOST_THREADS)


def _whole(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{option} {value}: must be a whole number from {least} to {most}")


def _between(option: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        above = "above" if open_low else "of at least"
        top = "" if math.isinf(high) else f" and at most {high:.10g}"
        raise UserError(f"{option} {value:g}: must be a number {above} {low:g}{top}")
