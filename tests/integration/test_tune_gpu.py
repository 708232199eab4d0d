"""Failures that only GPUs have: a full GPU, and peers that hang in NCCL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tuning import SCRIPTS, feedtune, result_of, wait_until_gone

torch = pytest.importorskip("torch")
QUICK = [
    "--trials",
    "3",
    "--max-workers",
    "2",
    "--block-seconds",
    "0.3",
    "--budget",
    "200",
    "--hang-timeout",
    "5",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def failed(tmp_path: Path, mode: str, *launcher: str) -> list[dict]:
    run = tmp_path / "run"
    words = ["tune", "--out", run, *QUICK, "--", *launcher, SCRIPTS / "failing.py"]
    done = feedtune(*words, cwd=tmp_path, MODE=mode, DEVICE="cuda", OMP_NUM_THREADS="1")
    assert done.returncode in (0, 1), done.stderr
    document = result_of(run)
    print(json.dumps([b for b in document["blocks"] if b["state"] == "failed"], indent=1))
    assert wait_until_gone(str(run)) == []
    assert document["ceiling"]["rate"]
    found = [block for block in document["blocks"] if block["state"] == "failed"]
    assert found
    assert all(block["settings"]["num_workers"] == 2 for block in found)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_gpu_is_named(tmp_path: Path) -> None:
    for block in failed(tmp_path, "memory", sys.executable):
        assert block["reason"] == "gpu_memory"
        assert "CUDA out of memory" in block["detail"]


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("mode", "reason", "text"),
    [
        ("rank_killed", "rank_died", "rank 1 was ended by SIGKILL"),
        ("hang_loop", "hang", "rank 1 hangs in its loop, in fail_in_loop"),
        ("killed", "worker_died", "a worker process was killed"),
    ],
)
def test_peers_of_a_failed_rank_under_nccl(tmp_path: Path, mode: str, reason: str, text: str) -> None:
    for block in failed(tmp_path, mode, *TORCHRUN):
        assert block["reason"] == reason
        assert text in block["detail"]
