"""`sapus bench transport`: its arithmetic by hand, what it refuses, that its checks can fail, that nothing stays."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from processes import SAPUS, all_gone, sapus, start
from rich.console import Console

from sapus_cli.cli import run_line
from sapus_cli.commands import bench
from sapus_cli.doctor import Limits
from sapus_cli.drivers.bench import child, plan, team
from sapus_cli.drivers.bench.plan import Ceilings, Contender, Job, Room, Sample, Spread, Window
from sapus_cli.drivers.launch import fork_server
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError
from sapus_cli.figures import canvas, transport

if TYPE_CHECKING:
    from pathlib import Path


GIB = 2**30
SMALL = ("bench", "transport", "--elements", "1000", "--workers", "2", "--rounds", "1", "--seconds", "0.1")
TWO = Contender("two vectors", "a:b", "a:b", vectors=2)


@pytest.fixture(scope="module", autouse=True)
def _fork_server_of_a_run() -> None:
    """A process has one fork server, and that of the benchmark lacks what the runs of other tests need."""
    fork_server(1)


def job(workers: int = 2, elements: int = 1000, transport: str = "tcp") -> Job:
    return Job(elements, workers, 0.1, "/nowhere", transport)


# What is asked for


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1e5,1e6,1e7,2.5e7", [100_000, 1_000_000, 10_000_000, 25_000_000]),
        ("8", [8]),
        (" 3 , 1, 3", [3, 1]),
        ("1E2", [100]),
    ],
)
def test_lists_of_whole_numbers(text: str, numbers: list[int]) -> None:
    assert bench.counts("--elements", text) == numbers


@pytest.mark.parametrize("part", ["1e5x", "0", "-4", "2.5", "nan", "inf", "1e999999999", "1e-3", ""])
def test_what_is_no_whole_number_is_refused_by_name(part: str) -> None:
    with pytest.raises(UserError, match=r"must be whole numbers of at least 1, as in 1000 or 2\.5e7") as error:
        bench.counts("--workers", f"4,{part}")
    assert str(error.value).startswith(f"--workers 4,{part}: '{part}': ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--elements", "1e5x"), "--elements 1e5x: must be whole numbers of at least 1, as in 1000 or 2.5e7"),
        (("--elements", "2.5"), "--elements 2.5: must be whole numbers"),
        (("--workers", "0"), "--workers 0: must be whole numbers"),
        (("--workers", "1001"), "--workers 1001: at most 1000"),
        (("--rounds", "0"), "--rounds 0: must be from 1 to 1000"),
        (("--rounds", "x"), "--rounds x: must be a whole number"),
        (("--seconds", "0"), "--seconds 0: must be from 0.05 to 600"),
        (("--seconds", "nan"), "--seconds nan: must be from 0.05 to 600"),
        (("--output", "figure.gif"), "--output figure.gif: is no png, pdf or svg file"),
        (("--output", "nowhere/figure.png"), "--output nowhere/figure.png: its folder does not exist"),
        (("--elements", "1e12", "--workers", "1"), "1,000,000,000,000 elements with 1 worker need about 18,6"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["bench", "transport", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"sapus: {says}")
    assert err.count("\n") == 1


def test_memory_and_open_files_are_estimated_before_the_start() -> None:
    # 4 bytes * 2^28 elements * (1 + 2 * 4 vectors) = 9 GiB, and 5 processes of 100 MiB.
    assert plan.obstacle(2**28, 4, [TWO], Room(10 * GIB, 1024)) is None
    assert plan.obstacle(2**28, 4, [TWO], Room(9 * GIB, 1024)) == (
        "268,435,456 elements with 4 workers need about 9.5 GiB of memory, and 9.0 GiB are available; "
        "give fewer --elements or --workers"
    )
    # 64 + 6 * 100 files.
    assert plan.obstacle(10, 100, [TWO], Room(100 * GIB, 664)) is None
    assert plan.obstacle(10, 100, [TWO], Room(100 * GIB, 663)) == (
        "100 workers need about 664 open files, and the limit is 663; raise it with ulimit -n, or give fewer --workers"
    )


def test_the_hungriest_contender_decides() -> None:
    many = TWO._replace(vectors=100)
    assert plan.obstacle(2**20, 4, [TWO, many], Room(GIB, 1024)) is not None
    assert plan.obstacle(2**20, 4, [TWO], Room(GIB, 1024)) is None


def test_a_pair_without_room_is_skipped_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "room", lambda: Room(GIB, 100))
    pairs, skipped = bench._pairs([1000, 10**9], [1, 50], [TWO])
    assert pairs == [(1000, 1)]
    assert len(skipped) == 2, "a reason is told once"
    assert skipped[0].startswith("skipped: 50 workers need about 364 open files")
    assert skipped[1].startswith("skipped: 1,000,000,000 elements with 1 worker need about 11.4 GiB")


def test_nothing_is_measured_where_there_is_room_for_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "room", lambda: Room(GIB, 10))
    with pytest.raises(UserError, match=r"^1 worker need about 70 open files, and the limit is 10"):
        bench._pairs([1000], [1], [TWO])


def test_the_memory_of_a_control_group_is_all_the_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "cgroup_limits", lambda: Limits(memory_bytes=200, free_bytes=100))
    assert team.room().memory_bytes == 100
    monkeypatch.setattr(team, "cgroup_limits", Limits)
    assert team.room().memory_bytes > 100


def test_a_peer_that_is_not_installed_is_named_with_what_to_type() -> None:
    absent = TWO._replace(name="absent", needs="no_such_module_here", install="absent>=1")
    assert team.missing(absent) == (
        "absent left out: no_such_module_here is not installed; python -m pip install 'absent>=1'"
    )
    assert team.missing(TWO) is None
    assert team.missing(TWO._replace(needs="torch")) is None


# What the numbers are


def test_what_is_pushed_goes_up_and_down_and_stays_exact() -> None:
    # 8 workers push 1 to 8, 36 together: 2^23 / 36 = 233,016.8.
    assert job(8).turn == 233_016
    up = job(8).turn
    assert [plan.pushed(job(8), 2, n) for n in (0, 1, 2, up, up + 1, 2 * up, 2 * up + 1)] == [
        *(0, 3, 6),
        *(3 * up, 3 * (up - 1), 0, 3),
    ]
    most = sum(plan.pushed(job(8), rank, up) for rank in range(8))
    assert most == 36 * up
    assert most < 2**23
    assert job(plan.MOST_WORKERS).turn >= 1


def test_an_exchange_across_the_edge_of_the_window_counts_by_its_part() -> None:
    completed = [0.0, 1.0, 3.0, 7.0]
    # Half of the first, the second, half of the third.
    assert plan.exchanges_within(completed, Window(0.5, 5.0)) == pytest.approx(2.0)
    assert plan.exchanges_within(completed, Window(1.0, 3.0)) == 1.0
    assert plan.exchanges_within(completed, Window(3.5, 4.5)) == 0.25


@pytest.mark.parametrize("window", [Window(-0.1, 2.0), Window(1.0, 7.0)])
def test_exchanges_must_span_the_window(window: Window) -> None:
    with pytest.raises(ValueError, match="do not span"):
        plan.exchanges_within([0.0, 1.0, 7.0], window)


def sample(contender: str, turn: int, rate: float, **fields: Any) -> Sample:
    """A measurement of 1e6 elements: `rate` exchanges a second are `rate / 125` GB/s."""
    values: dict[str, Any] = {"elements": 10**6, "workers": 4, "seconds": 0.5, "exchanges": rate / 2} | fields
    return Sample(contender=contender, round=turn, exchanges_per_s=rate, gb_per_s=rate / 125, **values)


def ceilings(turn: int, one_way: float) -> Ceilings:
    return Ceilings(
        elements=10**6,
        workers=4,
        round=turn,
        copy_gb_per_s=20.0 + turn,
        axpy_gb_per_s=23.0,
        one_way_gb_per_s=one_way,
    )


SAMPLES = [
    sample("zeromq tcp", 0, 100.0, server_cpu_s_per_gb=0.2, server_rss_mib=50.0, server_peak_rss_mib=60.0),
    sample("sapus tcp", 0, 200.0),
    sample("sapus tcp", 1, 150.0),
    sample("zeromq tcp", 1, 50.0, server_cpu_s_per_gb=0.3, server_rss_mib=52.0, server_peak_rss_mib=62.0),
]
CEILINGS = [ceilings(0, 4.0), ceilings(1, 2.0)]


def test_medians_and_ratios_by_hand() -> None:
    base, other = plan.rows(SAMPLES, CEILINGS)
    assert (base.contender, base.exchanges_per_s) == ("zeromq tcp", Spread(75.0, 50.0, 100.0))
    assert base.to_base == Spread(1.0, 1.0, 1.0)
    assert base.of_floor == pytest.approx(Spread(0.2, 0.2, 0.2))  # 0.8 of 4, and 0.4 of 2
    assert base.server_cpu_s_per_gb == Spread(0.25, 0.2, 0.3)
    assert base.server_peak_rss_mib == Spread(61.0, 60.0, 62.0)
    # 200 / 100 and 150 / 50, each within its round; the ratio of the medians would be 175 / 75.
    assert other.to_base == Spread(2.5, 2.0, 3.0)
    assert other.of_floor == pytest.approx(Spread(0.5, 0.4, 0.6))  # 1.6 of 4, and 1.2 of 2
    assert other.server_cpu_s_per_gb is None


def test_the_floor_of_an_exchange_by_hand() -> None:
    (row,) = plan.ceiling_rows(CEILINGS)
    assert row.copy_gb_per_s == Spread(20.5, 20.0, 21.0)
    assert row.floor_s == pytest.approx(Spread(0.003, 0.002, 0.004))  # 8 MB at 4 and at 2 GB/s


def test_every_round_begins_one_further() -> None:
    assert [plan.rotated("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((1549.3, "1,549"), (99.96, "100"), (57.34, "57.3"), (9.996, "10.0")),
        *((1.234, "1.23"), (0.9996, "1.00"), (0.1734, "0.173"), (0.0, "0.000")),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert bench.figure(value) == text


@pytest.mark.parametrize(("number", "text"), [(25_000_000, "2.5e7"), (100, "100"), (10**6, "1e6"), (1001, "1,001")])
def test_sizes_are_written_as_they_are_asked_for(number: int, text: str) -> None:
    assert bench.short(number) == text


# How they are shown


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_recorded_numbers(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        for part in bench.pair_view(plan.ceiling_rows(CEILINGS)[0], plan.rows(SAMPLES, CEILINGS)):
            console.print(part)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "1e6 elements, 4 workers: copy 20.5, add 23.0, one way 3.00 GB/s; floor 3.00 ms"
    assert lines[3].split() == ["zeromq", "tcp", "75.0", "50.0..100", "0.600", "0.250", "61.0", "1.00", "20%"]
    assert lines[4].split() == ["sapus", "tcp", "175", "150..200", "1.40", "-", "-", "2.50", "50%"]


def test_the_widest_numbers_fit_into_80_columns() -> None:
    most = Spread(123_456.0, 100_000.0, 199_999.0)
    row = plan.Row(
        contender="zeromq tcp",
        elements=25_000_000,
        workers=1000,
        exchanges_per_s=most,
        gb_per_s=Spread(123.0, 1.0, 1.0),
        server_cpu_s_per_gb=Spread(0.123, 0.1, 0.2),
        server_rss_mib=None,
        server_peak_rss_mib=Spread(12345.0, 0.0, 0.0),
        to_base=Spread(12.3, 0.0, 0.0),
        of_floor=Spread(1.2345, 0.0, 0.0),
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(bench.pair_view(plan.ceiling_rows(CEILINGS)[0], [row])[1])
    assert len(capture.get().splitlines()) == 3
    assert "12,345" in capture.get()
    assert "100,000..199,999" in capture.get()


def test_the_figure_of_recorded_numbers() -> None:
    rows = msgspec.to_builtins(plan.rows(SAMPLES, CEILINGS))
    tops = msgspec.to_builtins(plan.ceiling_rows(CEILINGS))
    drawn = transport.draw(rows, tops)
    (axes,) = drawn.axes
    assert axes.get_title(loc="left") == "4 workers"
    assert [float(np.asarray(line.get_ydata())[0]) for line in axes.lines] == pytest.approx([0.6, 1.4, 3.0])
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "zeromq tcp",
        "sapus tcp",
        "one way through loopback TCP",
    ]
    assert canvas.encode(drawn, "svg", "paper") == canvas.encode(transport.draw(rows, tops), "svg", "paper")


@pytest.mark.parametrize("width", [80, 120])
def test_help(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run_line(["bench"]) == 0
    without = capsys.readouterr().out
    assert run_line(["bench", "--help"]) == 0
    assert capsys.readouterr().out.strip() == without.strip()
    assert "transport" in without
    assert run_line(["bench", "transport", "-h"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for option in ("--elements", "--workers", "--rounds", "--seconds", "--peers", "--json", "--output"):
        assert option in text
    assert "sapus bench transport --output transport.pdf" in text


# What becomes of failures, with measurements that are pretended


OWN = Contender("own", "a:b", "a:b")
PEER = Contender("peer", "a:b", "a:b", needs="torch", least_workers=2)


class Pretended:
    """Measures nothing. `errors` are for whom, how many elements, workers, and round."""

    def __init__(self, errors: dict[tuple[str, int, int, int], Exception]) -> None:
        self._errors = errors
        self.measured: list[tuple[str, int, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def contender(self, contender: Contender, d: int, w: int, turn: int) -> Sample:
        asked = (contender.name, d, w, turn)
        self.measured.append(asked)
        if asked in self._errors:
            raise self._errors[asked]
        return sample(contender.name, turn, 100.0, elements=d, workers=w)

    def ceilings(self, d: int, w: int, turn: int) -> Ceilings:
        return msgspec.structs.replace(ceilings(turn, 4.0), elements=d, workers=w)


def pretend(monkeypatch: pytest.MonkeyPatch, errors: dict[tuple[str, int, int, int], Exception]) -> Pretended:
    pretended = Pretended(errors)
    monkeypatch.setattr(team, "Bench", lambda _seconds: pretended)
    monkeypatch.setattr(plan, "CONTENDERS", (OWN,))
    monkeypatch.setattr(plan, "PEERS", (PEER,))
    return pretended


TWO_PAIRS = ("bench", "transport", "--elements", "10,20", "--workers", "2", "--rounds", "2", "--peers")


@pytest.mark.parametrize(
    ("error", "code"), [(RunFailedError("own: it broke"), 1), (InterruptedRunError("interrupted by SIGINT"), 130)]
)
def test_what_was_measured_before_a_failure_is_shown(
    error: RunFailedError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, {("own", 20, 2, 1): error})
    assert run_line([*TWO_PAIRS, "--json"]) == code
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert {one["elements"] for one in found["samples"] + found["ceilings"]} == {10}
    assert len(found["samples"]) == 4
    assert found["notes"] == [str(error)]
    assert err == f"sapus: {error}\n"
    assert run_line([*TWO_PAIRS]) == code
    out, err = capsys.readouterr()
    assert out.startswith("10 elements, 2 workers")
    assert "20 elements" not in out
    assert err == f"sapus: {error}\n"


def test_an_interrupt_within_a_peer_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretended = pretend(monkeypatch, {("peer", 10, 2, 0): InterruptedRunError("interrupted by SIGINT")})
    assert run_line([*TWO_PAIRS]) == 130
    assert capsys.readouterr() == ("", "sapus: interrupted by SIGINT\n")
    assert pretended.measured[-1][0] == "peer"


def test_a_peer_that_fails_takes_its_numbers_of_that_pair_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, {("peer", 20, 2, 1): RunFailedError("peer: it broke")})
    assert run_line([*TWO_PAIRS, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "sapus: left out from here on: peer: it broke\n"
    rows = json.loads(out)["medians"]["contenders"]
    assert [(row["contender"], row["elements"]) for row in rows] == [("own", 10), ("peer", 10), ("own", 20)]
    assert len(pretended.measured) == 8


def test_who_sends_nothing_alone_is_left_out_with_one_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = pretend(monkeypatch, {})
    assert run_line(["bench", "transport", "--elements", "10", "--workers", "1,2", "--rounds", "1", "--peers"]) == 0
    assert capsys.readouterr().err == "sapus: peer left out with 1 worker: alone it sends nothing\n"
    assert {(name, w) for name, _, w, _ in pretended.measured} == {("own", 1), ("own", 2), ("peer", 2)}
    assert {one.name for one in plan.PEERS if one.least_workers > 1} == {"peer"}


def test_a_package_without_metadata_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PEERS", ())
    found = bench._machine([OWN._replace(install="no-such-package-here>=1")])
    assert found["versions"]["no-such-package-here"] is None


# Real measurements


@pytest.mark.slow
def test_a_real_run_over_everything_that_ships(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = sapus(
        *("bench", "transport", "--elements", "3e4", "--workers", "3", "--rounds", "2", "--seconds", "0.1"),
        *("--json", "--output", "figure.png"),
        cwd=tmp_path,
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settings"]["elements"] == [30_000]
    assert found["machine"]["logical_cores"] == os.cpu_count()
    assert found["versions"]["libzmq"] == zmq.zmq_version()
    names = [contender.name for contender in plan.CONTENDERS]
    assert len(found["samples"]) == 2 * len(names)
    assert len(found["ceilings"]) == 2
    for one in found["samples"]:
        assert one["exchanges"] > 1
        assert one["gb_per_s"] == pytest.approx(8e-9 * one["elements"] * one["exchanges_per_s"])
        assert one["server_cpu_s_per_gb"] >= 0, "its clock may tick at a tenth of a second"
        assert one["server_rss_mib"] > 1
        if one["server_peak_rss_mib"] is not None:
            assert one["server_peak_rss_mib"] >= one["server_rss_mib"]
    for row in found["medians"]["contenders"]:
        low, middle, high = (row["exchanges_per_s"][i] for i in (1, 0, 2))
        assert low <= middle <= high
        assert (row["to_base"] == [1, 1, 1]) == (row["contender"] == plan.BASE)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tmp").iterdir()) == []


PEERS = [
    contender for contender in plan.PEERS if contender.needs == "torch" or importlib.util.find_spec(contender.needs)
]


@pytest.mark.slow
@pytest.mark.parametrize("contender", PEERS, ids=lambda contender: contender.name)
def test_peers_come_to_the_right_sum(contender: Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # noqa: S108 - the sockets of Ray need a short path
    with team.Bench(0.1) as measuring:
        found = measuring.contender(contender, 50_000, 2, 0)
    assert found.exchanges > 1
    assert (found.server_cpu_s_per_gb is None) == (not contender.serve)


@pytest.mark.slow
def test_a_missing_peer_is_named_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = plan.PEERS[0]._replace(name="absent", needs="no_such_module_here", install="absent>=1")
    monkeypatch.setattr(plan, "PEERS", (absent, *(peer for peer in plan.PEERS if peer.name == "gloo")))
    assert run_line([*SMALL, "--peers"]) == 0
    out, err = capsys.readouterr()
    assert "absent left out: no_such_module_here is not installed; python -m pip install 'absent>=1'" in err
    names = [*(contender.name for contender in plan.CONTENDERS), "gloo"]
    assert [first for line in out.splitlines() if (first := line.split("  ")[0]) in names] == names
    assert "an all-reduce counts as one exchange of each worker" in " ".join(out.split())


@pytest.mark.slow
def test_grpc_asks_no_proxy_for_loopback(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    code = (
        "import sys\n"
        "from sapus_cli.drivers.bench import plan\n"
        "plan.PEERS = tuple(peer for peer in plan.PEERS if peer.name == 'grpc')\n"
        "plan.CONTENDERS = plan.CONTENDERS[:1]\n"
        "from sapus_cli.cli import run_line\n"
        "sys.exit(run_line(sys.argv[1:]))\n"
    )
    nobody = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "no_grpc_proxy": ""}
    done = subprocess.run(
        [*SAPUS[:-1], code, *SMALL, "--peers", "--json"],
        cwd=tmp_path,
        env=nobody,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {row["contender"] for row in json.loads(done.stdout)["medians"]["contenders"]} == {"zeromq tcp", "grpc"}


# The checks can fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("loses", r"the final vector has elements from (\d+) to \1, but all that was pushed adds up to \d+"),
        ("doubles", r"the final vector has elements from (\d+) to \1, but all that was pushed adds up to \d+"),
        ("misses one element", r"of the vectors pulled were torn"),
        ("tears", r"\d+ of the vectors pulled were torn: not all of their elements were the same"),
        ("is stale", r"the vectors pulled last were \d+, \d+, but all that was pushed adds up to \d+"),
        ("answers zeros", r"the vectors pulled last were 0, 0, but all that was pushed adds up to \d+"),
        ("dies", r"(?s)the process server ended with exit code 1.*the server has had enough"),
    ],
)
def test_a_wrong_result_is_an_error(how: str, says: str) -> None:
    wrong = Contender("wrong", "wrong_bench:serve", "wrong_bench:connect", how)
    with team.Bench(0.1) as measuring, pytest.raises(RunFailedError, match=says) as error:
        measuring.contender(wrong, 1000, 2, 0)
    assert str(error.value).startswith("wrong, 1,000 elements, 2 workers: ")


@pytest.mark.slow
@pytest.mark.parametrize("is_peer", [True, False])
def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_peer: bool
) -> None:
    wrong = Contender("wrong", "wrong_bench:serve", "wrong_bench:connect", "dies")
    bare_loop = plan.CONTENDERS[:1]
    monkeypatch.setattr(plan, "CONTENDERS", bare_loop if is_peer else (*bare_loop, wrong))
    monkeypatch.setattr(plan, "PEERS", (wrong,) if is_peer else ())
    assert run_line([*SMALL, "--peers", "--json"]) == (0 if is_peer else 1)
    out, err = capsys.readouterr()
    assert "wrong, 1,000 elements, 2 workers: the process server ended with exit code 1" in err
    if is_peer:
        found = json.loads(out)
        assert {row["contender"] for row in found["medians"]["contenders"]} == {"zeromq tcp"}
        assert found["notes"][0].startswith("left out from here on: wrong, 1,000 elements, 2 workers: ")
    else:
        assert out == ""


@pytest.mark.slow
def test_the_same_contender_passes_when_it_is_right() -> None:
    right = Contender("right", "wrong_bench:serve", "wrong_bench:connect", "not at all")
    with team.Bench(0.1) as measuring:
        assert measuring.contender(right, 1000, 2, 0).exchanges > 1


def test_a_pull_that_is_torn_anywhere_is_seen_when_looked_at_closely() -> None:
    pulled = torch.ones(1000)
    worker = child._Worker(lambda _: pulled, job(), 0)
    worker.exchange()
    worker.look_closely()
    assert worker.torn == 0
    pulled[1] = 2
    worker.exchange()
    assert worker.torn == 0, "three elements are looked at while the time runs"
    worker.look_closely()
    assert worker.torn == 1
    pulled[0] = 2
    worker.exchange()
    assert worker.torn == 2


def test_a_worker_that_is_set_aside_once_it_is_ready_spans_the_window_all_the_same() -> None:
    class Parent:
        """Sets a window that begins while the worker is still telling that it is ready."""

        def send(self, message: Any) -> None:
            if isinstance(message, plan.Ready):
                self.window = Window(time.monotonic() + 0.01, time.monotonic() + 0.1)
                time.sleep(0.05)
            else:
                self.done = message

        def poll(self) -> bool:
            return True

        def recv(self) -> Window:
            return self.window

    parent: Any = Parent()
    child.drive(parent, lambda _push: torch.zeros(1000), job(), 0)
    assert parent.done.exchanges > 0
    assert parent.done.last == (0, 0)


@pytest.mark.slow
def test_a_signal_while_a_measurement_ends_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []

    def interrupted(pid: int) -> list[psutil.Process]:
        processes.append(psutil.Process(pid))
        signal.raise_signal(signal.SIGTERM)
        return []

    monkeypatch.setattr(team, "_descendants", interrupted)
    with (
        pytest.raises(InterruptedRunError, match="interrupted by SIGTERM"),
        team.Bench(0.1) as measuring,
        measuring._team("one that waits", 1000, 1) as one,
    ):
        one.start("sender-0", "ceilings:send", 0)
    assert len(processes) == 1
    assert all_gone(processes, 0)


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "forkserver" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_an_interrupt_while_the_fork_server_imports_shows_no_traceback(tmp_path: Path) -> None:
    run = start(tmp_path, "bench", "transport", "--elements", "1000", "--workers", "3", "--seconds", "60")
    run.wait_for(lambda: any(is_fork_server(process) for process in run.family()), "the fork server")
    time.sleep(0.2)  # it takes longer than that to import torch
    os.killpg(run.process.pid, signal.SIGINT)
    code, out, err = run.end()
    assert (code, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    run = start(tmp_path, "bench", "transport", "--elements", "1000", "--workers", "3", "--seconds", "60")
    run.wait_for(lambda: len(run.family()) >= 4, "processes")
    run.wait_for(lambda: list((tmp_path / "tmp").glob("sapus-bench-*/*/*.log")), "a log")
    family = run.family()
    if number is signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does: to every process
    else:
        run.process.send_signal(number)
    code, out, err = run.end()
    assert (code, out, err.strip()) == (130, "", f"sapus: interrupted by {number.name}")
    assert all_gone(family, 5)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_children_end_with_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = start(tmp_path, "bench", "transport", "--elements", "1000", "--workers", "3", "--seconds", "60")
    run.wait_for(lambda: len(run.family()) >= 6, "processes")
    family = run.family()
    run.process.kill()
    run.end()
    assert all_gone(family, 5)
