"""`sapus strategies`: what there is to choose from."""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sapus_cli.strategy import AnyStrategy

EXAMPLES = "Examples:\n\nsapus strategies\n\nsapus strategies local-sgd\n\nsapus strategies --format markdown"


class Format(StrEnum):
    """What the list is printed as."""

    table = "table"
    markdown = "markdown"


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show one strategy whole; a name or package.module:Class.")
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="table: for the terminal; markdown: docs/strategies.md, or one section of it."),
    ] = Format.table,
) -> int:
    """List the update strategies: rule, source, hyper-parameters and their defaults."""
    if form is Format.markdown:
        typer.echo(_section(name) if name else _document())
        return 0
    from rich.console import Console  # noqa: PLC0415 - heavy imports wait until they are needed

    console = Console()
    if name is None:
        _list(console)
    else:
        _show(console, name)
    return 0


def _list(console: Console) -> None:
    from rich.table import Table  # noqa: PLC0415

    from sapus_cli import registry  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("hyper-parameters", ratio=2)
    faults: list[str] = []
    for name in sorted(registry.sources()):
        try:
            cls = registry.strategy_class(name)
            params = ", ".join(f"{key}={value}" if value else key for key, _, value in _parameters(cls))
        except UserError as error:
            faults.append(str(error))
        else:
            table.add_row(name, Text(registry.describe(cls).summary), Text(params))
    console.print(table)
    for fault in faults:
        typer.echo(f"sapus: {' '.join(fault.split())}", err=True)


def _show(console: Console, name: str) -> None:
    from rich.table import Table  # noqa: PLC0415

    from sapus_cli import registry  # noqa: PLC0415

    cls = registry.strategy_class(name)
    about = registry.describe(cls)
    console.print(Text.assemble((name, "bold"), "  ", about.summary))
    parts = Table.grid(padding=(0, 1, 0, 0))
    for title, text in (("Rule:", about.rule), ("Source:", about.source)):
        if text:
            parts.add_row(Text(title, "dim"), Text(text))
    console.print(parts)
    parameters = _parameters(cls)
    if not parameters:
        console.print(Text("It has no hyper-parameters.", "dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("--param", "type", "default", "meaning"):
        table.add_column(column, no_wrap=column in {"--param", "default"})
    for key, kind, default in parameters:
        table.add_row(key, Text(kind), Text(default), Text(about.meanings.get(key, "")))
    console.print(table)


def _document() -> str:
    """docs/strategies.md: what ships, whatever plugins are installed."""
    from sapus_cli import registry  # noqa: PLC0415
    from strategies import REGISTRY  # noqa: PLC0415

    lines = [
        "<!-- Made by: sapus strategies --format markdown > docs/strategies.md -->",
        "",
        "# Strategies",
        "",
        "N workers, x the global state, x_i the state that worker i pulled last, w_i its local state, u_i = w_i - x_i.",
        "A rule says what happens to x; the section of a strategy says what its hyper-parameters do.",
        "",
        "| name | rule | source | hyper-parameters |",
        "| --- | --- | --- | --- |",
    ]
    for name in sorted(REGISTRY):
        cls = registry.strategy_class(name)
        about = registry.describe(cls)
        parameters = ", ".join(f"`{key}` = {_plain(default)}" for key, _, default in _parameters(cls))
        lines.append(f"| [`{name}`](#{name}) | {_plain(about.rule)} | {_plain(about.source)} | {parameters} |")
    return "\n".join([*lines, *(f"\n{_section(name)}" for name in sorted(REGISTRY))])


def _section(name: str) -> str:
    """One strategy: its summary, and what its hyper-parameters mean."""
    from sapus_cli import registry  # noqa: PLC0415

    cls = registry.strategy_class(name)
    about = registry.describe(cls)
    lines = [f"## {name}", "", _plain(about.summary), ""]
    for key, kind, default in _parameters(cls):
        given = f"default {_plain(default)}" if default else "to be given"
        lines.append(f"* `{key}` ({_plain(kind)}, {given}): {_plain(about.meanings.get(key, ''))}")
    return "\n".join(lines if _parameters(cls) else [*lines, "It has no hyper-parameters."])


def _plain(text: str) -> str:
    """Text in Markdown that means itself, in a cell of a table as well."""
    return re.sub(r"([\\*_<>|\[\]~$])", r"\\\1", text)


def _parameters(cls: type[AnyStrategy]) -> list[tuple[str, str, str]]:
    """Name, type and default of each hyper-parameter; no default is an empty text."""
    from sapus_cli import registry  # noqa: PLC0415

    types = registry.hyper_parameters(cls)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return [
        (name, registry.type_name(kind), "" if defaults[name] is dataclasses.MISSING else str(defaults[name]))
        for name, kind in types.items()
    ]


command.__name__ = "strategies"
