"""What a fork server does at its end: take away the temporary folders of the process that started it.

The fork server ends when all who could ask it for children are gone, so also when the launcher was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil

from sapus_cli.drivers.process import SCRATCH


def clean(folders: list[str], pid: int) -> None:
    """Take away the folders that are still there; in a fork of the process `pid`, do nothing."""
    if os.getpid() == pid:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if SCRATCH in os.environ:
    atexit.register(clean, os.environ.pop(SCRATCH).split(os.pathsep), os.getpid())
