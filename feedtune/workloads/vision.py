"""Train a ResNet on a folder of images or on packed shards, on one process or under torchrun.

Examples:
    python -m feedtune.workloads.vision --data photos --model tiny --batch-size 32
    torchrun --standalone --nproc_per_node=2 -m feedtune.workloads.vision --data photos --num-workers 4
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from feedtune.workloads.photos import Augmented, Photos
from feedtune.workloads.resnet import LAYOUTS, build_model
from shard_tools.errors import BadInput, Missing, ToolError

# What torchrun sets for each process, with the value that holds without it.
LAUNCHER = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Job:
    """This process among all processes of the training."""

    rank: int
    local_rank: int
    world: int
    device: torch.device

    def say(self, text: str) -> None:
        """Print a line once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; wrong use ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="vision", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of class folders, flat folder, or folder of shards")
    add("--model", choices=sorted(LAYOUTS), default="resnet18")
    add("--batch-size", type=_positive, default=32, help="images a step on each rank")
    add("--epochs", type=_positive, help="1 by default; with --steps as many as it takes")
    add("--steps", type=_positive, help="stop after this many steps")
    add("--image-size", type=_positive, default=224, help="side of the crops in pixels")
    add("--lr", type=float, default=0.1, help="learning rate of SGD")
    add("--amp", action="store_true", help="mixed precision, bfloat16, on CUDA")
    add("--channels-last", action="store_true", help="NHWC memory format")
    add("--num-workers", type=_count, default=0, help="loader processes of each rank")
    add("--prefetch-factor", type=_positive, help="batches that each worker keeps ready")
    add("--pin-memory", action=argparse.BooleanOptionalAction, default=False)
    add("--persistent-workers", action="store_true", help="keep the workers from epoch to epoch")
    add("--save", type=Path, metavar="PATH", help="checkpoint, written at the end of each epoch")
    add("--log-every", type=_positive, default=20, metavar="STEPS")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.num_workers == 0 and (args.prefetch_factor or args.persistent_workers):
        parser.error("--prefetch-factor and --persistent-workers need --num-workers of 1 or more")
    if args.save is not None and not args.save.parent.is_dir():
        parser.error(f"the folder of --save {args.save} does not exist")
    return args


def open_data(path: Path) -> Any:
    """The images below a folder, or the samples of packed shards: ``len``, ``[i]`` and ``classes``."""
    if (path / "manifest.json").is_file():
        from shard_tools.read import ShardDataset

        return ShardDataset(path, decode="pillow")
    return Photos(path)


def find_job() -> Job:
    """What torchrun says in the environment; without it, one process."""
    rank, local, world = (int(os.environ.get(name, default)) for name, default in LAUNCHER)
    if not torch.cuda.is_available():
        return Job(rank, local, world, torch.device("cpu"))
    if local >= torch.cuda.device_count():
        raise Missing(
            f"rank {rank} needs GPU {local}, and {torch.cuda.device_count()} are visible",
            "start as many processes on a node as it has GPUs",
        )
    return Job(rank, local, world, torch.device("cuda", local))


def make_loader(args: argparse.Namespace, job: Job, images: Any) -> DataLoader[Any]:
    """The training loader: shuffled, whole batches only, each rank its own part.

    Raises:
        BadInput: a rank's part is smaller than one batch.
    """
    share = len(images) // job.world
    if share < args.batch_size:
        raise BadInput(
            f"--batch-size {args.batch_size} is larger than the {share} images of each rank "
            f"({len(images)} in {args.data}, {job.world} ranks)",
            f"take --batch-size {share} or less" if share else "start fewer ranks",
        )
    dataset = Augmented(images, args.image_size)
    sampler: DistributedSampler[Any] | None = None
    if job.world > 1:
        sampler = DistributedSampler(dataset, job.world, job.rank, seed=args.seed, drop_last=True)
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
        pin_memory=args.pin_memory,
        persistent_workers=args.persistent_workers,
        drop_last=True,
    )


class Training:
    """Model, optimizer and the count of steps."""

    def __init__(self, args: argparse.Namespace, job: Job, classes: int) -> None:
        self.args = args
        self.job = job
        self.layout = torch.channels_last if args.channels_last else torch.contiguous_format
        model: nn.Module = build_model(args.model, classes).to(job.device)
        model = model.to(memory_format=self.layout)  # type: ignore[call-overload]  # torch's types lack it
        if job.world > 1:
            model = DistributedDataParallel(model, [job.local_rank] if job.device.type == "cuda" else None)
        self.model = model.train()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.amp = args.amp and job.device.type == "cuda"
        self.steps = 0
        self._clock = _Clock(args.batch_size * job.world)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step; returns the loss, still on the device."""
        device = self.job.device
        images = images.to(device, non_blocking=True, memory_format=self.layout)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.amp):
            # Shards mark a sample without a label by -1.
            loss: Tensor = nn.functional.cross_entropy(self.model(images), labels, ignore_index=-1)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it without types
        self.optimizer.step()
        self.steps += 1
        return loss.detach()

    def epoch(self, loader: DataLoader[Any], number: int) -> bool:
        """One pass over the data; ``True`` when ``--steps`` is reached."""
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(number)
        for images, labels in loader:
            loss = self.step(images, labels)
            if self.steps == 1 or self.steps % self.args.log_every == 0:
                # item() waits for the device, so that the time counts work that is done.
                self.job.say(
                    f"epoch {number} step {self.steps}: loss {loss.item():.4f}{self._clock.lap(self.steps)}"
                )
            if self.steps == self.args.steps:
                return True
        return False

    def save(self, path: Path, epoch: int) -> None:
        """Write a checkpoint on rank 0; an older one stays whole until the new one is."""
        if self.job.rank != 0:
            return
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        state = {"model": model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        temporary = path.with_name(path.name + ".tmp")
        torch.save({**state, "steps": self.steps}, temporary)
        os.replace(temporary, path)

    def summary(self) -> str:
        """Steps and rate of the whole run."""
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        return f"done: {self.steps} steps{self._clock.total(self.steps)}"


class _Clock:
    """Rates since the first step, whose time is start-up: workers, kernels, first pages of the data."""

    def __init__(self, images_a_step: int) -> None:
        self._images = images_a_step
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def lap(self, steps: int) -> str:
        now = (steps, time.perf_counter())
        text = self._rate(self._last, now) if self._first else ""
        self._first = self._first or now
        self._last = now
        return text

    def total(self, steps: int) -> str:
        return self._rate(self._first or self._last, (steps, time.perf_counter()))

    def _rate(self, start: tuple[int, float], end: tuple[int, float]) -> str:
        steps, seconds = end[0] - start[0], end[1] - start[1]
        if steps < 1 or seconds <= 0:
            return ""
        return f", {steps / seconds:.2f} steps/s, {steps * self._images / seconds:.1f} images/s"


def train(args: argparse.Namespace) -> None:
    """Train as the command line says.

    Raises:
        ToolError: the data cannot be worked with, or a GPU is missing.
    """
    job = find_job()
    random.seed(args.seed + job.rank)
    # Another seed on each rank gives its workers other crops; DDP starts all from rank 0's weights.
    torch.manual_seed(args.seed + job.rank)
    # All that can be wrong with the data is found before ranks wait for each other.
    images = open_data(args.data)
    loader = make_loader(args, job, images)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    if job.world > 1:
        on_gpu = job.device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=job.device if on_gpu else None)
    classes = max(1, len(images.classes))
    training = Training(args, job, classes)
    job.say(
        f"{args.model} on {len(images)} images of {classes} classes, "
        f"{len(loader)} steps an epoch, {job.world} x {job.device.type}, batch {args.batch_size} on each"
    )
    if args.amp and not training.amp:
        job.say("--amp has no effect without CUDA")
    last = args.epochs or (None if args.steps else 1)
    for number in itertools.count() if last is None else range(last):
        done = training.epoch(loader, number)
        if args.save is not None:
            training.save(args.save, number)
        if done:
            break
    job.say(training.summary())
    if job.world > 1:
        dist.destroy_process_group()


def message(error: ToolError) -> str:
    """The error's own text; from a loader worker it comes wrapped in that worker's traceback."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.rpartition(f"{type(error).__name__}: ")[2]
    return text.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parse_args(argv)
    try:
        train(args)
    except ToolError as error:
        print(f"error: {message(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _count(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of {least} or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
