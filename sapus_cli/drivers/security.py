"""CURVE: who may connect to the server of a run, and what a client says when it is not let in."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from sapus_cli.errors import RunFailedError
from sapus_cli.join import ClientKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"sapus"
CLOSED_TIMES = 3
"""So many connections that the server closes at our greeting are no accident."""

CURVE_BYTES = 33
"""What encryption adds to a frame: name of the command, nonce, authenticator, flags (ZeroMQ RFC 26)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerKeys:
    """What the server process needs.

    Attributes:
        secret: its own key, Z85.
        admitted: public keys of clients, Z85, and until when each may connect, in seconds since the epoch.
    """

    secret: str = field(repr=False)
    admitted: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class Security:
    """The keys of a run: of its server, of its evaluator, and one pair for all its workers."""

    server: ServerKeys
    evaluator: ClientKeys
    workers: ClientKeys


def new_keys(expires_s: float) -> Security:
    """Keys that nobody has had before; those of the workers count until `expires_s`, in seconds since the epoch."""
    public, secret = _pair()
    workers, evaluator = (ClientKeys(public, *_pair()) for _ in range(2))
    admitted = {workers.public: expires_s, evaluator.public: math.inf}
    return Security(ServerKeys(secret, admitted), evaluator, workers)


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> Gate:
    """Let only clients with an admitted key connect to a socket; to be called before it is bound."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Without a gate nobody gets in; otherwise everybody would who knows the server's public key.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return Gate(socket.context, keys.admitted)


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Prove to the server who we are, and have it prove that it is the one; to be called before `connect`."""
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def nearby(endpoint: str) -> str:
    """How a client on the server's own machine reaches what listens at an endpoint."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:")


class Gate:
    """A thread that answers libzmq's question whether a client may connect (ZeroMQ RFC 27, ZAP).

    It ends with its context.

    Args:
        context: of the server's socket.
        admitted: as in `ServerKeys`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Mapping[str, float]) -> None:
        self._admitted = {z85.decode(key): until_s for key, until_s in admitted.items()}
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        threading.Thread(target=self._run, name="gate", daemon=True).start()

    def _run(self) -> None:
        with self._socket, suppress(zmq.ContextTerminated):
            while True:
                version, request, _domain, address, _identity, mechanism, *credentials = self._socket.recv_multipart()
                reason = self._objection(mechanism, credentials)
                if reason:
                    log.warning("refused a connection from %s: %s", address.decode(errors="replace"), reason)
                code, word = (b"400", b"NO") if reason else (b"200", b"OK")
                self._socket.send_multipart([version, request, code, word, b"", b""])

    def _objection(self, mechanism: bytes, credentials: list[bytes]) -> str:
        """Why a client may not connect, empty if it may. No key is told."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return "it does not use CURVE"
        until_s = self._admitted.get(credentials[0])
        if until_s is None:
            return "its key is not one of this run"
        return "" if time.time() < until_s else "its join file has expired"


class Handshake:
    """Watches how a client's socket is received, so that it need not wait for an answer that cannot come.

    Args:
        socket: not connected yet.
        endpoint: where it is going to connect.
        secured: it has keys.
        known: this server has let it in before, so that a connection which is closed means that the server is gone.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, *, secured: bool, known: bool) -> None:
        self._watched = socket
        self._endpoint = endpoint
        self._secured = secured
        self._known = known
        self._closed = 0
        self._events = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    def check(self) -> None:
        """Look at what has happened.

        Raises:
            RunFailedError: the server does not let us in.
        """
        while self._events.poll(0):
            said = recv_monitor_message(self._events)
            self._judge(said["event"], said["value"])

    def close(self) -> None:
        """Watch no more."""
        self._watched.disable_monitor()
        self._events.close(linger=0)

    def _judge(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise RunFailedError(
                f"the server at {self._endpoint} refused the key of the join file: it has expired, or is not of this "
                "run; take the file that the server has written, or start it again"
            )
        mismatch = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if mismatch and not self._secured:
            raise RunFailedError(
                f"the server at {self._endpoint} admits nobody without its join file; "
                "give it with --join in place of --connect"
            )
        # Which of the two it is depends on who closes the connection first.
        self._closed += 1
        if self._secured and (mismatch or (self._closed >= CLOSED_TIMES and not self._known)):
            raise RunFailedError(
                f"the server at {self._endpoint} does not know the keys of the join file, which is of another run; "
                "take the file of the run that is on, or --connect if it has none"
            )
