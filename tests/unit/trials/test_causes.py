"""Why a block, a start or a whole command did not do what it should."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from feedtune.inside.signs import BATCHES_WITHOUT_OPTIMIZER
from feedtune.launch.boot import BootFolder
from feedtune.trials import causes
from feedtune.trials.causes import diverged, ended, failure, how_far, hung, kept_out, output_of
from feedtune.trials.server import StartState

TRAIN = "/project/train.py"
TORCH = "/venv/lib/python3.11/site-packages/torch"
GLOO = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47801"
REPORT = "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: {2})  \n  error_file: <N/A>\n"


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "{TRAIN}", line 3, in main\n    step()\n{error}\n'


class Said(StartState):
    """What two ranks with the pids 10 and 11 have said in block 5."""

    def __init__(self, ranks: int = 2) -> None:
        super().__init__()
        self.hellos = {rank: {"rank": rank, "pid": 10 + rank} for rank in range(ranks)}

    def end(self, rank: int, total: int = 100, partial: bool = True) -> Said:
        self.results[5, rank] = {"total": total, "partial": partial}
        return self

    def lose(self, *ranks: int) -> Said:
        self.lost += [10 + rank for rank in ranks]
        return self

    def raise_(self, rank: int, error: str) -> Said:
        self.uncaught.append({"rank": rank, "text": trace(error)})
        return self


def test_ranks_with_unequal_numbers_of_batches() -> None:
    """As gloo has it: the one that is left loses its peer, and says so."""
    state = Said().end(0, 125).lose(0).raise_(1, GLOO).end(1, 126).lose(1)
    cause = ended(state, 5, 1, "")
    assert cause.reason == "ranks_diverged"
    assert cause.text.startswith("rank 0 ended its training after 125 steps, while rank 1 went on")


def test_the_rank_that_ended_first_is_named() -> None:
    state = Said(3).end(2, 90).end(0, 80).lose(0, 2).raise_(1, GLOO)
    assert diverged(state, 5, "").text.startswith("rank 0 ended its training after 80 steps, while rank 1")


def test_the_exit_code_of_a_rank_that_left_its_loop_is_told() -> None:
    state = Said().end(1, 40).lose(1).raise_(0, GLOO)
    report = REPORT.format(0, -15, 10) + REPORT.format(1, 3, 11)
    assert (
        "rank 1 ended its training after 40 steps with exit code 3, while" in ended(state, 5, 1, report).text
    )
    # gloo's own end of a process whose peers still talk to it is no wrong-doing of the script's.
    aborted = ended(state, 5, 1, REPORT.format(1, -6, 11))
    assert "rank 1 ended its training after 40 steps, while" in aborted.text
    spawned = ended(state, 5, 1, "ProcessExitedException: process 1 terminated with exit code 4")
    assert "with exit code 4" in spawned.text


@pytest.mark.parametrize(
    "state",
    [
        Said().lose(0, 1),
        Said().end(0).end(1).lose(0, 1),
        Said().end(0, partial=False).lose(1),  # rank 0 is at its next block
        Said(1).end(0).lose(0),
        Said(0),
    ],
)
def test_no_divergence(state) -> None:
    assert diverged(state, 5, "") is None
    assert diverged(state, 6, "") is None


def test_a_rank_that_evaluates_has_left_its_loop_too() -> None:
    state = Said().end(1).lose(1)
    state.doing[0] = "eval"
    assert diverged(state, 5, "") is None
    assert diverged(state.lose(0), 5, "").reason == "ranks_diverged"  # it died in it; its launcher tells more


def test_a_rank_that_is_lost_first_is_the_cause_whatever_others_make_of_it() -> None:
    """torchrun ends rank 0 by SIGTERM, and its handler leaves the loop in order."""
    state = Said().lose(1).end(0).lose(0)
    cause = ended(state, 5, 1, REPORT.format(1, -9, 11))
    assert cause.reason == "rank_died"
    assert cause.text.startswith("rank 1 was ended by SIGKILL")


def test_an_error_of_a_ranks_own_is_no_divergence() -> None:
    state = Said().end(0).lose(0).raise_(1, "ValueError: loss is nan").end(1).lose(1)
    cause = ended(state, 5, 1, "")
    assert (cause.reason, cause.text) == ("script_failed", "rank 1: ValueError: loss is nan")


def test_a_script_that_ended_well_has_ended() -> None:
    assert ended(Said().lose(0, 1), 5, 0, "").reason == "script_ended"
    assert ended(Said().end(0).end(1).lose(0, 1), 5, 0, "").reason == "script_ended"


def test_an_error_of_the_loader_counts_in_its_block_alone() -> None:
    state = Said(1).lose(0)
    state.errors[5] = [{"rank": 0, "text": trace("OSError: bad sample")}]
    assert ended(state, 5, 1, "").reason == "loader_failed"
    assert ended(state, 6, 1, "").reason == "rank_died"


def test_a_pid_of_somebody_else_is_no_rank() -> None:
    state = Said(1)
    state.lost = [4711]
    assert ended(state, 5, 1, "no such file\n").reason == "script_failed"


MAIN = (("main", TRAIN, 5),)
WAITS = (("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 9), *MAIN)
RANKS = (("_engine_run_backward", f"{TORCH}/autograd/graph.py", 9), *MAIN)
WORKER = (("_worker_loop", f"{TORCH}/utils/data/_utils/worker.py", 9), *MAIN)


def test_workers_of_ranks_that_wait_for_a_batch_are_read(monkeypatch, tmp_path) -> None:
    """A fork server's children are the workers."""
    below = {11: [21, 22], 22: [31], 10: [20]}
    stacks = {10: RANKS, 11: WAITS, 31: (("load", "/project/data.py", 7), *WORKER)}
    asked = []

    def read_stack(pid, folder):
        asked.append(pid)
        assert folder == tmp_path
        return stacks.get(pid)

    monkeypatch.setattr(causes, "read_stack", read_stack)
    monkeypatch.setattr(causes, "children", lambda pid: below.get(pid, []))
    cause = hung(Said(), tmp_path, "")
    assert cause.text == "a worker of rank 1 hangs in load (/project/data.py:7)"
    assert sorted(asked) == [10, 11, 21, 22, 31]


def test_a_batch_that_could_not_be_sent_counts_where_nobody_hangs(monkeypatch, tmp_path) -> None:
    text = trace(
        "RuntimeError: unable to open shared memory object </torch_1> in read-write mode: Too many open files"
    )
    output = text.replace(TRAIN, "/usr/lib/python3.11/multiprocessing/queues.py")
    monkeypatch.setattr(causes, "children", lambda _: [])
    monkeypatch.setattr(causes, "read_stack", lambda *_: WAITS)
    cause = hung(Said(1), tmp_path, output)
    assert cause.reason == "descriptors"
    assert cause.text.startswith(
        "a worker could not send its batch: too many open files: RuntimeError: unable"
    )
    assert "queues.py" in cause.stack
    assert "rank 0, process 10" in cause.stack
    assert hung(Said(1), tmp_path, text).text == "rank 0 waits for its workers"  # not a worker's
    monkeypatch.setattr(causes, "read_stack", lambda *_: MAIN)
    assert hung(Said(1), tmp_path, output).text == f"rank 0 hangs in its loop, in main ({TRAIN}:5)"


def test_the_end_of_an_output(tmp_path) -> None:
    log = tmp_path / "command.log"
    assert output_of(log) == ""
    log.write_bytes(b"x" * 30_000 + b"\xff\xfeend")
    assert output_of(log) == "x" * 19_995 + "\ufffd\ufffdend"
    assert output_of(log, 30_002) == "end"
    assert output_of(log, 99_999) == ""


@pytest.fixture
def boot(tmp_path) -> BootFolder:
    folder = BootFolder(tmp_path / "boot", "ab12", {})
    folder.set_start(1)
    return folder


def sign(boot: BootFolder, *names: str, text: str = "") -> None:
    for name in names:
        Path(boot.path, "seen", name).write_text(text)


def test_how_far_a_command_came(boot) -> None:
    def so_far(*signs: str, chosen: str | None = None) -> str:
        sign(boot, *signs)
        return how_far(boot, ["python", "train.py"], chosen)

    assert "no Python process was seen" in so_far()
    cure = "; feedtune sees trainings whose batches come from a torch.utils.data.DataLoader: take yours from"
    assert f"never imported torch.utils.data{cure}" in so_far("python")
    assert f"never made a torch DataLoader{cure}" in so_far("torch")
    assert "never iterated" in so_far("loader")
    assert "no optimizer of torch stepped" in so_far("iterated")
    assert f"after {BATCHES_WITHOUT_OPTIMIZER} batches" in so_far("iterated")
    assert "two optimizer steps" in so_far("stepped")
    sign(boot, "loaders", text="/a/train.py:3\n/a/train.py:9\n/a/train.py:3\n")
    assert so_far(chosen="x.py:1") == (
        "no DataLoader made at x.py:1 trained; its loaders were made at: /a/train.py:3, /a/train.py:9"
    )
    sign(boot, "error", text="OSError('gone')\n")
    assert "start-up code failed in its interpreter: OSError('gone')" in so_far()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.11 -E train.py", "-E"),
        ("python3 -u -sE train.py", "-sE"),
        ("python -S train.py", "-S"),
        ("env A=1 python -W ignore -I train.py", None),  # -W takes a word: told less, never wrongly
        ("torchrun --nproc_per_node=2 train.py -E 5", None),
        ("python train.py -I", None),
        ("python -m package -E", None),
        ("python -c pass -S", None),
        ("docker run image python -I train.py", "-I"),
        ("python -Xdev train.py", None),
        ("python --Ignore train.py", None),
        ("python - -I", None),
        ("./train.sh -E", None),
    ],
)
def test_an_option_of_python_that_keeps_us_out(boot, command, option) -> None:
    for words in (command.split(), ["bash", "-c", command]):
        found = how_far(boot, words, None)
        if option is None:
            assert "no Python process was seen" in found
        else:
            assert found.startswith(f"Python was started with {option}, which keeps PYTHONPATH out")


@pytest.mark.parametrize(
    ("code", "steps", "said"),
    [
        (
            2,
            0,
            "the command failed (exit code 2) before a training step was recorded; its own output says why",
        ),
        (1, 1200, "the command failed (exit code 1) after 1,200 recorded steps; its own output says why"),
        (143, 0, "the command was ended by SIGTERM before a training step was recorded"),
        (137, 30, "the command was ended by SIGKILL after 30 recorded steps"),
    ],
)
def test_how_a_command_that_was_let_run_has_failed(code: int, steps: int, said: str) -> None:
    assert failure(code, steps) == said


def test_of_a_command_that_failed_only_what_is_ours_is_told_too(boot) -> None:
    assert "no Python process was seen" in kept_out(boot, ["sh"])
    sign(boot, "python")
    assert kept_out(boot, ["python", "train.py"]) is None
    sign(boot, "error", text="OSError('gone')\n")
    assert "start-up code failed" in kept_out(boot, ["python", "train.py"])


def test_a_command_line_that_is_strange(boot) -> None:
    assert how_far(boot, [], None)
    assert how_far(boot, ["", "-", os.sep], None)
