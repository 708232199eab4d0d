"""The facts of the machine, read from recorded ``/proc`` and ``/sys`` texts under a redirected root."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from feedtune import machine
from feedtune.machine import read_machine

GIB = 2**30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   50331648 kB\nHugePages_Total: 0\n"
LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024         1048576      files\n"
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(root: Path, cpus: str = "0-11", **more: str) -> Path:
    """A host of 64 GiB with 12 CPUs in the mask, no cgroup yet."""
    return write(
        root,
        {
            "proc/self/status": f"Name:\tpython\nCpus_allowed:\tfff\nCpus_allowed_list:\t{cpus}\n",
            "proc/meminfo": MEMINFO,
            "proc/self/limits": LIMITS,
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: b",
            "proc/sys/kernel/hostname": "node7\n",
            "proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
            **more,
        },
    )


def v1_nested(root: Path, outer: str, inner: str) -> Path:
    """Two v1 cgroups, /job and /job/step, with these CFS quotas of a period of 100 ms."""
    cpu = "sys/fs/cgroup/cpu,cpuacct/job"
    return write(
        host(root),
        {
            "proc/self/mountinfo": V1_MOUNTS,
            "proc/self/cgroup": "4:memory:/job/step\n2:cpu,cpuacct:/job/step\n1:name=systemd:/\n0::/\n",
            f"{cpu}/cpu.cfs_quota_us": outer,
            f"{cpu}/cpu.cfs_period_us": "100000\n",
            f"{cpu}/step/cpu.cfs_quota_us": inner,
            f"{cpu}/step/cpu.cfs_period_us": "100000\n",
        },
    )


def v2_nested(root: Path, outer: str, inner: str, cpus: str = "0-11") -> Path:
    return write(
        host(root, cpus),
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/job.slice/step.scope\n",
            "sys/fs/cgroup/job.slice/cpu.max": outer,
            "sys/fs/cgroup/job.slice/step.scope/cpu.max": inner,
        },
    )


@pytest.mark.parametrize("nested", [v1_nested, v2_nested], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("outer", "inner"), [("400000", "800000"), ("800000", "400000")], ids=["outer", "inner"]
)
def test_t11_cores_are_affinity_within_the_cgroup_quota(tmp_path, nested, outer, inner) -> None:
    """12 CPUs in the mask, 4 by the tighter of two nested cgroups, wherever on the path that one is."""
    if nested is v2_nested:
        outer, inner = f"{outer} 100000\n", f"{inner} 100000\n"
    facts = read_machine(nested(tmp_path, outer, inner))
    assert (facts.affinity_cores, facts.cpu_quota, facts.cores) == (12, 4.0, 4)


@pytest.mark.parametrize(
    ("cpus", "quota", "cores"),
    [
        ("0-1", "400000 100000", 2),  # the mask is tighter than the quota
        ("0-11", "max 100000", 12),
        ("0-11", "250000 100000", 3),  # half a core is worth a worker
        ("0-11", "50000 100000", 1),
        ("0,2,4-5", "max 100000", 4),
    ],
)
def test_cores_for_masks_and_quotas(tmp_path, cpus, quota, cores) -> None:
    assert read_machine(v2_nested(tmp_path, "max 100000", quota, cpus)).cores == cores


def test_v1_without_a_quota_leaves_the_mask(tmp_path) -> None:
    facts = read_machine(v1_nested(tmp_path, "-1\n", "-1\n"))
    assert (facts.cpu_quota, facts.cores) == (None, 12)


def test_a_container_that_sees_the_path_of_the_host_reads_its_own_mount(tmp_path) -> None:
    """Docker on v1 shows /docker/ab in /proc/self/cgroup and mounts that folder as the top."""
    root = write(
        host(tmp_path),
        {
            "proc/self/cgroup": "2:cpu:/docker/ab/job\n",
            "proc/self/mountinfo": "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert read_machine(root).cores == 3


@pytest.mark.parametrize("path", ["/../../elsewhere", "/gone/away"])
def test_a_cgroup_folder_out_of_sight_falls_back_on_the_mount(tmp_path, path) -> None:
    root = write(
        host(tmp_path),
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": f"0::{path}\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/elsewhere/cpu.max": "100000 100000\n",
        },
    )
    assert read_machine(root).cores == 2


def test_memory_is_the_tightest_limit_and_what_it_leaves(tmp_path) -> None:
    step = "sys/fs/cgroup/job.slice/step.scope"
    root = write(
        v2_nested(tmp_path, "max 100000", "max 100000"),
        {
            "sys/fs/cgroup/job.slice/memory.max": str(16 * GIB),
            "sys/fs/cgroup/job.slice/memory.current": str(14 * GIB),
            "sys/fs/cgroup/job.slice/memory.stat": f"anon 1\nfile 2\ninactive_file {5 * GIB}\n",
            f"{step}/memory.max": "max\n",
            f"{step}/memory.current": str(3 * GIB),
        },
    )
    facts = read_machine(root)
    # Cache that can be dropped is available: 16 - (14 - 5).
    assert (facts.ram_bytes, facts.ram_available_bytes) == (16 * GIB, 7 * GIB)


def test_memory_of_v1_counts_no_limit_as_none(tmp_path) -> None:
    memory = "sys/fs/cgroup/memory/job"
    root = write(
        v1_nested(tmp_path, "-1", "-1"),
        {
            f"{memory}/memory.limit_in_bytes": str(8 * GIB),
            f"{memory}/memory.usage_in_bytes": str(2 * GIB),
            f"{memory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            f"{memory}/step/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    facts = read_machine(root)
    assert (facts.ram_bytes, facts.ram_available_bytes) == (8 * GIB, 7 * GIB)


def test_memory_of_the_host_where_no_cgroup_limits_it(tmp_path) -> None:
    facts = read_machine(host(tmp_path))
    assert (facts.ram_bytes, facts.ram_available_bytes) == (64 * GIB, 48 * GIB)


def test_plain_facts(tmp_path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = read_machine(host(tmp_path))
    assert (facts.hostname, facts.kernel, facts.cpu_model) == (
        "node7",
        "6.1.0-18-amd64",
        "AMD EPYC 9654 96-Core Processor",
    )
    assert (facts.nofile_soft, facts.nofile_hard) == (1024, 1048576)
    assert facts.shm_bytes is not None
    assert 0 < facts.shm_free_bytes <= facts.shm_bytes
    assert facts.gpus == ()


def test_gpus_in_bus_order_and_those_that_cuda_sees(tmp_path, monkeypatch) -> None:
    text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 230\nGPU UUID: \t GPU-{}\nBus Type: \t PCIe\n"
    gpus = "proc/driver/nvidia/gpus"
    root = host(
        tmp_path,
        **{
            f"{gpus}/0000:5d:00.0/information": text.format("bb"),
            f"{gpus}/0000:1b:00.0/information": text.format("aa"),
        },
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    facts = read_machine(root)
    assert [(gpu.model, gpu.uuid, gpu.bus) for gpu in facts.gpus] == [
        ("NVIDIA H200", "GPU-aa", "0000:1b:00.0"),
        ("NVIDIA H200", "GPU-bb", "0000:5d:00.0"),
    ]
    assert (facts.cuda_visible_devices, facts.gpu_count) == ("1", 1)


@pytest.mark.parametrize(
    ("variable", "count"),
    [(None, 2), ("", 0), ("-1", 0), ("1,0", 2), ("0,7,1", 1), ("GPU-bb", 1), ("GPU-zz", 0), ("MIG-x", 1)],
)
def test_visible_gpus(variable, count) -> None:
    assert machine.count_visible(variable, ["GPU-aa11", "GPU-bb22"]) == count


def test_an_empty_root_measures_nothing_and_raises_nothing(tmp_path) -> None:
    facts = read_machine(tmp_path)
    assert facts.cores == facts.affinity_cores == len(os.sched_getaffinity(0))
    assert (facts.ram_bytes, facts.ram_available_bytes, facts.shm_bytes, facts.nofile_soft) == (None,) * 4


def test_this_machine_reads_and_goes_into_json() -> None:
    facts = read_machine()
    assert 1 <= facts.cores <= len(os.sched_getaffinity(0))
    assert facts.ram_bytes is not None
    assert 0 < facts.ram_available_bytes <= facts.ram_bytes
    document = json.loads(json.dumps(facts.as_dict()))
    assert document["cores"] == facts.cores
    assert document["gpu_count"] == facts.gpu_count
    assert document["gpus"] == [{"model": gpu.model, "uuid": gpu.uuid, "bus": gpu.bus} for gpu in facts.gpus]
