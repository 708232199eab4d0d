"""Read a tar shard from its first byte to its last, checking what it says as it goes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from shard_tools.errors import BadAnswer
from shard_tools.plan.members import BLOCK, padded
from shard_tools.plan.stored import StoredSample
from shard_tools.tar_store.header import Member, parse_header, pax_size


def read_shard(path: Path) -> Iterator[StoredSample]:
    """Yield the samples of a tar shard in order; members that stand together are one sample.

    A sample whose members do not stand together is yielded once a group: the caller sees its number again.

    Raises:
        BadAnswer: the archive is damaged or was not written by this package; says at which byte.
    """
    with open(path, "rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except ValueError:  # an empty file cannot be mapped
            raise BadAnswer(f"{path} is empty") from None
    with view:
        number, parts, start = -1, dict[str, bytes](), 0
        for member, data in _members(path, view):
            key, ext = _split(path, member, data)
            if key != number or ext in parts:
                if parts:
                    yield StoredSample(number, parts, start)
                number, parts, start = key, {}, data
            parts[ext] = view[data : data + member.size]
        if parts:
            yield StoredSample(number, parts, start)


def _split(path: Path, member: Member, data: int) -> tuple[int, str]:
    key, dot, ext = member.name.partition(b".")
    if not (dot and len(key) == 9 and key.isdigit() and ext.isascii()):
        raise BadAnswer(f"{path}: unknown member {member.name!r} before byte {data}")
    return int(key), ext.decode("ascii")


def _members(path: Path, view: mmap.mmap) -> Iterator[tuple[Member, int]]:
    """Headers and the offsets of their data; the archive must end with two blocks of zeros."""
    at, size = 0, len(view)
    large: int | None = None
    while True:
        try:
            member = parse_header(view[at : at + BLOCK])
        except ValueError as error:
            raise BadAnswer(f"{path}: damage at byte {at}: {error}") from None
        if member is None:
            break
        data = at + BLOCK
        if large is not None:
            member = member._replace(size=large)
        end = data + padded(member.size)
        if end > size:
            raise BadAnswer(f"{path} ends within {member.name.decode(errors='replace')}, at byte {size}")
        if member.kind == b"x":
            large = pax_size(view[data : data + member.size])
        else:
            large = None
            yield member, data
        at = end
    if size != at + 2 * BLOCK or any(view[at:size]):
        raise BadAnswer(f"{path} does not end with two empty blocks after byte {at}")
