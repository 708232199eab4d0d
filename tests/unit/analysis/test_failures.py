"""From exit codes, tracebacks and outputs to a reason and a sentence."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from feedtune.analysis.failures import Cause, cause_of, ended_by, exit_codes, shown_output

DATA = Path(__file__).parents[2] / "data" / "failures"


def recorded(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def trace(error: str, file: str = "/project/train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in main\n    step()\n{error}\n'


def said(error: str, output: str = "", code: int | None = 1) -> Cause:
    """The cause where rank 0 has ended with an exception of its loop."""
    return cause_of([(0, trace(error))], [], code, output, {})


def pid_of(output: str, rank: int) -> int:
    """The pid of a rank in torchrun's report."""
    return int(re.search(rf"rank      : {rank} .*\n.*pid: (\d+)", output)[1])


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("worker_kill", "worker_died", "a worker process was killed: RuntimeError: DataLoader worker (pid"),
        ("worker_segv", "worker_died", "crashed: RuntimeError: DataLoader worker (pid 28747) is killed by"),
        ("worker_exit", "worker_died", "ended by itself: RuntimeError: DataLoader worker (pid 28765) exited"),
        ("worker_bus", "shm", "/dev/shm is full"),
        ("worker_npmem", "ram", "Unable to allocate 7.11 PiB"),
        ("worker_torchmem", "ram", "you tried to allocate 4000000000000000 bytes"),
        ("worker_fds", "descriptors", "[Errno 24] Too many open files: '/dev/null'"),
        ("worker_timeout", "hang", "the script's own time limit for a batch has passed"),
        ("worker_value", "loader_failed", "rank 0: ValueError: Bus error in sample 3"),
        ("worker_key", "loader_failed", "rank 0: KeyError: 'image'"),
        ("worker_multi", "loader_failed", "rank 0: ValueError: cannot decode"),
        ("worker_chain", "loader_failed", "rank 0: RuntimeError: sample 20 is broken"),
        ("worker_conn", "loader_failed", "rank 0: ConnectionResetError: [Errno 104] Connection"),
    ],
)  # fmt: skip
def test_what_torch_says_of_a_loader(name, reason, words) -> None:
    """Recorded with torch 2.13; the text of a rank may be cut at its beginning."""
    for text in (recorded(name), recorded(name)[-1500:]):
        for errors in ([(0, text)], []):  # what the script caught, and wrote itself, ended it as well
            cause = cause_of(errors, [(0, text)], 1, text, {})
            assert cause.reason == reason
            assert words in cause.text
            assert "\n" not in cause.text
            assert cause.stack == text.strip()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed. ", "worker_died"),
        ("RuntimeError: DataLoader worker (pid(s) 1, 2) exited unexpectedly", "worker_died"),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Aborted. ", "worker_died"),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that "
         "dataloader's workers are out of shared memory.", "shm"),
        ("RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)", "shm"),
        ("RuntimeError: unable to resize file </torch_1_2>: No space left on device (28)", "shm"),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: Success (0)", "shm"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_1_2'", "shm"),
        ("OSError: [Errno 28] No space left on device: '/data/out.bin'", "script_failed"),
        ("RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open "
         "files (24)", "descriptors"),
        ("RuntimeError: received 0 items of ancdata", "descriptors"),
        ("OSError: [Errno 24] Too many open files", "descriptors"),
        ("OSError: Unable to synchronously open file (unable to open file: name = 'a.h5', errno = 24, error "
         "message = 'Too many open files', flags = 0)", "descriptors"),
        ("lmdb.Error: /data: Too many open files", "descriptors"),
        ("RuntimeError: unable to mmap 24 bytes from file </torch_1_2>: Cannot allocate memory (12)", "ram"),
        ("RuntimeError: unable to open shared memory object </torch_1_2> in read-only mode: No such file or "
         "directory (2)", "script_failed"),
        ("MemoryError", "ram"),
        ("MemoryError: std::bad_alloc", "ram"),
        ("numpy.core._exceptions.MemoryError: Unable to allocate 8.00 GiB for an array", "ram"),
        ("OSError: [Errno 12] Cannot allocate memory", "ram"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "gpu_memory"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "gpu_memory"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 24 GiB total)", "gpu_memory"),
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be reported later", "gpu_memory"),
        ("torch.AcceleratorError: CUDA error: out of memory", "gpu_memory"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", "gpu_memory"),
        ("torch.OutOfMemoryError: XPU out of memory.", "gpu_memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "gpu_memory"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:77, unhandled cuda error\nLast error:\n"
         "Cuda failure 2 'out of memory'", "gpu_memory"),
        ("RuntimeError: DataLoader timed out after 5 seconds", "hang"),
    ],
)  # fmt: skip
def test_errors_of_torch_and_of_the_system(error, reason) -> None:
    cause = said(error)
    assert cause.reason == reason
    assert cause.text.endswith(error.split("\n")[0].strip())
    assert cause.text.startswith("rank 0: ")


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: Bus error in sample 3",
        "ValueError: CUDA out of memory is the name of my data set",
        "KeyError: 'Too many open files'",
        "AssertionError: Cannot allocate memory for the test",
        "RuntimeError: out of cheese",
        "train.Bad: is killed by signal: Killed",
        "subprocess.CalledProcessError: Command 'ffmpeg' died with <Signals.SIGKILL: 9>.",
    ],
)
def test_an_exception_of_the_scripts_own_stays_its_own(error) -> None:
    cause = said(error)
    assert cause.reason == "script_failed"
    assert cause.text == f"rank 0: {error}"


def test_words_in_lines_of_source_and_of_logs_are_no_sign() -> None:
    text = trace("ValueError: bad").replace("step()", "except torch.OutOfMemoryError:  # CUDA out of memory")
    assert cause_of([(0, text)], [], 1, "MemoryError is handled\n", {}).reason == "script_failed"
    assert cause_of([], [], 1, "note: CUDA out of memory is handled\nstep 3\n", {}).reason == "script_failed"


def test_the_cause_of_an_exception_counts() -> None:
    """torch raises "exited unexpectedly" from the error that names the signal."""
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    died = trace("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible")
    gone = trace("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly")
    cause = cause_of([(1, died + chain + gone)], [], 1, "", {})
    assert cause.reason == "shm"
    assert "killed by signal: Bus error" in cause.text
    memory = trace("torch.OutOfMemoryError: CUDA out of memory.")
    assert cause_of([(1, memory + chain + trace("SystemError: 1"))], [], 1, "", {}).reason == "gpu_memory"


def test_what_a_script_lived_with_has_not_ended_it() -> None:
    """It skips bad samples and fails later in its loop."""
    sample = recorded("worker_value")
    cause = cause_of([(0, trace("ZeroDivisionError: division by zero"))], [(0, sample)], 1, "", {})
    assert (cause.reason, cause.text) == ("script_failed", "rank 0: ZeroDivisionError: division by zero")
    killed = cause_of([], [(0, sample)], -9, "", {0: 7})
    assert (killed.reason, killed.text.split(",")[0]) == ("rank_died", "rank 0 was ended by SIGKILL")


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
ECHOES = [
    f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:36428",
    f"{GLOO}pair.cc:537] Read error [127.0.0.1]:4007: Connection reset by peer. This is typically caused by",
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    f"{GLOO}pair.cc:144] no error".replace("[", "Gloo connectFullMesh failed with ["),
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, remote process exited "
    "or there was a network error\nncclRemoteError: A call failed possibly due to a network error",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "torch.distributed.DistStoreError: Socket Timeout",
    "RuntimeError: Broken pipe",
]


@pytest.mark.parametrize("echo", ECHOES)
def test_what_peers_of_a_lost_rank_say_is_not_the_cause(echo) -> None:
    own = (1, trace("ValueError: loss is nan"))
    for errors in ([(0, trace(echo)), own], [own, (0, trace(echo))]):
        assert cause_of(errors, [], 1, "", {}).text == "rank 1: ValueError: loss is nan"
    lost = cause_of([(0, trace(echo))], [], 1, "", {1: 7})
    assert (lost.reason, lost.text.split(";")[0]) == ("rank_died", "rank 1 ended without a word")
    alone = cause_of([(0, trace(echo))], [], 1, "", {})
    assert alone.reason == "script_failed"
    assert alone.text == f"rank 0: {echo.splitlines()[0]}"


def test_a_connection_that_data_comes_over_is_no_echo() -> None:
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    text = trace(error, "/torch/utils/data/_utils/fetch.py")
    later = (0, trace("ValueError: it ended"))
    cause = cause_of([(1, text), later], [(1, text)], 1, "", {0: 9})
    assert (cause.reason, cause.text) == ("loader_failed", f"rank 1: {error}")
    elsewhere = cause_of([(1, trace(error)), later], [], 1, "", {0: 9})
    assert elsewhere.text == "rank 0: ValueError: it ended"


def test_a_rank_that_torchrun_saw_die_is_named_with_its_signal() -> None:
    output = recorded("torchrun_kill")
    pid = pid_of(output, 1)
    cause = cause_of([(0, trace(ECHOES[1]))], [], 1, output, {1: pid, 0: pid_of(output, 0)})
    assert cause.reason == "rank_died"
    assert cause.text.startswith("rank 1 was ended by SIGKILL")
    crashed = cause_of([], [], 1, output.replace("-9", "-11").replace("SIGKILL", "SIGSEGV"), {1: pid})
    assert crashed.text == "rank 1 was ended by SIGSEGV"


def test_the_error_that_torchrun_shows_counts_where_no_rank_told_its_own() -> None:
    cause = cause_of([], [], 1, recorded("torchrun_raise"), {})
    assert (cause.reason, cause.text) == ("script_failed", "ValueError: loss is nan")
    assert cause.stack.startswith("Traceback")
    assert "[rank1]" not in cause.stack
    assert "ChildFailedError" not in cause.stack


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spawn_kill", "rank 1 was ended by SIGKILL"),
        ("spawn_exit3", "rank 1 ended with exit code 3 and without a word"),
        ("spawn_raise", "ValueError: loss is nan"),
        ("processes_raise", "ValueError: loss is nan"),
    ],
)
def test_processes_of_multiprocessing_tell_it_in_the_output_only(name, text) -> None:
    cause = cause_of([], [], 1, recorded(name), {1: 77, 0: 78})
    assert cause.text.startswith(text)
    assert cause.reason == ("script_failed" if "ValueError" in text else "rank_died")


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        (-9, "rank_died", "rank 0 was ended by SIGKILL"),
        (137, "rank_died", "rank 0 was ended by SIGKILL"),
        (-15, "rank_died", "rank 0 was ended by SIGTERM"),
        (134, "rank_died", "rank 0 was ended by SIGABRT"),
        (3, "rank_died", "rank 0 ended without a word; of the command there is exit code 3"),
        (None, "rank_died", "rank 0 ended without a word; of the command there is no exit code"),
    ],
)
def test_a_rank_that_ended_without_a_word(code, reason, text) -> None:
    cause = cause_of([], [], code, "step 1\nstep 2\n", {0: 7})
    assert cause.reason == reason
    assert cause.text.startswith(text)
    assert cause.stack == "step 1\nstep 2"


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        (-11, "rank_died", "the command was ended by SIGSEGV"),
        (139, "rank_died", "the command was ended by SIGSEGV"),
        (135, "rank_died", "the command was ended by SIGBUS"),
        (1, "script_failed", "exit code 1: no such file"),
        (130, "script_failed", "SIGINT: no such file"),
        (None, "script_failed", "no exit code: no such file"),
    ],
)
def test_an_end_that_nobody_explains(code, reason, text) -> None:
    cause = cause_of([], [], code, "reading\nno such file\n\n", {})
    assert (cause.reason, cause.text, cause.stack) == (reason, text, "reading\nno such file")


def test_ranks_under_nccl() -> None:
    """Recorded with torch 2.11 on two GPUs: peers of a lost rank say nothing at all."""
    killed = recorded("nccl_kill")
    cause = cause_of([], [], 1, killed, {1: pid_of(killed, 1), 0: pid_of(killed, 0)})
    assert cause.text.startswith("rank 1 was ended by SIGKILL")
    full = cause_of([], [], 1, recorded("nccl_oom"), {})
    assert full.reason == "gpu_memory"
    assert full.text.startswith("the GPU's memory is full: torch.OutOfMemoryError: CUDA out of memory. Tried")
    hang = cause_of([], [], 1, recorded("nccl_hang"), {0: 962})
    assert (hang.reason, hang.text) == ("hang", "rank 0: not all ranks took part in ALLREDUCE in time")


def test_memory_that_cannot_be_page_locked_is_the_machines() -> None:
    error = "torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"
    original = trace(error, "/torch/utils/data/_utils/pin_memory.py")
    caught = "torch.AcceleratorError: Caught AcceleratorError in pin memory thread for device 0."
    pinning = said(f"{caught}\nOriginal {original}")
    assert (pinning.reason, said(error).reason) == ("ram", "gpu_memory")
    assert pinning.text.endswith("can be page-locked: torch.AcceleratorError: CUDA error: out of memory")


def test_the_watchdog_of_nccl_means_that_not_all_ranks_took_part() -> None:
    """Public reports of torch 2.1 to 2.6 read so; the process aborts itself after it."""
    output = (
        "[rank3]:[E1129 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, "
        "Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.\nterminate called\n"
    )
    cause = cause_of([], [], -6, output, {3: 9})
    assert (cause.reason, cause.text) == ("hang", "rank 3: not all ranks took part in BROADCAST in time")
    killed = cause_of([], [], -9, output, {3: 9})
    assert killed.reason == "rank_died"


def test_exit_codes_of_launchers() -> None:
    output = recorded("torchrun_exit3")
    assert exit_codes(output) == ({pid_of(output, 0): -15, pid_of(output, 1): 3}, {})
    old = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1236)\n  error_file: <N/A>\n"  # torch 2.6
    assert exit_codes(old) == ({1236: -9}, {})
    assert exit_codes(recorded("spawn_exit3")) == ({}, {1: 3})
    assert exit_codes("") == ({}, {})
    assert exit_codes("process 1 terminated with signal SIGNOTHING") == ({}, {1: 0})


def test_exit_codes_in_words() -> None:
    assert [ended_by(code) for code in (None, 0, 1, 3, 126, 127, 255)] == [
        "no exit code", "exit code 0", "exit code 1", "exit code 3", "exit code 126", "exit code 127",
        "exit code 255",
    ]  # fmt: skip
    for number in signal.Signals:
        assert ended_by(-number) == ended_by(128 + number) == number.name


def test_a_tail_of_output_is_shown_clean() -> None:
    assert shown_output("") == ""
    assert shown_output("\n\n \n") == ""
    assert shown_output("\x1b[32mepoch 1\x1b[0m\n 1%|\r 2%|#\n") == "epoch 1\n 2%|#"
    assert shown_output("\x00\x01a\x7f\ufffd\x1b") == "a\ufffd"
    assert len(shown_output("y" * 100_000)) == 500
    assert shown_output("\n".join(f"line {i}" for i in range(99))).splitlines()[0] == "line 84"
    long = (
        "Traceback (most recent call last):\n" + '  File "a.py", line 1, in f\n' * 500 + "ValueError: bad\n"
    )
    assert len(shown_output(long).splitlines()) == 40
    assert shown_output(long).endswith("ValueError: bad")


def test_of_several_tracebacks_the_one_that_tells_is_shown() -> None:
    assert shown_output(recorded("torchrun_raise")).endswith("ValueError: loss is nan")
    assert "Connection reset by peer" in shown_output(recorded("torchrun_kill")).splitlines()[-1]
    assert shown_output(recorded("spawn_kill")).endswith("process 1 terminated with signal SIGKILL")
    peer = re.sub("RuntimeError: .*", "KeyError: 'loss'", recorded("torchrun_raise"))
    assert shown_output(peer).endswith("ValueError: loss is nan")  # which torchrun ended the other for
    handled, last = trace("ValueError: handled"), trace("ValueError: the end")
    assert shown_output(f"{handled}\nwent on\n{last}").endswith("ValueError: the end")
