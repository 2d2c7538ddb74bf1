"""Figures: the numbers that are drawn, the same bytes each time, every kind on awkward runs, every wrong call."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from runs import make_run

from sapus_cli import analysis, figures, traces
from sapus_cli.cli import run_line
from sapus_cli.errors import UserError
from sapus_cli.figures import canvas, data, style
from strategies import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SERVER = ((0.0, 0.0, 0, 0), (5.0, 0.5, 1_000_000_000, 500_000_000), (10.0, 2.5, 2_000_000_000, 1_000_000_000))
QUICK = ((0.0, 0.0), (2.5, 0.5), (5.0, 1.0))
CLUSTER = {"name": "8xgpu-1g", "step_s": 0.05, "link": {"bytes_per_s": 125e6, "latency_s": 1e-4}, "wire_scale": 300.0}


def push(t_s: float, worker: int, seq: int, n_steps: int = 2, **more: float) -> dict[str, float]:
    """A row of pushes.csv."""
    row = {"step_s": 0.5, "exchange_s": 0.0, "held_s": 0.0, "staleness": 0, "weight": 0.25} | more
    return {"t_s": t_s, "worker": worker, "seq": seq, "n_steps": n_steps, **row}


def with_pushes(folder: Path, rows: Iterable[dict[str, float]]) -> Path:
    """The folder, its pushes replaced."""
    (folder / "pushes.csv").unlink()
    with traces.Trace(folder / "pushes.csv", traces.PUSHES) as trace:
        for row in rows:
            trace.row(row)
    return folder


def draw(kind: str, folder: Path, **request: Any) -> Figure:
    """A figure of all runs in a folder."""
    groups = analysis.group_runs(analysis.load_runs([folder]))
    return figures.draw(kind, groups, figures.Request(**request))


def line(axes: Axes, label: str) -> Line2D:
    """The line with a label."""
    (found,) = (one for one in axes.lines if one.get_label() == label)
    return found


def points(axes: Axes, label: str) -> list[tuple[float, float]]:
    """The points of the line with a label."""
    return vertices(line(axes, label))


def vertices(one: Line2D) -> list[tuple[float, float]]:
    """The points of a line."""
    x, y = (np.asarray(values, float) for values in one.get_data())
    return [(round(a, 6), round(b, 6)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def bars(axes: Axes) -> dict[str, Rectangle]:
    """Bars by the name beside them."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    names = [text.get_text() for text in axes.get_yticklabels()]
    return {names[round(bar.get_y() + bar.get_height() / 2)]: bar for bar in found}


def texts(axes: Axes) -> list[str]:
    """What is written into the axes."""
    return [text.get_text() for text in axes.texts]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Bsp, and asp that is twice as fast, with a seed each."""
    make_run(tmp_path / "a", "bsp", server=SERVER, staleness=[0, 0, 1, 3], cluster=CLUSTER)
    make_run(tmp_path / "b", "asp", evals=QUICK, server=SERVER, staleness=[2], cluster=CLUSTER)
    return tmp_path


# --- numbers


def test_accuracy_is_the_mean_of_the_seeds_within_their_band(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp", 0, evals=[(0, 0.0), (2, 0.2), (4, 0.4)])
    make_run(tmp_path / "b", "bsp", 1, evals=[(0, 0.2), (2, 0.6), (3, 0.7)])
    (axes,) = draw("accuracy", tmp_path).axes
    assert points(axes, "bsp") == [(0, 10), (2, 40), (3, 50)], "from 3 s on one seed is missing"
    (band,) = axes.collections
    corners = {(round(x, 6), round(y, 6)) for x, y in np.asarray(band.get_paths()[0].vertices).tolist()}
    assert {(0, 0), (0, 20), (2, 20), (2, 60), (3, 30), (3, 70)} <= corners
    assert axes.get_ylabel() == "test accuracy, %"
    assert axes.get_ylim()[0] == pytest.approx((10 + 50) / 2), "half way up to the end"


def test_a_run_that_collapses_stays_in_view(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp", evals=[(0, 0.1), (2, 0.9), (4, 0.1)])
    make_run(tmp_path / "b", "asp", evals=[(0, 0.1), (2, 0.9), (4, 0.95)])
    (axes,) = draw("accuracy", tmp_path).axes
    assert axes.get_ylim()[0] <= 10


def test_the_seeds_behind_a_line_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp", 0, evals=[(0, 0.1), (2, 0.9)])
    make_run(tmp_path / "b", "bsp", 1, evals=[], status="failed")
    assert "bsp: 1 of 2 seeds have evaluations." in canvas.caption_of(draw("accuracy", tmp_path))


@pytest.mark.parametrize(
    ("x", "expected", "label"),
    [
        ("time", [0, 5, 10], "time, s"),
        ("samples", [0, 500, 1000], "training samples"),
        ("bytes", [0, 1.5e9, 3e9], "GB over the server's link"),
    ],
)
def test_curves_over_time_samples_and_bytes(tmp_path: Path, x: str, expected: list[float], label: str) -> None:
    make_run(tmp_path / "a", evals=[(0, 0.1), (5, 0.5), (10, 0.9)], server=SERVER)
    (axes,) = draw("loss", tmp_path, x=x).axes
    assert points(axes, "bsp") == list(zip(expected, [0.9, 0.5, 0.1], strict=True))
    assert axes.get_xlabel() == label
    assert axes.get_yscale() == "log"


def test_of_evaluations_of_one_version_the_last_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "a", evals=[(0, 0.1), (5, 0.5)])
    (axes,) = draw("accuracy", tmp_path, x="version").axes
    assert points(axes, "bsp") == [(0, 50)]


def test_speedups_are_bars_over_the_baseline(two: Path) -> None:
    (axes,) = draw("speedup", two, target=0.5).axes
    found = bars(axes)
    assert {name: round(bar.get_width(), 6) for name, bar in found.items()} == {"bsp": 1.0, "asp": 2.0}
    assert not any(bar.get_hatch() for bar in found.values())
    assert list(texts(axes)) == ["2.00x", "1.00x"]
    assert "speed-up over bsp in time to 50\N{NO-BREAK SPACE}% accuracy" in axes.get_xlabel().replace("\n", " ")
    (axes,) = draw("speedup", two, target=0.5, baseline="asp").axes
    assert round(bars(axes)["bsp"].get_width(), 6) == 0.5


def test_the_baseline_is_the_one_that_the_suite_says(two: Path) -> None:
    cells = [{"name": name, "target": 0.3} for name in ("a", "b")]
    (two / "suite.json").write_text(json.dumps({"suite": "s", "cells": cells, "compare": {"baseline": "asp"}}))

    def drawn(*options: str) -> bytes:
        assert run_line(["plot", "speedup", str(two), "-o", str(two / "x.png"), *options]) == 0
        return (two / "x.png").read_bytes()

    assert drawn() == drawn("--baseline", "asp") != drawn("--baseline", "bsp")


def test_every_cluster_has_a_panel_with_its_own_baseline(tmp_path: Path) -> None:
    # Seconds to 50 %: on lan local-sgd is the faster baseline, on wan ssp is; asp is 0.1 and 20 times as fast.
    seconds = {"lan": {"ssp": 4.0, "local-sgd": 2.0, "asp": 20.0}, "wan": {"ssp": 4.0, "local-sgd": 16.0, "asp": 0.2}}
    for cluster, took in seconds.items():
        for strategy, half in took.items():
            evals = [(0.0, 0.0), (2 * half, 1.0)]
            profile = {"name": cluster, "step_s": 0.1 if cluster == "lan" else 0.2}
            make_run(tmp_path / f"{strategy}_{cluster}", strategy, evals=evals, cluster=profile)
    figure = draw("speedup", tmp_path, target=0.5, baseline="ssp,local-sgd")
    lan, wan = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["lan\nover local-sgd", "wan\nover ssp"]
    assert [text.get_text() for text in lan.get_yticklabels()] == ["asp", "ssp", "local-sgd"], "sqrt(0.1 * 20) first"
    assert texts(lan) == ["0.100x", "0.500x", "1.00x"]
    assert texts(wan) == ["20.0x", "1.00x", "0.250x"]
    assert lan.get_xscale() == "log", "they are 200 times apart"
    # Bars begin at 1 then, to the left and to the right.
    assert [(bar.get_x(), round(bar.get_width(), 6)) for bar in bars(lan).values()] == [(1, -0.9), (1, -0.5), (1, 0)]
    colors = [[bar.get_facecolor() for bar in axes.patches] for axes in figure.axes]
    assert colors[0] == colors[1], "a strategy has one colour"
    assert "Speed-up over the fastest of ssp, local-sgd; a panel a cluster profile." in canvas.caption_of(figure)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    (caption,) = figure.texts
    for axes in figure.axes:
        box = axes.get_tightbbox(renderer)
        assert box is not None
        assert box.y0 >= caption.get_window_extent(renderer).y1 - 1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1


def test_panels_of_workers_share_a_linear_axis_where_values_are_near(tmp_path: Path) -> None:
    for workers in (4, 8):
        make_run(tmp_path / f"b{workers}", "bsp", config={"workers": workers})
        make_run(tmp_path / f"a{workers}", "asp", evals=QUICK, config={"workers": workers})
    make_run(tmp_path / "c4", "ssp", status="failed", config={"workers": 4})
    figure = draw("speedup", tmp_path, target=0.5)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["4 workers", "8 workers"]
    assert [texts(axes) for axes in figure.axes] == [["2.00x", "1.00x", "1.00x"], ["2.00x", "1.00x"]]
    assert {axes.get_xscale() for axes in figure.axes} == {"linear"}
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["asp", "bsp", "ssp *"]


def test_what_did_not_reach_the_target_is_hatched_and_bounded(two: Path) -> None:
    make_run(two / "c", "ssp", evals=[(0, 0.0), (20, 0.3)], cluster=CLUSTER)
    figure = draw("speedup", two, target=0.5)
    (axes,) = figure.axes
    assert bars(axes)["ssp"].get_width() == pytest.approx(5 / 20)
    assert bars(axes)["ssp"].get_hatch() == "////"
    assert texts(axes) == ["2.00x", "1.00x", "< 0.250x"]
    assert "Hatched: a run did not reach the target" in canvas.caption_of(figure)


def test_whiskers_are_the_interval_from_three_seeds_on(tmp_path: Path) -> None:
    for seed, rate in enumerate((100.0, 110.0, 150.0)):
        make_run(tmp_path / f"a{seed}", "bsp", seed, summary={"samples_per_s": rate})
        make_run(tmp_path / f"b{seed}", "asp", seed, summary={"samples_per_s": 100.0})
    figure = draw("throughput", tmp_path)
    (axes,) = figure.axes
    assert {name: round(bar.get_width(), 6) for name, bar in bars(axes).items()} == {"bsp": 120.0, "asp": 100.0}
    expected = analysis.interval([100.0, 110.0, 150.0])
    (segment,) = axes.collections[0].get_segments()  # type: ignore[attr-defined]
    assert segment[:, 0].tolist() == pytest.approx([expected.low, expected.high])
    caption = canvas.caption_of(figure).replace("\N{NO-BREAK SPACE}", " ")
    assert "95 % bootstrap interval, from 3 seeds on; n = 3." in caption


def test_the_load_of_the_server_is_what_its_totals_grow_by(two: Path) -> None:
    figure = draw("cpu", two)
    assert points(figure.axes[0], "bsp") == [(2.5, 10), (7.5, 40)]
    assert "bsp  25.0 %" in [text.get_text() for text in figure.legends[0].get_texts()]
    received, sent = draw("bandwidth", two).axes
    assert points(received, "bsp") == [(2.5, 1.6), (7.5, 1.6)]
    assert points(sent, "bsp") == [(2.5, 0.8), (7.5, 0.8)]


def test_staleness_is_shown_as_shares(two: Path) -> None:
    (axes,) = draw("staleness", two).axes
    right = 1.05 * 3 + 1
    assert points(axes, "bsp") == [(-1, 0), (0, 50), (1, 75), (3, 100), (right, 100)]
    assert points(axes, "asp") == [(-1, 0), (2, 100), (right, 100)]


def test_intervals_of_every_worker_stand_between_their_bounds(tmp_path: Path) -> None:
    rows = [
        push(1.0, 0, 1, 4, h_min=2.0, h_max=8.0),
        push(2.0, 1, 1, 6, h_min=3.0, h_max=9.0),
        push(3.0, 0, 2, 5, h_min=1.0, h_max=7.0),
    ]
    with_pushes(make_run(tmp_path / "a"), rows)
    (axes,) = draw("interval", tmp_path).axes
    assert points(axes, "worker 0") == [(0, 4), (1, 4), (3, 5)]
    assert points(axes, "worker 1") == [(0, 6), (2, 6)]
    assert points(axes, "h_max") == [(1, 9), (2, 9), (3, 7)], "the greatest of those that hold"
    assert points(axes, "h_min") == [(1, 2), (2, 1), (3, 1)]
    assert line(axes, "worker 0").get_drawstyle() == "steps-pre"


def test_weights_are_points_in_order_of_the_pushes(tmp_path: Path) -> None:
    with_pushes(make_run(tmp_path / "a"), [push(2.0, 0, 2, weight=0.5), push(1.0, 0, 1, weight=0.1)])
    (axes,) = draw("weights", tmp_path).axes
    assert points(axes, "worker 0") == [(1, 0.1), (2, 0.5)]


def test_a_timeline_puts_half_of_the_next_rows_exchange_on_each_side_of_the_receipt() -> None:
    worker = {
        "t_s": np.array([3.0, 8.0]),
        "n_steps": np.array([2.0, 3.0]),
        "step_s": np.array([1.0, 0.5]),
        "exchange_s": np.array([0.0, 1.0]),
        "held_s": np.array([0.25, np.nan]),
    }
    spans = data.spans(worker)
    assert spans.computed.tolist() == [[0.5, 2.5], [6.0, 7.5]]
    assert spans.exchanged.tolist() == [[2.5, 3.0], [7.5, 8.0], [3.25, 3.75], [8.0, 8.5]]
    assert spans.waited.tolist() == [[3.0, 3.25]]


def test_windows_are_equally_long_and_in_the_middle_of_the_common_time() -> None:
    slow = [{"t_s": np.array([10.0, 20.0, 30.0, 40.0])}, {"t_s": np.array([30.0, 60.0])}]
    quick = [{"t_s": np.arange(1.0, 101.0)}]
    assert data.windows([slow, quick]) == [(0.0, 40.0), (50.0, 90.0)], "40 exchanges of the quick one, not 90 s"
    assert data.windows([slow, quick], (1.0, 2.0)) == [(1.0, 2.0)] * 2


def test_a_timeline_has_a_row_a_worker(tmp_path: Path) -> None:
    rows = [push(t, worker, seq + 1, held_s=0.5) for worker in (0, 1) for seq, t in enumerate((2.0, 4.0, 6.0))]
    with_pushes(make_run(tmp_path / "a"), rows)
    (axes,) = draw("timeline", tmp_path, window=(0, 10)).axes
    computed, exchanged, waited = axes.collections[:3]
    boxes = [path.get_extents() for path in computed.get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(1, 2), (3, 4), (5, 6)]
    assert [(p.get_extents().x0, p.get_extents().x1) for p in waited.get_paths()] == [(2, 2.5), (4, 4.5), (6, 6.5)]
    assert len(exchanged.get_paths()) == 6
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "1"]


def test_scaling_joins_groups_over_the_number_of_workers(tmp_path: Path) -> None:
    for workers, factor in ((2, 1.0), (4, 2.0), (8, 3.0)):
        evals = [(0.0, 0.0), (10 / factor, 1.0)]
        summary = {"samples_per_s": 100 * factor}
        make_run(tmp_path / f"a{workers}", evals=evals, config={"workers": workers}, summary=summary)
    rates, times = draw("scaling", tmp_path, target=0.5).axes
    assert vertices(rates.lines[0]) == [(2, 100), (4, 200), (8, 300)]
    assert vertices(times.lines[0]) == [(2, 5), (4, 2.5), (8, 1.666667)]
    assert vertices(rates.lines[-1]) == [(2, 100), (4, 200), (8, 400)], "in proportion"
    assert [text.get_text() for text in rates.get_xticklabels()] == ["2", "4", "8"]


def test_the_tradeoff_is_seconds_and_bytes_to_the_target(two: Path) -> None:
    (axes,) = draw("tradeoff", two, target=0.5).axes
    assert points(axes, "bsp") == [(5, 1.5e9)]
    assert points(axes, "asp") == [(2.5, 0.75e9)]
    assert axes.get_ylabel() == "GB to 50\N{NO-BREAK SPACE}% test accuracy"


def test_many_points_are_thinned_to_their_extremes() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[12_345], y[700] = 9.0, np.nan
    thin_x, thin_y = data.thinned(x, y, 200)
    assert len(thin_x) <= 202
    assert (np.diff(thin_x) > 0).all()
    assert thin_y.max() == 9.0
    assert (thin_x[0], thin_x[-1]) == (0.0, 99_999.0)
    assert [part.tolist() for part in data.thinned(x[:3], y[:3], 200)] == [x[:3].tolist(), y[:3].tolist()]
    assert data.every(x, y, 4)[0].tolist() == [0, 25_001, 50_001, 75_001]
    assert data.some(range(10), 4) == [0, 3, 6, 9]


# --- what stands on every figure


def test_the_caption_states_the_conditions(two: Path) -> None:
    caption = canvas.caption_of(draw("staleness", two)).replace("\N{NO-BREAK SPACE}", " ")
    assert "mlp on digits; 4 workers; real clock; cluster 8xgpu-1g (50 ms a step, link 1 Gbit/s, " in caption
    assert "latency 100 µs); wire scale 300." in caption


def test_conditions_that_differ_are_named(two: Path) -> None:
    make_run(two / "c", "ssp", evals=QUICK, config={"lr": 0.2})
    caption = canvas.caption_of(draw("accuracy", two))
    assert "wire scale 1 or 300." in caption
    assert "Not the same for all: lr, " in caption


def test_unfinished_runs_are_marked(two: Path) -> None:
    make_run(two / "c", "ssp", evals=QUICK, server=SERVER, status="interrupted")
    figure = draw("accuracy", two)
    assert "ssp *" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert [one.get_marker() for one in figure.axes[0].lines].count("x") == 1
    assert "* with a run that is not finished" in canvas.caption_of(figure)
    assert "ssp *" in bars(draw("throughput", two).axes[0])


# --- colours

# Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "all cones": np.eye(3),
    "no red ones": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "no green ones": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no blue ones": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def lab(color: str, eye: str) -> Any:
    """CIE L*a*b* of a colour as an eye sees it."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str) -> float:
    """Least difference of two strategies' colours for any eye."""
    colors = style.look_of(one).color, style.look_of(other).color
    return min(float(np.linalg.norm(lab(colors[0], eye) - lab(colors[1], eye))) for eye in EYES)


def test_colours_can_be_told_by_every_eye() -> None:
    central = ("bsp", "asp", "ssp", "local-sgd", "sapus", "sapus-weighted")
    assert min(itertools.starmap(distance, itertools.combinations(central, 2))) > 12
    assert min(itertools.starmap(distance, itertools.combinations(REGISTRY, 2))) > 8
    signs = {(look.marker, look.dash) for look in map(style.look_of, REGISTRY)}
    assert len(signs) == len(REGISTRY), "marker and dash tell them apart as well"


@pytest.mark.parametrize("theme", style.THEMES)
def test_colours_stand_out_from_the_paper(theme: str) -> None:
    paper = style.THEMES[theme].paper
    for strategy, variant in itertools.product([*REGISTRY, "mine:Own"], range(5)):
        assert style.contrast(style.look_of(strategy, variant, style.THEMES[theme]).color, paper) >= 2.5


def test_every_strategy_has_its_own_look() -> None:
    assert set(style._TABLE) == set(REGISTRY)
    assert len({look[0] for look in style._TABLE.values()}) == len(REGISTRY)
    assert style.look_of("sapus").color == "#d55e00"
    own = style.look_of("my_module:Mine")
    assert own == style.look_of("my_module:Mine")
    assert own.color in style._RESERVE
    assert not set(style._RESERVE) & {look[0] for look in style._TABLE.values()}


def test_settings_of_one_strategy_differ_in_everything_but_hue(tmp_path: Path) -> None:
    for h in (4, 8):
        make_run(tmp_path / f"h{h}", "local-sgd", config={"params": {"h": h}}, hyper_parameters={"h": h})
    (axes,) = draw("accuracy", tmp_path).axes
    looks = style.looks(analysis.group_runs(analysis.load_runs([tmp_path])), style.THEMES["paper"])
    one, other = looks["local-sgd h=4"], looks["local-sgd h=8"]
    assert one == style.look_of("local-sgd")
    assert one.color != other.color
    assert one.marker != other.marker
    assert one.dash != other.dash
    assert [drawn.get_color() for drawn in axes.lines] == [one.color, other.color]


# --- awkward runs


SCALED = {"wire_scale": 20.0}


def _one(folder: Path) -> None:
    make_run(folder / "a", "bsp", server=SERVER, staleness=[0, 1], cluster=SCALED)


def _three_of_which_one_is_unfinished(folder: Path) -> None:
    for seed in range(3):
        make_run(folder / f"a{seed}", "bsp", seed, server=SERVER, staleness=[0, seed], cluster=SCALED)
        make_run(folder / f"b{seed}", "sapus", seed, evals=QUICK, server=SERVER, staleness=[seed], cluster=SCALED)
    more: dict[str, Any] = {"status": "running", "cluster": SCALED}
    make_run(folder / "c", "ssp", evals=[(0.0, 0.1)], server=SERVER[:1], staleness=[0], **more)


def _empty(folder: Path) -> None:
    _one(folder)
    make_run(folder / "c", "ssp", evals=(), status="failed", cluster=SCALED)


def _diverged(folder: Path) -> None:
    evals = [(0.0, 0.1), (1.0, float("nan"))]
    make_run(folder / "a", "bsp", evals=evals, server=SERVER, staleness=[0], cluster=SCALED)


def _with_other_workers(folder: Path) -> None:
    for workers in (1, 2):
        more: dict[str, Any] = {"config": {"workers": workers}, "cluster": SCALED}
        make_run(folder / f"w{workers}", server=SERVER, staleness=[0, 0], **more)


AWKWARD = [_one, _three_of_which_one_is_unfinished, _empty, _diverged, _with_other_workers]


@pytest.mark.parametrize("make", AWKWARD)
def test_every_kind_is_drawn_or_says_in_a_line_why_not(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    groups = analysis.group_runs(analysis.load_runs([tmp_path]))
    refused = {}
    for kind in figures.KINDS:
        try:
            figure = figures.draw(kind, groups, figures.Request(theme="dark", width_mm=89))
        except UserError as error:
            refused[kind] = str(error)
        else:
            assert any(axes.has_data() or axes.patches for axes in figure.axes), kind
            assert "real clock; no cluster profile; wire scale 20." in canvas.caption_of(figure)
    assert all("\n" not in text for text in refused.values())
    # Nothing is said of weights by runs whose rows have none.
    expected = {"weights"} if make is _with_other_workers else {"weights", "scaling"}
    assert set(refused) == expected
    assert "pushes.csv has no row with `weight` (bsp" in refused["weights"]


def test_a_strategy_without_pushes_is_left_out_of_the_panels(two: Path) -> None:
    make_run(two / "c", "ssp")
    figure = draw("interval", two)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["asp", "bsp"]
    assert "No push with a value: ssp." in canvas.caption_of(figure)


def test_of_many_groups_and_workers_some_are_drawn_and_it_is_said(tmp_path: Path) -> None:
    for h in range(14):
        folder = make_run(tmp_path / f"h{h}", "local-sgd", config={"params": {"h": h}}, hyper_parameters={"h": h})
        with_pushes(folder, [push(1.0, worker, 1) for worker in range(20)])
    figure = draw("interval", tmp_path)
    assert len(figure.axes) == 12
    assert len(figure.axes[0].lines) == 16
    assert "The first 12 of 14 groups; name the runs to choose others." in canvas.caption_of(figure)
    assert "Of more than 16 workers, as many are shown" in canvas.caption_of(figure)


def test_a_window_with_too_many_bars_is_refused(tmp_path: Path) -> None:
    with_pushes(make_run(tmp_path / "a"), [push(i / 1000, 0, i + 1) for i in range(5100)])
    with pytest.raises(UserError, match=r"bsp has more than 5,000 bars from 0 to 9 s; give a shorter --window"):
        draw("timeline", tmp_path, window=(0, 9))


@pytest.mark.parametrize(("width_mm", "theme"), [(89, "paper"), (183, "paper"), (254, "slides")])
def test_nothing_reaches_beyond_the_sheet(two: Path, width_mm: float, theme: str) -> None:
    make_run(two / "c", "post-local-sgd", evals=QUICK, server=SERVER, staleness=[1])
    for kind in ("speedup", "accuracy", "cpu"):
        figure = draw(kind, two, width_mm=width_mm, theme=theme)
        sheet = figure.bbox
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        boxes = [artist.get_tightbbox(renderer) for artist in (*figure.axes, *figure.legends, *figure.texts)]
        for box in boxes:
            assert box is not None
            assert box.x0 >= -1, kind
            assert box.x1 <= sheet.x1 + 1, kind
            assert box.y0 >= -1, kind
            assert box.y1 <= sheet.y1 + 1, kind
        tops = [legend.get_tightbbox(renderer) for legend in figure.legends]
        assert all(top is not None and top.y1 <= boxes[0].y0 + 1 for top in tops), "the legend is below the axes"  # type: ignore[union-attr]


# --- the same bytes each time


WANTED = (("png", "speedup"), ("pdf", "timeline"), ("svg", "accuracy"))


def test_files_are_the_same_to_the_byte_in_any_process_and_settings(two: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\nsavefig.bbox: tight\n")
    code = (
        "import sys\n"
        "from sapus_cli.cli import run_line\n"
        f"for form, kind in {WANTED}:\n"
        "    assert run_line(['plot', kind, *sys.argv[1:], '--format', form]) == 0\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(two / "a"), str(two / "b"), "-o", str(tmp_path / "other")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MPLCONFIGDIR": str(settings), "PYTHONHASHSEED": "1"},
    )
    assert done.returncode == 0, done.stderr
    for form, kind in WANTED:
        words = ["plot", kind, str(two / "a"), str(two / "b"), "-o", str(tmp_path / "own"), "--format", form]
        assert run_line(words) == 0
        content = (tmp_path / "own" / f"{kind}.{form}").read_bytes()
        assert content == (tmp_path / "other" / f"{kind}.{form}").read_bytes()
        assert b"stroke-dasharray: ;" not in content, "is no line for every viewer"
        assert not any(word in content for word in (b"CreationDate", b"Software", b"<dc:date>", b"Matplotlib v"))


# --- the command


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder results in the current directory, with two runs of one kind and one of another."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "results" / "a", "bsp", server=SERVER, staleness=[0])
    make_run(tmp_path / "results" / "b", "asp", evals=QUICK, server=SERVER, staleness=[0])
    older = "2025-01-01T00:00:00.000+00:00"
    make_run(tmp_path / "results" / "c", "bsp", server=SERVER, clock="virtual", started_at=older)
    return tmp_path / "results"


def call(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    code = run_line(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("results")
def test_without_runs_those_like_the_newest_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(["plot", "accuracy"], capsys)
    assert (code, out) == (0, "Wrote figures/accuracy.png\n")
    assert err == ("sapus: 1 of 3 runs left out, whose data, model or clock are not those of the newest, b: c\n")
    assert Path("figures/accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_without_runs_the_newest_suite_is_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(results / "suite" / "d", "ssp")
    make_run(results / "suite" / "e", "bsp")
    (results / "suite" / "suite.json").write_text("{}")
    code, out, err = call(["plot", "speedup", "-o", "s.svg"], capsys)
    assert (code, out, err) == (0, "Wrote s.svg\n", "sapus: drawn is the newest suite, results/suite\n")
    assert "<svg" in Path("s.svg").read_text()


@pytest.mark.usefixtures("results")
def test_all_kinds_go_into_a_folder_and_what_cannot_be_drawn_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(["plot", "all", "results/a", "results/b", "-o", "out/deep", "--format", "svg"], capsys)
    assert code == 0
    assert {file.stem for file in Path("out/deep").glob("*.svg")} == set(figures.KINDS) - {"scaling", "weights"}
    assert len(out.splitlines()) == len(figures.KINDS) - 2
    assert err.splitlines() == [
        "sapus: weights left out: no weight of a push to draw: pushes.csv has no row with `weight` (asp, bsp)",
        (
            "sapus: scaling left out: all runs have 4 workers, so there is no scaling to draw; "
            "add runs with another --workers"
        ),
    ]


@pytest.mark.parametrize(
    ("words", "width"), [(["--width", "one"], 89), (["--width", "5in"], 127), ([], 183), (["--theme", "slides"], 254)]
)
@pytest.mark.usefixtures("results")
def test_widths_are_those_of_print(words: list[str], width: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plot", "loss", "results/a", "-o", "x.png", *words], capsys)[0] == 0
    header = Path("x.png").read_bytes()[16:24]
    assert int.from_bytes(header[:4], "big") == pytest.approx(width / 25.4 * canvas.DPI, abs=1)


@pytest.mark.usefixtures("results")
def test_a_preview_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = call(["plot", "accuracy", "results/a", "--show"], capsys)
    assert code == 0
    rows = [row for row in out.splitlines() if "▀" in row]
    assert len(rows) > 8
    assert {row.count("▀") for row in rows} == {60}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["acuracy"], "unknown kind of figure 'acuracy'; did you mean accuracy? Valid: accuracy, all, bandwidth"),
        (["loss", "nowhere"], "nowhere: there is no such folder; give run folders"),
        (["loss", "results/a", "results/c"], "the runs cannot be compared: clock differs: real (bsp"),
        (["weights", "results/a"], "no weight of a push to draw: pushes.csv has no row with `weight` (bsp)"),
        (["speedup", "results/b"], "--baseline bsp: there is no such group; there are: asp"),
        (["speedup", "results/a", "--target", "2"], "--target 2: must lie above 0"),
        (["loss", "results/a", "--format", "gif"], "unknown format 'gif'. Valid: pdf, png, svg."),
        (["loss", "results/a", "-o", "a.jpeg"], "--output a.jpeg: is no png, pdf or svg file"),
        (["loss", "results/a", "-o", "a.svg", "--format", "png"], "--output a.svg: is no png file; leave --format png"),
        (["all", "results/a", "-o", "a.svg"], "--output a.svg: all of the figures need a folder"),
        (["all", "results/a", "-o", "file/x"], "cannot write file/x/speedup.png: Not a directory; choose another"),
        (["loss", "results/a", "-o", "file/x.png"], "cannot write file/x.png: file is no folder; choose another"),
        (["loss", "results/a", "--width", "wide"], "--width wide: must be one, two, or a width as in 120mm or 5in"),
        (["loss", "results/a", "--width", "1..2mm"], "--width 1..2mm: must be one, two"),
        (["loss", "results/a", "--width", "5mm"], "--width 5mm: must be from 60 to 1000 mm"),
        (["timeline", "results/a", "--window", "5"], "--window 5: must be two numbers of seconds, as in 20,30"),
        (["timeline", "results/a", "--window", "5,5"], "--window 5,5: must begin at 0 or later and end after that"),
        (["loss", "results/a", "--show"], "--show: there is no terminal here"),
        (["loss", "results/a", "--theme", "neon"], "Invalid value for '--theme'"),
    ],
)
@pytest.mark.usefixtures("results")
def test_wrong_calls_end_in_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    code, out, err = call(["plot", *words], capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"sapus: {error}")
    assert not Path("figures").exists()


def test_without_a_folder_results_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["plot", "loss"], capsys) == (
        2,
        "",
        "sapus: there is no folder results here; name the runs to draw, or make some with: sapus run\n",
    )


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(call(["plot", "--help"], capsys)[1].replace("│", " ").split())
    assert f"{', '.join(figures.KINDS)}, or all." in words
