"""What it costs to be ready for faults, and how long they last.

    python tests/bench_recovery.py

Beats: CPU time of a server whose workers are there and do nothing but beat, with its I/O thread. Checkpoints: how long
the server stands still for one. Faults: from the death of a process until the next push of the worker that died, or of
any worker after the server's death, in real runs of four workers that take 5 ms a step; the pause of 0.5 s before a
restart is in it. Medians with ranges.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from processes import start

from sapus_cli.checkpoint import Checkpoints
from sapus_cli.protocol import ServerCore
from sapus_cli.traces import read_trace
from strategies.asp import Asp

WORKERS = 8
SECONDS = 20.0
ROUNDS = 5
SIZES = (100_000, 1_000_000, 25_000_000)

CLIENTS = """
import sys, time
from sapus_cli.drivers.client import Client
clients = [Client(sys.argv[1], "worker", rank) for rank in range(int(sys.argv[2]))]
print("here", flush=True)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    for client in clients:
        client.receive(None, 0)
    time.sleep(0.05)
"""


def shown(values: list[float], factor: float = 1.0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{factor * middle:.3g} ({factor * low:.3g} to {factor * high:.3g})"


def beats(every_s: float) -> float:
    """Share of a core that a server uses for workers that only beat."""
    from test_recovery import Serving  # noqa: PLC0415

    from sapus_cli.drivers import server  # noqa: PLC0415

    server.MOST_BEAT_S = every_s
    with tempfile.TemporaryDirectory() as folder:
        serving = Serving(Path(folder), Asp(), WORKERS)
        serving.start()
        words = [sys.executable, "-c", CLIENTS, serving.endpoint, str(WORKERS), str(SECONDS + 1)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            clients.stdout.readline()
            before_s, begun_s = time.process_time(), time.monotonic()
            time.sleep(SECONDS)
            used_s = time.process_time() - before_s
            share = used_s / (time.monotonic() - begun_s)
        serving.kill()
        serving.trace.close()
    return share


def checkpoint_s(elements: int) -> list[float]:
    """Seconds that writing takes, the first one left out."""
    core = ServerCore(Asp(), torch.randn(elements), 1)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        for _ in range(ROUNDS + 1):
            begun_s = time.perf_counter()
            checkpoints.save(core.saved())
            taken.append(time.perf_counter() - begun_s)
    return taken[1:]


def fault_s(role: str) -> float:
    """Seconds until training goes on."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("run", "-s", "local-sgd-async", "-p", "h=2", "--dataset", "null", "--model", "null:100000", "-w", "4")
        run = start(Path(folder), *words, "--step-time", "5ms", "--seconds", "5", "--checkpoint-every", "1")
        run.wait_for_pushes()
        time.sleep(1)
        os.kill(run.pid(role), signal.SIGKILL)
        code, _, err = run.end(60)
        assert code == 0, err
        events, pushes = read_trace(run.folder, "events"), read_trace(run.folder, "pushes")
        died_s = float(events.filter(events["kind"] == "crash")["t_s"][0])
        later = pushes.filter(pushes["t_s"] > died_s)
        if role != "server":
            later = later.filter(later["worker"] == int(role.rpartition("-")[2]))
        return float(later["t_s"].min()) - died_s  # type: ignore[arg-type]


def main() -> None:
    """Print all figures."""
    torch.set_num_threads(1)
    with_beats, without = [], []
    for _ in range(3):
        without.append(beats(1000.0))
        with_beats.append(beats(1.0))
    print(f"server CPU for {WORKERS} workers that only beat, % of a core: {shown(with_beats, 100)}")
    print(f"the same without beats:                                 {shown(without, 100)}")
    for elements in SIZES:
        print(f"a checkpoint of {elements:,} parameters, ms: {shown(checkpoint_s(elements), 1000)}")
    for role in ("worker-1", "server"):
        print(f"{role} killed, until training goes on, s: {shown([fault_s(role) for _ in range(ROUNDS)])}")


if __name__ == "__main__":
    main()
