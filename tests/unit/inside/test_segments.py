"""Shared memory of ended workers: what nobody will open goes, what is open stays."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from feedtune.inside.segments import unlink_undelivered
from feedtune.inside.swap import shut_down

SHM = Path("/dev/shm")


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def segment(pid: int, name: str) -> Path:
    path = SHM / f"torch_{pid}_{name}"
    path.write_bytes(b"x" * 4096)
    return path


def test_undelivered_segments_of_a_worker_go(ended) -> None:
    mine, other = segment(ended, "1_0"), segment(10 * ended + 1, "1_0")
    try:
        assert unlink_undelivered([ended]) == [mine.name]
        assert not mine.exists()
        assert other.exists()
        assert unlink_undelivered([]) == []
    finally:
        mine.unlink(missing_ok=True)
        other.unlink()


def test_a_segment_that_this_process_has_opened_stays(ended) -> None:
    """Its batch is still with the loop; torch frees it later and fails where it has gone."""
    path = segment(ended, "1_1")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            assert unlink_undelivered([ended]) == []
        assert unlink_undelivered([ended]) == [path.name]
    finally:
        path.unlink(missing_ok=True)


def test_a_loader_that_is_shut_down_leaves_nothing_in_flight() -> None:
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        iterator = iter(DataLoader(torch.arange(4000.0), batch_size=4, num_workers=2, prefetch_factor=8))
        held = next(iterator)
        workers = [worker.pid for worker in iterator._workers]
        left = [path for pid in workers for path in SHM.glob(f"torch_{pid}_*")]
        assert left, "no batch was in flight"
        shut_down(iterator)
        del iterator
        assert held.tolist() == [0.0, 1.0, 2.0, 3.0]
        del held
        assert [path for pid in workers for path in SHM.glob(f"torch_{pid}_*")] == []
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
