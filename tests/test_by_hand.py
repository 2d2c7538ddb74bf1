"""Server and workers started by hand, as on several terminals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from processes import Background, launch, start

from sapus_cli.cli import run_line
from sapus_cli.drivers import client, process
from sapus_cli.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

ASKED = ("--strategy", "local-sgd", "--param", "h=4", "--steps", "10", "--model", "mlp", "--eval-every", "0.1")


@contextmanager
def ended(*runs: Background) -> Iterator[None]:
    """Leave nothing running, however the test ends."""
    try:
        yield
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.communicate()


def endpoint_of(server: Background) -> str:
    """What the server says one is to type."""
    assert server.process.stderr is not None
    for line in server.process.stderr:
        if said := re.fullmatch(r"waiting for 2 workers: sapus worker --connect (tcp://127\.0\.0\.1:\d+)\n", line):
            return said[1]
    raise AssertionError("the server ended before it listened")


def test_two_workers_by_hand_train_as_two_that_are_launched(tmp_path: Path) -> None:
    server = start(tmp_path, "server", "--bind", "tcp://127.0.0.1:*", "--workers", "2", "--json", *ASKED)
    with ended(server):
        endpoint = endpoint_of(server)
        first = start(tmp_path, "worker", "--connect", endpoint, "--rank", "1")
        second = start(tmp_path, "worker", "--connect", endpoint, "--rank", "0")
        with ended(first, second):
            assert first.end(40) == (0, "", "worker 1: done\n")
            assert second.end(40) == (0, "", "worker 0: done\n")
        code, out, err = server.end()
    assert code == 0, err
    assert "leave: worker 1 done" in err
    summary = json.loads(out)
    assert summary["status"] == "finished"
    launched = launch(tmp_path / "launched", params={"h": 4}, steps=10)
    assert summary["state_sha256"] == launched.record["state_sha256"]


def test_who_is_one_too_many_is_refused_and_the_server_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "settle", lambda _threads: None)
    server = start(tmp_path, "server", "--workers", "2", "--model", "mlp")
    with ended(server):
        endpoint = endpoint_of(server)

        def refused(*rank: str) -> str:
            assert run_line(["worker", "--connect", endpoint, *rank]) == 1
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            return str(err).removeprefix(f"sapus: {endpoint}: the server refused: ").rstrip("\n")

        one = client.Client(endpoint, "worker", 1)
        assert refused("--rank", "1") == "rank 1 is taken, or not below 2"
        assert refused("--rank", "2") == "rank 2 is taken, or not below 2"
        other = client.Client(endpoint, "worker")
        assert (one.welcome.rank, other.welcome.rank) == (1, 0)
        assert refused() == "all 2 workers are here already"
        one.close()
        other.close()

        # To the whole group, as `timeout` and batch systems do: the children may be gone before the launcher looks.
        os.killpg(server.process.pid, signal.SIGTERM)
        code, out, err = server.end()
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "sapus: interrupted by SIGTERM before training began"
    assert server.record()["status"] == "interrupted"


def test_a_worker_that_nobody_answers_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.HANDSHAKE_MS == 30_000
    monkeypatch.setattr(client, "HANDSHAKE_MS", 300)
    monkeypatch.setattr(process, "settle", lambda _threads: None)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        assert run_line(["worker", "--connect", endpoint]) == 1
        assert time.monotonic() - begin < 5
    out, err = capsys.readouterr()
    remedy = "start one there with sapus server, or correct the endpoint"
    assert (out, err) == ("", f"sapus: no sapus server answered at {endpoint} within 0.3 s; {remedy}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_that_zeromq_cannot_take() -> None:
    with pytest.raises(RunFailedError, match=r"cannot connect to tcp://\*:5555: Invalid argument"):
        client.Client("tcp://*:5555", "worker")
