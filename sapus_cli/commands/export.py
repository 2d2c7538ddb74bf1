"""`sapus export`: runs in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapus_cli.errors import UserError, unknown

EXAMPLES = (
    "Examples:\n\n"
    "sapus export results/20260101T120000Z_bsp_w8_s0 --to tensorboard\n\n"
    "sapus export results --to mlflow -o tracking\n\n"
    "sapus export results/2026*_w8_* --to parquet\n\n"
    "sapus export results/20260101T120000Z_bsp_w8_s0 --to chrome -o trace.json"
)


def command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders, folders of runs, or quoted patterns of either."),
    ],
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="tensorboard, mlflow, wandb-offline, parquet or chrome.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PLACE",
            help="Folder; for chrome also a .json file.",
            show_default="exports/FORMAT",
        ),
    ] = None,
) -> int:
    """Write runs in the format of another tool: TensorBoard, MLflow, Weights & Biases, Parquet, Chrome traces."""
    from sapus_cli import analysis, export  # noqa: PLC0415 - heavy imports wait until they are needed

    if to not in export.FORMATS:
        raise unknown("format in --to", to, export.FORMATS)
    place = output or Path("exports") / to
    if to != "chrome" and place.suffix == ".json":
        raise UserError(f"--output {place}: only chrome writes a file; choose a folder")
    for run, path in export.export(analysis.load_runs([Path(run) for run in runs]), to, place):
        typer.echo(f"Wrote {run.name} to {path}" if path == place else f"Wrote {path}")
    typer.echo(f"Next: {export.FORMATS[to].following.format(place=place)}")
    return 0


command.__name__ = "export"
