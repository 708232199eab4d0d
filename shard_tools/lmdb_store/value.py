"""An LMDB value: parts one after the other, each u8 name length, name, u64 little-endian length, data."""

from __future__ import annotations

import struct

from shard_tools.errors import BadAnswer

_LENGTH = struct.Struct("<Q")


def part_head(name: bytes, size: int) -> bytes:
    """What stands before a part's data."""
    return bytes((len(name),)) + name + _LENGTH.pack(size)


def payload_span(value: memoryview | bytes) -> tuple[int, int]:
    """Where the first part, the payload, begins and ends in a value."""
    start = 1 + value[0] + 8
    return start, start + int(_LENGTH.unpack_from(value, start - 8)[0])


def split_value(value: bytes) -> dict[str, bytes]:
    """All parts of a value in order, by name.

    Raises:
        BadAnswer: the lengths do not add up.
    """
    parts: dict[str, bytes] = {}
    at, size = 0, len(value)
    while at < size:
        name_end = at + 1 + value[at]
        if name_end + 8 > size:
            raise BadAnswer(f"a value ends within a part's head, at byte {at}")
        name = value[at + 1 : name_end].decode("ascii", "replace")
        end = name_end + 8 + int(_LENGTH.unpack_from(value, name_end)[0])
        if end > size or name in parts:
            raise BadAnswer(f"the value's part '{name}' does not fit its length")
        parts[name] = value[name_end + 8 : end]
        at = end
    return parts
