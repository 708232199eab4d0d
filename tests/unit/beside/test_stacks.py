"""Last stacks of real processes that hang, by py-spy and by faulthandler; nobody dies of being asked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from feedtune.analysis.standing import Standing, blame
from feedtune.beside.stacks import SIGNAL, children, parse_faulthandler, parse_py_spy, read_stack
from feedtune.inside import stack_signal

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0  # only a failing test waits so long
PY_SPY = [found] if (found := shutil.which("py-spy", path=str(Path(sys.executable).parent))) else []
INSIDE = str(Path(stack_signal.__file__).parent)
ARM = "from feedtune.inside.stack_signal import arm; arm(sys.argv[1])"


@pytest.fixture
def hang(tmp_path):
    """Starts Python code that says when it is about to hang."""
    started = []

    def start(code: str, arm: str = ARM, python: str = sys.executable) -> subprocess.Popen:
        script = tmp_path / f"hang{len(started)}.py"
        script.write_text(f"import ctypes, os, signal, sys, threading, time\n{arm}\n{textwrap.dedent(code)}")
        process = subprocess.Popen(
            [python, str(script), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(ready) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(calls) -> list[str]:
    return [call[0].rpartition(".")[2] for call in calls]


def sleeps(pid: int) -> bool:
    """Whether a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


IN_SLEEP = """
    def stuck():
        print("ready", flush=True)
        time.sleep(1000)

    def main():
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        stuck()

    main()
"""
# ctypes.PyDLL holds the interpreter's lock: no other thread of the process can run.
IN_C = """
    def stuck():
        print("ready", flush=True)
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

    stuck()
"""


@pytest.mark.parametrize(
    "py_spy", [[], pytest.param(PY_SPY, marks=pytest.mark.skipif(not PY_SPY, reason="none"))]
)
@pytest.mark.parametrize("code", [IN_SLEEP, IN_C])
def test_the_place_where_a_process_hangs(hang, tmp_path, code, py_spy) -> None:
    process = hang(code)
    until(lambda: sleeps(process.pid))
    calls = read_stack(process.pid, tmp_path, py_spy)
    if calls is None and py_spy:
        pytest.skip("the system refuses py-spy here")
    assert names(calls)[0] == "stuck"
    assert calls[0][1].endswith("hang0.py")
    assert calls[0][2] in (6, 5)
    assert names(calls)[-1] == "<module>"
    assert process.poll() is None
    assert names(read_stack(process.pid, tmp_path, py_spy)) == names(calls)  # it can be asked again


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_other_interpreters_answer_in_the_same_form(hang, tmp_path, version) -> None:
    """The hook runs in the user's interpreter."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("not installed")
    arm = f"sys.path.append({INSIDE!r}); from stack_signal import arm; arm(sys.argv[1])"
    process = hang(IN_SLEEP, arm=arm, python=python)
    assert names(read_stack(process.pid, tmp_path, [])) == ["stuck", "main", "<module>"]


def test_the_worker_of_a_real_loader_that_hangs_is_found(hang, tmp_path) -> None:
    pytest.importorskip("torch")
    process = hang(
        """
        from torch.utils.data import DataLoader, Dataset
        from feedtune.inside.probe import WorkerClock

        class Data(Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, index):
                if index == 20:
                    self.stuck()
                return index

            def stuck(self):
                time.sleep(1000)

        def main():
            clock = WorkerClock(2, None, sys.argv[1], False)
            loader = DataLoader(Data(), batch_size=4, num_workers=2, worker_init_fn=clock)
            for batch in loader:
                if batch[0] == 16:
                    print("ready", flush=True)

        main()
        """
    )
    workers = children(process.pid)
    assert len(workers) == 2
    read = {}

    def all_stand() -> bool:
        read.update({pid: read_stack(pid, tmp_path, []) for pid in (process.pid, *workers)})
        return names(read[process.pid] or ()).count("_get_data") == 1 and any(
            "stuck" in names(read[pid] or ()) for pid in workers
        )

    until(all_stand)
    standings = [Standing(pid, read[pid]) for pid in workers]
    cause = blame({0: Standing(process.pid, read[process.pid])}, {0: standings})
    assert cause.text.startswith("a worker of rank 0 hangs in stuck (")
    assert sorted(str(s.waits) for s in standings) == ["None", "work"]
    assert process.poll() is None
    assert children(process.pid) == workers


@pytest.mark.parametrize(
    "arm",
    [
        "",  # the default action: it would end
        f"signal.signal({int(SIGNAL)}, signal.SIG_IGN)",
        f"{ARM}; signal.pthread_sigmask(signal.SIG_BLOCK, [{int(SIGNAL)}])",
        f"{ARM}; import faulthandler; faulthandler.unregister({int(SIGNAL)})",
    ],
)
def test_a_process_that_does_not_take_the_signal_is_not_asked(hang, tmp_path, arm) -> None:
    process = hang(IN_SLEEP, arm=arm)
    (tmp_path / f"stack.{process.pid}").touch()  # of a process that had this number before
    assert read_stack(process.pid, tmp_path, []) is None
    pending = next(
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "ShdPnd" in line
    )
    assert int(pending.split()[1], 16) == 0
    assert process.poll() is None


def test_a_process_without_a_file_is_not_asked(hang, tmp_path) -> None:
    process = hang(IN_SLEEP)
    (tmp_path / f"stack.{process.pid}").unlink()
    assert read_stack(process.pid, tmp_path, []) is None


def test_what_an_earlier_process_of_that_number_wrote_is_not_its_stack(hang, tmp_path) -> None:
    process = hang(IN_SLEEP, arm=f"signal.signal({int(SIGNAL)}, lambda *_: None)")
    old = 'Current thread 0x01 (most recent call first):\n  File "old.py", line 3 in f\n'
    (tmp_path / f"stack.{process.pid}").write_text(old)
    assert read_stack(process.pid, tmp_path, []) is None
    assert process.poll() is None


def test_a_process_that_cannot_answer_is_left(hang, tmp_path) -> None:
    process = hang(IN_SLEEP)
    os.kill(process.pid, signal.SIGSTOP)
    assert read_stack(process.pid, tmp_path, []) is None


def test_a_process_that_has_gone(hang, tmp_path) -> None:
    process = hang(IN_SLEEP)
    process.kill()
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    for _ in range(2):  # not yet reaped, and reaped
        assert read_stack(process.pid, tmp_path, []) is None
        assert read_stack(process.pid, tmp_path, PY_SPY) is None
        assert children(process.pid) == []
        process.wait()


def test_a_file_that_is_removed_meanwhile_is_no_error(hang, tmp_path, monkeypatch) -> None:
    """A rank that goes on removes the files of workers it has ended."""
    process = hang(IN_SLEEP)
    kill = os.kill

    def remove(pid: int, number: int) -> None:
        kill(pid, number)
        (tmp_path / f"stack.{pid}").unlink()

    monkeypatch.setattr(os, "kill", remove)
    assert read_stack(process.pid, tmp_path, []) is None


@pytest.mark.parametrize(
    "answer",
    [
        "exit 1",
        "echo 'Error: Permission denied (os error 13)' >&2; exit 1",
        "echo '[]'",
        "echo 'null'",
        "echo '{}'",
        "echo '[{\"os_thread_id\": 1}]'",
        "echo 'not json'",
        "printf '\\377'",
    ],
)
def test_a_py_spy_that_fails_leaves_it_to_faulthandler(hang, tmp_path, answer) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text(f"#!/bin/sh\n{answer}\n")
    fake.chmod(0o755)
    process = hang(IN_SLEEP)
    assert names(read_stack(process.pid, tmp_path, [str(fake)])) == ["stuck", "main", "<module>"]


def test_a_py_spy_that_is_not_there_leaves_it_to_faulthandler(hang, tmp_path) -> None:
    process = hang(IN_SLEEP)
    assert names(read_stack(process.pid, tmp_path, ["/nowhere/py-spy"])) == ["stuck", "main", "<module>"]


def test_children_are_those_of_all_threads(hang) -> None:
    process = hang(
        """
        import subprocess
        def start():
            found.append(subprocess.Popen(["sleep", "1000"]).pid)
        found = []
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        start()
        print("ready", flush=True)
        print(*found, flush=True)
        time.sleep(1000)
        """
    )
    assert children(process.pid) == sorted(map(int, process.stdout.readline().split()))
    assert children(1 << 22) == []


def thread(name: str, os_thread_id: int | None, function: str) -> dict:
    frame = {"name": function, "filename": "a.py", "line": 3, "module": None}
    return {"thread_name": name, "os_thread_id": os_thread_id, "frames": [frame]}


def test_py_spys_main_thread_is_chosen_among_all() -> None:
    pin, main = thread("Thread-1 (_pin_memory_loop)", 8, "pin"), thread("MainThread", 7, "main")
    unnamed = thread("", None, "old")
    assert parse_py_spy(json.dumps([pin, main]), 7) == (("main", "a.py", 3),)
    assert parse_py_spy(json.dumps([main, pin]), 7) == (("main", "a.py", 3),)
    # Another pid namespace, and threads without names: main is the oldest, which comes last.
    assert parse_py_spy(json.dumps([pin, main, unnamed]), 4711) == (("main", "a.py", 3),)
    assert parse_py_spy(json.dumps([pin, unnamed]), 4711) == (("old", "a.py", 3),)
    assert parse_py_spy("[]", 7) == ()


def test_faulthandlers_last_thread_is_the_one_that_took_the_signal() -> None:
    text = (
        'Thread 0x1 [feeder] (most recent call first):\n  File "b.py", line 1 in other\n\n'
        "Current thread 0x2 (most recent call first):\n  Garbage-collecting\n"
        '  File "a b/\\xe9.py", line 3 in f\n'
        '  File "???", line ??? in ???\n'
    )
    assert parse_faulthandler(text) == (("f", "a b/\\xe9.py", 3), ("???", "???", 0))
    assert parse_faulthandler("Current thread 0x2 (most recent call first):\n  <no Python frame>\n") == ()
    assert parse_faulthandler("") == ()
    assert parse_faulthandler('  File "a.py", line 3 in f\n  File "b.py", li') == (("f", "a.py", 3),)


def test_both_sides_use_one_signal() -> None:
    assert stack_signal.SIGNAL == SIGNAL


def test_a_signal_that_the_script_uses_is_left_to_it(hang, tmp_path) -> None:
    process = hang(IN_SLEEP, arm=f"signal.signal({int(SIGNAL)}, lambda *_: print('mine', flush=True)); {ARM}")
    assert not list(tmp_path.glob("stack.*"))
    os.kill(process.pid, SIGNAL)
    assert process.stdout.readline() == b"mine\n"


def test_a_folder_that_has_gone_stops_nobody(hang, tmp_path) -> None:
    hang(IN_SLEEP, arm=ARM.replace("sys.argv[1]", "sys.argv[1] + '/gone'"))
    assert not list(tmp_path.glob("stack.*"))


def test_a_forked_worker_writes_a_file_of_its_own(hang, tmp_path) -> None:
    process = hang(
        """
        def work():
            arm(sys.argv[1])
            print("ready", flush=True)
            time.sleep(1000)

        def main():
            if os.fork() == 0:
                work()
            os.wait()

        main()
        """
    )
    (worker,) = children(process.pid)
    assert names(read_stack(worker, tmp_path, []))[:2] == ["work", "main"]
    assert names(read_stack(process.pid, tmp_path, [])) == ["main", "<module>"]


def test_files_of_ended_processes_go(tmp_path) -> None:
    for pid in (1, 2, 3):
        (tmp_path / f"stack.{pid}").touch()
    stack_signal.forget(str(tmp_path), [1, 3, 4])
    assert [path.name for path in tmp_path.iterdir()] == ["stack.2"]
