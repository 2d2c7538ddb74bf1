"""What the launcher and its own child processes tell each other, as MessagePack over a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class _Control(Struct, frozen=True, tag_field="kind"):
    """A line of the control pipe."""


class Unusable(_Control, frozen=True, tag="unusable"):
    """A child found that the call was wrong: the line to show the user."""

    reason: str


class Prepared(_Control, frozen=True, tag="prepared"):
    """The data are in the cache and the model fits them."""

    data: str
    n_train: int
    n_test: int
    elements: int
    fingerprint: str
    data_sha256: str
    device: str


class Bound(_Control, frozen=True, tag="bound"):
    """The server listens at this endpoint.

    If it goes on from a checkpoint, `checkpoint_s` is the t_s of that, and `done` are the workers that had ended then.
    """

    endpoint: str
    checkpoint_s: float = 0.0
    done: list[int] = msgspec.field(default_factory=list)


class Begin(_Control, frozen=True, tag="begin"):
    """To every child: the run folder exists, the server listens at `endpoint`, the run may begin."""

    folder: str
    endpoint: str


class Released(_Control, frozen=True, tag="released"):
    """All workers were released at this instant of the machine's monotonic clock, which is t_s = 0."""

    monotonic_s: float


class WorkerStatus(Struct, frozen=True):
    """One worker as the server sees it.

    `loss` is the mean of its last interval, NaN before the first; `away` is a worker that has not come yet or has left.
    """

    rank: int
    steps: int
    pushes: int
    interval: int
    loss: float
    rx_bytes: int
    tx_bytes: int
    rx_frames: int
    tx_frames: int
    waiting: bool
    away: bool


class Status(_Control, frozen=True, tag="status"):
    """The server's state, ten times a second.

    `cpu_s` is its user and system time since it was started; bytes are those of the workers.
    """

    t_s: float
    version: int
    samples: int
    cpu_s: float
    rss_bytes: int
    rx_bytes: int
    tx_bytes: int
    evaluator_bytes: int
    workers: list[WorkerStatus]


class Happened(_Control, frozen=True, tag="happened"):
    """A row for events.csv."""

    t_s: float
    event: str
    role: str
    rank: int
    detail: str = ""


class Measured(_Control, frozen=True, tag="measured"):
    """A result of the evaluator."""

    t_s: float
    version: int
    samples: int
    loss: float
    accuracy: float


class Halt(_Control, frozen=True, tag="halt"):
    """To the server: end the run at once."""


class WorkerTotals(Struct, frozen=True):
    """What the server has had from a worker in the whole run, and sent to it: bytes of all messages."""

    rank: int
    steps: int
    rx_bytes: int
    tx_bytes: int


class Gone(_Control, frozen=True, tag="gone"):
    """To the server: a worker or the evaluator is dead, or will not be started again after all.

    `returns`: it will be, and is to be waited for.
    """

    role: str
    rank: int
    returns: bool = False


class Ended(_Control, frozen=True, tag="ended"):
    """The server's last word. `end_s` is when the last worker left, seconds since the release.

    Bytes and frames are those of the workers; `evaluator_bytes` are those of the snapshots, both ways. `server_cpu_s`
    is what the server used between the release and that instant; `reached_s` when the target accuracy was reached;
    `overruns` are steps that really took longer than the cluster profile says, `lost_pushes` such as were applied by a
    server that was killed before it wrote them into a checkpoint.
    """

    end_s: float
    version: int
    samples: int
    steps: int
    pushes: int
    rx_bytes: int
    tx_bytes: int
    rx_frames: int
    tx_frames: int
    evaluator_bytes: int
    server_cpu_s: float
    state_sha256: str
    declined: int
    reached_s: float | None
    overruns: int = 0
    lost_pushes: int = 0
    workers: list[WorkerTotals] = msgspec.field(default_factory=list)


class Restart(Struct, frozen=True):
    """To a server that takes the place of another: go on from the newest good checkpoint in the run folder `folder`.

    `released_s` is the run's start on the machine's monotonic clock, and `status` the last word of a server that has
    died. Both are None where a whole run is resumed: then its time goes on from the checkpoint once all workers are
    there.
    """

    folder: str
    released_s: float | None = None
    status: Status | None = None


class Failed(_Control, frozen=True, tag="failed"):
    """The server cannot go on: why, for the user, and whether it makes sense to resume the run."""

    reason: str
    resumable: bool = True


Line: TypeAlias = (
    Unusable | Prepared | Bound | Begin | Released | Status | Happened | Measured | Halt | Gone | Ended | Failed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Line] = msgspec.msgpack.Decoder(Line)


def tell(pipe: Connection, line: Line) -> None:
    """Send a line."""
    pipe.send_bytes(_encoder.encode(line))


def hear(pipe: Connection) -> Line:
    """Wait for a line.

    Raises:
        EOFError: the other side is gone.
    """
    return _decoder.decode(pipe.recv_bytes())
