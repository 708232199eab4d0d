"""The built-in training script as people start it: alone and under torchrun, on good and on bad data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from feedtune.workloads.demo_data import make_photos
from feedtune.workloads.vision import main
from shard_tools.pack import pack_folder

SCRIPT = ["-m", "feedtune.workloads.vision"]
ALONE = [sys.executable, *SCRIPT]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *SCRIPT]
SMALL = ["--model", "tiny", "--image-size", "32", "--log-every", "2"]


def run(command: list[str], *options: object) -> subprocess.CompletedProcess[str]:
    """Run the script without a GPU; the result carries both streams as text."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [*command, *map(str, options)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "photos"
    make_photos(folder, 64, size=(64, 48))
    return folder


def test_one_process_trains_and_saves(photos: Path, tmp_path: Path) -> None:
    target = tmp_path / "last.pt"
    target.write_text("an older checkpoint")
    result = run(ALONE, "--data", photos, *SMALL, "--batch-size", 16, "--epochs", 2, "--save", target)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny on 64 images of 10 classes, 4 steps an epoch, 1 x cpu, batch 16 on each"
    assert re.fullmatch(r"epoch 1 step 8: loss \d+\.\d{4}, \d+\.\d\d steps/s, \d+\.\d images/s", lines[-2])
    assert re.fullmatch(r"done: 8 steps, \d+\.\d\d steps/s, \d+\.\d images/s", lines[-1])
    state = torch.load(target, weights_only=True)
    assert (state["steps"], state["epoch"]) == (8, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_two_ranks_train_over_epochs_with_workers(photos: Path, tmp_path: Path) -> None:
    loader = ["--num-workers", 1, "--prefetch-factor", 2, "--persistent-workers"]
    target = tmp_path / "last.pt"
    result = run(
        TWO_RANKS, "--data", photos, *SMALL, "--batch-size", 8, "--steps", 6, *loader, "--save", target
    )
    assert result.returncode == 0, result.stderr
    # One rank speaks for both, and four steps are an epoch of each rank's half.
    assert result.stdout.count("done: 6 steps") == 1
    assert "4 steps an epoch, 2 x cpu" in result.stdout
    assert "epoch 1 step 6: loss" in result.stdout
    assert "Warning" not in result.stderr
    # A model that was saved from under DDP loads without it.
    assert not [name for name in torch.load(target, weights_only=True)["model"] if name.startswith("module.")]


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_shards_train_like_their_folder(photos: Path, tmp_path: Path, capsys, form: str) -> None:
    pack_folder(photos, tmp_path / "shards", form=form, workers=1)
    assert main(["--data", str(tmp_path / "shards"), *SMALL, "--batch-size", "16", "--num-workers", "1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("tiny on 64 images of 10 classes, 4 steps an epoch")
    assert "done: 4 steps" in output


def test_shards_of_a_flat_folder_are_one_class(photos: Path, tmp_path: Path, capsys) -> None:
    pack_folder(photos / "beach", tmp_path / "shards", workers=1)
    assert main(["--data", str(tmp_path / "shards"), *SMALL, "--batch-size", "2"]) == 0
    assert "images of 1 classes" in capsys.readouterr().out


def test_a_sample_that_is_no_image_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "in/cat").mkdir(parents=True)
    (tmp_path / "in/cat/notes.txt").write_text("no image")
    pack_folder(tmp_path / "in", tmp_path / "shards", workers=1)
    options = [*SMALL, "--batch-size", "1", "--num-workers", "1"]
    assert main(["--data", str(tmp_path / "shards"), *options]) == 2
    message = capsys.readouterr().err
    assert "cat/notes.txt" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("case", ["missing", "empty", "batch", "damaged", "damaged-in-worker"])
def test_bad_data_ends_with_one_clear_message(photos: Path, tmp_path: Path, case: str) -> None:
    data, batch, options, part = tmp_path, 2, [], "no images below"
    if case == "missing":
        data, part = tmp_path / "gone", "there is no data folder"
    elif case == "batch":
        data, batch, part = photos, 65, "--batch-size 65 is larger than the 64 images"
    elif case.startswith("damaged"):
        options = ["--num-workers", 1] if case == "damaged-in-worker" else []
        part, batch = f"cannot decode {tmp_path / 'a.jpg'}", 1
        (tmp_path / "a.jpg").write_bytes(b"\xff\xd8 no more")
    result = run(ALONE, "--data", data, *SMALL, "--batch-size", batch, *options)
    assert result.returncode == 2
    assert part in result.stderr
    assert "  -> " in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert "done" not in result.stdout
