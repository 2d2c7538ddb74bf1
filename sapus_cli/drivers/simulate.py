"""Virtual time: the same cores, trainers and strategies, driven by a heap of events instead of processes.

Gradients are real, seconds are those of the cluster profile, so a run depends on its command alone: the same command
gives the same rows to the last bit, on any machine with the same build of torch.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sapus_cli import registry, traces
from sapus_cli.checkpoint import Checkpoints
from sapus_cli.cluster import ELEMENT_BYTES, MOST_WORKERS, Direction, ServerTime, StepTimes
from sapus_cli.codec import Declined, Leave, Push, State, encode
from sapus_cli.drivers import process, roles
from sapus_cli.drivers.control import Ended, Measured, WorkerTotals
from sapus_cli.drivers.pool import Progress
from sapus_cli.drivers.record import close_record, first_record
from sapus_cli.drivers.server import Traffic, push_values, state_only, state_sha256
from sapus_cli.errors import UserError
from sapus_cli.protocol import Phase, ServerCore, WorkerCore
from sapus_cli.strategy import STANDARD_INFO
from sapus_cli.trainer import FlatModel, OptimizerSpec, Trainer, evaluator_of, trainer_of
from sapus_cli.workloads import check_names, check_partition
from sapus_cli.workloads import data as workload_data
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sapus_cli.cluster import Fault
    from sapus_cli.config import RunConfig
    from sapus_cli.protocol import Outgoing
    from sapus_cli.strategy import AnyStrategy, Vec
    from sapus_cli.traces import Column, TraceName

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.2


@dataclass
class _Worker:
    core: WorkerCore
    trainer: Trainer
    times: StepTimes
    busy: bool = False
    inbox: list[tuple[State | Declined, Vec | None]] = field(default_factory=list)
    left: bool = False
    dead: bool = False


class Simulation:
    """One run in virtual time.

    Args:
        config: what to run; its cluster profile must say how long a step takes.
        results: folder that gets the run folder.
        name: name of the run folder, or None for the automatic one.
        progress: called a few times a second, of real time.
        created: called with the run folder, once there is one.

    Attributes:
        folder: the run folder, once there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        results: Path,
        name: str | None,
        progress: Callable[[Progress], None],
        created: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._profile = config.cluster
        self._results = results
        self._name = name
        self._progress = progress
        self._created = created
        self._next_progress_s = 0.0
        self.folder: Path | None = None
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._up = Direction(config.cluster.link, config.cluster.wire_scale)
        self._down = Direction(config.cluster.link, config.cluster.wire_scale)
        self._thread = ServerTime()
        self._cpu_s = 0.0
        self._traffic = [Traffic() for _ in range(config.workers)]
        self._evals: list[Measured] = []
        self._incomplete: set[str] = set()
        self._n_evals = 0
        self._stopping = False
        self._reached_s: float | None = None
        self._end_s = 0.0

    def run(self) -> tuple[Path, dict[str, Any]]:
        """Run to the end. Returns the run folder and what stands in run.json.

        Raises:
            UserError: the call was wrong; nothing has been created.
            RunFailedError: training diverged.
        """
        config = self._config
        if config.workers > MOST_WORKERS:
            raise UserError(f"--workers {config.workers}: at most {MOST_WORKERS} workers are simulated")
        if self._profile.step_s is None:
            raise UserError("virtual time needs to know how long a step takes: give --cluster or --step-time")
        check_names(config.dataset, config.model)
        check_partition(config.partition, config.dataset)
        strategy = registry.build(config.strategy, config.params)
        traces.check_results(self._results)
        process.load_torch()
        torch.set_num_threads(config.threads)
        ready = roles.prepared(config)
        self._set_up(strategy, Path(ready.data))
        record = first_record(config, strategy, ready, "virtual")
        folder = self.folder = traces.create_run_folder(
            self._results, self._name, config.strategy, config.workers, config.seed
        )
        traces.write_run(folder, record)
        reserve = traces.Reserve(folder)
        status = "failed"
        ended = None
        try:
            self._created(folder)
            with (
                self._trace(folder, "pushes", traces.push_columns(strategy.columns)) as self._pushes,
                self._trace(folder, "evals", traces.EVALS) as self._eval_trace,
                self._trace(folder, "resources", traces.RESOURCES) as self._resources,
                self._trace(folder, "events", traces.EVENTS) as self._event_trace,
            ):
                self._simulate()
                ended = self._ended()
                self._save(folder)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException as error:
            record["failure"] = str(error) or type(error).__name__
            raise
        finally:
            close_record(record, status, ended, self._evals, self._incomplete)
            traces.write_run(folder, record, reserve)
            reserve.close()
        return folder, record

    def _trace(self, folder: Path, name: TraceName, columns: Sequence[Column]) -> traces.Trace:
        def warn(kind: str, detail: str) -> None:
            if kind == "incomplete":
                self._incomplete.add(name)
            else:
                self._incomplete.discard(name)
            log.warning("%s: %s", folder.name, detail)
            self._event_trace.row((self._now, kind, "launcher", 0, detail))

        return traces.Trace(folder / f"{name}.csv", columns, warn)

    def _save(self, folder: Path) -> None:
        """Write a checkpoint. That it cannot be written does not make the run a failure."""
        try:
            Checkpoints(folder / "checkpoint").save(state_only(self._server, self._end_s))
        except OSError as error:
            self._event_trace.row((self._end_s, "checkpoint", "server", 0, f"failed: {error.strerror}"))

    def _set_up(self, strategy: AnyStrategy, data_path: Path) -> None:
        config = self._config
        data = workload_data.load(data_path)
        self._n_train = len(data.train_x)
        self._limit = config.steps_per_worker(self._n_train)
        shards = workload_data.partition(data.train_y, config.workers, config.partition, config.seed)
        model = build_model(config.model, data, config.seed)
        spec = OptimizerSpec(config.optimizer, config.lr, config.momentum, config.weight_decay)
        self._tests = evaluator_of(data)(model, data)
        flat = FlatModel(model)
        x0 = flat.vector.clone()
        self._elements = x0.numel()
        self._vector_bytes = x0.numel() * ELEMENT_BYTES[config.wire]
        # One model computes for all workers, and what one of them pushes is copied before another writes it.
        outgoing = torch.empty(x0.numel(), dtype=getattr(torch, config.wire))
        incoming = None if config.wire == "float32" else torch.empty_like(outgoing)

        def worker(trainer: Trainer, rank: int) -> _Worker:
            core = WorkerCore(strategy, trainer.vector, rank, flat.n_params, outgoing, incoming)
            return _Worker(core, trainer, StepTimes(self._profile, config.seed, rank))

        self._worker = worker
        self._workers = []
        for rank, shard in enumerate(shards):
            trainer = trainer_of(data)(flat, data, shard, config.batch_size, spec, config.seed, rank)
            self._workers.append(worker(trainer, rank))
        self._returning: set[int] = set()
        self._kills: Counter[int] = Counter()
        # No shard is smaller than the last one, so that no other batch can be too small for the model.
        self._workers[-1].trainer.warm_up()
        # The memory of this machine must not decide anything.
        setting = roles.setting(config)._replace(memory_bytes=math.inf)
        self._server = ServerCore(strategy, x0, config.workers, setting)
        self._info_names = (*STANDARD_INFO, *strategy.columns)

    def _simulate(self) -> None:
        for rank in range(len(self._workers)):
            self._join(rank)
        for fault in sorted(self._profile.faults, key=lambda fault: fault.at_s):
            self._at(fault.at_s, self._kill if fault.kind == "kill" else self._restart, fault)
        while self._events:
            when, _, call, arguments = heapq.heappop(self._events)
            self._evaluate_until(when)
            self._now = when
            call(*arguments)
            self._tick()
        self._evaluate(self._end_s)

    def _join(self, rank: int) -> None:
        self._workers[rank].core.pull("")
        self._event_trace.row((self._now, "join", "worker", rank, ""))
        self._reply(self._server.join(rank, self._now))

    def _kill(self, fault: Fault) -> None:
        worker = self._workers[fault.worker]
        if self._over():
            self._miss(fault)
        elif worker.left:
            self._event_trace.row(
                (self._now, "fault", "worker", fault.worker, "was to be killed, but was done already")
            )
        else:
            worker.dead = True
            self._event_trace.row((self._now, "fault", "worker", fault.worker, "killed by the profile"))
            self._kills[fault.worker] += 1
            if self._profile.comes_back(fault.worker, self._kills[fault.worker]):
                self._returning.add(fault.worker)
            self._let_go(fault.worker, "dead")

    def _restart(self, fault: Fault) -> None:
        rank = fault.worker
        if self._over():
            self._miss(fault)
        elif rank in self._returning:
            self._returning.discard(rank)
            self._event_trace.row((self._now, "restart", "worker", rank, "by the profile"))
            trainer = self._workers[rank].trainer
            worker = self._workers[rank] = self._worker(trainer, rank)
            had = self._server.progress(rank)
            worker.core.begin(had.steps, had.seq)
            trainer.steps = had.steps
            if self._limit is not None and worker.core.steps >= self._limit:
                worker.core.stop()  # the one whose place it takes was at its end
            self._join(rank)

    def _miss(self, fault: Fault) -> None:
        detail = f"{fault.kind} at {fault.at_s:g} s did not happen: the run ended first"
        self._event_trace.row((self._end_s, "fault", "worker", fault.worker, detail))

    def _tick(self) -> None:
        """What is due by the clock of the real world: rows reach the disk, and somebody hears of progress."""
        now = time.monotonic()
        if now < self._next_progress_s:
            return
        self._next_progress_s = now + PROGRESS_EVERY_S
        for trace in (self._pushes, self._eval_trace, self._resources, self._event_trace):
            trace.tick(now)
        accuracy = self._evals[-1].accuracy if self._evals else None
        self._progress(Progress(self._now, self._fraction(self._now), accuracy))

    def _at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, arguments))

    def _begin(self, rank: int) -> None:
        worker = self._workers[rank]
        seconds = worker.times.draw(worker.core.steps)
        worker.busy = True
        self._at(worker.times.finish(self._now, seconds), self._stepped, worker, self._now)

    def _stepped(self, worker: _Worker, begun: float) -> None:
        if worker.dead:
            return
        rank = worker.core.worker
        worker.busy = False
        loss, n_samples = worker.trainer.step()
        out_of_time = self._config.seconds is not None and self._now >= self._config.seconds
        last = self._stopping or out_of_time or worker.core.steps + 1 == self._limit
        self._send(rank, worker.core.after_step(loss, n_samples, self._now - begun, self._now, last=last))
        for message, vector in worker.inbox:
            self._take(rank, message, vector)
        worker.inbox.clear()
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker.core.phase is Phase.COMPUTING and not worker.busy:
            self._begin(rank)
        elif worker.core.phase is Phase.DONE and not worker.left:
            worker.left = True
            n_bytes = len(encode(Leave(reason="done")))
            self._at(self._up.deliver_at(self._now, n_bytes), self._leave, worker)

    def _send(self, rank: int, push: Push | None) -> None:
        if push is not None:
            size = len(encode(push)) + self._vector_bytes
            worker = self._workers[rank]
            vector = worker.core.outgoing.clone()
            arrives = self._up.deliver_at(self._now, size)
            self._at(arrives, self._arrived, worker, push, vector, self._profile.scaled(size))

    def _arrived(self, worker: _Worker, push: Push, vector: Vec, n_bytes: int) -> None:
        traffic = self._traffic[worker.core.worker]
        traffic.rx_bytes += n_bytes
        traffic.rx_frames += 2
        if not worker.dead:
            self._at(self._occupy_server(n_bytes), self._apply, worker, push, vector, n_bytes)

    def _apply(self, worker: _Worker, push: Push, vector: Vec, n_bytes: int) -> None:
        if worker.dead:
            return
        rank = worker.core.worker
        declined = self._server.declined
        replies = self._server.push(rank, push, vector, self._now, n_bytes, self._cpu_s)
        if self._server.declined > declined:
            self._event_trace.row((self._now, "declined", "worker", rank, f"push {push.seq} is not finite"))
            if not any(isinstance(reply.message, Declined) for reply in replies):
                self._event_trace.row((self._now, "fresh", "worker", rank, "told to pull afresh"))
        self._reply(replies)

    def _reply(self, replies: list[Outgoing]) -> None:
        sent: Vec | None = None
        copy: Vec | None = None
        for reply in replies:
            payload = 0 if reply.vector is None else self._vector_bytes
            size = len(encode(reply.message)) + payload
            n_bytes = self._profile.scaled(size)
            traffic = self._traffic[reply.worker]
            traffic.tx_bytes += n_bytes
            traffic.tx_frames += 1 if reply.vector is None else 2
            arrives = self._down.deliver_at(self._occupy_server(n_bytes), size)
            # What goes to many at once is copied once: its receivers only read it.
            if reply.vector is not sent:
                sent, copy = reply.vector, None if reply.vector is None else reply.vector.clone()
            self._at(arrives, self._receive, self._workers[reply.worker], reply.message, copy)
            if reply.row is not None:
                self._pushes.row(push_values(reply.row, n_bytes, self._info_names))

    def _receive(self, worker: _Worker, message: State | Declined, vector: Vec | None) -> None:
        if worker.dead:
            return
        if worker.busy:
            worker.inbox.append((message, vector))
            return
        rank = worker.core.worker
        self._take(rank, message, vector)
        self._go_on(rank)

    def _take(self, rank: int, message: State | Declined, vector: Vec | None) -> None:
        core = self._workers[rank].core
        if isinstance(message, Declined):
            core.on_declined(message)
            return
        if vector is not None:
            core.incoming.copy_(vector)
        if self._stopping or (self._config.seconds is not None and self._now >= self._config.seconds):
            core.stop()
        if message.fresh:
            self._workers[rank].trainer.forget()
        self._send(rank, core.on_state(message, self._now))

    def _leave(self, worker: _Worker) -> None:
        self._let_go(worker.core.worker, "done")

    def _let_go(self, rank: int, reason: str) -> None:
        replies, row = self._server.leave(rank, self._now)
        if row is not None:
            self._pushes.row(push_values(row, 0, self._info_names))
        self._event_trace.row((self._now, "leave", "worker", rank, reason))
        self._end_s = self._now
        self._reply(replies)

    def _occupy_server(self, n_bytes: int) -> float:
        """When the server's one thread is done with a message of so many bytes."""
        cost = self._profile.server
        seconds = cost.message_s + cost.byte_s * n_bytes
        self._cpu_s += seconds
        return self._thread.done_at(self._now, seconds)

    def _evaluate_until(self, when: float) -> None:
        every = max(self._config.eval_every_s, 1e-9)
        while not self._over() and self._n_evals * every <= when:
            self._evaluate(self._n_evals * every)

    def _over(self) -> bool:
        """Whether all workers have left, and none comes back."""
        nobody_comes = self._stopping or not self._returning
        return self._server.started and not self._server.state.members and nobody_comes

    def _evaluate(self, t_s: float) -> None:
        self._n_evals += 1
        loss, accuracy, worst_class = self._tests.evaluate(self._server.state.x)
        samples, version = self._server.samples, self._server.version
        self._evals.append(Measured(t_s, version, samples, loss, accuracy))
        self._eval_trace.row((t_s, version, samples, samples / self._n_train, loss, accuracy, worst_class))
        rx_bytes = sum(traffic.rx_bytes for traffic in self._traffic)
        tx_bytes = sum(traffic.tx_bytes for traffic in self._traffic)
        self._resources.row((t_s, "server", 0, self._cpu_s, None, None, rx_bytes, tx_bytes, None, None))
        target = self._config.target_accuracy
        if target is not None and accuracy >= target and self._reached_s is None:
            self._reached_s = t_s
            self._stopping = True
        self._tick()

    def _fraction(self, t_s: float) -> float:
        if self._config.seconds is not None:
            return min(1.0, t_s / self._config.seconds)
        steps = sum(worker.core.steps for worker in self._workers)
        return min(1.0, steps / ((self._limit or math.inf) * len(self._workers)))

    def _ended(self) -> Ended:
        return Ended(
            end_s=self._end_s,
            version=self._server.version,
            samples=self._server.samples,
            steps=self._server.steps,
            pushes=self._server.received,
            rx_bytes=sum(traffic.rx_bytes for traffic in self._traffic),
            tx_bytes=sum(traffic.tx_bytes for traffic in self._traffic),
            rx_frames=sum(traffic.rx_frames for traffic in self._traffic),
            tx_frames=sum(traffic.tx_frames for traffic in self._traffic),
            evaluator_bytes=0,
            server_cpu_s=self._cpu_s,
            state_sha256=state_sha256(self._server.state.x),
            declined=self._server.declined,
            reached_s=self._reached_s,
            workers=[
                WorkerTotals(rank, self._server.progress(rank).steps, traffic.rx_bytes, traffic.tx_bytes)
                for rank, traffic in enumerate(self._traffic)
            ],
        )
