"""From the pipe into files: whole lines in order, files that stay small, memory that stays flat."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from feedtune.inside import stepfile
from feedtune.inside.linefiles import LineFile
from feedtune.inside.recordpipe import PIPE, PREFIX
from feedtune.inside.stepfile import StepFile
from feedtune.launch.foreground import Foreground
from feedtune.trials import collect, seen
from feedtune.trials.collect import Collector
from feedtune.trials.seen import read_steps, read_trainings

PARTS = {
    "t": 0.0123, "s": 0.0, "b": 0.0025, "o": 0.0081, "y": [["gradients", 0.0061, 0.0072]],
    "w": [0.0025] * 4, "v": 102_228_128, "q": 3, "n": 19_267_584,
}  # fmt: skip
Row = tuple[Any, ...]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are thinned a thousand times earlier."""
    monkeypatch.setattr(LineFile, "stretch", 16)
    monkeypatch.setattr(LineFile, "change_bytes", 1 << 14)
    monkeypatch.setattr(LineFile, "most_bytes", 1 << 17)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)[0] for line in path.read_bytes().splitlines()]


def passed_on(folder: Path, rows: Iterable[Row], look: Callable[[int], None]) -> tuple[StepFile, Collector]:
    """A rank and its driver in turns, so that neither waits; ``look`` is called after every 65,536 steps."""
    collector = Collector(folder)
    collector.open()
    try:
        file = StepFile(str(folder), 0)
        for number, row in enumerate(rows, 1):
            file.add(row)  # type: ignore[arg-type]
            if not number & 255:
                collector.collect()
            if not number & 65_535:
                look(number)
        file.flush()
        while collector.collect():
            file.flush()
    finally:
        collector.stop()
    return file, collector


def stretches(found: Sequence[int], length: int) -> list[int]:
    """Numbers of the whole stretches that are there; fails where one is not whole, or not in its place."""
    assert found == sorted(set(found))
    starts = [first for first in found if first % length == 0]
    last = found[-1] // length * length
    wanted = [number for first in starts for number in range(first, min(first + length, found[-1] + 1))]
    assert found == wanted
    assert last == starts[-1]
    return [first // length for first in starts]


def test_the_pipe_is_private_lies_in_memory_and_goes(tmp_path: Path) -> None:
    with Collector(tmp_path) as collector:
        place = (tmp_path / PIPE).resolve()
        found = place.stat()
        assert stat.S_ISFIFO(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        assert tmp_path not in place.parents  # opening it in there could hang as a file could
        file = StepFile(str(tmp_path), 0)
        file.add((1.0, 2.0, None, None))
        file.finish()
    assert not place.parent.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.rank0.jsonl"]
    assert numbers(tmp_path / "steps.rank0.jsonl") == [0]
    assert (collector.lost, collector.thinned, collector.error) == (0, 0, None)


def test_pipes_of_killed_drivers_are_swept_and_no_others(tmp_path: Path) -> None:
    names = ("dead", "empty", "new", "read", "file")
    pipes = {name: tmp_path / f"{PREFIX}{name}" / PIPE for name in names}
    for name, pipe in pipes.items():
        pipe.parent.mkdir()
        if name == "file":
            pipe.touch()
        elif name != "empty":
            os.mkfifo(pipe)
        if name != "new":
            os.utime(pipe.parent, (1, 1))
    reader = os.open(pipes["read"], os.O_RDONLY | os.O_NONBLOCK)
    collect.sweep(str(tmp_path))
    os.close(reader)
    assert {name for name in names if pipes[name].parent.exists()} == {"new", "read", "file"}


def test_where_nothing_can_lie_in_memory_the_pipe_lies_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(collect.tempfile, "mkdtemp", refuse)
    with Collector(tmp_path):
        assert stat.S_ISFIFO((tmp_path / PIPE).lstat().st_mode)
        file = StepFile(str(tmp_path), 0)
        file.add((1.0, 2.0, None, None))
        file.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.rank0.jsonl"]
    assert numbers(tmp_path / "steps.rank0.jsonl") == [0]


def test_where_no_pipe_can_be_made_ranks_write_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkfifo", refuse)
    with Collector(tmp_path) as collector:
        file = StepFile(str(tmp_path), 0)
        file.add((1.0, 2.0, None, None))
        file.finish()
        assert numbers(tmp_path / "steps.rank0.jsonl") == [0]
    assert collector.error is None
    assert [path.name for path in tmp_path.iterdir()] == ["steps.rank0.jsonl"]


def test_signals_are_left_to_the_one_that_waits_for_them(tmp_path: Path) -> None:
    with Foreground(), Collector(tmp_path) as collector:
        assert collector._thread is not None
        status = Path(f"/proc/self/task/{collector._thread.native_id}/status").read_text()
    (blocked,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        assert blocked >> (one - 1) & 1


RANK = """
import sys, time
from feedtune.inside.stepfile import StepFile

rank, steps = int(sys.argv[2]), int(sys.argv[3])
file = StepFile(sys.argv[1], rank)
sys.stdin.readline()
for step in range(steps):
    file.add((float(step), float(rank), None, None, {"w": [rank + 0.5] * (step % 40)}))
    if step % 7 == 0:
        file.flush()
    while len(file._lines) > 100:  # the reader is behind
        time.sleep(0.001)
        file.flush()
file.finish()
sys.exit(file.dropped)
"""


def test_lines_of_four_processes_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_ROOM", 8192)  # always full: that is when a write could be cut
    steps = 3000
    with Collector(tmp_path) as collector:
        words = [[sys.executable, "-c", RANK, str(tmp_path), str(rank), str(steps)] for rank in range(4)]
        ranks = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in words]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()  # all at once
        assert [rank.wait() for rank in ranks] == [0, 0, 0, 0]
    assert (collector.lost, collector.error) == (0, None)
    for number in range(4):
        text = (tmp_path / f"steps.rank{number}.jsonl").read_bytes()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line[0] for line in lines] == list(range(steps))
        assert {line[2] for line in lines} == {number}
        assert {one for line in lines for part in line[5:] for one in part["w"]} <= {number + 0.5}


def test_all_that_was_handed_on_is_taken_down_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readings that end anywhere, as of a pipe that is larger than what is read at once."""
    collector = Collector(tmp_path)
    collector.open()
    file = StepFile(str(tmp_path), 0)
    for _ in range(1000):
        file.add((1.0, 1.5, None, None, PARTS))
    file.flush()
    assert not file._lines
    monkeypatch.setattr(collect, "_ROOM", 5000)
    collector._stopping = True
    collector._read_on()
    collector.stop()
    assert numbers(tmp_path / "steps.rank0.jsonl") == list(range(1000))
    assert (collector.lost, collector.error) == (0, None)


def test_a_rank_may_go_on_beyond_the_end_of_the_driver(tmp_path: Path) -> None:
    with Collector(tmp_path):
        file = StepFile(str(tmp_path), 0)
    file.add((1.0, 2.0, None, None))
    file.finish()
    assert file.dropped == 1


@pytest.mark.usefixtures("small")
def test_a_file_grows_with_the_logarithm_of_the_run_and_keeps_whole_stretches(tmp_path: Path) -> None:
    steps = 60_000
    rows = ((1.0, 1.5, None, None, {"g": 0.25, "q": step % 10}) for step in range(steps))
    file, collector = passed_on(tmp_path, rows, lambda _: None)
    assert file.dropped == 0
    path = tmp_path / "steps.rank0.jsonl"
    found = numbers(path)
    assert len(found) + collector.thinned == steps
    assert path.stat().st_size < 1 << 17
    kept = stretches(found, 16)
    gaps = [after - before for before, after in pairwise(kept)]
    assert gaps == sorted(gaps)  # ever sparser
    assert set(gaps) >= {1, 2, 4, 8, 16}
    assert {2**n for n in range(12)} >= set(gaps)
    assert all(
        number % gap == 0 for number, gap in zip(kept[1:], gaps, strict=True)
    )  # ranks have them in common


@pytest.mark.usefixtures("small")
def test_the_most_that_a_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineFile, "most_bytes", 1000)
    rows = ((1.0, 1.5, None, None) for _ in range(500))
    _, collector = passed_on(tmp_path, rows, lambda _: None)
    path = tmp_path / "steps.rank0.jsonl"
    assert 900 < path.stat().st_size <= 1000
    assert numbers(path) == list(range(500 - collector.thinned))


@pytest.mark.usefixtures("small")
def test_workers_are_thinned_too(tmp_path: Path) -> None:
    with Collector(tmp_path) as collector:
        file = StepFile(str(tmp_path), 0)
        for second in range(3000):
            file.add_workers(float(second), 0, [[second, 0.5, 0.25]])
            if second % 100 == 0:
                file.flush()
        file.finish()
        assert file.dropped_workers == 0
    lines = (tmp_path / "workers.rank0.jsonl").read_text().splitlines()
    seconds = [int(json.loads(line)[0]) for line in lines]
    assert len(lines) + collector.thinned == 3000
    assert collector.thinned > 1000
    assert len(stretches(seconds, 16)) > 10


def test_a_disk_that_is_full_costs_lines_and_none_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "steps.rank0.jsonl"
    collector = Collector(tmp_path)
    collector.open()
    file = StepFile(str(tmp_path), 0)

    def write(steps: int) -> None:
        for _ in range(steps):
            file.add((1.0, 1.5, None, None))
        file.flush()
        collector.collect()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        write(10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))  # in the middle of a line
        write(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert collector.lost == 20
    assert collector.error == "File too large"
    write(10)
    collector.stop()
    assert numbers(path) == [*range(10), *range(30, 40)]
    assert file.dropped == 0


def test_a_run_folder_that_goes_costs_lines(tmp_path: Path) -> None:
    with Collector(tmp_path) as collector:
        file = StepFile(str(tmp_path), 0)
        (tmp_path / "steps.rank0.jsonl").unlink()
        file.add((1.0, 1.5, None, None))
        file.finish()
    assert file.dropped == 0
    assert collector.lost == 1
    assert collector.error == "No such file or directory"


def test_what_no_rank_has_written_reaches_no_file(tmp_path: Path) -> None:
    collector = Collector(tmp_path)
    collector.open()
    assert collector._pipe is not None
    StepFile(str(tmp_path), 0)
    for text in (b"../../evil\t[1]\n", b"[1,2,3]\n", b"\n\n", b"steps.rank0\tnothing\n", b"x" * 4000):
        os.write(collector._pipe, text)
    collector.collect()
    for _ in range(40):
        os.write(collector._pipe, b"x" * 4000)
        collector.collect()
    assert len(collector._rest) < 100_000
    collector.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.rank0.jsonl"]
    assert (tmp_path / "steps.rank0.jsonl").read_bytes() == b""
    assert collector.lost == 3


def test_an_error_of_the_reader_ends_the_reading_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector(tmp_path) as collector:
        monkeypatch.setattr(collector._files, "append", lambda _: 1 / 0)
        file = StepFile(str(tmp_path), 0)
        file.add((1.0, 1.5, None, None))
        file.finish()
        collector._thread.join(60)
        assert not collector._thread.is_alive()
    assert collector.error == "ZeroDivisionError: division by zero"
    assert list(tmp_path.iterdir()) == [tmp_path / "steps.rank0.jsonl"]


def test_steps_are_read_back_whatever_lies_between_them(tmp_path: Path) -> None:
    path = tmp_path / "steps.rank0.jsonl"
    path.write_text('[0,1.0,2.0]\n[1,2.0[7,9.0,9.5]\n[8,10.0,10.5,null,null,{"q":1}]\n[9,')
    assert [one.step for one in read_steps(path)] == [0, 8]
    assert read_steps(tmp_path / "none") == []


def test_of_files_too_large_for_memory_the_same_stretches_of_all_ranks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text("{}")
        lines = [f"[{step},{step}.0,{step}.5]\n" for step in range(rank * 100, 20_000)]
        (tmp_path / f"steps.rank{rank}.jsonl").write_text("".join(lines))
    whole = read_trainings(tmp_path)[1]
    assert [len(whole[rank].records) for rank in (0, 1)] == [20_000, 19_900]
    monkeypatch.setattr(seen, "_MOST_READ", 300_000)
    some = read_trainings(tmp_path)[1]
    assert stretches([one.step for one in some[0].records], 1024) == [0, 4, 8, 12, 16]
    assert some[0].records[100:] == some[1].records


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def long_run(folder: Path, steps: int, row: Callable[[int], Row]) -> tuple[list[int], Collector, int]:
    """Numbers of the steps kept, the collector, and how much memory grew after the first tenth."""
    sizes: dict[int, int] = {}
    file, collector = passed_on(
        folder, (row(step) for step in range(steps)), lambda done: sizes.update({done: resident()})
    )
    assert file.dropped == 0
    settled = [size for done, size in sizes.items() if done > steps / 10]
    return numbers(folder / "steps.rank0.jsonl"), collector, max(settled) - settled[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "row"),
    [
        (864_000, lambda step: (step * 1e-7, step * 1e-7, None, None, {**PARTS, "t": step * 1e-6})),
        (10_000_000, lambda step: (step * 1e-9, step * 1e-9, None, None)),
    ],
    ids=["a day with parts", "ten million"],
)
def test_a_long_run_keeps_memory_flat_and_its_file_bounded(
    tmp_path: Path, steps: int, row: Callable[[int], Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepfile, "_EVERY_S", float("inf"))
    found, collector, growth = long_run(tmp_path, steps, row)
    assert growth < 16 << 20
    assert (tmp_path / "steps.rank0.jsonl").stat().st_size < 160 << 20
    assert len(found) + collector.thinned == steps
    assert collector.thinned > 0
    assert stretches(found, 1024)[:30] == list(range(30))
    assert found[-1] > steps * 0.9
