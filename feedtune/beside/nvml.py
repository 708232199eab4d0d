"""Sampler of NVIDIA GPUs through NVML: use, clocks and why they are low, memory by process, link counters."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from feedtune.beside.base import SLOW_S, Pace, Row, Rows, Value

_SHARE = 0.001  # of one core, for each kind of question to all GPUs together
_RETRIES_S = 60.0  # how often a question is asked again that a GPU cannot answer
_KIB = 1 << 10
_ALL_LINKS = 0xFFFFFFFF
# Counters by field number, since pynvml's older versions lack some names: number, scope, factor to the unit.
_FIELDS: dict[str, tuple[int, int, float]] = {
    "nvlink_tx_bytes": (138, _ALL_LINKS, _KIB),
    "nvlink_rx_bytes": (139, _ALL_LINKS, _KIB),
    "pcie_tx_bytes": (197, 0, 1),
    "pcie_rx_bytes": (198, 0, 1),
    "pcie_replays": (94, 0, 1),
    "power_capped_s": (74, 0, 1e-9),
    "thermal_capped_s": (75, 0, 1e-9),
    "hw_thermal_slowed_s": (270, 0, 1e-9),
    "power_braked_s": (271, 0, 1e-9),
}
# Members of the union that a field value is, by NVML_VALUE_TYPE_*.
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_UTILIZATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND: nothing new


class NvmlSampler:
    """Asks the driver about each GPU; an answer that one refuses is missing, and nothing else.

    Questions are paced by what they cost here: drivers differ by factors of a hundred.
    ``nvmlDeviceGetPcieThroughput`` is never asked: it sleeps 20 ms a call.
    """

    name = "nvml"
    columns: Mapping[str, tuple[str, ...]] = {
        "gpu_device": ("name", "uuid", "bus"),
        "gpu": (
            "sm_mhz",
            "memory_mhz",
            "event_reasons",
            "power_w",
            "temperature_c",
            "used_bytes",
            "total_bytes",
        ),
        "gpu_util": ("at_s", "util_pct"),
        "gpu_link": tuple(_FIELDS),
        "gpu_process": ("used_bytes",),
    }

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._nvml: Any = None
        self._gpus: dict[str, Any] = {}
        self._told = False
        self._seen_us: dict[str, int] = {}
        self._refused_until_s: dict[tuple[str, str], float] = {}
        self._pace = Pace(_SHARE)
        self._slow = Pace(_SHARE, SLOW_S / 2)

    def prepare(self) -> str | None:
        """The driver's library answers and lists a GPU."""
        try:
            nvml = self._load()
        except ImportError:
            return "the package nvidia-ml-py is not installed"
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return f"the NVIDIA driver does not answer: {error}"
        self._nvml = nvml
        try:
            for number in range(nvml.nvmlDeviceGetCount()):
                self._add(number)
        except nvml.NVMLError as error:
            return f"the NVIDIA driver lists no GPUs: {error}"
        return None if self._gpus else "the NVIDIA driver lists no GPU that we may ask"

    def sample(self, now_s: float) -> Rows:
        """What is due now."""
        rows: Rows = {}
        if not self._told:
            self._told = True
            rows["gpu_device"] = [self._describe(gpu) for gpu in self._gpus]
        for source, question, pace in (
            ("gpu", self._state, self._pace),
            ("gpu_util", self._utilization, self._pace),
            ("gpu_link", self._links, self._pace),
            ("gpu_process", self._processes, self._slow),
        ):
            if pace.due(source, now_s):
                with pace.spend(source, now_s):
                    rows[source] = [row for gpu in self._gpus for row in question(gpu, now_s)]
        return rows

    def close(self) -> None:
        """Let go of the driver."""
        nvml, self._nvml = self._nvml, None
        self._gpus.clear()
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return

    def _add(self, number: int) -> None:
        try:
            self._gpus[str(number)] = self._nvml.nvmlDeviceGetHandleByIndex(number)
        except self._nvml.NVMLError:  # a GPU that has fallen off the bus, or is kept from us
            return

    def _ask(self, gpu: str, name: str, now_s: float, *args: Any) -> Any:
        """One answer; ``None`` where this GPU refuses it, and for a minute after that."""
        key = (gpu, f"{name}{args}")
        if now_s < self._refused_until_s.get(key, 0.0):
            return None
        try:
            return getattr(self._nvml, name)(self._gpus[gpu], *args)
        except (self._nvml.NVMLError, AttributeError):  # the library's or the package's version lacks it
            self._refused_until_s[key] = now_s + _RETRIES_S
            return None

    def _describe(self, gpu: str) -> Row:
        pci = self._ask(gpu, "nvmlDeviceGetPciInfo", 0.0)
        texts = [self._ask(gpu, "nvmlDeviceGetName", 0.0), self._ask(gpu, "nvmlDeviceGetUUID", 0.0)]
        return [gpu, *map(_text, [*texts, getattr(pci, "busId", None)])]

    def _state(self, gpu: str, now_s: float) -> list[Row]:
        reasons = self._ask(gpu, "nvmlDeviceGetCurrentClocksEventReasons", now_s)
        if reasons is None:  # its name in older drivers
            reasons = self._ask(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", now_s)
        power_mw = self._ask(gpu, "nvmlDeviceGetPowerUsage", now_s)
        memory = self._ask(gpu, "nvmlDeviceGetMemoryInfo", now_s)
        row: Row = [
            gpu,
            self._ask(gpu, "nvmlDeviceGetClockInfo", now_s, _CLOCK_SM),
            self._ask(gpu, "nvmlDeviceGetClockInfo", now_s, _CLOCK_MEMORY),
            reasons,
            None if power_mw is None else power_mw / 1e3,
            self._ask(gpu, "nvmlDeviceGetTemperature", now_s, _TEMPERATURE_GPU),
            getattr(memory, "used", None),
            getattr(memory, "total", None),
        ]
        return [row] if any(value is not None for value in row[1:]) else []

    def _utilization(self, gpu: str, now_s: float) -> list[Row]:
        """The driver's own samples (about six a second), each with its time on the monotonic clock."""
        since_us = self._seen_us.get(gpu, 0)
        key = (gpu, "samples")
        if now_s >= self._refused_until_s.get(key, 0.0):
            try:
                _, samples = self._nvml.nvmlDeviceGetSamples(self._gpus[gpu], _UTILIZATION_SAMPLES, since_us)
                return self._new_samples(gpu, samples, since_us)
            except self._nvml.NVMLError as error:
                if error.value == _NOT_FOUND:
                    return []
                self._refused_until_s[key] = now_s + _RETRIES_S
        rates = self._ask(gpu, "nvmlDeviceGetUtilizationRates", now_s)
        return [] if rates is None else [[gpu, round(now_s, 3), rates.gpu]]

    def _new_samples(self, gpu: str, samples: Any, since_us: int) -> list[Row]:
        offset_s = time.monotonic() - time.time()
        new = sorted((s.timeStamp, s.sampleValue.uiVal) for s in samples if s.timeStamp > since_us)
        if new:
            self._seen_us[gpu] = new[-1][0]
        if since_us == 0:  # the first answer holds what was before us
            new = new[-1:]
        return [[gpu, round(at_us / 1e6 + offset_s, 3), value] for at_us, value in new]

    def _links(self, gpu: str, now_s: float) -> list[Row]:
        fields = [(number, scope) for number, scope, _ in _FIELDS.values()]
        answers = self._ask(gpu, "nvmlDeviceGetFieldValues", now_s, fields)
        if answers is None:
            return []
        row: Row = [gpu]
        for (_, _, factor), answer in zip(_FIELDS.values(), answers, strict=True):
            row.append(_field_value(answer, factor))
        return [row] if any(value is not None for value in row[1:]) else []

    def _processes(self, gpu: str, now_s: float) -> list[Row]:
        """Memory in use by each process, by the pid that the driver's namespace knows."""
        found = self._ask(gpu, "nvmlDeviceGetComputeRunningProcesses_v3", now_s)
        if found is None:
            found = self._ask(gpu, "nvmlDeviceGetComputeRunningProcesses", now_s)
        return [[f"{gpu}/{process.pid}", process.usedGpuMemory] for process in found or ()]


def _field_value(answer: Any, factor: float) -> Value:
    """A counter in its unit; ``None`` where this GPU has none."""
    if answer.nvmlReturn != 0 or answer.valueType >= len(_UNION):
        return None
    value = getattr(answer.value, _UNION[answer.valueType], None)
    if value is None:
        return None
    return int(value * factor) if factor >= 1 else round(value * factor, 3)


def _text(value: Any) -> Value:
    """Older packages answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
