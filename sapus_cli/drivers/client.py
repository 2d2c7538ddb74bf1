"""The client end of a connection to the server: worker and evaluator."""

from __future__ import annotations

import math
import secrets
import time
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
import zmq

from sapus_cli.cluster import ELEMENT_BYTES
from sapus_cli.codec import (
    PROTOCOL_VERSION,
    Alive,
    Beat,
    Dropped,
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
from sapus_cli.drivers.heart import Heart
from sapus_cli.drivers.security import Handshake, secure_client
from sapus_cli.drivers.transport import COPY_BYTES, Segment, prefer_reno
from sapus_cli.errors import DroppedError, ProtocolError, RemoteProtocolError, RunFailedError

if TYPE_CHECKING:
    from sapus_cli.join import ClientKeys
    from sapus_cli.strategy import Vec

LINGER_MS = 5000
HANDSHAKE_MS = 30_000
LOOK_S = 0.2
SILENCE_S = 120.0
ATTEMPT_S = 1.0


class Client:
    """A DEALER socket that speaks the codec; receives vectors into a buffer of ours, sends large ones without a copy.

    Where the server shares memory with us, a vector is there when its message is.

    Attributes:
        welcome: the server's answer to our latest greeting.
        segment: the memory shared with the server, or None.

    Raises from every call:
        DroppedError: the server does not know us any more: `renew`.
        RemoteProtocolError: the server sent what is no message, or refused ours.
        RunFailedError: the endpoint is none, no answer to the greeting in time, or no sign of life for two minutes.
    """

    def __init__(
        self,
        endpoint: str,
        role: Literal["worker", "evaluator"],
        rank: int = -1,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._handshake: Handshake | None = None
        self._context = zmq.Context()
        self._heart: Heart | None = None
        self._next_knock_s = 0.0
        self.segment: Segment | None = None
        self._vector_bytes = 0
        self._sent, self._received = Raw(), Raw()
        self._hello = Hello(protocol=PROTOCOL_VERSION, role=role, rank=rank, incarnation=1 + secrets.randbelow(2**62))
        self._open(HANDSHAKE_MS / 1000, known=False)

    def renew(self) -> None:
        """Connect again. If `welcome.resumed` then, what was not answered is to be sent again, else all begins anew.

        Nothing that was on its way arrives any more. A server that is just being started again is waited for.
        """
        self._shut(0)
        self._hello = msgspec.structs.replace(self._hello, rank=self.welcome.rank)
        self._open(SILENCE_S, known=True)

    def _open(self, seconds: float, *, known: bool) -> None:
        try:
            self._greet(seconds, known=known)
            self._end_handshake()
            self._heart = Heart(self._context, self._connected, self._hello.incarnation, self.welcome.beat_s)
            self._next_knock_s = time.monotonic() + self.welcome.beat_s
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RunFailedError(f"cannot connect to {self.endpoint}: {error}") from error
        except (RunFailedError, ProtocolError):
            self._context.destroy(linger=0)
            raise
        prefer_reno(self.endpoint)

    def _greet(self, seconds: float, *, known: bool) -> None:
        """Say hello until there is an answer: the connection may break before it is here, and then it never comes."""
        until_s = time.monotonic() + seconds
        attempt_s = ATTEMPT_S
        while (rest_s := until_s - time.monotonic()) > 0:
            self._socket = self._connected(watched=True, known=known)
            self._socket.setsockopt(zmq.LINGER, LINGER_MS)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self.send(self._hello)
            answer = self.receive(None, int(1000 * min(attempt_s, rest_s)))
            if answer is not None:
                self._accept(answer)
                return
            self._shut(0)
            attempt_s *= 2
        raise RunFailedError(
            f"no sapus server answered at {self.endpoint} within {seconds:g} s; "
            "start one there with sapus server, or correct the endpoint"
        )

    def _accept(self, answer: FromServer) -> None:
        if not isinstance(answer, Welcome):
            raise RemoteProtocolError(f"the server at {self.endpoint} answered the greeting with {answer!r}")
        self.welcome = answer
        if answer.resumed:
            return
        if answer.segment:
            self.segment = Segment.open(answer.segment, answer.elements, getattr(torch, answer.wire))
        else:
            self._vector_bytes = answer.elements * ELEMENT_BYTES[answer.wire]

    def _connected(self, *, watched: bool = False, known: bool = False) -> zmq.Socket[bytes]:
        """One more connection to the server, which has or has not let us in before."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if self._keys is not None:
                secure_client(socket, self._keys)
            if watched:
                self._handshake = Handshake(socket, self.endpoint, secured=self._keys is not None, known=known)
            socket.connect(self.endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

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
        until_s = math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            self._look()
            try:
                message = self._read(into)
            except zmq.Again:
                rest_s = until_s - time.monotonic()
                if rest_s <= 0:
                    return None
                self._socket.poll(1 + int(1000 * min(LOOK_S, rest_s)))
                continue
            if isinstance(message, Refused):
                raise RemoteProtocolError(f"the server refused: {message.reason}")
            if isinstance(message, Dropped):
                raise DroppedError("the server does not know this process any more")
            if not isinstance(message, Alive):
                return message

    def _read(self, into: Vec | None) -> FromServer:
        header = self._socket.recv(zmq.NOBLOCK, copy=False)
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
        return message

    def _look(self) -> None:
        """Watch whether the server is there, and ask now and then whether it knows this connection."""
        if self._handshake is not None:
            self._handshake.check()
        if self._heart is None:
            return
        if self._heart.dropped:
            raise DroppedError("the server does not know this process any more")
        now = time.monotonic()
        if self._heart.silent_s > SILENCE_S:
            raise RunFailedError(f"the server at {self.endpoint} has been silent for {SILENCE_S:g} s")
        if now >= self._next_knock_s:
            self._next_knock_s = now + self.welcome.beat_s
            self.send(Beat(incarnation=self._hello.incarnation, main=True))

    def close(self) -> None:
        """Send what is still queued, then close."""
        self._shut(LINGER_MS)
        self._context.term()

    def _shut(self, linger_ms: int) -> None:
        if self._heart is not None:
            self._heart.stop()
            self._heart = None
        self._end_handshake()
        self._socket.close(linger_ms)

    def _end_handshake(self) -> None:
        if self._handshake is not None:
            self._handshake.close()
            self._handshake = None
