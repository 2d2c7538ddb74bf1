"""What the machine does to a run, for tests: a small disk that fills up, a clock that is set back, a terminal."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import SAPUS, Background

if TYPE_CHECKING:
    from collections.abc import Iterator

SET_BACK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <stdlib.h>
static long offset(void) {
    struct stat found;
    return stat(getenv("CLOCK_IS_SET_BACK"), &found) == 0 ? -3600 : 0;
}
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && id == CLOCK_REALTIME) now->tv_sec += offset();
    return failed;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
"""
"""A library to be loaded first: the time of day is an hour behind while the file $CLOCK_IS_SET_BACK exists."""


class Disk:
    """A file system of its own, which is small."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no room for a single byte."""
        with (self.folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))

    def empty(self) -> None:
        """Take back what filled it."""
        (self.folder / "filler").unlink()


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Disk]:
    """A file system in memory, which nobody sees but through the process that holds it."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a file system cannot be mounted here: that takes root, and unshare")
    place.mkdir()
    script = f"mount -t tmpfs -o size={size} none '{place}' && echo ready && exec cat"
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            pytest.skip("a file system cannot be mounted here")
        yield Disk(Path(f"/proc/{holder.pid}/root{place}"))
    finally:
        holder.communicate(timeout=10)


def clock_that_can_be_set_back(folder: Path) -> tuple[dict[str, str], Path]:
    """The environment of a process whose clock it is, and the file that sets it back."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the clock of a process is made by a C compiler, and there is none")
    (folder / "clock.c").write_text(SET_BACK)
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
    switch = folder / "set-back"
    return {"LD_PRELOAD": str(library), "CLOCK_IS_SET_BACK": str(switch)}, switch


@contextmanager
def on_a_terminal(cwd: Path, *arguments: str) -> Iterator[tuple[Background, int]]:
    """A command line on a terminal of its own, which it controls; closing the descriptor closes the terminal."""
    if shutil.which("setsid") is None:
        pytest.skip("a terminal is given to a process by setsid, which is not here")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *SAPUS, *arguments], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, text=True
    )
    os.close(theirs)
    try:
        yield Background(process, cwd / "results"), ours
    finally:
        with suppress(OSError):
            os.close(ours)
        process.kill()
        process.wait(timeout=10)
