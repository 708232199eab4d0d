"""Steps of real loops and loaders in this process, as they are written down; all of it comes off again."""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce  # as scripts have it, from before anything is tapped
from torch.nn.parallel import distributed
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader
from torch.utils.data._utils import pin_memory, worker

from feedtune.analysis.workers import measure_workers
from feedtune.inside import hook
from feedtune.inside.ddp import Buckets
from feedtune.inside.observed import Observer
from feedtune.inside.stepclock import StepClock

SLEEP_S = 0.001


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PATCHED = (
    (DataLoader, "__init__"),
    (DataLoader, "__iter__"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    (torch, "save"),
    (torch.autograd, "backward"),
    (dist, "monitored_barrier"),
    (dist, "_register_comm_hook"),
    (dist, "_register_builtin_comm_hook"),
    (distributed.DistributedDataParallel, "_pre_forward"),
    (distributed.DistributedDataParallel, "_sync_buffers"),
    (pin_memory, "pin_memory"),
    (worker, "_worker_loop"),
)


class Watched:
    """A process that is watched; ``buckets`` sees its DDP models."""

    def __init__(self, folder: Path, buckets: Buckets) -> None:
        self.folder = folder
        self.buckets = buckets
        config = {"mode": "run", "records": str(folder), "folder": str(folder / "boot"), "steps": None}
        self.observer = Observer(config, dataloader)

    def rows(self) -> list[list]:
        """All that was recorded, with an end."""
        self.observer._at_exit()
        return [json.loads(line) for line in (self.folder / "steps.rank0.jsonl").read_text().splitlines()]

    def parts(self) -> list[dict]:
        """Parts of the steps that have any."""
        return [row[5] for row in self.rows() if len(row) > 5]

    def about(self) -> dict:
        return json.loads((self.folder / "rank0.json").read_text())

    def workers(self) -> list[list]:
        path = self.folder / "workers.rank0.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def stopped(self) -> str:
        sign = self.folder / "boot" / "seen" / "stopped"
        return sign.read_text() if sign.exists() else ""


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    (tmp_path / "boot" / "seen").mkdir(parents=True)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr("feedtune.inside.observed.at_exit", lambda _: None)
    for owner, name in PATCHED:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(
        distributed.Join, "notify_join_context", vars(distributed.Join)["notify_join_context"]
    )
    before = dict(optimizers._global_optimizer_post_hooks)
    buckets = Buckets()
    monkeypatch.setattr("feedtune.inside.trace.BUCKETS", buckets)
    buckets.patch(distributed)
    found = Watched(tmp_path, buckets)
    hook._follow(found.observer, DataLoader)
    yield found
    found.observer._detach()
    atexit.unregister(buckets.settle)
    optimizers._global_optimizer_post_hooks.clear()
    optimizers._global_optimizer_post_hooks.update(before)


def slowly(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SLEEP_S)
    return x


class Rows(Dataset):
    """Samples of 6 numbers."""

    def __init__(self, count: int = 48, transform: Callable[[torch.Tensor], torch.Tensor] = slowly) -> None:
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.full((6,), float(index)))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(24, 6))


class Training:
    """A model, and a step of it that a test can add something to."""

    def __init__(self, ddp: bool = False, **words: object) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.model = distributed.DistributedDataParallel(net, **words) if ddp else net
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor, of: int = 6) -> None:
        self.optimizer.zero_grad()
        self.model(batch.reshape(-1, of)[:, :6]).square().sum().backward()
        self.optimizer.step()

    def epochs(self, loader: DataLoader, count: int = 1, also: Callable[[], object] = lambda: None) -> None:
        for _ in range(count):
            for batch in loader:
                self.step(batch)
                also()


@pytest.mark.parametrize("hook", [False, True])
def test_points_of_a_step_lie_in_order(watched: Watched, hook: bool) -> None:
    watched.buckets.everywhere = hook
    training = Training(ddp=True)
    training.epochs(DataLoader(Rows(), batch_size=4), also=lambda: dist.all_reduce(torch.ones(1)))
    rows = [row for row in watched.rows() if len(row) > 5]
    assert len(rows) >= 8
    for row in rows:
        parts = row[5]
        points = {kind: (arrive, leave) for kind, arrive, leave in parts["y"]}
        assert list(points) == ["buffers", "gradients", "call"]
        end = parts["b"]
        moments = [
            row[2] - row[1],
            *points["buffers"],
            *([parts["r"]] if hook else []),
            *points["gradients"],
            end,
            parts["o"],
        ]
        moments += points["call"]
        # Times are written with six and seven digits.
        assert all(after >= before - 2e-6 for before, after in itertools.pairwise(moments)), moments
        assert parts["n"] == 24
        assert "q" not in parts
    seen = "own" if hook else "gradients"
    assert watched.about()["ddp"] == {"models": 1, "hook": seen, "why": None}


@pytest.mark.parametrize("hook", [False, True])
def test_a_micro_step_that_is_not_synchronized_has_no_point_of_gradients(
    watched: Watched, hook: bool
) -> None:
    watched.buckets.everywhere = hook
    training = Training(ddp=True)
    for number, batch in enumerate(DataLoader(Rows(96), batch_size=4)):
        last = number % 3 == 2
        if last:
            training.step(batch)
        else:
            with training.model.no_sync():
                training.model(batch).sum().backward()
    rows = {row[0]: row[5] for row in watched.rows() if len(row) > 5}
    assert len(rows) > 12
    for number, parts in rows.items():
        kinds = [kind for kind, *_ in parts.get("y", ())]
        assert ("gradients" in kinds) == ("o" in parts) == (number % 3 == 2)
        assert ("v" in parts) == (hook and "o" in parts)
        assert "b" in parts


def test_several_backwards_of_a_step_are_one_stretch(watched: Watched) -> None:
    training = Training(ddp=True)

    def more() -> None:
        training.model(torch.randn(4, 6)).sum().backward()

    training.epochs(DataLoader(Rows(), batch_size=4), also=more)
    for parts in watched.parts():
        assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"] * 2
        assert parts["b"] > parts["o"]


@pytest.mark.parametrize("hook", [False, True])
def test_a_backward_inside_another_ends_nothing(watched: Watched, hook: bool) -> None:
    """As reentrant checkpoints make them; on a CPU they run on the thread that trains."""
    watched.buckets.everywhere = hook
    training = Training(ddp=True, bucket_cap_mb=1e-5)  # before the inner one, in it and after it
    inner = training.model.module[1]
    inner.forward = lambda x, plain=inner.forward: checkpoint(plain, x, use_reentrant=True)
    training.model._set_static_graph()
    for batch in DataLoader(Rows(), batch_size=4):
        training.step(batch.requires_grad_())
    found = watched.parts()
    assert len(found) >= 8
    for parts in found:
        assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"]
        assert len(parts.get("w", ())) > 1 or not hook


@pytest.mark.parametrize("hook", [False, True])
def test_a_backward_that_is_called_by_another_name_has_its_gradients(watched: Watched, hook: bool) -> None:
    watched.buckets.everywhere = hook
    taken = torch.autograd.backward  # imported before anything was tapped
    training = Training(ddp=True)
    for batch in DataLoader(Rows(), batch_size=4):
        training.optimizer.zero_grad()
        taken(training.model(batch).sum())
        training.optimizer.step()
    for parts in watched.parts():
        assert "b" not in parts
        assert [kind for kind, *_ in parts["y"]] == ["buffers", "gradients"]


def test_collectives_that_are_waited_for_later_are_not_counted_and_told(watched: Watched) -> None:
    training = Training(ddp=True)
    also = [lambda: dist.all_reduce(torch.ones(1), async_op=True).wait()]
    also.append(lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, None, True).wait())
    training.epochs(DataLoader(Rows(), batch_size=4), also=lambda: [call() for call in also])
    assert all([kind for kind, *_ in parts["y"]] == ["buffers", "gradients"] for parts in watched.parts())
    assert "waits for them later" in watched.about()["ddp"]["why"]


@pytest.mark.parametrize("each", [1, 20])
def test_one_that_is_waited_for_later_now_and_then_changes_nothing(watched: Watched, each: int) -> None:
    training, steps = Training(ddp=True), itertools.count(1)

    def also() -> None:
        if next(steps) % each == 0:
            dist.all_reduce(torch.ones(1), async_op=True).wait()

    training.epochs(DataLoader(Rows(120), batch_size=4), also=also)
    assert all(parts["y"] for parts in watched.parts())
    assert (watched.about()["ddp"]["why"] is None) == (each == 20)


def test_exchanges_of_two_ranks_are_told(watched: Watched) -> None:
    training = Training(ddp=True)

    def also() -> None:
        with pytest.raises(ValueError, match="rank"):  # it is refused: there is no other
            dist.send(torch.ones(1), 0)

    training.epochs(DataLoader(Rows(), batch_size=4), also=also)
    assert list(watched.parts())
    assert "exchanges with single ranks" in watched.about()["ddp"]["why"]


@pytest.mark.usefixtures("watched")
def test_exchanges_in_batches_are_made_as_without_us() -> None:
    training = Training(ddp=True)
    operations = []

    def also() -> None:
        operations.append(dist.P2POp(dist.isend, torch.ones(1), 0))  # torch knows its own functions only

    training.epochs(DataLoader(Rows(), batch_size=4), also=also)
    assert len(operations) == 12


def test_a_collective_that_the_script_imported_by_its_name_is_seen(watched: Watched) -> None:
    training = Training(ddp=True)
    training.epochs(DataLoader(Rows(), batch_size=4), also=lambda: all_reduce(torch.ones(1)))
    kinds = ["buffers", "gradients", "call"]
    assert all([kind for kind, *_ in parts["y"]] == kinds for parts in watched.parts())


@pytest.mark.parametrize("calls", [20, 70])
def test_many_points_of_a_step_are_seen_and_too_many_are_told(watched: Watched, calls: int) -> None:
    def also() -> None:
        for _ in range(calls):
            dist.all_reduce(torch.ones(1))

    training = Training(ddp=True)
    training.epochs(DataLoader(Rows(24), batch_size=4), also=also)
    points = {len(parts["y"]) for parts in watched.parts()}
    why = watched.about()["ddp"]["why"]
    if calls == 20:
        assert points == {22}
        assert why is None
    else:
        assert "more than 64 points of a step" in why


def test_what_a_communication_hook_calls_is_no_call_of_the_script(watched: Watched) -> None:
    training = Training(ddp=True)

    def averaged(_, bucket):
        dist.all_reduce(torch.ones(1))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    training.model.register_comm_hook(None, averaged)
    training.epochs(DataLoader(Rows(), batch_size=4))
    assert all([kind for kind, *_ in parts["y"]] == ["buffers", "gradients"] for parts in watched.parts())
    assert watched.about()["ddp"] == {"models": 1, "hook": "user", "why": None}


def test_an_evaluation_and_a_save_are_pauses(watched: Watched, tmp_path: Path) -> None:
    training, loader = Training(), DataLoader(Rows(), batch_size=4)
    for number, batch in enumerate(loader):
        training.step(batch)
        if number in (6, 10):
            for other in DataLoader(Rows(8), batch_size=8):
                training.model(other)
        if number in (8, 10):
            torch.save(batch, tmp_path / "saved")
    tags = {row[0]: row[3] for row in watched.rows() if len(row) > 3 and row[3]}
    assert tags == {7: "eval", 9: "save", 11: "eval_save"}


def test_a_batch_that_is_skipped_is_a_step_too(watched: Watched) -> None:
    training, loader = Training(), DataLoader(Rows(800), batch_size=4)
    for number, batch in enumerate(loader):
        if number % 2:
            training.step(batch)
    rows = watched.rows()
    first = next(row[0] for row in rows if len(row) > 5)
    assert all(len(row) > 5 for row in rows[first:-1])
    assert {"b" in row[5] for row in rows[first:-1] if row[0] % 2 == 0} == {False}
    assert {"b" in row[5] for row in rows[first:-1] if row[0] % 2} == {True}
    assert {} in [row[5] for row in rows[first:-1]]


def test_waits_for_a_second_loader_lie_in_the_steps(watched: Watched) -> None:
    training, taken = Training(), []
    other = iter(DataLoader(Rows(96), batch_size=4))

    def more() -> None:
        begun = time.monotonic()
        next(other)
        taken.append(time.monotonic() - begun)

    training.epochs(DataLoader(Rows(), batch_size=4), also=more)
    rows = watched.rows()
    assert not [row for row in rows if len(row) > 3 and row[3]]  # its first batch is no evaluation
    found = {row[0]: row[5]["d"] for row in rows if len(row) > 5}
    assert len(found) >= 8
    for number, (begin, seconds) in found.items():
        assert begin > 0
        assert 4 * SLEEP_S <= seconds <= taken[number] + 1e-6
    (told,) = watched.about()["others"]
    assert (told["trains"], told["batches"], told["supply_s"]) == (True, 12, None)


def test_the_end_of_a_second_loader_ends_the_wait(watched: Watched) -> None:
    training, loader, ends = Training(), DataLoader(Rows(8, torch.clone), batch_size=4), []
    others = [iter(loader)]

    def more() -> None:
        try:
            next(others[-1])
        except StopIteration:
            ends.append(len(others))
            others.append(iter(loader))
        gc.collect()  # outside of every wait

    training.epochs(DataLoader(Rows(96), batch_size=4), also=more)
    rows = [row[5] for row in watched.rows() if len(row) > 5]
    assert len(ends) == 8
    assert sum("d" in parts for parts in rows) == len(rows) >= 18
    assert all("c" in parts for parts in rows)


def test_batches_of_an_evaluation_are_no_waits_of_a_step(watched: Watched) -> None:
    training, loader = Training(), DataLoader(Rows(8), batch_size=4)
    training.epochs(DataLoader(Rows(), batch_size=4), also=lambda: list(loader))
    assert len(watched.parts()) >= 8
    assert not any("d" in parts for parts in watched.parts())


def test_elements_of_uneven_batches_are_counted(watched: Watched) -> None:
    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([nn.functional.pad(row, (0, int(rows[0][0]))) for row in rows])

    training, sizes = Training(), []
    for batch in DataLoader(Rows(400, torch.clone), batch_size=4, collate_fn=padded):
        sizes.append(batch.numel())
        training.step(batch, of=batch.shape[1])
    assert len(set(sizes)) == 100
    found = {row[0]: row[5]["n"] for row in watched.rows() if len(row) > 5}
    assert len(found) > 90
    assert found == {number: sizes[number] for number in found}


def test_a_batch_that_cannot_be_looked_through_has_no_elements(watched: Watched) -> None:
    endless: list = []
    endless.append(endless)
    training = Training()
    for batch, _ in DataLoader(Rows(), batch_size=4, collate_fn=lambda rows: (torch.stack(rows), endless)):
        training.step(batch)
    assert len(watched.parts()) >= 8
    assert all("n" not in parts for parts in watched.parts())
    assert not watched.stopped


def test_garbage_collection_is_counted_where_it_happens(watched: Watched) -> None:
    training, taken = Training(), []

    def collect() -> None:
        begun = time.monotonic()
        gc.collect()
        taken.append(time.monotonic() - begun)

    gc.disable()
    gc.freeze()  # all that was there before
    heap = [[number] for number in range(100_000)]
    try:
        training.epochs(DataLoader(Rows(), batch_size=4), also=collect)
    finally:
        gc.unfreeze()
        gc.enable()
    assert len(heap) == 100_000
    found = {row[0]: sum(row[5]["c"][1::2]) for row in watched.rows() if len(row) > 5}
    assert len(found) >= 8
    for number, seconds in found.items():
        assert 0.1 * taken[number] < seconds <= taken[number] + 1e-6


def test_batches_that_are_ready_are_counted(watched: Watched) -> None:
    training = Training()
    loader = DataLoader(Rows(), batch_size=4, num_workers=2)
    iterator = iter(loader)
    for batch in iterator:
        training.step(batch)
        until = time.monotonic() + 10
        while iterator._data_queue.qsize() < iterator._tasks_outstanding and time.monotonic() < until:
            time.sleep(0.001)  # all that is under way arrives
    found = [row[5]["q"] for row in watched.rows() if len(row) > 5]
    assert found[:4] == [4] * 4
    assert found[-1] < 4  # the epoch ends


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_followed_over_epochs(watched: Watched, persistent: bool) -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=persistent)
    Training().epochs(loader, 3)
    watched.rows()
    seen = measure_workers(watched.workers())
    assert seen is not None
    assert seen.all.batches == 36
    assert {worker: split.batches for worker, split in seen.workers.items()} == {0: 18, 1: 18}
    assert seen.all.transform_s >= 4 * SLEEP_S
    assert seen.all.fetch_s >= seen.all.transform_s + seen.all.collate_s


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_are_followed(watched: Watched, workers: int) -> None:
    Training().epochs(DataLoader(Stream(), batch_size=4, num_workers=workers), 2)
    each = 6 * max(workers, 1)
    rows = watched.rows()
    assert [row[0] for row in rows] == list(range(2 * each))
    assert {row[0]: row[3] for row in rows if len(row) > 3 and row[3]} == {each: "epoch"}
    seen = measure_workers(watched.workers())
    assert (seen is None) if not workers else (seen.all.batches == 2 * each)


def test_training_that_goes_on_with_another_loader_stays_in_order(watched: Watched) -> None:
    training = Training()
    for count in (40, 80):
        training.epochs(DataLoader(Rows(count), batch_size=4))
    rows = watched.rows()
    assert [row[0] for row in rows] == list(range(30))
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert {row[0]: row[3] for row in rows if len(row) > 3 and row[3]} == {10: "restart"}


def test_after_enough_steps_everything_is_torch_s_own(watched: Watched) -> None:
    names = ["backward", "monitored_barrier", "pin_memory", "_worker_loop"]
    kept = [(owner, name) for owner, name in PATCHED if name in names]
    originals = [getattr(owner, name) for owner, name in kept]
    (inside,) = (cell for cell in all_reduce.__closure__ if cell.cell_contents is all_reduce.__wrapped__)
    callbacks, hooks = list(gc.callbacks), len(optimizers._global_optimizer_post_hooks)
    watched.observer.config["steps"] = 6
    training = Training(ddp=True)
    loader = DataLoader(Rows(), batch_size=4)
    tapped = [getattr(owner, name) for owner, name in kept]
    assert all(one is not other for one, other in zip(originals, tapped, strict=True))
    assert gc.callbacks != callbacks
    assert inside.cell_contents is not all_reduce.__wrapped__
    training.epochs(loader)
    assert [getattr(owner, name) for owner, name in kept] == originals
    assert inside.cell_contents is all_reduce.__wrapped__
    assert gc.callbacks == callbacks
    assert dataloader._BaseDataLoaderIter.__next__ is watched.observer._fetch
    assert len(optimizers._global_optimizer_post_hooks) <= hooks + 2  # two that count steps
    assert len(watched.rows()) == 6


UNCALLED = ("drop", "waiting", "copy_begins", "copy_ends")  # without a GPU, or by the recording itself
PROPERTIES = [name for name, value in vars(StepClock).items() if isinstance(value, property)]
CLOCK = [name for name in vars(StepClock) if not name.startswith("_") and name not in UNCALLED]


@pytest.mark.parametrize("name", CLOCK)
def test_a_clock_that_fails_ends_the_recording_and_no_training(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise LookupError(name)

    bare = Training()
    bare.epochs([torch.stack([Rows()[i] for i in range(j, j + 4)]) for j in range(0, 48, 4)])
    watched.buckets.everywhere = name.startswith("bucket")
    unseen = torch.autograd.backward
    training, steps = Training(ddp=True), []
    other = iter(DataLoader(Rows(), batch_size=4))

    def also() -> None:
        next(other)
        unseen(training.model(torch.ones(4, 6)).sum())
        steps.append(dist.all_reduce(torch.ones(1)))
        if len(steps) == 6:
            gc.collect()
        if len(steps) == 5:
            monkeypatch.setattr(StepClock, name, property(failing) if name in PROPERTIES else failing)

    training.epochs(DataLoader(Rows(), batch_size=4, num_workers=1), also=also)
    watched.observer._at_exit()
    assert len(steps) == 12
    assert f"LookupError: {name}" in watched.stopped
    assert not watched.observer.armed
    for one, other in zip(bare.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "where", ["_install", "install_meters", "_meter_for", "_time_parts", "ready", "measure"]
)
def test_nothing_of_ours_that_fails_reaches_the_script(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise LookupError(where)

    owner = {
        "_time_parts": "feedtune.inside.meter._Parts",
        "_meter_for": "feedtune.inside.trace",
        "ready": "feedtune.inside.trace",
        "measure": "feedtune.inside.trace",
    }.get(where, "feedtune.inside.trace.Trace")
    monkeypatch.setattr(f"{owner}.{where}", failing)
    seen = []
    Training().epochs(DataLoader(Rows(), batch_size=4, num_workers=1), 2, also=lambda: seen.append(1))
    assert len(seen) == 24
    assert bool(watched.stopped) == (where not in ("_time_parts", "measure"))
