from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from feedtune.launch import reaper


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
    held = {f"psm_{tag}", f"dataset-{tag}", f"torch_4000002_1_{tag}"}
    try:
        gone = reaper.remove_segments({4000001}, held, time.time())
        assert {name for name in names if not (shm / name).exists()} == {
            n for n, goes in names.items() if goes
        }
        assert len(gone) == 2
    finally:
        for name in names:
            (shm / name).unlink(missing_ok=True)


def test_segments_made_before_the_tree_stay() -> None:
    old = Path(f"/dev/shm/torch_4000003_1_{uuid.uuid4().hex}")
    old.touch()
    try:
        reaper.remove_segments({4000003}, [], time.time() + 10)
        assert old.exists()
    finally:
        old.unlink()


def test_a_tree_with_closed_folders_is_removed(tmp_path: Path) -> None:
    (tmp_path / "s" / "work" / "work").mkdir(parents=True)
    (tmp_path / "s" / "link").symlink_to(tmp_path)
    (tmp_path / "keep").touch()
    (tmp_path / "s" / "work").chmod(0o000)
    assert reaper.remove_tree(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    assert (tmp_path / "keep").exists()
