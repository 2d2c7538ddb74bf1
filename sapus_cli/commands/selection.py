"""The options of the commands that read runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sapus_cli.errors import UserError


def runs_argument(default: str) -> typer.models.ArgumentInfo:
    """The argument that names runs; `default` says which are taken without it."""
    argument: typer.models.ArgumentInfo = typer.Argument(
        metavar="[RUN]...", help="Run folders, folders of runs, or quoted patterns of either.", show_default=default
    )
    return argument


Drawn = Annotated[list[str] | None, runs_argument("the newest suite in results, else its runs like the newest")]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="ACCURACY",
        help="Test accuracy that times are to, as in 0.95 or 95%.",
        show_default="the suite's, else the most that every run reached",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="NAME",
        help="What speed-ups and reductions are to: a strategy, a label of the table, or several of them with commas "
        "between, which means the fastest in each setting.",
        show_default="the suite's, else bsp",
    ),
]


def accuracy(text: str) -> float:
    """A fraction from --target 0.95 or 95%.

    Raises:
        UserError: it is none, or out of range.
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise UserError(f"--target {text}: must be an accuracy, as in 0.95 or 95%") from None
    if not 0 < value <= 1:
        hint = f"; did you mean {number}%?" if 1 < value <= 100 else ""  # noqa: PLR2004 - percent
        raise UserError(f"--target {text}: must lie above 0 and at most at 1, or 100%{hint}")
    return value
