"""However a tuning ends, nothing runs on, nothing is left, and the user's folder is as it was."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest
from tuning import BIN, FEEDTUNE, SCRIPTS, Footprint, environment, feedtune, folder_hash, result_of

import feedtune as package

SCHEMA = json.loads((Path(package.__file__).parent / "docs/schemas/feedtune.tune-1.json").read_text())
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "ends.py"]
QUICK = ["--max-workers", "2", "--block-seconds", "0.2"]
# The script's own settings against themselves: baseline, ceiling, one candidate, eight confirmations.
FIXED = ["--set=num_workers=2", "--set=prefetch_factor=2", "--set=pin_memory=false"]


def answer_signals() -> None:
    """As in a terminal: tests in the background of a shell are started with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Project:
    """A user's project: a script, an older checkpoint, a folder where traces are really written."""

    def __init__(self, folder: Path) -> None:
        self.work, self.traces, self.run = folder / "work", folder / "traces", folder / "run"
        self.work.mkdir()
        self.traces.mkdir()
        (self.work / "ends.py").write_text((SCRIPTS / "ends.py").read_text())
        (self.work / "last.pt").write_text("an older checkpoint")
        self.footprint = Footprint(folder)
        self.before = folder_hash(self.work)
        usual = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": ""}
        self.env = {"TRACES": str(self.traces), **usual, **self.footprint.env}

    def words(self, *options: str, command: list[str]) -> list[str]:
        folders = ["--out", str(self.run), "--writable", str(self.traces)]
        return ["tune", *folders, *QUICK, *options, "--", *command]

    def start(self, **env: str) -> subprocess.Popen[str]:
        """A tuning of two ranks in sessions of their own."""
        return subprocess.Popen(
            [*FEEDTUNE, *self.words(*FIXED, command=TORCHRUN)],
            cwd=self.work,
            env=environment(**self.env, **env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=answer_signals,
        )

    def assert_untouched(self, but: str = "nothing", traces: Collection[str] = ()) -> None:
        assert [left for left in self.footprint.wait() if not left.startswith(but)] == []
        assert folder_hash(self.work) == self.before
        assert not (self.run / "boot").exists(), "the start-up folder holds the token"
        assert {trace.name for trace in self.traces.iterdir()} == set(traces)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


SHELL = (
    'trap "touch $TRACES/at_exit" EXIT; '
    "({torchrun}; touch $TRACES/then) && touch $TRACES/and; touch $TRACES/last"
)
COMMANDS = {
    "shell": ["bash", "-c", SHELL.format(torchrun=" ".join(TORCHRUN))],
    # Code after mp.spawn, and a program that runs such a training as its child and goes on.
    "spawn": [sys.executable, "ends.py", "around"],
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "step_s", ["0.1", pytest.param("0", marks=pytest.mark.slow)], ids=["slow steps", "fast steps"]
)
@pytest.mark.parametrize(
    "command",
    [COMMANDS["shell"], pytest.param(COMMANDS["spawn"], marks=pytest.mark.slow)],
    ids=["shell", "spawn"],
)
def test_nothing_after_the_training_is_ever_reached(
    project: Project, command: list[str], step_s: str
) -> None:
    done = feedtune(
        *project.words("--trials=2", command=command), cwd=project.work, **project.env, STEP_S=step_s
    )
    assert done.returncode == 0, done.stderr
    document = result_of(project.run)
    assert document["starts"] == 1
    assert document["world_size"] == 2
    assert document["outcome"] != "failed"
    project.assert_untouched()


@pytest.mark.parametrize(
    ("way", "ends", "code", "says"),
    [
        pytest.param("shell", {"STEPS": "8"}, 2, "more steps", marks=SLOW),
        pytest.param("shell", {"STEPS": "8", "WITH": "error"}, 4, "the last step fails", marks=SLOW),
        pytest.param("shell", {"STEPS": "8", "WITH": "exit"}, 4, "exit code 3", marks=SLOW),
        pytest.param("shell", {"STEPS": "100"}, 0, "starting it again", marks=SLOW),
        pytest.param("spawn", {"STEPS": "8"}, 2, "more steps", marks=SLOW),
        pytest.param("spawn", {"STEPS": "8", "WITH": "error"}, 4, "the last step fails", marks=SLOW),
    ],
)
def test_nothing_after_a_training_that_ends_by_itself_is_reached(
    project: Project, way: str, ends: dict[str, str], code: int, says: str
) -> None:
    """However often it is started, it never comes to what follows: uploads, clean-ups."""
    words = project.words(*FIXED, command=COMMANDS[way])
    done = feedtune(*words, cwd=project.work, **project.env, **ends)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    # The ranks' own code runs on to their end; mp.spawn has no time to remove what its ranks report in.
    project.assert_untouched("pytorch-errorfile-", traces={"after_training_0", "after_training_1"})


# A line that the tuning prints, how often it has been printed, and how long to wait after it.
STAGES = {
    "before the guardian": ("", 0, 0.3),
    "as the guardian starts": ("", 0, 0.8),
    "while torch is imported": ("trial mode", 1, 3.0),
    "first batches": ("training loader", 1, 0.6),
    "after the baseline": (" baseline ", 1, 0.4),
    "at a swap": (" candidate ", 1, 0.05),
    "in a block": (" candidate ", 1, 0.5),
    "in the confirmation": (" confirm ", 3, 0.6),
    "in the end": (" confirm ", 8, 0.3),
}
COUNTS = [2, 2, 3, 3, 2, 3, 2, 1, 2]
# A torchrun that is killed before it has started a rank leaves its log folder, which nobody names yet.
EARLY = "torchelastic_"
DEFAULT = ("at a swap",)


def moments() -> list[object]:
    """Twenty moments over all stages; one of them belongs to the default set."""
    found = []
    for (stage, (line, times, most)), count in zip(STAGES.items(), COUNTS, strict=True):
        for number in range(count):
            delay = random.Random(f"{stage} {number}").uniform(0, most)
            marks = () if stage in DEFAULT and not number else (pytest.mark.slow,)
            found.append(pytest.param(line, times, delay, marks=marks, id=f"{stage} {number}"))
    assert len(found) == 20
    return found


def wait_for_line(process: subprocess.Popen[str], word: str, times: int) -> list[str]:
    """Read what the tuning prints until a word has come so often, or until it ends."""
    assert process.stderr is not None
    said: list[str] = []
    while sum(word in line for line in said) < times and (line := process.stderr.readline()):
        said.append(line)
    return said


@pytest.mark.parametrize(("line", "times", "delay"), moments())
def test_sigkill_at_any_moment_leaves_nothing(project: Project, line: str, times: int, delay: float) -> None:
    # Batches in named shared memory: nobody but the guardian frees it after a SIGKILL.
    process = project.start(SHARING="file_system")
    said = wait_for_line(process, line, times)
    time.sleep(delay)
    process.kill()
    process.wait()
    assert process.stderr is not None
    said += process.stderr.readlines()
    process.stderr.close()
    assert any(line in text for text in said) or not times, said
    project.assert_untouched(EARLY if line == "trial mode" else "nothing")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=SLOW), signal.SIGINT], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize(
    ("line", "times", "most"),
    [
        pytest.param(*STAGES["while torch is imported"], marks=pytest.mark.slow),
        pytest.param(*STAGES["first batches"], marks=pytest.mark.slow),
        STAGES["after the baseline"],
        pytest.param(*STAGES["at a swap"], marks=pytest.mark.slow),
        pytest.param(*STAGES["in the confirmation"], marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_with_130_and_a_partial_result(
    project: Project, line: str, times: int, most: float, number: signal.Signals
) -> None:
    process = project.start()
    said = wait_for_line(process, line, times)
    time.sleep(random.Random(f"{line} {number}").uniform(0, most))
    process.send_signal(number)
    process.send_signal(number)  # an impatient second one changes nothing
    assert process.stderr is not None
    said += process.stderr.readlines()
    assert process.wait(60) == 130, said
    process.stderr.close()
    assert "Traceback" not in "".join(said)
    assert "interrupted" in said[-1]
    baseline = any(" baseline " in text for text in said)
    assert baseline or line in ("trial mode", "training loader")
    assert (project.run / "result.json").exists() == baseline
    if baseline:
        document = result_of(project.run)
        jsonschema.validate(document, SCHEMA)
        assert document["outcome"] == "failed"
        assert "interrupted" in document["verdict"]
        assert document["blocks"][0]["kind"] == "baseline"
    project.assert_untouched(EARLY if line == "trial mode" else "nothing")


@SLOW
def test_a_terminal_that_is_closed_ends_a_tuning_as_sigterm_does(project: Project) -> None:
    master, slave = os.openpty()

    def adopt() -> None:
        answer_signals()
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*FEEDTUNE, *project.words(*FIXED, command=TORCHRUN)],
        cwd=project.work,
        env=environment(**project.env),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=adopt,
    )
    os.close(slave)
    said = b""
    with suppress(OSError):  # the other side has ended
        while b" baseline " not in said:
            said += os.read(master, 4096)
    os.close(master)
    assert process.wait(60) == 130, said
    assert result_of(project.run)["blocks"][0]["kind"] == "baseline"
    project.assert_untouched()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB; it takes the hook, and not much more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    try:
        made = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount program")
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("line", ["", " baseline "], ids=["from the start", "in a tuning"])
def test_a_full_disk_at_the_run_folder(project: Project, small_disk: Path, line: str) -> None:
    project.run = small_disk / "run"
    filler = small_disk / "filler"
    if not line:
        filler.write_bytes(b"x" * (250 << 10))
    process = project.start()
    said = wait_for_line(process, line, bool(line))
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while line:
            file.write(b"x" * 4096)
    assert process.stderr is not None
    said += process.stderr.readlines()
    assert process.wait(120) == 3, said
    process.stderr.close()
    assert "Traceback" not in "".join(said)
    assert said[-2].endswith(f"cannot write to the run folder {project.run}: No space left on device\n")
    assert "--out" in said[-1]
    project.assert_untouched()
