"""Fingerprints of samples: any kind of batch, nothing changed, nothing kept, nothing raised."""

from __future__ import annotations

import gc
import mmap
import random
import warnings
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from feedtune.inside import fingerprints
from feedtune.inside.fingerprints import SAMPLES, Fingerprints, of, repeated
from feedtune.inside.probe import WorkerClock

Pair = namedtuple("Pair", "data label")


@dataclass
class Held:
    data: torch.Tensor


def memory(*workers: list) -> mmap.mmap:
    """What so many workers have seen: each a list of batches."""
    shared = mmap.mmap(-1, max(1, fingerprints.size(len(workers))))
    for number, batches in enumerate(workers):
        marks = Fingerprints(shared, fingerprints.size(number))
        for batch in batches:
            marks.see(batch)
    return shared


def found(*workers: list) -> tuple[int, int] | None:
    return repeated(memory(*workers), len(workers))


def numbers(*values: int) -> torch.Tensor:
    """A batch of samples that differ by their number."""
    return torch.stack([torch.full((4,), float(value)) for value in values])


def split(values, size: int = 8) -> list[torch.Tensor]:
    values = list(values)
    return [numbers(*values[i : i + size]) for i in range(0, len(values), size)]


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_of_every_type_are_told_apart(dtype) -> None:
    bits = torch.tensor([[i >> j & 1 for j in range(4)] for i in range(8)]).to(dtype)
    marks = of(bits)
    assert len(set(marks)) == 8
    assert of(bits.clone()) == marks
    assert of(bits[[3, 5]]) == [marks[3], marks[5]]


def test_a_mark_is_that_of_the_content_whatever_the_memory_looks_like() -> None:
    images = torch.rand(4, 3, 8, 8)
    marks = of(images)
    assert of(images.contiguous(memory_format=torch.channels_last)) == marks
    assert of(images.transpose(2, 3).contiguous().transpose(2, 3)) == marks
    assert of(images.double()[:, :, :, ::2].float()) == of(images[:, :, :, ::2].clone())
    assert of(images.unsqueeze(1).expand(4, 2, 3, 8, 8)) == of(torch.stack([images, images], 1))
    assert of(images.requires_grad_()) == marks
    with torch.inference_mode():
        assert of(images.clone()) == marks
    assert len(set(marks)) == 4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: [x, y],
        lambda x, y: (x, y),
        lambda x, y: {"x": x, "y": y, "name": ["a"] * len(y)},
        lambda x, y: Pair(x, y),
        lambda x, y: {"inner": [{"x": x}, (y,)], "epoch": 3, "none": None},
        lambda x, y: [Held(x), y],
        lambda x, y: [x, y, torch.tensor(3.0)],  # a number for the whole batch
        lambda x, y: [torch.empty(0, 5), x, y],  # no boxes in it
        lambda x, y: [x, y, torch.rand(17, 4)],  # boxes of all samples in a row
        lambda x, y: [x.to_sparse(), x, y],
        lambda x, y: [x.to("meta"), x, y],
    ],
)
def test_batches_of_every_shape(wrap) -> None:
    x, y = torch.rand(6, 3), torch.arange(6)
    marks = of(wrap(x, y))
    assert marks == of([x, y])
    assert len(set(marks)) == 6
    assert of(wrap(x, torch.arange(6) + 1))[0] != marks[0]  # every tensor counts
    assert of(wrap(x + 1, y))[0] != marks[0]


@pytest.mark.parametrize(
    "batch",
    [
        None, 3, "text", ["a", "b"], {}, [], (), {"text": ["a"]}, torch.tensor(3.0), torch.empty(0),
        torch.empty(0, 3), [torch.empty(0)], torch.rand(3, 3).to_sparse(), object,
        torch.rand(3, device="meta"),
    ],
)  # fmt: skip
def test_batches_without_samples_have_no_marks(batch) -> None:
    assert of(batch) == []
    assert found([batch] * 3, [batch] * 3) is None


def test_a_sample_without_a_batch_is_seen_by_its_rows() -> None:
    """batch_size=None: what comes is one image; its channels stand for it."""
    images = [torch.rand(3, 4, 4) for _ in range(8)]
    assert found(images, images) == (48, 24)
    assert found(images[:4], images[4:]) == (24, 0)


def test_samples_of_empty_tensors() -> None:
    assert len(of(torch.empty(4, 0))) == 4
    assert found([torch.empty(4, 0)], [torch.empty(4, 0)]) is None  # they are all one


def test_numpy_batches_are_not_looked_at() -> None:
    np = pytest.importorskip("numpy")
    assert of([np.zeros(3)]) == []


class Bare(torch.Tensor):
    """A tensor without memory, as tracing has them."""

    @staticmethod
    def __new__(cls, size):
        return torch.Tensor._make_wrapper_subclass(cls, size)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])


@pytest.mark.parametrize(
    "make",
    [lambda: Bare((4, 3)), lambda: [Bare((3, 3)), torch.rand(3, 3)], nested],
    ids=["bare", "one", "nested"],
)
def test_what_cannot_be_read_stops_no_worker(make) -> None:
    """Such a worker gives no answer any more; what it had told before goes."""
    known = split(range(10), 5)
    assert found([*known, make(), *known], known, known) in ((20, 10), None)
    shared = memory([*known, make()])
    assert fingerprints._SLOT.unpack_from(shared, 0)[0] == 0


def test_nothing_of_a_batch_is_changed_or_kept() -> None:
    x = torch.rand(4, 3, 300, 300).transpose(2, 3)
    y = torch.arange(4)
    copies, versions = (x.clone(), y.clone()), (x._version, y._version)
    batch = {"x": x, "y": y}
    shared = mmap.mmap(-1, fingerprints.size(1))
    marks = Fingerprints(shared, 0)
    marks.see(batch)
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])
    assert (x._version, y._version) == versions
    gone = [weakref.ref(x), weakref.ref(y)]
    del x, y, batch
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert marks._found


def test_only_so_many_samples_are_looked_at(monkeypatch) -> None:
    seen = []
    real = fingerprints.of
    monkeypatch.setattr(fingerprints, "of", lambda batch: seen.append(1) or real(batch))
    shared = memory([numbers(*range(10))] * 20)
    assert len(seen) == 7
    known, *marks = fingerprints._SLOT.unpack_from(shared, 0)
    assert known == SAMPLES
    assert 0 not in marks
    assert len(real(numbers(*range(1000)))) == SAMPLES
    seen.clear()
    memory([["text"]] * 500)
    assert len(seen) == SAMPLES  # a loader of texts is not searched for ever


def test_of_a_large_sample_the_beginning_is_read(monkeypatch) -> None:
    read = []
    real = fingerprints.ctypes.string_at
    monkeypatch.setattr(
        fingerprints.ctypes, "string_at", lambda at, count: read.append(count) or real(at, count)
    )
    copied = []
    reshape = torch.Tensor.reshape
    monkeypatch.setattr(
        torch.Tensor,
        "reshape",
        lambda self, *shape: (
            copied.append(self.numel() * (not self.is_contiguous())) or reshape(self, *shape)
        ),
    )
    for large in (
        torch.rand(2, 1 << 20),
        torch.rand(2, 1000, 1000).transpose(1, 2),
        torch.rand(2, 2 << 20)[:, ::2],
        torch.rand(1, 1).expand(2, 1 << 24),
    ):
        of(large)
    assert max(read) == 1 << 16
    assert max(copied) <= 1 << 16


def test_data_that_is_not_split_repeats() -> None:
    epoch = list(range(200))
    assert found(split(epoch), split(epoch)) == (128, 64)
    assert found(*[split(epoch)] * 4) == (256, 192)
    assert found(split(range(10)), split(range(10))) == (20, 10)  # the whole of it is small


def test_data_that_is_split_does_not() -> None:
    assert found(split(range(0, 200, 2)), split(range(1, 200, 2))) == (128, 0)
    assert found(*[split(range(worker, 400, 4)) for worker in range(4)]) == (256, 0)


def test_data_that_each_worker_shuffles_for_itself_repeats_in_part() -> None:
    orders = [random.Random(seed).sample(range(300), 300) for seed in range(3)]
    first, again = found(*map(split, orders))
    assert first == 192
    expected = 192 - len(set().union(*(order[:64] for order in orders)))
    assert again == expected > 0.05 * first


def test_values_that_also_repeat_within_a_worker_are_no_sign() -> None:
    """Samples drawn at random, with replacement, or labels alone."""
    for seed in range(20):
        source = random.Random(seed)
        drawn = [split(source.choices(range(1500), k=64)) for _ in range(4)]
        assert found(*drawn) in (None, (256, 0)), seed
    assert found(split([1, 2] * 50), split([1, 2] * 50)) is None
    few = [*range(60), 0, 1, 2, 3]  # a bit of it: what else repeats, repeats too often for that
    assert found(split(few), split(few)) == (128, 60)


def test_workers_that_have_seen_nothing_are_left_out() -> None:
    epoch = list(range(100))
    assert found(split(epoch), [], split(epoch)) == (128, 64)
    assert found(split(epoch)) is None
    assert found(split(epoch), []) is None
    assert found([], []) is None
    assert repeated(mmap.mmap(-1, 1), 0) is None
    assert found([numbers(1)], [numbers(1)]) == (2, 1)


class Stream(IterableDataset):
    def __init__(self, parted: bool) -> None:
        self.parted = parted

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.parted else (0, 1)
        for i in range(first, 400, step):
            yield {"x": torch.full((3,), float(i)), "i": i}


@pytest.mark.parametrize(("parted", "again"), [(False, 64), (True, 0)])
@pytest.mark.parametrize("batch_size", [1, 7, 100, None])
def test_in_the_workers_of_a_real_loader(tmp_path, parted, again, batch_size) -> None:
    clock = WorkerClock(2, None, str(tmp_path), True)
    loader = DataLoader(Stream(parted), batch_size=batch_size, num_workers=2, worker_init_fn=clock)
    bare = DataLoader(Stream(parted), batch_size=batch_size, num_workers=2)
    got = [batch["x"].clone() for batch in loader]
    assert all(torch.equal(one, two["x"]) for one, two in zip(got, bare, strict=True))
    if batch_size is None:  # three equal numbers: a sample's rows are one
        assert clock.repeated() is None
    else:
        assert clock.repeated() == (128, again)
    assert clock.read()[0] > 0


def test_without_marks_there_is_no_answer(tmp_path) -> None:
    assert WorkerClock(2, None, str(tmp_path), False).repeated() is None


def test_collated_samples_are_those_of_the_data() -> None:
    samples = [{"x": torch.rand(3), "y": i, "name": str(i)} for i in range(5)]
    assert of(default_collate(samples))[2] == of(default_collate(samples[2:3]))[0]


@pytest.mark.parametrize(
    "sample",
    [torch.arange(40)[::2], torch.tensor([7.0]).expand(1 << 20), torch.arange(64).view(8, 8).t()[0]],
    ids=["every second", "one value", "a column"],
)
def test_a_sample_is_read_by_its_values_however_it_lies_in_memory(sample) -> None:
    """Reading in a row where the values do not lie in one would leave the tensor's memory."""
    copied = sample.clone(memory_format=torch.contiguous_format)
    assert of(sample.unsqueeze(0)) == of(copied.unsqueeze(0))
