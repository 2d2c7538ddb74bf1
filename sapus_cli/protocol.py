"""The parameter-server protocol without I/O and without a clock: one core for a worker, one for the server.

    client                    server             rule
    ------------------------  -----------------  ---------------------------------------------------------------
    hello(role, rank)         welcome(config)    once a connection, first; other protocol version: refused
    pull(fingerprint)         state(x)           once an incarnation; withheld until all workers have pulled (start)
    push(seq, version, u)     state(x)           seq counts from 1; one at most without its reply; the reply may be
                                                 withheld; the same seq again is answered again, but applied once
                              declined           instead of a state: loss or vector was not finite, nothing was
                                                 applied; the tenth time in a row it is state(x, fresh) instead
    leave                                        last word of a worker
    snapshot                  state(x)           the evaluator, at any time
                              stop(flush)        to everybody, at any time
    beat                      alive              every second or so, over a connection of its own and the main one
    (anything)                dropped            to whom the server does not know, or has let go: hello is due again

An incarnation of a worker is its life from one first pull to its death, its leave, or its being let go because nothing
was heard of it. Whoever loses its connection connects again as the same incarnation, and sends again what was not
answered; who is let go begins a new one, with the steps and the number of pushes that the server has had of its rank.

The drivers own sockets and clocks; they pass decoded messages and the time in seconds since the start of the run, and
send what they are handed. The same cores run in real processes and in virtual time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from sapus_cli.codec import Declined, Pull, Push, State
from sapus_cli.errors import DeadlockError, DivergedError, LocalProtocolError, RemoteProtocolError
from sapus_cli.strategy import STANDARD_INFO, AnyStrategy, Received, Reply, Step, Vec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sapus_cli.strategy import Info, ServerState, Setting


PATIENCE = 10
"""Pushes in a row that are not finite before a worker is told to pull afresh."""


def finite(vector: Vec) -> bool:
    """Whether all elements are finite, and their sum; one pass over the vector."""
    return math.isfinite(vector.sum(dtype=torch.float32))


class Phase(Enum):
    """Where a worker stands."""

    NEW = "new"
    COMPUTING = "computing"
    WAITING = "waiting"
    DONE = "done"


@dataclass(slots=True)
class _Interval:
    """What a worker did since its last push."""

    k: int = 0
    samples: int = 0
    step_s_sum: float = 0.0
    loss_sum: float = 0.0
    n_losses: int = 0

    def take(self, loss: float, n_samples: int, step_s: float) -> None:
        self.k += 1
        self.samples += n_samples
        self.step_s_sum += step_s
        self.loss_sum += loss
        self.n_losses += 1

    def add(self, other: _Interval) -> None:
        """Count in an interval whose push was not applied; a loss that was not finite is forgotten."""
        self.k += other.k
        self.samples += other.samples
        self.step_s_sum += other.step_s_sum
        if math.isfinite(other.loss_sum):
            self.loss_sum += other.loss_sum
            self.n_losses += other.n_losses


class WorkerCore:
    """The protocol of one worker over its flat local state.

    `local` is stepped in place by the caller between calls; `incoming` is the host buffer that the vector of a state
    message is received into; a push is sent from `outgoing`, which must not be touched until its reply has arrived.
    Both have the type of the wire. What a narrower wire cuts off an update is added to the next one (error feedback:
    Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).

    Args:
        strategy: the run's strategy.
        local: the local state, shape `(d,)`.
        worker: rank of the worker.
        n_params: elements of the state that are trainable parameters, its first ones; None: all.
        outgoing: a buffer on the host, shape `(d,)`, that several workers may share if each push is copied out of it
            before the next call of any of them; None: one of its own.
        incoming: likewise for states, if each is written into it right before `on_state`; None: one of its own.
        wire: what buffers of its own are made of.

    Attributes:
        phase: WAITING means that no step may be taken until a state arrives; DONE that it is time to leave.
        steps: local steps taken in the whole run.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        local: Vec,
        worker: int,
        n_params: int | None = None,
        outgoing: Vec | None = None,
        incoming: Vec | None = None,
        wire: torch.dtype = torch.float32,
    ) -> None:
        self.phase = Phase.NEW
        self.steps = 0
        self.worker = worker
        self.local = local
        self.outgoing = _host_buffer(local, wire) if outgoing is None else outgoing
        self.incoming = _host_buffer(local, wire) if incoming is None else incoming
        self.pulled = self.incoming if _alike(self.incoming, local) else torch.empty_like(local)
        self._update = self.outgoing if _alike(self.outgoing, local) else torch.empty_like(local)
        self._cut_off = torch.zeros_like(local) if self.outgoing.dtype != local.dtype else None
        self._at_push: Vec | None = None
        self._strategy = strategy
        self._n_params = n_params
        self._state: object = None
        self._in_flight = False
        self._ending = False
        self._stopping = False
        self._version = 0
        self._seq = 0
        self._sent_at = 0.0
        self._exchange_s = 0.0
        self._interval = _Interval()
        self._sent = _Interval()

    def begin(self, steps: int, seq: int) -> None:
        """Go on, before the first pull, from the local steps and the pushes that the server has had of this rank."""
        self._expect(Phase.NEW)
        self.steps = steps
        self._seq = seq

    def pull(self, fingerprint: str) -> Pull:
        """The request for the first state."""
        self._expect(Phase.NEW)
        self.phase = Phase.WAITING
        return Pull(fingerprint=fingerprint)

    def after_step(self, loss: float, n_samples: int, step_s: float, now: float, *, last: bool) -> Push | None:
        """Take note of a local step; returns the push that is due, its vector in `outgoing`.

        Args:
            loss: mean training loss of the minibatch.
            n_samples: samples in the minibatch.
            step_s: seconds the step took.
            now: seconds on any steady clock.
            last: the budget ends with this step.
        """
        self._expect(Phase.COMPUTING)
        self.steps += 1
        self._interval.take(loss, n_samples, step_s)
        last = last or self._stopping
        self._ending = last
        if self._in_flight:
            if last:
                self.phase = Phase.WAITING
            return None
        step = Step(
            t=self.steps,
            k=self._interval.k,
            params=self.local,
            pulled=self.pulled,
            loss=loss,
            last=last,
            n_params=self._n_params,
            exchange_s=self._exchange_s,
            step_s=step_s,
        )
        decision = self._strategy.after_step(self._state, step)
        if decision is None:
            return self._tail(now) if last else None
        if decision.vector is None:
            torch.sub(self.local, self.pulled, out=self._update)
        else:
            self._update.copy_(decision.vector)
        if not decision.wait:
            self._remember_local()
        info = dict(decision.info)
        if last:
            info.setdefault("reason", "last")
        return self._push(now, info, wait=decision.wait or last)

    def on_state(self, message: State, now: float) -> Push | None:
        """Take over a state whose vector has been received into `incoming`.

        Returns the push of the tail that was computed while the last exchange was in flight, if there is one.

        Raises:
            RemoteProtocolError: nothing was asked for.
        """
        if self.phase in {Phase.NEW, Phase.DONE} or (self.phase is Phase.COMPUTING and not self._in_flight):
            raise RemoteProtocolError("a state arrived that this worker had not asked for")
        if self.incoming is not self.pulled:
            self.pulled.copy_(self.incoming)
        self._version = message.version
        if message.fresh:
            self.local.copy_(self.pulled)
            if self._cut_off is not None:
                self._cut_off.zero_()
            self._state = self._strategy.init_worker(self.pulled, self.worker)
            self._interval = _Interval()
            if message.hint:
                self._strategy.after_reply(self._state, self.local, self.pulled, message.hint)
        else:
            self._exchange_s = max(0.0, now - self._sent_at - message.held_s)
            self._take_over(message)
        self._in_flight = False
        self.phase = Phase.COMPUTING
        if self._ending and self._interval.k > 0:
            return self._tail(now)
        if self._ending or (self._stopping and self._interval.k == 0):
            self.phase = Phase.DONE
        return None

    def on_declined(self, message: Declined) -> None:
        """Go on after a push that was not applied: its steps count into the next one.

        Raises:
            RemoteProtocolError: it answers no push that is under way.
        """
        if not self._in_flight or message.seq != self._seq:
            raise RemoteProtocolError(f"push {message.seq} was declined, but it is not under way")
        self._in_flight = False
        self._interval.add(self._sent)
        self.phase = Phase.DONE if self._ending else Phase.COMPUTING

    def stop(self) -> None:
        """The run ends: the next step will be the last; with nothing accumulated there is none."""
        self._stopping = True
        if self.phase is Phase.COMPUTING and not self._in_flight and self._interval.k == 0:
            self.phase = Phase.DONE

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"worker {self.worker} is {self.phase.value}, not {phase.value}")

    def _tail(self, now: float) -> Push:
        torch.sub(self.local, self.pulled, out=self._update)
        return self._push(now, {"reason": "last"}, wait=True)

    def _push(self, now: float, info: dict[str, float | str], *, wait: bool) -> Push:
        interval = self._interval
        loss = interval.loss_sum / interval.n_losses
        is_finite = self._fill_outgoing(keep=math.isfinite(loss))
        self._seq += 1
        self._sent_at = now
        push = Push(
            seq=self._seq,
            version=self._version,
            n_steps=interval.k,
            n_samples=interval.samples,
            loss=loss,
            step_s=interval.step_s_sum / interval.k,
            exchange_s=self._exchange_s,
            last=self._ending,
            finite=is_finite,
            info=info,
        )
        self._sent, self._interval = interval, _Interval()
        self._in_flight = True
        if wait:
            self.phase = Phase.WAITING
        return push

    def _fill_outgoing(self, *, keep: bool) -> bool:
        """Put the update into `outgoing`; returns whether it is finite there.

        What does not fit is kept for the next push only if this one will be applied.
        """
        if self._cut_off is None:
            if self._update is not self.outgoing:
                self.outgoing.copy_(self._update)
            return finite(self._update)
        self._update.add_(self._cut_off)
        if self.outgoing.device == self._update.device:
            rounded = self.outgoing.copy_(self._update)
        else:
            rounded = self._update.to(self.outgoing.dtype)
            self.outgoing.copy_(rounded)
        is_finite = finite(rounded)
        if is_finite and keep:
            torch.sub(self._update, rounded, out=self._cut_off)
        return is_finite

    def _remember_local(self) -> None:
        if self._at_push is None:
            self._at_push = torch.empty_like(self.local)
        self._at_push.copy_(self.local)

    def _take_over(self, message: State) -> None:
        if self._interval.k == 0:
            self._strategy.after_reply(self._state, self.local, self.pulled, message.hint)
            return
        # Steps were taken in flight: what they moved is put on top of the state that was pulled. The push has been
        # received, so its buffer is free to hold that difference.
        if self._at_push is None:
            raise LocalProtocolError("steps were taken while waiting for a reply")
        moved = torch.sub(self.local, self._at_push, out=self._update)
        self.local.copy_(self._at_push)
        self._strategy.after_reply(self._state, self.local, self.pulled, message.hint)
        self.local.add_(moved)


def _host_buffer(local: Vec, wire: torch.dtype) -> Vec:
    buffer = torch.empty_like(local, dtype=wire, device="cpu")
    return buffer if local.device.type == "cpu" else buffer.pin_memory()


def _alike(buffer: Vec, local: Vec) -> bool:
    """Whether a buffer can stand for a vector beside the local state, without a copy."""
    return buffer.device == local.device and buffer.dtype == local.dtype


@dataclass(slots=True)
class PushRow:
    """What pushes.csv says of one push; the columns are described there."""

    t_s: float
    worker: int
    seq: int
    n_steps: int
    loss: float
    version: int
    staleness: int
    bytes_in: int
    step_s: float
    exchange_s: float
    held_s: float = 0.0
    info: dict[str, float | str] = field(default_factory=dict)


class Outgoing(NamedTuple):
    """A reply to send: to which worker, what, and which push it closes (None for a first pull).

    `vector`, shape `(d,)`, is to be sent as it is at this moment; a declined push is answered without one.
    """

    worker: int
    message: State | Declined
    vector: Vec | None
    row: PushRow | None


@dataclass(slots=True)
class Progress:
    """What the server has had of a rank, over all its incarnations: local steps, and the number of its last push."""

    steps: int = 0
    seq: int = 0


@dataclass(slots=True)
class _Member:
    progress: Progress
    declined: int = 0
    sick_since: int = 0
    row: PushRow | None = None
    joining: bool = False
    last: Outgoing | None = None


@dataclass
class Saved:
    """What a `ServerCore` has to remember to go on in another process.

    `live` are the ranks of its workers, `joining` those that wait for their first state, `unanswered` the pushes that
    wait for their reply.
    """

    state: ServerState
    samples: int
    steps: int
    received: int
    declined: int
    progress: dict[int, Progress]
    live: list[int]
    joining: list[int]
    unanswered: list[PushRow]


class ServerCore:
    """The protocol of the server over the global state.

    Attributes:
        state: the strategy's server state; `state.x` is the global state, shape `(d,)`.
        samples: training samples behind all pushes received.
        steps: local steps behind all pushes received.
        started: whether all workers have pulled once, which starts the run.
        received: pushes accepted, each once.
        declined: pushes that were not applied because they were not finite.
        waiting: ranks of the workers that have pushed or pulled and got no reply yet.
    """

    def __init__(self, strategy: AnyStrategy, x0: Vec, n_workers: int, setting: Setting | None = None) -> None:
        self.state: ServerState = strategy.init_server(x0, n_workers)
        if setting is not None:
            self.state.setting = setting
        self.samples = 0
        self.steps = 0
        self.started = False
        self.declined = 0
        self._strategy = strategy
        self._columns = frozenset((*STANDARD_INFO, *strategy.columns))
        self._n_workers = n_workers
        self.received = 0
        self._members: dict[int, _Member] = {}
        self._progress: dict[int, Progress] = {}
        self.waiting: set[int] = set()

    @property
    def version(self) -> int:
        """Number of pushes that are in the global state."""
        return self.received - self.state.pending

    def has(self, worker: int) -> bool:
        """Whether a worker has pulled and has not left."""
        return worker in self._members

    def progress(self, worker: int) -> Progress:
        """What there has been of a rank so far."""
        return self._progress.setdefault(worker, Progress())

    def saved(self) -> Saved:
        """What to keep of all this for `restore`. It shares memory with this object."""
        live = sorted(self.state.members)
        members = [self._members[worker] for worker in live]
        return Saved(
            state=self.state,
            samples=self.samples,
            steps=self.steps,
            received=self.received,
            declined=self.declined,
            progress=self._progress,
            live=live,
            joining=[worker for worker in live if self._members[worker].joining],
            unanswered=[member.row for member in members if member.row is not None],
        )

    def restore(self, saved: Saved, now: float, *, started: bool) -> list[PushRow]:
        """Go on from there in a new object. Its workers have left; if it is not `started`, all are waited for again.

        Returns the rows of the pushes that get no reply any more.
        """
        saved.state.setting = self.state.setting
        self.state = saved.state
        self.samples, self.steps = saved.samples, saved.steps
        self.received, self.declined = saved.received, saved.declined
        self._progress = saved.progress
        self._members = {
            worker: _Member(self.progress(worker), joining=worker in saved.joining) for worker in saved.live
        }
        for row in saved.unanswered:
            self._members[row.worker].row = row
        self.waiting = {*saved.joining, *(row.worker for row in saved.unanswered)}
        self.started = True
        # First who does not wait: then the others are still there to be told what became of their pushes.
        for worker in sorted(saved.live, key=self.waiting.__contains__):
            self.leave(worker, now)
        self.started = started
        return saved.unanswered

    def join(self, worker: int, now: float) -> list[Outgoing]:
        """Take the first pull of a worker. The first replies leave together, when the last worker has pulled.

        A pull that is sent again before the first push is answered again.

        Raises:
            RemoteProtocolError: the worker pulled before, or its rank is out of range.
        """
        if not 0 <= worker < self._n_workers:
            raise RemoteProtocolError(f"rank {worker} does not exist: there are {self._n_workers} workers")
        if member := self._members.get(worker):
            if member.joining or (member.last is not None and member.row is None and self._is_fresh(member.last)):
                return self._again(member, now)
            raise RemoteProtocolError(f"worker {worker} has pulled already")
        self._members[worker] = _Member(self.progress(worker), joining=True)
        self.waiting.add(worker)
        if self.started:
            return self._admit([worker], now)
        if len(self._members) < self._n_workers:
            return []
        self.started = True
        return self._admit(sorted(self._members), now)

    def push(
        self, worker: int, message: Push, vector: Vec, now: float, n_bytes: int, cpu_s: float = 0.0
    ) -> list[Outgoing]:
        """Take a push; returns the replies that are due now.

        Args:
            worker: rank of the worker.
            message: its header.
            vector: shape `(d,)`, float32 or narrower; handed to the strategy, in float32, which may keep it until it
                replies to the worker.
            now: seconds since the start of the run.
            n_bytes: size of the message on the wire.
            cpu_s: CPU seconds that the server has used in this run, as they were read last.

        Raises:
            RemoteProtocolError: the push breaks a rule. Nothing has been applied.
            LocalProtocolError: the strategy broke a rule.
            DivergedError: no live worker has pushed anything finite for ten pushes.
        """
        member = self._members.get(worker)
        if member is None or not self.started:
            raise RemoteProtocolError(f"worker {worker} pushed before it pulled")
        progress = member.progress
        if message.seq <= progress.seq:
            return self._again(member, now) if message.seq == progress.seq else []
        if message.seq != progress.seq + 1:
            raise RemoteProtocolError(f"worker {worker} sent push {message.seq} after push {progress.seq}")
        if member.row is not None or member.joining:
            raise RemoteProtocolError(f"worker {worker} pushed while it waited for a reply")
        version = self.version
        if message.version > version:
            raise RemoteProtocolError(f"worker {worker} claims version {message.version}, the newest is {version}")
        for key, value in message.info.items():
            if key not in self._columns:
                raise RemoteProtocolError(self._undeclared(key))
            if key in STANDARD_INFO and isinstance(value, str) is not (key == "reason"):
                raise RemoteProtocolError(
                    f"the info {key}={value!r} must be {'text' if key == 'reason' else 'a number'}"
                )
        progress.seq = message.seq
        member.last = None
        if not (message.finite and math.isfinite(message.loss)):
            return self._decline(worker, member, message, vector.dtype, now)
        member.declined = 0
        progress.steps += message.n_steps
        member.row = PushRow(
            t_s=now,
            worker=worker,
            seq=message.seq,
            n_steps=message.n_steps,
            loss=message.loss,
            version=version,
            staleness=version - message.version,
            bytes_in=n_bytes,
            step_s=message.step_s,
            exchange_s=message.exchange_s,
            info=dict(message.info),
        )
        self.waiting.add(worker)
        self.received += 1
        self.samples += message.n_samples
        self.steps += message.n_steps
        received = Received(
            worker=worker,
            vector=vector.float(),
            n_steps=message.n_steps,
            loss=message.loss,
            staleness=member.row.staleness,
            now=now,
            step_s=message.step_s,
            exchange_s=message.exchange_s,
            bytes=n_bytes,
            last=message.last,
            info=message.info,
            server_cpu_s=cpu_s,
        )
        return self._replies(self._strategy.on_push(self.state, received), now)

    def leave(self, worker: int, now: float) -> tuple[list[Outgoing], PushRow | None]:
        """Let a worker go; returns the replies that this releases, and its own push if it was never replied to.

        Raises:
            RemoteProtocolError: there is no such worker.
        """
        member = self._members.pop(worker, None)
        if member is None:
            raise RemoteProtocolError(f"worker {worker} left, but it was not there")
        self.waiting.discard(worker)
        row = member.row
        if row is not None:
            row.held_s = now - row.t_s
        if not self.started:
            return [], row
        self.state.members.discard(worker)
        return self._replies(self._strategy.on_leave(self.state, worker), now), row

    def _decline(self, worker: int, member: _Member, message: Push, wire: torch.dtype, now: float) -> list[Outgoing]:
        self.declined += 1
        if member.declined == 0:
            member.sick_since = member.progress.steps + message.n_steps
        member.declined += 1
        if all(other.declined >= PATIENCE for other in self._members.values()):
            # Its numbers end at 65504, those of the state do not.
            other_wire = ", or --wire bfloat16" if wire == torch.float16 else ""
            raise DivergedError(
                f"diverged: no worker pushes finite numbers any more, worker {worker} since its step "
                f"{member.sick_since}, for {PATIENCE} pushes until {now:.1f} s; try a smaller --lr{other_wire}"
            )
        if member.declined % PATIENCE:
            member.last = Outgoing(worker, Declined(seq=message.seq), None, None)
            return [member.last]
        # To pull afresh is to leave and to come back: the strategy must forget what it knows of this worker's state.
        self.state.members.discard(worker)
        outgoing = self._answer(self._strategy.on_leave(self.state, worker), now)
        member.joining = True
        self.waiting.add(worker)
        return outgoing + self._admit([worker], now)

    def snapshot(self, now: float, *, final: bool) -> State:
        """The header for a snapshot of `state.x` as it is now."""
        return State(version=self.version, t_s=now, samples=self.samples, final=final)

    def _admit(self, workers: list[int], now: float) -> list[Outgoing]:
        outgoing = []
        for worker in workers:
            self.state.members.add(worker)
            outgoing += self._answer(self._strategy.on_join(self.state, worker), now)
        self._check_progress()
        return outgoing

    def _replies(self, replies: Iterable[Reply], now: float) -> list[Outgoing]:
        outgoing = self._answer(replies, now)
        self._check_progress()
        return outgoing

    def _answer(self, replies: Iterable[Reply], now: float) -> list[Outgoing]:
        outgoing = []
        for reply in replies:
            member = self._members.get(reply.to)
            if member is None or (member.row is None and not member.joining):
                raise LocalProtocolError(f"the strategy replied to worker {reply.to}, which does not wait for a reply")
            row, fresh = member.row, member.joining
            member.row, member.joining = None, False
            self.waiting.discard(reply.to)
            held_s = 0.0
            if row is not None:
                held_s = row.held_s = max(0.0, now - row.t_s)
                row.info.update(self._declared(reply.info))
            header = State(
                version=self.version,
                t_s=now,
                samples=self.samples,
                held_s=held_s,
                hint=self._finite(reply),
                fresh=fresh,
            )
            member.last = Outgoing(reply.to, header, reply.vector, None)
            outgoing.append(Outgoing(reply.to, header, self.state.x if reply.vector is None else reply.vector, row))
        return outgoing

    def _again(self, member: _Member, now: float) -> list[Outgoing]:
        """Answer once more what a worker sent again, because the reply was lost with its connection, if there was one.

        A vector of the strategy's own is the one that was sent; the global state may be newer by now.
        """
        last = member.last
        if last is None or isinstance(last.message, Declined) or last.vector is not None:
            return [last] if last else []
        header = self.snapshot(now, final=False)
        header = msgspec.structs.replace(header, hint=last.message.hint, fresh=last.message.fresh)
        return [Outgoing(last.worker, header, self.state.x, None)]

    @staticmethod
    def _is_fresh(reply: Outgoing) -> bool:
        return isinstance(reply.message, State) and reply.message.fresh

    def _declared(self, info: Info) -> Info:
        for key in info:
            if key not in self._columns:
                raise LocalProtocolError(self._undeclared(key))
        return info

    def _undeclared(self, key: str) -> str:
        return f"the info key '{key}' is not in {type(self._strategy).__name__}.columns: add it there"

    @staticmethod
    def _finite(reply: Reply) -> dict[str, float]:
        for key, value in reply.hint.items():
            if math.isnan(value):
                raise LocalProtocolError(f"the hint '{key}' to worker {reply.to} is not a number")
        return dict(reply.hint)

    def _check_progress(self) -> None:
        if self.started and self._members and len(self.waiting) == len(self._members):
            raise DeadlockError(f"all live workers ({sorted(self.waiting)}) wait for a reply, and none is due")
