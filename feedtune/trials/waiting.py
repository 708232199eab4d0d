"""Waiting for one block of all ranks, and finding out why it does not end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from feedtune.analysis.failures import Cause, shown_output
from feedtune.launch.process import GuardedProcess
from feedtune.records import BlockPlan
from feedtune.rundir import RunDir
from feedtune.trials import causes
from feedtune.trials.server import ControlServer, Message, StartState

_SILENT_GRACE_S = 2.0  # a rank that has not claimed so long after another's first block never fetches
_EXIT_GRACE_S = 20.0  # from a rank's last word to the launcher's exit code
_LAST_WORDS_S = 2.0  # from the command's end to the end of its ranks' connections
_STEPS_OF_HANG = 10  # a step may take so many times what was predicted
_POLL_S = 0.25


@dataclass
class BlockWait:
    """Waits for one block.

    Attributes:
        plan: the block's plan.
        server: where the ranks report to.
        state: what the ranks of this start say.
        process: the command.
        run_dir: its output, and the stacks of its processes.
        known: whether an earlier block has shown which ranks there are.
        hang_timeout_s: silence of all ranks that counts as a hang.
        start_timeout_s: the same before the first step, in saves, and between two epochs.
        ends: what each rank has told of the block, once all have.
        partial: whether the script's own end has cut the block off.
    """

    plan: BlockPlan
    server: ControlServer
    state: StartState
    process: GuardedProcess
    run_dir: RunDir
    known: bool
    hang_timeout_s: float
    start_timeout_s: float
    ends: dict[int, Message] = field(default_factory=dict)
    partial: bool = False

    def run(self) -> Cause | None:
        """Wait for all ranks; what went wrong, or ``None``."""
        state = self.state
        state.heard_s = time.monotonic()
        log_from = self.run_dir.log.stat().st_size
        first_result: float | None = None
        while True:
            complete = self.server.wait(lambda: bool(state.failures) or self._all_in(), _POLL_S)
            if state.failures and "errno" in state.failures[0]:
                word = state.failures[0]
                raise OSError(word["errno"], word["text"], str(self.run_dir.path))
            if state.failures:
                return Cause(state.failures[0]["reason"], state.failures[0]["text"])
            now = time.monotonic()
            if complete:
                first_result = first_result or now
                world = next(iter(state.hellos.values()))["world"]
                known = self.known or len(state.hellos) >= world
                if (known or now - first_result > _SILENT_GRACE_S) and self._take_ends():
                    return self._check_partial()
            elif self.server.wait(lambda: any(state.left.values()), 0):
                # A rank fails, and is kept: the others cannot go on without it.
                self.server.wait(self._all_left, _LAST_WORDS_S)
                return self._ended(self._worst_code())
            elif (code := self.process.poll()) is not None:
                # What its ranks have said last can still be on its way.
                self.server.wait(lambda: self._lost() == len(state.hellos), _LAST_WORDS_S)
                if not self._all_in():
                    return self._ended(code)
            limit = self._patience_s()
            if now - state.heard_s > limit:
                return self._hung(limit, log_from)

    def _all_in(self) -> bool:
        state, k = self.state, self.plan.k
        return bool(state.hellos) and all((k, rank) in state.results for rank in state.hellos)

    def _take_ends(self) -> bool:
        """Take what the ranks have told of their block, unless one of them begins anew just now."""
        with self.server.locked():
            if self._all_in():
                self.ends = {rank: self.state.results[self.plan.k, rank] for rank in self.state.hellos}
        return bool(self.ends)

    def _patience_s(self) -> float:
        """Silence that is not yet a hang."""
        state = self.state
        with self.server.locked():
            living = {rank for rank, hello in state.hellos.items() if hello.get("pid") not in state.lost}
            paused = not living.isdisjoint(state.doing)
        if paused or not state.hellos:
            # A save, or whatever a script does between two epochs, may take as long as a start.
            return self.start_timeout_s
        return max(self.hang_timeout_s, _STEPS_OF_HANG * self.plan.step_s)

    def _lost(self) -> int:
        """How many ranks have ended; where all have, a script may yet train again (folds, stages)."""
        return sum(hello.get("pid") in self.state.lost for hello in self.state.hellos.values())

    def _ended(self, code: int | None) -> Cause:
        """The script, or one of its ranks, has ended in the middle of the block."""
        with self.server.locked():
            return causes.ended(self.state, self.plan.k, code, causes.output_of(self.run_dir.log))

    def _hung(self, limit: float, log_from: int) -> Cause:
        """Nobody has said anything for longer than the limit."""
        log, ranks = self.run_dir.log, len(self.state.hellos)
        if not ranks:
            output = shown_output(causes.output_of(log))
            return Cause("hang", f"no training step within {limit:.0f} s of its start", output)
        with self.server.locked():
            apart = causes.diverged(self.state, self.plan.k, causes.output_of(log))
            lost = self._lost()
        if apart is not None:
            return apart
        if lost == ranks:
            return Cause("script_ended", "its ranks have ended, and the command goes on without training")
        if lost:
            return self._ended(None)
        cause = causes.hung(self.state, self.run_dir.path, causes.output_of(log, log_from))
        return replace(cause, text=f"no sign of life for {limit:.0f} s: {cause.text}")

    def _check_partial(self) -> Cause | None:
        """A block that the script's end has cut off counts only where the script ended well."""
        self.partial = any(end["partial"] for end in self.ends.values())
        if not self.partial:
            return None
        code = self._exit_code()
        return None if code in (0, None) else self._ended(code)

    def _all_left(self) -> bool:
        """Whether all ranks have come to their own end, where the last one is kept."""
        return self.state.left.keys() >= self.state.hellos.keys()

    def _worst_code(self) -> int:
        with self.server.locked():
            return max(self.state.left.values(), default=0, key=abs)

    def _exit_code(self) -> int | None:
        """The command's exit code, once its ranks have ended; ``None`` where it goes on, or trains anew."""
        if self.server.wait(self._all_left, _LAST_WORDS_S):
            return self._worst_code()
        first = list(map(id, self.state.hellos.values()))
        deadline = time.monotonic() + _EXIT_GRACE_S
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            if self.server.wait(lambda: list(map(id, self.state.hellos.values())) != first, _POLL_S):
                break
        return code
