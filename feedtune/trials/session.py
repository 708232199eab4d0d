"""One training under trial: its process, its ranks, and the blocks they run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feedtune.analysis.blocks import RankBlock, measure_block
from feedtune.analysis.failures import Cause, ended_by, shown_output
from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import WritePolicy
from feedtune.launch.process import GuardedProcess
from feedtune.records import BlockPlan, BlockResult, StepRecord
from feedtune.rundir import RunDir
from feedtune.trials import causes
from feedtune.trials.server import ControlServer, Message, StartState
from feedtune.trials.waiting import BlockWait
from shard_tools.errors import BadInput, CommandFailed, Missing

_MAX_STARTS = 20
_POLL_S = 0.25


@dataclass(frozen=True)
class Launch:
    """How to start the user's command."""

    command: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    policy: WritePolicy
    tier: str = "auto"
    start_timeout_s: float = 900.0
    hang_timeout_s: float = 60.0
    chosen: str | None = None  # the training loader that the user names: FILE:LINE
    isolate: bool = False  # every trial in a start of its own


class Session:
    """Starts the command, runs blocks in it, starts it again where it ended early, and ends it.

    Args:
        launch: the command.
        run: the run folder.
        run_id: marks every process of the run.
        server: the control server that the ranks talk to.
        boot: the start-up folder.
        tell: receives lines for a person.
    """

    def __init__(
        self,
        launch: Launch,
        run: RunDir,
        run_id: str,
        server: ControlServer,
        boot: BootFolder,
        tell: Callable[[str], None],
    ) -> None:
        self.launch = launch
        self.run_dir = run
        self.run_id = run_id
        self.server = server
        self.boot = boot
        self.tell = tell
        self.starts = 0
        self.isolate = launch.isolate
        self.repeated: tuple[int, int] | None = None  # of iterable data: first samples, repeated ones
        self.process: GuardedProcess | None = None
        self.worker_bytes: int | None = None
        self.batch: tuple[int, int, int] | None = None  # elements, bytes, tensors
        self.cloned = False
        self.shared_files: set[str] = set()
        self.latest: dict[int, RankBlock] = {}  # the latest block, by rank
        self.ends: dict[int, Message] = {}  # what each rank has told of it
        self._k = 0
        self._offsets: dict[int, int] = {}
        self._blocks_in_start = 0
        self._cache_plan: BlockPlan | None = None
        self._cached = False
        self._replay: tuple[int, ...] = ()
        self._partial = False
        self._guard: tuple[str, list[str]] = ("", [])

    @property
    def guard(self) -> tuple[str, list[str]]:
        """The write guard's tier and its notes, of the latest start."""
        return self._guard

    def state(self) -> StartState:
        """What the ranks of the running start have said."""
        return self.server.start_state(self.starts)

    def start(self) -> None:
        """Start the command under the guardian."""
        self.starts += 1
        self._blocks_in_start = 0
        self._cached = False
        env = self.boot.environment({**self.launch.env, "FEEDTUNE_RUN_ID": self.run_id})
        self.process = GuardedProcess.start(
            self.launch.command,
            env=env,
            cwd=self.launch.cwd,
            log=self.run_dir.log,
            run_id=self.run_id,
            policy=self.launch.policy,
            tier=self.launch.tier,
            boot=self.boot,
            number=self.starts,
        )
        self._guard = (self.process.tier, list(self.process.notes))

    def hello(self) -> Message:
        """Wait until a rank trains: its description of the loader, ranks and machine.

        Raises:
            Missing: no rank appeared; the message names the likely cause.
            CommandFailed: the command ended with an error before that.
        """
        assert self.process is not None
        state = self.state()
        deadline = time.monotonic() + self.launch.start_timeout_s
        while not self.server.wait(lambda: bool(state.hellos), _POLL_S):
            code = self.process.poll()
            if code is not None:
                self.stop()
                raise self._no_hello(code)
            if time.monotonic() > deadline:
                self.stop()
                raise Missing(
                    f"no training step within {self.launch.start_timeout_s:.0f} s: {self._how_far()}",
                    f"see {self.run_dir.log}; a slow start needs --start-timeout SECONDS",
                )
        with self.server.locked():
            hello = state.hellos[min(state.hellos)]
        self.boot.configure(known=[hello["loader"]["number"], hello["loader"]["site"]])
        return hello

    def run(self, plan: BlockPlan) -> BlockResult:
        """Run one block on all ranks; a script that ends meanwhile is started again for it."""
        if self.isolate and self._blocks_in_start and not (plan.kind == "ceiling" and self._cached):
            self.stop()
        while True:
            if self.process is not None and (self.process.poll() is not None or self._all_left()):
                self.stop()
            fresh = self.process is None
            if plan.kind == "ceiling" and not self._cached and self._cache_plan is not None:
                self.run(self._cache_plan)  # a new start has no batches to replay yet
            if self.process is None:
                self._announce_restart()
            plan = replace(plan, k=self._k, replay=self._replay if plan.kind == "ceiling" else ())
            self._k += 1
            self.server.publish(plan)
            if self.process is None:
                self.start()
            failure = self._wait(plan)
            result = self._measure(plan) if failure is None else self._failed(plan, failure)
            # A block that the script's own end has cut short has a whole script before it in a new start.
            cut = result.reason == "script_ended" or (result.reason == "too_few_steps" and self._partial)
            if failure is not None or cut:
                self.stop()
            if fresh or not cut or self.starts >= _MAX_STARTS:
                return result

    def _all_left(self) -> bool:
        """Whether the training has come to its own end; its last rank is kept, and can do no block."""
        state = self.state()
        with self.server.locked():
            return bool(state.hellos) and state.left.keys() >= state.hellos.keys()

    def _announce_restart(self) -> None:
        if self.starts and not self.isolate:
            self.tell("the script has ended; starting it again for the blocks that are left")

    def _wait(self, plan: BlockPlan) -> Cause | None:
        """Wait for the block's results; what went wrong, or ``None``."""
        assert self.process is not None
        wait = BlockWait(
            plan=plan,
            server=self.server,
            state=self.state(),
            process=self.process,
            run_dir=self.run_dir,
            known=self._blocks_in_start > 0,
            hang_timeout_s=self.launch.hang_timeout_s,
            start_timeout_s=self.launch.start_timeout_s,
        )
        cause = wait.run()
        self.ends, self._partial, self.repeated = wait.ends, wait.partial, None
        return cause

    def _failed(self, plan: BlockPlan, cause: Cause) -> BlockResult:
        return BlockResult(
            plan.k, plan.kind, plan.settings, state="failed", reason=cause.reason, detail=cause.text,
            stack=cause.stack,
        )  # fmt: skip

    def _measure(self, plan: BlockPlan) -> BlockResult:
        self._blocks_in_start += 1
        ends = self.ends
        for end in ends.values():
            self.worker_bytes = max(filter(None, (self.worker_bytes, end["worker_bytes"])), default=None)
            self.batch = tuple(end["sizes"]) if end["sizes"] else self.batch
            self.cloned = self.cloned or end["cloned"]
            self.shared_files |= set(end["shared_files"])
        self.repeated = next((tuple(end["repeated"]) for end in ends.values() if end["repeated"]), None)
        if plan.cache:
            # To fill a cache again, the batches are enough.
            cycles = -(-plan.cache // plan.cycle)
            self._cache_plan = replace(plan, target_s=0.0, min_cycles=cycles)
            self._replay = tuple(sorted(set.intersection(*(set(end["cached"]) for end in ends.values()))))
            self._cached = all(end["cached"] for end in ends.values())
        self.latest = {rank: self._rank_block(plan.k, rank, end) for rank, end in ends.items()}
        return measure_block(plan, self.latest)

    def _rank_block(self, k: int, rank: int, end: Mapping[str, Any]) -> RankBlock:
        lines, self._offsets[rank] = self.run_dir.read_steps(rank, self._offsets.get(rank, 0))
        records = [StepRecord(*line[1:]) for line in lines if line[0] == k]
        # A rank that began anew can have done the block once more.
        own = [record for record in records if end["start_s"] <= record.enter_s <= end["end_s"]]
        return RankBlock(
            own,
            end["start_s"],
            end["end_s"],
            end["first_step"],
            end["worker_s"],
            end["close_s"],
            end["end_tag"],
        )

    def finish(self) -> None:
        """Let all ranks end their workers, then end the tree."""
        state = self.state()
        self.server.publish_end(self._k)
        if self.process is not None and state.hellos:
            self.server.wait(lambda: state.done | state.left.keys() >= state.hellos.keys(), 10.0)
        self.stop()

    def stop(self) -> None:
        """End the tree now."""
        self._cached = False
        if self.process is not None:
            self.boot.keep_signs()
            self.process.kill()
            self.process = None
            for file in self.run_dir.path.glob("stack.*"):
                file.unlink(missing_ok=True)

    def _no_hello(self, code: int) -> Exception:
        if code != 0:
            return CommandFailed(
                f"the command failed with {ended_by(code)} before it was seen to train\n{self._last_words()}",
                f"run it without feedtune first; its whole output is in {self.run_dir.log}",
            )
        return Missing(f"the command ended without a training that feedtune can tune: {self._how_far()}")

    def _how_far(self) -> str:
        return causes.how_far(self.boot, self.launch.command, self.launch.chosen)

    def _output(self) -> str:
        return causes.output_of(self.run_dir.log)

    def _last_words(self) -> str:
        return shown_output(self._output())


def refuse_inside_a_launcher(command: str) -> None:
    """Feedtune has to stand outside a launcher.

    Args:
        command: what the user has typed, for the message: ``feedtune tune``.

    Raises:
        BadInput: it was started by one, once a rank.
    """
    launcher = started_inside_a_launcher(os.environ)
    if launcher:
        raise BadInput(
            f"feedtune was started by {launcher} once a rank",
            f"put it in front: {command} -- {launcher} ...",
        )


def started_inside_a_launcher(env: Mapping[str, str]) -> str | None:
    """The launcher that started feedtune once a rank, if one did: feedtune has to stand outside it."""
    if env.get("SLURM_STEP_ID") and int(env.get("SLURM_NTASKS", "1")) > 1:
        return "srun"
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 or int(env.get("PMI_SIZE", "1")) > 1:
        return "mpirun"
    if "RANK" in env and "LOCAL_RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        return "torchrun"
    return None
