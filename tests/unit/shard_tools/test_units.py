from __future__ import annotations

import json
import os

import pytest

from shard_tools.console import print_json
from shard_tools.errors import BadInput
from shard_tools.units import format_bytes, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64MB", 64_000_000), ("1.5 GiB", 3 * 2**29), ("2k", 2000)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1", "0", "1XB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadInput):
        parse_size(text)


def test_sizes_and_times_as_people_read_them() -> None:
    assert format_bytes(153_000_000) == "153 MB"
    assert format_seconds(185) == "3 min 05 s"
    assert format_seconds(0.00007) == "70 µs"
    assert format_seconds(0.35) == "350 ms"


def test_json_of_a_name_that_is_no_utf8_can_be_written_and_read(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    names = [os.fsdecode(b"\xff.dat"), "ü"]
    print_json({"names": names})
    print_json({"names": names[1:]})
    first, second = capfdbinary.readouterr().out.split(b"\n}\n", 1)
    assert json.loads(first + b"}")["names"] == names
    assert "ü".encode() in second
