"""What every sampler owes the one who asks it: rows of the promised shape, and no harm where nothing is."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest

from feedtune.beside.base import NullSampler
from feedtune.beside.cgroups import CgroupSampler
from feedtune.beside.disks import DiskSampler
from feedtune.beside.nvml import NvmlSampler
from feedtune.beside.pressure import PressureSampler
from feedtune.beside.processes import ProcessSampler
from feedtune.beside.readings import OWN_COLUMNS
from feedtune.beside.sampler import default_samplers
from feedtune.beside.system import SystemSampler

_FAKE = Path(__file__).parents[1] / "unit" / "beside" / "fake_nvml.py"
_SPEC = importlib.util.spec_from_file_location("fake_nvml_of_contract", _FAKE)
fake_nvml = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fake_nvml)

MAKERS = {
    "null": lambda _: NullSampler(),
    "processes": lambda root: ProcessSampler(os.getpid(), root, None, 1000),
    "system": lambda root: SystemSampler(root),
    "pressure": lambda root: PressureSampler(root, os.getpid()),
    "cgroups": lambda root: CgroupSampler(root, os.getpid()),
    "disks": lambda root: DiskSampler(root),
    "nvml": lambda _: NvmlSampler(fake_nvml.FakeNvml),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def test_every_sampler_that_is_started_is_tested_here(tmp_path):
    assert {s.name for s in default_samplers(None, None)} | {"null"} == set(MAKERS)
    assert all(make(tmp_path).name == name for name, make in MAKERS.items())


def test_rows_have_the_promised_shape(make):
    sampler = make(Path("/"))
    if why := sampler.prepare():
        pytest.skip(why)  # a machine without pressure or cgroups
    seen = set()
    for now_s in (time.monotonic(), time.monotonic() + 100):
        rows = sampler.sample(now_s)
        json.dumps(rows, allow_nan=False)
        for source, found in rows.items():
            seen |= {source} if found else set()
            columns = {**OWN_COLUMNS, **sampler.columns}[source]
            for of, *values in found:
                assert isinstance(of, str)
                assert len(values) <= len(columns), (source, values)
    assert seen or sampler.name == "null"
    sampler.close()


def test_sources_belong_to_one_sampler():
    sources = [source for s in default_samplers(None, None) for source in s.columns]
    assert len(sources) == len(set(sources))


def test_where_nothing_is_to_be_read_it_says_why_and_can_still_be_asked(make, tmp_path):
    sampler = make(tmp_path)
    why = sampler.prepare()
    assert why or sampler.name in ("null", "nvml")  # these read no files
    if sampler.name not in ("nvml", "processes"):
        assert not any(sampler.sample(time.monotonic()).values())
    sampler.close()


def test_it_can_be_closed_twice_and_leaves_no_file_open(make):
    before = set(os.listdir("/proc/self/fd"))
    sampler = make(Path("/"))
    sampler.prepare()
    if sampler.prepare() is None:
        sampler.sample(time.monotonic())
    sampler.close()
    sampler.close()
    assert set(os.listdir("/proc/self/fd")) == before
