"""The processes of a training as /proc shows them: real ones that come and go, and fixtures of odd ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from feedtune.beside.base import KernelFile, Turns
from feedtune.beside.processes import ProcessSampler
from feedtune.beside.procfs import parse_rank, parse_stat
from feedtune.beside.tree import ProcessTree, Seen, assign_roles

PATIENCE_S = 30.0  # only a failing test waits so long
FAMILY = """
import os, sys, threading, time
def sleeper(name=None):
    pid = os.fork()
    if pid == 0:
        if name:
            open("/proc/self/comm", "w").write(name)
        sys.stdin.read() if name is None else time.sleep(600)
        os._exit(0)
    return pid
children = [sleeper("pt_data_worker"), sleeper("a) (b c")]
thread_children = []
def forks():
    thread_children.append(sleeper("of thread"))
    time.sleep(600)
threading.Thread(target=forks, daemon=True).start()
def pin():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("pt_data_pin")
    time.sleep(600)
threading.Thread(target=pin, daemon=True).start()
while not thread_children:
    time.sleep(0.01)
time.sleep(0.2)
print(*children, *thread_children, flush=True)
for line in sys.stdin:
    os.kill(children[0], 9)
    os.waitpid(children[0], 0)
    print("killed", flush=True)
"""


@pytest.fixture
def family():
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RANK": "5"},
    )
    process.family = [int(pid) for pid in process.stdout.readline().split()]
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def sampler_of(pid, root, run=None, most_open=1000):
    sampler = ProcessSampler(pid, root, run, most_open)
    assert sampler.prepare() is None
    return sampler


@pytest.fixture
def root(tmp_path):
    """The real /proc behind a root that tests can also fill themselves."""
    (tmp_path / "proc").symlink_to("/proc")
    return tmp_path


@pytest.mark.parametrize("most_open", [1000, 0])
def test_the_whole_tree_is_read_with_parts_and_names(family, root, most_open):
    sampler = sampler_of(family.pid, root, most_open=most_open)
    now_s = time.monotonic()
    rows = sampler.sample(now_s)
    worker, odd, of_thread = family.family
    starts = {int(row[0]): row[1:] for row in rows["process_start"]}
    assert {p: row[1:4] for p, row in starts.items()} == {
        family.pid: ["main", 5, starts[family.pid][3]],
        worker: ["worker", 5, "pt_data_worker"],
        odd: ["helper", None, "a) (b c"],
        of_thread: ["helper", None, "of thread"],
    }
    assert starts[worker][0] == str(family.pid)
    assert starts[family.pid][4] == pytest.approx(time.monotonic(), abs=60)
    main = dict(
        zip(
            sampler.columns["process"],
            next(r for r in rows["process"] if r[0] == str(family.pid))[1:],
            strict=True,
        )
    )
    assert main["state"] in ("S", "R")
    assert main["threads"] == 3
    assert main["rss_bytes"] > 1 << 20
    assert main["main_cpu_s"] > 0
    assert main["rchar_bytes"] > 0
    assert [row[1] for row in rows["thread"]] == ["pin"]
    assert all(row[1] > 0 for row in rows["process_descriptors"])
    assert all(row[1] > 100_000 for row in rows["process_memory"])
    assert all(row[2] >= 1 for row in rows["process_limits"])
    sampler.close()


def test_an_end_is_said_once_and_the_others_go_on(family, root):
    sampler = sampler_of(family.pid, root)
    now_s = time.monotonic()
    sampler.sample(now_s)
    family.stdin.write("kill\n")
    family.stdin.flush()
    assert family.stdout.readline() == "killed\n"
    rows = sampler.sample(now_s + 1)
    assert rows["process_end"] == [[str(family.family[0])]]
    assert len(rows["process"]) == 3
    assert sampler.sample(now_s + 2)["process_end"] == []
    sampler.close()


def test_processes_whose_parent_has_ended_stay(family, root):
    sampler = sampler_of(family.pid, root)
    now_s = time.monotonic()
    sampler.sample(now_s)
    family.kill()
    family.wait()
    rows = sampler.sample(now_s + 1)
    assert rows["process_end"] == [[str(family.pid)]]
    assert {int(row[0]) for row in rows["process"]} == set(family.family)
    assert len(sampler.sample(now_s + 20)["process"]) == 3
    sampler.close()


def test_a_command_that_is_not_there_is_noted_once(root):
    gone = subprocess.Popen(["true"])
    gone.wait()
    sampler = sampler_of(gone.pid, root)
    now_s = time.monotonic()
    assert sampler.sample(now_s)["note"] == [["processes", f"there is no process {gone.pid}"]]
    rows = sampler.sample(now_s + 1)
    assert not any(rows.values())
    sampler.close()


def process_folder(root: Path) -> Path:
    """A process 4242 of which the system tells no more than its stat."""
    folder = root / "proc" / "4242"
    (folder / "task" / "4242").mkdir(parents=True)
    (root / "proc" / "self").mkdir()
    (root / "proc/self/stat").write_text("x")
    (folder / "stat").write_bytes(STAT)
    (folder / "task/4242/children").write_text("")
    return folder


def test_what_other_users_processes_keep_from_us_is_missing(tmp_path):
    """Their stat can be read by anyone; io, environ and smaps_rollup cannot."""
    process_folder(tmp_path)
    sampler = sampler_of(4242, tmp_path)
    rows = sampler.sample(time.monotonic())
    assert rows["process"] == [
        ["4242", "D", 21.5, 3.1, 9731, 3, 1, 51200 * os.sysconf("SC_PAGE_SIZE"), None, None]
    ]
    assert rows["process_memory"] == [["4242", None]]
    assert rows["process_limits"] == [["4242", None, None]]
    assert rows["process_descriptors"] == [["4242", None]]
    sampler.close()


STAT = (
    b"4242 (py\xff th) on) D 17 4242 17 34816 4242 4194560 9731 12 3 0 2150 310 0 0 20 0 1 0 88123 "
    b"815104000 51200 18446744073709551615 1 1 0 0 0 0 0 16781312 134254082 0 0 0 17 1 0 0 0 0 0\n"
)


def test_another_process_with_the_same_pid_is_another_process(tmp_path):
    folder = process_folder(tmp_path)
    sampler = sampler_of(4242, tmp_path)
    now_s = time.monotonic()
    assert len(sampler.sample(now_s)["process"]) == 1
    (folder / "stat").write_bytes(STAT.replace(b" 88123 ", b" 99999 "))
    rows = sampler.sample(now_s + 1)
    assert rows["process_end"] == [["4242"]]
    assert rows["process"] == []
    sampler.close()


def test_without_lists_of_children_the_tree_is_found_by_parents(tmp_path):
    """Kernels without CONFIG_PROC_CHILDREN."""
    for pid, parent in ((100, 1), (101, 100), (102, 101), (200, 1)):
        folder = tmp_path / "proc" / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "stat").write_bytes(
            STAT.replace(b"4242 (", b"%d (" % pid, 1).replace(b"D 17 ", b"D %d " % parent)
        )
    tree = ProcessTree(tmp_path, None, 1000)
    tree.grow([100], 50.0)
    assert set(tree.members) == {100, 101, 102}
    tree.close()


def test_a_flood_of_processes_is_bounded_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("feedtune.beside.tree._MOST_PROCESSES", 2)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc/self/stat").write_text("x")
    for pid, parent in ((100, 1), (101, 100), (102, 100), (103, 100)):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir()
        (folder / "stat").write_bytes(STAT.replace(b"D 17 ", b"D %d " % parent))
    sampler = sampler_of(100, tmp_path)
    rows = sampler.sample(50.0)
    assert len(rows["process"]) == 2
    assert rows["processes_left_out"] == [["", 2]]
    sampler.close()


def test_the_hooks_word_for_ranks_wins(family, root, tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps({"rank": 7, "pid": family.pid}))
    (tmp_path / "rank1.json").write_text('{"rank": 1, "pi')  # half written, or something else
    (tmp_path / "rank2.json").write_text("[]")
    other = {"rank": 3, "pid": family.family[1], "host": "another node"}  # its pids are others
    (tmp_path / "rank3.json").write_text(json.dumps(other))
    sampler = sampler_of(family.pid, root, run=tmp_path)
    starts = {row[0]: row[2:4] for row in sampler.sample(time.monotonic())["process_start"]}
    assert starts[str(family.pid)] == ["main", 7]
    assert starts[str(family.family[0])] == ["worker", 7]
    assert starts[str(family.family[1])] == ["helper", None]
    sampler.close()


def test_a_wrapper_with_the_same_rank_trains_only_while_nobody_else_does():
    shell, python = Seen(1, 0, 5, "bash", 3), Seen(2, 1, 6, "python", 3)
    assert assign_roles([shell, python], {})[1] == ("main", 3)
    worker = Seen(3, 2, 7, "pt_data_worker", 3)
    roles = assign_roles([shell, python, worker], {})
    assert roles == {1: ("helper", None), 2: ("main", 3), 3: ("worker", 3)}


def test_the_environment_says_nothing_against_the_hook():
    """Under mp.spawn all ranks have inherited the launcher's variable."""
    launcher, rank, helper = Seen(1, 0, 5, "python", 0), Seen(2, 1, 6, "python", 0), Seen(3, 2, 7, "sh", 0)
    roles = assign_roles([launcher, rank, helper], {2: 3})
    assert roles == {1: ("helper", None), 2: ("main", 3), 3: ("helper", None)}


def test_parents_that_form_a_circle_do_not_hang():
    """A pid that was given anew between two reads."""
    assert assign_roles([Seen(1, 2, 5, "a", 0), Seen(2, 1, 6, "b", None)], {})[1] == ("main", 0)


def test_one_process_without_a_launcher_is_known_by_its_workers():
    roles = assign_roles([Seen(1, 0, 5, "python", None), Seen(2, 1, 6, "pt_data_worker", None)], {})
    assert roles == {1: ("main", None), 2: ("worker", None)}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (b"", None),
        (b"RANK=x\0", None),
        (b"=\0RANK=\0SLURM_PROCID=12\0", 12),
        (b"XRANK=1\0", None),
        (b"RANK\0", None),
    ],
)
def test_ranks_out_of_odd_environments(environ, rank):
    assert parse_rank(environ) == rank


@pytest.mark.parametrize("comm", [b"", b")", b"((", b") R 1 2", b"a\nb", b"\xf0\x9f"])
def test_names_of_processes_cannot_shift_their_fields(comm):
    stat = parse_stat(STAT.replace(b"py\xff th) on", comm))
    assert (stat.state, stat.parent, stat.rss_pages) == ("D", 17, 51200)
    assert stat.comm == comm.decode(errors="replace")


def test_a_kernel_file_reads_anew_and_bears_that_it_goes(tmp_path):
    path = tmp_path / "file"
    file = KernelFile(str(path))
    assert file.read() is None
    path.write_bytes(b"x" * 200_000)
    assert len(file.read()) == 200_000
    path.write_bytes(b"y")
    assert file.read() == file.read_part() == b"y"
    file.close()
    path.unlink()
    assert file.read() is file.read_part() is None


def test_a_kernel_file_of_a_process_that_has_ended_is_gone():
    process = subprocess.Popen(["sleep", "600"])
    file = KernelFile(f"/proc/{process.pid}/stat")
    assert file.read_part()
    process.kill()
    process.wait()
    assert file.read_part() is None
    assert file.read() is None


def test_turns_keep_to_their_share_and_leave_nobody_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("feedtune.beside.base.time.thread_time", lambda: clock[0])
    turns, reads = Turns("x", share=0.01, every_s=10.0), []
    for second in range(100):
        for pid in turns.due([1, 2, 3, 4], float(second)):
            with turns.spend(pid, float(second)):
                clock[0] += 0.05  # five seconds' worth
                reads.append(pid)
    assert 18 <= len(reads) <= 23  # a hundredth of 110 s of credit, in pieces of 0.05 s
    assert {reads.count(pid) for pid in (1, 2, 3, 4)} <= {4, 5, 6}
