"""`sapus doctor`: whether this machine can run sapus well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapus_cli.commands.options import check_port, endpoint_parts, whole
from sapus_cli.commands.server import LOOPBACK_HOSTS
from sapus_cli.config import RunConfig
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from sapus_cli.doctor import Finding, Question

EXAMPLES = (
    "Examples:\n\nsapus doctor\n\nsapus doctor --workers 32 --results /data/results\n\n"
    "sapus doctor --endpoint tcp://127.0.0.1:5555 --json"
)


def command(
    *,
    results: Annotated[
        Path, typer.Option("--results", metavar="FOLDER", help="Folder that is to get the run folders.")
    ] = Path("results"),
    workers: Annotated[int, whole("--workers", "-w", text="Number of worker processes to have room for.")] = 8,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", metavar="ENDPOINT", help="Where the server is to listen, as tcp://HOST:PORT; any by default."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the findings, and only them, as JSON on stdout.")
    ] = False,
) -> int:
    """Check whether this machine can run sapus well: one row a check, with what to do; exit code 1 on a failure."""
    RunConfig(strategy="asp", workers=workers, steps=1)  # refuses a number of workers that no run can have
    port = None if endpoint is None else _port(endpoint)
    from sapus_cli.doctor import Question  # noqa: PLC0415 - heavy imports wait until they are needed

    findings = _examined(Question(results, workers, port), quiet=as_json)
    counts = Counter(finding.level.value for finding in findings)
    if as_json:
        from sapus_cli.commands.view import say_json  # noqa: PLC0415

        levels = ("ok", "warning", "failure")
        say_json({"counts": {level: counts[level] for level in levels}, "findings": findings})
    else:
        _print(findings)
    return 1 if counts["failure"] else 0


def _port(endpoint: str) -> int:
    """The port of an endpoint that a server may listen at.

    Raises:
        UserError: it is malformed, or open to other machines.
    """
    host, port = endpoint_parts("--endpoint", endpoint)
    if host not in LOOPBACK_HOSTS:
        raise UserError(f"--endpoint {endpoint}: only loopback is looked at; give tcp://127.0.0.1:{port}")
    check_port(f"--endpoint {endpoint}", port, "; leave the option out for any free one")
    return int(port)


def _examined(question: Question, *, quiet: bool) -> list[Finding]:
    """All findings; a terminal is told meanwhile what is looked at."""
    from rich.console import Console  # noqa: PLC0415

    from sapus_cli import doctor  # noqa: PLC0415

    checks = doctor.checks(question)
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return list(doctor.examine(checks))
    findings: list[Finding] = []
    with console.status("") as status:
        for check in checks:
            status.update(f"looking at: {check.name}")
            findings.extend(doctor.examine([check]))
    return findings


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    console.print(_table(findings))
    counts = Counter(finding.level.value for finding in findings)
    words = [f"{counts['ok']} OK"]
    words.extend(f"{counts[word]} {word}{'' if counts[word] == 1 else 's'}" for word in ("warning", "failure"))
    console.print(", ".join(words), highlight=False)


def _table(findings: Sequence[Finding]) -> Table:
    """A row a finding; the remedy stands below what was found."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = {"ok": Text("OK", "green"), "warning": Text("warning", "yellow"), "failure": Text("FAILURE", "bold red")}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", ratio=1, overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", "dim" if finding.level == "ok" else "bold")
        table.add_row(shown[finding.level], finding.name, text)
    return table


command.__name__ = "doctor"
