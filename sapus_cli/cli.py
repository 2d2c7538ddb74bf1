"""The `sapus` command: assembles the commands, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the call was wrong, 130 interrupted. Nothing heavy is imported here.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 130


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


# While there is nothing to put in order, Ctrl-C just ends the process.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    with suppress(ValueError):  # another thread imports
        signal.signal(signal.SIGINT, _leave)

import typer  # noqa: E402

from sapus_cli import __version__  # noqa: E402
from sapus_cli.commands import (  # noqa: E402
    bench,
    calibrate,
    compare,
    doctor,
    export,
    plot,
    report,
    run,
    server,
    show,
    simulate,
    strategies,
    suite,
    validate,
    worker,
)
from sapus_cli.errors import DamagedFileError, RunFailedError, UserError  # noqa: E402
from sapus_cli.output import careless  # noqa: E402

if signal.getsignal(signal.SIGINT) is _leave:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine has no more of something: no fault of the program.
_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}

# typer brings its own copy of click, or uses an installed one, by version; its public error leads to the base of all.
_CommandLineError: Any = typer.BadParameter.__mro__[2]
_EXPECTED = (UserError, DamagedFileError, RunFailedError, _CommandLineError, typer.Abort, KeyboardInterrupt)

app = typer.Typer(
    name="sapus",
    help="Compare parameter-update strategies for data-parallel training on a parameter server.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]sapus run[/bold]",
    pretty_exceptions_enable=False,
)
for module in (
    run,
    simulate,
    suite,
    validate,
    calibrate,
    doctor,
    show,
    compare,
    plot,
    report,
    export,
    strategies,
    server,
    worker,
):
    app.command(epilog=module.EXAMPLES)(module.command)
app.add_typer(bench.app)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - the form of an option's callback
    if asked:
        typer.echo(f"sapus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    del debug, version


def main() -> None:
    """Run the command line and exit."""
    if sys.stderr is not None:
        sys.stderr = careless(2, sys.stderr.encoding)
    names: list[str] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        # What follows takes a moment, which nothing but another Ctrl-C cuts short.
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        names.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    try:
        _on_signals(interrupt)
        code = run_line(sys.argv[1:])
    except KeyboardInterrupt:  # outside of the command itself
        code = INTERRUPTED
    _on_signals(_leave)
    if code == INTERRUPTED and names:
        typer.echo(f"sapus: interrupted by {names[0]}", err=True)
    sys.exit(_flushed(code))


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def _flushed(code: int) -> int:
    """Pass on what was printed; returns the exit code."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is left would be tried again at the end of Python.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # whoever read it has read enough
            typer.echo(f"sapus: cannot write the output: {error.strerror}", err=True)
        return code or 1
    return code


def run_line(line: list[str]) -> int:
    """Run one command line. Returns the exit code; what went wrong is on stderr, in one line for a user's error."""
    words = [word for word in line if word != "--debug"] or ["--help"]
    try:
        result: Any = app(args=words, standalone_mode=False, prog_name="sapus")
    except (*_EXPECTED, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _MACHINE:
            raise
        if "--debug" in line:
            traceback.print_exc()
        elif text := _text(error):
            typer.echo(f"sapus: {text}", err=True)
        return _exit_code(error)
    return result if isinstance(result, int) else 0


def _text(error: BaseException) -> str:
    if isinstance(error, RunFailedError):
        return f"{error}\n{error.next_step}".rstrip()  # with the end of a log, line by line
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        return f"the system refused: {error.strerror}{where}"
    text = str(error)
    if isinstance(error, _CommandLineError):
        context: Any = getattr(error, "ctx", None)
        where = context.command_path if context else "sapus"
        # Some versions of typer pass on how pydantic, which they use for this, begins its sentences.
        what = error.format_message().replace("Value error, ", "").rstrip(".")
        text = f"{what}{' See' if what.endswith('?') else '; see'} {where} --help"
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError):
        return RunFailedError.exit_code
    if isinstance(error, RunFailedError):
        return error.exit_code
    return 2
