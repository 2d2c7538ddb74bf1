"""What all tests share: a cache of their own, one thread as in the processes of a run, and no main module.

A process from a fork server imports the main module again: here that would be pytest, once more in every process.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from inside import Inside
from processes import end_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _own_cache_one_thread_and_no_main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAPUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        yield


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    """Runs command lines within this process, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return Inside(capsys)
