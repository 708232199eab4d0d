"""``feedtune run``: the command as it is, watched from inside, and what its ranks spent their time on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedtune.analysis.steps import Figures, StepSeen, measure_steps
from feedtune.inside.linefiles import LineFile
from feedtune.launch.boot import BootFolder
from feedtune.launch.foreground import Foreground, find_program
from feedtune.machine import read_machine
from feedtune.rundir import RUN_FORMAT, RunDir, redact
from feedtune.trials.causes import how_far
from feedtune.trials.collect import Collector
from feedtune.trials.options import check_out, run_name
from feedtune.trials.session import started_inside_a_launcher
from shard_tools.errors import BadInput

SCHEMA = "feedtune.run/1"
_MOST_READ = 64 << 20  # bytes of steps; in memory they take seven times that
_RANK_FILE = re.compile(r"rank(\d+)(?:\.(\d+))?\.json")


@dataclass(frozen=True)
class RunOptions:
    """What the user asks for.

    Attributes:
        command: the training command, as it is typed without feedtune.
        out: run folder; ``None`` makes one outside the work folder.
        steps: steps of each rank to record; ``None`` records to the end.
        keep_stdout: the command's standard output goes to RUN/command.log, since ours is a document.
    """

    command: Sequence[str]
    out: Path | None = None
    steps: int | None = None
    keep_stdout: bool = False


@dataclass(frozen=True)
class RankSeen:
    """What one rank has written: who it is, and its steps."""

    about: Mapping[str, Any]
    records: Sequence[StepSeen]


def observe(options: RunOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the command to its end and measure it; the document of ``result.json``.

    Raises:
        BadInput: no command, it cannot be started, or feedtune was started inside a launcher.
    """
    find_program(options.command, "feedtune run -- torchrun --nproc_per_node=2 train.py")
    launcher = started_inside_a_launcher(os.environ)
    if launcher:
        raise BadInput(
            f"feedtune was started by {launcher} once a rank",
            f"put it in front: feedtune run -- {launcher} ...",
        )
    check_out(options.out)
    run = RunDir.new(options.out, run_name(options.command))
    facts = {"machine": read_machine().as_dict(), "command": redact(options.command)}
    run.write_json("run.json", {"schema": RUN_FORMAT, **facts})
    if options.keep_stdout:
        tell(f"the command's standard output goes to {run.log}")
    boot = BootFolder(
        run.path / "boot",
        secrets.token_hex(8),
        {"mode": "run", "records": str(run.path), "steps": options.steps},
    )
    collector = Collector(run.path)
    code, seconds = _start(options, run, boot, collector)
    trainings = [training(number, ranks) for number, ranks in sorted(read_trainings(run.path).items())]
    document = {
        "schema": SCHEMA,
        **facts,
        "run": str(run.path),
        "exit_code": code,
        "seconds": round(seconds, 3),
        "steps_asked": options.steps,
        "trainings": trainings,
        "note": _note(trainings, run, boot, options.command, collector),
        "reading": reading(trainings),
    }
    try:
        run.write_json("result.json", document)
    except OSError as error:  # what the command's exit code says must not depend on our disk
        tell(f"{run.path}/result.json could not be written: {error.strerror}")
    return document


def _start(options: RunOptions, run: RunDir, boot: BootFolder, collector: Collector) -> tuple[int, float]:
    """The command from its start to its end: its exit code, and how long it took."""
    try:
        boot.set_start(1)
        begun = time.monotonic()
        with Foreground() as foreground, collector:  # its thread blocks the signals that we wait for
            env = boot.environment(os.environ)
            code = foreground.run(options.command, env, run.log if options.keep_stdout else None)
        seconds = time.monotonic() - begun
        boot.keep_signs()
    finally:
        boot.remove()
    return code, seconds


def read_trainings(folder: Path) -> dict[int, dict[int, RankSeen]]:
    """What ranks have written: ``{training: {rank: what it wrote}}``.

    A rank that was started anew, or a second training in a row, counts as training 2. Of a run that was too
    long for memory, the same stretches of all ranks are read.
    """
    size, one_in = sum(path.stat().st_size for path in folder.glob("steps.rank*.jsonl")), 1
    while size > one_in * _MOST_READ:
        one_in *= 2
    found: dict[int, dict[int, RankSeen]] = {}
    for path in folder.glob("rank*.json"):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None:
            continue
        rank, part = int(match[1]), int(match[2] or 1)
        records = read_steps(path.with_name(f"steps.{path.name}l"), one_in)
        if records:
            about = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(part, {})[rank] = RankSeen(about, records)
    return found


def read_steps(path: Path, one_in: int = 1) -> list[StepSeen]:
    """What can be read of a rank's file: a rank that was killed, or a full disk, can leave half a line.

    Args:
        path: the file.
        one_in: of so many stretches of steps, one is read.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return [StepSeen(*fields) for line in file if (fields := _fields(line, one_in))]
    return []


def _fields(line: bytes, one_in: int) -> list[Any]:
    with contextlib.suppress(ValueError):
        stretch = int(line[1 : line.index(b",")]) // LineFile.stretch
        if line.endswith(b"\n") and stretch % one_in == 0:
            found: list[Any] = json.loads(line)
            return found[: len(StepSeen._fields)]
    return []


def training(number: int, ranks: Mapping[int, RankSeen]) -> dict[str, Any]:
    """One training of the document: its loader, each rank, and the job."""
    first = ranks[min(ranks)].about
    loader = first["loader"]
    workers, prefetch = loader["num_workers"], loader["prefetch_factor"]

    def measured(chosen: Mapping[int, RankSeen]) -> Figures:
        waits = all(rank.about["own_thread"] for rank in chosen.values())
        return measure_steps({r: rank.records for r, rank in chosen.items()}, workers, prefetch, waits)

    return {
        "number": number,
        "world_size": first["world"],
        "loader": loader,
        "job": measured(ranks).as_dict(),
        "ranks": [
            {
                **{name: rank.about[name] for name in ("pid", "host", "cuda", "own_thread", "missed")},
                "rank": number_,
                "others": rank.about.get("others"),
                **measured({number_: rank}).as_dict(),
            }
            for number_, rank in sorted(ranks.items())
        ],
    }


def _note(
    trainings: Sequence[Mapping[str, Any]],
    run: RunDir,
    boot: BootFolder,
    command: Sequence[str],
    collector: Collector,
) -> str | None:
    """What a reader has to know before the figures."""
    if not run.path.exists():
        return f"the run folder {run.path} was removed meanwhile"
    stopped = boot.sign("stopped")
    if stopped:
        return f"recording has stopped early: {stopped}"
    if collector.error:
        return f"{collector.lost} records could not be written to {run.path}: {collector.error}"
    if not trainings:
        return f"no training was seen: {how_far(boot, command, None)}"
    missing = [t for t in trainings if len(t["ranks"]) < t["world_size"]]
    if missing:
        return f"{len(missing[0]['ranks'])} of {missing[0]['world_size']} ranks were seen"
    return None


def reading(trainings: Sequence[Mapping[str, Any]]) -> str:
    """What the shares of waiting say, and what they do not."""
    if not trainings:
        return ""
    found = []
    if any(rank["cuda"] for t in trainings for rank in t["ranks"]):
        found.append(
            "On a GPU, part of the wait hides behind work that is queued already: the GPU idles for less."
        )
    if any(t["world_size"] > 1 for t in trainings):
        found.append(
            "Under DDP a rank's own wait says little: ranks wait for the slowest in every step, and there "
            "the wait for data shows as work."
        )
    found.append(
        "What data supply costs is the job's speed against its speed when data is free: "
        "feedtune tune -- CMD measures that."
    )
    return " ".join(found)
