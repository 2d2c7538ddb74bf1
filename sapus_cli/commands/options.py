"""The options that describe a run, shared by every command that starts one."""

from __future__ import annotations

import inspect
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from sapus_cli import cluster
from sapus_cli.config import Recovery, RunConfig
from sapus_cli.errors import UserError
from sapus_cli.workloads import default_epochs, default_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Optimizer(StrEnum):
    """Local optimizers."""

    sgd = "sgd"
    adamw = "adamw"


class Device(StrEnum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Wire(StrEnum):
    """What the elements of vectors are on the wire."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Transport(StrEnum):
    """How real processes exchange messages."""

    tcp = "tcp"
    ipc = "ipc"
    shm = "shm"


WORKLOAD, TRAINING, BUDGET = "Workload", "Training", "Budget (one of the first three)"
CLUSTER = "Cluster (emulated, or simulated)"
FAULTS = "Faults"
_DEFAULT = Recovery()


def option(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    """An option with a help text, in a panel of its own or among the others."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def whole(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    """An option that takes a whole number; what is none is refused with the name and the value."""

    def parse(value: str) -> int:
        try:
            return int(value)
        except ValueError:
            raise UserError(f"{names[0]} {value}: must be a whole number") from None

    return option(*names, text=text, panel=panel, parser=parse, metavar="N", **more)


def _real(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    def parse(value: str) -> float:
        try:
            return float(value)
        except ValueError:
            raise UserError(f"{names[0]} {value}: must be a number") from None

    return option(*names, text=text, panel=panel, parser=parse, metavar="X", **more)


def flag(*names: str, text: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return option(*names, text=text, panel=panel, metavar="")


# The options of the commands that make a run folder.
Results = Annotated[Path, option("--results", text="Folder that gets the run folder.", metavar="FOLDER")]
Name = Annotated[
    str | None, option("--name", text="Name of the run folder, in place of the usual one.", metavar="NAME")
]
Quiet = Annotated[bool, flag("--quiet", "-q", text="Print nothing unless something goes wrong.")]
AsJson = Annotated[bool, flag("--json", text="Print the summary, and only it, as JSON on stdout.")]


def _config(
    *,
    strategy: Annotated[
        str,
        option(
            "--strategy",
            "-s",
            metavar="NAME",
            text="Update strategy: a name from 'sapus strategies', or package.module:Class.",
        ),
    ] = "sapus",
    param: Annotated[
        list[str] | None,
        option("--param", "-p", metavar="KEY=VALUE", text="A hyper-parameter of the strategy, as in h=8; repeatable."),
    ] = None,
    workers: Annotated[int, whole("--workers", "-w", text="Number of worker processes.")] = 8,
    seed: Annotated[int, whole("--seed", text="Seed of initial state, partition and sample order.")] = 0,
    dataset: Annotated[
        str,
        option(
            "--dataset",
            metavar="NAME",
            text="digits, mnist5k, pydoc, mnist, fashion-mnist, cifar10, cifar100, fake:CxHxW:K or null.",
            panel=WORKLOAD,
        ),
    ] = "digits",
    model: Annotated[
        str | None,
        option(
            "--model",
            metavar="NAME",
            text="mlp, cnn, lenet5, resnet20, gpt, torchvision:NAME or null:ELEMENTS.",
            panel=WORKLOAD,
            show_default="gpt for pydoc, null:100000 for null, else cnn",
        ),
    ] = None,
    data_dir: Annotated[
        str | None, option("--data-dir", metavar="FOLDER", text="Folder of the torchvision data sets.", panel=WORKLOAD)
    ] = None,
    download: Annotated[
        bool, flag("--download", text="Fetch a missing torchvision data set into --data-dir.", panel=WORKLOAD)
    ] = False,
    partition: Annotated[
        str,
        option(
            "--partition",
            metavar="HOW",
            text="How workers share the training set: iid or dirichlet:ALPHA.",
            panel=WORKLOAD,
        ),
    ] = "iid",
    batch_size: Annotated[int, whole("--batch-size", text="Samples in a worker's minibatch.", panel=TRAINING)] = 32,
    optimizer: Annotated[Optimizer, option("--optimizer", text="Local optimizer.", panel=TRAINING)] = Optimizer.sgd,
    lr: Annotated[float, _real("--lr", text="Learning rate.", panel=TRAINING)] = 0.1,
    momentum: Annotated[float, _real("--momentum", text="Momentum of sgd.", panel=TRAINING)] = 0.0,
    weight_decay: Annotated[float, _real("--weight-decay", text="Weight decay.", panel=TRAINING)] = 0.0,
    device: Annotated[Device, option("--device", text="Where the workers compute.", panel=TRAINING)] = Device.auto,
    threads: Annotated[int, whole("--threads", text="Torch threads of each process.", panel=TRAINING)] = 1,
    wire: Annotated[
        Wire, option("--wire", text="What vectors are made of between server and workers.", panel=TRAINING)
    ] = Wire.float32,
    epochs: Annotated[
        float | None,
        _real(
            "--epochs",
            text="Passes over the training set, all workers together.",
            panel=BUDGET,
            show_default="120 for digits, 30 for mnist5k, 3 for pydoc, else 10",
        ),
    ] = None,
    steps: Annotated[int | None, whole("--steps", text="Local steps of each worker.", panel=BUDGET)] = None,
    seconds: Annotated[float | None, _real("--seconds", text="Seconds of training.", panel=BUDGET)] = None,
    target_accuracy: Annotated[
        float | None,
        _real("--target-accuracy", text="Stop when the global model reaches this, as in 0.95.", panel=BUDGET),
    ] = None,
    eval_every: Annotated[
        float, _real("--eval-every", text="Least seconds between two evaluations.", panel=BUDGET)
    ] = 0.5,
    profile: Annotated[
        str,
        option("--cluster", metavar="NAME", text="A profile that ships, or the path of a TOML file.", panel=CLUSTER),
    ] = "none",
    step_time: Annotated[
        str | None,
        option("--step-time", metavar="TIME", text="Mean time of a local step, as in 50ms.", panel=CLUSTER),
    ] = None,
    link: Annotated[
        str | None,
        option("--link", metavar="RATE[,LATENCY]", text="The server's link, as in 1gbit,0.5ms.", panel=CLUSTER),
    ] = None,
    slow: Annotated[
        str | None,
        option("--slow", metavar="RANK:FACTORx,...", text="Slower workers, as in 6:2x,7:4x.", panel=CLUSTER),
    ] = None,
    pause: Annotated[
        str | None,
        option("--pause", metavar="PROBABILITY:MEAN", text="Pauses after steps, as in 0.01:2s.", panel=CLUSTER),
    ] = None,
    fault: Annotated[
        list[str] | None,
        option(
            "--fault",
            metavar="KIND:worker=RANK,at=TIME",
            text="Kill or restart a worker, as in kill:worker=3,at=20s; repeatable.",
            panel=CLUSTER,
        ),
    ] = None,
    wire_scale: Annotated[
        float | None,
        _real(
            "--wire-scale",
            text="Count every byte on the link as so many, to stand for a larger model.",
            panel=CLUSTER,
        ),
    ] = None,
) -> RunConfig:
    if epochs is None and steps is None and seconds is None:
        epochs = default_epochs(dataset)
    return RunConfig(
        strategy=strategy,
        params=_params(param or []),
        workers=workers,
        seed=seed,
        dataset=dataset,
        model=model or default_model(dataset),
        data_dir=data_dir,
        download=download,
        partition=partition,
        batch_size=batch_size,
        optimizer=optimizer.value,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        device=device.value,
        threads=threads,
        wire=wire.value,
        epochs=epochs,
        steps=steps,
        seconds=seconds,
        target_accuracy=target_accuracy,
        eval_every_s=eval_every,
        cluster=_cluster(profile, step_time, link, slow, pause, fault, wire_scale),
    )


def _cluster(
    profile: str,
    step_time: str | None,
    link: str | None,
    slow: str | None,
    pause: str | None,
    fault: list[str] | None,
    wire_scale: float | None,
) -> cluster.ClusterProfile:
    return cluster.changed(
        cluster.load_profile(profile),
        step_time=step_time,
        link=link,
        slow=slow,
        pause=pause,
        fault=fault or (),
        wire_scale=wire_scale,
    )


def _recovery(
    *,
    worker_timeout: Annotated[
        float,
        _real("--worker-timeout", text="Seconds without a sign of life until a worker is let go.", panel=FAULTS),
    ] = _DEFAULT.worker_timeout_s,
    min_workers: Annotated[
        int,
        whole(
            "--min-workers",
            text="Least number of workers; with fewer for longer than --worker-timeout the run fails.",
            panel=FAULTS,
        ),
    ] = _DEFAULT.min_workers,
    max_restarts: Annotated[
        int, whole("--max-restarts", text="How often each process that dies is started again; 0: never.", panel=FAULTS)
    ] = _DEFAULT.max_restarts,
    checkpoint_every: Annotated[
        float, _real("--checkpoint-every", text="Seconds between two checkpoints of the server.", panel=FAULTS)
    ] = _DEFAULT.checkpoint_every_s,
) -> Recovery:
    return Recovery(
        worker_timeout_s=worker_timeout,
        min_workers=min_workers,
        max_restarts=max_restarts,
        checkpoint_every_s=checkpoint_every,
    )


def takes_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of a run in front of its own; it receives them as `config`, a `RunConfig`.

    A parameter of the command's own that has the name of a shared one takes its place: it goes into `config`, by its
    own annotation and default, and the command itself is handed None for it.
    """
    return _takes(command, {})


def takes_real_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Likewise for runs in real processes, which can die: `config.recovery` comes from options too."""
    return _takes(command, {"recovery": _recovery})


def _takes(command: Callable[..., int], makers: Mapping[str, Callable[..., Any]]) -> Callable[..., int]:
    shared = dict(inspect.signature(_config).parameters)
    for make in makers.values():
        shared |= inspect.signature(make).parameters
    own = {name: p for name, p in inspect.signature(command).parameters.items() if name != "config"}

    def wrapper(**values: Any) -> int:
        given = {name: values.pop(name) for name in shared}
        made = {
            part: make(**{name: given.pop(name) for name in inspect.signature(make).parameters})
            for part, make in makers.items()
        }
        config = _config(**given)
        if made:
            config = msgspec.structs.replace(config, **made)
        return command(config=config, **dict.fromkeys(own.keys() & shared.keys()), **values)

    hints = get_type_hints(_config, include_extras=True)
    for function in (*makers.values(), command):
        hints |= get_type_hints(function, include_extras=True)
    named = shared | own
    parameters = [p.replace(annotation=hints[p.name]) for p in named.values()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    return wrapper


def _params(pairs: list[str]) -> dict[str, bool | int | float | str]:
    params: dict[str, bool | int | float | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--param {pair}: must be key=value, as in --param h=8")
        if key.strip() in params:
            raise UserError(f"--param {pair}: {key.strip()} is given twice; give it once")
        params[key.strip()] = value.strip()
    return params


def endpoint_parts(option: str, endpoint: str) -> tuple[str, str]:
    """Host and port of tcp://HOST:PORT, as they were written.

    Raises:
        UserError: it has another form.
    """
    match = re.fullmatch(r"tcp://([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):([^\s:/]+)", endpoint)
    if match is None:
        raise UserError(f"{option} {endpoint}: must be tcp://HOST:PORT, as in tcp://127.0.0.1:5555")
    if match[1].startswith("["):
        raise UserError(f"{option} {endpoint}: IPv6 is not supported; give an IPv4 address, as in tcp://127.0.0.1:5555")
    return match[1], match[2]


def check_port(given: str, port: str, alternative: str = "") -> None:
    """Refuse what is no port; `given` is the option with its value, `alternative` what else would do.

    Raises:
        UserError: no such port.
    """
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):  # noqa: PLR2004 - the range of TCP ports
        raise UserError(f"{given}: the port must be a whole number from 1 to 65535{alternative}")


_FIELDS = {"param": "params", "eval_every": "eval_every_s"}
_FIELDS |= dict.fromkeys(("worker_timeout", "min_workers", "max_restarts", "checkpoint_every"), "recovery")
_FIELDS |= dict.fromkeys(("profile", "step_time", "link", "slow", "pause", "fault", "wire_scale"), "cluster")


def given_options(context: typer.Context) -> Iterator[tuple[str, str | None]]:
    """The options of a call that were typed: name, and the field of `RunConfig` that they set, if they do."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            field = _FIELDS.get(name, name)
            yield parameter.opts[0], field if field in RunConfig.__struct_fields__ else None
