"""USTAR headers (POSIX.1-1988), all fixed but name, size and checksum; PAX for sizes over 8 GiB."""

from __future__ import annotations

from typing import NamedTuple

from shard_tools.plan.members import BLOCK, USTAR_MAX

_MODE_OWNER_GROUP = b"0000644\0" + b"0000000\0" * 2
_MTIME = b"00000000000\0"
_ZEROS = bytes(BLOCK)
_NAME_PADS = [bytes(100 - length) for length in range(101)]


def _tail(kind: bytes) -> bytes:
    return kind + bytes(100) + b"ustar\x0000" + bytes(BLOCK - 265)


_TAILS = {kind: _tail(kind) for kind in (b"0", b"x")}
# The checksum is the sum of all bytes, its own field counted as eight spaces.
_BASES = {kind: sum(_MODE_OWNER_GROUP) + sum(_MTIME) + 8 * 32 + sum(tail) for kind, tail in _TAILS.items()}
_FILE_BASE, _FILE_TAIL = _BASES[b"0"], _TAILS[b"0"]


def header(name: bytes, size: int) -> bytes:
    """Header of a regular file; ``name`` has at most 100 bytes, ``size`` at most 8 GiB - 1."""
    octal = b"%011o\0" % size
    checksum = b"%06o\0 " % (_FILE_BASE + sum(name) + sum(octal))
    return b"".join(
        (name, _NAME_PADS[len(name)], _MODE_OWNER_GROUP, octal, _MTIME, checksum, _FILE_TAIL),
    )


def large_header(name: bytes, size: int) -> bytes:
    """Headers of a file too large for a USTAR size field: a PAX record, then a header with size 0."""
    value = b"%d" % size
    length = len(value) + len(b" size=\n") + 2
    record = b"%d size=%s\n" % (length, value)
    octal = b"%011o\0" % len(record)
    checksum = b"%06o\0 " % (_BASES[b"x"] + sum(name) + sum(octal))
    extended = b"".join(
        (name, _NAME_PADS[len(name)], _MODE_OWNER_GROUP, octal, _MTIME, checksum, _TAILS[b"x"]),
    )
    return extended + record.ljust(BLOCK, b"\0") + header(name, 0)


def file_header(name: bytes, size: int) -> bytes:
    """Header or headers of a file of any size."""
    return header(name, size) if size <= USTAR_MAX else large_header(name, size)


class Member(NamedTuple):
    """What a header says: member name, data size, and the type flag (``b"0"`` file, ``b"x"`` PAX)."""

    name: bytes
    size: int
    kind: bytes


def parse_header(block: bytes) -> Member | None:
    """Read a header that this package wrote; None for a block of zeros, which ends the archive.

    Raises:
        ValueError: no tar header, or its checksum is wrong.
    """
    if block == _ZEROS:
        return None
    if len(block) != BLOCK or block[257:263] != b"ustar\0":
        raise ValueError("no tar header")
    if int(block[148:154], 8) != sum(block) - sum(block[148:156]) + 8 * 32:
        raise ValueError("the header's checksum is wrong")
    return Member(block[:100].rstrip(b"\0"), int(block[124:135], 8), block[156:157])


def pax_size(record: bytes) -> int:
    r"""Size in a PAX record: ``pax_size(b"20 size=8589934592\n") == 8589934592``.

    Raises:
        ValueError: there is none.
    """
    length, _, rest = record.partition(b" ")
    key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
    if key != b"size":
        raise ValueError("the PAX record holds no size")
    return int(value)
