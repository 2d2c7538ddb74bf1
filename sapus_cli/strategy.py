"""The strategy interface: one algorithm, its worker half and its server half, without loop, clock, socket or log.

A strategy is a frozen dataclass of hyper-parameters. Whatever changes while it works is a state object that the
driver keeps and hands back, so the same object serves many workers, real processes and virtual time.

Vocabulary: a *step* is one local optimizer step; the *accumulated update* of a worker is `params - pulled`, its local
state minus the state it last pulled, shape `(d,)`; the server **adds** what is pushed. Withholding a reply is
blocking: a worker that pushed with `wait=True` stands still until the server half returns a `Reply` to it.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

Vec: TypeAlias = "torch.Tensor"
"""A flat state vector: shape `(d,)`, float32, contiguous."""

Info: TypeAlias = Mapping[str, "float | str"]
"""Facts about one push. The keys that `STANDARD_INFO` or `Strategy.columns` name become columns of pushes.csv."""

STANDARD_INFO = ("weight", "reason", "h_min", "h_max")
"""The info keys that every strategy may set: columns that every pushes.csv has."""

NOTHING: Mapping[str, float] = MappingProxyType({})

WorkerState = TypeVar("WorkerState")
State = TypeVar("State", bound="ServerState")


class Step(NamedTuple):
    """One local step, just taken.

    Attributes:
        t: steps this worker has taken in the whole run, this one included (1, 2, ...).
        k: steps since the last pull, this one included; steps taken while an exchange was in flight count.
        params: local state, shape `(d,)`. Not to be changed in `after_step`.
        pulled: the state last pulled, shape `(d,)`. `params - pulled` is the accumulated update.
        loss: mean training loss of this step's minibatch.
        last: no step follows: the budget ends here. A strategy that returns None for it pushes all the same: the
            accumulated update goes out with the reason "last".
        n_params: how many elements, the first ones, are trainable parameters; the others are buffers (the statistics
            of BatchNorm). None: all.
        exchange_s: seconds that this worker's last exchange took, push sent to reply noticed at the end of a step, less
            the time that the server withheld the reply; 0 before the first.
        step_s: seconds that this step took.
    """

    t: int
    k: int
    params: Vec
    pulled: Vec
    loss: float
    last: bool
    n_params: int | None = None
    exchange_s: float = 0.0
    step_s: float = 0.0


class Push(NamedTuple):
    """What a worker wants to send.

    Attributes:
        vector: shape `(d,)`; None means the accumulated update `params - pulled`. On a wire narrower than float32 each
            element gets what rounding took from the one before it in its place: a vector that is to have zeros in
            places, or that is a state and no update, is changed by that.
        info: goes to the server half and into pushes.csv.
        wait: True: stand still until the reply. False: keep stepping while the exchange is in flight.
    """

    vector: Vec | None = None
    info: Info = NOTHING
    wait: bool = True


class Received(NamedTuple):
    """A push as the server half sees it.

    Attributes:
        worker: rank of its worker.
        vector: what was sent, shape `(d,)`. It may be changed, and kept until its worker is replied to: then the memory
            may get that worker's next push. What is to stay for longer has to be copied.
        n_steps: local steps since that worker's last pull (its update interval).
        loss: mean training loss over those steps.
        staleness: updates applied to the global state since that worker pulled.
        now: seconds since the start of the run.
        step_s: seconds a local step took that worker, mean over the interval.
        exchange_s: seconds its last exchange took, push sent to reply received, less the time the reply was withheld;
            0 before its first exchange.
        bytes: size of this push on the wire.
        last: the worker's budget ends with this push.
        info: what the worker half put into `Push.info`.
        server_cpu_s: CPU seconds that the server has used in this run. They are read every few milliseconds at most, so
            that several pushes in a row may bring the same number.
    """

    worker: int
    vector: Vec
    n_steps: int
    loss: float
    staleness: int
    now: float
    step_s: float
    exchange_s: float
    bytes: int = 0
    last: bool = False
    info: Info = NOTHING
    server_cpu_s: float = 0.0


class Reply(NamedTuple):
    """An answer to a worker that pushed or joined; it ends that worker's waiting.

    Attributes:
        to: rank of the worker.
        vector: shape `(d,)`; None means the global state as it is now.
        hint: numbers for the worker half's `after_reply`.
        info: goes into the pushes.csv row of the push that it answers.
    """

    to: int
    vector: Vec | None = None
    hint: Mapping[str, float] = NOTHING
    info: Info = NOTHING


class Setting(NamedTuple):
    """What a strategy may know of where it runs.

    Attributes:
        link_bytes_per_s: rate of the server's link in each direction; None if nobody has said, so that it has to be
            measured.
        link_latency_s: seconds for which a message is under way beside that, in each direction.
        element_bytes: bytes that an element of a vector takes on the link.
        server_cores: cores that can apply pushes at the same time; the server has one thread.
        memory_bytes: what the server may hold of pushes in flight.
        momentum: that of the local optimizer (0.9 for AdamW's first moment).
    """

    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0
    element_bytes: float = 4.0
    server_cores: float = 1.0
    memory_bytes: float = math.inf
    momentum: float = 0.0


@dataclass
class ServerState:
    """What every server half keeps; strategies add to it by subclassing.

    Attributes:
        x: the global state, shape `(d,)`, updated in place.
        setting: where it runs; the caller sets it after `init_server`.
        members: ranks of the live workers; the caller keeps it, before `on_join` and `on_leave` are called.
        pending: pushes received that are not in `x` yet. The version of the global state is the number of pushes
            received less this, so a strategy that collects pushes before it applies them keeps it current.
    """

    x: Vec
    members: set[int] = field(default_factory=set)
    pending: int = 0
    setting: Setting = field(default_factory=Setting)


class Strategy(Protocol[WorkerState, State]):
    """A parameter-update strategy. Subclass it as a frozen dataclass; the bodies below are the defaults.

    `columns` names the info keys beyond `STANDARD_INFO` that this strategy writes into pushes.csv.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def init_worker(self, x0: Vec, worker: int) -> WorkerState:
        """Make the state of one worker half, before its first step. `x0` is what it pulled first, shape `(d,)`."""

    @abstractmethod
    def after_step(self, w: WorkerState, step: Step) -> Push | None:
        """Decide after every local step whether to push now. Not called while an exchange is in flight."""

    def after_reply(self, w: WorkerState, local: Vec, pulled: Vec, hint: Mapping[str, float]) -> None:
        """Take over what the server sent in reply to a push, or the hint that came with the first state, if one did.

        `local` is to be changed in place; by default it becomes `pulled`.

        After a push with `wait=False`, `local` holds the state at the push when this is called; the steps taken in
        flight are added to the result by the caller.
        """
        local.copy_(pulled)

    @abstractmethod
    def init_server(self, x0: Vec, n_workers: int) -> State:
        """Make the state of the server half. `x0` is the initial global state, shape `(d,)`, and may be kept."""

    @abstractmethod
    def on_push(self, s: State, msg: Received) -> Sequence[Reply]:
        """Take one push; may update `s.x` in place. Returns the replies that are due now, in the order of sending."""

    def on_join(self, s: State, worker: int) -> Sequence[Reply]:
        """Admit a worker that asks for its first pull. It waits until it is replied to."""
        return (Reply(worker),)

    def on_leave(self, s: State, worker: int) -> Sequence[Reply]:
        """Take note that a worker ended or died: it gets no more replies, and nobody may go on waiting for it."""
        return ()


AnyStrategy: TypeAlias = Strategy[Any, Any]


@dataclass
class Round(ServerState):
    """Server state of the synchronous strategies: the mean of one push a worker, summed in the order of ranks.

    Pushes may arrive in any order; each is added as soon as those of all lower ranks have been, so that the result is
    the same to the last bit in every run, and a vector is held only while it is out of order.
    """

    early: dict[int, Vec] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    count: int = 0
    total: Vec | None = None

    def arrive(self, worker: int, vector: Vec) -> None:
        """Take the push of one member, shape `(d,)`."""
        self.early[worker] = vector
        self.pending += 1
        self._add()

    def complete(self) -> bool:
        """Whether somebody has pushed and every live worker has."""
        self._add()
        # Who left and came back under the same rank has not pushed again yet.
        self.added &= self.members
        return self.count > 0 and self.members <= self.added

    def mean(self) -> Vec:
        """End the round: the mean of what was pushed, shape `(d,)`. Valid until the next push arrives.

        Raises:
            ValueError: nobody has pushed.
        """
        if self.total is None or self.count == 0:
            raise ValueError("a round without a push has no mean")
        self.total.div_(self.count)
        self.added.clear()
        self.count = self.pending = 0
        return self.total

    def average(self) -> list[Reply]:
        """Once the round is complete: add the mean to the global state and let everybody go."""
        if not self.complete():
            return []
        weight = 1 / self.count
        self.x.add_(self.mean())
        return self.release({"weight": weight})

    def release(self, info: Info = NOTHING, hint: Mapping[str, float] = NOTHING) -> list[Reply]:
        """Replies to all live workers."""
        return [Reply(worker, info=info, hint=hint) for worker in sorted(self.members)]

    def _add(self) -> None:
        missing = sorted(self.members - self.added, reverse=True)
        for worker in sorted(self.early):
            if worker in self.members:
                if worker != missing[-1]:
                    continue
                missing.pop()
            vector = self.early.pop(worker)
            if self.total is None:
                self.total = vector.clone()
            elif self.count:
                self.total.add_(vector)
            else:
                self.total.copy_(vector)
            self.added.add(worker)
            self.count += 1


def require_whole(name: str, value: float, least: int) -> None:
    """Refuse a hyper-parameter that is not a whole number of at least `least`.

    Raises:
        ValueError: names the hyper-parameter, the value and the range.
    """
    if value != int(value) or value < least:
        raise ValueError(f"{name} = {value!r}: must be a whole number of at least {least}")


def require_between(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Refuse a hyper-parameter outside of [low, high], or of (low, high] with `open_low`.

    Raises:
        ValueError: names the hyper-parameter, the value and the range.
    """
    too_low = value <= low if open_low else value < low
    if too_low or value > high or not math.isfinite(value):
        bracket = "(" if open_low else "["
        top = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise ValueError(f"{name} = {value!r}: must lie in {bracket}{low:g}, {top}")


_METHODS: dict[str, int] = {
    name: len(inspect.signature(getattr(Strategy, name)).parameters) - 1
    for name in ("init_worker", "after_step", "after_reply", "init_server", "on_push", "on_join", "on_leave")
}


def fault_of(cls: Any) -> str | None:
    """Say what keeps a class from being a strategy, or None if nothing does.

    The sentence names the method that is missing, abstract or of another signature.
    """
    if not inspect.isclass(cls):
        return "it is not a class"
    dataclass_params = getattr(cls, "__dataclass_params__", None)
    if dataclass_params is None or not dataclass_params.frozen:
        return "it is not a frozen dataclass (put @dataclass(frozen=True) above the class)"
    for name, arity in _METHODS.items():
        method: Any = getattr(cls, name, None)
        if not callable(method) or getattr(method, "__isabstractmethod__", False):
            return f"it has no method {name}"
        if not _takes(method, arity + 1):
            given = inspect.signature(getattr(Strategy, name))
            return f"its method {name} does not take the arguments {given}"
    return None


def _takes(method: Callable[..., object], n: int) -> bool:
    try:
        inspect.signature(method).bind(*range(n))
    except (TypeError, ValueError):
        return False
    return True
