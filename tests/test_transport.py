"""How messages travel: the same bits over every transport, memory that nobody can leave behind, narrow wires."""

from __future__ import annotations

import gc
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
import torch
from processes import launch, start

from sapus_cli.analysis import setting_of
from sapus_cli.cluster import ClusterProfile
from sapus_cli.codec import PROTOCOL_VERSION, Hello, State
from sapus_cli.drivers.launch import loopback
from sapus_cli.drivers.server import Server
from sapus_cli.drivers.transport import Segment, prefer_reno
from sapus_cli.errors import RunFailedError
from sapus_cli.protocol import Outgoing
from sapus_cli.strategy import Setting
from sapus_cli.traces import read_run, read_trace
from strategies.asp import Asp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inside import Inside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's")


def shared_memory(pids: Iterable[int]) -> list[str]:
    """Mappings of shared segments in these processes."""
    found = []
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found += [line for line in maps.splitlines() if "memfd:sapus" in line]
    return found


def test_what_one_side_writes_the_other_reads() -> None:
    ours = Segment.create(3, torch.float32)
    theirs = Segment.open(ours.path, 3, torch.float32)
    ours.state.copy_(torch.tensor([1.0, 2.0, 3.0]))
    theirs.push.copy_(torch.tensor([4.0, 5.0, 6.0]))
    assert theirs.state.tolist() == [1.0, 2.0, 3.0]
    assert ours.push.tolist() == [4.0, 5.0, 6.0]
    path = ours.path
    ours.close()
    ours.close()
    with pytest.raises(RunFailedError, match="use --transport tcp"):
        Segment.open(path, 3, torch.float32)
    assert ours.push.tolist() == [4.0, 5.0, 6.0], "the memory outlives its descriptor"


def test_nobody_can_take_the_memory_away() -> None:
    segment = Segment.create(1024, torch.bfloat16)
    with Path(segment.path).open("r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    segment.close()


def test_the_memory_goes_with_its_last_user() -> None:
    segment = Segment.create(10**6, torch.float32)
    segment.push.fill_(1.0)
    segment.close()
    kept = segment.push
    del segment
    gc.collect()
    assert kept.sum() == 10**6
    assert shared_memory([os.getpid()])
    del kept
    gc.collect()
    assert not shared_memory([os.getpid()])


def test_a_segment_of_another_size_or_place_is_refused(tmp_path: Path) -> None:
    segment = Segment.create(10, torch.float32)
    with pytest.raises(RunFailedError, match="cannot open the shared memory"):
        Segment.open(segment.path, 10**6, torch.float32)
    segment.close()
    (tmp_path / "file").write_bytes(bytes(80))
    with pytest.raises(RunFailedError, match="no place for it"):
        Segment.open(str(tmp_path / "file"), 10, torch.float32)


def test_connections_of_a_loopback_endpoint_do_not_pace() -> None:
    def control(connection: socket.socket) -> bytes:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    def paced(connection: socket.socket) -> socket.socket:
        try:
            for name in (b"reno", b"bbr"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pytest.skip("reno and bbr are not both there for us")
        return connection

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, listening.accept()[0] as far:
            paced(near), paced(far)
            prefer_reno("ipc://@somewhere")
            prefer_reno(f"tcp://10.0.0.1:{port}")
            prefer_reno(f"tcp://127.0.0.1:{port + 1}")
            assert control(near) == control(far) == b"bbr"
            prefer_reno(f"tcp://localhost:{port}")
            assert control(near) == control(far) == b"reno"
            cubic = b"cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_bytes()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic" if cubic else b"reno")
            prefer_reno(f"tcp://127.0.0.1:{port}")
            assert control(near) == (b"cubic" if cubic else b"reno"), "what does not pace stays"
            near.sendall(b"still here")
            assert far.recv(16) == b"still here"


def test_every_transport_has_an_endpoint_that_leaves_no_file() -> None:
    assert loopback("tcp") == "tcp://127.0.0.1:*"
    assert loopback("shm").startswith("ipc://@sapus-")
    assert loopback("ipc") != loopback("ipc")


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_every_transport_gives_the_same_bits_and_counts_the_same_bytes(tmp_path: Path, wire: str) -> None:
    records = {
        transport: launch(tmp_path, strategy="bsp", workers=3, steps=12, transport=transport, wire=wire).record
        for transport in ("tcp", "ipc", "shm")
    }
    assert len({record["state_sha256"] for record in records.values()}) == 1
    d, width = records["tcp"]["model"]["elements"], 4 if wire == "float32" else 2
    for transport, record in records.items():
        totals = record["totals"]
        assert totals["pushes"] == 36
        # 36 pushes, 3 first states and 36 replies; a header has less than 400 bytes, welcome with the config below 3000
        assert 36 * d * width < totals["rx_bytes"] < 36 * (d * width + 400)
        assert 39 * d * width < totals["tx_bytes"] < 39 * (d * width + 400) + 3 * 3000
        assert totals["rx_frames"] == (36 if transport == "shm" else 72) + 3 * 3
    assert not list(Path("/dev/shm").glob("*sapus*"))  # noqa: S108 - nothing is made there


@pytest.mark.parametrize(
    ("shared", "elements", "copied"), [(False, 1 << 20, True), (False, 9, False), (True, 1 << 20, False)]
)
def test_what_goes_to_many_is_a_copy_of_its_own(*, shared: bool, elements: int, copied: bool) -> None:
    server = SimpleNamespace(_elements=elements, _dtype=torch.float32, _shared=shared, _profile=ClusterProfile())
    x = torch.zeros(elements)
    replies = [Outgoing(rank, State(version=0, t_s=0.0), x, None) for rank in range(2)]
    snapshot = Server._snapshot(cast("Server", server), replies)
    assert (snapshot is not None) is copied
    x.fill_(1.0)
    assert snapshot is None or not snapshot.any()
    assert Server._snapshot(cast("Server", server), replies[:1]) is None, "the socket copies what goes to one"
    replies[1] = replies[1]._replace(vector=x.clone())
    assert Server._snapshot(cast("Server", server), replies) is None


def test_the_path_of_a_worker_that_is_replaced_before_it_pulled_is_taken_back() -> None:
    class Deaf:
        """A socket that nobody hears."""

        def send(self, *_: object, **__: object) -> None:
            pass

        def getsockopt_string(self, _: int) -> str:
            return loopback("shm")

    nothing: Any = None
    server = Server(
        cast("Any", Deaf()),
        Asp(),
        torch.zeros(3),
        n_workers=1,
        profile=ClusterProfile(),
        setting=Setting(),
        fingerprint="f",
        config=b"",
        shared=True,
        launcher=cast("Any", SimpleNamespace(poll=lambda: False)),
        pushes=nothing,
        target_accuracy=None,
    )
    paths = []
    for identity, incarnation in ((b"first", 1), (b"second", 2)):
        server._greet(identity, Hello(protocol=PROTOCOL_VERSION, role="worker", rank=0, incarnation=incarnation), 10)
        segment = server._workers[0].segment
        assert segment is not None
        paths.append(Path(segment.path))
        assert paths[-1].exists()
        server._attendance.lose(0)
        server._workers[0].left = True
    assert [path.exists() for path in paths] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_large_vectors_give_the_same_bits_without_a_copy(tmp_path: Path, wire: str) -> None:
    # 8.8 or 4.4 MB: beyond what is copied into the socket.
    kind = {"strategy": "bsp", "dataset": "null", "model": "null:2200000", "workers": 3, "steps": 6, "wire": wire}
    tcp, shm = (launch(tmp_path, transport=transport, **kind).record for transport in ("tcp", "shm"))
    assert tcp["state_sha256"] == shm["state_sha256"]
    assert abs(shm["totals"]["tx_bytes"] - tcp["totals"]["tx_bytes"]) < 1000, "headers"
    assert tcp["totals"]["tx_frames"] - shm["totals"]["tx_frames"] == 18 + 3, "a vector with each state"


@pytest.mark.slow
def test_a_wire_makes_the_same_bits_in_virtual_time(tmp_path: Path, inside: Inside) -> None:
    real = launch(tmp_path, strategy="local-sgd", params={"h": 2}, steps=8, wire="bfloat16").record
    done = inside(
        *("simulate", "-s", "local-sgd", "-p", "h=2", "-w", "2", "--model", "mlp", "--steps", "8"),
        *("--wire", "bfloat16", "--step-time", "1ms", "--name", "virtual", "-q"),
    )
    assert done.returncode == 0, done.stderr
    virtual = read_run(tmp_path / "results" / "virtual")
    assert virtual["state_sha256"] == real["state_sha256"]
    d = virtual["model"]["elements"]
    bytes_in = read_trace(tmp_path / "results" / "virtual", "pushes")["bytes_in"]
    assert ((bytes_in > 2 * d) & (bytes_in < 2 * d + 400)).all()


@pytest.mark.slow
def test_no_memory_is_left_when_all_processes_are_killed(tmp_path: Path) -> None:
    run = start(tmp_path, "run", "-s", "asp", "-w", "2", "--seconds", "60", "--transport", "shm")
    run.wait_for_pushes()
    family = run.family()
    mapped = shared_memory(process.pid for process in family)
    assert len(mapped) == 4, "two segments, each mapped by the server and its worker"
    for process in [psutil.Process(run.process.pid), *family]:
        process.kill()
    run.process.communicate(timeout=10)
    psutil.wait_procs(family, timeout=10)
    everywhere = shared_memory(process.pid for process in psutil.process_iter())
    assert not {line.split()[4] for line in mapped} & {line.split()[4] for line in everywhere}, "no inode of them"


def test_a_server_that_has_no_memory_to_share_refuses_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.ftruncate", none)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="Too many"):
        Segment.create(10, torch.float32)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--transport", "shm", "--port", "5555"], "--port 5555: shm has no ports; leave one of the two out"),
        (["--transport", "rdma"], "'rdma' is not one of 'tcp', 'ipc', 'shm'"),
        (["--wire", "int8"], "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tmp_path: Path, arguments: list[str], says: str, inside: Inside) -> None:
    done = inside("run", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_of_before_there_was_a_choice_is_like_one_of_today() -> None:
    class Recorded:
        clock = "real"

        def __init__(self, **config: Any) -> None:
            self.record = {"config": {"lr": 0.1, **config}}

    old, new = Recorded(), Recorded(wire="float32", transport="tcp")
    assert setting_of(old) == setting_of(new)  # type: ignore[arg-type]
    assert setting_of(new) != setting_of(Recorded(wire="float16", transport="tcp"))  # type: ignore[arg-type]
