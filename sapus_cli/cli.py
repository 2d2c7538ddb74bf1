"""The `sapus` command: assembles the commands, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the call was wrong, 130 interrupted. Nothing heavy is imported here.
"""

from __future__ import annotations

import re
import sys
import traceback
from typing import Annotated, Any

import typer

from sapus_cli import __version__
from sapus_cli.commands import (
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
from sapus_cli.errors import DamagedFileError, RunFailedError, UserError

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
    sys.exit(run_line(sys.argv[1:]))


def run_line(line: list[str]) -> int:
    """Run one command line. Returns the exit code; what went wrong is on stderr, in one line for a user's error."""
    words = [word for word in line if word != "--debug"] or ["--help"]
    try:
        result: Any = app(args=words, standalone_mode=False, prog_name="sapus")
    except _EXPECTED as error:
        if "--debug" in line:
            traceback.print_exc()
        elif text := _text(error):
            typer.echo(f"sapus: {text}", err=True)
        return _exit_code(error)
    return result if isinstance(result, int) else 0


def _text(error: BaseException) -> str:
    if isinstance(error, RunFailedError):
        return str(error)  # with the end of a log, line by line
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
        return 130
    if isinstance(error, RunFailedError):
        return error.exit_code
    return 2
