"""Samples a GPU's utilisation, power and link traffic every second, if nvidia-ml-py is installed.

Tested only with a stand-in for the library, never on a GPU.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

READING_INTERVAL = 1.0  # seconds between two readings
SAMPLE_NAMES = ("gpu use", "gpu power", "gpu link sent", "gpu link received")  # 0 to 1, W, bytes/s, bytes/s


class GpuMonitor:
    """Reads one GPU on a thread until `close`. Link traffic is NVLink's, or PCIe's without NVLink."""

    def __init__(self, uuid: str, sample: Callable[[str, float], None]) -> None:
        self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._sample = sample
        self._counted: tuple[float, float, float] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_readings, name="gpu gauge", daemon=True)
        self._thread.start()

    def read_values(self, now: float) -> dict[str, float]:
        """Returns the `SAMPLE_NAMES` that this GPU reports, by name."""
        nvml, gpu, found = self._nvml, self._gpu, dict[str, float]()
        for name, ask in (("gpu use", lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
                          ("gpu power", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)):  # fmt: skip
            if (value := self._try_reading(ask)) is not None:
                found[name] = float(value)
        links = self._try_reading(self._read_links)
        if links is not None:
            if self._counted is not None and now > self._counted[0]:
                was, (sent, received) = self._counted, links
                found["gpu link sent"] = 1024 * (sent - was[1]) / (now - was[0])
                found["gpu link received"] = 1024 * (received - was[2]) / (now - was[0])
            self._counted = (now, *links)
            return found
        for name, way in (("gpu link sent", nvml.NVML_PCIE_UTIL_TX_BYTES), ("gpu link received",
                                                                           nvml.NVML_PCIE_UTIL_RX_BYTES)):  # fmt: skip
            if (value := self._try_reading(nvml.nvmlDeviceGetPcieThroughput, gpu, way)) is not None:
                found[name] = 1024.0 * value
        return found

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _read_links(self) -> tuple[float, float]:
        """Returns all NVLinks' traffic so far in KiB: (out, in). Raises LookupError without NVLink."""
        nvml = self._nvml
        ways = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        said = nvml.nvmlDeviceGetFieldValues(self._gpu, list(ways))
        if any(value.nvmlReturn for value in said):
            raise LookupError("this GPU has no NVLink")
        return float(said[0].value.ullVal), float(said[1].value.ullVal)

    def _try_reading(self, what: Callable[..., Any], *given: Any) -> Any:
        try:
            return what(*given)
        except (self._nvml.NVMLError, LookupError, AttributeError):
            return None

    def _run_readings(self) -> None:
        while not self._closing.wait(READING_INTERVAL):
            for name, value in self.read_values(time.monotonic()).items():
                self._sample(name, value)


def start_gpu_monitor(device: str, sample: Callable[[str, float], None]) -> GpuMonitor | None:
    """Returns None for a CPU, without nvidia-ml-py, or if the library fails. device: torch's name"""
    if not device.startswith("cuda"):
        return None
    try:
        import torch

        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return GpuMonitor(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", sample)
    except Exception:  # of a driver's library: a run does not need it
        return None
