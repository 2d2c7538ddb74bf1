"""The link that the server emulates against one that the kernel shapes: rounds a second under both.

    OMP_NUM_THREADS=1 python tests/shaping.py

It needs root, `ip` and `tc`. Server and workers run in two network namespaces. A third one forwards between them, and
there a token bucket (`tc tbf`) holds the rate of either direction. The queue lies behind the hosts, as it does in a
switch: in a host, TCP lets each connection have little data in the queue, so that connections take turns. The emulated
run has its server and workers in the first namespace, on loopback. The model has no arithmetic (`null:ELEMENTS`), a
step takes 20 ms, and a message is on the link for 32 ms.

Kernel and emulation take turns. A figure is the median over the repetitions, with their range. TCP is either tuned
(`TUNED`, `ROUTE`) or as the machine has it. The kernel counts frames and the emulation messages, so that the emulated
rate is that of the payload of full frames; acknowledgements are left out, one per several frames of 9014 bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import polars as pl

from sapus_cli.cluster import ClusterProfile, Link
from sapus_cli.commands.view import Quiet
from sapus_cli.config import RunConfig
from sapus_cli.drivers import by_hand
from sapus_cli.drivers.launch import Launcher, fork_server, loopback
from sapus_cli.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

RATES = {"100mbit": 12.5e6, "1gbit": 125e6}
"""Bytes a second, by the name that tc has for it."""
STRATEGIES: tuple[tuple[str, dict[str, int]], ...] = (("asp", {}), ("local-sgd-async", {"h": 4}), ("bsp", {}))
REPETITIONS = 3
WORKERS = 8
STEP_S = 0.02
MESSAGE_S = 0.032
SECONDS = 4.0
SKIP = 3
"""Rounds that are not counted: the windows of TCP open."""

MTU = 9000
GOODPUT = (MTU - 52) / (MTU + 14)
"""Payload of a frame by its size: IP and TCP take 52 bytes with time stamps, Ethernet 14."""
BURST_S = 0.006
"""Bucket of tbf, in seconds of the rate. With less than 5 ms it does not reach the rate."""
LIMIT = "200mb"
"""Queue of tbf: nothing is ever dropped."""
NETS = ("10.77.0", "10.77.1")
"""Of the server and of the workers."""
FIRST_PORT = 5555
ANSWER_S = 90.0
END_S = 10.0

ROUTE = ("initcwnd", "1000", "initrwnd", "1000", "rto_min", "5s")
"""Of tuned TCP: a message goes out at once from the first one on, and what waits in a queue is not sent again."""
TUNED: dict[str, str] = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_wmem": "4096 16777216 67108864",
    "tcp_rmem": "4096 16777216 67108864",
}
"""Of net.ipv4: a connection does not slow down by itself between messages, and its buffers hold a message."""


@dataclass(frozen=True)
class Case:
    """What one run is asked: by a kernel link if `bytes_per_s` is None, else by an emulated one of that rate."""

    strategy: str
    params: dict[str, int]
    elements: int
    seconds: float
    endpoint: str
    bytes_per_s: float | None


@dataclass
class Comparison:
    """Rounds a second, one number a repetition."""

    kernel: list[float] = field(default_factory=list)
    emulated: list[float] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """Of the emulated median from that of the kernel, as a share of it."""
        return statistics.median(self.emulated) / statistics.median(self.kernel) - 1


def rounds_per_s(pushes: pl.DataFrame) -> float:
    """How often a second as many pushes arrive as there are workers.

    Counted from the end of such a round to the end of another, so that the burst of a barrier is counted whole. The
    first `SKIP` rounds are left out, and so is what comes after the first worker was done.
    """
    done = pushes.group_by("worker").agg(pl.col("t_s").max())["t_s"].to_list()
    times = sorted(t_s for t_s in pushes["t_s"].to_list() if t_s <= min(done))
    ends = times[WORKERS - 1 :: WORKERS][SKIP - 1 :]
    return float((len(ends) - 1) / (ends[-1] - ends[0]))


class Agent:
    """A process of this module in a namespace, which does one thing after the other as it is told, and stays warm."""

    def __init__(self, namespace: str, role: str, tcp: Mapping[str, str]) -> None:
        self._role = role
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, __file__, role, json.dumps(tcp)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    @property
    def out(self) -> IO[str]:
        """Where its answer comes from."""
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, what: object) -> None:
        """Give it something to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What came of it.

        Raises:
            RuntimeError: the process is gone.
        """
        line = self.out.readline()
        if not line:
            code = self._process.wait(END_S)
            self._errors.seek(0)
            raise RuntimeError(f"the {self._role} agent ended with {code}\n{self._errors.read()[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        """End it and all that it has started, which is the group that it leads."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S if sys.exc_info()[0] is None else 0.5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.out.close()
        self._errors.close()


class Bench:
    """Two namespaces with a shaped link between them, and a process in each; from `bench`."""

    def __init__(self, rate: str, server: Agent, workers: Agent) -> None:
        self.rate = RATES[rate]
        self._server = server
        self._workers = workers
        self._port = FIRST_PORT

    def kernel(self, strategy: str, params: dict[str, int], seconds: float) -> float:
        """Rounds a second on the link that the kernel shapes."""
        self._port += 1
        return self._run(strategy, params, seconds, f"tcp://{NETS[0]}.1:{self._port}", None)

    def emulated(self, strategy: str, params: dict[str, int], seconds: float, factor: float = 1.0) -> float:
        """Rounds a second on an emulated link of the same rate, or of `factor` times that."""
        return self._run(strategy, params, seconds, loopback("tcp"), factor * GOODPUT * self.rate)

    def compare(
        self,
        strategy: str,
        params: dict[str, int],
        *,
        seconds: float,
        repetitions: int = REPETITIONS,
        factor: float = 1.0,
    ) -> Comparison:
        """Both in turn."""
        comparison = Comparison()
        for _ in range(repetitions):
            comparison.kernel.append(self.kernel(strategy, params, seconds))
            comparison.emulated.append(self.emulated(strategy, params, seconds, factor))
        return comparison

    def _run(
        self, strategy: str, params: dict[str, int], seconds: float, endpoint: str, bytes_per_s: float | None
    ) -> float:
        elements = round(MESSAGE_S * self.rate / 4)
        self._server.ask(asdict(Case(strategy, params, elements, seconds, endpoint, bytes_per_s)))
        waiting = {self._server.out: self._server}
        if bytes_per_s is None:
            self._workers.ask(endpoint)
            waiting[self._workers.out] = self._workers
        answers: dict[Agent, Any] = {}
        while waiting:
            ready = connection.wait([out.fileno() for out in waiting], ANSWER_S)
            if not ready:
                raise RuntimeError(f"no answer within {ANSWER_S:g} s")
            for out in [out for out in waiting if out.fileno() in ready]:
                agent = waiting.pop(out)
                answers[agent] = agent.answer()
        return float(answers[self._server])


@contextmanager
def namespaces(rate: str, *, tuned: bool) -> Iterator[tuple[str, str]]:
    """Namespaces of the server and of the workers with a link of this rate between them.

    The names hold our process id. A third namespace between them forwards, and holds the queue of either direction.
    """
    server, workers, between = (f"sapus-{what}-{os.getpid()}" for what in ("server", "workers", "link"))
    shape = ("tbf", "rate", rate, "burst", str(round(BURST_S * RATES[rate])), "limit", LIMIT)
    with ExitStack() as stack:
        for name in (server, workers, between):
            _call("ip", "netns", "add", name)
            stack.callback(_call, "ip", "netns", "delete", name)
        for name, net, there in ((server, NETS[0], "veth0"), (workers, NETS[1], "veth1")):
            ends = ("name", "veth0", "netns", name, "type", "veth", "peer", "name", there, "netns", between)
            _call("ip", "link", "add", *ends)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            for where, device, number in ((name, "veth0", 1), (between, there, 2)):
                _call("ip", "-n", where, "address", "add", f"{net}.{number}/24", "dev", device)
                _call("ip", "-n", where, "link", "set", device, "up", "mtu", str(MTU))
            _call("ip", "-n", name, "route", "add", "default", "via", f"{net}.2", *(ROUTE if tuned else ()))
            _call("ip", "netns", "exec", between, "tc", "qdisc", "add", "dev", there, "root", *shape)
        _call("ip", "netns", "exec", between, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        yield server, workers


@contextmanager
def bench(rate: str, *, tuned: bool = True) -> Iterator[Bench]:
    """A link of a rate, and a process at either end of it, with TCP tuned or as the machine has it."""
    tcp = TUNED if tuned else {}
    with ExitStack() as stack:
        first, second = stack.enter_context(namespaces(rate, tuned=tuned))
        server, workers = Agent(first, "server", tcp), None
        stack.callback(server.end)
        workers = Agent(second, "workers", tcp)
        stack.callback(workers.end)
        yield Bench(rate, server, workers)


def missing() -> str | None:
    """Why there can be no shaped link here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no {program} here"
    try:
        with namespaces("100mbit", tuned=True):
            pass
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd[:6])}: {error.stderr.strip()}"
    return None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _serve() -> None:
    for line in sys.stdin:
        case = Case(**json.loads(line))
        profile = ClusterProfile(step_s=STEP_S, link=Link(case.bytes_per_s))
        config = RunConfig(
            strategy=case.strategy,
            params=dict(case.params),
            workers=WORKERS,
            dataset="null",
            model=f"null:{case.elements}",
            seconds=case.seconds,
            batch_size=1,
            eval_every_s=1000,
            cluster=profile,
        )
        with tempfile.TemporaryDirectory() as results:
            launcher = Launcher(
                config, Path(results), None, Quiet, endpoint=case.endpoint, own_workers=case.endpoint == loopback("tcp")
            )
            pushes = read_trace(launcher.run().folder, "pushes")
        _say(json.dumps(rounds_per_s(pushes)))


def _work() -> None:
    context = fork_server(1)
    for line in sys.stdin:
        endpoint = json.loads(line)
        processes = [context.Process(target=by_hand.join, args=(endpoint, -1, None, 1)) for _ in range(WORKERS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"workers ended with {[process.exitcode for process in processes]}")
        _say(json.dumps("done"))


def _agent(role: str, tcp: dict[str, str]) -> None:
    for key, value in tcp.items():
        Path("/proc/sys/net/ipv4", key).write_text(value)
    (_serve if role == "server" else _work)()


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one is not to end the cleaning up
    sys.exit(1)


def main() -> None:
    """Measure all strategies at all rates, with TCP tuned and as it is, and print a Markdown table."""
    signal.signal(signal.SIGTERM, _stop)
    if reason := missing():
        sys.exit(f"shaping: {reason}")
    own = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    _say("| TCP | rate | strategy | tbf, rounds/s | emulated, rounds/s | difference, % |")
    _say("| --- | --- | --- | --- | --- | --- |")
    for name, tuned in ((f"tuned, {TUNED['tcp_congestion_control']}", True), (f"default, {own}", False)):
        for rate in RATES:
            with bench(rate, tuned=tuned) as both:
                for strategy, params in STRATEGIES:
                    comparison = both.compare(strategy, params, seconds=20)
                    shown = " ".join([f"`{strategy}`", *(f"`{key}={value}`" for key, value in params.items())])
                    spreads = (_spread(comparison.kernel), _spread(comparison.emulated))
                    cells = (name, rate, shown, *spreads, f"{100 * comparison.difference:+.1f}")
                    _say(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _agent(sys.argv[1], json.loads(sys.argv[2]))
    else:
        main()
