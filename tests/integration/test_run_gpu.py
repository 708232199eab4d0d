"""A time budget on a GPU's own timeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tuning import SCRIPTS, feedtune

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def rank_of(folder: Path, how: str, pin: bool, **env: str) -> dict:
    folder.mkdir()
    words = ["run", "--json", "--out", folder / "run", "--", sys.executable, SCRIPTS / "gpu_ways.py"]
    done = feedtune(*words, cwd=folder, HOW=how, PIN="1" if pin else "0", **env)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["trainings"][0]["ranks"]
    assert (rank["clock"], rank["clock_note"]) == ("cuda", None)
    assert rank["budget"]["steps"] > 40
    print(how, pin, rank["budget"]["step_s"], rank["budget"]["parts"], rank["copies"], rank["cost_s"])
    return rank


@pytest.mark.parametrize("pin", [False, True])
def test_copies_that_cannot_be_seen_are_told_by_their_bytes(tmp_path: Path, pin: bool) -> None:
    """Inside a compiled step no tap sees them; the estimate is near what taps see of the same copies."""
    seen = rank_of(tmp_path / "seen", "to", pin)
    hidden = rank_of(tmp_path / "hidden", "compiled", pin)
    assert seen["copies"] is None
    assert hidden["copies"]["bytes"] == 4096 * 1024 * 4
    assert hidden["copies"]["pinned"] is pin
    assert hidden["budget"]["parts"]["h2d_s"] == hidden["copies"]["seconds"]
    ratio = hidden["copies"]["seconds"] / seen["budget"]["parts"]["h2d_s"]
    assert 0.5 < ratio < 2


def test_copies_into_a_buffer_are_seen(tmp_path: Path) -> None:
    rank = rank_of(tmp_path / "run", "buffer", pin=True)
    assert rank["copies"] is None
    assert rank["budget"]["parts"]["h2d_s"] > 0


def test_batches_that_lie_on_the_gpu_are_not_copied(tmp_path: Path) -> None:
    rank = rank_of(tmp_path / "run", "there", pin=False)
    assert (rank["copies"]["bytes"], rank["budget"]["parts"]["h2d_s"]) == (0, 0.0)


def test_a_second_loader_is_waited_for_behind_work_that_the_gpu_has_still(tmp_path: Path) -> None:
    bare = rank_of(tmp_path / "bare", "to", pin=True, SECOND="1")
    heavy = rank_of(tmp_path / "heavy", "to", pin=True, SECOND="1", HEAVY="1")
    assert bare["budget"]["parts"]["data_wait_s"] > 0.9 * 0.02
    assert heavy["budget"]["parts"]["data_wait_s"] < 0.1 * 0.02


def test_garbage_is_collected_behind_work_that_the_gpu_has_still(tmp_path: Path) -> None:
    bare = rank_of(tmp_path / "bare", "to", pin=True, GARBAGE="1")
    heavy = rank_of(tmp_path / "heavy", "to", pin=True, GARBAGE="1", HEAVY="1")
    assert bare["budget"]["parts"]["stall_s"] > 0.5 * bare["budget"]["step_s"]
    assert heavy["budget"]["parts"]["stall_s"] < 0.1 * bare["budget"]["parts"]["stall_s"]
