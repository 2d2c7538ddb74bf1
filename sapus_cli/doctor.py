"""Whether this machine can run sapus well: what `sapus doctor` looks at.

A check is made of a probe, which gets values from the machine, and a judge, which makes a verdict of values and does
nothing else. Probes leave nothing behind and listen on loopback only. What is heavy is imported when it is needed;
torch is imported by a child process, so that a broken one is a finding and not the end.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import ipaddress
import itertools
import json
import math
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

LOOPBACK = "127.0.0.1"
SHM = Path("/dev/shm")  # noqa: S108 - where Linux has its shared memory
MIB, GIB = 1 << 20, 1 << 30
OTHER_PROCESSES = 2
"""Processes of a run beside its workers that compute: the server and the evaluator."""
RUN_BYTES, PROCESS_BYTES = 512 * MIB, 32 * MIB
"""Memory of a run with a small model on CPUs: torch, which its processes share, and what each has of its own."""
CUDA_BYTES = 512 * MIB
"""GPU memory that a process takes before it has computed anything."""
RUN_FILES, WORKER_FILES = 64, 3
"""Open files of the launcher, the process that has most: at first, and for each worker."""
LEAST_FREE_BYTES, FEW_FREE_BYTES = 100 * MIB, GIB
SLOW_ROUND_TRIP_S = 1e-3
LATE_SLEEP_S = 1e-3
COARSE_CLOCK_S = 1e-4
CLOCK_STEP_S = 1e-3
OLDEST_LIBZMQ = (4, 3)
ROUND_TRIPS, SLEEPS, CLOCK_READINGS = 100, 50, 20
SLEEP_S = 1e-3
ANSWER_MS = 2000
NAME_SERVICE_S = 3.0
TORCH_S = 120.0


class Level(StrEnum):
    """How bad it is: a failure keeps runs from working, a warning makes them slow, or their figures doubtful."""

    ok = "ok"
    warning = "warning"
    failure = "failure"


class Verdict(NamedTuple):
    """What a judge says: how bad it is, the values that were found, and what to do, if anything."""

    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """A verdict with the name of its check."""

    name: str
    level: Level
    found: str
    remedy: str


class Check(NamedTuple):
    """A name and what makes the verdict."""

    name: str
    verdict: Callable[[], Verdict]


@dataclass(frozen=True)
class Question:
    """What is asked: can a run of so many workers, with its folder there, listen at this port of loopback?

    `port` is None for any free one.
    """

    results: Path
    workers: int
    port: int | None


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Make the checks, one after the other. One that raises is a failure, and the rest goes on."""
    for name, verdict in checks:
        try:
            level, found, remedy = verdict()
        except ImportError as error:
            level, found, remedy = Level.failure, _line(f"not known: {error}"), "see packages"
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the other checks can still tell
            level = Level.failure
            found = _line(f"the check itself failed: {type(error).__name__}: {error}")
            remedy = "this was not foreseen; please report it with the line above"
        yield Finding(name, level, found, remedy)


def checks(question: Question) -> list[Check]:
    """All checks, in the order in which they are shown."""
    workers = question.workers
    torch = functools.cache(ask_torch)
    limits = functools.cache(cgroup_limits)
    return [
        Check("packages", lambda: judge_packages(*requirements(), installed)),
        Check("torch", lambda: judge_torch(torch())),
        Check("GPUs", lambda: judge_gpus(torch(), nvml_names(), workers)),
        Check("libzmq", lambda: judge_libzmq(*zmq_facts())),
        Check("port", lambda: judge_port(question.port, port_error(question.port))),
        Check("round trip", lambda: judge_round_trips(round_trips(question.port))),
        Check("congestion", lambda: judge_congestion(first_line(Path("/proc/sys/net/ipv4/tcp_congestion_control")))),
        Check("host name", lambda: judge_host(*host_addresses())),
        Check("interfaces", lambda: judge_interfaces(interfaces())),
        Check("cores", lambda: judge_cores(allowed_cores(), limits().cores, workers)),
        Check("memory", lambda: judge_memory(*memory(), limits(), workers)),
        Check("open files", lambda: judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE), workers)),
        Check("children", lambda: judge_children(child_error(), hidepid(Path("/proc/self/mounts")))),
        Check("shared memory", lambda: judge_shared(shm_free(SHM), memfd=has_memfd(), linux=sys.platform == "linux")),
        Check("wall clock", lambda: judge_wall_clock(*clock_steps())),
        Check("timer", lambda: judge_timer(timer_resolution(), late_sleeps())),
        Check("results", lambda: judge_folder(try_folder(question.results), "give another folder with --results")),
        Check("temporary", lambda: judge_folder(try_temporary(), "set TMPDIR to another folder")),
        Check("cache", lambda: judge_cache(torch(), try_cache(torch()))),
    ]


# --- Packages, torch, GPUs ---


class Required(NamedTuple):
    """A package that sapus needs, and the oldest version that will do."""

    package: str
    oldest: str


def requirements() -> tuple[list[Required], dict[str, list[str]]]:
    """What sapus needs, and the packages of its extras for users, by extra."""
    needed, extras = [], dict[str, list[str]]()
    for line in importlib.metadata.requires("sapus") or []:
        match = re.match(r"([\w.-]+?)\s*>=\s*([\d.]+)", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if match and not extra:
            needed.append(Required(match[1], match[2]))
        elif match and extra and extra[1] not in {"test", "dev"}:
            extras.setdefault(extra[1], []).append(match[1])
    return needed, extras


def installed(package: str) -> str | None:
    """The version of a package, None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_packages(
    needed: Sequence[Required], extras: dict[str, list[str]], version_of: Callable[[str], str | None]
) -> Verdict:
    """Whether all that is needed is there and new enough; the extras that are missing are named."""
    faults, wanted = [], []
    for package, oldest in needed:
        version = version_of(package)
        if version is not None and _numbers(version) >= _numbers(oldest):
            continue
        faults.append(f"{package} is missing" if version is None else f"{package} {version} is older than {oldest}")
        wanted.append(f"'{package}>={oldest}'")
    if faults:
        return Verdict(Level.failure, "; ".join(faults), f"python -m pip install --upgrade {' '.join(wanted)}")
    there = [extra for extra, packages in extras.items() if all(version_of(package) for package in packages)]
    absent = [extra for extra in extras if extra not in there]
    found = f"all {len(needed)} that are needed; extras: {', '.join(there) or 'none'}"
    if not absent:
        return Verdict(Level.ok, found)
    return Verdict(Level.ok, found, f"for more: python -m pip install 'sapus[{','.join(absent)}]'")


class Gpu(NamedTuple):
    """A GPU as torch sees it; memory in bytes. `error` is why it cannot be used, or empty."""

    name: str
    total_bytes: int
    free_bytes: int
    error: str = ""


@dataclass(frozen=True)
class Torch:
    """What a child process that imports torch has to say.

    Attributes:
        error: why it could not; the rest is then empty.
        torchvision_error: why torchvision cannot be imported, or empty.
        cuda: the CUDA version torch is built for, None for a build without.
        hip: the same of ROCm.
        cuda_error: why the GPUs that there are cannot be counted, or empty.
        cache: the folder of prepared data sets; if there is none, `cache_error` says why.
    """

    error: str = ""
    version: str = ""
    torchvision: str = ""
    torchvision_error: str = ""
    cuda: str | None = None
    hip: str | None = None
    cuda_error: str = ""
    gpus: tuple[Gpu, ...] = ()
    cache: str = ""
    cache_error: str = ""


_ASK = """
import json, sys
import torch
said = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": []}
try:
    import torchvision
    said["torchvision"] = torchvision.__version__
except Exception as error:
    said["torchvision_error"] = f"{type(error).__name__}: {error}"
try:
    from sapus_cli.workloads.data import cache_folder
    said["cache"] = str(cache_folder())
except Exception as error:
    said["cache_error"] = str(error)
try:
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
except Exception as error:
    gpus = ()
    said["cuda_error"] = f"{type(error).__name__}: {error}"
for i in gpus:
    name = f"GPU {i}"
    try:
        name = torch.cuda.get_device_name(i)
        said["gpus"].append((name, *reversed(torch.cuda.mem_get_info(i))))
    except Exception as error:
        said["gpus"].append((name, 0, 0, f"{type(error).__name__}: {error}"))
print("\\n" + json.dumps(said))
"""


def ask_torch(program: str = _ASK, timeout_s: float = TORCH_S) -> Torch:
    """Import torch in a child process and hear what it says; what goes wrong is in the answer."""
    try:
        # torch makes a folder for its compiler, unless it is told of one. -P: a torch.py of the working directory is
        # not meant.
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={"TORCHINDUCTOR_CACHE_DIR": os.sep} | os.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"not imported within {timeout_s:g} s")
    except OSError as error:
        return Torch(error=_line(f"the attempt could not be made: {error}"))
    if done.returncode != 0:
        return Torch(error=_line((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]))
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Torch(**{**said, "gpus": tuple(Gpu(*gpu) for gpu in said.get("gpus", ()))})


def judge_torch(torch: Torch) -> Verdict:
    """Whether torch and torchvision can be imported."""
    again = "python -m pip install --force-reinstall torch torchvision"
    if torch.error:
        return Verdict(Level.failure, f"torch cannot be imported: {torch.error}", again)
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    found = f"torch {torch.version} ({build}), torchvision {torch.torchvision or 'missing'}"
    if torch.torchvision_error:
        return Verdict(Level.warning, f"{found}: {_line(torch.torchvision_error)}", again)
    return Verdict(Level.ok, found)


def nvml_names(nvml: Any = None) -> list[str] | None:
    """The GPUs that NVIDIA's management library knows of; None if it does not answer.

    Args:
        nvml: the module `pynvml`, or what stands in for it.
    """
    if nvml is None:
        import pynvml  # noqa: PLC0415 - only this check needs it

        nvml = pynvml
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def judge_gpus(torch: Torch, nvml: Sequence[str] | None, workers: int) -> Verdict:
    """Whether the GPUs of this machine, if any, can be used, watched, and hold all processes."""
    if torch.error:
        return Verdict(Level.warning, "not known: torch cannot be imported", "see torch")
    if torch.cuda_error:
        return _no_gpu_works(torch.cuda_error)
    if not torch.gpus:
        return _judge_no_gpus(nvml, cuda=torch.cuda is not None)
    return _judge_broken(torch.gpus) or _judge_load(torch.gpus, workers) or _judge_watch(torch, nvml)


def _no_gpu_works(why: str) -> Verdict:
    return Verdict(Level.failure, f"no GPU can be used: {_line(why)}", "mend the driver, or run with --device cpu")


def _judge_broken(gpus: Sequence[Gpu]) -> Verdict | None:
    """The verdict if a GPU cannot be used."""
    broken = [f"GPU {i} ({gpu.name}): {gpu.error}" for i, gpu in enumerate(gpus) if gpu.error]
    if not broken:
        return None
    if len(broken) == len(gpus):
        return _no_gpu_works("; ".join(broken))
    good = ",".join(str(i) for i, gpu in enumerate(gpus) if not gpu.error)
    return Verdict(
        Level.warning,
        f"{len(broken)} of {len(gpus)} cannot be used: {_line('; '.join(broken))}",
        f"hide it from runs: CUDA_VISIBLE_DEVICES={good}, where that is not set yet",
    )


def _judge_load(gpus: Sequence[Gpu], workers: int) -> Verdict | None:
    """The verdict if a GPU cannot hold its processes: workers take turns, the evaluator is on the first."""
    for i, gpu in enumerate(gpus):
        processes = len(range(i, workers, len(gpus))) + (i == 0)
        if gpu.free_bytes < processes * CUDA_BYTES:
            return Verdict(
                Level.warning,
                f"{_shown(gpus)}; GPU {i} is to hold {processes} of the processes, which take "
                f"{_gib(processes * CUDA_BYTES)} before they compute",
                "free the GPU of other processes, or give fewer --workers",
            )
    return None


def _judge_watch(torch: Torch, nvml: Sequence[str] | None) -> Verdict:
    """Whether the load of GPUs that work can be read."""
    found = _shown(torch.gpus)
    if torch.hip:
        return Verdict(Level.ok, f"{found}; under ROCm resources.csv does not tell their load")
    if not nvml:
        return Verdict(
            Level.warning,
            f"{found}; NVML does not answer, so resources.csv will not tell their load",
            "install the driver's libnvidia-ml",
        )
    return Verdict(Level.ok, found)


def _shown(gpus: Sequence[Gpu]) -> str:
    return "; ".join(f"{gpu.name}, {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free" for gpu in gpus)


def _judge_no_gpus(nvml: Sequence[str] | None, *, cuda: bool) -> Verdict:
    """Whether torch, built for CUDA or not, sees no GPU because there is none."""
    if not nvml:
        return Verdict(Level.ok, "none; workers compute on CPUs")
    remedy = (
        "see whether CUDA_VISIBLE_DEVICES hides them, and whether the driver is new enough"
        if cuda
        else "install a torch built for CUDA, or run on CPUs"
    )
    return Verdict(Level.warning, f"{len(nvml)} ({nvml[0]}), but torch sees none", remedy)


# --- Sockets and addresses ---


def zmq_facts() -> tuple[str, str, bool]:
    """Versions of pyzmq and libzmq, and whether libzmq can encrypt."""
    import zmq  # noqa: PLC0415 - heavy imports wait until they are needed

    return zmq.pyzmq_version(), zmq.zmq_version(), bool(zmq.has("curve"))


def judge_libzmq(pyzmq: str, libzmq: str, curve: bool) -> Verdict:  # noqa: FBT001 - one of three facts
    """Whether libzmq is new enough, and can encrypt."""
    found = f"pyzmq {pyzmq}, libzmq {libzmq}, {'with' if curve else 'without'} CURVE"
    wheel = "install pyzmq from its wheel: python -m pip install --force-reinstall --only-binary pyzmq pyzmq"
    if _numbers(libzmq) < OLDEST_LIBZMQ:
        return Verdict(Level.failure, f"{found}; at least {'.'.join(map(str, OLDEST_LIBZMQ))} is needed", wheel)
    if not curve:
        return Verdict(Level.warning, f"{found}: connections cannot be encrypted", wheel)
    return Verdict(Level.ok, found)


def port_error(port: int | None) -> OSError | None:
    """Why a port of loopback, None for any, cannot be listened at; None if it can."""
    with socket.socket() as listener:
        # As libzmq does: a port whose connections have just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port or 0))
            listener.listen(1)
        except OSError as error:
            return error
    return None


def judge_port(port: int | None, error: OSError | None) -> Verdict:
    """Whether the server can listen."""
    where = f"{LOOPBACK}:{port}" if port else f"a port of {LOOPBACK}"
    if error is None:
        return Verdict(Level.ok, f"{where} can be listened at")
    found = f"{where} cannot be listened at: {error.strerror or error}"
    if port and error.errno == errno.EADDRINUSE:
        return Verdict(Level.failure, found, f"end what listens there (ss -ltnp sport = :{port}), or give another port")
    if port and error.errno == errno.EACCES:
        return Verdict(Level.failure, found, "give a port of 1024 or more; those below are reserved")
    return Verdict(Level.failure, found, "see whether the loopback interface is up (ip address show lo)")


def round_trips(port: int | None) -> list[float] | None:
    """Seconds from question to answer over ZeroMQ, many times; None if an answer does not come.

    Goes over any free port if the one that is asked for is taken: that is a finding of its own.
    """
    import zmq  # noqa: PLC0415

    any_port = port is None or port_error(port) is not None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        for end in (server, client):
            end.linger = 0
        server.bind(f"tcp://{LOOPBACK}:{'*' if any_port else port}")
        client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            client.send(b"")
            if not server.poll(ANSWER_MS):
                return None
            server.send_multipart(server.recv_multipart())
            if not client.poll(ANSWER_MS):
                return None
            client.recv()
            times.append(time.perf_counter() - began)
    return times


def judge_round_trips(times: Sequence[float] | None) -> Verdict:
    """Whether messages come through, and fast enough that the harness is not what is measured."""
    if times is None:
        return Verdict(
            Level.failure,
            f"ZeroMQ has no answer over {LOOPBACK} within {ANSWER_MS / 1000:g} s",
            "see whether a firewall or sandbox stops loopback",
        )
    middle = statistics.median(times)
    found = f"{1e6 * middle:.0f} us over ZeroMQ on {LOOPBACK} (median of {len(times)})"
    if middle > SLOW_ROUND_TRIP_S:
        return Verdict(
            Level.warning,
            f"{found}: more than {1e6 * SLOW_ROUND_TRIP_S:.0f} us",
            "end what else computes here; in a sandbox, measure outside of it",
        )
    return Verdict(Level.ok, found)


def judge_congestion(algorithm: str | None) -> Verdict:
    """TCP's congestion control; never bad."""
    if algorithm == "bbr":
        return Verdict(Level.ok, "TCP uses bbr; runs take their loopback connections off it, where reno is allowed")
    return Verdict(Level.ok, f"TCP uses {algorithm}" if algorithm else "the system does not tell")


def host_addresses() -> tuple[str, list[str] | None]:
    """The name of this host, and the addresses that it resolves to; None if no answer comes in time."""
    name, found = socket.gethostname(), list[str]()

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(address[0]) for *_, address in infos))

    # A name service that does not answer is waited for much longer by the system; such a thread ends with the process.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(NAME_SERVICE_S)
    return name, None if thread.is_alive() else found


def judge_host(name: str, addresses: Sequence[str] | None) -> Verdict:
    """What the name of this host means; never bad, since only workers on other machines may look for it."""
    unused = "runs on one machine do without; for workers on others, sapus server has --advertise"
    if addresses is None:
        return Verdict(Level.ok, f"{name}: the name service does not answer within {NAME_SERVICE_S:g} s; {unused}")
    if not addresses:
        return Verdict(Level.ok, f"{name} does not resolve; {unused}")
    found = f"{name} resolves to {', '.join(addresses)}"
    if all(_address(address).is_loopback for address in addresses):
        return Verdict(Level.ok, f"{found}: loopback; for workers on other machines, sapus server has --advertise")
    return Verdict(Level.ok, found)


def interfaces() -> list[tuple[str, str]]:
    """Name and address of the interfaces that are up, loopback and addresses of one link left out."""
    import psutil  # noqa: PLC0415

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in {socket.AF_INET, socket.AF_INET6} and _reaches_out(entry.address)
    ]


def _reaches_out(address: str) -> bool:
    parsed = _address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def judge_interfaces(found: Sequence[tuple[str, str]]) -> Verdict:
    """Which addresses this machine has; never bad."""
    shown = ", ".join(f"{address} ({name})" for name, address in found)
    return Verdict(
        Level.ok, f"loopback{f', {shown}' if shown else ''}; servers listen on loopback unless --bind says otherwise"
    )


# --- Cores, memory, limits ---


class Limits(NamedTuple):
    """What the control groups leave to this process; None is no limit.

    Attributes:
        cores: CPU seconds a second.
        memory_bytes: memory, in all.
        free_bytes: what is left of it.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


def cgroup_limits(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Limits:
    """The narrowest limits of the control groups around this process, version 1 or 2."""
    cores, memory = list[float](), list[tuple[int, int]]()
    for line in (_text(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for base in [root, root / "unified"] if not controllers else [root / name for name in controllers.split(",")]:
            inside = base / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if not folder.is_relative_to(base):
                    break
                cores.extend(_quota(folder))
                memory.extend(_memory_limit(folder))
    limit, free = min(memory, key=lambda pair: pair[1], default=(None, None))
    return Limits(min(cores, default=None), limit, free)


def _quota(folder: Path) -> Iterator[float]:
    words = (_text(folder / "cpu.max") or "").split()
    words = words or [_text(folder / f"cpu.cfs_{what}_us") or "" for what in ("quota", "period")]
    with contextlib.suppress(ValueError, ZeroDivisionError):
        quota, period = map(int, words)  # no limit is written as max, or as -1
        if quota > 0:
            yield quota / period


def _memory_limit(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit of a control group and what is left of it, bytes; pages of files count as left."""
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(ValueError):
            limit = int(_text(folder / limit_name) or "")
            used = int(_text(folder / used_name) or "")
            cached = re.search(rf"^{cached_name} (\d+)$", _text(folder / "memory.stat") or "", re.MULTILINE)
            if limit < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                yield limit, max(0, limit - used + (int(cached[1]) if cached else 0))


def allowed_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judge_cores(allowed: int, quota: float | None, workers: int) -> Verdict:
    """Whether every process of a run has a core of its own."""
    processes = workers + OTHER_PROCESSES
    cores = min(allowed, quota or math.inf)
    limit = f", and a quota of {quota:g}," if quota is not None and quota < allowed else ""
    found = f"{allowed} {_plural('core', allowed)}{limit} for {processes} processes of a run with --workers {workers}"
    if cores >= processes:
        return Verdict(Level.ok, found)
    fitting = math.floor(cores) - OTHER_PROCESSES
    fewer = f"--workers {fitting}" if fitting > 0 else "a machine with more cores"
    return Verdict(Level.warning, f"{found}: they wait for each other", f"to compare times: {fewer}, or sapus simulate")


def memory() -> tuple[int, int]:
    """Memory that is available and in all, bytes."""
    import psutil  # noqa: PLC0415

    now = psutil.virtual_memory()
    return now.available, now.total


def judge_memory(available: int, total: int, limits: Limits, workers: int) -> Verdict:
    """Whether a run fits, with a small model and on CPUs."""
    if limits.free_bytes is not None and limits.memory_bytes is not None and limits.free_bytes < available:
        available, found = (
            limits.free_bytes,
            f"{_gib(limits.free_bytes)} of the {_gib(limits.memory_bytes)} of a cgroup",
        )
    else:
        found = f"{_gib(available)} of {_gib(total)}"
    needed = RUN_BYTES + (workers + OTHER_PROCESSES) * PROCESS_BYTES
    found = f"{found} available; a run with a small model takes about {_gib(needed)}"
    if available < needed:
        return Verdict(Level.failure, found, "give fewer --workers, or end what else takes memory")
    if available < 2 * needed:
        return Verdict(Level.warning, f"{found}, a large one more", "give fewer --workers, or keep to small models")
    return Verdict(Level.ok, found)


def judge_files(soft: int, hard: int, workers: int) -> Verdict:
    """Whether the launcher may open as many files as it has to."""
    needed = RUN_FILES + WORKER_FILES * workers
    infinite = resource.RLIM_INFINITY
    found = f"{'unlimited' if soft == infinite else f'{soft:,}'} may be open, {needed:,} are needed"
    if soft == infinite or soft >= needed:
        return Verdict(Level.ok, found)
    if hard == infinite or hard >= needed:
        return Verdict(Level.ok, f"{found}; a run raises the limit itself")
    return Verdict(
        Level.failure, f"{found}, {hard:,} is the hard limit", "have it raised (limits.conf), or give fewer --workers"
    )


def child_error() -> str:
    """Why the CPU time and memory of a child process cannot be read; empty if they can."""
    import psutil  # noqa: PLC0415

    with subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as one:
        try:
            child = psutil.Process(one.pid)
            child.cpu_times()
            child.memory_info()
        except psutil.Error as error:
            return f"{type(error).__name__}: {error}"
        finally:
            one.kill()
    return ""


def hidepid(mounts: Path) -> str | None:
    """How /proc hides processes, as its mount options say; None if it does not."""
    for line in (_text(mounts) or "").splitlines():
        _, place, _, options, *_ = line.split()
        if place == "/proc" and (match := re.search(r"\bhidepid=(\w+)", options)):
            return match[1] if match[1] not in {"0", "off"} else None
    return None


def judge_children(error: str, hides: str | None) -> Verdict:
    """Whether the launcher can measure the processes that it starts."""
    mount = f" (/proc is mounted with hidepid={hides})" if hides else ""
    if error:
        return Verdict(
            Level.failure,
            f"CPU time and memory of a child cannot be read: {error}{mount}",
            "mount /proc without hidepid, or leave the sandbox",
        )
    return Verdict(Level.ok, f"their CPU time and memory can be read{mount}")


def shm_free(folder: Path) -> int | None:
    """Bytes that are free in the file system of shared memory, None where it cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def has_memfd() -> bool:
    """Whether memory that is no file can be shared."""
    try:
        os.close(os.memfd_create("sapus-doctor"))
    except (OSError, AttributeError):
        return False
    return True


def judge_shared(free: int | None, *, memfd: bool, linux: bool) -> Verdict:
    """Whether processes can share memory; runs share memory without a name, others may want files in `SHM`."""
    if not linux:
        return Verdict(Level.ok, "--transport tcp only: ipc and shm are there on Linux")
    files = f"{SHM} cannot be written" if free is None else f"{SHM} has {_gib(free)} free"
    if not memfd:
        return Verdict(
            Level.warning, f"there is no memfd, which --transport shm needs; {files}", "give --transport tcp"
        )
    return Verdict(Level.ok, f"memfd works; {files}")


# --- Clocks ---


def clock_steps() -> tuple[float, float]:
    """How far the wall clock moves against the monotonic one between two readings, at most, and the time of them all.

    Both in seconds.
    """
    began = time.monotonic()
    offsets = []
    for _ in range(CLOCK_READINGS):
        offsets.append(_offset())
        time.sleep(0.01)
    steps = [abs(after - before) for before, after in itertools.pairwise(offsets)]
    return max(steps), time.monotonic() - began


def _offset() -> float:
    """Wall clock less monotonic clock, by the reading that was interrupted least."""
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def judge_wall_clock(step_s: float, interval_s: float) -> Verdict:
    """Whether somebody sets the clock while runs are dated by it."""
    found = f"moves against the monotonic clock by {1e6 * step_s:.3g} us at most, in {interval_s:.2f} s"
    if step_s > CLOCK_STEP_S:
        return Verdict(
            Level.warning, f"{found}: it is being set", "have it slewed, not stepped (chronyd, timesyncd), then run"
        )
    return Verdict(Level.ok, found)


def timer_resolution() -> float:
    """The smallest step of the monotonic clock that is seen, seconds."""
    smallest = math.inf
    for _ in range(100):
        before = after = time.monotonic()
        while after == before:
            after = time.monotonic()
        smallest = min(smallest, after - before)
    return smallest


def late_sleeps() -> list[float]:
    """How much longer than asked a sleep of a millisecond takes, seconds, many times."""
    late = []
    for _ in range(SLEEPS):
        began = time.monotonic()
        time.sleep(SLEEP_S)
        late.append(time.monotonic() - began - SLEEP_S)
    return late


def judge_timer(resolution_s: float, late_s: Sequence[float]) -> Verdict:
    """Whether emulation, which sleeps for what a cluster would take, can keep its times."""
    middle = statistics.median(late_s)
    found = (
        f"steps of {1e6 * resolution_s:.2g} us; a sleep of {1000 * SLEEP_S:g} ms ends {1000 * middle:.2f} ms late "
        f"(worst of {len(late_s)}: {1000 * max(late_s):.1f} ms)"
    )
    if resolution_s > COARSE_CLOCK_S or middle > LATE_SLEEP_S:
        remedy = "for --cluster and --step-time: end what else computes here, or use sapus simulate"
        return Verdict(Level.warning, f"{found}: too coarse for emulation", remedy)
    return Verdict(Level.ok, found)


# --- Folders ---


class Folder(NamedTuple):
    """What became of writing to a folder, or to the nearest above it that exists; `error` is empty if it worked."""

    path: Path
    free_bytes: int = 0
    error: str = ""


def try_folder(folder: Path) -> Folder:
    """Write, sync and rename a file there, and take it away; a folder that does not exist is not created."""
    place = folder = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        if not place.is_dir():
            return Folder(folder, error=f"{_inside(folder, place)} is not a directory")
        with tempfile.TemporaryDirectory(prefix=".sapus-doctor-", dir=place) as scratch:
            first, second = Path(scratch, "first"), Path(scratch, "second")
            with first.open("wb") as file:
                file.write(b"sapus")
                file.flush()
                os.fsync(file.fileno())
            second.write_bytes(b"")
            first.replace(second)
            if second.read_bytes() != b"sapus":
                return Folder(folder, error=f"{_inside(folder, place)} gives back other bytes than were written")
        return Folder(folder, shutil.disk_usage(place).free)
    except OSError as error:
        return Folder(folder, error=f"{_inside(folder, place)} cannot be written: {error.strerror or error}")


def try_temporary() -> Folder:
    """The same for the folder of temporary files."""
    try:
        return try_folder(Path(tempfile.gettempdir()))
    except FileNotFoundError as error:  # none of the usual ones can be written
        return Folder(Path(), error=error.strerror or str(error))


def try_cache(torch: Torch) -> Folder:
    """The same for the folder of prepared data sets, of which `torch` tells."""
    return try_folder(Path(torch.cache)) if torch.cache else Folder(Path(), error=torch.cache_error)


def _inside(folder: Path, place: Path) -> str:
    return f"{folder}" if folder == place else f"{folder}: {place}, in which it is to lie,"


def judge_folder(folder: Folder, elsewhere: str) -> Verdict:
    """Whether files can be written, replaced at one stroke, and have room."""
    if folder.error:
        return Verdict(Level.failure, folder.error, elsewhere)
    found = f"{folder.path} can be written; {_gib(folder.free_bytes)} free"
    if folder.free_bytes < LEAST_FREE_BYTES:
        return Verdict(Level.failure, found, f"free some space, or {elsewhere}")
    if folder.free_bytes < FEW_FREE_BYTES:
        return Verdict(Level.warning, found, f"free some space, or {elsewhere}")
    return Verdict(Level.ok, found)


def judge_cache(torch: Torch, folder: Folder) -> Verdict:
    """Whether prepared data sets have a place."""
    if torch.error:
        return Verdict(Level.warning, "not known: torch cannot be imported", "see torch")
    return judge_folder(folder, "set SAPUS_CACHE to another folder")


# --- Small things ---


def first_line(path: Path) -> str | None:
    """The first line of a file, None if it cannot be read."""
    lines = (_text(path) or "").splitlines()
    return lines[0].strip() if lines else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


def _numbers(version: str) -> tuple[int, ...]:
    """2.6.0+cpu as (2, 6): zeros at the end make no version newer."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / MIB:,.0f} MiB"


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"


def _line(text: str) -> str:
    """A text on one line, of a length that can be read."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."  # noqa: PLR2004 - about four lines of a terminal
