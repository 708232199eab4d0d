from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from feedtune.launch import leftovers, reaper


def test_ancestors_end_at_the_top() -> None:
    table = {pid: reaper.Process(pid, parent, "S") for pid, parent in ((9, 5), (5, 1), (1, 0), (7, 1))}
    assert reaper.ancestors(9, table) == {9, 5, 1}


def test_own_process_and_its_ancestors_are_never_members() -> None:
    mark = b"PATH=" + os.environb[b"PATH"]
    assert reaper.carries(os.getpid(), mark)
    found = reaper.members(os.getpid(), mark)
    assert os.getpid() not in found
    assert os.getppid() not in found
    assert 1 not in found


def test_segments_of_killed_processes_go_and_others_stay() -> None:
    tag = uuid.uuid4().hex
    shm = Path("/dev/shm")
    names = {
        f"torch_4000001_1_{tag}": True,  # pid in the tree
        f"torch_4000002_1_{tag}": False,  # another tree's
        f"psm_{tag}": True,  # held
        f"nccl-{tag}": False,  # not held
        f"dataset-{tag}": False,  # held, but no generated name
    }
    for name in names:
        (shm / name).touch()
    held = {f"/dev/shm/psm_{tag}", f"/dev/shm/dataset-{tag}", f"/dev/shm/torch_4000002_1_{tag}"}
    try:
        gone = leftovers.remove_leftovers({4000001}, held, time.time())
        assert {name for name in names if not (shm / name).exists()} == {
            n for n, goes in names.items() if goes
        }
        assert len(gone) == 2
    finally:
        for name in names:
            (shm / name).unlink(missing_ok=True)


def test_a_number_that_another_process_has_by_now_frees_nothing() -> None:
    segment = Path(f"/dev/shm/torch_{os.getpid()}_1_{uuid.uuid4().hex}")
    segment.touch()
    try:
        assert leftovers.remove_leftovers({os.getpid()}, [], time.time()) == []
        assert segment.exists()
    finally:
        segment.unlink()


@pytest.mark.parametrize(
    ("text", "pids"),
    [("12\n345\n12\n", {12, 345}), ("", set()), ("12\nrm -rf\n\n-4\n7", {12, 7}), (None, set())],
)
def test_workers_that_the_hook_has_noted(tmp_path: Path, text: str | None, pids: set[int]) -> None:
    (tmp_path / "seen").mkdir()
    if text is not None:
        (tmp_path / "seen" / "workers").write_text(text)
    assert leftovers.noted_workers(str(tmp_path)) == pids


def test_a_semaphore_is_its_creators_under_whatever_name() -> None:
    """Until a spawned worker opens it, the maps of all processes show the name of a removed file."""
    from multiprocessing.synchronize import Semaphore, SemLock

    lock: SemLock = Semaphore(ctx=multiprocessing.get_context("spawn"))
    path = f"/dev/shm/sem.{lock._semlock.name[1:]}"
    assert os.path.exists(path)
    assert path not in Path("/proc/self/maps").read_text()
    assert path in leftovers.held_by([os.getpid()])
    assert path not in leftovers.held_by([1, 4_000_001])


def test_segments_made_before_the_tree_stay() -> None:
    old = Path(f"/dev/shm/torch_4000003_1_{uuid.uuid4().hex}")
    old.touch()
    try:
        leftovers.remove_leftovers({4000003}, [], time.time() + 10)
        assert old.exists()
    finally:
        old.unlink()


def test_a_tree_with_closed_folders_is_removed(tmp_path: Path) -> None:
    (tmp_path / "s" / "work" / "work").mkdir(parents=True)
    (tmp_path / "s" / "link").symlink_to(tmp_path)
    (tmp_path / "keep").touch()
    (tmp_path / "s" / "work").chmod(0o000)
    assert leftovers.remove_tree(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    assert (tmp_path / "keep").exists()


def test_temporary_folders_that_a_process_names_or_binds_are_its_own(tmp_path: Path) -> None:
    names = ["torchelastic_abc", "torch-shm-dir-Xy12", "pymp-q_w8", "mine"]
    for name in names:
        (tmp_path / name).mkdir()
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('torch-shm-dir-Xy12/manager.sock');"
        "f = open('pymp-q_w8/file', 'w'); g = open('mine/file', 'w'); print(1, flush=True); sys.stdin.read()"
    )
    env = {"ERROR_FILE": f"{tmp_path}/torchelastic_abc/none/error.json"}
    with subprocess.Popen(
        [sys.executable, "-c", code.replace("'torch-shm", f"'{tmp_path}/torch-shm")], cwd=tmp_path, env=env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        held = leftovers.held_by([child.pid])
        child.communicate()
    leftovers.remove_leftovers([child.pid], held, time.time() + 100)
    assert all((tmp_path / name).exists() for name in names), "made before the tree was started"
    leftovers.remove_leftovers([child.pid], held, time.time() - 100)
    assert [name for name in names if (tmp_path / name).exists()] == ["mine"]


def test_all_are_stopped_from_the_top_before_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a shell sees its launcher die, and goes on with the next command."""
    sent: list[tuple[int, int]] = []
    send = reaper._send

    def recorded(pid: int, number: int) -> None:
        sent.append((pid, number))
        send(pid, number)

    monkeypatch.setattr(reaper, "_send", recorded)
    top_code = "sh -c 'sleep 600; true' & echo inner $!; wait; true"
    root_code = 'sh -c "$TOP" & echo top $!; wait; true'
    mark = f"MARK={uuid.uuid4().hex}"
    env = dict([mark.split("=")], TOP=top_code)
    # A root of its own: this process has other children, of other tests.
    with subprocess.Popen(["sh", "-c", root_code], stdout=subprocess.PIPE, text=True, env=env) as root:
        assert root.stdout is not None
        said = dict([root.stdout.readline().split(), root.stdout.readline().split()])
        until = time.monotonic() + 10
        while len(reaper.members(root.pid, mark.encode())) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        killed = reaper.kill_tree(root.pid, mark.encode(), seconds=10, reap=root.poll)
    numbers = [number for _, number in sent[:6]]
    assert numbers == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3
    assert [pid for pid, _ in sent[:2]] == [int(said["top"]), int(said["inner"])]
    assert (len(killed.pids), killed.left) == (3, [])
    assert root.returncode == 0
