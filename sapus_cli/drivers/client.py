"""The client end of a connection to the server: worker and evaluator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import zmq

from sapus_cli.cluster import ELEMENT_BYTES
from sapus_cli.codec import (
    PROTOCOL_VERSION,
    FromClient,
    FromServer,
    Hello,
    Raw,
    Refused,
    Welcome,
    check_payload,
    decode_from_server,
    encode,
    payload_bytes,
)
from sapus_cli.drivers.transport import COPY_BYTES, Segment, prefer_reno
from sapus_cli.errors import RemoteProtocolError, RunFailedError

if TYPE_CHECKING:
    from sapus_cli.strategy import Vec

LINGER_MS = 5000
HANDSHAKE_MS = 30_000


class Client:
    """A DEALER socket that speaks the codec; receives vectors into a buffer of ours, sends large ones without a copy.

    Where the server shares memory with us, a vector is there when its message is.

    Attributes:
        welcome: the server's answer to our greeting.
        segment: the memory shared with the server, or None.

    Raises from every call:
        RemoteProtocolError: the server sent what is no message, or refused ours.
        RunFailedError: the endpoint is none, or no answer to the greeting in time.
    """

    def __init__(self, endpoint: str, role: Literal["worker", "evaluator"], rank: int = -1) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self.segment: Segment | None = None
        self._vector_bytes = 0
        self._sent, self._received = Raw(), Raw()
        try:
            self._socket.connect(endpoint)
            self.welcome = self._greet(Hello(protocol=PROTOCOL_VERSION, role=role, rank=rank))
        except zmq.ZMQError as error:
            self._abandon()
            raise RunFailedError(f"cannot connect to {endpoint}: {error}") from error
        except (RunFailedError, RemoteProtocolError):
            self._abandon()
            raise
        prefer_reno(endpoint)

    @property
    def dtype(self) -> torch.dtype:
        """What vectors are made of on this connection."""
        dtype: torch.dtype = getattr(torch, self.welcome.wire)
        return dtype

    @property
    def buffers(self) -> tuple[Vec | None, Vec | None]:
        """What pushes are sent from and states received into, of shape `(d,)`; None: any of `dtype` on the host."""
        return (None, None) if self.segment is None else (self.segment.push, self.segment.state)

    def send(self, message: FromClient, vector: Vec | None = None) -> None:
        """Send a message. `vector`, shape `(d,)` on the host, must stay as it is until the server has answered."""
        if vector is None or self.segment is not None:
            self._socket.send(encode(message))
            return
        self._socket.send(encode(message), zmq.SNDMORE)
        self._socket.send(self._sent.of(vector), 0, copy=self._vector_bytes < COPY_BYTES)

    def receive(self, into: Vec | None, timeout_ms: int | None) -> FromServer | None:
        """The next message, or None if none came in time (None waits for ever).

        A vector goes to `into`, shape `(d,)`.
        """
        if timeout_ms and not self._socket.poll(timeout_ms):
            return None
        try:
            header = self._socket.recv(0 if timeout_ms is None else zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        message = decode_from_server(header.buffer)
        sizes: list[int] = []
        more = header.more
        while more:
            if into is None or sizes or not payload_bytes(message, self._vector_bytes):
                frame = self._socket.recv(copy=False)
                sizes.append(len(frame))
            else:
                sizes.append(self._socket.recv_into(self._received.of(into)))
            more = bool(self._socket.getsockopt(zmq.RCVMORE))
        check_payload(message, self._vector_bytes, sizes)
        if isinstance(message, Refused):
            raise RemoteProtocolError(f"the server refused: {message.reason}")
        return message

    def close(self) -> None:
        """Send what is still queued, then close."""
        self._socket.close()
        self._context.term()

    def _abandon(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self.close()

    def _greet(self, hello: Hello) -> Welcome:
        self.send(hello)
        answer = self.receive(None, HANDSHAKE_MS)
        if answer is None:
            raise RunFailedError(
                f"no sapus server answered at {self.endpoint} within {HANDSHAKE_MS / 1000:g} s; "
                "start one there with sapus server, or correct the endpoint"
            )
        if not isinstance(answer, Welcome):
            raise RemoteProtocolError(f"the server at {self.endpoint} answered the greeting with {answer!r}")
        if answer.segment:
            self.segment = Segment.open(answer.segment, answer.elements, getattr(torch, answer.wire))
        else:
            self._vector_bytes = answer.elements * ELEMENT_BYTES[answer.wire]
        return answer
