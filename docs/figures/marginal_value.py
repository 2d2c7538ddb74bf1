"""Draw docs/figures/marginal_value.svg and .png: how far a worker gets in an interval, and where it pays to push.

    python docs/figures/marginal_value.py [FOLDER]

One worker trains the two-layer network on digits from a fixed seed. After some steps it "pulls" (remembers its state),
and from there on the length of its accumulated update is recorded, every element of it. The same file to the byte in
every run on one machine. FOLDER is where the files go, by default beside this one. The intervals are printed as well.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sapus_cli.performance import marginal_due
from sapus_cli.trainer import OptimizerSpec, Trainer
from sapus_cli.workloads.data import load, prepare
from sapus_cli.workloads.models import build_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = 0
BATCH = 32
LR = 0.1
WARM_UP = 20
STEPS = 60
INK = "#222222"


@dataclass(frozen=True)
class Exchange:
    """What an exchange costs in this picture, and how it is drawn (colours of Okabe and Ito)."""

    name: str
    c: float
    color: str
    line: str
    marker: str
    text_at: float


EXCHANGES = (
    Exchange("cheap", 4.0, "#0072B2", "-", "o", 34.5),
    Exchange("dear", 20.0, "#D55E00", "--", "s", 58.0),
)


def record() -> list[float]:
    """a(1), ..., a(60): the length of the update accumulated since the pull, after each local step."""
    torch.set_num_threads(1)
    data = load(prepare("digits", None, download=False))
    model = build_model("mlp", data, SEED)
    trainer = Trainer(model, data, torch.arange(len(data.train_x)), BATCH, OptimizerSpec("sgd", LR), SEED, 0)
    for _ in range(WARM_UP):
        trainer.step()
    pulled = trainer.vector.clone()
    norms = []
    for _ in range(STEPS):
        trainer.step()
        norms.append(float((trainer.vector - pulled).norm()))
    return norms


def interval(norms: list[float], c: float) -> int:
    """The first k at which the trigger fires.

    Raises:
        ValueError: it does not.
    """
    for k in range(1, len(norms) + 1):
        if marginal_due(norms[:k], c):
            return k
    raise ValueError(f"c = {c:g}: the trigger does not fire within {len(norms)} steps")


def draw(norms: list[float]) -> Figure:
    """The curve, and for each exchange the line from (-c, 0) to the point where the trigger fires."""
    figure = Figure(figsize=(6.3, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(len(norms) + 1), [0.0, *norms], color=INK, linewidth=1.2, marker=".", markersize=3.5, zorder=3)
    axes.text(60.5, norms[-1] - 0.1, "$a(k)$", color=INK, ha="right", va="top")
    for exchange in EXCHANGES:
        tangent(axes, norms, exchange)
    axes.axvline(0, color="#999999", linewidth=0.8, zorder=0)
    axes.text(-0.7, 3.27, "exchange", ha="right", va="top", color="#555555", fontsize=9)
    axes.text(0.7, 3.27, "local steps", ha="left", va="top", color="#555555", fontsize=9)
    axes.set_xlim(-28, 62)
    axes.set_ylim(0, 3.3)
    axes.set_xticks(range(-20, 61, 10), [str(abs(k)) for k in range(-20, 61, 10)])
    axes.set_xlabel("local steps $k$ since the pull   (left of 0: cost of the exchange, in steps)")
    axes.set_ylabel("$a(k) = |u_k|$, in units of the parameters")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def tangent(axes: Axes, norms: list[float], exchange: Exchange) -> None:
    """One exchange: its line, the interval, and what they are called."""
    h = interval(norms, exchange.c)
    slope = norms[h - 1] / (h + exchange.c)
    end = exchange.text_at
    axes.plot(
        [-exchange.c, end],
        [0, slope * (end + exchange.c)],
        color=exchange.color,
        linestyle=exchange.line,
        linewidth=1.6,
    )
    axes.plot([h, h], [0, norms[h - 1]], color=exchange.color, linestyle=":", linewidth=1.2)
    for x, y in ((-exchange.c, 0.0), (h, norms[h - 1])):
        axes.plot(x, y, color=exchange.color, marker=exchange.marker, markersize=6.5, zorder=4, clip_on=False)
    axes.text(h + 0.8, 0.08, f"$H = {h}$", color=exchange.color, ha="left", va="bottom")
    axes.text(-exchange.c - 0.8, 0.1, f"$c = {exchange.c:g}$", color=exchange.color, ha="right", va="bottom")
    axes.text(
        end,
        slope * (end + exchange.c) + 0.04,
        f"{exchange.name} exchange",
        color=exchange.color,
        ha="right",
        va="bottom",
    )


def main(folder: Path) -> None:
    """Record, draw, write both files and print the intervals."""
    norms = record()
    with mpl.rc_context({"svg.hashsalt": "sapus", "font.size": 10}):
        figure = draw(norms)
        figure.savefig(folder / "marginal_value.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / "marginal_value.png", dpi=200, metadata={"Software": None})
    for exchange in EXCHANGES:
        print(f"c = {exchange.c:g}: H = {interval(norms, exchange.c)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
