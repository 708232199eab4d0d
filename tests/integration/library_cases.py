"""Training scripts of real libraries, each over a project folder that already holds what it will overwrite.

A case's command, typed as it is, trains for ever; ``STEPS`` in the environment sets an end, and with
``LOGS`` the script writes a line into ``LOGS/saves`` for every save that it has read back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuning import BIN, SCRIPTS, environment

SAVE_EVERY = 40  # steps, in every script


@dataclass(frozen=True)
class Case:
    """A training and its project folder.

    Attributes:
        name: what stands in the test's name.
        packages: what has to be importable.
        prepare: fills an empty folder, the one to start the command in.
        command: the command as a user types it.
        saved: whether a training has really saved into a folder that was prepared before.
    """

    name: str
    packages: tuple[str, ...]
    prepare: Callable[[Path], None]
    command: list[str]
    saved: Callable[[Path], bool]

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed; looks without importing them, which takes seconds."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def run_bare(command: list[str], work: Path, logs: Path | None, steps: int) -> None:
    """Run a case's command without feedtune until it ends by itself."""
    env = environment(STEPS=str(steps), OMP_NUM_THREADS="1", **({"LOGS": str(logs)} if logs else {}))
    output = subprocess.PIPE
    process = subprocess.Popen(command, cwd=work, env=env, stdout=output, stderr=output, text=True)
    try:
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks then
        raise AssertionError(process.communicate(timeout=60)) from None
    assert process.returncode == 0, errors


def _script(name: str) -> str:
    return str(SCRIPTS / "libraries" / f"{name}.py")


def _earlier_run(command: list[str], work: Path) -> None:
    """One save of the same training: a checkpoint that it can go on from, and that knows its folder."""
    run_bare(command, work, None, SAVE_EVERY)


def _write(work: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)


def _prepare_plain(work: Path) -> None:
    _write(work, dict.fromkeys(("last.pt", "best.pt", "losses.npy", "out/step1.txt", "out/deep/old"), "old"))


def _saved_plain(work: Path) -> bool:
    new = all((work / name).read_bytes() != b"old" for name in ("last.pt", "best.pt", "losses.npy"))
    return new and not (work / "out" / "deep").exists() and (work / f"out/step{SAVE_EVERY}.txt").exists()


LIGHTNING = [sys.executable, _script("lightning_trainer")]


def _prepare_lightning(work: Path) -> None:
    _earlier_run(LIGHTNING, work)


def _saved_lightning(work: Path) -> bool:
    kept = list((work / "checkpoints").glob("epoch=*"))
    if len(kept) != 1 or int(kept[0].stem.rpartition("step=")[2]) <= SAVE_EVERY:
        return False
    return (work / "checkpoints" / "last.ckpt").read_bytes() == kept[0].read_bytes()


def _prepare_transformers(work: Path) -> None:
    for step in (20, 30):
        names = ("model.safetensors", "optimizer.pt", "trainer_state.json")
        _write(work / "out" / f"checkpoint-{step}", dict.fromkeys(names, "old"))


def _saved_transformers(work: Path) -> bool:
    (kept, *others) = sorted((work / "out").glob("checkpoint-*"))
    return not others and json.loads((kept / "trainer_state.json").read_text())["global_step"] >= SAVE_EVERY


def _prepare_tensorboard(work: Path) -> None:
    _write(work, {"runs/earlier/events.out.tfevents.1": "old"})


def _saved_tensorboard(work: Path) -> bool:
    return any(path.stat().st_size > 1000 for path in (work / "runs").glob("*/events*"))


def _prepare_safetensors(work: Path) -> None:
    tensors = {
        "weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "bias": {"dtype": "F32", "shape": [4], "data_offsets": [128, 144]},
    }
    header = json.dumps(tensors).encode()
    (work / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(144))


def _saved_safetensors(work: Path) -> bool:
    content = (work / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return int(json.loads(content[8 : 8 + length]).get("__metadata__", {}).get("step", 0)) >= SAVE_EVERY


def _prepare_distributed(work: Path) -> None:
    _write(work / "checkpoint", dict.fromkeys((".metadata", "__0_0.distcp", "__1_0.distcp", "notes"), "old"))


def _saved_distributed(work: Path) -> bool:
    names = (".metadata", "__0_0.distcp", "__1_0.distcp")
    return all((work / "checkpoint" / name).read_bytes() != b"old" for name in names)


def _prepare_helpers(work: Path) -> None:
    _write(work, dict.fromkeys(("last.txt", "last.json"), "0"))


def _saved_helpers(work: Path) -> bool:
    return all(int((work / name).read_text()) >= SAVE_EVERY for name in ("last.txt", "last.json"))


ACCELERATE = [
    *(str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", _script("accelerate_state")),
]


def _prepare_accelerate(work: Path) -> None:
    _earlier_run(ACCELERATE, work)


def _saved_accelerate(work: Path) -> bool:
    states = os.listdir(work / "project" / "checkpoints")
    return len(states) == 1 and states != ["checkpoint_0"]


CASES = [
    Case(
        "plain-files",
        ("torch", "numpy"),
        _prepare_plain,
        [sys.executable, _script("plain_files")],
        _saved_plain,
    ),
    Case("lightning", ("pytorch_lightning",), _prepare_lightning, LIGHTNING, _saved_lightning),
    Case(
        "transformers",
        ("transformers", "accelerate"),
        _prepare_transformers,
        [sys.executable, _script("transformers_trainer")],
        _saved_transformers,
    ),
    Case(
        "tensorboard",
        ("tensorboard",),
        _prepare_tensorboard,
        [sys.executable, _script("tensorboard_writer")],
        _saved_tensorboard,
    ),
    Case(
        "safetensors",
        ("safetensors",),
        _prepare_safetensors,
        [sys.executable, _script("safetensors_file")],
        _saved_safetensors,
    ),
    Case(
        "distributed-checkpoint",
        ("torch",),
        _prepare_distributed,
        [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", _script("distributed_checkpoint")],
        _saved_distributed,
    ),
    Case("accelerate", ("accelerate",), _prepare_accelerate, ACCELERATE, _saved_accelerate),
    Case(
        "helper-programs",
        ("torch",),
        _prepare_helpers,
        [sys.executable, _script("helper_programs")],
        _saved_helpers,
    ),
]
