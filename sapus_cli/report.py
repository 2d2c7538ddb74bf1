"""One HTML page of a comparison: table, fairness, figures and what each run was made with. It needs nothing else.

The same runs give the same page to the byte.
"""

from __future__ import annotations

import colorsys
import json
import re
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from sapus_cli import analysis, figures
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sapus_cli.analysis import Group, Run


class Drawn(NamedTuple):
    """A figure of the page: its kind, what is said of it, and the SVG document."""

    kind: str
    caption: str
    svg: str


class Page(NamedTuple):
    """What stands on the page.

    Attributes:
        table: rows of texts, the heading first.
        about: what a reader must know of the table.
        warnings: conditions that were not the same.
        groups: the runs.
        drawn: the figures.
        left_out: kind of figure and why it could not be drawn.
    """

    table: Sequence[Sequence[str]]
    about: Sequence[str]
    warnings: Sequence[str]
    groups: Sequence[Group]
    drawn: Sequence[Drawn]
    left_out: Sequence[tuple[str, str]]


def draw_all(groups: Sequence[Group], request: figures.Request) -> tuple[list[Drawn], list[tuple[str, str]]]:
    """Every kind of figure that can be drawn, and why the others cannot."""
    from sapus_cli.figures import canvas  # noqa: PLC0415 - matplotlib waits until something is drawn

    drawn: list[Drawn] = []
    left_out: list[tuple[str, str]] = []
    for kind in figures.KINDS:
        try:
            figure = figures.draw(kind, groups, request)
        except UserError as error:
            left_out.append((kind, str(error)))
            continue
        svg = canvas.encode(figure, "svg", request.theme).decode()
        drawn.append(Drawn(kind, canvas.caption_of(figure), svg))
    return drawn, left_out


def html(page: Page) -> str:
    """The whole document."""
    pictures = [_picture(drawn) for drawn in page.drawn]
    colors = sorted({color for picture in pictures for color in re.findall(r"var\(--c-([0-9a-f]{6})\)", picture)})
    runs = [run for group in page.groups for run in group.runs]
    fair = page.warnings or ["Nothing differs between the runs but strategy, hyper-parameters and seed."]
    body = [
        "<h1>sapus report</h1>",
        f"<p>{len(runs)} runs in {len(page.groups)} groups.</p>",
        _section("comparison", "Comparison", _table("Figures of every group", page.table) + _list(page.about)),
        _section("fairness", "Fairness", _list(fair)),
        _section("figures", "Figures", "\n".join(pictures) + _left_out(page.left_out)),
        _section("runs", "Runs", _table("All runs", _runs(runs)) + "\n".join(map(_details, runs))),
    ]
    style = _STYLE.replace("/* light */", _variables(colors, dark=False)).replace(
        "/* dark */", _variables(colors, dark=True)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>sapus report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{content}\n</section>'


def _list(items: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(item)}</li>\n" for item in items) + "</ul>\n"


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    heading, *others = rows
    lines = ["".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)]
    for first, *cells in others:
        lines.append(f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{_cell(cell)}</td>" for cell in cells))
    head, *below = (f"<tr>{line}</tr>\n" for line in lines)
    # A table that is wider than the page is scrolled, also with the keyboard.
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead>\n{head}</thead>\n<tbody>\n{''.join(below)}</tbody>\n</table>\n</div>\n"
    )


def _cell(text: str) -> str:
    value, bracket, rest = text.partition(" [")
    return escape(value) + (f"<br><small>{escape(bracket.strip() + rest)}</small>" if bracket else "")


def _picture(drawn: Drawn) -> str:
    title = figures.KINDS[drawn.kind]
    label = escape(f"{title}. {drawn.caption}")
    return (
        f'<figure>\n<figcaption id="fig-{drawn.kind}">{escape(title)}</figcaption>\n'
        f"{_inline(drawn.svg, drawn.kind, label)}\n</figure>"
    )


def _inline(svg: str, kind: str, label: str) -> str:
    """An SVG document as an element of the page: ids of its own, colours that follow the page, a text in its place."""
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"""(\bid="|xlink:href="\#|url\(\#)""", rf"\g<1>{kind}-", svg)
    # A variable is sure to be understood in a style only.
    svg = re.sub(r'\bfill="(#[0-9a-f]{6})"', r'style="fill: \1"', svg)
    svg = re.sub(r"#([0-9a-f]{6})\b", r"var(--c-\1)", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    inner = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0] if box else ""} '
        f'role="img" aria-label="{label}">{inner.rstrip()}\n</svg>'
    )


def _left_out(left_out: Sequence[tuple[str, str]]) -> str:
    if not left_out:
        return ""
    return "\n<p>Left out:</p>\n" + _list(f"{figures.KINDS[kind]}: {why}" for kind, why in left_out)


def _runs(runs: Sequence[Run]) -> list[list[str]]:
    rows = [["run", "strategy", "seed", "workers", "status", "time s", "final accuracy %", "pushes"]]
    for run in runs:
        seconds, accuracy = analysis.curve(run)
        end_s = run.summary.get("seconds", seconds[-1] if seconds else None)
        pushes = (run.record.get("totals") or {}).get("pushes")
        rows.append(
            [
                run.name,
                run.label,
                str(run.seed),
                str(run.workers),
                run.status,
                "-" if end_s is None else f"{end_s:.4g}",
                f"{100 * accuracy[-1]:.2f}" if accuracy else "-",
                "-" if pushes is None else f"{pushes:,}",
            ]
        )
    return rows


_DETAILS = (
    "failure",
    "config",
    "strategy",
    "cluster",
    "data",
    "model",
    "device",
    "effective_batch_size",
    "environment",
)


def _details(run: Run) -> str:
    facts = {key: run.record[key] for key in _DETAILS if run.record.get(key) is not None}
    facts["config"] = {key: value for key, value in run.record["config"].items() if key != "cluster"}
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>\n' for key, value in _flat(facts)
    )
    return (
        f"<details>\n<summary>{escape(run.name)}</summary>\n<table>\n"
        f"<caption>What {escape(run.name)} was made with</caption>\n<tbody>\n{rows}</tbody>\n</table>\n</details>"
    )


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            rows.append((prefix + key, value if isinstance(value, str) else json.dumps(value)))
    return rows


def _variables(colors: Sequence[str], *, dark: bool) -> str:
    return " ".join(f"--c-{color}: #{_inverted(color) if dark else color};" for color in colors)


def _inverted(color: str) -> str:
    """The same hue with dark for light, for dark pages."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (0, 2, 4))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    return "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.92 - 0.84 * light, saturation))


_STYLE = """\
:root { color-scheme: light dark; --ink: #222222; --paper: #ffffff; --rule: #c8c8c8; /* light */ }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e3e3e3; --paper: #141414; --rule: #4a4a4a; /* dark */ }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--rule); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: 0.85rem; padding: 0.3rem 0; }
th, td { padding: 0.3rem 0.8rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--rule); }
th[scope="row"], thead th:first-child, details td { text-align: left; }
.wide th[scope="row"] { white-space: nowrap; }
details th, details td { overflow-wrap: anywhere; }
tbody th { font-weight: 600; }
small { opacity: 0.8; white-space: nowrap; }
figure { margin: 2rem 0; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: 0.3rem; }
svg { display: block; width: 100%; max-width: 52rem; height: auto; }
summary { cursor: pointer; padding: 0.3rem 0; }
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2, summary { break-after: avoid; }
  .wide { overflow: visible; }
  tr { break-inside: avoid; }
}
"""
