"""What the GPUs of this machine say of the processes on them, through NVIDIA's management library."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple


class Load(NamedTuple):
    """A process on the GPUs; None is what the driver does not tell.

    Attributes:
        percent: share of the time since the driver's last sample in which the GPU was computing, for anyone.
        mem_bytes: GPU memory of the process, bytes.
    """

    percent: float | None = None
    mem_bytes: int | None = None


class Gpus:
    """Samples all GPUs at once. The library is loaded at the first sample; without a driver every sample is empty.

    Args:
        nvml: the module `pynvml`, or what stands in for it.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[Any] | None = None

    def loads(self) -> dict[int, Load]:
        """Every process that computes on a GPU, by its number in the system.

        A process is found where it is, so that neither its rank nor CUDA_VISIBLE_DEVICES matters. Of a process on
        several GPUs the memory is that of all, the load that of the one on which it has the most.
        """
        if self._handles is None:
            self._handles = self._found()
        found: dict[int, list[tuple[int, Load]]] = {}
        for handle in self._handles:
            # A GPU may be lost, or a kind that does not tell; the others still do.
            with suppress(self._nvml.NVMLError):
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                percent = self._percent(handle) if processes else None
                for process in processes:
                    memory = process.usedGpuMemory
                    found.setdefault(process.pid, []).append((memory or 0, Load(percent, memory)))
        return {pid: _together(loads) for pid, loads in found.items()}

    def _found(self) -> list[Any]:
        if self._nvml is None:
            import pynvml  # noqa: PLC0415 - only a run on GPUs needs it

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:
            return []  # no driver, or none that may be asked

    def _percent(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError:
            return None  # a slice of a GPU has no load of its own


def _together(loads: list[tuple[int, Load]]) -> Load:
    _, main = max(loads, key=lambda pair: pair[0])
    known = [load.mem_bytes for _, load in loads if load.mem_bytes is not None]
    return Load(main.percent, sum(known) if known else None)
