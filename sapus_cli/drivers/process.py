"""How a child process of ours is set up, before it does anything else."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sapus_cli.errors import UserError
from sapus_cli.output import careless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerContext
    from types import FrameType

MIB = 1 << 20
MOST_ADDRESS, LISTENER = 107, len("/listener-12345678")
"""Bytes of a UNIX socket's path, and of multiprocessing's name for its own."""
MANY_FILES = 10_240
"""Open files where there is no hard limit; macOS lets nobody have more."""
SCRATCH = "SAPUS_SCRATCH"
"""Environment variable that names a fork server's temporary folders, for `sapus_cli.drivers.janitor`."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def be_a_child() -> None:
    """Be deaf to Ctrl-C and to the end of the terminal, and open as many files as the system lets us.

    The signals reach every process of a terminal; what follows from them is for the launcher to decide.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    take_files()


def take_files() -> int:
    """Raise the limit of open files to the most that this process may set. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def check_files(workers: int) -> None:
    """Raise the limit of open files as `take_files` does, and refuse a run that would not get along with it.

    Raises:
        UserError: says the limit and what is needed.
    """
    from sapus_cli.doctor import RUN_FILES, WORKER_FILES  # noqa: PLC0415 - doctor is the one who says so beforehand

    limit, needed = take_files(), RUN_FILES + WORKER_FILES * workers
    if limit < needed:
        raise UserError(
            f"--workers {workers}: needs {needed:,} open files, and the hard limit is {limit:,}; "
            "have it raised (ulimit -Hn), or give fewer workers"
        )


@contextmanager
def signals_noted(names: list[str]) -> Iterator[None]:
    """Instead of what they do otherwise, SIGINT, SIGTERM and SIGHUP add their names to a list.

    One that this process was started to ignore, as under nohup, is ignored.
    """

    def note(number: int, _frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fork_server(preload: list[str], scratch: str = "") -> ForkServerContext:
    """The context that children are started from. Its server begins to import `preload` now.

    However this process ends, the server takes away the folder of multiprocessing's socket, and `scratch`, a folder.

    Raises:
        UserError: the path of that socket would be longer than the system takes.
    """
    room = MOST_ADDRESS - len(os.fsencode(util.get_temp_dir())) - LISTENER
    if room < 0:
        raise UserError(
            f"{tempfile.gettempdir()}: this folder of temporary files has too long a name for a socket in it, by "
            f"{-room} bytes; set TMPDIR to a shorter one"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sapus_cli.drivers.janitor", *preload])
    folders = [util.get_temp_dir(), *([scratch] if scratch else [])]
    os.environ[SCRATCH] = os.pathsep.join(folders)
    # The server inherits this: Ctrl-C would end its imports in a traceback, and it goes on when the terminal is gone.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del os.environ[SCRATCH]
    return context


def load_torch() -> None:
    """Import torch, and what its optimizers import at their first step.

    That makes a folder for a compiler's cache, which stays empty, among the temporary files; here it makes none.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = before or os.sep  # a folder that exists
    import torch._dynamo  # noqa: F401, PLC0415

    if before is None:
        os.environ.pop(name, None)


def created_s() -> float:
    """When this process was created, on the clock of time.monotonic().

    psutil reckons from the time of boot in whole seconds, so that it can be a second off; Linux itself counts from
    boot in hundredths.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        since_s = time.time() - psutil.Process().create_time()
    return time.monotonic() - since_s


def settle(threads: int) -> None:
    """Reuse memory, and compute on so many threads."""
    keep_memory()
    import torch  # noqa: PLC0415 - after the allocator has been told

    torch.set_num_threads(threads)


def keep_memory() -> None:
    """Tell glibc to keep freed memory.

    libzmq allocates every received message afresh; blocks of 32 MB and more would be mapped and page-faulted each
    time, which costs more than the network. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_TOP_PAD, 64 * MIB)
    libc.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return freed memory to the system, once, after what was big while things were set up.

    What is kept from then on is what the work itself needs.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def log_to(path: Path) -> None:
    """Send everything this process prints, a crash in C code included, to a file; what that does not take is lost."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = careless(1), careless(2)
    faulthandler.enable()


def end_with(wait_for_end: Callable[[], object]) -> None:
    """End this process at once when `wait_for_end` returns or fails: it watches for the launcher's death."""

    def watch() -> None:
        try:
            wait_for_end()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
