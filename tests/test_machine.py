"""What the machine can do to a run: a full disk, a folder that goes, a clock set back, signals, kills."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from machine import clock_that_can_be_set_back, on_a_terminal, small_disk
from processes import SAPUS, Background, all_gone, sapus, start
from runs import make_run

from sapus_cli.drivers.record import close_for_the_dead
from sapus_cli.errors import RunFailedError
from sapus_cli.traces import (
    EVENTS,
    RESERVE_BYTES,
    Reserve,
    Trace,
    create_run_folder,
    incomplete_traces,
    read_run,
    read_trace,
    write_run,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psutil

    from sapus_cli.traces import TraceName

BUSY = ("run", "-s", "asp", "--dataset", "null", "--model", "null:1000", "--workers", "2")
LONG = (*BUSY, "--seconds", "100")
SIMULATION = ("simulate", "--step-time", "50ms", "--model", "mlp", "--epochs", "100000")
SHM = Path("/dev/shm")  # noqa: S108 - where files of shared memory would be
ALL: tuple[TraceName, ...] = ("evals", "pushes", "resources", "events")


@contextmanager
def under(
    cwd: Path,
    *arguments: str,
    results: Path | None = None,
    ignoring: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Background]:
    """A command line that goes on, with a folder of its own for temporary files; ended with everything it started."""
    scratch = cwd / "tmp"
    scratch.mkdir()
    before = None if ignoring is None else signal.signal(ignoring, signal.SIG_IGN)
    try:
        run = start(cwd, *arguments, **{"TMPDIR": str(scratch), **(environment or {})})
    finally:
        if ignoring is not None:
            signal.signal(ignoring, before)
    run.results = results or run.results
    family: list[psutil.Process] = []
    try:
        yield run
        family = run.family() if run.process.poll() is None else []
    finally:
        if run.process.poll() is None:
            family = run.family()
            run.process.kill()
            run.process.communicate(timeout=10)
        assert all_gone(family, 8), family
        # What is not temporary: the fork server takes away its folder when all its children are gone.
        deadline = time.monotonic() + 5
        while list(scratch.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(scratch.iterdir()) == []


class Lines:
    """What a run says on stderr, as it comes."""

    def __init__(self, run: Background) -> None:
        self.text = ""
        self._run = run
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._run.process.stderr is not None
        for line in self._run.process.stderr:
            self.text += line

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self._run.process.wait(timeout=30)
        self._thread.join()
        self._run.process.communicate()
        return code


def whole_traces(folder: Path) -> dict[str, int]:
    """Rows of each trace; reading them fails where one is torn inside."""
    return {name: len(read_trace(folder, name)) for name in ALL}


# A full disk


def test_a_disk_that_is_full_keeps_rows_waiting_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapus_cli.traces.MOST_WAITING_BYTES", 3000)
    told: list[tuple[str, str]] = []
    with small_disk(tmp_path / "disk", "64k") as disk:
        trace = Trace(disk.folder / "events.csv", EVENTS, lambda kind, text: told.append((kind, text)))
        disk.fill()
        for n in range(300):  # rows of at least 28 bytes: a hundred and some fit
            trace.row((0.5, "fault", "server", n, "detail"))
            trace.flush()
        assert told == [
            ("incomplete", "cannot write events.csv: No space left on device; its rows wait in memory"),
        ]
        assert trace.incomplete
        assert 150 < trace.lost < 230
        disk.empty()
        trace.row((0.5, "fault", "server", 300, "last"))  # dropped as well: nothing was written yet
        trace.flush()
        trace.row((0.5, "fault", "server", 301, "last"))
        trace.close()
        assert told[1:] == [("incomplete", f"events.csv is written again, but {trace.lost} rows are lost")]
        assert trace.incomplete
        kept = 301 - trace.lost
        assert read_trace(disk.folder, "events")["rank"].to_list() == [*range(kept), 301]


def test_a_disk_with_room_again_gets_all_rows(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk", "64k") as disk:
        trace = Trace(disk.folder / "events.csv", EVENTS, lambda kind, _: told.append(kind))
        trace.row((0.5, "fault", "server", 0, "x" * 100))
        trace.flush()
        disk.fill()
        for n in range(1, 200):  # what is left of the first page takes a part of them
            trace.row((0.5, "fault", "server", n, "x" * 100))
        trace.flush()
        assert trace.incomplete
        assert (disk.folder / "events.csv").stat().st_size % 4096 == 0, "a row is torn"
        disk.empty()
        trace.close()
        assert (trace.incomplete, trace.lost, told) == (False, 0, ["incomplete", "complete"])
        assert read_trace(disk.folder, "events")["rank"].to_list() == list(range(200))


def test_run_json_is_written_to_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        write_run(disk.folder, {"status": "running"})
        reserve, none = Reserve(disk.folder), Reserve(tmp_path / "nowhere")
        assert [path.name for path in disk.folder.iterdir()] == ["run.json"], "the reserve has no name"
        disk.fill()
        last = {"status": "finished", "filler": "x" * (RESERVE_BYTES // 2)}
        with pytest.raises(RunFailedError, match="No space left on device"):
            write_run(disk.folder, last, none)
        assert read_run(disk.folder)["status"] == "running"
        write_run(disk.folder, last, reserve)
        assert read_run(disk.folder) == {"schema_version": 1, **last}
        assert sorted(path.name for path in disk.folder.iterdir()) == ["filler", "run.json"]
        reserve.close()


@pytest.mark.slow
def test_a_run_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "1m") as disk,
        under(tmp_path, *BUSY, "--seconds", "2", "--results", str(disk.folder), results=disk.folder) as run,
    ):
        lines = Lines(run)
        run.wait_for_pushes()
        disk.fill()
        assert lines.end() == 0, lines.text
        assert "incomplete: server cannot write pushes.csv: No space left on device" in lines.text
        assert "Traceback" not in lines.text
        (folder,) = (path for path in disk.folder.iterdir() if path.is_dir())
        record = read_run(folder)
        assert (record["status"], record["traces"]) == ("finished", "incomplete")
        assert "pushes.csv" in incomplete_traces(record)
        rows = whole_traces(folder)
        assert 4 < rows["pushes"] < record["totals"]["pushes"]
        assert not (folder / "run.json.tmp").exists()
        shown = sapus("show", str(folder), cwd=tmp_path)
        assert "rows are missing, the disk did not take them: " in shown.stdout


@pytest.mark.slow
def test_a_run_loses_no_row_when_there_is_room_again(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "2m") as disk,
        under(tmp_path, *BUSY, "--seconds", "2", "--results", str(disk.folder), results=disk.folder) as run,
    ):
        lines = Lines(run)
        run.wait_for_pushes()
        disk.fill()
        run.wait_for(lambda: "incomplete: server" in lines.text, "warning")
        disk.empty()
        assert lines.end() == 0, lines.text
        (folder,) = disk.folder.iterdir()
        record = read_run(folder)
        assert (record["status"], record["traces"]) == ("finished", "complete")
        assert whole_traces(folder)["pushes"] == record["totals"]["pushes"]
        events = read_trace(folder, "events")
        told = events.filter((events["role"] == "server") & (events["kind"] != "checkpoint"))
        assert told["kind"].to_list() == ["incomplete", "complete"]
        assert "the disk" not in sapus("show", str(folder), cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_simulation_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    options = ("simulate", "-s", "asp", "--dataset", "null", "--model", "null:1000", "-w", "2", "--step-time", "1ms")
    # Room for the reserve and for run.json, and then for a few thousand bytes of rows.
    with small_disk(tmp_path / "disk", "128k") as disk:
        done = sapus(*options, "--steps", "2000", "--results", str(disk.folder), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (folder,) = disk.folder.iterdir()
        assert f"{folder.name}: cannot write pushes.csv: No space left on device" in done.stderr
        record = read_run(folder)
        assert (record["status"], record["traces"]) == ("finished", "incomplete")
        assert whole_traces(folder)["pushes"] < record["totals"]["pushes"] == 4000


def test_a_comparison_says_that_rows_are_missing(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp")
    make_run(tmp_path / "b", "asp", traces="incomplete", incomplete_traces=["evals", "pushes"])
    done = sapus("compare", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "rows are missing, the disk did not take them: b (evals.csv, pushes.csv)" in said


def test_a_folder_of_temporary_files_that_cannot_hold_a_socket_is_one_line(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    done = sapus("run", "--workers", "1", cwd=tmp_path, TMPDIR=str(deep))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "set TMPDIR to a shorter one" in done.stderr
    assert not (tmp_path / "results").exists()
    assert not list(deep.iterdir())


def test_a_comparison_says_what_was_lost_with_a_server(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bsp")
    for name, lost in (("b", 1), ("c", 7)):
        folder = make_run(tmp_path / name, "asp", seed=lost)
        record = read_run(folder)
        write_run(folder, record | {"summary": {**(record.get("summary") or {}), "lost_pushes": lost}})
    done = sapus("compare", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "evaluations of what they had made count: b (1), c (7)" in " ".join(done.stdout.split())


# A results folder that is removed, two runs in one


@pytest.mark.slow
def test_a_results_folder_that_is_removed_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with under(tmp_path, *BUSY, "--seconds", "2") as run:
        run.wait_for_pushes()
        shutil.rmtree(run.results)
        code, _, err = run.end()
        assert code == 1
        assert "Traceback" not in err
        last = err.strip().splitlines()[-1]
        assert re.fullmatch(r"sapus: cannot write results/.*/run\.json: No such file .* was removed .*", last), err


@pytest.mark.slow
def test_two_runs_at_once_in_one_results_folder(tmp_path: Path) -> None:
    runs = [start(tmp_path, *BUSY, "--steps", "50") for _ in range(2)]
    ends = [run.end(60) for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    folders = list((tmp_path / "results").iterdir())
    assert len(folders) == 2
    for folder in folders:
        record = read_run(folder)
        assert (record["status"], record["totals"]["pushes"]) == ("finished", 100)
        assert whole_traces(folder)["pushes"] == 100


# The clock


@pytest.mark.slow
def test_a_clock_that_is_set_back_changes_no_time(tmp_path: Path) -> None:
    environment, switch = clock_that_can_be_set_back(tmp_path)
    with under(tmp_path, *BUSY, "--seconds", "2", environment=environment) as run:
        run.wait_for_pushes()
        switch.touch()
        code, _, err = run.end()
        assert code == 0, err
        record = run.record()
        assert record["ended_at"] < record["started_at"], "the clock was set back"
        assert 2 <= record["summary"]["seconds"] < 3
        for name in ALL:
            times = read_trace(run.folder, name)["t_s"]
            assert 0 <= times.min() <= times.max() < 3, name  # type: ignore[operator]
        shown = sapus("show", str(run.folder), cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr


def test_a_clock_that_is_set_back_gives_no_folder_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for now in (1000.0, 1000.0, 999.0, 1000.0):
        monkeypatch.setattr(time, "gmtime", lambda now=now: time.localtime(now))
        names.append(create_run_folder(tmp_path, None, "bsp", 2, 0).name[15:])
    assert names == ["Z_bsp_w2_s0", "Z_bsp_w2_s0_2", "Z_bsp_w2_s0", "Z_bsp_w2_s0_3"]


# Open files


def test_too_few_open_files_are_told_before_the_run(tmp_path: Path) -> None:
    done = sapus(*BUSY, "--steps", "2", cwd=tmp_path, limits="ulimit -n 40")
    assert done.returncode == 2
    assert done.stderr == (
        "sapus: --workers 2: needs 70 open files, and the hard limit is 40; "
        "have it raised (ulimit -Hn), or give fewer workers\n"
    )
    assert not (tmp_path / "results").exists()


def test_a_low_soft_limit_of_open_files_is_raised() -> None:
    code = "import resource; from sapus_cli.drivers.process import take_files; print(take_files());"
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    limited = ["sh", "-c", 'ulimit -S -n 50 && ulimit -H -n 100 && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(limited, capture_output=True, text=True, check=True)
    assert done.stdout == "100\n(100, 100)\n"


def test_no_file_left_to_open_is_one_line(tmp_path: Path) -> None:
    options = ("simulate", "--step-time", "1s", "--steps", "1", "--seeds", "2")
    done = sapus(*options, cwd=tmp_path, limits="ulimit -n 6")
    assert (done.returncode, done.stderr) == (1, "sapus: the system refused: Too many open files\n")


# Signals


@pytest.mark.slow
def test_a_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    with under(tmp_path, *BUSY, "--seconds", "2", ignoring=signal.SIGHUP) as run:
        run.wait_for_pushes()
        os.killpg(run.process.pid, signal.SIGHUP)
        code, _, err = run.end()
        assert code == 0, err
        assert run.record()["status"] == "finished"


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_a_run_in_order(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, *LONG) as (run, terminal):
        os.set_blocking(terminal, False)

        def trains() -> bool:
            with suppress(BlockingIOError):
                while os.read(terminal, 1 << 16):
                    pass
            return any(f.read_text().count("\n") > 4 for f in run.results.glob("*/pushes.csv"))

        run.wait_for(trains, "pushes")
        family = run.family()
        os.close(terminal)
        assert run.process.wait(timeout=20) == 130
        assert all_gone(family, 5)
        record = run.record()
        assert (record["status"], record["failure"]) == ("interrupted", "interrupted by SIGHUP")
        assert record["totals"]["pushes"] == whole_traces(run.folder)["pushes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_ends_a_simulation_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with under(tmp_path, *SIMULATION) as run:
        run.wait_for_pushes()
        run.process.send_signal(number)
        code, _, err = run.end()
        assert code == 130
        assert err.strip().splitlines()[-1] == f"sapus: interrupted by {number.name}"
        assert run.record()["status"] == "interrupted"
        whole_traces(run.folder)


TYPER = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"


def test_an_interrupt_while_the_program_is_loaded_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(TYPER)  # found first, as it lies where we are
    done = subprocess.run(SAPUS, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# Kills


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ipc", "shm"])
def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path, transport: str) -> None:
    shared = set(SHM.iterdir())
    with under(tmp_path, *LONG, "--transport", transport) as run:  # looks at processes and temporary files
        run.wait_for_pushes()
        family = run.family()
        run.process.kill()
        run.process.communicate(timeout=10)
        assert all_gone(family, 5), family
        assert read_run(run.folder)["status"] == "running"
        assert whole_traces(run.folder)["pushes"] > 0
        assert sorted(path.name for path in run.folder.iterdir()) == [
            *("checkpoint", "evals.csv", "events.csv", "logs", "pushes.csv", "resources.csv", "run.json"),
        ]
        assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if "@sapus-" in line]
    assert set(SHM.iterdir()) <= shared


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with under(tmp_path, *LONG) as run:
        run.wait_for(run.family, "first child")
        family = run.family()
        run.process.kill()
        run.process.communicate(timeout=10)
        assert all_gone(family, 8), family


@pytest.mark.slow
def test_nothing_is_left_of_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    asked = ("bench", "transport", "--elements", "1000", "--workers", "1", "--rounds", "100")
    with under(tmp_path, *asked) as run:
        run.wait_for(lambda: list((tmp_path / "tmp").glob("sapus-bench-*/*/*.log")), "a log")
        run.process.kill()
        run.process.communicate(timeout=10)


def test_the_record_of_a_dead_run_is_closed_once(tmp_path: Path) -> None:
    close_for_the_dead(tmp_path, "killed")
    assert list(tmp_path.iterdir()) == []
    write_run(tmp_path, {"status": "running"})
    close_for_the_dead(tmp_path, "killed")
    record = read_run(tmp_path)
    assert (record["status"], record["failure"]) == ("failed", "killed")
    write_run(tmp_path, {"status": "finished"})
    close_for_the_dead(tmp_path, "killed")
    assert read_run(tmp_path)["status"] == "finished"


# Output that nobody takes


@pytest.mark.parametrize("command", ["strategies", "--help"])
def test_a_reader_who_has_read_enough_ends_a_command_quietly(tmp_path: Path, command: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    process = subprocess.Popen([*SAPUS, command], cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "")


def test_output_to_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen([*SAPUS, "strategies"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.fullmatch(r"sapus: .*No space left on device\n", err)


def test_a_process_that_prints_to_a_full_disk_goes_on(tmp_path: Path) -> None:
    code = """
        import logging, os, sys
        from sapus_cli.drivers import process
        process.log_to(__import__("pathlib").Path(sys.argv[1]))
        print("a line")
        print("another", file=sys.stderr)
        logging.warning("a third")
        os._exit(7)
        """
    for log in ("/dev/full", str(tmp_path / "nowhere" / "log"), str(tmp_path / "log")):
        lines = "\n".join(line.strip() for line in code.splitlines())
        done = subprocess.run([sys.executable, "-c", lines, log], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "", ""), log
    assert (tmp_path / "log").read_text() == "a line\nanother\nWARNING:root:a third\n"
