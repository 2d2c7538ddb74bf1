"""`sapus export`: every format is read back with its own library, and holds the numbers of a hand-made run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from processes import sapus
from runs import make_run

from sapus_cli import analysis, export, traces
from sapus_cli.cli import run_line

if TYPE_CHECKING:
    from pathlib import Path

    from inside import Inside

START_S = 1767225600.0
"""2026-01-01 in UTC, when a hand-made run begins."""

PUSHES: list[dict[str, object]] = [
    {"t_s": 1.0, "worker": 0, "seq": 1, "n_steps": 4, "step_s": 0.1, "exchange_s": 0.2, "held_s": 0.3, "staleness": 0},
    {"t_s": 1.25, "worker": 1, "seq": 1, "n_steps": 2, "step_s": 0.25, "staleness": 1, "reason": "bound"},
    {"t_s": 2.0, "worker": 0, "seq": 2, "n_steps": 4, "step_s": 0.1, "exchange_s": 0.4, "held_s": 0.0, "loss": 0.5},
]
EVALS = [(0.0, 0.125), (2.0, 0.5)]
SERVER = [(0.5, 1.0, 10, 20), (1.5, 1.5, 1000, 2000)]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where a package is missing; it is not imported here, where warnings are errors that are not ours."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}")


def hand_made(folder: Path, **changes: Any) -> Path:
    """A run of 10 steps and 305 samples: 30.5 a step."""
    more: dict[str, Any] = {
        "hyper_parameters": {"h": 4},
        "totals": {"steps": 10, "samples": 305},
        "summary": {"accuracy": 0.5, "pushes": 3, "reached_s": None},
        "evals": EVALS,
        "server": SERVER,
    }
    make_run(folder, "local-sgd", **more | changes)
    (folder / "pushes.csv").unlink()
    with traces.Trace(folder / "pushes.csv", traces.push_columns(["statistic"])) as trace:
        for i, push in enumerate(PUSHES):
            trace.row(push | {"statistic": i / 2})
    with traces.Trace(folder / "events.csv", traces.EVENTS) as trace:
        trace.row((0.0, "join", "worker", 1, ""))
        trace.row((1.75, "fault", "worker", 1, "killed, by the profile"))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder."""
    return hand_made(tmp_path / "results" / "one")


def written(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a right call prints."""
    assert run_line(["export", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a refusal."""
    assert run_line(["export", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("sapus: ").strip()


def read_back(code: str, place: Path) -> Any:
    """What a program prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the figures


def test_the_figures_stand_at_their_samples_and_seconds(run: Path) -> None:
    (loaded,) = analysis.load_runs([run])
    found = export.points(loaded)

    def series(name: str) -> list[tuple[float, int, float]]:
        return [(point.t_s, point.samples, point.values[name]) for point in found if name in point.values]

    assert [point.t_s for point in found] == sorted(point.t_s for point in found)
    assert series("eval/accuracy") == [(0.0, 0, 0.125), (2.0, 200, 0.5)]
    assert series("eval/loss") == [(0.0, 0, 0.875), (2.0, 200, 0.5)]
    # 4, 6 and 10 steps of 30.5 samples
    assert series("interval/worker 0") == [(1.0, 122, 4.0), (2.0, 305, 4.0)]
    assert series("interval/worker 1") == [(1.25, 183, 2.0)]
    assert series("push/statistic") == [(1.0, 122, 0.0), (1.25, 183, 0.5), (2.0, 305, 1.0)]
    assert series("push/staleness") == [(1.0, 122, 0.0), (1.25, 183, 1.0)]
    # before any push, and after the second
    assert series("server/rx_bytes") == [(0.5, 0, 10.0), (1.5, 183, 1000.0)]
    assert series("worker 0/rx_bytes") == []


def test_without_totals_a_step_is_a_minibatch(tmp_path: Path) -> None:
    (loaded,) = analysis.load_runs([hand_made(tmp_path / "cut", status="running", totals={"steps": 0})])
    last = export.points(loaded)[-1]
    assert (last.t_s, last.samples) in {(2.0, 320), (2.0, 200)}
    assert {p.samples for p in export.points(loaded) if "push/step_s" in p.values} == {4 * 32, 6 * 32, 10 * 32}


# --- tensorboard


@needs("tensorboard")
def test_tensorboard(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = written(capsys, run, "--to", "tensorboard", "-o", tmp_path / "tb")
    assert out == f"Wrote {tmp_path}/tb/one\nNext: tensorboard --logdir {tmp_path}/tb\n"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # noqa: PLC0415

    log = EventAccumulator(str(tmp_path / "tb" / "one"))
    log.Reload()

    def scalars(tag: str) -> list[tuple[float, int, float]]:
        return [(event.wall_time - START_S, event.step, event.value) for event in log.Scalars(tag)]

    assert scalars("eval/accuracy") == [(0.0, 0, 0.125), (2.0, 200, 0.5)]
    assert scalars("interval/worker 0") == [(1.0, 122, 4.0), (2.0, 305, 4.0)]
    assert scalars("server/tx_bytes") == [(0.5, 0, 20.0), (1.5, 183, 2000.0)]
    content = log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    asked = HParamsPluginData.FromString(content).session_start_info
    assert asked.hparams["strategy"].string_value == "local-sgd"
    assert asked.hparams["param.h"].number_value == 4
    assert asked.start_time_secs == START_S


# --- mlflow

READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///" + sys.argv[1] + "/mlflow.db")
found = {}
for run in client.search_runs([client.get_experiment_by_name("sapus").experiment_id]):
    history = {
        name: [(m.timestamp, m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in ("eval/accuracy", "interval/worker 0", "summary/pushes")
    }
    ends = [run.info.start_time, run.info.end_time]
    found[run.info.run_name] = [run.info.status, ends, run.data.params, history]
print(json.dumps(found))
"""


@pytest.mark.slow
@needs("mlflow")
def test_mlflow(run: Path, tmp_path: Path) -> None:
    other = hand_made(tmp_path / "results" / "it's two", status="failed")
    done = sapus("export", str(run), "--to", "mlflow", "-o", "tracking", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("Wrote one to tracking\nNext: mlflow ui --backend-store-uri sqlite:///tracking/mlflow.db\n")
    again = sapus("export", str(run), str(other), "--to", "mlflow", "-o", "tracking", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == (
        "sapus: tracking/mlflow.db has the run one already; delete it there, or choose another --output\n"
    )
    added = sapus("export", str(other), "--to", "mlflow", "-o", "tracking", cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    found = read_back(READ_MLFLOW, tmp_path / "tracking")
    assert sorted(found) == ["it's two", "one"]
    status, ends, params, history = found["one"]
    start_ms = 1000 * int(START_S)
    assert (status, found["it's two"][0]) == ("FINISHED", "FAILED")
    assert ends == [start_ms, start_ms + 2000]
    assert (params["strategy"], params["param.h"], params["lr"], params["seed"]) == ("local-sgd", "4", "0.1", "0")
    assert history == {
        "eval/accuracy": [[start_ms, 0, 0.125], [start_ms + 2000, 200, 0.5]],
        "interval/worker 0": [[start_ms + 1000, 122, 4.0], [start_ms + 2000, 305, 4.0]],
        "summary/pushes": [[start_ms + 2000, 305, 3.0]],
    }


# --- wandb

READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

(log,) = Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")
data = log.read_bytes()
assert data[:4] == b":W&B"
records, part, place = [], b"", 7
while place + 7 <= len(data):
    left = 32768 - place % 32768  # the log of LevelDB: blocks, in which records may be cut
    if left < 7:
        place += left
        continue
    length, kind = struct.unpack_from("<HB", data, place + 4)
    part += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):
        records.append(Record.FromString(part))
        part = b""
rows, run, exits = [], None, []
for record in records:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = record.history.item
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    elif kind == "run":
        run = record.run
    elif kind == "exit":
        exits.append(record.exit.exit_code)
config = {item.key: json.loads(item.value_json) for item in run.config.update}
print(json.dumps({"id": run.run_id, "name": run.display_name, "config": config, "rows": rows, "exits": exits}))
"""


@pytest.mark.slow
@needs("wandb")
def test_wandb(run: Path, tmp_path: Path) -> None:
    done = sapus("export", str(run), "--to", "wandb-offline", "-o", "offline", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Wrote one to offline\nNext: wandb sync offline/wandb/offline-run-*\n"
    again = sapus("export", str(run), "--to", "wandb-offline", "-o", "offline", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.endswith("-one exists already; remove it, or choose another place with --output\n")
    found = read_back(READ_WANDB, tmp_path / "offline")
    assert (found["id"], found["name"], found["exits"]) == ("one", "one", [0])
    assert found["config"]["param.h"] == 4
    assert found["config"]["strategy"] == "local-sgd"
    rows = found["rows"]

    def series(name: str) -> list[tuple[float, int, float]]:
        return [(row["_timestamp"] - START_S, row["samples"], row[name]) for row in rows if name in row]

    assert series("eval/accuracy") == [(0.0, 0, 0.125), (2.0, 200, 0.5)]
    assert series("interval/worker 0") == [(1.0, 122, 4), (2.0, 305, 4)]
    assert not list(tmp_path.glob("wandb")), "nothing beside the folder that was asked for"


# --- parquet


def test_parquet(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "pq"
    out = written(capsys, run, "--to", "parquet", "-o", place)
    assert out.splitlines()[0] == f"Wrote {place}/one"
    for name in traces.TRACES:
        assert pl.read_parquet(place / "one" / f"{name}.parquet").equals(traces.read_trace(run, name))
    assert (place / "one" / "run.json").read_bytes() == (run / "run.json").read_bytes()
    assert sorted(path.name for path in place.iterdir()) == ["one"], "no part is left"


def test_a_default_place_and_several_runs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_made(tmp_path / "results" / "two", seed=1)
    monkeypatch.chdir(tmp_path)
    out = written(capsys, "results", "--to", "parquet")
    assert out.splitlines()[:2] == ["Wrote exports/parquet/one", "Wrote exports/parquet/two"]


# --- chrome


def chrome(run: Path, capsys: pytest.CaptureFixture[str], file: Path) -> list[dict[str, Any]]:
    out = written(capsys, run, "--to", "chrome", "-o", file)
    assert out == f"Wrote {run.name} to {file}\nNext: open it at https://ui.perfetto.dev\n"
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["strategy"] == "local-sgd"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_chrome_shows_what_each_worker_did(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = chrome(run, capsys, tmp_path / "trace.json")
    names = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert {pid: names[pid, 0, "process_name"] for pid in (1, 2, 3)} == {1: "server", 2: "worker 0", 3: "worker 1"}
    assert [names[2, tid, "thread_name"] for tid in (1, 2, 3)] == ["compute", "exchange", "wait"]

    def slices(pid: int, name: str) -> list[tuple[float, float]]:
        return [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["name"]) == (pid, name)]

    # The exchange of the first push took 0.4 s: half before 1 s, half after the reply was held for 0.3 s.
    assert slices(2, "compute") == [(4e5, 4e5), (1.4e6, 4e5)]
    assert slices(2, "exchange") == [(8e5, 2e5), (1.3e6, 2e5), (1.8e6, 2e5), (2e6, 2e5)]
    assert slices(2, "wait") == [(1e6, 3e5)]
    assert slices(3, "compute") == [(7.5e5, 5e5)]
    assert slices(3, "exchange") == slices(3, "wait") == []
    about = [e["args"] for e in events if e["ph"] == "X" and e["name"] == "compute"]
    assert about == [
        {"push": 1, "steps": 4, "staleness": 0.0},
        {"push": 1, "steps": 2, "staleness": 1.0},
        {"push": 2, "steps": 4, "loss": 0.5},
    ]

    def counted(pid: int, name: str) -> list[tuple[float, Any]]:
        return [
            (e["ts"], *e["args"].values()) for e in events if e["ph"] == "C" and (e["pid"], e["name"]) == (pid, name)
        ]

    assert counted(1, "accuracy") == [(0.0, 0.125), (2e6, 0.5)]
    assert counted(2, "interval") == [(1e6, 4.0), (2e6, 4.0)]
    assert counted(1, "CPU") == [(5e5, 0.0), (1.5e6, 0.0)]
    (fault,) = [e for e in events if e["ph"] == "i" and e["name"] == "fault"]
    assert (fault["pid"], fault["ts"], fault["args"]) == (3, 1.75e6, {"detail": "killed, by the profile"})


def check_schema(events: list[dict[str, Any]]) -> None:
    """The rules of the trace event format, and that slices of a track do not overlap."""
    keys = {
        "M": {"ph", "name", "pid", "tid", "args"},
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
        "C": {"ph", "name", "pid", "tid", "ts", "args"},
        "i": {"ph", "name", "pid", "tid", "ts", "s", "args"},
    }
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event.keys() - {"args"} == keys[event["ph"]] - {"args"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in named
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name"}
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] > 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end - 0.01, "microseconds are rounded to a thousandth"


def test_chrome_keeps_to_the_format(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_schema(chrome(run, capsys, tmp_path / "hand.json"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sapus", "ssp"])
def test_chrome_of_simulated_runs(tmp_path: Path, strategy: str, inside: Inside) -> None:
    options = ("--cluster", "8xgpu-1g", "--slow", "2:3x", "--model", "mlp", "--steps", "60", "-w", "3", "--name", "it")
    made = inside("simulate", "-s", strategy, *options, "-q")
    assert made.returncode == 0, made.stderr
    (loaded,) = analysis.load_runs([tmp_path / "results"])
    events = export.trace_events(loaded)
    check_schema(events)
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    computed = {
        rank: sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "compute" and e["pid"] == pids[rank])
        for rank in ("worker 0", "worker 2")
    }
    assert computed["worker 2"] > 2 * computed["worker 0"], "three times as slow, for as many steps"


def test_chrome_leaves_out_what_json_cannot_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hand_made(tmp_path / "diverged", evals=[(0.0, 0.125), (1.0, float("nan"))])
    written(capsys, run, "--to", "chrome", "-o", tmp_path / "out")
    events = json.loads((tmp_path / "out" / "diverged.json").read_text())["traceEvents"]
    assert [e["ts"] for e in events if e["name"] == "accuracy"] == [0.0]


# --- refusals


@pytest.mark.parametrize("to", ["parquet", "chrome", pytest.param("tensorboard", marks=needs("tensorboard"))])
def test_what_is_there_already_is_not_touched(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    place = tmp_path / "out"
    written(capsys, run, "--to", to, "-o", place)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    hand_made(tmp_path / "results" / "a-new-one")
    error = refused(capsys, tmp_path / "results", "--to", to, "-o", place)
    there = place / ("one.json" if to == "chrome" else "one")
    assert error == f"{there} exists already; remove it, or choose another place with --output"
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


@pytest.mark.parametrize(
    ("to", "package", "extra"),
    [
        ("tensorboard", "tensorboard", "tensorboard"),
        ("mlflow", "mlflow", "mlflow"),
        ("wandb-offline", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    package: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = refused(capsys, run, "--to", to, "-o", tmp_path / "out")
    assert error == (f"--to {to}: needs the package {package}, which is not installed; pip install 'sapus[{extra}]'")
    assert not (tmp_path / "out").exists()


def test_wrong_calls(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, run, "--to", "parket") == (
        "unknown format in --to 'parket'; did you mean parquet? Valid: chrome, mlflow, parquet, tensorboard, "
        "wandb-offline."
    )
    assert refused(capsys, run, "--to", "parquet", "-o", "x.json") == (
        "--output x.json: only chrome writes a file; choose a folder"
    )
    assert "--to" in refused(capsys, run)
    file = tmp_path / "file"
    file.touch()
    for to in ("parquet", "chrome"):
        assert refused(capsys, run, "--to", to, "-o", file) == f"--output {file}: is a file; choose a folder"
    two = hand_made(tmp_path / "results" / "two")
    error = refused(capsys, run, two, "--to", "chrome", "-o", tmp_path / "both.json")
    assert error == f"--to chrome: {run} and {two} would both go to {tmp_path}/both.json; export them apart"
    same = hand_made(tmp_path / "elsewhere" / "one")
    error = refused(capsys, run, same, "--to", "parquet", "-o", tmp_path / "out")
    assert error == f"--to parquet: {run} and {same} would both go to {tmp_path}/out/one; export them apart"
    assert not (tmp_path / "out").exists()


def test_a_damaged_trace_leaves_nothing_behind(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "pushes.csv").read_text().splitlines(keepends=True)
    (run / "pushes.csv").write_text(lines[0] + "damage\n" + lines[1])
    assert "pushes.csv: row 1" in refused(capsys, run, "--to", "parquet", "-o", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_an_export_imports_no_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from sapus_cli.cli import run_line\n"
        "assert run_line(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'matplotlib', 'zmq'} & set(sys.modules)\n"
    )
    line = ["export", str(run), "--to", "chrome", "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
