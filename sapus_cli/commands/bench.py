"""`sapus bench`: what this machine and this program can do at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapus_cli.commands.options import flag, whole
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError
from sapus_cli.figures import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from sapus_cli.drivers.bench.plan import CeilingRow, Ceilings, Contender, Row, Sample, Spread
    from sapus_cli.drivers.bench.team import Bench

EXAMPLES = (
    "Examples:\n\n"
    "sapus bench transport\n\n"
    "sapus bench transport --elements 1e6 --workers 1,4 --rounds 3\n\n"
    "sapus bench transport --peers --json > transport.json\n\n"
    "sapus bench transport --output transport.pdf"
)
COLUMNS = (
    ("exchanges\na second", 9),
    ("least to\ngreatest", 14),
    ("\nGB/s", 5),
    ("CPU\ns/GB", 5),
    ("peak\nMiB", 5),
    ("to\nzmq", 5),
    ("of\nfloor", 5),
)
LEAST_S, MOST_S = 0.05, 600.0
MOST_ROUNDS = 1000
MOST_DIGITS = 16

app = typer.Typer(name="bench", help="Measure what this machine and this program can do at most.")


@app.callback(invoke_without_command=True, epilog="Start with: [bold]sapus bench transport[/bold]")
def bench(context: typer.Context) -> None:
    """Measure what this machine and this program can do at most."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog=EXAMPLES)
def transport(
    *,
    elements: Annotated[
        str, typer.Option("--elements", metavar="D,...", help="Sizes of the vector, in float32 elements.")
    ] = "1e5,1e6,1e7,2.5e7",
    workers: Annotated[str, typer.Option("--workers", "-w", metavar="N,...", help="Numbers of workers.")] = "1,2,4,8",
    rounds: Annotated[int, whole("--rounds", text="How often each is measured, in turn.")] = 5,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="X", help="Length of a measurement, after its warm-up.")
    ] = 0.5,
    peers: Annotated[
        bool, flag("--peers", text="Measure Ray, torch RPC, gloo and gRPC as well, as far as they are installed.")
    ] = False,
    as_json: Annotated[bool, flag("--json", text="Print all that was measured, and only it, as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Draw it: a .png, .pdf or .svg file.")
    ] = None,
) -> int:
    """Measure exchanges: a worker pushes a vector, the server adds it, the worker gets the sum back."""
    sizes = counts("--elements", elements)
    numbers = counts("--workers", workers)
    _check(rounds, seconds, output)
    from sapus_cli.drivers.bench import plan, team  # noqa: PLC0415 - heavy imports wait until they are needed

    if max(numbers) > plan.MOST_WORKERS:
        raise UserError(f"--workers {max(numbers)}: at most {plan.MOST_WORKERS}")
    asked = (*plan.CONTENDERS, *plan.PEERS) if peers else plan.CONTENDERS
    notes = [note for contender in asked if (note := team.missing(contender))]
    contenders = [contender for contender in asked if not team.missing(contender)]
    pairs, skipped = _pairs(sizes, numbers, contenders)
    notes += skipped
    least = min(w for _, w in pairs)
    notes += [
        f"{one.name} left out with 1 worker: alone it sends nothing" for one in contenders if least < one.least_workers
    ]
    for note in notes:
        typer.echo(f"sapus: {note}", err=True)
    machine = _machine(contenders)
    measured = _measure(pairs, contenders, rounds, seconds)
    for note in measured.left_out:
        typer.echo(f"sapus: {note}", err=True)
    if measured.error is not None and not measured.samples:
        raise measured.error
    rows, tops = plan.rows(measured.samples, measured.ceilings), plan.ceiling_rows(measured.ceilings)
    if as_json:
        from sapus_cli.commands.view import say_json  # noqa: PLC0415

        settings = {"elements": sizes, "workers": numbers, "rounds": rounds, "seconds": seconds, "peers": peers}
        say_json(
            {
                **machine,
                "settings": settings,
                "notes": [*notes, *measured.left_out, *([str(measured.error)] if measured.error else [])],
                "ceilings": measured.ceilings,
                "samples": measured.samples,
                "medians": {"ceilings": tops, "contenders": rows},
            }
        )
    else:
        _print(rows, tops, rounds)
    if output is not None:
        _draw(rows, tops, output)
        typer.echo(f"Wrote {output}", err=as_json)
    if measured.error is not None:
        raise measured.error
    return 0


def counts(option: str, text: str) -> list[int]:
    """A list such as 1e5,2.5e7,100 of whole numbers of at least 1; what is named twice counts once.

    Raises:
        UserError: names the part that is none.
    """
    found = []
    for part in text.split(","):
        try:
            number = Decimal(part.strip())
            value = int(number) if number.is_finite() and abs(number.adjusted()) < MOST_DIGITS else 0
        except InvalidOperation:
            value, number = 0, Decimal(0)
        if value < 1 or value != number:
            what = f"{option} {text}" if part == text else f"{option} {text}: '{part.strip()}'"
            raise UserError(f"{what}: must be whole numbers of at least 1, as in 1000 or 2.5e7")
        found.append(value)
    return list(dict.fromkeys(found))


def _check(rounds: int, seconds: float, output: Path | None) -> None:
    if not 1 <= rounds <= MOST_ROUNDS:
        raise UserError(f"--rounds {rounds}: must be from 1 to {MOST_ROUNDS}")
    if not LEAST_S <= seconds <= MOST_S:
        raise UserError(f"--seconds {seconds:g}: must be from {LEAST_S:g} to {MOST_S:g}")
    if output is not None:
        if output.suffix[1:].lower() not in FORMATS:
            raise UserError(f"--output {output}: is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file")
        if output.is_dir() or not output.absolute().parent.is_dir():
            raise UserError(f"--output {output}: its folder does not exist, or it is one itself; give another path")


def _pairs(
    sizes: Sequence[int], numbers: Sequence[int], contenders: Sequence[Contender]
) -> tuple[list[tuple[int, int]], list[str]]:
    """The pairs of elements and workers that there is room for, and a line for each one that is skipped.

    Raises:
        UserError: there is room for none.
    """
    from sapus_cli.drivers.bench import plan, team  # noqa: PLC0415

    room = team.room()
    pairs, skipped = [], []
    for d in sizes:
        for w in numbers:
            why = plan.obstacle(d, w, contenders, room)
            if why is None:
                pairs.append((d, w))
            else:
                skipped.append(why)
    if not pairs:
        raise UserError(skipped[0])
    return pairs, [f"skipped: {why}" for why in dict.fromkeys(skipped)]


@dataclass
class Measured:
    """What there is of the pairs that were measured to their end.

    Attributes:
        left_out: a line for each peer that failed.
        error: what ended it all before its time.
    """

    samples: list[Sample] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    error: RunFailedError | None = None


def _measure(
    pairs: Sequence[tuple[int, int]], contenders: Sequence[Contender], rounds: int, seconds: float
) -> Measured:
    """Everything, one pair of elements and workers after the other.

    A peer that fails is left out from then on; one of our own, or a signal, ends it all.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    from sapus_cli.drivers.bench import team  # noqa: PLC0415

    console = Console(stderr=True)
    measured = Measured()
    # None stands for the ceilings, which take their turn as everyone else.
    entrants: list[Contender | None] = [None, *contenders]
    with (
        team.Bench(seconds) as measuring,
        # It draws between measurements only: a thread of its own would compute beside them.
        Progress(console=console, transient=True, disable=not console.is_terminal, auto_refresh=False) as bar,
    ):
        task = bar.add_task("", completed=-1, total=rounds * sum(len(_present(entrants, w)) for _, w in pairs))

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        try:
            for pair in pairs:
                samples, ceilings = _measure_pair(measuring, pair, entrants, rounds, measured.left_out, tell)
                measured.samples += samples
                measured.ceilings += ceilings
        except RunFailedError as error:
            measured.error = error
    return measured


def _measure_pair(
    measuring: Bench,
    pair: tuple[int, int],
    entrants: list[Contender | None],
    rounds: int,
    left_out: list[str],
    tell: Callable[[str], None],
) -> tuple[list[Sample], list[Ceilings]]:
    """In each round everyone once, in an order that is turned by one from the last.

    A peer that fails is taken out of `entrants`, and `left_out` gets a line about it.
    """
    from sapus_cli.drivers.bench import plan  # noqa: PLC0415

    d, w = pair
    samples: list[Sample] = []
    ceilings: list[Ceilings] = []
    for turn in range(rounds):
        for entrant in plan.rotated(_present(entrants, w), turn):
            name = entrant.name if entrant else "ceilings"
            tell(f"{short(d)} elements, {plan.counted(w)}, round {turn + 1}: {name}")
            if entrant is None:
                ceilings.append(measuring.ceilings(d, w, turn))
                continue
            try:
                samples.append(measuring.contender(entrant, d, w, turn))
            except RunFailedError as error:
                if entrant not in plan.PEERS or isinstance(error, InterruptedRunError):
                    raise
                entrants.remove(entrant)
                samples = [sample for sample in samples if sample.contender != name]
                left_out.append(f"left out from here on: {error}")
    return samples, ceilings


def _present(entrants: Sequence[Contender | None], workers: int) -> list[Contender | None]:
    """Those who have something to do with so many workers."""
    return [entrant for entrant in entrants if entrant is None or workers >= entrant.least_workers]


def _machine(contenders: Sequence[Contender]) -> dict[str, Any]:
    """What it was measured on and with."""
    from sapus_cli.doctor import installed  # noqa: PLC0415
    from sapus_cli.traces import environment  # noqa: PLC0415

    found: dict[str, Any] = environment()
    for contender in contenders:
        if contender.install:
            package = contender.install.partition(">")[0]
            found["versions"][package] = installed(package)
    try:
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        control = None
    return {"machine": found["host"], "congestion_control": control, "versions": found["versions"], "git": found["git"]}


def _print(rows: Sequence[Row], tops: Sequence[CeilingRow], rounds: int) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    for top in tops:
        pair = (top.elements, top.workers)
        for part in pair_view(top, [row for row in rows if (row.elements, row.workers) == pair]):
            console.print(part, soft_wrap=isinstance(part, str))
    console.print(legend(rows, rounds), highlight=False)


def legend(rows: Sequence[Row], rounds: int) -> str:
    """What the columns mean."""
    times = "One round" if rounds == 1 else f"Median of {rounds} rounds"
    lines = [
        f"{times}. An exchange is 8 bytes an element. CPU and peak memory are those of the server's process.",
        "to zmq: exchanges a second over those of zeromq tcp. floor: an exchange's bytes at the rate of one way;",
        "of floor: GB/s over that rate.",
    ]
    if any(row.contender == "gloo" for row in rows):
        lines.append("gloo has no server; an all-reduce counts as one exchange of each worker.")
    return " ".join(lines)


def pair_view(top: CeilingRow, rows: Sequence[Row]) -> list[RenderableType]:
    """What is printed of a pair of elements and workers: the ceilings in a sentence, the contenders in a table."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from sapus_cli.drivers.bench.plan import counted  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", min_width=10)
    for column, width in COLUMNS:
        table.add_column(column, justify="right", min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(
            row.contender,
            figure(row.exchanges_per_s.median),
            f"{figure(row.exchanges_per_s.low)}..{figure(row.exchanges_per_s.high)}",
            figure(row.gb_per_s.median),
            _middle(row.server_cpu_s_per_gb),
            _middle(row.server_peak_rss_mib),
            _middle(row.to_base),
            "-" if row.of_floor is None else f"{row.of_floor.median:.0%}",
        )
    head = Text.assemble(
        (f"{short(top.elements)} elements, {counted(top.workers)}", "bold"),
        f": copy {_middle(top.copy_gb_per_s)}, add {_middle(top.axpy_gb_per_s)}, one way "
        f"{_middle(top.one_way_gb_per_s)} GB/s; floor {figure(1000 * top.floor_s.median)} ms",
    )
    return [head, table, ""]


def _middle(spread: Spread | None) -> str:
    return "-" if spread is None else figure(spread.median)


def short(number: int) -> str:
    """As in 2.5e7, where that is the number and not longer."""
    text = f"{number:.6e}"
    mantissa, exponent = text.split("e")
    brief = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return brief if float(brief) == number and len(brief) < len(str(number)) else f"{number:,}"


def figure(value: float) -> str:
    """Three digits that count, and no exponent: 1,549 or 57.3 or 0.17."""
    for limit, form in ((99.95, ",.0f"), (9.995, ".1f"), (0.9995, ".2f")):
        if value >= limit:
            return format(value, form)
    return f"{value:.3f}"


def _draw(rows: Sequence[Row], tops: Sequence[CeilingRow], output: Path) -> None:
    import msgspec  # noqa: PLC0415

    from sapus_cli.figures import canvas  # noqa: PLC0415
    from sapus_cli.figures.transport import draw  # noqa: PLC0415

    canvas.save(draw(msgspec.to_builtins(rows), msgspec.to_builtins(tops)), output, "paper")
