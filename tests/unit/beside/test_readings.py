"""The file of readings: whole lines, bounded, readable whatever has happened to it."""

from __future__ import annotations

import json
import os

import pytest

from feedtune.beside import sampler as sampler_module
from feedtune.beside.base import NullSampler
from feedtune.beside.readings import FileGone, ReadingsFile, read_heads, read_readings
from feedtune.beside.sampler import Recorder
from feedtune.records import Reading


class Fake(NullSampler):
    name = "fake"
    columns = {"thing": ("a_s", "b_bytes")}  # noqa: RUF012

    def __init__(self, rows=(["x", 1.5, None], ["y", None, 7])):
        self.rows = rows
        self.closed = 0

    def sample(self, now_s):  # noqa: ARG002  # the protocol's
        if isinstance(self.rows, Exception):
            raise self.rows
        return {"thing": [list(row) for row in self.rows]}

    def close(self):
        self.closed += 1


def recorder(path, *samplers, interval_s=1.0):
    made = Recorder(samplers, path, interval_s, None)
    made.begin(5.0)
    return made


def notes(path):
    return [(r.of, r.values["text"]) for r in read_readings(path) if r.source == "note"]


def test_what_is_written_comes_back(tmp_path):
    path = tmp_path / "readings.jsonl"
    made = recorder(path, Fake())
    assert made.tick(6.25, 0.01)
    made.close()
    readings = [r for r in read_readings(path) if r.source == "thing"]
    assert readings == [
        Reading(6.25, "thing", "x", {"a_s": 1.5, "b_bytes": None}),
        Reading(6.25, "thing", "y", {"a_s": None, "b_bytes": 7}),
    ]
    own = [r for r in read_readings(path) if r.source == "sampler"]
    assert own[0].values["lag_s"] == 0.01
    assert own[0].values["cpu_s"] > 0
    assert read_heads(path)[0]["samplers"] == {"fake": None}


def test_a_sampler_that_fails_is_noted_once_closed_and_dropped(tmp_path):
    path = tmp_path / "readings.jsonl"
    bad, good = Fake(ValueError("broken file")), Fake()
    bad.name = "bad"
    made = recorder(path, bad, good)
    assert all(made.tick(float(t), 0.0) for t in range(3))
    made.close()
    assert notes(path) == [("bad", "bad has failed and is dropped: ValueError: broken file")]
    assert bad.closed == 1
    assert sum(r.source == "thing" for r in read_readings(path)) == 6


def test_one_that_cannot_be_prepared_is_named_in_the_head(tmp_path):
    path = tmp_path / "readings.jsonl"

    class Broken(Fake):
        def prepare(self):
            raise RuntimeError("no")

    class Absent(Fake):
        name = "absent"

        def prepare(self):
            return "no such device"

    made = recorder(path, Broken(), Absent())
    assert made.tick(1.0, 0.0)
    made.close()
    states = read_heads(path)[0]["samplers"]
    assert states["absent"] == "not available: no such device"
    assert "RuntimeError" in states["fake"]


def test_the_interval_doubles_with_the_size_and_then_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_module, "SLOWER_EVERY_BYTES", 3000)
    monkeypatch.setattr(sampler_module, "MOST_BYTES", 12000)
    path = tmp_path / "readings.jsonl"
    made = recorder(path, Fake([["x", "y" * 500]]))
    ticks = 0
    while made.tick(float(ticks), 0.0):
        ticks += 1
        assert ticks < 100
    made.close()
    assert made.interval_s == 8.0  # at 3000, 6000 and 9000 bytes
    assert [text.split(": ")[1].split(" from")[0] for _, text in notes(path)] == [
        "a tick every 2 s", "a tick every 4 s", "a tick every 8 s", "no more is recorded",
    ]  # fmt: skip
    assert path.stat().st_size < 14000


def test_half_lines_and_junk_are_passed_over(tmp_path):
    path = tmp_path / "readings.jsonl"
    made = recorder(path, Fake())
    made.tick(1.0, 0.0)
    made.close()
    with path.open("ab") as file:
        file.write(b'[2.0,"thing",[["z"')
    assert [r.of for r in read_readings(path) if r.source == "thing"] == ["x", "y"]
    # A later start in the same folder begins a line of its own, and a head that names its columns.
    later = Fake([["later", 3.0]])
    later.columns = {"thing": ("other",)}
    made = recorder(path, later)
    made.tick(9.0, 0.0)
    made.close()
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[1,2]\nnull\n")
    things = [r for r in read_readings(path) if r.source == "thing"]
    assert [r.of for r in things] == ["x", "y", "later"]
    assert things[-1].values == {"other": 3.0}
    assert len(read_heads(path)) == 2


def test_no_file_gives_no_readings(tmp_path):
    assert list(read_readings(tmp_path / "none")) == []
    assert read_heads(tmp_path / "none") == []


def test_a_file_that_was_removed_ends_the_recording(tmp_path):
    path = tmp_path / "readings.jsonl"
    made = recorder(path, Fake())
    path.unlink()
    assert not made.tick(1.0, 0.0)
    made.close()
    file = ReadingsFile(path)
    path.unlink()
    with pytest.raises(FileGone):
        file.add(1.0, {})
    file.close()


def test_a_full_disk_costs_ticks_and_no_line_is_torn(tmp_path, monkeypatch):
    path = tmp_path / "readings.jsonl"
    file = ReadingsFile(path)
    file.head({"schema": "feedtune.readings/1", "columns": {"thing": ["a"]}})
    real, writes = os.write, []

    def full(handle, data):
        writes.append(data)
        if len(writes) > 1:
            raise OSError(28, "No space left on device")
        return real(handle, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr("feedtune.beside.readings.os.write", full)
        file.add(1.0, {"thing": [["lost", 1]]})
    assert file.lost == 1
    file.add(2.0, {"thing": [["kept", 2]]})
    file.close()
    assert [r.of for r in read_readings(path)] == ["kept"]


def test_a_line_is_what_the_format_says(tmp_path):
    path = tmp_path / "readings.jsonl"
    made = recorder(path, Fake([["x", 1.0, None]]))
    made.tick(6.25, 0.0)
    made.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["schema"] == "feedtune.readings/1"
    assert lines[1] == [6.25, "thing", [["x", 1.0]]]
