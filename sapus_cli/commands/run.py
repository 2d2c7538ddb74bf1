"""`sapus run`: one run, all processes on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer  # noqa: TC002 - typer reads the annotations

from sapus_cli import traces
from sapus_cli.commands.options import (
    FAULTS,
    AsJson,
    Name,
    Quiet,
    Results,
    Transport,
    check_port,
    given_options,
    option,
    takes_real_run_options,
    whole,
)
from sapus_cli.config import RunConfig
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sapus_cli.drivers.security import Security

EXAMPLES = (
    "Examples:\n\n"
    "sapus run --strategy local-sgd --param h=4 --workers 8\n\n"
    "sapus run -s bsp --dataset mnist5k --model lenet5 --target-accuracy 0.95\n\n"
    "sapus run -s asp --dataset pydoc --seconds 60 --optimizer adamw --lr 0.001\n\n"
    "sapus run -s my_module:MyStrategy --json"
)


@takes_real_run_options
def command(
    config: RunConfig,
    *,
    context: typer.Context,
    results: Results = Path("results"),
    name: Name = None,
    transport: Annotated[
        Transport,
        option(
            "--transport",
            text="How messages travel: tcp (a real network stack, so that server CPU means something), ipc, or shm: "
            "vectors through shared memory.",
        ),
    ] = Transport.tcp,
    port: Annotated[int | None, whole("--port", text="Port of the server; a free one by default.")] = None,
    resume: Annotated[
        Path | None,
        option(
            "--resume",
            text="Go on with an interrupted or failed run, from its newest checkpoint to its budget. "
            "Nothing else has to be given.",
            metavar="RUN",
            panel=FAULTS,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Train a model with one strategy: a server, N workers and an evaluator on this machine."""
    config = msgspec.structs.replace(config, transport=transport.value)
    if resume is not None:
        config = resumable(resume, config, given_options(context))
    endpoint = None
    if port is not None:
        check_port(f"--port {port}", str(port), "; leave it out for a free one")
        if transport is not Transport.tcp:
            raise UserError(f"--port {port}: {transport} has no ports; leave one of the two out")
        endpoint = f"tcp://127.0.0.1:{port}"
    return launch(config, results, name, endpoint, own_workers=True, quiet=quiet, as_json=as_json, resume=resume)


def resumable(folder: Path, asked: RunConfig, given: Iterable[tuple[str, str | None]]) -> RunConfig:
    """The configuration of a run that can go on.

    Args:
        folder: its run folder.
        asked: what the options of this call say.
        given: those that were typed, which have to agree with the run: name, and the field of `asked`, if it is one.

    Raises:
        UserError: there is no such run, it is finished, is not one of `sapus run`, or an option says something else.
        DamagedFileError: its run.json cannot be read.
    """
    record = traces.read_run(folder)
    if record.get("clock") != "real" or not record.get("own_workers", True):
        raise UserError(f"--resume {folder}: only runs of sapus run can go on; this one is another command's")
    if record.get("status") == "finished":
        raise UserError(f"--resume {folder}: this run is finished; start a new one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--resume {folder}: the folder may not be written; make it writable")
    if not any((folder / "checkpoint").glob("*.json")):
        raise UserError(f"--resume {folder}: this run has no checkpoint yet, it ended too early; start a new one")
    try:
        config = msgspec.convert(traces.config_of(record), RunConfig, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(
            f"--resume {folder}: its run.json is not one of this sapus ({error}); start a new run"
        ) from error
    for option_name, field in given:
        if option_name in {"--results", "--name"}:
            raise UserError(f"{option_name}: the run goes on in its folder, {folder}; leave it out")
        if field is not None and (value := getattr(asked, field)) != (before := getattr(config, field)):
            others = f"{before}, not {value}" if isinstance(before, str | int | float) else "another one"
            raise UserError(f"{option_name}: {folder} was started with {others}; leave it out, or start a new run")
    return config


def launch(
    config: RunConfig,
    results: Path,
    name: str | None,
    endpoint: str | None,
    *,
    own_workers: bool,
    quiet: bool,
    as_json: bool,
    security: Security | None = None,
    resume: Path | None = None,
    invite: Callable[[str], str] | None = None,
) -> int:
    """Run to the end and print how it went."""
    from sapus_cli.commands import view  # noqa: PLC0415 - heavy imports wait until they are needed
    from sapus_cli.drivers.launch import Launcher  # noqa: PLC0415

    with view.Views(quiet=quiet, as_json=as_json, by_hand=not own_workers) as views:
        outcome = Launcher(
            config,
            results,
            name,
            views,
            endpoint=endpoint,
            own_workers=own_workers,
            security=security,
            resume=resume,
            invite=invite,
        ).run()
    if as_json:
        view.print_json(outcome)
    elif not quiet:
        view.print_outcome(outcome)
    return 0


command.__name__ = "run"
