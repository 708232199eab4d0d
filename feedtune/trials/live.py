"""The life of a command under trial, from its first start to the end of its tree, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedtune.analysis.pacing import next_chunk
from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import default_policy
from feedtune.launch.trackers import without_trackers
from feedtune.machine import Machine, read_machine
from feedtune.rundir import RUN_FORMAT, RunDir, redact
from feedtune.settings import LoaderSettings
from feedtune.trials.interrupts import Interrupts
from feedtune.trials.lines import loader_line
from feedtune.trials.measuring import Trials
from feedtune.trials.options import TuneOptions, check_fixed, check_out, run_name, working_folder
from feedtune.trials.server import ControlServer, Message
from feedtune.trials.session import Launch, Session, refuse_inside_a_launcher
from shard_tools.errors import Missing

_FULL = (errno.ENOSPC, errno.EDQUOT)


def in_trial(
    make: Callable[..., LiveRun], name: str, options: TuneOptions, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run a command in trial mode; the document of ``result.json``.

    Args:
        make: what is done in it, made of the words of ``LiveRun``.
        name: the command that the user has typed, for messages: ``feedtune tune``.
        options: what the user asks for.
        tell: receives lines for a person, as things happen.

    Raises:
        BadInput: no command, or feedtune was started inside a launcher.
        Missing: the command holds no training that can be tuned.
        CommandFailed: the command failed before or at its baseline.
        KeyboardInterrupt: after a partial result was written.
    """
    refuse_inside_a_launcher(name)
    working_folder()
    check_out(options.out)
    check_fixed(options)
    run = RunDir.new(options.out, run_name(options.command))
    with Interrupts() as interrupts:
        try:
            return make(options, run, tell, interrupts).run()
        except OSError as error:
            place = Path(os.fsdecode(error.filename)) if error.filename else None
            if error.errno not in _FULL and (place is None or not place.is_relative_to(run.path)):
                raise
            raise Missing(
                f"cannot write to the run folder {run.path}: {error.strerror}",
                "make room, or name another with --out",
            ) from error


class LiveRun(ABC):
    """One command under trial; what is done in it, and what comes of it, is a subclass's.

    Attributes:
        traced: the ranks take their steps down with all their parts, which costs a little.
    """

    traced = False

    def __init__(
        self, options: TuneOptions, run: RunDir, tell: Callable[[str], None], interrupts: Interrupts
    ) -> None:
        self.interrupts = interrupts
        self.options = options
        self.run_dir = run
        self.tell = tell
        self.seconds = 0.0
        self.machine: Machine = read_machine()
        run_id = secrets.token_hex(8)
        self.server = ControlServer(token := secrets.token_hex(32), next_chunk)
        self.boot = BootFolder(
            run.path / "boot",
            run_id,
            {
                "host": "127.0.0.1",
                "port": self.server.port,
                "token": token,
                "records": str(run.path),
                "chosen": options.loader,
                "trace": self.traced,
            },
        )
        env, self.trackers = without_trackers(os.environ, run.path / "boot")
        cwd = working_folder()
        launch = Launch(
            command=list(options.command),
            cwd=cwd,
            env=env,
            policy=default_policy(options.command, cwd, env, [run.path, *options.writable]),
            tier=options.guard,
            start_timeout_s=options.start_timeout_s,
            hang_timeout_s=options.hang_timeout_s,
            chosen=options.loader,
            isolate=options.isolate,
        )
        self.session = Session(launch, run, run_id, self.server, self.boot, tell)
        self.trials = Trials(options, run, self.session, self.machine, tell)
        self.answer = self.trials.answer

    def run(self) -> dict[str, Any]:
        """Do it all; whatever happens, the tree ends and a result is written once a block was tried."""
        self.run_dir.write_json(
            "run.json",
            {
                "schema": RUN_FORMAT,
                "machine": self.machine.as_dict(),
                "command": redact(self.options.command),
                "options": {"budget_s": self.options.budget_s, "trials": self.options.trials},
            },
        )
        try:
            self.steps()
            self.session.finish()
        except KeyboardInterrupt:
            self.answer.interrupted = True
            with contextlib.suppress(OSError):  # what we write to may have ended by the same Ctrl-C (tee)
                kept = f"what was measured until now is in {self.run_dir.path}"
                self.tell(f"interrupted; {kept if self.trials.blocks else 'nothing was measured yet'}")
            raise
        finally:
            self.interrupts.hold()
            self.session.stop()
            self.seconds = time.monotonic() - self.trials.begun
            self.server.close()
            self.boot.remove()
            if self.trials.blocks:
                self.run_dir.write_json("result.json", self.document())
        return self.document()

    def begin(self) -> Message:
        """Start the command and wait until it trains: what a rank has said of itself."""
        self.session.start()
        tier, notes = self.session.guard
        self.tell(
            f"trial mode: the command is ended when the answer is there; its file writes go to a throw-away "
            f"layer ({tier} guard); network and database writes are NOT blocked; "
            f"switched off: {', '.join(self.trackers)}"
        )
        for note in notes:
            self.tell(f"note: {note}")
        hello = self.session.hello()
        self.answer.hello = hello
        self.answer.own = LoaderSettings.from_dict(hello["loader"])
        self.tell(f"training loader: {loader_line(hello)}")
        return hello

    @abstractmethod
    def steps(self) -> None:
        """The blocks."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The result, as far as it is known."""
