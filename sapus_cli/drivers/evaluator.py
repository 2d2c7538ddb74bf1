"""The evaluator process: tests snapshots of the global state, so that the server's CPU time is the server's alone."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from sapus_cli.codec import Evaluated, Snapshot, State, Stop
from sapus_cli.errors import DroppedError, RemoteProtocolError

if TYPE_CHECKING:
    from sapus_cli.drivers.client import Client
    from sapus_cli.strategy import Vec
    from sapus_cli.traces import Trace


class Tests(Protocol):
    """What tests a state vector."""

    def evaluate(self, vector: Vec) -> tuple[float, float, float | None]:
        """Mean loss of a state, shape `(d,)`, on the test set, its accuracy, and that of the worst class if known."""


def run(client: Client, tests: Tests, trace: Trace, *, every_s: float, n_train: int) -> None:
    """Ask for a snapshot, test it, report, until the final state has been tested or the run is halted.

    Args:
        client: a greeted connection.
        tests: the test set and a model of its own.
        trace: evals.csv.
        every_s: least time between two snapshots in seconds.
        n_train: size of the training set, which makes samples into epochs.
    """
    vector = torch.empty(client.welcome.elements)
    final = False
    while not final:
        asked = time.monotonic()
        try:
            state = _snapshot(client, vector)
        except DroppedError:
            client.renew()
            continue
        if state is None:
            return
        final = state.final
        loss, accuracy, worst_class = tests.evaluate(vector)
        epoch = state.samples / n_train
        trace.row((state.t_s, state.version, state.samples, epoch, loss, accuracy, worst_class))
        if final:
            trace.flush()  # when the server has heard of it the run may end, and this process with it
        trace.tick(time.monotonic())
        client.send(
            Evaluated(
                t_s=state.t_s,
                version=state.version,
                samples=state.samples,
                loss=loss,
                accuracy=accuracy,
                final=final,
            )
        )
        pause_s = every_s - (time.monotonic() - asked)
        if not final and pause_s > 0:
            # The only thing that can come meanwhile is the end of training, which ends the pause.
            with suppress(DroppedError):  # that is noticed again when it asks for the next snapshot
                stop = client.receive(None, int(1000 * pause_s))
                if isinstance(stop, Stop) and not stop.flush:
                    return


def _snapshot(client: Client, vector: Vec) -> State | None:
    client.send(Snapshot())
    while True:
        message = client.receive(vector, None)
        if isinstance(message, State):
            return message
        if isinstance(message, Stop) and not message.flush:
            return None
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the evaluator has no use for {message!r}")
