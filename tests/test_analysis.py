"""The arithmetic of the comparison, on run folders whose numbers were worked out by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import LINEAR, make_run, record

from sapus_cli import analysis, traces
from sapus_cli.analysis import Estimate, Reached, Run, average, interval, ratio_interval, time_to
from sapus_cli.errors import DamagedFileError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load(*folders: Path) -> list[analysis.Group]:
    return analysis.group_runs(analysis.load_runs(folders))


def one(folder: Path, *arguments: Any, **changes: Any) -> Run:
    return analysis.load_runs([make_run(folder, *arguments, **changes)])[0]


def near(value: Any) -> Any:
    return pytest.approx(value)


# --- finding, loading, grouping


def test_files_and_the_runs_of_the_repository_are_not_meant_by_a_star(tmp_path: Path) -> None:
    results = tmp_path / "results"
    own = make_run(results / "own", "bsp")
    kept = make_run(results / "reference" / "suite" / "bsp", "bsp")
    page = results / "README.md"
    page.write_text("")
    star = [results / "*"]
    shell = sorted(results.iterdir())
    assert page in shell
    for paths in ([results], star, shell, [tmp_path]):
        assert analysis.find_runs(paths) == [own]
    for paths in ([results / "reference"], [results / "reference" / "suite"], [kept], [results / "refer*"]):
        assert analysis.find_runs(paths) == [kept]
    assert analysis.find_runs([own, kept.parent]) == [own, kept], "named itself"
    with pytest.raises(UserError, match="there is no run in it"):
        analysis.find_runs([page])


def test_runs_are_found_by_folder_by_folder_of_folders_and_by_pattern(tmp_path: Path) -> None:
    a = make_run(tmp_path / "results" / "a")
    b = make_run(tmp_path / "results" / "suite" / "b")
    make_run(tmp_path / "results" / "1" / "2" / "3" / "too_deep")
    make_run(tmp_path / "results" / ".hidden" / "c")
    (tmp_path / "results" / "logs").mkdir()
    assert analysis.find_runs([a]) == [a]
    assert analysis.find_runs([tmp_path / "results"]) == [a, b]
    assert analysis.find_runs([b, a, b.parent]) == [b, a], "each once, in the order given"
    assert analysis.find_runs([tmp_path / "results" / "suit*"]) == [b]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "there is no such folder"),
        ("empty", "there is no run in it, nor up to 3 folders below"),
        ("no*", "no path matches this pattern"),
        ("**x", "is no pattern"),
        ("a/evals.csv", "there is no run in it"),
    ],
)
def test_where_there_is_no_run_the_path_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "a")
    with pytest.raises(UserError, match=message) as caught:
        analysis.find_runs([tmp_path / "a", tmp_path / path])
    assert str(tmp_path / path) in str(caught.value)


def test_the_properties_of_a_run(tmp_path: Path) -> None:
    given = {"params": {"h": "8"}}
    run = one(tmp_path / "a", "local-sgd", 3, status="failed", config=given, hyper_parameters={"h": 8, "x": 1.5})
    assert (run.name, run.strategy, run.label, run.seed, run.workers) == ("a", "local-sgd", "local-sgd h=8", 3, 4)
    assert (run.clock, run.status, run.finished, run.summary) == ("real", "failed", False, {})
    assert run.evals.columns == [column.name for column in traces.EVALS]
    assert run.evals is run.evals
    assert run.pushes.is_empty()
    assert run.events.is_empty()


@pytest.mark.parametrize("key", ["config", "clock", "status", "strategy"])
def test_a_record_that_lacks_an_entry_is_damaged(tmp_path: Path, key: str) -> None:
    whole = record()
    del whole[key]
    traces.write_run(tmp_path, whole)
    with pytest.raises(DamagedFileError, match=rf"run\.json: has no valid '{key}"):
        analysis.load_runs([tmp_path])


def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path: Path) -> None:
    for seed in (10, 2, 0):
        make_run(tmp_path / f"bsp{seed}", "bsp", seed, config={"data_dir": f"/data{seed}", "download": bool(seed)})
    # Given or not, the default is the same hyper-parameter.
    make_run(tmp_path / "a", "local-sgd", 0, hyper_parameters={"h": 16})
    make_run(tmp_path / "b", "local-sgd", 1, hyper_parameters={"h": 16}, config={"params": {"h": "16"}})
    make_run(tmp_path / "c", "local-sgd", 0, hyper_parameters={"h": 4}, config={"params": {"h": "4"}})
    groups = load(tmp_path)
    assert [(group.label, group.seeds) for group in groups] == [
        ("bsp", [0, 2, 10]),
        ("local-sgd h=4", [0]),
        ("local-sgd", [0, 1]),
    ]


def test_labels_say_what_groups_of_one_strategy_differ_in(tmp_path: Path) -> None:
    make_run(tmp_path / "a", config={"workers": 16, "batch_size": 8})
    make_run(tmp_path / "b", config={"workers": 4, "batch_size": 32})
    make_run(tmp_path / "c", "asp", cluster={"name": "lan", "step_s": 0.5})
    make_run(tmp_path / "d", "asp", cluster={"name": "wan", "step_s": 0.1})
    make_run(tmp_path / "e", "ssp", cluster={"name": "lan", "step_s": 0.5})
    make_run(tmp_path / "f", "ssp", cluster={"name": "lan", "step_s": 0.1})
    assert [group.label for group in load(tmp_path)] == [
        "asp cluster=wan",
        "asp cluster=lan",
        "bsp workers=4 batch=32",
        "bsp workers=16 batch=8",
        "ssp cluster.step_s=0.1",
        "ssp cluster.step_s=0.5",
    ]


def test_the_name_of_a_profile_does_not_matter(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0, cluster={"name": "mine", "description": "words"})
    make_run(tmp_path / "b", seed=1)
    assert [group.seeds for group in load(tmp_path)] == [[0, 1]]


def test_of_repeats_the_newest_is_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "z_old", seed=0, started_at="2026-01-01T00:00:00.000+00:00")
    make_run(tmp_path / "a_new", seed=0, started_at="2026-01-02T00:00:00.000+00:00")
    (group,) = load(tmp_path)
    assert [run.name for run in group.runs] == ["a_new"]
    assert [run.name for run in group.repeats] == ["z_old"]


# --- reading


def test_a_sound_trace_reads_as_with_the_careful_reader(tmp_path: Path) -> None:
    columns = traces.push_columns(["number", "word"])
    with traces.Trace(tmp_path / "pushes.csv", columns) as trace:
        for i in range(100):
            values = {
                "t_s": i / 3,
                "worker": i,
                "loss": [math.nan, math.inf, 0.1][i % 3],
                "reason": "upper",
                "h_min": None,
            }
            trace.row(values | {"number": i / 7, "word": "none" if i else 1.0})
    expected = traces.read_trace(tmp_path, "pushes")
    fast = analysis._read_sound(tmp_path / "pushes.csv", "pushes", None)
    assert fast is not None
    assert fast.schema == expected.schema
    assert fast.equals(expected)
    assert analysis.read_frame(tmp_path, "pushes", ["word", "t_s"]).equals(expected.select("word", "t_s"))


@pytest.mark.parametrize("quoted", [True, False])
def test_a_torn_row_is_dropped_and_a_damaged_one_is_named(tmp_path: Path, *, quoted: bool) -> None:
    run = one(tmp_path / "a", staleness=range(10))
    path = run.folder / "pushes.csv"
    text = path.read_text()
    reason = ',"a, b",,\n' if quoted else ",,,\n"
    whole = text.replace(",,,\n", reason, 1)
    path.write_text(whole + whole.splitlines()[-1][:5])
    assert len(analysis.read_frame(run.folder, "pushes")) == 10
    for wrong in (
        whole.replace("\n3.0,", "\n3.0,5,", 1),
        whole.replace("\n3.0,", "\nthree,", 1),
        whole.replace("3.0,", "", 1),
    ):
        path.write_text(wrong)
        with pytest.raises(DamagedFileError, match=r"pushes\.csv: row 4 \(line 5\)"):
            analysis.read_frame(run.folder, "pushes", ["t_s", "staleness"])


# --- time to target


@pytest.mark.parametrize(
    ("evals", "target", "expected"),
    [
        (LINEAR, 0.55, Reached(5.5, censored=False)),
        (LINEAR, 0.5, Reached(5.0, censored=False)),
        (LINEAR, 1.0, Reached(10.0, censored=False)),
        ([(0.5, 0.9), (1.0, 0.95)], 0.8, Reached(0.5, censored=False)),
        ([(0.0, 0.1), (4.0, 0.9), (5.0, 0.2), (6.0, 0.9)], 0.5, Reached(2.0, censored=False)),
        ([(0.0, 0.1), (4.0, 0.3)], 0.5, Reached(4.0, censored=True)),
        ([], 0.5, Reached(0.0, censored=True)),
    ],
)
def test_time_to_target(tmp_path: Path, evals: Sequence[tuple[float, float]], target: float, expected: Reached) -> None:
    reached = time_to(one(tmp_path / "a", evals=evals), target)
    assert reached.censored == expected.censored
    assert reached.seconds == pytest.approx(expected.seconds, rel=1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), min_size=1, max_size=20),
    st.floats(0, 1, exclude_min=True),
)
def test_the_time_lies_between_the_two_evaluations(evals: list[tuple[float, float]], target: float) -> None:
    seconds = sorted(t for t, _ in evals)
    accuracy = [value for _, value in evals]
    run = Run(None, record())  # type: ignore[arg-type]
    run.__dict__["evals"] = pl.DataFrame({"t_s": seconds, "accuracy": accuracy})
    reached = time_to(run, target)
    first = next((i for i, value in enumerate(accuracy) if value >= target), None)
    assert reached.censored == (first is None)
    if first is None:
        assert reached.seconds == seconds[-1]
    else:
        assert seconds[max(0, first - 1)] <= reached.seconds <= seconds[first]


def test_the_default_target_is_what_every_run_reached(tmp_path: Path) -> None:
    make_run(tmp_path / "a", evals=[(0, 0.1), (1, 0.968), (2, 0.9)])
    make_run(tmp_path / "b", "asp", 1, evals=[(0, 0.1), (1, 0.9549999)])
    make_run(tmp_path / "c", "ssp", evals=[])
    target = analysis.default_target(load(tmp_path))
    assert target.accuracy == 0.95
    assert target.rule.endswith("set by asp seed 1")
    make_run(tmp_path / "d", "sapus", evals=[(0, 0.955)])
    assert analysis.default_target(load(tmp_path / "a", tmp_path / "d")).accuracy == 0.955, "0.955 * 200 is 190.99..."


def test_the_target_is_what_the_suite_says(tmp_path: Path) -> None:
    for name, strategy in (("a", "bsp"), ("b", "asp")):
        make_run(tmp_path / "s" / name, strategy)
    groups = load(tmp_path)

    def said(**targets: object) -> analysis.Target:
        cells = [{"name": name, "target": target} for name, target in targets.items()]
        (tmp_path / "s" / "suite.json").write_text(json.dumps({"suite": "mine", "cells": cells}))
        return analysis.default_target(groups)

    assert said(a=0.75, b=0.75) == (0.75, "set by the suite mine")
    # Several, none, or a run that it does not know: what every run reached, as without a suite.
    for others in ({"a": 0.75, "b": 0.5}, {"a": None, "b": None}, {"a": 0.75}, {"a": 7, "b": 7}):
        assert said(**others).accuracy == 1.0
    (tmp_path / "s" / "suite.json").write_text("{torn")
    assert analysis.default_target(groups).accuracy == 1.0


def test_no_target_without_accuracy(tmp_path: Path) -> None:
    make_run(tmp_path / "a", evals=[])
    with pytest.raises(UserError, match="none of the runs was evaluated"):
        analysis.default_target(load(tmp_path))
    make_run(tmp_path / "b", "asp", evals=[(0, 0.004)])
    with pytest.raises(UserError, match=r"b got no further than 0\.40%; leave it out"):
        analysis.default_target(load(tmp_path))


# --- load of the server


SERVER = [(0.0, 5.0, 100, 0), (0.5, 5.1, 100_100, 0), (1.0, 5.2, 100_100, 300_000), (2.0, 5.5, 200_100, 400_000)]


def test_bytes_are_interpolated_between_samples(tmp_path: Path) -> None:
    totals = {"rx_bytes": 300_100, "tx_bytes": 500_000}
    run = one(tmp_path / "a", server=SERVER, totals=totals, summary={"seconds": 4.0})
    assert analysis.bytes_by(run, 0.25) == pytest.approx(50_100)
    assert analysis.bytes_by(run, 1.5) == pytest.approx(500_100)
    assert analysis.bytes_by(run, 3.0) == pytest.approx(700_100), "up to what the run ended with"
    assert analysis.bytes_by(run, 9.0) == pytest.approx(800_100)
    unfinished = one(tmp_path / "b", server=SERVER, totals=totals, summary={"seconds": 4.0}, status="running")
    assert analysis.bytes_by(unfinished, 3.0) == pytest.approx(600_100), "its last sample"
    assert analysis.bytes_by(one(tmp_path / "c"), 3.0) is None


def test_cpu_time_counts_from_the_start(tmp_path: Path) -> None:
    # 3 s before the start; then 0.5 s a second. The samples end at 12 s, the run at 10 s, with 5 s in its total.
    server = [(t, 3 + t / 2, 0, 0) for t in (2.0, 4.0, 12.0)]
    ended: dict[str, Any] = {"totals": {"server_cpu_s": 5.0}, "summary": {"seconds": 10.0}}
    run = one(tmp_path / "a", server=server, **ended)
    assert [analysis.server_cpu_by(run, t) for t in (0, 1, 2, 5, 10)] == near([0, 0.5, 1, 2.5, 5])
    # What a run that did not end says of it is in its first sample.
    killed = one(tmp_path / "b", server=server, status="failed")
    assert [analysis.server_cpu_by(killed, t) for t in (2, 5, 20)] == near([0, 1.5, 5])
    # The samples of a simulated run may end before it does.
    short = one(tmp_path / "c", server=[(0.0, 0.0, 0, 0), (5.0, 2.0, 0, 0)], **ended)
    assert [analysis.server_cpu_by(short, t) for t in (2.5, 7.5, 11)] == near([1, 3.5, 5])
    assert analysis.server_cpu_by(one(tmp_path / "d"), 1) is None


def test_cpu_time_to_the_target_is_bounded_with_it(tmp_path: Path) -> None:
    server = [(0.0, 0.0, 0, 0), (10.0, 5.0, 0, 0)]
    make_run(tmp_path / "a", evals=[(0, 0), (4, 1)], server=server)
    make_run(tmp_path / "b", "asp", evals=[(0, 0), (8, 1)], server=server)
    make_run(tmp_path / "c", "ssp", evals=[(0, 0), (6, 0.1)], server=server)
    groups = load(tmp_path)
    found = cells(groups, 0.5, "cpu-time")
    assert (found["bsp"].value, found["asp"].value) == near((1, 2))
    assert found["ssp"] == Estimate(near(3), n=1, bound=">")
    assert cells(groups, 0.5, "cpu-time-reduction")["asp"].value == near(-100)


def test_the_last_evaluation_says_loss_and_worst_class(tmp_path: Path) -> None:
    nan = float("nan")
    groups = load(
        make_run(tmp_path / "a", evals=[(0.0, 0.5, 0.25), (1.0, 0.75, 0.125)]),
        make_run(tmp_path / "b", "asp", evals=[(0.0, 0.5), (1.0, nan)]),
    )
    assert {label: cell[::4] for label, cell in cells(groups, 0.5, "loss").items()} == {
        "bsp": (0.25, ""),
        "asp": (0.5, ">"),
    }, "of a run that diverged a bound"
    worst = cells(groups, 0.5, "worst-class")
    assert (worst["bsp"].value, worst["asp"].value) == (0.125, None)


def test_the_peak_is_that_of_one_direction_over_a_second(tmp_path: Path) -> None:
    # Windows of at least a second: 0 to 1 (tx 300 kB), 1 to 2 (100 kB each).
    assert analysis.peak_gbit_per_s(one(tmp_path / "a", server=SERVER)) == pytest.approx(8e-9 * 300_000)
    assert analysis.peak_gbit_per_s(one(tmp_path / "b", server=SERVER[:2])) == pytest.approx(8e-9 * 200_000)
    assert analysis.peak_gbit_per_s(one(tmp_path / "c", server=SERVER[:1])) is None


def test_figures_of_an_unfinished_run_come_from_its_traces(tmp_path: Path) -> None:
    make_run(tmp_path / "a", status="interrupted", server=SERVER, staleness=[0, 2])
    make_run(tmp_path / "b", "asp", server=SERVER)
    names = ["cpu", "bandwidth", "throughput", "interval", "staleness", "staleness-p99"]
    row, _ = sorted(analysis.table(load(tmp_path), 0.5, None, names), key=lambda row: row.group.strategy != "bsp")
    values = {name: cell.value for name, cell in row.cells.items()}
    # 0.5 CPU seconds in 2 s; 400,000 bytes sent by second 2; 100 samples a second; 2 steps a push.
    expected = {"cpu": 25, "bandwidth": 8e-9 * 200_000, "throughput": 100, "interval": 2}
    assert values == pytest.approx(expected | {"staleness": 1, "staleness-p99": 2})


def test_staleness(tmp_path: Path) -> None:
    run = one(tmp_path / "a", staleness=[*range(100), *range(100)])
    assert run.staleness == (49.5, 98.0), "198 of 200 pushes are at most 98"
    assert one(tmp_path / "b").staleness is None


# --- intervals


def test_an_interval_needs_three_values_and_is_repeatable() -> None:
    assert interval([]) == Estimate(None)
    assert interval([3.0]) == Estimate(3.0, n=1)
    assert interval([1.0, 3.0]) == Estimate(2.0, n=2)
    values = [1.0, 2.0, 4.0, 3.0]
    first = interval(values)
    analysis._bootstrap.cache_clear()
    assert interval(values) == first
    assert first.n == 4
    assert first.low is not None
    assert first.high is not None
    assert 1.0 <= first.low < 2.5 < first.high <= 4.0


@pytest.mark.parametrize("values", [[2.0] * 5, [0.0] * 3, [0.1 + 0.2, 0.3, 0.3]])
def test_equal_values_give_an_interval_of_one_point(values: list[float]) -> None:
    x = near(values[0])
    assert interval(values) == Estimate(x, x, x, n=len(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=8))
def test_an_interval_is_finite_and_within_the_values(values: list[float]) -> None:
    estimate = interval(values)
    assert estimate.low is not None
    assert estimate.high is not None
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= estimate.low <= estimate.high <= max(values) + slack


@pytest.mark.parametrize(("n", "least", "most"), [(3, 0.68, 0.77), (5, 0.79, 0.87), (10, 0.88, 0.97)])
def test_the_interval_covers_the_mean_as_often_as_the_manual_says(
    monkeypatch: pytest.MonkeyPatch, n: int, least: float, most: float
) -> None:
    monkeypatch.setattr(analysis, "_RESAMPLES", 1999)
    rng = np.random.default_rng(7)
    estimates = [interval(rng.normal(5.0, 2.0, n).tolist()) for _ in range(1000)]
    covered = sum(e.low is not None and e.high is not None and e.low <= 5.0 <= e.high for e in estimates)
    assert least <= covered / 1000 <= most


def test_ratios_are_paired_by_seed() -> None:
    # 2, 8 and 4 are a geometric mean of 4; unpaired, or with seeds 3 and 9, it would be another.
    estimate = ratio_interval({0: 2.0, 1: 40.0, 2: 400.0, 9: 1e9}, {0: 1.0, 1: 5.0, 2: 100.0, 3: 1e-9})
    assert estimate.value == pytest.approx(4.0)
    assert estimate.n == 3
    assert ratio_interval({0: 1.0}, {1: 1.0}) == Estimate(None)
    assert ratio_interval({0: 1.0, 1: 0.0}, {0: 0.0, 1: 2.0}) == Estimate(0.0, n=1)
    same = ratio_interval({s: 3.0 * s for s in (1, 2, 3)}, {s: 2.0 * s for s in (1, 2, 3)})
    assert same[:3] == pytest.approx((1.5, 1.5, 1.5))


# --- curves


def test_two_equal_curves_of_unequal_length_average_to_themselves() -> None:
    # Points that binary floats hold exactly, so that the mean is exact as well.
    short = [0.0, 0.5, 2.0]
    long = [0.25 * i for i in range(21)]
    grid = [0.125 * i for i in range(50)]
    result = average([(short, short), (long, long)], grid)
    assert result.x.tolist() == [x for x in grid if x <= 2]
    assert result.mean.tolist() == result.x.tolist()
    assert result.values.shape == (2, 17)


def test_only_the_common_part_is_averaged() -> None:
    result = average([([1, 3], [0, 2]), ([0, 2], [4, 4])], [0, 1, 1.5, 2, 3])
    assert result.x.tolist() == [1, 1.5, 2]
    assert result.mean.tolist() == [2, 2.25, 2.5]
    for nothing in ([([0, 1], [0, 1]), ([2, 3], [0, 1])], [([], []), ([0, 1], [0, 1])], []):
        empty = average(nothing, [0, 1, 2])
        assert empty.x.shape == empty.mean.shape == (0,)
        assert empty.values.shape == (len(nothing), 0)


# --- the table


def speed(
    factor: float, *, seeds: Sequence[int] = (0, 1, 2), end: float = 10.0
) -> dict[int, list[tuple[float, float]]]:
    """Evaluations a second by seed; accuracy grows by `factor` / 100 a second, and up to a seed's 10 % faster."""
    return {s: [(float(t), min(1, factor * (1 + s / 20) * t / 100)) for t in range(int(end) + 1)] for s in seeds}


def make_groups(place: Path, **curves: dict[int, list[tuple[float, float]]]) -> list[analysis.Group]:
    for strategy, by_seed in curves.items():
        for seed, evals in by_seed.items():
            make_run(place / f"{strategy}{seed}", strategy, seed, evals=evals)
    return load(place)


def cells(groups: list[analysis.Group], target: float, name: str, baseline: str = "bsp") -> dict[str, Estimate]:
    return {row.group.label: row.cells[name] for row in analysis.table(groups, target, baseline, [name])}


def test_the_speed_up_is_paired(tmp_path: Path) -> None:
    groups = make_groups(tmp_path, bsp=speed(4), asp=speed(8), ssp=speed(2, seeds=(1, 2, 7), end=40))
    # asp takes half the time of bsp in every seed, ssp twice.
    found = cells(groups, 0.25, "speedup")
    assert found["bsp"] == Estimate(1.0, n=3)
    assert found["asp"][:4] == pytest.approx((2, 2, 2, 3))
    assert found["ssp"][:3] == (near(0.5), None, None)
    assert found["ssp"].n == 2, "the seeds that both have"
    assert cells(groups, 0.25, "seeds")["ssp"].value == 3


def test_a_reduction_is_one_minus_the_ratio(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / f"a{seed}", "bsp", seed, summary={"server_cpu_percent": 10.0 + seed})
        make_run(tmp_path / f"b{seed}", "asp", seed, summary={"server_cpu_percent": (10.0 + seed) / 4})
    found = cells(load(tmp_path), 0.5, "cpu-reduction")
    assert found["asp"][:4] == pytest.approx((75, 75, 75, 3))
    assert found["bsp"].value == 0


def test_a_censored_seed_makes_a_bound(tmp_path: Path) -> None:
    slow = speed(4) | {1: [(0.0, 0.0), (30.0, 0.1)]}
    groups = make_groups(tmp_path, bsp=speed(4), asp=slow)
    times = cells(groups, 0.2, "time")
    # Seeds 0 and 2 take 5 s and 5 / 1.1 s; seed 1 takes more than 30 s, so the mean is above that of these three.
    assert times["asp"] == Estimate(near((5 + 5 / 1.1 + 30) / 3), n=3, bound=">")
    assert times["bsp"].bound == ""
    # Its speed-up is below 1 * 1 * (5 / 1.05 / 30), to the power of a third.
    assert cells(groups, 0.2, "speedup")["asp"] == Estimate(near((5 / 1.05 / 30) ** (1 / 3)), n=3, bound="<")
    # Seen from the other side, bsp is faster by more than the inverse.
    other = cells(groups, 0.2, "speedup", "asp")["bsp"]
    assert other == Estimate(near((30 * 1.05 / 5) ** (1 / 3)), n=3, bound=">")


def test_a_ratio_of_two_bounds_says_nothing(tmp_path: Path) -> None:
    slow = speed(4) | {1: [(0.0, 0.0), (30.0, 0.1)]}
    groups = make_groups(tmp_path, bsp=slow, asp=slow, ssp=speed(4) | {0: [(0.0, 0.0), (30.0, 0.1)]})
    found = cells(groups, 0.2, "speedup")
    assert found["asp"] == Estimate(None, n=3, bound="?"), "seed 1 of both did not reach it"
    assert found["ssp"] == Estimate(None, n=3, bound="?"), "one seed bounds it from above, another from below"


def test_bytes_to_a_target_that_was_not_reached_are_a_bound(tmp_path: Path) -> None:
    make_run(tmp_path / "a", evals=[(0, 0), (1, 0.5)], server=SERVER)
    make_run(tmp_path / "b", "asp", evals=[(0, 0), (2, 0.1)], server=SERVER)
    found = cells(load(tmp_path), 0.25, "bytes")
    assert found["bsp"] == Estimate(near(100_100), n=1)
    assert found["asp"] == Estimate(near(600_100), n=1, bound=">")


def test_each_group_has_the_baseline_of_its_own_setting(tmp_path: Path) -> None:
    for strategy in ("bsp", "asp"):
        for workers in (4, 8):
            evals = [(0.0, 0.0), (float(workers if strategy == "bsp" else 1), 1.0)]
            make_run(tmp_path / f"{strategy}{workers}", strategy, evals=evals, config={"workers": workers})
    make_run(tmp_path / "lone", "asp", config={"workers": 2})
    groups = load(tmp_path)
    found = cells(groups, 0.5, "speedup")
    assert {label: cell.value for label, cell in found.items()} == pytest.approx(
        {"asp workers=2": None, "asp workers=4": 4.0, "asp workers=8": 8.0, "bsp workers=4": 1.0, "bsp workers=8": 1.0}
    )
    assert set(analysis.baselines(groups, "bsp workers=8", 0.5)) == set(found), "one label is the baseline of all"


def based(groups: list[analysis.Group], name: str, target: float = 0.5) -> dict[str, str]:
    """Label of the baseline of each group."""
    return {label: base.label for label, base in analysis.baselines(groups, name, target).items()}


def reaching(place: Path, strategy: str, seconds: float, seed: int = 0, **more: Any) -> Path:
    """A run that reaches 50 % after `seconds`."""
    return make_run(place, strategy, seed, evals=[(0.0, 0.0), (2 * seconds, 1.0)], **more)


def test_of_several_baselines_the_fastest_in_the_own_setting_is_taken(tmp_path: Path) -> None:
    for workers, ssp, h4, h8 in ((4, 3.0, 2.0, 1.0), (8, 3.0, 4.0, 5.0)):
        more: dict[str, Any] = {"workers": workers}
        reaching(tmp_path / f"s{workers}", "ssp", ssp, config=more)
        reaching(tmp_path / f"a{workers}", "asp", 6.0, config=more)
        for h, seconds in ((4, h4), (8, h8)):
            given: dict[str, Any] = {"config": more | {"params": {"h": str(h)}}, "hyper_parameters": {"h": h}}
            reaching(tmp_path / f"l{h}{workers}", "local-sgd", seconds, **given)
    groups = load(tmp_path)
    assert set(based(groups, "ssp,local-sgd").values()) == {"local-sgd h=8 workers=4", "ssp workers=8"}
    assert based(groups, "ssp, local-sgd")["asp workers=8"] == "ssp workers=8"
    assert based(groups, "ssp,local-sgd h=4")["asp workers=4"] == "local-sgd h=4 workers=4"
    assert based(groups, "local-sgd")["asp workers=8"] == "local-sgd h=4 workers=8", "of one strategy as well"
    found = cells(groups, 0.5, "speedup", "ssp,local-sgd")
    assert {label: cell.value for label, cell in found.items()} == pytest.approx(
        {"asp workers=4": 1 / 6, "local-sgd h=4 workers=4": 1 / 2, "local-sgd h=8 workers=4": 1, "ssp workers=4": 1 / 3}
        | {"asp workers=8": 1 / 2, "local-sgd h=4 workers=8": 3 / 4, "local-sgd h=8 workers=8": 3 / 5}
        | {"ssp workers=8": 1}
    )
    (note,) = analysis.choice_of(analysis.table(groups, 0.5, "ssp,local-sgd", ["time"]), "ssp,local-sgd")
    assert note == ("baseline, the fastest of ssp,local-sgd in its setting: local-sgd h=8 workers=4, ssp workers=8")
    rows = analysis.table(groups, 0.5, "ssp", ["time"])
    assert analysis.choice_of(rows, "ssp") == [], "each setting has one"


def test_a_baseline_that_reached_the_target_goes_before_one_that_did_not(tmp_path: Path) -> None:
    for seed in (0, 1):
        reaching(tmp_path / f"s{seed}", "ssp", 20.0, seed)
        late = [(0.0, 0.0), (5.0, 0.1)] if seed else [(0.0, 0.0), (2.0, 1.0)]
        make_run(tmp_path / f"a{seed}", "asp", seed, evals=late)
        # More than 4 s and more than 16 s are more than 8 s in the geometric mean, less than 9 s and 9 s of dssp.
        make_run(tmp_path / f"b{seed}", "bsp", seed, evals=[(0.0, 0.0), (16.0 if seed else 4.0, 0.1)])
        make_run(tmp_path / f"d{seed}", "dssp", seed, evals=[(0.0, 0.0), (9.0, 0.1)])
        reaching(tmp_path / f"l{seed}", "lag", 2.0, seed)
    groups = load(tmp_path)
    assert based(groups, "asp,ssp")["lag"] == "ssp", "3 s at least may be any number"
    assert based(groups, "bsp,dssp")["lag"] == "bsp"
    rows = analysis.table(groups, 0.5, "bsp,dssp", ["speedup"])
    assert {row.group.label: row.cells["speedup"] for row in rows}["lag"] == Estimate(near(4.0), n=2, bound=">")
    assert analysis.choice_of(rows, "bsp,dssp")[1:] == [
        "bsp: need not be the fastest, as none there reached the target with every seed"
    ]


def test_a_baseline_may_have_options_of_its_own(tmp_path: Path) -> None:
    reaching(tmp_path / "s", "ssp", 3.0, config={"lr": 0.1})
    reaching(tmp_path / "d", "dssp", 2.0, config={"lr": 0.2})
    reaching(tmp_path / "a", "sapus", 1.0, config={"lr": 0.1, "wire": "bfloat16"})
    groups = load(tmp_path)
    assert based(groups, "ssp,dssp") == dict.fromkeys(("ssp", "dssp", "sapus"), "dssp")
    # Where it was run with several, the nearest counts.
    reaching(tmp_path / "e", "dssp", 9.0, config={"lr": 0.1})
    groups = load(tmp_path)
    assert based(groups, "ssp,dssp")["sapus"] == "ssp"
    assert based(groups, "ssp,dssp")["dssp lr=0.2"] == "dssp lr=0.2"


def test_a_lone_baseline_of_other_data_is_none(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", "asp")
    make_run(tmp_path / "c", "ssp", data={"sha256": "ef" * 32})
    groups = load(tmp_path)
    assert set(based(groups, "bsp")) == {"bsp", "asp"}
    assert set(analysis.baselines(groups, "bsp", 0.5, unlike=True)) == {"bsp", "asp", "ssp"}
    assert set(analysis.baselines(groups, "bsp", {"asp": 0.4, "bsp": 0.5, "ssp": 0.5})) == {"bsp"}


def test_an_unknown_baseline(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    for h in (4, 8):
        make_run(tmp_path / f"b{h}", "local-sgd", hyper_parameters={"h": h}, config={"params": {"h": str(h)}})
    groups = load(tmp_path)
    with pytest.raises(
        UserError, match=r"--baseline asp: there is no such group; there are: bsp, local-sgd h=4, local"
    ):
        analysis.baselines(groups, "bsp, asp", 0.5)
    assert based(groups, "local-sgd h=8")["bsp"] == "local-sgd h=8"


# --- fairness


def differences(place: Path, **changes: Any) -> list[tuple[str, bool]]:
    make_run(place / "a")
    make_run(place / "b", "asp", **changes)
    return [(str(difference), difference.refuses) for difference in analysis.fairness(load(place))]


@pytest.mark.parametrize(
    ("changes", "line", "refuses"),
    [
        ({"config": {"lr": 0.2}}, "lr differs: 0.2 (asp), 0.1 (bsp)", False),
        ({"config": {"optimizer": "adamw"}}, "optimizer differs: adamw (asp), sgd (bsp)", False),
        ({"config": {"partition": "dirichlet:0.1"}}, "partition differs: dirichlet:0.1 (asp), iid (bsp)", False),
        ({"config": {"steps": 50}}, "steps differs: 50 (asp), 100 (bsp)", False),
        ({"config": {"workers": 8}}, "workers differs: 8 (asp), 4 (bsp)", False),
        ({"effective_batch_size": 8}, "batch size differs: 8 (asp), 32 (bsp)", False),
        ({"cluster": {"name": "lan", "step_s": 0.1}}, "cluster profile differs: lan (asp), none (bsp)", False),
        ({"cluster": {"step_s": 0.1}}, "cluster.step_s differs: 0.1 (asp), none (bsp)", False),
        ({"environment": {"host": {"cpu": "b", "usable_cores": 2}}}, "host cpu differs: b (asp), a cpu (bsp)", False),
        ({"environment": {"versions": {"torch": "3"}}}, "version of torch differs: 3 (asp), 2.0 (bsp)", False),
        ({"device": "cuda"}, "device differs: cuda (asp), cpu (bsp)", False),
        ({"clock": "virtual"}, "clock differs: virtual (asp), real (bsp)", True),
        ({"data": {"sha256": "ef" * 32}}, "data set differs: digits efefefef (asp), digits abababab (bsp)", True),
        ({"model": {"fingerprint": "12" * 32}}, "model differs: mlp 12121212 (asp), mlp cdcdcdcd (bsp)", True),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changes: dict[str, Any], line: str, *, refuses: bool) -> None:
    assert differences(tmp_path, **changes) == [(line, refuses)]


def test_what_cannot_matter_is_not_named(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"config": {"data_dir": "/x", "params": {"h": "3"}}, "cluster": {"name": "same inside"}}
    assert differences(tmp_path, **changes, hyper_parameters={"h": 3}) == []


def test_the_host_does_not_matter_in_virtual_time(tmp_path: Path) -> None:
    make_run(tmp_path / "a", clock="virtual")
    make_run(tmp_path / "b", "asp", clock="virtual", environment={"host": {"cpu": "b", "usable_cores": 64}})
    assert analysis.fairness(load(tmp_path)) == []


def test_the_analysis_imports_no_torch_and_scipy_only_for_an_interval() -> None:
    code = (
        "import sys; from sapus_cli import analysis; analysis.interval([1.0, 2.0]);"
        "print(*(m for m in ('torch', 'matplotlib', 'scipy', 'numpy', 'polars') if m in sys.modules));"
        "analysis.interval([1.0, 2.0, 4.0]); print('scipy' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "True False"]
