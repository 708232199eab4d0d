"""``feedtune run``: the command as it is, watched from inside, and what its ranks spent their time on."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedtune.beside.readings import FILE_NAME, read_readings
from feedtune.beside.start import start_sampler
from feedtune.launch.boot import BootFolder
from feedtune.launch.foreground import Foreground, find_program
from feedtune.machine import read_machine
from feedtune.rundir import RUN_FORMAT, RunDir, redact
from feedtune.trials.causes import failure, how_far, kept_out
from feedtune.trials.collect import Collector
from feedtune.trials.options import check_out, run_name
from feedtune.trials.seen import SCHEMA, read_trainings, reading, training
from feedtune.trials.session import refuse_inside_a_launcher


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


def observe(options: RunOptions, tell: Callable[[str], None], foreground: Foreground) -> dict[str, Any]:
    """Run the command to its end and measure it; the document of ``result.json``.

    Args:
        options: what the user asks for.
        tell: receives lines for a person.
        foreground: is held from the command's start on, also when this returns.

    Raises:
        BadInput: no command, it cannot be started, or feedtune was started inside a launcher.
    """
    find_program(options.command, "feedtune run -- torchrun --nproc_per_node=2 train.py")
    refuse_inside_a_launcher("feedtune run")
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
    with start_sampler(run.path, None) as sampler:
        code, seconds = _start(options, run, boot, collector, foreground, sampler.follow)
    unread = sampler.stop()
    trainings = [training(number, ranks) for number, ranks in sorted(read_trainings(run.path).items())]
    document = {
        "schema": SCHEMA,
        **facts,
        "run": str(run.path),
        "exit_code": code,
        "seconds": round(seconds, 3),
        "steps_asked": options.steps,
        "trainings": trainings,
        "ceiling": None,
        "readings": _readings(run.path, unread),
        "note": _note(trainings, run, boot, options.command, code, collector),
        "reading": reading(trainings),
    }
    try:
        run.write_json("result.json", document)
    except OSError as error:  # what the command's exit code says must not depend on our disk
        tell(f"{run.path}/result.json could not be written: {error.strerror}")
    return document


def _start(
    options: RunOptions,
    run: RunDir,
    boot: BootFolder,
    collector: Collector,
    foreground: Foreground,
    started: Callable[[int], None],
) -> tuple[int, float]:
    """The command from its start to its end: its exit code, and how long it took."""
    try:
        boot.set_start(1)
        begun = time.monotonic()
        foreground.hold()  # before the collector: its thread has to block the signals that we wait for
        with collector:
            env = boot.environment(os.environ)
            stdout = run.log if options.keep_stdout else None
            code = foreground.run(options.command, env, stdout, started)
        seconds = time.monotonic() - begun
        boot.keep_signs()
    finally:
        boot.remove()
    return code, seconds


def _readings(run: Path, unread: str | None) -> dict[str, Any]:
    """What the samplers beside the training took themselves, and why they did not record to the end."""
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for reading in read_readings(run / FILE_NAME):
            if reading.source == "sampler":
                last = reading.values
    return {"cpu_s": last.get("cpu_s"), "lost_ticks": last.get("lost_ticks"), "note": unread}


def _note(
    trainings: Sequence[Mapping[str, Any]],
    run: RunDir,
    boot: BootFolder,
    command: Sequence[str],
    code: int,
    collector: Collector,
) -> str | None:
    """What a reader has to know before the figures."""
    steps = sum(training["job"]["steps"] for training in trainings)
    failed = None if code == 0 else failure(code, steps)
    limit = _limit(trainings, run, boot, collector)
    if limit is None and not trainings:
        if failed is None:
            limit = f"no training was seen: {how_far(boot, command, None)}"
        else:
            limit = kept_out(boot, command)
    return "; ".join(filter(None, (failed, limit))) or None


def _limit(
    trainings: Sequence[Mapping[str, Any]], run: RunDir, boot: BootFolder, collector: Collector
) -> str | None:
    """Why not all was recorded."""
    if not run.path.exists():
        return f"the run folder {run.path} was removed meanwhile"
    stopped = boot.sign("stopped")
    if stopped:
        return f"recording has stopped early: {stopped}"
    if collector.error:
        return f"{collector.lost} records could not be written to {run.path}: {collector.error}"
    missing = [t for t in trainings if len(t["ranks"]) < t["world_size"]]
    if missing:
        return f"{len(missing[0]['ranks'])} of {missing[0]['world_size']} ranks were seen"
    if collector.thinned:
        return f"{collector.thinned} records were left out, whole stretches of them, to keep the files small"
    return None
