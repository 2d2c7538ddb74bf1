"""`sapus compare` as its user meets it: formats, notes, errors, and real runs from end to end."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from runs import make_run

from sapus_cli import analysis, pivot
from sapus_cli.analysis import METRICS
from sapus_cli.cli import run_line

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside

SERVER = [(float(t), 5 + t / 10, 1_000_000 * t, 2_000_000 * t) for t in range(21)]


def accuracy(per_s: float, end: int = 20) -> list[tuple[float, float]]:
    return [(float(t), min(0.98, per_s * t)) for t in range(end + 1)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three seeds of bsp, of asp (twice as fast) and of local-sgd h=4 (one of them did not get there)."""
    for seed in range(3):
        more: dict[str, Any] = {"seed": seed, "server": SERVER, "staleness": [0, 1, 2]}
        wobble = 1 + seed / 10
        summary = {"server_cpu_percent": 10 * wobble, "gbit_per_s_in": 0.2, "gbit_per_s_out": 0.4, "mean_interval": 1.0}
        make_run(tmp_path / f"bsp{seed}", "bsp", evals=accuracy(0.1 * wobble), summary=summary, **more)
        make_run(tmp_path / f"asp{seed}", "asp", evals=accuracy(0.2 * wobble), summary=summary, **more)
        slow = accuracy(0.05 if seed < 2 else 0.03)
        given: dict[str, Any] = {"config": {"params": {"h": "4"}}, "hyper_parameters": {"h": 4}}
        make_run(tmp_path / f"local{seed}", "local-sgd", evals=slow, summary=summary, **given, **more)
    return tmp_path


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_line(["compare", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a refusal."""
    assert run_line(["compare", *words]) == 2
    text, error = capsys.readouterr()
    assert text == ""
    assert error.count("\n") == 1
    return error.removeprefix("sapus: ").strip()


# --- output


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("metrics", [None, "all"])
def test_the_table_fits_the_terminal(
    results: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    metrics: str | None,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = out(capsys, str(results), "--target", "70%", *(["--metrics", metrics] if metrics else []))
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    headings = text.count("strategy  ")
    assert text.count("\nlocal-sgd h=4  ") == headings, "one line a group in each part of the table"
    # bsp reaches 0.7 after 7 s, 7 / 1.1 s and 7 / 1.2 s: 6.40 s on average; asp after half of that.
    assert re.search(r"^asp +3\.20 +2\.00 ", text, re.MULTILINE)
    assert re.search(r"^bsp +6\.40 +1\.00 ", text, re.MULTILINE)
    assert re.search(r"^local-sgd h=4 +> \d", text, re.MULTILINE)
    assert text.index("asp") < text.index("bsp") < text.index("local-sgd")
    assert "target 70 %: as asked" in text
    assert "baseline: bsp" in text
    assert "seeds a group: 3" in text
    assert "local-sgd h=4: did not reach the target with seed 2 (> 20 s); > and < are bounds" in " ".join(text.split())


def test_the_default_target_is_stated(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # local-sgd reaches 0.03 * 20 with seed 2.
    text = " ".join(out(capsys, str(results)).split())
    assert (
        "target 60 %: the most, in steps of half a point, that every run reached; set by local-sgd h=4 seed 2" in text
    )


def test_csv(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, str(results), "--target", "0.7", "--format", "csv")
    rows = {row["group"]: row for row in csv.DictReader(io.StringIO(text))}
    assert list(rows) == ["asp", "bsp", "local-sgd h=4"]
    assert float(rows["asp"]["speedup"]) == pytest.approx(2)
    assert float(rows["asp"]["speedup_low"]) == pytest.approx(2)
    assert (rows["local-sgd h=4"]["time_s_bound"], rows["local-sgd h=4"]["time_s_low"]) == (">", "")
    assert {metric.key for metric in METRICS.values()} <= set(rows["bsp"]), "all metrics"
    assert (rows["bsp"]["seeds"], rows["bsp"]["finished"], rows["bsp"]["target"]) == ("3", "3", "0.7")
    assert float(rows["bsp"]["gbit_per_s"]) == 0.4, "the busier direction"


def test_json(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(out(capsys, str(results), "--target", "70 %", "--format", "json", "--baseline", "asp"))
    assert (document["target"], document["baseline"], document["warnings"]) == (0.7, "asp", [])
    groups = {group["label"]: group for group in document["groups"]}
    assert groups["local-sgd h=4"]["hyper_parameters"] == {"h": 4}
    assert groups["bsp"]["seeds"] == [0, 1, 2]
    assert groups["bsp"]["metrics"]["speedup"]["value"] == pytest.approx(0.5)
    late = groups["local-sgd h=4"]["metrics"]["time_s"]
    assert (late["bound"], late["low"], late["n"]) == (">", None, 3)
    # 3 MB a second, both ways, and asp takes 3.20 s.
    assert groups["asp"]["metrics"]["bytes_to_target"]["value"] == pytest.approx(
        3e6 * (3.5 + 3.5 / 1.1 + 3.5 / 1.2) / 3
    )


def test_markdown(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "0.7", "--format", "markdown", "--metrics", "time,seeds"]
    lines = out(capsys, str(results), *words).splitlines()
    assert lines[:2] == ["| strategy | time to target s | seeds |", "| --- | ---: | ---: |"]
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 5
    assert {row.count("|") for row in rows} == {4}
    assert re.fullmatch(r"\| asp \| 3\.20 \\\[[23]\.\d+, 3\.\d+\\\] \| 3 \|", rows[2])
    assert re.fullmatch(r"\| local-sgd h=4 \| \\> [\d.]+ \| 3 \|", rows[4])


def test_latex(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "0.7", "--format", "latex", "--metrics", "time,cpu-reduction"]
    lines = [line for line in out(capsys, str(results), *words).splitlines() if not line.startswith("%")]
    assert lines[:2] == [r"\begin{tabular}{lrr}", r"\toprule"]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert lines[2] == r"strategy & time to target s & server CPU saved \% \\"
    rows = lines[4:-2]
    assert all(re.fullmatch(r"[^&%_#]+&[^&%_#]+&[^&%_#]+ \\\\", row) for row in rows), rows
    assert rows[2].startswith("local-sgd h=4 & $>$ ")


@pytest.mark.parametrize(
    ("metric", "order"),
    [
        ("time", ["ssp", "bsp", "asp", "dssp"]),
        ("speedup", ["ssp", "bsp", "asp", "dssp"]),
        ("accuracy", ["asp", "bsp", "ssp", "dssp"]),
    ],
)
def test_the_best_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, order: list[str]
) -> None:
    # 70 % after 7, 3.5 and 1.75 s; dssp never gets there.
    for name, seconds, final in (("asp", 10.0, 1.0), ("bsp", 4.0, 0.8), ("ssp", 1.875, 0.75), ("dssp", 5.0, 0.5)):
        make_run(tmp_path / name, name, evals=((0.0, 0.0), (seconds, final)))
    words = ["--target", "0.7", "--format", "csv", "--sort", metric, "--metrics", "time"]
    rows = list(csv.DictReader(io.StringIO(out(capsys, str(tmp_path), *words))))
    assert [row["group"] for row in rows] == order
    assert "speedup" not in rows[0]


def test_learning_rates_that_look_alike_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", "bsp", evals=((0.0, 0.0), (10.0, 1.0)), config={"lr": 0.0316227766})
    make_run(tmp_path / "b", "bsp", evals=((0.0, 0.0), (2.0, 1.0)), config={"lr": 0.0316228})
    text = out(capsys, str(tmp_path), "--target", "0.5", "--metrics", "time", "--format", "csv")
    rows = {row["group"]: row for row in csv.DictReader(io.StringIO(text))}
    assert {label: float(row["time_s"]) for label, row in rows.items()} == {
        "bsp lr=0.0316227766": 5.0,
        "bsp lr=0.0316228": 1.0,
    }


def test_values_that_are_equal_make_one_group(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp", 0, config={"momentum": 0, "new_option": None})
    make_run(tmp_path / "b", "bsp", 1, config={"momentum": 0.0})
    make_run(tmp_path / "c", "asp", 0)
    assert [group.seeds for group in analysis.group_runs(analysis.load_runs([tmp_path]))] == [[0], [0, 1]]


def test_of_a_run_that_failed_at_once_no_ratio_follows(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_run(tmp_path / f"b{seed}", "bsp", seed, evals=((0.0, 0.0), (10.0, 1.0)))
        late = ((0.0, 0.1),) if seed == 2 else ((0.0, 0.0), (5.0, 1.0))
        make_run(tmp_path / f"a{seed}", "asp", seed, evals=late, status="failed" if seed == 2 else "finished")
    rows = analysis.compare(analysis.load_runs([tmp_path]), target=0.5, metrics=["speedup"]).rows
    speedup = next(row.cells["speedup"] for row in rows if row.group.strategy == "asp")
    assert (speedup.value, speedup.bound) == (None, "?")


# --- pivot

CLUSTERS = {"wan": 3.0, "lan": 1.0}
"""Clusters in the order of the suite, and how long a step takes there."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of two clusters: seconds to 50 % are those of `took` times those of the cluster; asp is not on wan."""
    took = {"bsp": 4.0, "asp": 1.0, "ssp": 2.0}
    folder = tmp_path / "suite"
    names = []
    for cluster, factor in CLUSTERS.items():
        for strategy, seconds in took.items():
            if (cluster, strategy) == ("wan", "asp"):
                continue
            names.append(f"{strategy}_{cluster}")
            # Each strategy has its own learning rate on each cluster, as if it were tuned.
            make_run(
                folder / names[-1],
                strategy,
                evals=[(0.0, 0.0), (2 * seconds * factor, 1.0)],
                config={"lr": seconds * factor},
                cluster={"name": cluster, "step_s": factor},
            )
    cells = [{"name": name, "target": 0.5} for name in names]
    (folder / "suite.json").write_text(json.dumps({"suite": "two", "cells": cells}))
    return folder


def test_a_pivot_has_a_table_a_metric_and_a_column_a_value(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = out(capsys, str(suite), "--pivot", "cluster")
    assert [line.split() for line in text.splitlines()[:12]] == [
        ["time", "to", "target", "s"],
        ["strategy", "wan", "lan"],
        ["ssp", "6.00", "2.00"],
        ["bsp", "12.0", "4.00"],
        ["asp", "1.00"],  # it has fewer figures
        [],
        ["speed-up", "x"],
        ["strategy", "wan", "lan"],
        ["ssp", "2.00", "2.00"],
        ["bsp", "1.00", "1.00"],
        ["asp", "4.00"],
        [],
    ]
    assert re.search(r"^asp {13}1\.00$", text, re.MULTILINE), "under the second column"
    assert "target 50 %: set by the suite two" in text
    assert re.search(r"warning: lr differs: .*\b6 \(ssp cluster=wan\)", text)
    assert "cluster profile differs" not in text, "every column has one"
    text = " ".join(out(capsys, str(suite), "--pivot", "cluster", "--baseline", "asp,ssp").split())
    assert "baseline, the fastest of asp,ssp in its setting: asp cluster=lan, ssp cluster=wan" in text
    assert "strategy wan lan ssp 1.00 0.50 bsp 0.50 0.25 asp 1.00" in text


def test_a_pivot_that_is_too_wide_is_split(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "15")
    lines = out(capsys, str(suite), "--pivot", "cluster", "--metrics", "time").splitlines()
    assert [line.split() for line in lines if line.startswith("strategy")] == [["strategy", "wan"], ["strategy", "lan"]]


def test_a_pivot_in_other_formats(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(suite), "--pivot", "cluster", "--metrics", "time", "--format"]
    assert out(capsys, *words, "markdown").splitlines()[:7] == [
        "**time to target s**",
        "",
        "| strategy | wan | lan |",
        "| --- | ---: | ---: |",
        "| ssp | 6.00 | 2.00 |",
        "| bsp | 12.0 | 4.00 |",
        "| asp |  | 1.00 |",
    ]
    assert r"asp &  & 1.00 \\" in out(capsys, *words, "latex").splitlines()
    rows = list(csv.DictReader(io.StringIO(out(capsys, *words, "csv"))))
    assert [(row["line"], row["cluster"], row["baseline"]) for row in rows if row["strategy"] == "ssp"] == [
        ("ssp", "lan", "bsp cluster=lan"),
        ("ssp", "wan", "bsp cluster=wan"),
    ]
    document = json.loads(out(capsys, *words, "json"))
    assert document["pivot"] == "cluster"
    assert {(group["line"], group["column"]) for group in document["groups"]} == {
        *((name, "lan") for name in ("asp", "bsp", "ssp")),
        *((name, "wan") for name in ("bsp", "ssp")),
    }


def test_what_tells_groups_of_a_column_apart_is_in_the_label(tmp_path: Path) -> None:
    for workers in (8, 16, 4):
        for partition in ("iid", "dirichlet:0.1"):
            config = {"workers": workers, "partition": partition, "lr": workers / 10}
            make_run(tmp_path / f"{workers}{partition}", config=config)
    groups = analysis.group_runs(analysis.load_runs([tmp_path]))
    columns = pivot.columns(groups, "workers")
    assert [column.title for column in columns] == ["4", "8", "16"], "numbers ascend"
    assert sorted(set(pivot.labels(columns).values())) == ["bsp partition=dirichlet:0.1", "bsp partition=iid"]
    assert pivot.conditions(groups) == ["workers", "partition", "lr"]


def test_data_sets_that_differ_inside_are_told_apart(tmp_path: Path) -> None:
    for digest in ("ab", "cd"):
        make_run(tmp_path / digest, data={"sha256": digest * 32})
    columns = pivot.columns(analysis.group_runs(analysis.load_runs([tmp_path])), "dataset")
    assert [column.title for column in columns] == ["digits data=abababab", "digits data=cdcdcdcd"]


def test_a_suite_says_how_its_runs_are_compared(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = suite / "suite.json"
    page.write_text(json.dumps(json.loads(page.read_text()) | {"compare": {"baseline": "ssp", "pivot": "cluster"}}))
    asked = ("--baseline", "ssp", "--pivot", "cluster")
    assert out(capsys, str(suite)) == out(capsys, str(suite), *asked)
    other = out(capsys, str(suite), "--baseline", "bsp", "--pivot", "none")
    assert other.count("baseline: bsp") == 1
    assert "ssp lr=6 cluster=wan" in other
    # A file that was changed by hand is no reason to fail: the runs say all that is needed.
    odd: list[Any] = [[], 1, {"baseline": 1, "pivot": ["cluster"]}]
    for broken in odd:
        page.write_text(json.dumps(json.loads(page.read_text()) | {"compare": broken}))
        assert out(capsys, str(suite)).count("baseline: bsp") == 1
    page.write_text(json.dumps(json.loads(page.read_text()) | {"compare": {"baseline": "ssp", "pivot": "cluster"}}))
    # What does not apply to the runs that are chosen is not an error: nobody has asked for it.
    one = out(capsys, str(suite / "bsp_lan"), str(suite / "asp_lan"))
    assert "strategy" in one
    assert "baseline: bsp" in one


def test_a_pivot_over_data_sets_compares_within_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, digest, strategies in (("digits", "ab", "bsp asp"), ("mnist5k", "ef", "bsp asp ssp")):
        cells = []
        for i, strategy in enumerate(strategies.split(), 1):
            run = make_run(
                tmp_path / name / strategy,
                strategy,
                evals=[(0.0, 0.0), (8.0 / i, 1.0)],
                data={"sha256": digest * 32},
                config={"dataset": name},
            )
            cells.append({"name": run.name, "target": 0.5 if name == "digits" else 0.75})
        (tmp_path / name / "suite.json").write_text(json.dumps({"suite": name, "cells": cells}))
    assert refused(capsys, str(tmp_path)).startswith("the runs cannot be compared: data set differs: ")
    text = " ".join(out(capsys, str(tmp_path), "--pivot", "dataset").split())
    # 8 and 4 s to the whole; a half of it for digits, three quarters for mnist5k, where ssp takes 8 / 3 s.
    assert "strategy digits mnist5k asp 2.00 3.00 bsp 4.00 6.00 ssp 2.00" in text
    assert "target of digits: 50 %, set by the suite digits" in text
    assert "target of mnist5k: 75 %, set by the suite mnist5k" in text
    text = " ".join(out(capsys, str(tmp_path), "--pivot", "dataset", "--baseline", "ssp").split())
    assert "speed-up x strategy digits mnist5k asp - 0.67 bsp - 0.33 ssp 1.00" in text, "of its own data set only"
    # Data of another kind within a column are refused as ever.
    make_run(tmp_path / "more", "lag", config={"dataset": "digits"}, data={"sha256": "ab" * 32}, clock="virtual")
    assert "clock differs" in refused(capsys, str(tmp_path), "--pivot", "dataset")


# --- notes


def test_few_seeds_have_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "bsp", seed)
    make_run(tmp_path / "b", "asp")
    text = out(capsys, str(tmp_path))
    assert "n=1, no interval: asp" in text
    assert "n=2, no interval: bsp" in text
    assert "asp: ratios to bsp over the seeds that both have: 0" in text


def test_unfinished_runs_and_repeats_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", "bsp", status="running", evals=[(0, 0), (4, 0.5)])
    make_run(tmp_path / "b", "asp", started_at="2026-01-01T00:00:00.000+00:00")
    make_run(tmp_path / "c", "asp", started_at="2026-01-01T00:00:01.000+00:00")
    text = " ".join(out(capsys, str(tmp_path)).split())
    assert "bsp * " in text
    assert "* not finished, used up to its last row: a (running)" in text
    assert "asp: of several runs of a seed the newest is used, so not b" in text


def test_without_bsp_there_is_no_ratio_but_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", "asp")
    make_run(tmp_path / "b", "ssp", 1)
    text = " ".join(out(capsys, str(tmp_path)).split())
    assert "no group of the strategy bsp, so no speed-up and no reduction; choose another with --baseline" in text
    text = " ".join(out(capsys, str(tmp_path), "--baseline", "asp").split())
    assert "ssp: no seed in common with asp, so no speed-up and no reduction" in text


def test_differences_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", "bsp")
    make_run(tmp_path / "b", "asp", config={"lr": 0.5})
    assert "warning: lr differs: 0.1 (bsp), 0.5 (asp)" in out(capsys, str(tmp_path)).replace(
        "0.5 (asp), 0.1 (bsp)", "0.1 (bsp), 0.5 (asp)"
    )


# --- errors


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys) == "there is no folder results here; name the runs to compare, or make some with: sapus run"
    (tmp_path / "results").mkdir()
    assert refused(capsys).startswith("results: there is no run in it")
    assert refused(capsys, "nowhere").startswith("nowhere: there is no such folder")


def test_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "bsp", seed)
    line = refused(capsys, str(tmp_path))
    assert line == (
        "there is one group only, bsp (2 seeds), so nothing to compare; "
        f"look at one run with: sapus show {tmp_path / 'a1'}"
    )


def test_a_newer_schema(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "asp1" / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    assert refused(capsys, str(results)).startswith(f"{path}: has schema version 9")


def test_a_damaged_trace(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "asp1" / "evals.csv"
    path.write_text(path.read_text().replace("\n5.0,", "\nfive,"))
    assert refused(capsys, str(results)) == f"{path}: row 6 (line 7) holds 'five' in column 't_s', which is no Float64"


def test_a_target_that_nobody_reached(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, str(results), "--target", "0.99")
    assert line == "--target 0.99: no run reached 99.00%; best: asp 98.00%, bsp 98.00%, local-sgd h=4 98.00%"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--target", "95"], "--target 95: must lie above 0 and at most at 1, or 100%; did you mean 95%?"),
        (["--target", "0"], "--target 0: must lie above 0 and at most at 1, or 100%"),
        (["--target", "nan"], "--target nan: must lie above 0 and at most at 1, or 100%"),
        (["--target", "most"], "--target most: must be an accuracy, as in 0.95 or 95%"),
        (["--baseline", "ssp"], "--baseline ssp: there is no such group; there are: asp, bsp, local-sgd h=4"),
        (["--metrics", "time,cpuu"], "unknown metric in --metrics 'cpuu'; did you mean cpu or cpu-time?"),
        (["--sort", "tme"], "unknown metric in --sort 'tme'; did you mean time"),
        (["--format", "xml"], "Invalid value for '--format'"),
        (["--pivot", "cluster"], "--pivot cluster: is none for all of the runs; they differ in nothing but strategy"),
        (["--pivot", "clutser"], "unknown condition in --pivot 'clutser'"),
    ],
)
def test_wrong_options(results: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert refused(capsys, str(results), *words).startswith(line)


@pytest.mark.parametrize("change", ["clock", "data", "model"])
def test_what_cannot_be_compared_is_refused_but_for_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    all_changes: dict[str, dict[str, Any]] = {
        "clock": {"clock": "virtual"},
        "data": {"data": {"sha256": "ef" * 32}, "config": {"dataset": "mnist5k"}},
        "model": {"model": {"fingerprint": "ef" * 32}, "config": {"model": "cnn"}},
    }
    make_run(tmp_path / "a", "bsp")
    make_run(tmp_path / "b", "asp", **all_changes[change])
    line = refused(capsys, str(tmp_path))
    assert line.startswith("the runs cannot be compared: ")
    assert line.endswith("; choose runs that agree, or give --force")
    assert "warning: " in out(capsys, str(tmp_path), "--force")


# --- from end to end


def test_it_imports_no_torch(results: Path) -> None:
    code = (
        "import sys; from sapus_cli.cli import run_line; code = run_line(['compare', *sys.argv[1:]]);"
        "print(*(m for m in ('torch', 'sklearn', 'matplotlib', 'zmq') if m in sys.modules), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(results)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.slow
def test_simulated_runs_are_compared(inside: Inside) -> None:
    common = ["--model", "mlp", "--steps", "40", "--workers", "4", "--step-time", "50ms", "--link", "10mbit,1ms", "-q"]
    for strategy in (["bsp"], ["local-sgd", "--param", "h=4"]):
        for seed in ("0", "1"):
            done = inside("simulate", "-s", *strategy, "--seed", seed, *common)
            assert done.returncode == 0, done.stderr
    done = inside("compare", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    bsp, local = sorted(document["groups"], key=lambda group: str(group["label"]))
    assert (bsp["label"], local["label"]) == ("bsp", "local-sgd h=4")
    assert document["warnings"] == []
    assert local["metrics"]["mean_interval_steps"]["value"] == pytest.approx(4)
    assert bsp["metrics"]["mean_interval_steps"]["value"] == pytest.approx(1)
    # On a slow link a quarter of the pushes is faster, and loads server and link less.
    assert local["metrics"]["speedup"]["value"] > 1
    assert local["metrics"]["server_cpu_reduction_percent"]["value"] > 0
    shown = inside("compare", "results/*local*", "results/*bsp*")
    assert shown.returncode == 0, shown.stderr
    assert "n=2, no interval: " in shown.stdout
