"""A worker process: steps its model, pushes when its strategy says so."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from sapus_cli.codec import Declined, Leave, Push, State, Stop
from sapus_cli.errors import DroppedError, RemoteProtocolError
from sapus_cli.protocol import Phase, WorkerCore

if TYPE_CHECKING:
    from sapus_cli.cluster import StepTimes
    from sapus_cli.codec import FromServer, Pull
    from sapus_cli.drivers.client import Client
    from sapus_cli.strategy import AnyStrategy, Vec


log = logging.getLogger(__name__)


class Steps(Protocol):
    """What a worker trains: one flat local state, stepped in place.

    `steps` is the number of steps taken, on which the next minibatch depends.
    """

    steps: int

    @property
    def vector(self) -> Vec:
        """Local state, shape `(d,)`."""

    def step(self) -> tuple[float, int]:
        """Take one local step; returns the minibatch's mean loss and its number of samples."""

    def forget(self) -> None:
        """Drop what the optimizer has accumulated."""


class Worker:
    """Drives a `WorkerCore` over a connection until its budget is used up or the server says stop.

    Args:
        client: a greeted connection.
        strategy: the run's strategy.
        trainer: the model, its data and its optimizer.
        fingerprint: the model's layout.
        n_params: elements of the state that are trainable parameters, its first ones.
        steps: local steps to take at most; None for no bound.
        seconds: seconds to train at most, from the release of all workers; None for no bound.
        times: how long each step is to take; None: as long as it takes.
    """

    def __init__(
        self,
        client: Client,
        strategy: AnyStrategy,
        trainer: Steps,
        *,
        fingerprint: str,
        n_params: int,
        steps: int | None,
        seconds: float | None,
        times: StepTimes | None = None,
    ) -> None:
        self._client = client
        self._trainer = trainer
        self._fingerprint = fingerprint
        self._steps = steps
        self._seconds = seconds
        self._times = times
        self._overruns = 0
        self._time = 0.0
        self._strategy = strategy
        self._n_params = n_params
        self._unanswered: Pull | Push | None = None
        self._released: float | None = None
        self._begin()

    def _begin(self) -> None:
        """Be what the server has just welcomed: the next in the life of this rank."""
        welcome = self._client.welcome
        self._core = WorkerCore(
            self._strategy,
            self._trainer.vector,
            welcome.rank,
            self._n_params,
            *self._client.buffers,
            wire=self._client.dtype,
        )
        self._core.begin(welcome.steps, welcome.seq)
        self._trainer.steps = welcome.steps
        self._unanswered = self._core.pull(self._fingerprint)

    def run(self) -> str:
        """Train. Returns why it ended: "done" or "halted"."""
        while True:
            try:
                self._ask()
                reason = self._train()
                self._client.send(Leave(reason=reason, overruns=self._overruns))
            except DroppedError as dropped:
                log.warning("%s", dropped)
                self._client.renew()
                if not self._client.welcome.resumed:
                    log.warning("begins anew at step %d", self._client.welcome.steps)
                    self._begin()
            else:
                return reason

    def _ask(self) -> None:
        """Send what there is no answer to, as if for the first time."""
        if self._unanswered is not None:
            self._client.send(self._unanswered, self._core.outgoing if isinstance(self._unanswered, Push) else None)

    def _train(self) -> str:
        core = self._core
        if self._steps is not None and core.steps >= self._steps:
            core.stop()  # the one whose place it takes was at its end
        while core.phase is not Phase.DONE:
            message = self._client.receive(core.incoming, None if core.phase is Phase.WAITING else 0)
            if message is not None:
                if isinstance(message, Stop) and not message.flush:
                    return "halted"
                # A worker that is late on a busy machine may find what arrives only while its next step goes on.
                while core.phase is Phase.COMPUTING and self._arrival(message) > self._time:
                    self._step()
                self._take(message)
            elif core.phase is Phase.COMPUTING:
                self._step()
        return "done"

    def _step(self) -> None:
        begin = self._now() if self._times is None else self._time
        loss, n_samples = self._trainer.step()
        now = self._time = self._pad(begin)
        out_of_time = self._seconds is not None and now >= self._seconds
        last = out_of_time or self._core.steps + 1 == self._steps
        self._send(self._core.after_step(loss, n_samples, now - begin, now, last=last))

    def _send(self, push: Push | None) -> None:
        if push is None:
            return
        if self._times is not None:
            push = msgspec.structs.replace(push, sent_s=self._time)
        self._unanswered = push
        self._client.send(push, self._core.outgoing)

    def _pad(self, begin: float) -> float:
        """Sleep until the step is over that began at `begin`; returns when that was to be, or now if it is later.

        Times are seconds since the release of all workers.

        A step begins when the one before it was to end, or when the state that it waited for was to arrive, so that
        what this machine is late by does not add up: a cluster has more cores.
        """
        if self._times is None:
            return self._now()
        end = self._times.finish(begin, self._times.draw(self._core.steps))
        rest = end - self._now()
        if rest < 0:
            self._overruns += 1
            if self._overruns == 1:
                log.warning("step %d took %.1f ms longer than its profile says", self._core.steps + 1, -1000 * rest)
            return end - rest
        time.sleep(rest)
        return end

    def _arrival(self, message: FromServer) -> float:
        """When an emulated link delivers a state; 0 where nothing is emulated."""
        if self._times is None or not isinstance(message, State):
            return 0.0
        return message.t_s + message.link_s

    def _now(self) -> float:
        """Seconds since the release of all workers; 0 before."""
        return 0.0 if self._released is None else time.monotonic() - self._released

    def _learn_release(self, message: State) -> None:
        """The state that came fastest tells best when the run began."""
        release = time.monotonic() - message.t_s - message.link_s
        if self._released is None or (self._times is not None and release < self._released):
            self._released = release

    def _take(self, message: FromServer) -> None:
        if isinstance(message, Stop):
            self._core.stop()
            return
        self._unanswered = None
        if isinstance(message, Declined):
            self._core.on_declined(message)
            return
        if not isinstance(message, State):
            raise RemoteProtocolError(f"a worker has no use for {message!r}")
        self._learn_release(message)
        self._time = max(self._time, self._arrival(message))
        now = self._now() if self._times is None else self._time
        if self._seconds is not None and now >= self._seconds:
            self._core.stop()
        if message.fresh:
            self._trainer.forget()
        self._send(self._core.on_state(message, now))
