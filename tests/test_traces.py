"""The run folder: what is written comes back exactly, also after a kill, and damage is told from a torn row."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapus_cli.errors import DamagedFileError, RunFailedError, UserError
from sapus_cli.traces import (
    EVALS,
    EVENTS,
    FLUSH_EVERY_S,
    PUSHES,
    SCHEMA_VERSION,
    STATUSES,
    TRACES,
    Trace,
    check_results,
    create_run_folder,
    environment,
    push_columns,
    read_run,
    read_trace,
    write_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sapus_cli.traces import TraceName

PUSH = (1.25, 3, 7, 16, 0.5, 41, 2, 0.125, 4096, 4100, 0.01, 0.002, 0.0, "bound", 4.0, 64.0)
EVENT = (0.5, "crash", "worker", 2, 'killed, "signal 9"')


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code`."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def write(folder: Path, name: TraceName, rows: Sequence[Sequence[object]]) -> Path:
    path = folder / f"{name}.csv"
    with Trace(path, TRACES[name]) as trace:
        for row in rows:
            trace.row(row)
    return path


def test_neither_torch_nor_polars_is_imported_with_the_module() -> None:
    finish(python("import sapus_cli.traces, sys; assert not {'torch', 'polars'} & set(sys.modules)"))


# Writing and reading


def test_a_row_comes_back_with_the_types_of_the_schema(tmp_path: Path) -> None:
    write(tmp_path, "pushes", [PUSH])
    frame = read_trace(tmp_path, "pushes")
    assert frame.rows() == [PUSH]
    assert [(name, str(dtype)) for name, dtype in frame.schema.items()] == [(c.name, c.dtype) for c in PUSHES]


def test_cells_by_name_and_cells_left_out(tmp_path: Path) -> None:
    with Trace(tmp_path / "events.csv", EVENTS) as trace:
        trace.row({"kind": "signal", "t_s": 2.0})
        trace.row((3.0, "fault", None, None, ""))
    assert read_trace(tmp_path, "events").rows() == [
        (2.0, "signal", None, None, None),
        (3.0, "fault", None, None, ""),
    ]


int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(
        st.tuples(
            st.floats() | st.none(), text | st.none(), text | st.none(), int64 | st.none(), text | st.sampled_from('",')
        ),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_every_value_round_trips(rows: list[tuple[float | None, str | None, str | None, int | None, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), "events", rows)
        back = read_trace(Path(name), "events").rows()
    expected = [tuple(re.sub(r"[\r\n]+", " ", v) if isinstance(v, str) else v for v in row) for row in rows]
    # repr tells 0.0 from -0.0, and takes nan for equal to nan.
    assert repr(back) == repr(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2])
def test_special_floats_round_trip(tmp_path: Path, value: float) -> None:
    write(tmp_path, "evals", [(value, 1, 2, value, value, value, None)])
    assert repr(read_trace(tmp_path, "evals")["loss"][0]) == repr(value)


def test_numpy_scalars_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    write(tmp_path, "evals", [(np.float64(0.1), np.int64(3), 4, np.float32(0.5), 2, 1, 0)])
    assert (tmp_path / "evals.csv").read_text().splitlines()[1] == "0.1,3,4,0.5,2.0,1.0,0.0"


def test_the_bytes_depend_on_the_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = write(tmp_path / "a", "pushes", [PUSH, PUSH])
    with Trace(tmp_path / "b" / "pushes.csv", PUSHES) as trace:
        for _ in range(2):
            trace.row(dict(zip((c.name for c in PUSHES), PUSH, strict=True)))
            trace.flush()
    assert one.read_bytes() == (tmp_path / "b" / "pushes.csv").read_bytes()


@pytest.mark.parametrize(
    "row",
    [
        (True, 1, 2, 0.5, 0.5, 0.5, 0.5),
        (0.5, True, 2, 0.5, 0.5, 0.5, 0.5),
        (0.5, 1.0, 2, 0.5, 0.5, 0.5, 0.5),
        ("0.5", 1, 2, 0.5, 0.5, 0.5, 0.5),
    ],
)
def test_a_cell_of_another_type_is_refused_before_it_is_written(tmp_path: Path, row: tuple[object, ...]) -> None:
    with Trace(tmp_path / "evals.csv", EVALS) as trace, pytest.raises(TypeError, match=r"evals\.csv: .* is not a"):
        trace.row(row)
    assert read_trace(tmp_path, "evals").is_empty()


def test_a_number_is_no_text(tmp_path: Path) -> None:
    with Trace(tmp_path / "events.csv", EVENTS) as trace, pytest.raises(TypeError, match="5 is not a text"):
        trace.row({"kind": 5})


def test_rows_that_do_not_fit_the_columns_are_refused(tmp_path: Path) -> None:
    with Trace(tmp_path / "evals.csv", EVALS) as trace:
        with pytest.raises(ValueError, match="has 7 columns, not 2"):
            trace.row((1.0, 2))
        with pytest.raises(ValueError, match=r"no column \['los'\]"):
            trace.row({"t_s": 1.0, "los": 2.0})


def test_own_columns_hold_numbers_or_texts(tmp_path: Path) -> None:
    columns = push_columns(("drift", "phase", "unused"))
    with Trace(tmp_path / "pushes.csv", columns) as trace:
        trace.row((*PUSH, 1, "warm, up", None))
        trace.row((*PUSH, math.nan, 3.5, None))
    frame = read_trace(tmp_path, "pushes")
    assert frame["drift"].dtype == pl.Float64
    assert frame["drift"][0] == 1.0
    assert frame["phase"].to_list() == ["warm, up", "3.5"]
    assert frame.schema["unused"] == pl.Float64


@pytest.mark.parametrize("own", [("loss",), ("a", "a"), ("a,b",), ("",)])
def test_own_columns_with_unusable_names_are_refused(own: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="must be an identifier"):
        push_columns(own)


def test_tick_flushes_after_half_a_second_if_rows_wait(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "evals.csv", EVALS)
    row = (0.5, 1, 2, 0.5, 0.5, 0.5, 0.5)

    def on_disk() -> int:
        return read_trace(tmp_path, "evals").height

    trace.row(row)
    trace.tick(100.0)
    assert on_disk() == 1
    trace.row(row)
    trace.tick(100.0 + 0.9 * FLUSH_EVERY_S)
    assert on_disk() == 1
    trace.tick(100.0 + FLUSH_EVERY_S)
    assert on_disk() == 2
    trace.tick(200.0)
    trace.row(row)
    trace.tick(100.0 + 2 * FLUSH_EVERY_S)
    assert on_disk() == 3
    trace.row(row)
    trace.close()
    trace.close()
    assert on_disk() == 4


def test_a_file_that_cannot_be_opened_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"cannot write .*evals\.csv: No such file"):
        Trace(tmp_path / "gone" / "evals.csv", EVALS)


# Kills, torn rows and damage


def test_a_killed_writer_leaves_a_prefix_of_its_rows(tmp_path: Path) -> None:
    writer = python(
        """
        import itertools, pathlib, sys
        from sapus_cli.traces import EVENTS, Trace
        trace = Trace(pathlib.Path(sys.argv[1]), EVENTS)
        for n in itertools.count():
            trace.row((n / 7, "fault", "worker", n, "a, detail " * (n % 50)))
            trace.tick(n / 100)
            if n == 5000:
                print("far enough", flush=True)
        """,
        tmp_path / "events.csv",
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "far enough\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    rows = read_trace(tmp_path, "events").rows()
    assert len(rows) > 4900
    assert rows == [(n / 7, "fault", "worker", n, "a, detail " * (n % 50)) for n in range(len(rows))]


@given(st.lists(st.tuples(st.floats(), st.just("leave"), text, int64, text), max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_gives_its_complete_rows(
    rows: list[tuple[float, str, str, int, str]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), "events", rows)
        uncut = path.read_bytes()
        whole = read_trace(Path(name), "events")
        cut = data.draw(st.integers(0, len(uncut)))
        path.write_bytes(uncut[:cut])
        frame = read_trace(Path(name), "events")
    complete = max(0, uncut[:cut].count(b"\n") - 1)
    assert frame.schema == whole.schema
    assert repr(frame.rows()) == repr(whole.rows()[:complete])


def test_a_torn_file_is_continued_where_its_last_whole_row_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "events", [EVENT, EVENT])
    path.write_bytes(path.read_bytes()[:-4])
    write(tmp_path, "events", [EVENT, EVENT])
    assert read_trace(tmp_path, "events").rows() == [EVENT] * 3
    path.write_bytes(b"t_s,ki")
    write(tmp_path, "events", [EVENT])
    assert read_trace(tmp_path, "events").rows() == [EVENT]


def test_a_file_with_another_header_is_not_continued(tmp_path: Path) -> None:
    path = write(tmp_path, "events", [EVENT])
    before = path.read_bytes()
    with pytest.raises(DamagedFileError, match=r"events\.csv: cannot be continued"):
        Trace(path, EVALS)
    assert path.read_bytes() == before


def test_a_file_that_cannot_grow_keeps_rows_waiting_and_tears_no_row_inside(tmp_path: Path) -> None:
    finish(
        python(
            """
            import pathlib, resource, sys
            from sapus_cli.traces import EVENTS, RETRY_EVERY_S, Trace
            told = []
            trace = Trace(pathlib.Path(sys.argv[1]), EVENTS, lambda *words: told.append(words))
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            for n in range(100):
                trace.row((0.5, "fault", "server", n, "detail"))
            trace.tick(100.0)
            trace.flush()
            assert told == [("incomplete", "cannot write events.csv: File too large; its rows wait in memory")], told
            assert trace.incomplete
            assert pathlib.Path(sys.argv[1]).stat().st_size == 1000
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            trace.tick(100.0 + 0.9 * RETRY_EVERY_S)
            assert pathlib.Path(sys.argv[1]).stat().st_size == 1000
            trace.tick(100.0 + RETRY_EVERY_S)
            assert pathlib.Path(sys.argv[1]).stat().st_size > 2000
            assert told[1:] == [("complete", "events.csv is written again, no row is lost")], told
            assert not trace.incomplete
            trace.close()
            trace.flush()
            """,
            tmp_path / "events.csv",
        )
    )
    assert read_trace(tmp_path, "events")["rank"].to_list() == list(range(100))


BROKEN = {
    "too few cells": b"0.5,crash,worker",
    "too many cells": b"0.5,crash,worker,2,killed,again",
    "no number": b"0.5.5,crash,worker,2,killed",
    "no whole number": b"0.5,crash,worker,2.5,killed",
    "an open quote": b'0.5,crash,worker,2,"killed',
    "nothing": b"",
    "zeros": bytes(20),
}


@pytest.mark.parametrize("row", BROKEN.values(), ids=BROKEN)
def test_a_broken_row_is_dropped_at_the_end_and_damage_elsewhere(tmp_path: Path, row: bytes) -> None:
    path = write(tmp_path, "events", [EVENT])
    good = path.read_bytes()
    path.write_bytes(good + row + b"\n")
    assert read_trace(tmp_path, "events").rows() == [EVENT]
    for behind in (good.splitlines(keepends=True)[1], b"1.5,lea", row + b"\n"):
        path.write_bytes(good + row + b"\n" + behind)
        with pytest.raises(DamagedFileError, match=r"events\.csv: row 2 \(line 3\)"):
            read_trace(tmp_path, "events")


def test_the_error_says_which_cell_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, "evals", [(0.5, 1, 2, 0.5, 0.5, 0.5, 0.5)] * 3)
    path.write_text(path.read_text().replace("0.5,1,2,", "0.5,x1,2,", 1))
    with pytest.raises(DamagedFileError, match=r"row 1 \(line 2\) holds 'x1' in column 'version', which is no Int64"):
        read_trace(tmp_path, "evals")


def test_a_column_that_came_later_is_empty_in_older_files(tmp_path: Path) -> None:
    path = tmp_path / "evals.csv"
    path.write_text("t_s,version,samples,epoch,loss,accuracy\n0.5,1,2,0.25,1.5,0.75\n1.0,2,")
    frame = read_trace(tmp_path, "evals")
    assert frame.columns == [column.name for column in EVALS]
    assert frame.rows() == [(0.5, 1, 2, 0.25, 1.5, 0.75, None)]
    assert str(frame["worst_class"].dtype) == "Float64"
    path.write_text("t_s,version,samples,epoch,loss\n")
    with pytest.raises(DamagedFileError, match="row 0"):
        read_trace(tmp_path, "evals")


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    path = write(tmp_path, "events", [EVENT] * 3)
    path.write_bytes(path.read_bytes().replace(b"crash", b"cr\xffsh", 2).replace(b"cr\xffsh", b"crash", 1))
    with pytest.raises(DamagedFileError, match=r"row 2 \(line 3\) is not UTF-8"):
        read_trace(tmp_path, "events")


@pytest.mark.parametrize("header", ["", "t_s,kind,role,rank", "t_s,kind,role,rank,detail,more", "kind,t_s", "\xff"])
def test_another_header_is_damage(tmp_path: Path, header: str) -> None:
    (tmp_path / "events.csv").write_text(header + "\n", encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"row 0 \(line 1\) is not the header of events\.csv"):
        read_trace(tmp_path, "events")


@pytest.mark.parametrize("own", ["t_s", "a b", "a,a"])
def test_pushes_with_unusable_own_columns_are_damage(tmp_path: Path, own: str) -> None:
    (tmp_path / "pushes.csv").write_text(",".join(c.name for c in PUSHES) + f",{own}\n")
    with pytest.raises(DamagedFileError, match="row 0"):
        read_trace(tmp_path, "pushes")


@pytest.mark.parametrize("name", TRACES)
def test_a_missing_file_and_one_without_rows_are_empty_frames(tmp_path: Path, name: TraceName) -> None:
    missing = read_trace(tmp_path / "gone", name)
    write(tmp_path, name, [])
    for frame in (missing, read_trace(tmp_path, name)):
        assert frame.is_empty()
        assert [(key, str(dtype)) for key, dtype in frame.schema.items()] == [(c.name, c.dtype) for c in TRACES[name]]


def test_a_trace_that_is_no_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "evals.csv").mkdir()
    with pytest.raises(DamagedFileError, match=r"evals\.csv: cannot be read"):
        read_trace(tmp_path, "evals")


# The folder


def test_a_run_folder_is_named_after_its_run(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "new" / "results", None, "local_sgd", 8, 3)
    assert folder.parent == tmp_path / "new" / "results"
    assert re.fullmatch(r"\d{8}T\d{6}Z_local_sgd_w8_s3", folder.name)
    assert sorted(inner.name for inner in folder.iterdir()) == ["checkpoint", "logs"]


def test_a_strategy_by_import_path_makes_a_plain_name(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path, None, "my.rules/../:Rule", 2, 0)
    assert folder.parent == tmp_path
    assert folder.name.endswith("Z_my.rules-..-Rule_w2_s0")
    assert len(create_run_folder(tmp_path, None, "x" * 1000, 2, 0).name) < 200


def test_two_launchers_at_the_same_second_share_no_folder(tmp_path: Path) -> None:
    code = """
        import pathlib, sys, time
        from sapus_cli.traces import create_run_folder
        time.strftime = lambda *_: "20260131T235959Z"
        for _ in range(20):
            print(create_run_folder(pathlib.Path(sys.argv[1]), None, "bsp", 4, 0).name)
        """
    launchers = [python(code, tmp_path / "results") for _ in range(2)]
    names = [name for launcher in launchers for name in finish(launcher).split()]
    stem = "20260131T235959Z_bsp_w4_s0"
    assert sorted(names) == sorted([stem, *(f"{stem}_{n}" for n in range(2, 41))])


def test_a_given_name_is_used_once(tmp_path: Path) -> None:
    assert create_run_folder(tmp_path, "first try", "bsp", 4, 0) == tmp_path / "first try"
    with pytest.raises(UserError, match="first try exists already"):
        create_run_folder(tmp_path, "first try", "bsp", 4, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\nb", "a\0b", "\udcff"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="must be one folder name"):
        create_run_folder(tmp_path / "results", name, "bsp", 4, 0)
    assert not (tmp_path / "results").exists()


def test_a_name_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot create a run in .*: File name too long") as caught:
        create_run_folder(tmp_path, "x" * 300, "bsp", 4, 0)
    assert "\n" not in str(caught.value)


def below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file" / "results"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def a_dangling_link(tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    return tmp_path / "link"


def below_a_locked_folder(tmp_path: Path) -> Path:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere")
    return locked / "results"


@pytest.mark.parametrize("make", [below_a_file, a_file, a_dangling_link, below_a_locked_folder])
def test_results_that_cannot_be_written_are_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    results = make(tmp_path)
    with pytest.raises(UserError, match="cannot write results to"):
        check_results(results)
    with pytest.raises(UserError, match=r"cannot create a run in .*; choose another folder"):
        create_run_folder(results, None, "bsp", 4, 0)
    with pytest.raises(UserError):
        create_run_folder(results, "named", "bsp", 4, 0)


def test_results_that_are_refused_by_the_system_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK | os.X_OK))
    with pytest.raises(UserError, match="may not be written"):
        check_results(tmp_path / "results")


def test_checking_results_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_results(tmp_path)
    check_results(tmp_path / "a" / "b")
    check_results(Path("results"))
    assert list(tmp_path.iterdir()) == []


# run.json


def test_run_json_round_trips(tmp_path: Path) -> None:
    data = {"status": "running", "config": {"lr": 0.1, "epochs": None}, "list": [1, 2.5, "é"]}
    write_run(tmp_path, data)
    assert read_run(tmp_path) == {"schema_version": SCHEMA_VERSION, **data}
    write_run(tmp_path, read_run(tmp_path) | {"status": "finished", "loss": math.nan})
    assert read_run(tmp_path) == {"schema_version": SCHEMA_VERSION, **data, "status": "finished", "loss": None}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_writer_killed_at_run_json_leaves_a_whole_one(tmp_path: Path) -> None:
    writer = python(
        """
        import itertools, pathlib, sys
        from sapus_cli.traces import write_run
        for n in itertools.count():
            write_run(pathlib.Path(sys.argv[1]), {"n": n, "filler": [n] * 10000})
            if n == 20:
                print("far enough", flush=True)
        """,
        tmp_path,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "far enough\n"
    for _ in range(20):
        run = read_run(tmp_path)
        assert run["filler"] == [run["n"]] * 10000
    writer.kill()
    writer.communicate(timeout=60)
    assert read_run(tmp_path)["n"] >= 20


def test_run_json_that_cannot_be_written_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"cannot write .*run\.json: No such file"):
        write_run(tmp_path / "gone", {})


def test_a_folder_without_run_json_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(UserError, match=f"no run in {re.escape(str(folder))}"):
            read_run(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"schema_version": "1"}', b'{"schema_version": true}', b"\xff", b"[" * 99999]
)
def test_a_malformed_run_json_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"run\.json: "):
        read_run(tmp_path)


def test_a_run_json_that_is_no_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(DamagedFileError, match=r"run\.json: cannot be read"):
        read_run(tmp_path)


def test_a_newer_run_says_both_versions_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(f'{{"schema_version": {SCHEMA_VERSION + 1}}}')
    with pytest.raises(
        DamagedFileError, match=f"schema version {SCHEMA_VERSION + 1}, .* {SCHEMA_VERSION}; update sapus"
    ):
        read_run(tmp_path)


# The environment


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=sapus", "-c", "user.email=sapus@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_environment_goes_into_run_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    before = environment()
    versions, host = before["versions"], before["host"]
    assert isinstance(versions, dict)
    assert isinstance(host, dict)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["polars"] == pl.__version__
    assert 1 <= host["usable_cores"] <= host["logical_cores"]
    assert host["memory_bytes"] > 2**26
    assert before["git"] is None
    write_run(tmp_path, before)
    assert read_run(tmp_path) == {"schema_version": SCHEMA_VERSION, **before}


def test_the_commit_of_the_work_tree_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "init")
    assert environment()["git"] is None
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "v1-dirty")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert environment()["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("another")
    assert environment()["git"] == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] is None


# The manual


def test_the_manual_lists_every_column_and_status() -> None:
    manual = (Path(__file__).parents[1] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    for name, columns in TRACES.items():
        section = manual.split(f"## {name}.csv")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section, re.MULTILINE)
        assert rows == [tuple(column) for column in columns]
    for status in STATUSES:
        assert f"| `{status}` |" in manual
