"""The bytes that the server counts, against those that the kernel counted for the same connections."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import launch

from sapus_cli import traces
from sapus_cli.cluster import ClusterProfile
from sapus_cli.codec import Leave, State
from sapus_cli.config import Recovery
from sapus_cli.drivers.client import Client
from sapus_cli.drivers.control import Halt, tell
from sapus_cli.drivers.server import Server, Traffic, bind
from sapus_cli.errors import RemoteProtocolError
from sapus_cli.protocol import WorkerCore
from sapus_cli.strategy import Setting
from sapus_cli.traces import read_trace
from strategies.local_sgd_async import LocalSgdAsync

BYTES_ACKED, BYTES_RECEIVED = 120, 128
"""Offsets into Linux's struct tcp_info."""
SHORT_FRAME, LONG_FRAME = 2, 9
"""ZeroMQ's own bytes before a frame of up to 255 bytes, and before a longer one."""


def kernel_bytes(port: int) -> tuple[int, int]:
    """Bytes that this process sent to, and received from, a port on loopback, as its kernel counted them."""
    sent = received = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
            if not str(Path(f"/proc/self/fd/{duplicate}").readlink()).startswith("socket:"):
                os.close(duplicate)
                continue
            sock = socket.socket(fileno=duplicate)
        except OSError:
            continue
        with sock:
            try:
                if sock.family != socket.AF_INET or sock.getpeername()[1] != port:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                continue
            sent += struct.unpack_from("Q", info, BYTES_ACKED)[0]
            received += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return sent, received


def quiet(port: int) -> tuple[int, int]:
    """The same, once it has stayed so for a second: the first beats have gone out, however busy the machine is."""
    last, since = kernel_bytes(port), time.monotonic()
    while time.monotonic() < since + 1:
        time.sleep(0.05)
        now = kernel_bytes(port)
        if now != last:
            last, since = now, time.monotonic()
    return last


def test_the_offsets_are_right() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, listener.accept()[0] as theirs:
            before = kernel_bytes(port)
            ours.sendall(b"x" * 1000)
            assert len(theirs.recv(1000, socket.MSG_WAITALL)) == 1000
            theirs.sendall(b"x" * 10)
            assert len(ours.recv(10, socket.MSG_WAITALL)) == 10
            after = kernel_bytes(port)
    assert (after[0] - before[0], after[1] - before[1]) == (1000, 10)


@pytest.mark.parametrize("d", [10, 100, 50_000])
def test_counted_bytes_are_the_kernel_s_up_to_framing(tmp_path: Path, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapus_cli.drivers.server.MOST_BEAT_S", 100.0)  # beats are not counted
    strategy = LocalSgdAsync(h=1)
    listening, endpoint = bind("tcp://127.0.0.1:*", d)
    port = int(endpoint.rpartition(":")[2])
    ours, theirs = multiprocessing.Pipe()
    trace = traces.Trace(tmp_path / "pushes.csv", traces.push_columns(strategy.columns))
    server = Server(
        listening,
        strategy,
        torch.zeros(d),
        n_workers=2,
        profile=ClusterProfile(),
        setting=Setting(),
        fingerprint="f",
        config=b"{}",
        launcher=theirs,
        pushes=trace,
        target_accuracy=None,
        recovery=Recovery(worker_timeout_s=400.0),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    clients = [Client(endpoint, "worker", rank) for rank in range(2)]
    evaluator = Client(endpoint, "evaluator")
    with pytest.raises(RemoteProtocolError, match="the evaluator is here already"):
        Client(endpoint, "evaluator")
    evaluator.close()
    cores = [WorkerCore(strategy, torch.zeros(d), rank) for rank in range(2)]
    counted_before = settled(server, 2)
    kernel_before = quiet(port)

    for client, core in zip(clients, cores, strict=True):
        client.send(core.pull("f"))
    for client, core in zip(clients, cores, strict=True):
        take(client, core)
    for _ in range(20):
        for client, core in zip(clients, cores, strict=True):
            core.local.add_(1.0)
            push = core.after_step(1.0, 32, 0.1, 0.0, last=False)
            assert push is not None
            client.send(push, core.outgoing)
            take(client, core)
    counted_after = settled(server, 2 + 2 * 42)
    kernel_after = kernel_bytes(port)
    for client in clients:
        client.send(Leave())
    tell(ours, Halt())
    thread.join(10)
    assert not thread.is_alive()
    for client in clients:
        client.close()
    listening.close()
    trace.close()
    assert torch.allclose(server.core.state.x, torch.full((d,), 20.0)), "40 pushes of 1 at weight 1/2"

    # Per worker 21 headers with 20 vectors to the server (a pull and 20 pushes), 21 headers with 21 vectors back.
    vector_frame = LONG_FRAME if 4 * d > 255 else SHORT_FRAME
    in_frames, out_frames = 2 * (21 * SHORT_FRAME + 20 * vector_frame), 2 * (21 * SHORT_FRAME + 21 * vector_frame)
    assert kernel_after[0] - kernel_before[0] == counted_after.rx_bytes - counted_before.rx_bytes + in_frames
    assert kernel_after[1] - kernel_before[1] == counted_after.tx_bytes - counted_before.tx_bytes + out_frames
    assert counted_after.rx_frames - counted_before.rx_frames == 2 * 41
    assert counted_after.tx_frames - counted_before.tx_frames == 2 * 42


def counted(server: Server) -> Traffic:
    """What the server has counted of its workers."""
    workers = [peer.traffic for peer in server._workers.values()]
    return Traffic(*(sum(getattr(t, name) for t in workers) for name in Traffic.__slots__))


def settled(server: Server, tx_frames: int) -> Traffic:
    """What it has counted when this many frames are out: it counts a reply only after the socket has it."""
    deadline = time.monotonic() + 10
    while counted(server).tx_frames < tx_frames and time.monotonic() < deadline:
        time.sleep(0.01)
    return counted(server)


def take(client: Client, core: WorkerCore) -> None:
    """Receive a state."""
    message = client.receive(core.incoming, 10_000)
    assert isinstance(message, State)
    core.on_state(message, 0.0)


def test_a_run_writes_down_what_it_counted(tmp_path: Path) -> None:
    outcome = launch(tmp_path, strategy="asp", steps=30)
    pushes, totals = read_trace(outcome.folder, "pushes"), outcome.record["totals"]
    d = outcome.record["model"]["elements"]
    headers = pushes["bytes_in"] - 4 * d
    assert headers.min() > 50
    assert headers.max() < 255
    assert totals["rx_frames"] == 2 * len(pushes) + 2 * 3, "hello, pull and leave of two workers beside the pushes"
    assert totals["tx_frames"] == 2 * len(pushes) + 2 * 3, "welcome, and the first state in two frames"
