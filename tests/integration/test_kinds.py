"""Loops, loaders and launchers of every kind: tuned in one start, and applied with the same batches."""

from __future__ import annotations

import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from applying import tuned
from tuning import BIN, FEEDTUNE, SCRIPTS, environment, feedtune, result_of

KINDS = SCRIPTS / "kinds.py"
SAMPLES = 42
STEPS = 40
# A loop and a loader of one kind each. How far torch reads a sampler ahead depends on prefetching: a loop
# that leaves its epochs early has one without a state.
PAIRS = [
    ("by_next", "subclass"), ("until_stopped", "iterable"), ("enumerated", "batch_sampler"),
    ("with_a_bar", "stateful_sampler"), ("sliced", "own_collate"), ("by_generator", "own_worker_init"),
    ("endless", "web_loader"), ("by_count", "lmdb_lazily"), ("in_a_class", "own_generator"),
    ("new_each_epoch", "unbatched"), ("alternating", "persistent"), ("accumulating", "distributed"),
    ("mixed_precision", "stateful_loader"), ("compiled", "lmdb_at_once"), ("validating", "iterable_split"),
]  # fmt: skip
ITERABLE = ("iterable", "iterable_split", "web_loader")
PACKAGES = {"web_loader": "webdataset", "stateful_loader": "torchdata", "stateful_sampler": "tqdm"}
ALWAYS = ("own_worker_init", "web_loader", "distributed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script's samples as an LMDB and as two tar shards."""
    import lmdb
    import webdataset

    folder = tmp_path_factory.mktemp("data")
    with lmdb.open(str(folder / "records")) as env, env.begin(write=True) as transaction:
        for index in range(SAMPLES):
            transaction.put(b"%d" % index, b"%d" % index)
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"shard-{shard:06d}.tar")) as writer:
            for index in range(shard, SAMPLES, 2):
                writer.write({"__key__": f"{index:06d}", "cls": str(index)})
    return folder


def pairs() -> list[object]:
    slow = pytest.mark.slow
    return [pytest.param(*pair, marks=() if pair[1] in ALWAYS else slow, id="-".join(pair)) for pair in PAIRS]


@pytest.mark.parametrize(("loop", "loader"), pairs())
def test_trainings_of_every_kind_are_tuned_and_applied(
    loop: str, loader: str, data: Path, tmp_path: Path
) -> None:
    if loader in PACKAGES:
        pytest.importorskip(PACKAGES[loader])
    workers = 1 if loader in ITERABLE else 2  # iterable data is promised to be the same at its own count
    tune_and_apply([sys.executable, str(KINDS), loop, loader], tmp_path, workers, DATA=str(data))


def without_feedtune(folder: Path) -> Path:
    """An interpreter that finds torch, and no feedtune."""
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    python = folder / "bin" / "python"
    found = subprocess.run([python, "-c", "import feedtune"], cwd=folder, capture_output=True, check=False)
    assert found.returncode == 1
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("module", 1), ("shell", 2), ("spawn", 2), ("interpreter", 1)]
)
def test_launchers_of_every_kind(launcher: str, ranks: int, tmp_path: Path) -> None:
    """torchrun in a script of the shell, a module beside a sitecustomize; libraries' own are elsewhere."""
    kinds = [str(KINDS), "accumulating", "distributed"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", *kinds]
    commands = {
        "module": [sys.executable, "-m", "kinds", *kinds[1:]],
        "shell": ["bash", "-c", f"set -e; cd /; {shlex.join(torchrun)}; true"],
        "spawn": [sys.executable, *kinds, "spawn"],
    }
    if launcher == "interpreter":
        commands[launcher] = [str(without_feedtune(tmp_path / "venv")), *kinds]
    own = tmp_path / "mine"
    own.mkdir()
    (own / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(SCRIPTS)!r})\n")  # finds it
    paths = str(own) if launcher == "module" else ""
    tune_and_apply(commands[launcher], tmp_path, 2, ranks, PYTHONPATH=paths)


def tune_and_apply(command: list[str], folder: Path, workers: int, ranks: int = 1, **env: str) -> None:
    """Tune and watch a training, then apply a worker count: each rank gets what it gets without feedtune."""
    more = {**env, "OMP_NUM_THREADS": "1"}
    short = {**more, "STEPS": str(STEPS)}
    own = environment(**short, LOGS=str(folder))
    watching = [*FEEDTUNE, "run", "--out", str(folder / "watched"), "--", *command]
    seen = environment(**short, LOGS=str(folder / "seen"))
    (folder / "seen").mkdir()
    with (
        subprocess.Popen(command, cwd=folder, env=own, stderr=subprocess.DEVNULL) as bare,
        subprocess.Popen(watching, cwd=folder, env=seen, stderr=subprocess.DEVNULL) as watched,
    ):
        pass  # beside a tuning they would make some of its blocks slow, and none worth a search
    assert (bare.returncode, watched.returncode) == (0, 0)
    document = found(folder / "run", command, LOGS=str(folder / "throw-away"), **more)
    assert document["world_size"] == ranks
    (training,) = result_of(folder / "watched")["trainings"]
    assert training["world_size"] == ranks
    assert training["job"]["steps"] >= STEPS  # a loop that counts takes a batch more than it trains on
    assert training["loader"]["identity"] == document["loader"]["identity"]

    run = tuned(folder / "tuned", document["loader"]["identity"], num_workers=workers, prefetch_factor=3)
    (folder / "applied").mkdir()
    done = feedtune("apply", run, "--", *command, cwd=folder, LOGS=str(folder / "applied"), **short)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"feedtune apply: num_workers={workers}, prefetch_factor=3") == 1, done.stderr
    for rank in range(ranks):
        received = {(folder / place / f"got{rank}").read_text() for place in (".", "seen", "applied")}
        assert len(received) == 1


def found(run: Path, command: list[str], **env: str) -> dict:
    """What a short tuning says, once it has measured other settings in one start."""
    words = ["--trials=2", "--max-workers=2", "--block-seconds=0.2", "--out", run, "--"]
    done = feedtune("tune", *words, *command, cwd=run.parent, **env)
    assert done.returncode == 0, done.stderr
    document = result_of(run)
    assert document["outcome"] != "failed", document["verdict"]
    assert document["starts"] == 1, document["advice"]
    assert [block for block in document["blocks"] if block["state"] == "failed"] == []
    assert any(block["kind"] == "candidate" and block["rate"] for block in document["blocks"])
    return document
