"""The built-in training script's parts: models, images as data, command line."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from feedtune.workloads import image_files
from feedtune.workloads.photos import Augmented, Photos, random_box
from feedtune.workloads.resnet import LAYOUTS, build_model
from feedtune.workloads.vision import Job, find_job, make_loader, message, parse_args
from shard_tools.errors import BadInput

# Parameters for 1,000 classes; the two larger figures are those of the published networks.
PARAMETERS = {"resnet18": 11_689_512, "resnet50": 25_557_032}


def save_image(path: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 77).save(path)
    return path


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("side", [32, 64])
def test_every_model_maps_images_to_logits(name: str, side: int) -> None:
    model = build_model(name, 7).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_the_usual_networks_have_their_published_size(name: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in build_model(name, 1000).parameters()) == count


def test_resnet50_halves_in_its_3x3_convolutions() -> None:
    model = build_model("resnet50", 2)
    halving = [m for m in model.stages.modules() if isinstance(m, torch.nn.Conv2d) and m.stride == (2, 2)]
    assert sorted(m.kernel_size for m in halving) == [(1, 1)] * 3 + [(3, 3)] * 3
    assert sum(m.kernel_size == (1, 1) for b in model.stages for m in b.branch if m in halving) == 0


def test_a_model_learns_one_batch() -> None:
    torch.manual_seed(0)
    model = build_model("tiny", 2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = torch.randn(8, 3, 32, 32), torch.tensor([0, 1] * 4)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_class_folders_become_labels_whatever_their_depth(tmp_path: Path) -> None:
    for name in ("dog/a.jpg", "cat/b.PNG", "cat/deep/c.webp", "cat/.hidden.jpg", ".git/d.jpg", "logo.png"):
        save_image(tmp_path / name)
    (tmp_path / "cat/notes.txt").write_text("no image")
    photos = Photos(tmp_path)
    assert photos.classes == ["cat", "dog"]
    assert [(Path(path).name, label) for path, label in photos.samples] == [
        ("b.PNG", 0),
        ("c.webp", 0),
        ("a.jpg", 1),
    ]


def test_a_flat_folder_is_one_class(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.jpg"):
        save_image(tmp_path / name)
    photos = Photos(tmp_path)
    assert (len(photos), photos.classes) == (2, [""])
    image, label = photos[0]
    assert (image.size, image.mode, label) == ((40, 30), "RGB", 0)


def test_images_are_found_through_links(tmp_path: Path) -> None:
    save_image(tmp_path / "real/a.jpg")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cat").symlink_to(tmp_path / "real")
    assert [path.name for path in image_files(tmp_path / "data")] == ["a.jpg"]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_items_are_normalized_tensors(tmp_path: Path, mode: str) -> None:
    save_image(tmp_path / "x.png", mode=mode)
    pixels, label = Augmented(Photos(tmp_path), 24)[0]
    assert (pixels.shape, pixels.dtype, label) == ((3, 24, 24), torch.float32, 0)
    assert pixels.is_contiguous()
    if mode == "L":
        expected = [(77 / 255 - mean) / std for mean, std in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
        torch.testing.assert_close(pixels[:, 3, 4], torch.tensor(expected))


@pytest.mark.parametrize("kind", [np.asarray, lambda image: image])
def test_decoded_shard_samples_may_be_arrays_or_images(kind) -> None:
    image = Image.new("RGB", (50, 40), (255, 0, 0))
    pixels, label = Augmented([(kind(image), 3)], 16)[0]
    assert (pixels.shape, label) == ((3, 16, 16), 3)
    assert pixels[0].mean() > pixels[1].mean()


def test_crops_vary_with_the_seed_and_repeat_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(path)
    data = Augmented(Photos(tmp_path), 16)
    random.seed(1)
    first, second = data[0][0], data[0][0]
    random.seed(1)
    assert torch.equal(data[0][0], first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [(500, 375), (1, 1), (4000, 3), (32, 33)])
def test_a_crop_lies_inside_the_image(size: tuple[int, int]) -> None:
    random.seed(0)
    for _ in range(200):
        left, top, right, bottom = random_box(*size)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    path = save_image(tmp_path / "cat/whole.jpg", (200, 200))
    cut = tmp_path / "cat/cut.jpg"
    cut.write_bytes(path.read_bytes()[:400])
    with pytest.raises(BadInput, match=r"cut\.jpg"):
        Photos(tmp_path)[0]


def test_the_folder_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no data folder"):
        Photos(tmp_path / "gone")
    with pytest.raises(BadInput, match="no images below"):
        Photos(tmp_path)


def test_the_loader_has_torch_defaults_and_what_is_given() -> None:
    job = Job(0, 0, 1, torch.device("cpu"))
    loader = make_loader(parse_args(["--data", "x", "--batch-size", "4"]), job, [0] * 9)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)
    assert (loader.persistent_workers, loader.drop_last, len(loader)) == (False, True, 2)
    options = ["--num-workers", "2", "--prefetch-factor", "3", "--persistent-workers"]
    loader = make_loader(parse_args(["--data", "x", "--batch-size", "4", *options]), job, [0] * 9)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)


def test_ranks_share_the_data_and_each_epoch_deals_anew() -> None:
    args = parse_args(["--data", "x", "--batch-size", "4"])
    samplers = [make_loader(args, Job(r, r, 2, torch.device("cpu")), [0] * 16).sampler for r in (0, 1)]
    parts = [list(sampler) for sampler in samplers]
    assert sorted(parts[0] + parts[1]) == list(range(16))
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != parts[0]


@pytest.mark.parametrize(
    ("images", "world", "part"), [(7, 1, "--batch-size 7"), (9, 2, "--batch-size 4"), (1, 2, "fewer")]
)
def test_a_batch_larger_than_the_share_of_a_rank_is_refused(images: int, world: int, part: str) -> None:
    args = parse_args(["--data", "x", "--batch-size", "8"])
    with pytest.raises(BadInput, match=part):
        make_loader(args, Job(0, 0, world, torch.device("cpu")), [0] * images)


@pytest.mark.parametrize(
    "options",
    [
        ["--batch-size", "0"],
        ["--num-workers", "-1"],
        ["--num-workers", "two"],
        ["--model", "resnet19"],
        ["--prefetch-factor", "2"],
        ["--persistent-workers"],
        ["--save", "/no/such/folder/x.pt"],
    ],
)
def test_wrong_options_end_with_2(options: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--data", "x", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_the_place_among_the_ranks_comes_from_the_launcher(monkeypatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_job() == Job(5, 1, 8, torch.device("cpu"))


def test_an_error_out_of_a_worker_loses_the_traceback() -> None:
    wrapped = (
        "Caught BadInput in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 1\nshard_tools.errors.BadInput: cannot decode a.jpg\n  -> remove it\n'
    )
    assert message(BadInput(wrapped)) == "cannot decode a.jpg\n  -> remove it"
    assert message(BadInput("plain", "do")) == "plain\n  -> do"
