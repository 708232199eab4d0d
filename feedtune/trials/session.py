"""One training under trial: its process, its ranks, and the blocks they run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feedtune.analysis.blocks import RankBlock, measure_block
from feedtune.launch.boot import BootFolder
from feedtune.launch.policy import WritePolicy
from feedtune.launch.process import GuardedProcess
from feedtune.records import BlockPlan, BlockResult, Reason, StepRecord
from feedtune.rundir import RunDir
from feedtune.trials.server import ControlServer, Message, StartState
from shard_tools.errors import CommandFailed, Missing

_SILENT_GRACE_S = 2.0  # a rank that has not claimed so long after another's first block never fetches
_HANG_S = 60.0
_MAX_STARTS = 20
_EXIT_GRACE_S = 20.0  # from the last rank's word to the launcher's exit code
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
        self.process: GuardedProcess | None = None
        self.worker_bytes: int | None = None
        self.batch: tuple[int, int, int] | None = None  # elements, bytes, tensors
        self.cloned = False
        self.shared_files: set[str] = set()
        self._k = 0
        self._offsets: dict[int, int] = {}
        self._blocks_in_start = 0
        self._cache_plan: BlockPlan | None = None
        self._cached = False
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
        self.boot.set_start(self.starts)
        env = self.boot.environment({**self.launch.env, "FEEDTUNE_RUN_ID": self.run_id})
        self.process = GuardedProcess.start(
            self.launch.command,
            env=env,
            cwd=self.launch.cwd,
            log=self.run_dir.log,
            run_id=self.run_id,
            policy=self.launch.policy,
            tier=self.launch.tier,
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
            return state.hellos[min(state.hellos)]

    def run(self, plan: BlockPlan) -> BlockResult:
        """Run one block on all ranks; a script that ends meanwhile is started again for it."""
        if plan.kind == "ceiling" and not self._cached and self._cache_plan is not None:
            self.run(self._cache_plan)  # a new start has no batches to replay yet
        while True:
            if self.process is not None and self.process.poll() is not None:
                self.stop()
            if self.process is None:
                self._announce_restart()
            plan = replace(plan, k=self._k)
            self._k += 1
            self.server.publish(plan)
            if self.process is None:
                self.start()
            done_before = self._blocks_in_start
            failure = self._wait_for_results(plan)
            result = failure or self._measure(plan)
            # A block that the script's own end has cut short has a whole script before it in a new start.
            cut = result.reason == "script_ended" or (result.reason == "too_few_steps" and self._partial)
            if failure is not None or cut:
                self.stop()
            if not (cut and done_before > 0 and self.starts < _MAX_STARTS):
                return result

    def _announce_restart(self) -> None:
        if self.starts:
            self.tell("the script has ended; starting it again for the blocks that are left")

    def _wait_for_results(self, plan: BlockPlan) -> BlockResult | None:
        """Wait for block k of all ranks; what went wrong, or ``None``."""
        assert self.process is not None
        state = self.state()
        state.heard_s = time.monotonic()
        first_result: float | None = None
        limit = self.launch.start_timeout_s if not state.hellos else _HANG_S
        while True:
            complete = self.server.wait(lambda: bool(state.failures) or self._all_in(state, plan.k), _POLL_S)
            if state.failures:
                return self._failed(plan, "loader_failed", state.failures[0]["text"])
            now = time.monotonic()
            if complete:
                first_result = first_result or now
                world = next(iter(state.hellos.values()))["world"]
                known = len(state.hellos) >= world or self._blocks_in_start > 0
                if known or now - first_result > _SILENT_GRACE_S:
                    return self._check_partial(plan, state)
            code = self.process.poll()
            if code is not None and not self._all_in(state, plan.k):
                return self._ended(plan, code)
            if state.hellos:
                # A save, or whatever a script does between two epochs, may take as long as a start.
                limit = self.launch.start_timeout_s if state.doing else max(_HANG_S, 10 * plan.max_s)
            if now - state.heard_s > limit:
                return self._failed(plan, "hang", f"no sign of life for {limit:.0f} s\n{self.log_tail()}")

    def _ended(self, plan: BlockPlan, code: int | None) -> BlockResult:
        """The script has ended in the middle of a block."""
        error = self.state().errors.get(plan.k)
        if code == 0:
            return self._failed(plan, "script_ended", "exit code 0")
        if error:
            return self._failed(plan, "loader_failed", error)
        return self._failed(plan, "script_failed", f"exit code {code}\n{self.log_tail()}")

    def _check_partial(self, plan: BlockPlan, state: StartState) -> BlockResult | None:
        """A block that the script's end has cut off counts only where the script ended well."""
        self._partial = any(state.results[plan.k, rank]["partial"] for rank in state.hellos)
        if not self._partial:
            return None
        assert self.process is not None
        deadline = time.monotonic() + _EXIT_GRACE_S
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return None if code in (0, None) else self._ended(plan, code)

    def _all_in(self, state: StartState, k: int) -> bool:
        return bool(state.hellos) and all((k, rank) in state.results for rank in state.hellos)

    def _failed(self, plan: BlockPlan, reason: Reason, detail: str) -> BlockResult:
        return BlockResult(plan.k, plan.kind, plan.settings, state="failed", reason=reason, detail=detail)

    def _measure(self, plan: BlockPlan) -> BlockResult:
        self._blocks_in_start += 1
        with self.server.locked():
            ends = {rank: self.state().results[plan.k, rank] for rank in self.state().hellos}
        for end in ends.values():
            self.worker_bytes = max(filter(None, (self.worker_bytes, end["worker_bytes"])), default=None)
            self.batch = tuple(end["sizes"]) if end["sizes"] else self.batch
            self.cloned = self.cloned or end["cloned"]
            self.shared_files |= set(end["shared_files"])
        if plan.cache:
            self._cache_plan = plan
            self._cached = all(end["cached"] for end in ends.values())
        ranks = {rank: self._rank_block(plan.k, rank, end) for rank, end in ends.items()}
        return measure_block(plan, ranks)

    def _rank_block(self, k: int, rank: int, end: Mapping[str, Any]) -> RankBlock:
        lines, self._offsets[rank] = self.run_dir.read_steps(rank, self._offsets.get(rank, 0))
        records = [StepRecord(*line[1:]) for line in lines if line[0] == k]
        return RankBlock(records, end["start_s"], end["end_s"], end["first_step"], end["worker_s"])

    def finish(self) -> None:
        """Let all ranks end their workers, then end the tree."""
        state = self.state()
        self.server.publish_end(self._k)
        if self.process is not None and state.hellos:
            self.server.wait(lambda: state.done >= set(state.hellos), 10.0)
        self.stop()

    def stop(self) -> None:
        """End the tree now."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def log_tail(self, lines: int = 15) -> str:
        """The end of the command's output; from its last traceback on, where there is one."""
        try:
            with open(self.run_dir.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        found = [line[:500] for line in text.splitlines()]
        starts = [i for i, line in enumerate(found) if line.startswith("Traceback")]
        if starts and "ChildFailedError" not in text[text.rfind("Traceback") :]:
            return "\n".join(found[starts[-1] :][-40:])
        if starts:  # torchrun's own report comes last; the script's error is the first one
            end = next(
                (i for i in range(starts[0] + 1, len(found)) if found[i][:1] not in ("", " ")), starts[0]
            )
            return "\n".join(found[starts[0] : end + 1])
        return "\n".join(found[-lines:])

    def _no_hello(self, code: int) -> Exception:
        if code != 0:
            return CommandFailed(
                f"the command failed with exit code {code} before its training was seen\n{self.log_tail()}",
                f"run it without feedtune first; its whole output is in {self.run_dir.log}",
            )
        return Missing(f"the command ended without a training that feedtune can tune: {self._how_far()}")

    def _how_far(self) -> str:
        """The likely cause, from the signs that its processes left."""
        seen = self.boot.seen()
        command = list(self.launch.command)
        if "error" in seen:
            detail = (self.boot.path / "seen" / "error").read_text().strip()
            return f"feedtune's start-up code failed in its interpreter: {detail}"
        if "python" not in seen:
            isolated = [
                w for w in command if w in ("-I", "-E") or (w[:1] == "-" and w[1:2] in "IE" and w.isalpha())
            ]
            if isolated:
                return (
                    f"Python was started with {isolated[0]}, which ignores PYTHONPATH; leave that option out"
                )
            return (
                "no Python process saw PYTHONPATH (a container, ssh, sudo or srun --export=NONE in between, "
                "or no Python at all); let PYTHONPATH through"
            )
        if "torch" not in seen:
            return (
                "it never imported torch.utils.data (DALI, ffcv and tf.data pipelines are no torch "
                "DataLoaders)"
            )
        if "loader" not in seen:
            return "it never made a torch DataLoader"
        if "iterated" not in seen:
            return "it made a DataLoader but never iterated over it through DataLoader.__iter__"
        return (
            "it ended before two optimizer steps fell between batches of one DataLoader; let it train longer"
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
