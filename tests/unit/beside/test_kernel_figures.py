"""CPUs, memory, pressure, cgroups and disks from recorded files of several kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedtune.beside.cgroups import CgroupSampler, cgroup_folders
from feedtune.beside.disks import DiskSampler
from feedtune.beside.pressure import PressureSampler
from feedtune.beside.system import SystemSampler


def fill(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/4242/cgroup": "0::/job/step\n",
    "proc/self/cgroup": "0::/other\n",
    "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 9000000\n",
    "sys/fs/cgroup/memory.current": "9000\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 7000000\nnr_periods 90\nnr_throttled 9\nthrottled_usec 1500000",
    "sys/fs/cgroup/job/memory.current": "2000\n",
    "sys/fs/cgroup/job/memory.max": "17179869184\n",
    "sys/fs/cgroup/job/memory.events": "low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n",
    "sys/fs/cgroup/job/memory.stat": "anon 1200\nfile 800\ninactive_file 300\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/step/cpu.stat": "usage_usec 5000000\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
    "sys/fs/cgroup/job/step/memory.current": "1000\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.events": "max 0\noom_kill 0\n",
    "sys/fs/cgroup/job/step/memory.stat": "anon 600\ninactive_file 100\n",
    "sys/fs/cgroup/job/step/cpu.pressure": "some avg10=0.0 avg60=0.0 avg300=0.0 total=500000\n",
    "sys/fs/cgroup/other/cpu.stat": "usage_usec 1\n",
}
V1 = {
    "proc/4242/cgroup": "4:memory:/docker/ab/step\n2:cpu,cpuacct:/docker/ab\n0::/\n",
    "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n",
    "proc/self/mountinfo": (
        "30 29 0:27 /docker/ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
        "31 29 0:28 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    ),
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 90\nnr_throttled 9\nthrottled_time 1500000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "17179869184\n",
    "sys/fs/cgroup/memory/memory.failcnt": "4\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "sys/fs/cgroup/memory/memory.stat": "rss 1\ntotal_rss 1200\ntotal_inactive_file 300\n",
    "sys/fs/cgroup/memory/step/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/step/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/step/memory.failcnt": "0\n",
    "sys/fs/cgroup/memory/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
    "sys/fs/cgroup/memory/step/memory.stat": "rss 1\ntotal_rss 600\ntotal_inactive_file 100\n",
}


def test_v2_reads_the_commands_cgroup_and_ancestors_with_a_limit(tmp_path):
    sampler = CgroupSampler(fill(tmp_path, V2), 4242)
    assert sampler.prepare() is None
    rows = sampler.sample(100.0)
    assert rows["cgroup_cpu"] == [
        ["/sys/fs/cgroup/job/step", 0, 0, 0.0, 5.0],
        ["/sys/fs/cgroup/job", 90, 9, 1.5, 7.0],
    ]
    assert rows["cgroup_memory"] == [
        ["/sys/fs/cgroup/job/step", 1000, None, 0, 0],
        ["/sys/fs/cgroup/job", 2000, 17179869184, 4, 1],
    ]
    assert rows["cgroup_memory_detail"] == [
        ["/sys/fs/cgroup/job/step", 600, 100],
        ["/sys/fs/cgroup/job", 1200, 300],
    ]
    assert sampler.sample(101.0)["cgroup_memory_detail"] == []
    sampler.close()


def test_v1_reads_the_same_from_its_hierarchies_in_a_container(tmp_path):
    sampler = CgroupSampler(fill(tmp_path, V1), 4242)
    assert sampler.prepare() is None
    rows = sampler.sample(100.0)
    assert rows["cgroup_cpu"] == [["/sys/fs/cgroup/cpu", 90, 9, 1.5, None]]
    assert rows["cgroup_memory"] == [
        ["/sys/fs/cgroup/memory/step", 1000, None, 0, None],
        ["/sys/fs/cgroup/memory", 2000, 17179869184, 4, 1],
    ]
    assert rows["cgroup_memory_detail"] == [
        ["/sys/fs/cgroup/memory/step", 600, 100],
        ["/sys/fs/cgroup/memory", 1200, 300],
    ]
    sampler.close()


def test_the_cgroup_of_another_process_is_followed(tmp_path):
    sampler = CgroupSampler(fill(tmp_path, V2))
    assert sampler.prepare() is None
    assert [row[0] for row in sampler.sample(1.0)["cgroup_cpu"]] == ["/sys/fs/cgroup/other"]
    sampler.follow(4242)
    assert sampler.sample(2.0)["cgroup_cpu"][0][0] == "/sys/fs/cgroup/job/step"
    sampler.close()


def test_a_cgroup_that_is_removed_meanwhile_has_no_rows(tmp_path):
    sampler = CgroupSampler(fill(tmp_path, V2), 4242)
    sampler.prepare()
    for file in (tmp_path / "sys/fs/cgroup/job/step").iterdir():
        file.unlink()
    rows = sampler.sample(1.0)
    assert [row[0] for row in rows["cgroup_cpu"]] == ["/sys/fs/cgroup/job"]
    assert [row[0] for row in rows["cgroup_memory"]] == ["/sys/fs/cgroup/job"]
    sampler.close()


@pytest.mark.parametrize("path", ["/../../elsewhere", "/elsewhere", "/job/../.."])
def test_a_path_outside_the_mount_ends_at_the_mount(tmp_path, path):
    files = {**V1, "proc/4242/cgroup": f"2:cpu,cpuacct:{path}\n"}
    assert cgroup_folders(fill(tmp_path, files), 4242, "cpu") == [tmp_path / "sys/fs/cgroup/cpu"]


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "a:b\n"])
def test_a_strange_cgroup_file_gives_no_folder_or_an_error_that_drops_one_sampler(tmp_path, text):
    fill(tmp_path, {**V2, "proc/4242/cgroup": text})
    folders: list[Path] = []
    try:
        folders = cgroup_folders(tmp_path, 4242, "")
    except ValueError:
        return
    assert folders in ([], [tmp_path / "sys/fs/cgroup"])


def test_pressure_of_the_host_and_of_the_cgroup(tmp_path):
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\n"
    full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n"
    sampler = PressureSampler(
        fill(tmp_path, {**V2, "proc/pressure/cpu": line, "proc/pressure/io": line + full}), 4242
    )
    assert sampler.prepare() is None
    assert sampler.sample(1.0)["pressure"] == [
        ["cpu", 2.0, None],
        ["io", 2.0, 1.0],
        ["cgroup/cpu", 0.5, None],
    ]
    sampler.close()


def test_pressure_that_is_there_and_switched_off(tmp_path):
    """Without psi=1 the files exist and reading them fails: as an empty file here."""
    sampler = PressureSampler(fill(tmp_path, {"proc/pressure/cpu": ""}))
    assert "psi=1" in (sampler.prepare() or "")
    sampler.close()


DISKSTATS = """\
   7       0 loop0 5 0 8 1 0 0 0 0 0 0 0
 259       0 nvme0n1 100 2 2000 300 50 5 800 90 4 250 390 0 0 0 0 0 0
 259       1 nvme0n1p1 90 2 1900 290 50 5 800 90 4 240 380 0 0 0 0 0 0
 253       0 dm-0 190 0 1900 290 50 0 800 90 4 240 380 0 0 0 0 0 0
  43       0 nbd0 1 2
"""


def test_only_whole_devices_with_hardware_count(tmp_path):
    fill(tmp_path, {"proc/diskstats": DISKSTATS, "sys/block/loop0/size": "1", "sys/block/dm-0/size": "1"})
    (tmp_path / "sys/block/nvme0n1/device").mkdir(parents=True)
    sampler = DiskSampler(tmp_path)
    assert sampler.prepare() is None
    assert sampler.sample(1.0)["disk"] == [["nvme0n1", 100, 1024000, 0.3, 50, 409600, 0.09, 4, 0.25]]
    sampler.close()


def test_without_sys_names_decide(tmp_path):
    sampler = DiskSampler(fill(tmp_path, {"proc/diskstats": DISKSTATS}))
    assert sampler.prepare() is None
    assert [row[0] for row in sampler.sample(1.0)["disk"]] == ["nvme0n1", "nvme0n1p1"]
    sampler.close()


def test_no_disk_of_our_own_is_said(tmp_path):
    sampler = DiskSampler(fill(tmp_path, {"proc/diskstats": DISKSTATS.splitlines()[0] + "\n"}))
    assert "no device" in (sampler.prepare() or "")
    sampler.close()


def test_the_host_and_single_cores_every_ten_seconds(tmp_path):
    stat = "cpu  200 0 100 1000 50 0 0 0 0 0\ncpu0 100 0 50 500 25 0 0 0 0 0\nintr 1 2 3\n"
    stat += "procs_running 2\nprocs_blocked 1\n"
    meminfo = "MemTotal:  100 kB\nMemAvailable:  40 kB\nDirty:  1 kB\nHugePages_Total:  0\n"
    sampler = SystemSampler(fill(tmp_path, {"proc/stat": stat, "proc/meminfo": meminfo, "dev/shm/x": ""}))
    assert sampler.prepare() is None
    rows = sampler.sample(100.0)
    assert rows["cpu"] == [["", 2.0, 0.0, 1.0, 10.0, 0.5, 0.0, 0.0, 0.0, 2, 1]]
    assert rows["core"] == [["0", 1.5, 5.25]]
    assert rows["memory"] == [["", 102400, 40960, None, 1024, None, None, None]]
    assert rows["shm"][0][1] > 0
    assert "core" not in sampler.sample(105.0)
    assert "core" in sampler.sample(110.1)
    sampler.close()
