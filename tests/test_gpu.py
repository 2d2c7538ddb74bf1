"""The GPU columns of resources.csv, against a pretended driver and on a machine without one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest
from processes import launch

from sapus_cli.drivers.gpu import Gpus, Load
from sapus_cli.drivers.record import first_record
from sapus_cli.traces import read_trace

if TYPE_CHECKING:
    from pathlib import Path


class FakeNvml:
    """What `Gpus` uses of the module `pynvml`: a handle is the number of a GPU.

    `processes` holds, a GPU, pairs of process number and bytes; `percent` its load. An exception in place of either is
    raised; `driver` is raised by the initialisation.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, processes: list[Any], percent: list[Any], driver: Exception | None = None) -> None:
        self.processes = processes
        self.percent = percent
        self.driver = driver
        self.inits = 0

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        self.inits += 1
        if self.driver is not None:
            raise self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        listed = self.processes[handle]
        if isinstance(listed, Exception):
            raise listed
        return [SimpleNamespace(pid=pid, usedGpuMemory=n_bytes) for pid, n_bytes in listed]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        load = self.percent[handle]
        if isinstance(load, Exception):
            raise load
        return SimpleNamespace(gpu=load, memory=99)


def error(name: str) -> Exception:
    """The driver's error of that name, as the library raises it."""
    made: Exception = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return made


def test_a_process_gets_its_memory_and_the_load_of_its_gpu() -> None:
    nvml = FakeNvml([[(7, 100), (8, 200)], [(9, 300)], []], [40, 90, 0])
    assert Gpus(nvml).loads() == {7: Load(40.0, 100), 8: Load(40.0, 200), 9: Load(90.0, 300)}


def test_of_several_gpus_the_memory_is_added_and_the_load_is_that_of_the_main_one() -> None:
    assert Gpus(FakeNvml([[(7, 10)], [(7, 500)]], [1, 80])).loads() == {7: Load(80.0, 510)}


def test_what_the_driver_does_not_tell_is_empty() -> None:
    sliced = FakeNvml([[(7, 10), (8, None)]], [error("NOT_SUPPORTED")])
    assert Gpus(sliced).loads() == {7: Load(None, 10), 8: Load(None, None)}
    lost = FakeNvml([error("GPU_IS_LOST"), [(7, 10)]], [1, 2])
    assert Gpus(lost).loads() == {7: Load(2.0, 10)}


@pytest.mark.parametrize("name", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "NO_PERMISSION"])
def test_without_a_driver_it_is_asked_once_and_says_nothing(name: str) -> None:
    nvml = FakeNvml([[(7, 10)]], [1], error(name))
    gpus = Gpus(nvml)
    assert gpus.loads() == gpus.loads() == {}
    assert nvml.inits == 1


def test_with_a_driver_it_is_initialised_once() -> None:
    nvml = FakeNvml([[(7, 10)]], [1])
    gpus = Gpus(nvml)
    assert gpus.loads()
    nvml.processes = [[]]
    assert gpus.loads() == {}
    assert nvml.inits == 1


def test_the_real_library_is_silent_where_there_is_no_driver() -> None:
    code = (
        "from sapus_cli.drivers.gpu import Gpus\n"
        "import sys\n"
        "assert 'pynvml' not in sys.modules\n"
        "loads = Gpus().loads()\n"
        "assert all(load.mem_bytes is None or load.mem_bytes >= 0 for load in loads.values())\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_on_the_cpu_does_not_ask_and_has_empty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_self: Gpus) -> dict[int, Load]:
        raise AssertionError("asked")

    monkeypatch.setattr(Gpus, "loads", refuse)
    outcome = launch(tmp_path, device="cpu", seconds=1.0)
    frame = read_trace(outcome.folder, "resources")
    assert not frame.filter(frame["role"] == "worker").is_empty()
    assert frame["gpu_percent"].null_count() == frame["gpu_mem_bytes"].null_count() == len(frame)
    assert capfd.readouterr() == ("", "")


def test_the_columns_of_a_run_are_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Everyone(dict[int, Load]):
        """The load of whatever process is asked for."""

        def get(self, key: int, default: Any = None) -> Any:
            return Load(50.0, key) if key else default

    monkeypatch.setattr(Gpus, "loads", lambda _self: Everyone())
    # The run is on the CPU, but the launcher is told otherwise.
    on_cuda = {"device": "cuda"}
    monkeypatch.setattr("sapus_cli.drivers.launch.first_record", lambda *given: first_record(*given) | on_cuda)
    frame = read_trace(launch(tmp_path, device="cpu", seconds=1.0).folder, "resources")
    for role, n_processes in (("worker", 2), ("evaluator", 1)):
        rows = frame.filter(frame["role"] == role)
        assert rows["gpu_percent"].unique().to_list() == [50.0]
        assert rows["gpu_mem_bytes"].n_unique() == n_processes, "each by its own process number"
    assert frame.filter(frame["role"] == "server")["gpu_percent"].null_count() == (frame["role"] == "server").sum()
