"""GPUs by a driver that answers, refuses, falls silent or is not there."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from fake_nvml import LOST, NO_DRIVER, NOT_FOUND, NOT_SUPPORTED, FakeNvml, NVMLError, field, sample

from feedtune.beside.nvml import NvmlSampler


def prepared(fake: FakeNvml) -> NvmlSampler:
    sampler = NvmlSampler(lambda: fake)
    assert sampler.prepare() is None
    return sampler


def named(sampler: NvmlSampler, source: str, row: list) -> dict:
    return dict(zip(sampler.columns[source], row[1:], strict=False))


def test_each_value_comes_with_its_unit():
    sampler = prepared(FakeNvml())
    rows = sampler.sample(100.0)
    assert rows["gpu_device"] == [["0", "NVIDIA H200", "GPU-5b6a2d53", "00000000:04:00.0"]]
    assert named(sampler, "gpu", rows["gpu"][0]) == {
        "sm_mhz": 1980, "memory_mhz": 3201, "event_reasons": 4, "power_w": 412.5, "temperature_c": 61,
        "used_bytes": 5 << 30, "total_bytes": 141 << 30,
    }  # fmt: skip
    assert named(sampler, "gpu_link", rows["gpu_link"][0])["nvlink_tx_bytes"] == (1000 + 138) * 1024
    assert named(sampler, "gpu_link", rows["gpu_link"][0])["pcie_rx_bytes"] == 1000 + 198
    assert rows["gpu_process"] == [["0/4242", 3 << 30]]


def test_the_device_is_described_once():
    sampler = prepared(FakeNvml())
    assert "gpu_device" in sampler.sample(100.0)
    assert "gpu_device" not in sampler.sample(200.0)


def test_only_new_samples_are_given_with_their_own_time():
    fake = FakeNvml()
    sampler = prepared(fake)
    assert [row[2] for row in sampler.sample(100.0)["gpu_util"]] == [
        60
    ]  # what was before us but for the last
    at_us = int(time.time() * 1e6)
    asked = []
    fake.answers["nvmlDeviceGetSamples"] = lambda _, kind, since: (
        asked.append((kind, since)),
        [sample(at_us, 10), sample(1_166_000, 60), sample(at_us + 166_000, 90)],
    )
    rows = sampler.sample(200.0)["gpu_util"]
    assert asked == [(1, 1_166_000)]
    assert [row[2] for row in rows] == [10, 90]
    assert rows[0][1] == pytest.approx(time.monotonic(), abs=60)
    assert rows[1][1] - rows[0][1] == pytest.approx(0.166, abs=0.002)


def test_nothing_new_is_no_reason_to_take_the_mean_of_the_driver():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetSamples"] = NVMLError(NOT_FOUND)
    sampler = prepared(fake)
    assert sampler.sample(100.0)["gpu_util"] == []
    assert "nvmlDeviceGetUtilizationRates" not in fake.calls


def test_without_samples_the_drivers_mean_serves():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetSamples"] = NVMLError(NOT_SUPPORTED)
    sampler = prepared(fake)
    assert sampler.sample(100.0)["gpu_util"] == [["0", 100.0, 77]]


@pytest.mark.parametrize("error", [NVMLError(NOT_SUPPORTED), NVMLError(LOST), AttributeError("old library")])
@pytest.mark.parametrize(
    ("name", "source", "column"),
    [
        ("nvmlDeviceGetPowerUsage", "gpu", "power_w"),
        ("nvmlDeviceGetTemperature", "gpu", "temperature_c"),
        ("nvmlDeviceGetMemoryInfo", "gpu", "used_bytes"),
        ("nvmlDeviceGetClockInfo", "gpu", "sm_mhz"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "gpu", "event_reasons"),
    ],
)
def test_an_answer_that_is_refused_is_missing_and_the_rest_stands(error, name, source, column):
    fake = FakeNvml()
    fake.answers[name] = error
    sampler = prepared(fake)
    values = named(sampler, source, sampler.sample(100.0)[source][0])
    assert values[column] is None
    assert sum(value is not None for value in values.values()) >= 5


def test_a_refused_question_rests_for_a_minute():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetPowerUsage"] = NVMLError(NOT_SUPPORTED)
    sampler = prepared(fake)
    for now_s in (100.0, 130.0, 159.0):
        sampler.sample(now_s)
    assert fake.calls.count("nvmlDeviceGetPowerUsage") == 1
    fake.answers["nvmlDeviceGetPowerUsage"] = 100_000
    assert named(sampler, "gpu", sampler.sample(161.0)["gpu"][0])["power_w"] == 100.0


def test_a_field_that_a_gpu_lacks_is_missing():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetFieldValues"] = lambda _, fields: [
        field(5, code=NOT_SUPPORTED) if number in (138, 139) else field(number, kind=1)
        for number, _ in fields
    ]
    sampler = prepared(fake)
    values = named(sampler, "gpu_link", sampler.sample(100.0)["gpu_link"][0])
    assert values["nvlink_tx_bytes"] is None
    assert values["pcie_tx_bytes"] == 197


def test_a_lost_gpu_costs_the_others_nothing():
    fake = FakeNvml(gpus=2)

    def lost(handle, *_):
        if handle == 1:
            raise NVMLError(LOST)
        return 400_000

    for name, answer in list(fake.answers.items()):
        if name.startswith("nvmlDeviceGet") and name not in (
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
        ):
            fake.answers[name] = lambda handle, *args, answer=answer: (
                lost(handle) if handle == 1 else answer(handle, *args) if callable(answer) else answer
            )
    sampler = prepared(fake)
    rows = sampler.sample(100.0)
    for source in ("gpu", "gpu_link", "gpu_util", "gpu_process"):
        assert {row[0].split("/")[0] for row in rows[source]} == {"0"}, source


def test_older_names_are_asked_where_the_new_ones_lack():
    fake = FakeNvml()
    del fake.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    fake.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 8
    sampler = prepared(fake)
    assert named(sampler, "gpu", sampler.sample(100.0)["gpu"][0])["event_reasons"] == 8


def test_memory_of_a_process_that_the_driver_does_not_tell_is_missing():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    assert prepared(fake).sample(100.0)["gpu_process"] == [["0/7", None]]


def test_what_is_slow_here_is_asked_less_often():
    fake = FakeNvml()

    def slow(_):
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return 400_000

    fake.answers["nvmlDeviceGetPowerUsage"] = slow
    sampler = prepared(fake)
    for second in range(9):  # 10 ms at a thousandth of a core: due again after ten seconds at the earliest
        sampler.sample(100.0 + second)
    assert fake.calls.count("nvmlDeviceGetPowerUsage") == 1
    assert fake.calls.count("nvmlDeviceGetSamples") > 1


def test_the_call_that_sleeps_is_never_made():
    fake = FakeNvml()
    fake.answers["nvmlDeviceGetPcieThroughput"] = 1
    sampler = prepared(fake)
    sampler.sample(100.0)
    assert "nvmlDeviceGetPcieThroughput" not in fake.calls


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nvmlInit": NVMLError(NO_DRIVER)}, "driver does not answer"),
        ({"nvmlDeviceGetCount": 0}, "no GPU"),
        ({"nvmlDeviceGetCount": NVMLError(LOST)}, "lists no GPUs"),
        ({"nvmlDeviceGetHandleByIndex": NVMLError(4)}, "no GPU that we may ask"),
    ],
)
def test_a_driver_that_gives_nothing_is_not_available(change, why):
    fake = FakeNvml()
    fake.answers.update(change)
    sampler = NvmlSampler(lambda: fake)
    assert why in (sampler.prepare() or "")
    sampler.close()


def test_a_package_that_is_not_there_is_named():
    def load():
        raise ModuleNotFoundError("pynvml")

    assert NvmlSampler(load).prepare() == "the package nvidia-ml-py is not installed"


@pytest.mark.gpu
def test_a_real_gpu_answers():
    sampler = NvmlSampler()
    if why := sampler.prepare():
        pytest.skip(why)
    begun = time.thread_time()
    rows = sampler.sample(time.monotonic())
    print(f"{(time.thread_time() - begun) * 1e3:.1f} ms of CPU", rows)
    assert rows["gpu"][0][1:3] != [None, None]
    assert rows["gpu"][0][6] > 0
    time.sleep(1.5)
    assert all(0 <= row[2] <= 100 for row in sampler.sample(time.monotonic() + 60)["gpu_util"])
    sampler.close()
