"""The wire format: one typed header frame (MessagePack), then one frame of raw numbers where there is a vector.

Sizes are bounded before anything is decoded: a header by `MAX_HEADER_BYTES`, a vector by the number of bytes that both
sides know. Nothing is ever unpickled. Whatever the bytes are, `decode` returns a message that keeps its types and
ranges, or raises `RemoteProtocolError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct

from sapus_cli.cluster import Wire  # noqa: TC001 - msgspec reads the annotations
from sapus_cli.errors import RemoteProtocolError

if TYPE_CHECKING:
    from sapus_cli.strategy import Vec

PROTOCOL_VERSION = 3
MAX_HEADER_BYTES = 64 * 1024

T = TypeVar("T")

Steps = Annotated[int, Meta(ge=1, le=2**31)]
Samples = Annotated[int, Meta(ge=0, le=2**40)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=32)]
Text = Annotated[str, Meta(max_length=1000)]
Facts = Annotated[dict[Name, float | Annotated[str, Meta(max_length=64)]], Meta(max_length=32)]
Numbers = Annotated[dict[Name, float], Meta(max_length=32)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A header."""


class Hello(_Message, frozen=True, tag="hello"):
    """First word of every client. `rank` -1 asks the server to choose.

    `incarnation` is a number that the client made up and nobody else has. It stays the same when the client has to
    connect again, so that the server can tell it from one that takes its place.
    """

    protocol: int
    role: Literal["worker", "evaluator"]
    incarnation: Positive
    rank: Annotated[int, Meta(ge=-1, le=2**31)] = -1


class Beat(_Message, frozen=True, tag="beat"):
    """The process that said hello as `incarnation` lives.

    It comes over a connection of its own, which a long step does not hold up. If `main`, it comes over the one that
    pushes come over: a client asks whether the server still knows that one, since answers to another get lost.
    """

    incarnation: Positive
    main: bool = False


class Pull(_Message, frozen=True, tag="pull"):
    """A worker is ready: it asks for its first state. `fingerprint` is that of its model's layout."""

    fingerprint: Annotated[str, Meta(max_length=64)]


class Push(_Message, frozen=True, tag="push"):
    """An accumulated update, followed by its vector.

    `seq` counts the pushes of a rank from 1, over all of its incarnations; `version` is that of the state it last
    pulled; `step_s` and `exchange_s` are seconds as in `strategy.Received`; `sent_s` is when an emulated worker sent
    it, in seconds since the start, 0 if it does not say. `finite` is the worker's word that all numbers of the vector
    are: each worker looks at its own, which spares the one server a pass over all of them.
    """

    seq: Positive
    version: Count
    n_steps: Steps
    n_samples: Samples
    loss: float
    step_s: Seconds
    exchange_s: Seconds
    last: bool = False
    finite: bool = True
    sent_s: Seconds = 0.0
    info: Facts = msgspec.field(default_factory=dict)


class Leave(_Message, frozen=True, tag="leave"):
    """A worker ends; nothing follows."""

    reason: Text = ""
    overruns: Annotated[int, Meta(ge=0, le=2**31)] = 0


class Snapshot(_Message, frozen=True, tag="snapshot"):
    """The evaluator asks for the global state."""


class Evaluated(_Message, frozen=True, tag="evaluated"):
    """The evaluator's result on a snapshot taken at `t_s`."""

    t_s: float
    version: Count
    samples: Count
    loss: float
    accuracy: Annotated[float, Meta(ge=0, le=1)]
    final: bool


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answer to hello: the client's rank, the model's layout, and the run's configuration as JSON.

    `beat_s` is how often to say `Beat`, in seconds. `resumed`: the worker has only connected again, and its last
    message counts, once, if it is sent again. Otherwise it is to pull, even if it has before: `steps` and `seq` are the
    local steps and the pushes of this rank that the server has had, from which it goes on. `wire` says what
    the elements of vectors are; `segment` is the path of the memory that a worker shares with the server, through which
    its vectors go, or empty: they go with their messages.
    """

    protocol: int
    rank: Count
    elements: Positive
    fingerprint: Annotated[str, Meta(max_length=64)]
    beat_s: Annotated[float, Meta(gt=0)]
    resumed: bool = False
    config: bytes = b""
    steps: Count = 0
    seq: Count = 0
    wire: Wire = "float32"
    segment: Annotated[str, Meta(max_length=64)] = ""


class State(_Message, frozen=True, tag="state"):
    """Answer to a pull, a push or a snapshot, followed by a vector: the global state, or what a strategy sends.

    `held_s` is how long the reply was withheld, `samples` how many training samples the state has seen, `fresh` that a
    worker is to begin anew from it, `final` that no more pushes follow. `link_s` is how long an emulated link kept it
    after `t_s`, so that a worker can tell when the run began.
    """

    version: Count
    t_s: float
    samples: Count = 0
    held_s: Seconds = 0.0
    hint: Numbers = msgspec.field(default_factory=dict)
    fresh: bool = False
    final: bool = False
    link_s: Seconds = 0.0


class Declined(_Message, frozen=True, tag="declined"):
    """A push was not applied, because its loss or its vector is not finite. The worker goes on from where it is."""

    seq: Positive


class Stop(_Message, frozen=True, tag="stop"):
    """The run ends. `flush`: push what has accumulated first; otherwise leave at once."""

    flush: bool


class Alive(_Message, frozen=True, tag="alive"):
    """Answer to a beat: the server knows this client."""


class Dropped(_Message, frozen=True, tag="dropped"):
    """The server does not know this client, or not any more: it has to say hello anew."""


class Refused(_Message, frozen=True, tag="refused"):
    """The server did not accept a message."""

    reason: Text


FromClient: TypeAlias = Hello | Beat | Pull | Push | Leave | Snapshot | Evaluated
FromServer: TypeAlias = Welcome | Alive | Dropped | State | Declined | Stop | Refused
Message: TypeAlias = FromClient | FromServer

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_from_client(header: bytes | memoryview) -> FromClient:
    """Read what a client sent.

    Raises:
        RemoteProtocolError: these bytes are no such message.
    """
    return _decode(_from_client, header)


def decode_from_server(header: bytes | memoryview) -> FromServer:
    """Read what the server sent.

    Raises:
        RemoteProtocolError: these bytes are no such message.
    """
    return _decode(_from_server, header)


def payload_bytes(message: Message, vector_bytes: int) -> int:
    """Size in bytes that the frame after this header must have; 0 means that none follows.

    `vector_bytes` is the size of a vector on this connection; 0 where vectors go through shared memory.
    """
    return vector_bytes if isinstance(message, Push | State) else 0


def raw(vector: Vec) -> memoryview:
    """The bytes of a vector of shape `(d,)` on the host, without a copy."""
    return vector.view(torch.uint8).numpy().data


class Raw:
    """`raw` for a vector that comes again and again, which is then as fast as to add a small one."""

    def __init__(self) -> None:
        self._vector: Vec | None = None
        self._address = 0
        self._bytes = memoryview(b"")

    def of(self, vector: Vec) -> memoryview:
        """The bytes of a vector of shape `(d,)` on the host, without a copy."""
        address = vector.data_ptr()
        if vector is not self._vector or address != self._address:
            self._vector, self._address, self._bytes = vector, address, raw(vector)
        return self._bytes


def check_payload(message: Message, vector_bytes: int, sizes: list[int]) -> None:
    """Check the frames after a header: their sizes in bytes against what the message must carry.

    Raises:
        RemoteProtocolError: a frame is missing, is one too many, or has another size.
    """
    need = payload_bytes(message, vector_bytes)
    if sizes != ([need] if need else []):
        kind = type(message).__name__.lower()
        raise RemoteProtocolError(f"a {kind} must carry {need} bytes, but frames of {sizes} bytes followed it")


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    if len(header) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"not a message: {error}") from error
