"""The work folder beside the destination: a lock, a journal of finished shards, and the shards themselves.

``.NAME.shard-tools-work/shards`` becomes the destination by one rename, so the destination is whole whenever
it exists. The journal names the plan, so that only the same plan goes on with what is there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from shard_tools.errors import BadInput
from shard_tools.manifest import (
    MANIFEST_NAME,
    TEMPORARY,
    read_manifest,
    render,
    sync_path,
    target_error,
    write_file,
    write_manifest,
)
from shard_tools.pack.rename import exchange
from shard_tools.records import Manifest, ShardInfo

JOURNAL = "journal.jsonl"
LOCK_WAIT_S = 10.0
_OURS = re.compile(r"shard-[0-9]{6,}\.(tar|lmdb|index)").fullmatch


def check_destination(source: Path, destination: Path, force: bool) -> Path:
    """Refuse a destination that cannot be used; returns its real path.

    Raises:
        BadInput: it lies in the source, is no folder, is a mount point, or holds something.
    """
    real, root = destination.resolve(), source.resolve()
    if real == root or root in real.parents:
        raise BadInput(f"{destination} lies in the source folder {source}", "choose a destination outside it")
    if not real.exists():
        return real
    if not real.is_dir():
        raise BadInput(f"{destination} is a file", "choose the name of a folder")
    if os.path.ismount(real):
        raise BadInput(f"{destination} is a mount point and cannot be replaced", "name a new folder in it")
    names = sorted(os.listdir(real))
    foreign = [name for name in names if not (_OURS(name) or name == MANIFEST_NAME)]
    if foreign:
        raise BadInput(f"{destination} holds files that no pack made: {foreign[0]}", "choose another folder")
    if names and not force and not _half_published(real):
        raise BadInput(
            f"{destination} holds a finished pack", "--force replaces it, or choose another folder"
        )
    return real


def _half_published(destination: Path) -> bool:
    """Whether a run was killed between publishing the destination and removing its work folder."""
    return work_folder(destination).exists()


def work_folder(destination: Path) -> Path:
    """Where a pack works until it is whole: a hidden folder beside the destination."""
    return destination.parent / f".{destination.name}.shard-tools-work"


def file_digest(path: Path) -> str:
    """xxh3-128 of a file, read in pieces."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def whole(folder: Path, info: ShardInfo) -> bool:
    """Whether a shard and its index lie in a folder as they were written, by their digests."""
    try:
        return (
            os.path.getsize(folder / info.name) == info.bytes
            and file_digest(folder / info.name) == info.digest
            and file_digest(folder / info.index) == info.index_digest
        )
    except FileNotFoundError:
        return False


class WorkFolder:
    """The work folder of one pack, locked while it is in use.

    Attributes:
        destination: where the pack is published.
        shards: folder that the shards are written to.
        known: shards that the journal calls finished.
        published: the manifest, if a run of the same plan had been killed after publishing.
    """

    def __init__(self, destination: Path, fingerprint: str, force: bool) -> None:
        self.destination = destination
        self.folder = work_folder(destination)
        self.shards = self.folder / "shards"
        self.known: dict[int, ShardInfo] = {}
        self.published: Manifest | None = None
        self._fingerprint = fingerprint
        self._force = force
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise target_error(self.destination.parent, error) from error
        try:
            self._open_journal()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self.published is not None:
                shutil.rmtree(self.folder)
            else:
                self._tidy()
        finally:
            os.close(self._lock)

    def _take_lock(self) -> None:
        """Wait a while for the lock: workers of a killed run let go of it within moments."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while (lock := self._try_lock()) is None:
            if time.monotonic() > deadline:
                raise BadInput(f"another pack is writing to {self.destination}", "wait for it, or stop it")
            time.sleep(0.05)
        self._lock = lock

    def _try_lock(self) -> int | None:
        """Handle of the locked file; None while another process holds it, or has just removed the folder."""
        path = self.folder / "lock"
        self.folder.mkdir(exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(path).st_ino:
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return lock  # a file system without locks
            os.close(lock)
            raise
        os.close(lock)
        return None

    def _open_journal(self) -> None:
        rows = self._read_journal()
        if rows and rows[0].get("plan") != self._fingerprint:
            if not self._force:
                raise BadInput(
                    f"{self.folder} holds a half-done pack of other files or options",
                    "--force forgets it; the same files and options go on with it",
                )
            rows = []
        self._find_published(rows)
        if self.published is not None:
            return
        if not self._force and os.path.isdir(self.destination) and os.listdir(self.destination):
            if not rows:
                self._discard()
            raise BadInput(f"{self.destination} holds a finished pack", "--force replaces it")
        self.shards.mkdir(exist_ok=True)
        self.known = {row["number"]: ShardInfo(**row["shard"]) for row in rows if "shard" in row}
        self._start_journal()
        for path in self.shards.iterdir():
            if not rows or path.name.endswith(TEMPORARY):
                path.unlink()

    def _start_journal(self) -> None:
        """Write what is known anew: a line that a killed run left torn would spoil the next one."""
        path = self.folder / JOURNAL
        rows: list[dict[str, Any]] = [{"plan": self._fingerprint}]
        rows += [{"number": number, "shard": asdict(info)} for number, info in self.known.items()]
        write_file(path.with_suffix(TEMPORARY), "".join(json.dumps(row) + "\n" for row in rows).encode())
        os.replace(path.with_suffix(TEMPORARY), path)

    def _find_published(self, rows: list[dict[str, Any]]) -> None:
        wanted = [row["manifest"] for row in rows if "manifest" in row]
        if wanted and (self.destination / MANIFEST_NAME).exists():
            manifest = read_manifest(self.destination)
            if xxhash.xxh3_128_hexdigest(render(manifest)) == wanted[-1]:
                self.published = manifest

    def _read_journal(self) -> list[dict[str, Any]]:
        """Rows of the journal up to the first one that is not whole."""
        rows: list[dict[str, Any]] = []
        try:
            lines = (self.folder / JOURNAL).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return rows
        try:
            rows.extend(json.loads(line) for line in lines)
        except ValueError:  # the run was killed while it wrote this line
            return rows
        return rows

    def _append(self, row: dict[str, Any]) -> None:
        try:
            with open(self.folder / JOURNAL, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise target_error(self.folder / JOURNAL, error) from error

    def record(self, number: int, info: ShardInfo) -> None:
        """Note a finished shard; a note that a crash loses costs writing that shard again, nothing else."""
        if self.known.get(number) != info:
            self.known[number] = info
            self._append({"number": number, "shard": asdict(info)})

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, then make the shards the destination by one rename, and remove the work folder.

        Raises:
            ToolError: the destination may not be written.
        """
        data = write_manifest(self.shards, manifest)
        self._append({"manifest": xxhash.xxh3_128_hexdigest(data)})
        try:
            sync_path(self.shards)
            self._rename()
            sync_path(self.destination.parent)
        except OSError as error:
            raise target_error(self.destination, error) from error
        self.published = manifest

    def _rename(self) -> None:
        try:
            os.rename(self.shards, self.destination)  # onto nothing, or onto an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not exchange(self.shards, self.destination):
                os.rename(self.destination, self.folder / "replaced")
                os.rename(self.shards, self.destination)

    def _tidy(self) -> None:
        """After an error: leave what a next run can go on with, or nothing at all."""
        for path in self.shards.glob(f"*{TEMPORARY}"):
            path.unlink()
        if not self.known:
            self._discard()

    def _discard(self) -> None:
        shutil.rmtree(self.folder)
