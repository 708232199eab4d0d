"""``feedtune run`` and ``feedtune apply``: the training is the user's real one, and stays as it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import jsonschema
import pytest
from applying import SCHEMAS, identity_of, script, tuned
from tuning import BIN, FEEDTUNE, SCRIPTS, environment, feedtune, result_of, wait_until_gone

RECEIVED = SCRIPTS / "received.py"
SIGNALLED = SCRIPTS / "signalled.py"
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", RECEIVED, "distributed"]
NOT_FOUND = "no DataLoader like the tuned one"


def received(logs: Path, rank: int = 0) -> dict[str, dict]:
    lines = (logs / f"received.rank{rank}").read_text().splitlines()
    return {line["kind"]: line for line in map(json.loads, lines)}


class Training:
    """Bare, watched and applied starts of one script, each in a folder of its own."""

    def __init__(self, base: Path, command: list) -> None:
        self.base = base
        self.command = command
        self.done: dict[str, subprocess.CompletedProcess[str]] = {}

    def place(self, name: str) -> Path:
        folder = self.base / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, name: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command behind some words, and keep what came of it."""
        folder = self.place(name)
        self.done[name] = subprocess.run(
            [str(word) for word in (*words, *self.command)],
            cwd=folder,
            env=environment(LOGS=str(folder), OMP_NUM_THREADS="1", **env),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return self.done[name]

    @property
    def run(self) -> Path:
        """The run folder of the watched start."""
        return self.base / "watched.run"


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Training:
    kinds = ["map", "generator", "iterable"]
    training = Training(tmp_path_factory.mktemp("single"), [sys.executable, RECEIVED, *kinds])
    training.start("bare", WORKERS="2")
    training.start("watched", *FEEDTUNE, "run", "--out", training.run, "--", WORKERS="2")
    return training


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Training:
    training = Training(tmp_path_factory.mktemp("two"), TORCHRUN)
    training.start("watched", *FEEDTUNE, "run", "--out", training.run, "--")
    return training


def test_run_leaves_what_the_loop_receives(single: Training) -> None:
    assert received(single.place("watched")) == received(single.place("bare"))
    assert received(single.place("watched"))["map"]["iterator"] == "_MultiProcessingDataLoaderIter"


def test_run_reports_on_stderr_and_leaves_stdout_and_saves(single: Training) -> None:
    done, document = single.done["watched"], result_of(single.run)
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.run-1.json").read_text()))
    (training,) = document["trainings"]
    assert done.stdout == f"pid {training['ranks'][0]['pid']}\n"
    assert "rank 0" in done.stderr
    assert document["reading"].split()[0] in done.stderr
    assert training["job"]["steps"] == 22 + 22 + 24  # two epochs of each; workers split the stream unevenly
    assert training["job"]["first"]["count"] == 6
    assert (
        training["job"]["excluded"]["save"]["count"] == 4
    )  # the last one of a kind ends nothing or restarts
    saved = {path.name for path in single.place("watched").glob("*.pt")}
    assert saved == {"map.0.pt", "generator.0.pt", "iterable.0.pt"}
    assert {path.name for path in single.run.iterdir()} == {
        "result.json", "run.json", "rank0.json", "steps.rank0.jsonl", "workers.rank0.jsonl", "readings.jsonl",
    }  # fmt: skip
    assert {stat.S_IMODE(path.stat().st_mode) for path in single.run.iterdir()} == {0o600}


def test_apply_gives_the_same_batches_with_other_settings(single: Training, tmp_path: Path) -> None:
    """Map-style data: the same indices in order, and no generator is moved on."""
    run = tuned(tmp_path / "run", identity_of(single.run), num_workers=3)
    done = single.start("applied", *FEEDTUNE, "apply", run, "--")
    bare, got = received(single.place("bare")), received(single.place("applied"))
    for kind in ("map", "generator"):
        assert got[kind]["workers"] == 3
        assert {**got[kind], "workers": 2} == bare[kind]
    assert got["iterable"]["workers"] == 0  # another loader, at the same line
    assert done.stderr.count("feedtune apply: num_workers=3") == 1
    assert "(was num_workers=0" in done.stderr
    assert NOT_FOUND not in done.stderr
    assert (single.place("applied") / "map.0.pt").exists()


def test_run_follows_two_ranks(two_ranks: Training) -> None:
    (training,) = result_of(two_ranks.run)["trainings"]
    assert training["world_size"] == 2
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert all(rank["steps"] == 12 for rank in (*training["ranks"], training["job"]))
    assert {rank["ddp"]["hook"] for rank in training["ranks"]} == {"gradients"}
    assert training["job"]["budget"]["parts"]["communication_s"] > 0
    assert "straggle: what the last" in " ".join(two_ranks.done["watched"].stderr.split())


def test_apply_reaches_two_ranks_and_says_so_once(two_ranks: Training, tmp_path: Path) -> None:
    run = tuned(tmp_path / "run", identity_of(two_ranks.run))
    done = two_ranks.start("applied", *FEEDTUNE, "apply", run, "--")
    for rank in (0, 1):
        got, watched = (received(two_ranks.place(name), rank) for name in ("applied", "watched"))
        assert got["distributed"]["workers"] == 2
        assert got["distributed"]["iterator"] == "_MultiProcessingDataLoaderIter"
        for same in ("hash", "states"):
            assert got["distributed"][same] == watched["distributed"][same]
        assert (two_ranks.place("applied") / f"distributed.{rank}.pt").exists()
    assert done.stderr.count("feedtune apply:") == 1


@pytest.mark.slow
def test_run_leaves_what_two_ranks_receive(two_ranks: Training) -> None:
    two_ranks.start("bare")
    for rank in (0, 1):
        watched, bare = (received(two_ranks.place(name), rank) for name in ("watched", "bare"))
        assert watched == bare


@pytest.mark.slow
def test_apply_gives_an_iterable_the_same_batches_at_its_own_worker_count(tmp_path: Path) -> None:
    training = Training(tmp_path, [sys.executable, RECEIVED, "iterable"])
    training.start("bare", WORKERS="2")
    training.start("watched", *FEEDTUNE, "run", "--out", training.run, "--", WORKERS="2")
    run = tuned(tmp_path / "run", identity_of(training.run), prefetch_factor=4)
    done = training.start("applied", *FEEDTUNE, "apply", run, "--", WORKERS="2")
    assert "set on the DataLoader" in done.stderr
    assert received(training.place("applied")) == received(training.place("bare"))


@pytest.fixture(scope="module")
def some_run(tmp_path_factory) -> Path:
    """Settings for a loader that nothing here makes."""
    identity = {"frames": [["/a/train.py", 3]], "dataset": "Photos", "sampler": "S", "batch_size": 8}
    return tuned(tmp_path_factory.mktemp("some") / "run", identity)


@pytest.fixture(params=["run", "apply"])
def mode(request, some_run: Path, tmp_path: Path) -> list[str]:
    """The words in front of a command."""
    if request.param == "run":
        return [*FEEDTUNE, "run", "--out", str(tmp_path / "watched"), "--"]
    return [*FEEDTUNE, "apply", str(some_run), "--"]


def started(words: list, **env: str) -> tuple[subprocess.Popen[str], int]:
    """A command that has said its PID."""
    process = subprocess.Popen(
        [str(word) for word in words],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def as_shells_say(code: int) -> int:
    return 128 - code if code < 0 else code


@pytest.mark.parametrize(
    ("sent", "catches"),
    [("SIGTERM", ()), ("SIGTERM", ("SIGTERM",)), ("SIGUSR1", ("SIGUSR1",)), ("SIGINT", ("SIGINT",))],
)
def test_signals_reach_the_command_once_and_its_end_is_ours(mode: list[str], sent: str, catches) -> None:
    command = [sys.executable, SIGNALLED, *catches]
    ends = []
    for words in (command, [*mode, *command]):
        process, _ = started(words, EXIT="7")
        process.send_signal(getattr(signal, sent))
        out, err = process.communicate(timeout=30)
        assert "Traceback" not in err
        ends.append((as_shells_say(process.returncode), out))
    assert ends[0] == ends[1]
    assert ends[0] == ((7, f"{sent}\n") if catches else (143, ""))


def test_a_run_has_its_result_whatever_signals_come_after_its_commands_end(tmp_path: Path) -> None:
    process, pid = started([*FEEDTUNE, "run", "--out", tmp_path / "run", "--", sys.executable, SIGNALLED])
    process.send_signal(signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)
    later = cycle([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    while process.poll() is None:
        process.send_signal(next(later))
        time.sleep(0.0005)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    document = result_of(tmp_path / "run")
    assert document["exit_code"] == 128 + signal.SIGTERM
    assert document["note"] == "the command was ended by SIGTERM before a training step was recorded"
    assert document["note"] in errors
    assert not wait_until_gone(str(tmp_path / "run"))


def test_apply_is_the_same_process(some_run: Path) -> None:
    process, pid = started([*FEEDTUNE, "apply", some_run, "--", sys.executable, SIGNALLED, "SIGUSR1"])
    assert pid == process.pid
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


IN_A_TERMINAL = """
import os, sys
from feedtune.launch.foreground import Foreground

forwarded, kill = [], os.kill
os.kill = lambda *words: (forwarded.append(words), kill(*words))
with Foreground() as foreground:
    code = foreground.run(sys.argv[1:], os.environ)
print("forwarded", forwarded)
sys.exit(code)
"""


def test_ctrl_c_in_a_terminal_is_not_handed_on(tmp_path: Path) -> None:
    """The terminal signals the whole foreground group: the command has it already."""
    (tmp_path / "foreground.py").write_text(IN_A_TERMINAL)
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    words = [sys.executable, str(tmp_path / "foreground.py"), sys.executable, str(SIGNALLED), "SIGINT"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=environment(EXIT="7"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout.readline()
        process.stdin.write(b"\x03")
        process.stdin.flush()
        said += b"".join(process.stdout)
    assert process.returncode == 7, said
    assert said.count(b"SIGINT") == 1
    assert b"forwarded []" in said


def test_sigkill_of_feedtune_lets_the_training_go_on(tmp_path: Path) -> None:
    words = [*FEEDTUNE, "run", "--out", tmp_path / "run", "--", sys.executable, SIGNALLED, "SIGUSR2"]
    process, pid = started(words)
    process.kill()
    process.wait()
    os.kill(pid, signal.SIGUSR2)
    assert process.stdout is not None
    assert process.stdout.read() == "SIGUSR2\n"
    process.communicate()
    assert not wait_until_gone(str(tmp_path / "run"))


def test_standard_input_is_the_commands(mode: list[str]) -> None:
    done = subprocess.run([*mode, "cat"], input="given", capture_output=True, text=True, check=True)
    assert done.stdout == "given"


def test_a_pipe_that_closes_ends_the_command_as_it_always_does(mode: list[str]) -> None:
    """Python ignores SIGPIPE, and a command would inherit that."""
    bare = subprocess.run(["sh", "-c", "kill -PIPE $$"], check=False).returncode
    done = subprocess.run([*mode, "sh", "-c", "kill -PIPE $$"], capture_output=True, check=False)
    assert as_shells_say(done.returncode) == as_shells_say(bare) == 128 + signal.SIGPIPE


def test_the_scripts_own_sitecustomize_is_run(mode: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins\nbuiltins.MINE = 'mine'\n")
    done = subprocess.run(
        [*mode, sys.executable, "-c", "import sys; print(MINE, any('_feedtune' in m for m in sys.modules))"],
        env=environment(PYTHONPATH=str(tmp_path / "mine")),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "mine True\n"


OTHER_LOADERS = """
    import torch
    from torch.utils.data import DataLoader

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 0:
                DataLoader([1, 2])
            return index

    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    if __name__ == "__main__":
        assert len(list(loader)) == 2
"""


def test_a_loader_that_does_not_come_is_told_once(some_run: Path, tmp_path: Path) -> None:
    """Not by spawned workers, which make the script's loaders again, nor by what is made inside them."""
    path = script(tmp_path, OTHER_LOADERS)
    done = feedtune("apply", some_run, "--", sys.executable, path, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("feedtune apply:") == 1
    assert f"{NOT_FOUND} (/a/train.py:3, dataset Photos, batch size 8) was made" in done.stderr


@pytest.mark.parametrize("trains", [True, False])
def test_a_training_without_any_loader_is_told(trains: bool, some_run: Path, tmp_path: Path) -> None:
    made = "torch.optim.SGD([torch.zeros(1, requires_grad=True)])" if trains else "None"
    path = script(tmp_path, f"import torch\nstepped = {made}\n")
    done = feedtune("apply", some_run, "--", sys.executable, path, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOT_FOUND) == done.stderr.count("feedtune apply:") == int(trains)


@pytest.mark.slow
def test_what_an_applied_training_starts_says_nothing_more(tmp_path: Path) -> None:
    text = """
    import subprocess, sys
    from torch.utils.data import DataLoader

    loader = DataLoader([1, 2, 3], batch_size=3)
    helper = "from torch.utils.data import DataLoader; DataLoader([1])"
    subprocess.run([sys.executable, "-c", helper], check=True)
    print(loader.num_workers)
    """
    path = script(tmp_path, text)
    identity = {
        "frames": [[str(path), 5]], "dataset": "list", "sampler": "BatchSampler(SequentialSampler)",
        "batch_size": 3,
    }  # fmt: skip
    run = tuned(tmp_path / "run", identity)
    done = feedtune("apply", run, "--", sys.executable, path, cwd=tmp_path)
    assert done.stdout == "2\n", done.stderr
    assert done.stderr.count("feedtune apply:") == 1


def test_a_command_that_makes_no_loader_is_told_nothing(some_run: Path, tmp_path: Path) -> None:
    done = feedtune("apply", some_run, "--", sys.executable, "-c", "print(1)", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_run_folder_that_cannot_be_used(some_run: Path, tmp_path: Path) -> None:
    for name, code, says in (
        ("a:b", 2, "would split PYTHONPATH"),
        ("full", 3, "cannot write to the run folder"),
    ):
        shutil.copytree(some_run, tmp_path / name, ignore=shutil.ignore_patterns("apply"))
        (tmp_path / name / "apply").touch()  # where its start-up folder would lie
        done = feedtune("apply", tmp_path / name, "--", "true", cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert says in done.stderr


@pytest.mark.parametrize("missing", ["best", "loader", "gain"])
def test_a_result_that_is_not_whole(missing: str, some_run: Path, tmp_path: Path) -> None:
    document = result_of(some_run)
    del document[missing]
    (tmp_path / "result.json").write_text(json.dumps(document))
    done = feedtune("apply", tmp_path / "result.json", "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert f"is not whole: it lacks {missing}" in done.stderr


def test_without_a_gain_the_users_own_settings_are_applied_and_that_is_said(
    some_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(some_run, tmp_path / "run")
    document = result_of(some_run)
    changed = {**document, "outcome": "no_gain", "gain": None}
    (tmp_path / "run" / "result.json").write_text(json.dumps(changed))
    for words in (["--", "true"], ["--print"]):
        done = feedtune("apply", tmp_path / "run", *words, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr.splitlines() == [
            "feedtune apply: the tuning found no gain (no_gain); these are your own settings: num_workers=2, "
            "prefetch_factor=2, pin_memory=False"
        ]


def test_print_says_what_to_paste_and_starts_nothing(some_run: Path, tmp_path: Path) -> None:
    done = feedtune("apply", some_run, "--print", cwd=tmp_path)
    assert done.returncode == 0
    assert "DataLoader(..., num_workers=2, prefetch_factor=2, pin_memory=False)" in done.stdout
    assert "TrainingArguments(..., dataloader_num_workers=2, dataloader_prefetch_factor=2, " in done.stdout
    assert f"feedtune apply {some_run} -- python train.py" in done.stdout
    given = feedtune("apply", some_run, "--print", "--", "torchrun", "a b.py", cwd=tmp_path)
    assert f"feedtune apply {some_run} -- torchrun 'a b.py'" in given.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["apply", "RUN"], "no command to start"),
        (["apply", "nowhere", "--", "true"], "nowhere: no such run folder"),
        (["apply", ".", "--", "true"], "holds no result.json"),
        (["apply", "RUN", "--", "no-such-program"], "no-such-program"),
        (["apply", "RUN", "true"], "behind --"),
        (["run"], "no command to start"),
        (["run", "--", "no-such-program"], "no-such-program"),
        (["run", "true"], "behind --"),
        (["run", "python", "-c", "print(1)"], "behind --"),
        (["run", "python", "--", "train.py"], "behind --"),
        (["tune", "python", "-c", "print(1)"], "behind --"),
        (["run", "--", ""], "the command's first word is empty"),
        (["run", "--", "python a.py | tee log"], "bash -c 'python a.py | tee log'"),
        (["run", "--out", "a:b", "--", "true"], "PYTHONPATH"),
        (["run", "--steps", "0", "--", "true"], "--steps"),
    ],
)
def test_wrong_use(words: list[str], says: str, some_run: Path, tmp_path: Path) -> None:
    done = feedtune(*(some_run if w == "RUN" else w for w in words), cwd=tmp_path, XDG_STATE_HOME="/dev/null")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_json_is_one_document_and_the_commands_output_is_kept(tmp_path: Path) -> None:
    words = ["--", "sh", "-c", "echo to stdout; echo to stderr >&2; exit 7"]
    done = feedtune("run", "--json", "--out", tmp_path / "run", *words, cwd=tmp_path)
    assert done.returncode == 7
    document = json.loads(done.stdout)
    jsonschema.validate(document, json.loads((SCHEMAS / "feedtune.run-1.json").read_text()))
    assert document == result_of(tmp_path / "run")
    assert document["exit_code"] == 7
    assert document["trainings"] == []
    assert document["note"].startswith(
        "the command failed (exit code 7) before a training step was recorded; its own"
    )
    assert "no Python process was seen" in document["note"]
    assert (tmp_path / "run" / "command.log").read_text() == "to stdout\n"
    assert "to stderr" in done.stderr
    shown = feedtune("report", tmp_path / "run", cwd=tmp_path)
    assert document["note"] in shown.stdout
