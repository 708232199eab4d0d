"""NVML as the sampler sees it, without a driver: answers by name, errors where a GPU has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


NOT_SUPPORTED, NOT_FOUND, LOST, NO_DRIVER = 3, 6, 15, 9


def sample(at_us: int, value: int) -> SimpleNamespace:
    return SimpleNamespace(timeStamp=at_us, sampleValue=SimpleNamespace(uiVal=value))


def field(value: int, kind: int = 3, code: int = 0) -> SimpleNamespace:
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return SimpleNamespace(nvmlReturn=code, valueType=kind, value=SimpleNamespace(**{names[kind]: value}))


class FakeNvml:
    """Tests change ``answers``: a value, a function of the arguments, or an error."""

    NVMLError = NVMLError

    def __init__(self, gpus: int = 1) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": gpus,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": b"GPU-5b6a2d53",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:04:00.0"),
            "nvmlDeviceGetClockInfo": lambda _, which: {1: 1980, 2: 3201}[which],
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30, total=141 << 30),
            "nvmlDeviceGetSamples": lambda *_: (
                1,
                [sample(1_000_000, 40), sample(1_166_000, 60)],
            ),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=77),
            "nvmlDeviceGetFieldValues": lambda _, fields: [field(1000 + n) for n, _ in fields],
            "nvmlDeviceGetComputeRunningProcesses_v3": [SimpleNamespace(pid=4242, usedGpuMemory=3 << 30)],
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("answers", {}):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append(name)
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

        return call
