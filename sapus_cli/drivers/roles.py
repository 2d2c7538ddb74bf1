"""What each child process does from its first line to its last."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import psutil
import torch

from sapus_cli import registry, traces
from sapus_cli.checkpoint import Checkpoints
from sapus_cli.cluster import ELEMENT_BYTES, StepTimes
from sapus_cli.drivers import evaluator, process, server
from sapus_cli.drivers.client import Client
from sapus_cli.drivers.control import Begin, Bound, Failed, Happened, Prepared, Restart, Unusable, hear, tell
from sapus_cli.drivers.security import nearby
from sapus_cli.drivers.worker import Worker
from sapus_cli.errors import DivergedError, LocalProtocolError, RunFailedError, UserError
from sapus_cli.strategy import Setting
from sapus_cli.trainer import FlatModel, OptimizerSpec, evaluator_of, trainer_of
from sapus_cli.workloads import data as workload_data
from sapus_cli.workloads.models import build_model
from strategies import REGISTRY

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sapus_cli.config import RunConfig
    from sapus_cli.drivers.security import ServerKeys
    from sapus_cli.join import ClientKeys
    from sapus_cli.strategy import AnyStrategy, Vec

EVALUATOR_NICE = 5
ADAMW_MOMENTUM = 0.9
"""beta_1 of torch.optim.AdamW, whose defaults are kept."""


def prepare(pipe: Connection, config: RunConfig) -> None:
    """Put the data into the cache, once, and try the model on them."""
    process.be_a_child()
    process.end_with(pipe.recv_bytes)
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


def serve(
    pipe: Connection,
    config: RunConfig,
    strategy: AnyStrategy,
    ready: Prepared,
    endpoint: str,
    keys: ServerKeys | None = None,
    restart: Restart | None = None,
) -> None:
    """Be the server of a run: listen first, then wait for the run folder, then serve."""
    process.be_a_child()
    process.settle(config.threads)
    try:
        remembered = None
        if restart is not None:
            checkpoints = Checkpoints(Path(restart.folder) / "checkpoint")
            remembered, skipped = recall(checkpoints, strategy, ready)
        socket, bound = server.bind(endpoint, ready.elements, keys)
    except UserError as error:
        tell(pipe, Unusable(str(error)))
        return
    x0 = first_state(config, ready) if remembered is None else remembered["x"]
    process.give_back()
    tell(pipe, Bound(bound) if remembered is None else Bound(bound, remembered["t_s"], remembered["done"]))
    folder = Path(_hear_begin(pipe, "server.log").folder)
    if remembered is None:
        checkpoints = Checkpoints(folder / "checkpoint")
    else:
        traces.cut(folder / "pushes.csv", remembered["pushes_csv_bytes"])
        for line in skipped:
            tell(pipe, Happened(remembered["t_s"], "checkpoint", "server", 0, f"passed over: {line}"))
    warn = partial(_warn, pipe, "server")
    with traces.Trace(folder / "pushes.csv", traces.push_columns(strategy.columns), warn) as pushes:
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
            recovery=config.recovery,
            checkpoints=checkpoints,
        )
        if restart is not None and remembered is not None:
            role.restore(remembered, restart)
        try:
            ended = role.run()
        except DivergedError as error:
            tell(pipe, Failed(str(error), resumable=False))
            return
        except (EOFError, ConnectionError):
            return  # the launcher is gone
        except RunFailedError as error:
            role.save()
            tell(pipe, Failed(str(error)))
            return
        role.save()
    tell(pipe, ended)
    socket.close()


def first_state(config: RunConfig, ready: Prepared) -> Vec:
    """The state, shape `(d,)`, that a run begins with."""
    model = FlatModel(build_model(config.model, workload_data.load(Path(ready.data)), config.seed), torch.device("cpu"))
    return model.vector.detach().clone()


def recall(checkpoints: Checkpoints, strategy: AnyStrategy, ready: Prepared) -> tuple[dict[str, Any], list[str]]:
    """What the newest good checkpoint says, which has to be that of this strategy and model.

    Returns:
        What it says; and what is wrong with newer ones.

    Raises:
        UserError: there is none, or it is another's.
    """
    for name in REGISTRY:  # so that the state of another strategy can be read, and named
        registry.strategy_class(name)
    search = checkpoints.load()
    if search.newest is None:
        damaged = f" ({search.skipped[0]})" if search.skipped else ""
        raise UserError(f"there is no checkpoint to go on from{damaged}; start a new run")
    remembered: dict[str, Any] = search.newest.tree
    if "core" not in remembered:
        raise UserError(f"{search.newest.path}: holds the model alone, because the strategy's state could not be saved")
    if remembered.keys() != server.REMEMBERED:
        raise UserError(f"{search.newest.path}: was written by another version of sapus; start a new run")
    if remembered["strategy"] != repr(strategy):
        raise UserError(f"{search.newest.path}: is of {remembered['strategy']}, not of {strategy!r}; start a new run")
    if remembered["fingerprint"] != ready.fingerprint:
        raise UserError(f"{search.newest.path}: is of a model with another layout; start a new run")
    return remembered, search.skipped


def setting(config: RunConfig) -> Setting:
    """What a strategy may know of where this server runs."""
    return Setting(
        link_bytes_per_s=config.cluster.link.bytes_per_s,
        link_latency_s=config.cluster.link.latency_s,
        element_bytes=ELEMENT_BYTES[config.wire] * config.cluster.wire_scale,
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


def evaluate(pipe: Connection, config: RunConfig, ready: Prepared, keys: ClientKeys | None = None) -> None:
    """Be the evaluator of a run."""
    begin = _begin(pipe, config, "evaluator.log")
    os.nice(EVALUATOR_NICE)
    client = Client(nearby(begin.endpoint), "evaluator", keys=keys)
    data = workload_data.load(Path(ready.data))
    tests = evaluator_of(data)(build_model(config.model, data, config.seed), data, worker_device(ready.device, 0))
    process.give_back()
    with traces.Trace(Path(begin.folder) / "evals.csv", traces.EVALS, partial(_warn, pipe, "evaluator")) as trace:
        evaluator.run(client, tests, trace, every_s=config.eval_every_s, n_train=len(data.train_x))
    client.close()


def _warn(pipe: Connection, role: str, kind: str, detail: str) -> None:
    """Tell the launcher of rows that the system does not take; it knows what time it is."""
    with suppress(BrokenPipeError):
        tell(pipe, Happened(0.0, kind, role, 0, detail))


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
