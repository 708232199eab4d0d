"""Records on their way out of a rank: never waited for, whole lines, counted where they are lost."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedtune.inside import recordpipe, stepfile, stepline
from feedtune.inside.recordpipe import PIPE
from feedtune.inside.stepfile import StepFile
from feedtune.inside.stepline import step_line

PARTS = {
    "t": 0.123456789, "s": 0.0, "b": 0.25, "y": [["buffers", 0.001, 0.002], ["call", 0.5, 0.75]],
    "w": [0.25] * 6, "v": 102_228_128_000, "c": [0.5, 0.25], "q": 3, "n": 0,
}  # fmt: skip


class Reader:
    """A driver's end of the pipe, that reads when it is told to."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / PIPE, 0o600)
        self.pipe = os.open(folder / PIPE, os.O_RDWR | os.O_NONBLOCK)

    def read(self) -> bytes:
        found = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                found += os.read(self.pipe, 1 << 16)
        return found

    def close(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    found = Reader(tmp_path)
    yield found
    found.close()


def steps(data: bytes) -> list[int]:
    """Numbers of the steps in what a reader got; fails where a line is not whole."""
    assert data.endswith(b"\n") or not data
    found = []
    for line in data.splitlines():
        name, text = line.split(b"\t")
        assert name == b"steps.rank0"
        found.append(json.loads(text)[0])
    return found


def add(file: StepFile, count: int, *more: object) -> None:
    for _ in range(count):
        file.add((1.0, 1.5, None, None, *more))  # type: ignore[arg-type]


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def alike(value: object) -> object:
    """Equal up to 7 digits; integers, words and nulls exactly."""
    if isinstance(value, dict):
        return {name: alike(one) for name, one in value.items()}
    if isinstance(value, list):
        return [alike(one) for one in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "parts",
    [
        PARTS, None, {}, {"g": 1, "t": 0.5}, {"g": 1.5, "t": 2}, {"y": []}, {"w": [0, 1.5]},
        {"t": None, "q": True}, {"t": "late"}, {"y": [["100% \"sure\"", 1, 2.5]]}, {"w": [None, 1.0]},
        {"w": [[1.0, 2.0], 3.0]}, {"w": [3.0, [1.0, 2.0]]}, {"w": [3.0, 4.0]}, {"y": [["call", 1.0]]},
        {"t": 1e-9, "s": 1e9}, {"y": [["a%%b", 1, 2.5]]},
    ],
)  # fmt: skip
def test_a_line_says_what_the_row_said(parts: dict | None) -> None:
    got = json.loads(step_line(7, (12345.678901, 12345.7, "eval", None, parts)))
    wanted = [7, 12345.678901, 12345.7, "eval", *([] if parts is None else [None, parts])]
    assert got[:5] == wanted[:5]
    assert (got[5:] or [None])[0] == (None if parts is None else alike(parts))


def test_a_pattern_is_not_used_for_numbers_of_another_kind() -> None:
    """As an integer 0.75 would read 0, and as a float a large integer would lose digits."""
    for value in (3, 0.75, 102_228_128_001, 0.25):
        assert json.loads(step_line(0, (0.0, 0.0, None, None, {"v": value})))[5] == {"v": value}


def test_a_pattern_is_not_used_for_a_row_with_the_same_words() -> None:
    for parts in ({"y": [["a", 1.5, 2.5]]}, {"y": [1.5], "a": 2.5}, {"y": [["a", 1.5, 2.5]]}):
        assert json.loads(step_line(0, (0.0, 0.0, None, None, parts)))[5] == parts


def test_what_is_no_number_is_read_back_as_such() -> None:
    found = json.loads(step_line(0, (0.0, 0.0, None, None, {"t": float("nan"), "s": float("inf")})))[5]
    assert math.isnan(found["t"])
    assert found["s"] == float("inf")


def test_patterns_do_not_pile_up() -> None:
    for count in range(3 * stepline._SHAPES):
        step_line(0, (0.0, 0.0, None, None, {"w": [0.5] * count}))
    assert len(stepline._patterns) <= stepline._SHAPES


def test_lines_go_into_the_pipe_in_order_and_not_into_the_file(tmp_path: Path, reader: Reader) -> None:
    before = descriptors()
    file = StepFile(str(tmp_path), 0)
    add(file, 255, PARTS)
    assert reader.read() == b""
    add(file, 1, PARTS)
    add(file, 10)
    file.flush()
    assert steps(reader.read()) == list(range(266))
    assert (tmp_path / "steps.rank0.jsonl").read_text() == ""
    assert file.dropped == 0
    assert descriptors() == before  # workers inherit nothing


def test_a_full_pipe_is_not_waited_for_and_what_is_dropped_is_counted(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepfile, "_MOST_BYTES", 1 << 16)
    file = StepFile(str(tmp_path), 0)
    add(file, 4000, PARTS)
    assert sum(map(len, file._lines)) == file._size <= 1 << 16
    first = steps(reader.read())
    assert first == list(range(len(first)))
    assert file.dropped > 1000
    kept: list[int] = []
    while file._lines:
        file.flush()
        kept += steps(reader.read())
    assert kept == list(range(len(first), len(first) + len(kept)))  # the newest were dropped
    assert len(first) + len(kept) + file.dropped == file.steps == 4000
    add(file, 1)
    file.flush()
    assert steps(reader.read()) == [4000]


def test_the_end_has_patience_with_a_full_pipe_and_then_no_more(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StepFile(str(tmp_path), 0)
    add(file, 2000, PARTS)
    assert file._lines
    found = []
    monkeypatch.setattr(stepfile.time, "sleep", lambda _: found.append(reader.read()))
    file.finish()
    assert steps(b"".join(found) + reader.read()) == list(range(2000))
    assert file.dropped == 0

    add(file, 2000, PARTS)
    clock = iter(range(10_000))
    monkeypatch.setattr(stepfile.time, "monotonic", lambda: next(clock) / 10)
    waits: list[float] = []
    monkeypatch.setattr(stepfile.time, "sleep", waits.append)
    file.finish()
    assert 0 < len(waits) < 20
    assert len(steps(reader.read())) + file.dropped == 2000
    assert not file._lines


def test_a_driver_that_is_gone_costs_records_and_no_error(tmp_path: Path, reader: Reader) -> None:
    file = StepFile(str(tmp_path), 0)
    add(file, 10)
    file.add_workers(1.0, 0, [[1, 0.5]])
    reader.close()
    file.flush()
    assert (file.dropped, file.dropped_workers) == (10, 1)
    add(file, 300)
    file.add_workers(1.0, 0, [[1, 0.5]])
    file.finish()
    assert (file.dropped, file.dropped_workers) == (310, 2)
    assert not file._lines
    assert (tmp_path / PIPE).exists()


def test_the_last_one_clears_the_memory_that_a_killed_driver_leaves(tmp_path: Path) -> None:
    folder = tmp_path / f"{recordpipe.PREFIX}x"
    folder.mkdir()
    reader = Reader(folder)
    (tmp_path / PIPE).symlink_to(folder / PIPE)
    file = StepFile(str(tmp_path), 0)
    add(file, 1)
    reader.close()
    file.flush()
    assert not folder.exists()
    assert file.dropped == 1


@pytest.mark.parametrize("handling", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_driver_that_goes_while_it_is_written_to_ends_no_training(
    tmp_path: Path, reader: Reader, handling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have restored what SIGPIPE does in other programs: it ends them."""
    file = StepFile(str(tmp_path), 0)
    add(file, 3)
    write = os.write
    monkeypatch.setattr(os, "write", lambda *words: (reader.close(), write(*words))[1])
    before = signal.signal(signal.SIGPIPE, handling)
    try:
        file.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert file.dropped == 3
    assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_too_many_open_files_delay_records(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StepFile(str(tmp_path), 0)
    add(file, 3)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> int:
            raise OSError(24, "Too many open files")

        patch.setattr(os, "open", refuse)
        file.flush()
    file.flush()
    assert steps(reader.read()) == [0, 1, 2]


def test_a_line_too_long_for_the_pipe_is_counted(tmp_path: Path, reader: Reader) -> None:
    file = StepFile(str(tmp_path), 0)
    add(file, 1)
    add(file, 1, {"w": [0.123456] * 1000})
    add(file, 1)
    file.flush()
    assert steps(reader.read()) == [0, 2]
    assert file.dropped == 1


FORKED = """
import os, sys
from feedtune.inside.stepfile import StepFile

file = StepFile(sys.argv[1], 0)
for _ in range(10):
    file.add((1.0, 1.5, None, None))
if os.fork() == 0:
    file.flush()
    for _ in range(300):
        file.add((1.0, 1.5, None, None))
    file.finish()
    os._exit(0)
os.wait()
file.finish()
"""


def test_a_forked_child_writes_nothing(tmp_path: Path, reader: Reader) -> None:
    subprocess.run([sys.executable, "-c", FORKED, tmp_path], check=True)
    assert steps(reader.read()) == list(range(10))


def test_workers_are_written_in_as_many_lines_as_it_takes(tmp_path: Path, reader: Reader) -> None:
    file = StepFile(str(tmp_path), 3)
    rows = [[number, 0.123456789, 1e-7, 0.0, 1.5, 10**12, 4096] for number in range(200)]
    file.add_workers(1.25, 5, rows)
    file.flush()
    found: list[list] = []
    for line in reader.read().splitlines():
        assert len(line) < 4096
        name, text = line.split(b"\t")
        assert name == b"workers.rank3"
        t_s, first, some = json.loads(text)
        assert t_s == 1.25
        assert first == 5 + len(found)
        found += some
    assert found == rows


def test_without_a_driver_on_this_machine_files_are_written(tmp_path: Path) -> None:
    """A pipe on a shared disk has no reader here; a link may lead to the memory of another machine."""
    os.mkfifo(tmp_path / PIPE)
    for number in range(2):
        file = StepFile(str(tmp_path), 0)
        add(file, 3, PARTS)
        file.add_workers(1.0, 0, [[1, 0.5]])
        file.finish()
        name = "rank0" if number == 0 else "rank0.2"
        lines = (tmp_path / f"steps.{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)[0] for line in lines] == [0, 1, 2]
        assert (tmp_path / f"workers.{name}.jsonl").read_text() == "[1.000000,0,[[1,0.5]]]\n"
        (tmp_path / PIPE).unlink()
        (tmp_path / PIPE).symlink_to("/nowhere/records.pipe")
