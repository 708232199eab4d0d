"""The samplers' process: it starts, follows, stops, and cannot outlive the one who started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from feedtune.beside.readings import read_heads, read_readings
from feedtune.beside.sampler import Orders
from feedtune.beside.start import start_sampler

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0  # only a failing test waits so long
TICK_S = 0.05
STARTER = """
import os, sys, time
from pathlib import Path
from feedtune.beside.start import start_sampler
handle = start_sampler(Path(sys.argv[1]), None, 0.05)
if sys.argv[2] == "fork" and os.fork() == 0:  # holds the pipe's other end open
    time.sleep(600)
print(handle.pid, flush=True)
time.sleep(600)
"""


def until(ready):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def sources(path):
    return {r.source for r in read_readings(path)}


def gone(pid):
    try:
        return f"{pid} (" not in Path(f"/proc/{pid}/stat").read_text() or "Z" in state(pid)
    except OSError:
        return True


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "readings.jsonl"


def test_it_reads_a_command_and_stops_when_told(tmp_path, file):
    command = subprocess.Popen(["sleep", "600"])
    with start_sampler(tmp_path, command.pid, TICK_S) as handle:
        until(lambda: sum(r.source == "process" for r in read_readings(file)) >= 3)
        command.kill()
        command.wait()
        until(lambda: "process_end" in sources(file))
    assert handle.stop() is None
    assert gone(handle.pid)
    assert read_heads(file)[0]["root_pid"] == command.pid
    assert [p.name for p in tmp_path.iterdir()] == ["readings.jsonl"]
    assert file.read_bytes().endswith(b"\n")


def test_the_command_can_be_told_later(tmp_path, file):
    with start_sampler(tmp_path, None, TICK_S) as handle:
        until(lambda: "sampler" in sources(file))
        assert "process" not in sources(file)
        handle.follow(os.getpid())
        until(lambda: "process" in sources(file))
    assert handle.stop() is None


def test_orders_come_in_whole_lines_and_their_end_is_an_order():
    reader, writer = os.pipe()
    orders = Orders(reader, os.getppid())
    os.write(writer, b"root 4")
    assert orders.wait(time.monotonic() + 0.05) == []
    os.write(writer, b"2\n")
    assert orders.wait(time.monotonic() + PATIENCE_S) == ["root 42"]
    assert orders.wait(0.0) == []
    os.close(writer)
    assert orders.wait(0.0) is None
    assert Orders(reader, os.getpid()).wait(0.0) is None  # another one than who started us
    os.close(reader)


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_it_ends_with_its_starter_also_by_sigkill(tmp_path, file, way):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), way],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        pid = int(starter.stdout.readline())
        until(lambda: "sampler" in sources(file))
        assert os.getsid(pid) == pid
        starter.kill()
        starter.wait()
        until(lambda: gone(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
        starter.stdout.close()


def test_signals_of_the_terminal_do_not_reach_it(tmp_path, file):
    with start_sampler(tmp_path, None, TICK_S) as handle:
        until(lambda: "sampler" in sources(file))
        for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGHUP):
            os.kill(handle.pid, number)
        before = len(list(read_readings(file)))
        until(lambda: len(list(read_readings(file))) > before + 10)
    assert handle.stop() is None


def test_one_that_hangs_is_killed_and_said(tmp_path, file, monkeypatch):
    monkeypatch.setattr("feedtune.beside.start._STOP_SECONDS", 0.3)
    handle = start_sampler(tmp_path, None, TICK_S)
    until(lambda: "sampler" in sources(file))
    os.kill(handle.pid, signal.SIGSTOP)
    assert "had to be killed" in handle.stop()
    assert gone(handle.pid)


def test_one_that_was_killed_is_said(tmp_path, file):
    handle = start_sampler(tmp_path, None, TICK_S)
    until(lambda: "sampler" in sources(file))
    os.kill(handle.pid, signal.SIGKILL)
    until(lambda: state(handle.pid) == "Z")
    handle.follow(1)
    assert handle.stop() == "the samplers were ended by SIGKILL"


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    handle = start_sampler(tmp_path / "not there", None, TICK_S)
    until(lambda: gone(handle.pid))
    assert (
        handle.stop() == f"{tmp_path}/not there/readings.jsonl cannot be written: No such file or directory"
    )


def test_an_interpreter_that_cannot_be_started_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    handle = start_sampler(tmp_path, None, TICK_S)
    assert handle.pid is None
    handle.follow(1)
    assert "No such file" in handle.stop()


def test_a_run_folder_that_is_removed_ends_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    handle = start_sampler(folder, None, TICK_S)
    until(lambda: "sampler" in sources(folder / "readings.jsonl"))
    (folder / "readings.jsonl").unlink()
    until(lambda: gone(handle.pid))
    assert handle.stop() is None


def test_ticks_that_come_too_late_are_counted(tmp_path, file):
    with start_sampler(tmp_path, None, TICK_S) as handle:
        until(lambda: "sampler" in sources(file))
        os.kill(handle.pid, signal.SIGSTOP)
        time.sleep(5 * TICK_S)
        os.kill(handle.pid, signal.SIGCONT)
        until(lambda: any(r.values["lost_ticks"] for r in read_readings(file) if r.source == "sampler"))


def test_the_users_modules_are_not_imported(tmp_path, file, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with start_sampler(tmp_path, None, TICK_S) as handle:
        until(lambda: "sampler" in sources(file))
    assert handle.stop() is None
