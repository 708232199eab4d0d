"""The packing job: scan, plan, write the shards in parallel, publish."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shard_tools.errors import BadInput, Missing
from shard_tools.manifest import TEMPORARY, settle
from shard_tools.pack.pool import run_tasks
from shard_tools.pack.work import WorkFolder, check_destination, whole
from shard_tools.plan import Plan, make_plan
from shard_tools.records import Manifest, ShardInfo
from shard_tools.scan import Walk, walk
from shard_tools.units import format_bytes

DEFAULT_SHARD_SIZE = 64_000_000


@dataclass(frozen=True)
class PackResult:
    """What a pack did.

    Attributes:
        manifest: what lies in the destination now.
        found: what the scan of the source found, what cannot become a sample included.
        kept: shards that an earlier, interrupted run had finished.
    """

    manifest: Manifest
    found: Walk
    kept: int


def default_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def pack_folder(
    source: Path,
    destination: Path,
    *,
    form: str = "wds",
    shard_size: int = DEFAULT_SHARD_SIZE,
    seed: int | None = 0,
    workers: int | None = None,
    force: bool = False,
    on_samples: Callable[[int], None] | None = None,
) -> PackResult:
    """Pack all files under a folder; the same input gives the same bytes whatever the worker count.

    A run that is killed leaves nothing under the destination's name, but a hidden folder beside it
    (``.NAME.shard-tools-work``) with the finished shards; the same call goes on from there.

    Args:
        source: folder; the first folder of each path is the class label.
        destination: folder to make; must not exist, or be empty.
        form: ``"wds"`` (tar) or ``"lmdb"``.
        shard_size: largest shard in bytes, headers and padding counted.
        seed: seed of the global shuffle; None keeps the order of the paths.
        workers: processes; None takes one for each processor.
        force: replace an earlier pack at the destination, and forget a half-done one.
        on_samples: called with the number of samples of each shard that is done.

    Raises:
        BadInput: source or destination cannot be used, or the source changes meanwhile.
        Missing: disk full, permission missing, or a worker process died.
    """
    found = walk(source)
    _refuse_unreadable(found)
    plan = make_plan(source.resolve(), found.files, form, shard_size, seed)
    destination = check_destination(source, destination, force)
    with WorkFolder(destination, plan.fingerprint(), force) as work:
        if work.published is not None:
            return PackResult(work.published, found, len(plan))
        _refuse_full_disk(plan, work)
        kept = len(work.known)
        infos = dict[int, ShardInfo]()

        def done(number: int, info: ShardInfo) -> None:
            infos[number] = info
            work.record(number, info)
            if on_samples:
                on_samples(info.samples)

        write = partial(_write, plan, work.shards, dict(work.known))
        run_tasks(range(len(plan)), write, partial(_settle, work.shards), workers or default_workers(), done)
        manifest = _manifest(plan, [infos[number] for number in range(len(plan))])
        work.publish(manifest)
    return PackResult(manifest, found, kept)


def _refuse_unreadable(found: Walk) -> None:
    if found.unreadable:
        names = ", ".join(found.unreadable[:3]) + (", ..." if len(found.unreadable) > 3 else "")
        raise BadInput(
            f"{len(found.unreadable)} of the files or folders in {found.root} may not be read: {names}",
            "change their permissions, or move them out of the folder",
        )


def _refuse_full_disk(plan: Plan, work: WorkFolder) -> None:
    status = os.statvfs(work.shards)
    free = status.f_bavail * status.f_frsize
    need = sum(plan.shard_bytes) - sum(info.bytes for info in work.known.values())
    if need > free:
        raise Missing(
            f"the shards need {format_bytes(need)}, {work.destination.parent} has {format_bytes(free)} free",
            "free space, or choose another disk",
        )


def _write(plan: Plan, folder: Path, known: dict[int, ShardInfo], number: int) -> ShardInfo:
    """Write one shard under temporary names, unless an earlier run left it whole."""
    info = known.get(number)
    if info is not None and whole(folder, info):
        return info
    if plan.format == "wds":
        from shard_tools.tar_store import write_shard
    else:
        from shard_tools.lmdb_store import write_shard
    return write_shard(plan.shard(number), folder)


def _settle(folder: Path, info: ShardInfo) -> None:
    """Make a shard and its index durable and give them their names."""
    for name in (info.name, info.index):
        if os.path.exists(f"{folder / name}{TEMPORARY}"):
            settle(folder / name)


def _manifest(plan: Plan, shards: list[ShardInfo]) -> Manifest:
    return Manifest(
        format=plan.format,
        samples=len(plan.entries),
        payload_bytes=sum(info.payload_bytes for info in shards),
        bytes=sum(info.bytes for info in shards),
        shard_size=plan.shard_size,
        seed=plan.seed,
        classes=plan.classes,
        shards=tuple(shards),
    )
