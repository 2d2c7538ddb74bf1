"""What each child process does from its first line to its last."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil
import torch

from sapus_cli import traces
from sapus_cli.cluster import StepTimes
from sapus_cli.drivers import evaluator, process, server
from sapus_cli.drivers.client import Client
from sapus_cli.drivers.control import Begin, Bound, Failed, Prepared, Unusable, hear, tell
from sapus_cli.drivers.worker import Worker
from sapus_cli.errors import DivergedError, LocalProtocolError, UserError
from sapus_cli.strategy import Setting
from sapus_cli.trainer import FlatModel, OptimizerSpec, evaluator_of, trainer_of
from sapus_cli.workloads import data as workload_data
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sapus_cli.config import RunConfig
    from sapus_cli.strategy import AnyStrategy

EVALUATOR_NICE = 5
ADAMW_MOMENTUM = 0.9
"""beta_1 of torch.optim.AdamW, whose defaults are kept."""


def prepare(pipe: Connection, config: RunConfig) -> None:
    """Put the data into the cache, once, and try the model on them."""
    process.be_a_child()
    process.settle(config.threads)
    try:
        tell(pipe, prepared(config))
    except UserError as error:
        tell(pipe, Unusable(str(error)))


def prepared(config: RunConfig) -> Prepared:
    """What there is to train, once it has been prepared.

    Raises:
        UserError: data, model, partition or device cannot be had.
    """
    device = resolve_device(config.device)
    path = workload_data.prepare(
        config.dataset, Path(config.data_dir) if config.data_dir else None, download=config.download
    )
    data = workload_data.load(path)
    workload_data.partition(data.train_y, config.workers, config.partition, config.seed)
    model = FlatModel(build_model(config.model, data, config.seed), torch.device("cpu"))
    return Prepared(
        data=str(path),
        n_train=len(data.train_x),
        n_test=len(data.test_x),
        elements=model.vector.numel(),
        fingerprint=model.fingerprint,
        data_sha256=data.sha256,
        device=device,
    )


def resolve_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The kind of device to train on.

    Raises:
        UserError: CUDA was asked for, and there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def serve(pipe: Connection, config: RunConfig, strategy: AnyStrategy, ready: Prepared, endpoint: str) -> None:
    """Be the server of a run: listen first, then wait for the run folder, then serve."""
    process.be_a_child()
    process.settle(config.threads)
    try:
        socket, bound = server.bind(endpoint, ready.elements)
    except UserError as error:
        tell(pipe, Unusable(str(error)))
        return
    model = FlatModel(build_model(config.model, workload_data.load(Path(ready.data)), config.seed), torch.device("cpu"))
    x0 = model.vector.detach().clone()
    del model
    process.give_back()
    tell(pipe, Bound(bound))
    folder = Path(_hear_begin(pipe, "server.log").folder)
    with traces.Trace(folder / "pushes.csv", traces.push_columns(strategy.columns)) as pushes:
        role = server.Server(
            socket,
            strategy,
            x0,
            n_workers=config.workers,
            profile=config.cluster,
            setting=setting(config),
            fingerprint=ready.fingerprint,
            config=msgspec.json.encode(config),
            wire=config.wire,
            shared=config.transport == "shm",
            launcher=pipe,
            pushes=pushes,
            target_accuracy=config.target_accuracy,
        )
        try:
            ended = role.run()
        except DivergedError as error:
            tell(pipe, Failed(str(error)))
            return
    server.save_checkpoint(folder / "checkpoint", role.core, ended.end_s)
    tell(pipe, ended)
    socket.close()


def setting(config: RunConfig) -> Setting:
    """What a strategy may know of where this server runs."""
    return Setting(
        link_bytes_per_s=config.cluster.link.bytes_per_s,
        memory_bytes=psutil.virtual_memory().available / 4,
        momentum=config.momentum if config.optimizer == "sgd" else ADAMW_MOMENTUM,
    )


def work(pipe: Connection, config: RunConfig, strategy: AnyStrategy, ready: Prepared, rank: int) -> None:
    """Be one worker of a run."""
    begin = _begin(pipe, config, f"worker-{rank}.log")
    train(Client(begin.endpoint, "worker", rank), config, strategy, ready)


def train(client: Client, config: RunConfig, strategy: AnyStrategy, ready: Prepared) -> str:
    """Train over a greeted connection until the run ends. Returns why it ended."""
    rank = client.welcome.rank
    data = workload_data.load(Path(ready.data))
    shard = workload_data.partition(data.train_y, config.workers, config.partition, config.seed)[rank]
    trainer = trainer_of(data)(
        build_model(config.model, data, config.seed),
        data,
        shard,
        batch_size=config.batch_size,
        optimizer=OptimizerSpec(config.optimizer, config.lr, config.momentum, config.weight_decay),
        seed=config.seed,
        worker=rank,
        device=worker_device(ready.device, rank),
    )
    trainer.warm_up()
    process.give_back()
    trainer.steps = client.welcome.steps
    steps = config.steps_per_worker(len(data.train_x))
    worker = Worker(
        client,
        strategy,
        trainer,
        fingerprint=trainer.flat.fingerprint,
        n_params=trainer.flat.n_params,
        steps=steps,
        seconds=config.seconds,
        times=None if config.cluster.step_s is None else StepTimes(config.cluster, config.seed, rank),
    )
    reason = worker.run()
    client.close()
    return reason


def worker_device(kind: str, rank: int) -> torch.device:
    """The device of one worker: its own GPU where there are as many, shared in turn where there are fewer."""
    return torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


def evaluate(pipe: Connection, config: RunConfig, ready: Prepared) -> None:
    """Be the evaluator of a run."""
    begin = _begin(pipe, config, "evaluator.log")
    os.nice(EVALUATOR_NICE)
    client = Client(begin.endpoint, "evaluator")
    data = workload_data.load(Path(ready.data))
    tests = evaluator_of(data)(build_model(config.model, data, config.seed), data, worker_device(ready.device, 0))
    process.give_back()
    with traces.Trace(Path(begin.folder) / "evals.csv", traces.EVALS) as trace:
        evaluator.run(client, tests, trace, every_s=config.eval_every_s, n_train=len(data.train_x))
    client.close()


def _begin(pipe: Connection, config: RunConfig, log: str) -> Begin:
    process.be_a_child()
    process.settle(config.threads)
    begin = _hear_begin(pipe, log)
    process.end_with(pipe.recv_bytes)
    return begin


def _hear_begin(pipe: Connection, log: str) -> Begin:
    try:
        begin = hear(pipe)
    except EOFError:
        sys.exit(1)  # the launcher is gone
    if not isinstance(begin, Begin):
        raise LocalProtocolError(f"the launcher said {begin!r} before the run began")
    process.log_to(Path(begin.folder) / "logs" / log)
    return begin
