"""Copies of a loader: the settings that a block changes, and none beside them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from feedtune.inside import hook
from feedtune.inside.feed import Feed
from feedtune.inside.swap import make_copy, shut_down

DATA = list(range(12))
SETTINGS = {"num_workers": 2, "prefetch_factor": 3, "pin_memory": False}
# What a setting of a block can be; all else could change what is learned, and is the script's.
CHANGED = {
    "dataset", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "_iterator",
    "check_worker_number_rationality", "timeout", "_DataLoader__multiprocessing_context", "in_order",
    "batch_sampler",
}  # fmt: skip


def loader(**words) -> DataLoader:
    return DataLoader(DATA, batch_size=3, drop_last=True, generator=torch.Generator(), **words)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_copy_differs_in_settings_alone_and_its_model_stays(workers, persistent) -> None:
    own = loader(num_workers=1, persistent_workers=persistent, timeout=5)
    before = dict(own.__dict__)
    prefetch = 3 if workers else None
    settings = {**SETTINGS, "num_workers": workers, "prefetch_factor": prefetch}
    twin = make_copy(own, settings, Feed(own.batch_sampler, endless=True), DATA)
    assert own.__dict__ == before
    assert type(twin) is DataLoader
    assert (twin.num_workers, twin.prefetch_factor) == (workers, prefetch)
    different = {name for name in twin.__dict__ if twin.__dict__[name] is not own.__dict__.get(name)}
    assert different <= CHANGED
    assert twin.in_order
    assert twin.timeout == (5 if workers else 0)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_persist_are_no_setting_of_a_block(persistent) -> None:
    """A block has no epoch's edge: its workers live as long as it does, whatever the script says."""
    own = loader(num_workers=1, persistent_workers=persistent)
    twin = make_copy(own, SETTINGS, Feed(own.batch_sampler, endless=True), DATA)
    assert not twin.persistent_workers
    assert own.persistent_workers == persistent
    assert "persistent_workers" not in SETTINGS


@pytest.mark.parametrize("in_order", [True, False])
def test_order_is_given_up_only_where_a_setting_says_so(in_order) -> None:
    own = loader(num_workers=1)
    twin = make_copy(own, {**SETTINGS, "in_order": in_order}, Feed(own.batch_sampler, endless=True), DATA)
    assert twin.in_order == in_order


class Sent:
    """A part of a batch that takes a moment to be sent; its worker leaves a sign for each."""

    def __init__(self, sign: Path, seconds: float) -> None:
        self.sign, self.seconds = sign, seconds

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        time.sleep(self.seconds)
        self.sign.write_text("sent")
        return str, ("sent",)


@pytest.mark.parametrize("patched", [True, False])
def test_a_worker_told_to_end_hands_over_the_batch_it_is_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    """What torch cuts off there leaves a file of ``tempfile`` or aborts the worker, but not always."""
    monkeypatch.setattr(worker, "_worker_loop", worker._worker_loop)
    if patched:
        hook._let_workers_finish(worker)
    data = [Sent(tmp_path / "sign", 0.1 if patched else 5.0)]  # longer than any end of a worker
    iterator = iter(DataLoader(data, num_workers=1, collate_fn=fetched(tmp_path / "fetched")))
    while not (tmp_path / "fetched").exists():
        time.sleep(0.001)
    shut_down(iterator)
    assert (tmp_path / "sign").exists() == patched


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_worker_that_aborts_as_it_ends_has_not_failed(number: signal.Signals) -> None:
    """Spawned workers of torch 2.13 do so now and then; any other crash is told."""
    iterator = mock.Mock(_workers=[mock.Mock(exitcode=0, pid=1), mock.Mock(exitcode=-number, pid=1)])
    iterator._shutdown_workers.side_effect = RuntimeError("killed by signal")
    with nullcontext() if number == signal.SIGABRT else pytest.raises(RuntimeError, match="by signal"):
        shut_down(iterator)


def fetched(sign: Path) -> Callable[[list[Sent]], list[Sent]]:
    def collate(samples: list[Sent]) -> list[Sent]:
        sign.write_text("fetched")
        return samples

    return collate
