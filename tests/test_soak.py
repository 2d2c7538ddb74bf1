"""Every strategy under random faults, with real processes: they are killed, stopped and cut off, and nothing is lost.

The short version causes 200 faults and more. The long one goes on with ever new plans for as many minutes as asked:

    SAPUS_SOAK_MINUTES=30 pytest tests/test_soak.py -m soak -s

Both print their seed; SAPUS_SOAK_SEED=N repeats the plans of a seed. What happens at which moment is up to the machine.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from soak import NULL, OFTEN, Case, Soak, Soaked, can_cut, cases, check, cut, faults, growth, summary

from sapus_cli import traces

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from inside import Inside

SEED = int(os.environ.get("SAPUS_SOAK_SEED", "1"))
MINUTES = float(os.environ.get("SAPUS_SOAK_MINUTES", "0"))
AT_ONCE = 3
WORKERS_ONLY = {kind: n for kind, n in OFTEN.items() if kind in {"cut worker", "kill worker", "pause worker"}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def carry_out(drawn: Iterable[Case], root: Path) -> list[Soaked]:
    """Run some of the cases at a time; all of them, before the first one that went wrong is told of."""

    def one(case: Case) -> Soaked | str:
        try:
            soaked = Soak(case, root / case.name).run()
            check(soaked)
        except Exception as error:  # noqa: BLE001 - it is told of at the end
            return f"{case.name} (seed {SEED}):\n{error!r:.5000}\n{case.faults}"
        return soaked

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            results = list(pool.map(one, drawn))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C: no further ones
            raise
    wrong = [result for result in results if isinstance(result, str)]
    assert not wrong, f"{len(wrong)} of {len(results)}: " + "\n\n".join(wrong).replace("\\n", "\n")
    return [result for result in results if isinstance(result, Soaked)]


def calm(n: int) -> Case:
    """Workers come and go, the server stays: what it does not give back piles up."""
    rng = random.Random(f"{SEED}.calm")  # noqa: S311
    return Case("calm", "local-sgd-async", 4, NULL, faults(rng, n, 4, often=WORKERS_ONLY))


def training(strategies: Iterable[str]) -> list[Case]:
    """A model that learns, where nothing is emulated but the time of a step."""
    rng = random.Random(f"{SEED}.training")  # noqa: S311
    options = ["--dataset", "digits", "--model", "mlp", "--step-time", "10ms"]
    return [Case(f"digits-{name}", name, 3, options, faults(rng, 14, 3)) for name in strategies]


def assert_it_learned(soaked: Soaked) -> None:
    """Without faults all of them end above 0.95 after 500 steps of each worker."""
    assert traces.read_run(soaked.folder)["summary"]["accuracy"] > 0.9


def assert_nothing_piles_up(soaked: Soaked) -> None:
    """Neither in the server nor in the launcher, between the first third of a run and its last."""
    assert len({sample.pid for sample in soaked.samples["server"]}) == 1
    for role in ("server", "launcher"):
        files, threads, rss_bytes = growth(soaked.samples[role])
        print(f"{role}: {files} descriptors, {threads} threads, {rss_bytes >> 10} KiB more")  # noqa: T201
        assert files <= 6, f"descriptors of the {role}"  # connections that are about to be closed
        assert threads <= 0, f"threads of the {role}"
        assert rss_bytes < 8 << 20, f"memory of the {role}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_faults(tmp_path: Path, inside: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    begin_s = time.monotonic()
    done = carry_out([calm(40), *training(["sapus"]), *cases(SEED, 0, 11)], tmp_path)
    for soaked in done:
        shutil.copytree(soaked.folder, tmp_path / "all" / soaked.folder.name)
        assert inside("show", str(soaked.folder)).returncode == 0
    assert inside("compare", "--force", "--target", "0.0001", *map(str, (tmp_path / "all").iterdir())).returncode == 0
    with capsys.disabled():
        print(f"\nseed {SEED}, {time.monotonic() - begin_s:.0f} s: {summary(done)}")  # noqa: T201
    assert sum(sum(soaked.done.values()) for soaked in done) >= 200
    assert_nothing_piles_up(done[0])
    assert_it_learned(done[1])


@pytest.mark.soak
@pytest.mark.skipif(not MINUTES, reason="takes as long as SAPUS_SOAK_MINUTES says")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_ever_more_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until_s = time.monotonic() + 60 * MINUTES
    done: list[Soaked] = []
    round_no = 0
    while time.monotonic() < until_s:
        round_no += 1
        drawn = cases(SEED, round_no, 20)
        if round_no == 1:
            drawn = [calm(80), *training(["asp", "bsp", "easgd", "local-sgd", "sapus"]), *drawn]
        soaked = carry_out(drawn, tmp_path / str(round_no))
        if round_no == 1:
            assert_nothing_piles_up(soaked[0])
            for each in soaked[1:6]:
                assert_it_learned(each)
        done += soaked
        shutil.rmtree(tmp_path / str(round_no))
        with capsys.disabled():
            print(f"\nseed {SEED}, round {round_no}: {summary(done)}")  # noqa: T201


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert cases(7, 1, 12) == cases(7, 1, 12)
    assert cases(7, 1, 12) != cases(8, 1, 12)
    assert {len(case.faults) for case in cases(7, 1, 12)} == {12}


@pytest.mark.skipif(not can_cut(), reason="this system keeps descriptors of other processes to itself")
def test_connections_are_cut_and_pairs_without_a_name_are_not() -> None:
    code = (
        "import socket, sys; pair = socket.socketpair(); listener = socket.create_server(('127.0.0.1', 0));"
        "print(listener.getsockname()[1], flush=True); taken, _ = listener.accept(); print(taken.recv(1), flush=True);"
        "pair[0].send(b'x'); print(pair[1].recv(1), flush=True)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process,
        socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as connection,  # type: ignore[union-attr]
    ):
        while not (n_cut := cut(process.pid)):  # until it has taken the connection
            time.sleep(0.01)
        assert n_cut == 1
        assert connection.recv(1) == b""
        assert process.communicate(timeout=20)[0].split() == ["b''", "b'x'"]
