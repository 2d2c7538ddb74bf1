"""`sapus strategies`: what there is to choose from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = "Examples:\n\nsapus strategies\n\nsapus strategies local-sgd"


def command(
    name: Annotated[str | None, typer.Argument(help="Show one strategy whole; a name or package.module:Class.")] = None,
) -> int:
    """List the update strategies: rule, source, hyper-parameters and their defaults."""
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

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for column in ("strategy", "what it does", "hyper-parameters"):
        table.add_column(column)
    for name in sorted(registry.sources()):
        cls = registry.strategy_class(name)
        params = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(cls))  # type: ignore[arg-type]
        table.add_row(name, registry.describe(cls).summary, params)
    console.print(table)


def _show(console: Console, name: str) -> None:
    from rich.table import Table  # noqa: PLC0415

    from sapus_cli import registry  # noqa: PLC0415

    cls = registry.strategy_class(name)
    about = registry.describe(cls)
    console.print(f"[bold]{name}[/bold]  {about.summary}", highlight=False)
    for title, text in (("Rule", about.rule), ("Source", about.source)):
        if text:
            console.print(f"[dim]{title}:[/dim] ", end="")
            console.print(text, markup=False, highlight=False)
    types = registry.hyper_parameters(cls)
    if not types:
        console.print("[dim]It has no hyper-parameters.[/dim]")
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("--param", "type", "default", "meaning"):
        table.add_column(column)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        table.add_row(f.name, registry.type_name(types[f.name]), str(f.default), about.meanings.get(f.name, ""))
    console.print(table)


command.__name__ = "strategies"
