"""What makes a loader the same one in another run of a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from feedtune.inside.applied import changes
from feedtune.inside.site import call_site, identify, identity_of, note_made

HERE = str(Path(__file__).resolve())
SITE = (("/a.py", 1, 2),)


class Sharded(BatchSampler):
    """As libraries wrap the script's own batch sampler."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = batch_sampler.batch_size
        self.drop_last = False


class Sized:
    """A batch sampler whose batches have sizes of their own."""

    def __iter__(self):
        return iter([[0], [1, 2]])


DATA = list(range(8))


@pytest.mark.parametrize(
    ("loader", "sampler", "size"),
    [
        (DataLoader(DATA), "BatchSampler(SequentialSampler)", 1),
        (DataLoader(DATA, 4, shuffle=True), "BatchSampler(RandomSampler)", 4),
        (DataLoader(DATA, None, shuffle=True), "RandomSampler", None),
        (DataLoader(DATA, batch_sampler=Sized()), "Sized", None),
        (
            DataLoader(DATA, batch_sampler=Sharded(BatchSampler(RandomSampler(DATA), 4, False))),
            "Sharded(BatchSampler(RandomSampler))",
            4,
        ),
        (
            DataLoader(DATA, batch_sampler=Sharded(BatchSampler(SequentialSampler(DATA), 4, False))),
            "Sharded(BatchSampler(SequentialSampler))",
            4,
        ),
    ],
)
def test_samplers_tell_training_from_evaluation(loader, sampler, size) -> None:
    found = identify(loader, SITE)
    assert found == {"frames": [["/a.py", 1]], "dataset": "list", "sampler": sampler, "batch_size": size}


def test_paths_are_real_and_what_is_no_path_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    site = ((str(tmp_path / "link" / "a.py"), 3, 0), ("<string>", 1, 0))
    frames = identify(DataLoader(DATA), site)["frames"]
    assert frames == [[os.path.realpath(tmp_path / "real" / "a.py"), 3], ["<string>", 1]]


def test_what_a_library_changes_after_init_is_not_in_the_identity() -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    note_made(loader, SITE)
    loader.batch_sampler.sampler = SequentialSampler(DATA)  # as accelerate does
    assert identity_of(loader)["sampler"] == "BatchSampler(RandomSampler)"
    assert identity_of(loader)["frames"] == [["/a.py", 1]]


def test_the_three_innermost_frames_outside_torch_and_our_own() -> None:
    def made():
        return call_site()

    def outer():
        return made()

    found = outer()
    assert len(found) == 3
    assert [name for name, _, _ in found[:3]] == [HERE] * 3
    line = made.__code__.co_firstlineno
    assert [line for _, line, _ in found[:2]] == [line + 1, line + 4]


def test_frames_of_another_run_that_started_this_one_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "_feedtune_abc" / "hook.py"
    code = compile("def wrapped(call):\n    return call()\n", str(path), "exec")
    names: dict = {}
    exec(code, names)
    assert str(path) not in [name for name, _, _ in names["wrapped"](call_site)]


def test_a_loader_in_order_stays_so_unless_the_tuning_has_changed_it() -> None:
    loader = DataLoader(DATA, num_workers=1)
    settings = {"num_workers": 2, "prefetch_factor": 4, "pin_memory": False}
    assert changes(loader, settings) == settings
    found = changes(loader, {**settings, "in_order": False, "multiprocessing_context": "spawn"})
    assert found["in_order"] is False
    assert found["_DataLoader__multiprocessing_context"].get_start_method() == "spawn"


class Strict(DataLoader):
    """A class that forbids setting attributes once it is made."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.done = True

    def __setattr__(self, name, value) -> None:
        if getattr(self, "done", False):
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_no_workers_take_away_what_torch_refuses_without_them() -> None:
    loader = Strict(
        DATA, 4, num_workers=1, timeout=9, persistent_workers=True, multiprocessing_context="fork",
        prefetch_factor=3,
    )  # fmt: skip
    settings = {"num_workers": 0, "prefetch_factor": None, "pin_memory": False}
    loader.__dict__.update(changes(loader, settings))
    assert [batch.tolist() for _ in range(2) for batch in loader] == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]]
    names = ("num_workers", "prefetch_factor", "timeout", "persistent_workers", "multiprocessing_context")
    again = {name: getattr(loader, name) for name in names}
    assert again == dict(zip(names, (0, None, 0, False, None), strict=True))
    assert len(DataLoader(DATA, **again)) == 8  # as libraries make another from it
