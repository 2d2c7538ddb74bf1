"""How a process tells the server that it lives, and hears that the server does."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from sapus_cli.codec import Beat, Dropped, decode_from_server, encode
from sapus_cli.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

AWAY_S = 1.0
"""Who wakes up so much too late was stopped."""


class Heart:
    """A thread with a connection of its own, so that neither a long step nor a large message holds up a beat.

    Args:
        context: that of the client's own socket.
        connect: makes a socket of this context that is connected to the server.
        incarnation: as what the server knows this process.
        every_s: seconds between two beats.

    Attributes:
        dropped: the server has answered that it does not know this process any more.
        silent_s: seconds since it answered last. If this process itself was stopped, they count from where it goes on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connect: Callable[[], zmq.Socket[bytes]],
        incarnation: int,
        every_s: float,
    ) -> None:
        self.dropped = False
        self.silent_s = 0.0
        self._answered_s = self._awake_s = time.monotonic()
        self._beat = encode(Beat(incarnation=incarnation))
        self._every_s = every_s
        name = f"inproc://heart-{secrets.token_hex(8)}"
        self._stop: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stop.bind(name)
        self._stopped: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stopped.connect(name)
        self._socket = connect()
        self._poller = zmq.Poller()
        self._poller.register(self._stopped, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        with suppress(zmq.Again):  # the thread has ended by itself
            self._stop.send(b"", zmq.NOBLOCK)
        self._thread.join()
        self._stop.close(linger=0)

    def _run(self) -> None:
        try:
            while not self.dropped and self._go_on():
                with suppress(zmq.Again):  # there is no connection now
                    self._socket.send(self._beat, zmq.NOBLOCK)
        finally:
            self._socket.close(linger=0)
            self._stopped.close(linger=0)

    def _go_on(self) -> bool:
        """Listen until the next beat is due; returns whether there is to be one."""
        due_s = time.monotonic() + self._every_s
        while not self.dropped and (rest_s := due_s - time.monotonic()) > 0:
            ready = dict(self._poller.poll(1 + int(1000 * rest_s)))
            self._wake()
            if self._stopped in ready:
                return False
            if self._socket in ready:
                self._listen()
        return True

    def _wake(self) -> None:
        now = time.monotonic()
        if now - self._awake_s > self._every_s + AWAY_S:
            self._answered_s = now
        self._awake_s = now
        self.silent_s = now - self._answered_s

    def _listen(self) -> None:
        header = self._socket.recv_multipart()[0]
        self._answered_s = time.monotonic()
        with suppress(RemoteProtocolError):  # the client's own connection says what is wrong with this server
            self.dropped = isinstance(decode_from_server(header), Dropped)
