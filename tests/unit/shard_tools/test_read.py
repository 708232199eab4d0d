from __future__ import annotations

import io
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler

from shard_tools.errors import BadAnswer, BadInput
from shard_tools.pack import pack_folder
from shard_tools.read import DecodeError, ShardDataset
from shard_tools.read import dataset as module

FORMS = ["wds", "lmdb"]


@pytest.fixture
def packed(many: Path, tmp_path: Path) -> dict[str, Path]:
    for form in FORMS:
        pack_folder(many, tmp_path / form, form=form, shard_size=150_000)
    return {form: tmp_path / form for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_contract_of_both_formats(form: str, packed: dict[str, Path], many: Path) -> None:
    dataset = ShardDataset(packed[form])
    assert len(dataset) == 400
    assert dataset.classes == tuple(f"class{number}" for number in range(10))
    paths = set()
    for number in range(len(dataset)):
        data, label = dataset[number]
        record = dataset.record(number)
        paths.add(record.path)
        assert data == (many / record.path).read_bytes()
        assert record.label == dataset.classes[label] == record.path.split("/")[0]
        assert (record.number, record.size, record.parts) == (number, len(data), {"bin": record.path})
    assert len(paths) == 400
    batch = [399, 0, 17, 17, 200]
    assert dataset.__getitems__(batch) == [dataset[number] for number in batch]
    assert dataset[-1] == dataset[np.int64(399)] == dataset[torch.tensor(399)]
    assert dataset.labels().tolist() == [dataset[number][1] for number in range(400)]
    for outside in (400, -401):
        with pytest.raises(IndexError):
            dataset[outside]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_p17_workers_that_were_forked_or_spawned_read_the_same(
    form: str, start: str, packed: dict[str, Path]
) -> None:
    dataset = ShardDataset(packed[form])
    expected = [dataset[number] for number in range(400)]  # files are open in this process now
    workers, epochs = (2, 2) if start == "fork" else (1, 1)  # a spawned worker imports torch anew: seconds
    loader = DataLoader(
        dataset, batch_size=50, num_workers=workers, collate_fn=list, multiprocessing_context=start
    )
    for _ in range(epochs):
        assert [sample for batch in loader for sample in batch] == expected
    assert dataset[3] == expected[3]


def test_p17_the_same_lmdb_file_in_two_datasets_and_many_threads(packed: dict[str, Path]) -> None:
    one, other = ShardDataset(packed["lmdb"]), pickle.loads(pickle.dumps(ShardDataset(packed["lmdb"])))
    expected = [one[number] for number in range(400)]
    wrong: list[int] = []

    def read(dataset: ShardDataset) -> None:
        wrong.extend(number for number in range(400) if dataset[number] != expected[number])

    threads = [threading.Thread(target=read, args=(dataset,)) for dataset in (one, other) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("form", FORMS)
def test_open_files_are_bounded(form: str, packed: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in (module._INDEXES, module._TARS, module._ENVIRONMENTS):
        pool.close()
        monkeypatch.setattr(pool, "_limit", 2)
    dataset = ShardDataset(packed[form])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for number in range(0, 400, 7):
            dataset[number * 11 % 400]
    assert len(os.listdir("/proc/self/fd")) <= before + 6


@pytest.mark.parametrize("form", FORMS)
def test_a_pack_that_replaces_another_is_not_read_from_old_files(
    form: str, packed: dict[str, Path], many: Path
) -> None:
    old = ShardDataset(packed[form])[0]
    pack_folder(many, packed[form], form=form, shard_size=150_000, seed=9, force=True)
    dataset = ShardDataset(packed[form])
    assert dataset[0] != old
    assert dataset[0][0] == (many / dataset.record(0).path).read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_p1_every_rank_has_the_same_number_of_samples(form: str, packed: dict[str, Path]) -> None:
    dataset = ShardDataset(packed[form])
    shares = [list(DistributedSampler(dataset, num_replicas=3, rank=rank)) for rank in range(3)]
    assert [len(share) for share in shares] == [134, 134, 134]
    assert set().union(*shares) == set(range(400))


def picture(path: Path, kind: str) -> None:
    Image.fromarray(np.full((6, 8, 3), (200, 30, 60), dtype=np.uint8)).save(path, kind)


def test_decoders(tmp_path: Path) -> None:
    root = tmp_path / "src" / "red"
    root.mkdir(parents=True)
    picture(root / "1.jpg", "JPEG")
    pack_folder(tmp_path / "src", tmp_path / "out")
    image, label = ShardDataset(tmp_path / "out", decode="pillow")[0]
    assert (image.mode, image.size, label) == ("RGB", (8, 6), 0)
    pytest.importorskip("simplejpeg", reason="simplejpeg is an extra")
    array, _ = ShardDataset(tmp_path / "out", decode="simplejpeg")[0]
    assert (array.shape, array.dtype) == ((6, 8, 3), np.uint8)
    assert ShardDataset(tmp_path / "out", decode=len)[0] == ((root / "1.jpg").stat().st_size, 0)
    raw, _ = ShardDataset(tmp_path / "out", decode="raw")[0]
    assert Image.open(io.BytesIO(raw)).size == (8, 6)
    with pytest.raises(BadInput, match="'gif' is no decoder"):
        ShardDataset(tmp_path / "out", decode="gif")


def test_a_sample_that_is_no_image_is_named(tree: Path, tmp_path: Path) -> None:
    pack_folder(tree, tmp_path / "out", seed=None)
    for decode in ("pillow", "simplejpeg"):
        dataset = ShardDataset(tmp_path / "out", decode=decode)
        with pytest.raises(DecodeError, match=r"sample 0 \(\.git/config\)"):
            dataset[0]
    unlabelled = next(number for number in range(len(dataset)) if dataset.record(number).path == "root.txt")
    assert ShardDataset(tmp_path / "out")[unlabelled][1] == -1
    assert dataset.record(unlabelled).label is None


def test_damage_is_an_error_and_no_wrong_data(packed: dict[str, Path]) -> None:
    dataset = ShardDataset(packed["wds"])
    os.truncate(packed["wds"] / dataset.manifest.shards[0].name, 100)
    with pytest.raises(BadAnswer, match="ends before byte"):
        dataset[0]
    with pytest.raises(BadInput, match="there is no folder"):
        ShardDataset(packed["wds"] / "none")
