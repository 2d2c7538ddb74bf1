"""How a child process of ours is set up, before it does anything else."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import platform
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

MIB = 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def be_a_child() -> None:
    """Be deaf to Ctrl-C.

    It reaches every process of a terminal; what follows from it is for the launcher to decide.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def signals_noted(names: list[str]) -> Iterator[None]:
    """Instead of what they do otherwise, SIGINT, SIGTERM and SIGHUP add their names to a list."""

    def note(number: int, _frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Send everything this process prints, a crash in C code included, to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()


def end_with(wait_for_end: Callable[[], object]) -> None:
    """End this process at once when `wait_for_end` returns or fails: it watches for the launcher's death."""

    def watch() -> None:
        try:
            wait_for_end()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
