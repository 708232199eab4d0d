"""``feedtune tune``: baseline, ceiling, candidates and confirmation in one live run of the script."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from feedtune.analysis.climb import Space, default_max_workers, make_space
from feedtune.analysis.limits import Needs, broken_limit
from feedtune.analysis.policy import POLICY
from feedtune.analysis.stats import paired_gain, pick_winner, upper_bound
from feedtune.machine import read_machine
from feedtune.records import BlockResult
from feedtune.rundir import redact
from feedtune.settings import START_METHODS, LoaderSettings
from feedtune.trials.live import LiveRun, in_trial
from feedtune.trials.options import TuneOptions
from feedtune.trials.server import Message
from feedtune.trials.verdict import Facts, document

_UNKNOWN = 1 << 60  # a limit that the machine does not tell


def tune(options: TuneOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Tune a training; the document of ``result.json``. Errors are those of ``in_trial``."""
    return in_trial(Tuning, "feedtune tune", options, tell)


class Tuning(LiveRun):
    """One tuning, from the first start of the script to the answer."""

    def document(self) -> dict[str, Any]:
        """The answer, and how it was found."""
        tier, notes = self.session.guard
        facts = Facts(
            machine=self.machine.as_dict(),
            command=redact(self.options.command),
            run=str(self.run_dir.path),
            starts=self.session.starts,
            seconds=self.seconds,
            guard=tier,
            guard_notes=notes,
            trackers=self.trackers,
            cloned=self.session.cloned,
        )
        return document(self.answer, self.trials.blocks, facts)

    def steps(self) -> None:
        """Baseline, ceiling, search, confirmation."""
        hello = self.begin()
        own = self.answer.own
        assert own is not None
        baseline = self.trials.baseline(own)
        self.trials.ceilings(bool(hello["loader"]["cuda"]), baseline)
        space = self._space(own, hello["loader"])
        self.answer.space = space
        starved = self.trials.starvation(baseline)
        if starved is not None and starved < POLICY.gpu_bound and not space.single:
            return
        if space.single and self.answer.frozen:
            return
        self._search(space, own, hello)
        self._confirm(own)

    def _space(self, own: LoaderSettings, loader: Mapping[str, Any]) -> Space:
        """What may be searched; what could change what is learned only where the user allows it."""
        cores = max(1, int(self.machine.cores // self.trials.world()))
        most, options = self.options.max_workers, self.options
        frozen = bool(loader["iterable"]) and not options.allow_semantic
        self.answer.frozen = frozen and "num_workers" not in options.fixed
        default = own.multiprocessing_context or loader["start_method"]
        return make_space(
            own,
            cuda=bool(loader["cuda"]),
            cores_per_rank=cores,
            max_workers=default_max_workers(cores) if most is None else most,
            fixed=options.fixed,
            same_workers=frozen,
            any_order=options.allow_semantic,
            start_methods=[m for m in START_METHODS if m != default] if self._may_spawn(loader) else (),
        )

    def _may_spawn(self, loader: Mapping[str, Any]) -> bool:
        """Whether start methods may be tried: trials have their own starts, the script can be imported."""
        if self.options.isolate and not loader["spawns"]:
            self.answer.unguarded = True
        return self.options.isolate and bool(loader["spawns"])

    def _search(self, space: Space, own: LoaderSettings, hello: Message) -> None:
        from feedtune.search import Search

        whole = self.interrupts.whole  # Optuna's file lock does not survive a signal inside it
        with whole():
            search = Search(self.run_dir.journal, space, own)
        trials = self.options.trials + (not space.single)  # the user's own settings are no trial
        for _ in range(trials):
            with whole():
                settings = search.ask()
            if settings is None:
                return
            if self._time_is_up(settings):
                self.answer.cut_short = True
                with whole():
                    search.drop()
                return
            broken = broken_limit(settings, self._needs(hello))
            if broken:
                result = BlockResult(
                    -1, "candidate", settings, state="excluded", reason=broken[0], detail=broken[1]
                )
                self.trials.keep(result)
            else:
                self._isolate_if_shared()
                result = self.trials.run(
                    self.trials.plan("candidate", settings, stop_below=self._half_of_best())
                )
            with whole():
                search.tell(settings, result)
            starved = self.trials.starvation(result)
            if result.measured and starved is not None and starved < POLICY.gpu_bound and not space.single:
                self.answer.at_ceiling = settings == own
                return  # nothing is left to gain beyond this

    def _isolate_if_shared(self) -> None:
        """A fetch without workers has left files open here that workers forked later would share."""
        if self.session.shared_files and not self.session.isolate:
            self.session.isolate = True
            self.answer.isolated = sorted(self.session.shared_files)[0]
            self.tell(
                f"note: fetching without workers leaves {self.answer.isolated} open in the main process; "
                "trials run in starts of their own from now on (--isolate): no worker may share its position"
            )

    def _half_of_best(self) -> float:
        return max((b.rate or 0.0 for b in self.trials.candidates()), default=0.0) / 2

    def _time_is_up(self, settings: LoaderSettings) -> bool:
        """Whether the confirmation would no longer fit after another trial; one trial there has to be."""
        own = self.answer.own
        measured = self.trials.candidates()
        best = max(measured, key=lambda b: b.speed, default=None)
        elapsed = time.monotonic() - self.trials.begun
        if best is None or own is None or all(b.settings == own for b in measured):
            return elapsed > self.options.budget_s
        sides = (own, best.settings)
        longer = sum(self._confirm_seconds(s) - self.options.block_s for s in sides)
        pair = sum(map(self.trials.costs.of, sides)) + longer
        return elapsed + self.trials.costs.of(settings) + self.options.pairs * pair > self.options.budget_s

    def _needs(self, hello: Message) -> Needs:
        _, size, tensors = self.session.batch or (0, 0, 1)
        now = read_machine()
        return Needs(
            ranks=hello["world"],
            batch_bytes=size,
            tensors=tensors,
            worker_bytes=self.session.worker_bytes,
            ram_bytes=now.ram_available_bytes or _UNKNOWN,
            shm_bytes=now.shm_free_bytes or _UNKNOWN,
            nofile=hello["loader"]["nofile"],
            open_in_main=tuple(hello["loader"]["open_files"]),
            default_workers=hello["loader"]["num_workers"],
        )

    def _confirm(self, own: LoaderSettings) -> None:
        """Interleaved pairs A-B-B-A of the user's settings and the winner."""
        candidates = [b for b in self.trials.candidates() if b.kind == "candidate"]
        space = self.answer.space
        if space is not None and not space.single:
            # Against itself the baseline proves nothing; with every setting fixed it is the A/A test.
            candidates = [b for b in candidates if b.settings != own]
        winner = pick_winner(candidates)
        if winner is None:
            return
        alike = [b for b in self.trials.candidates() if b.settings == own and b.rereads == winner.rereads]
        slowest = min((b.speed for b in alike), default=0.0)
        if winner.settings != own and upper_bound(winner) < slowest:
            self.answer.beaten = True  # a confirmation could only confirm that it is slower
            return
        self.answer.winner = winner.settings
        blocks: dict[str, list[BlockResult]] = {"A": [], "B": []}
        sides = {"A": own, "B": winner.settings}
        target = {side: self._confirm_seconds(settings) for side, settings in sides.items()}
        for pair in range(self.options.pairs):
            for side in "AB" if pair % 2 == 0 else "BA":
                plan = self.trials.plan("confirm", sides[side], target_s=target[side])
                result = self.trials.run(plan)
                if not result.measured:  # one bad sample must not cost the answer
                    result = self.trials.run(plan)
                if not result.measured:
                    self.answer.note = f"the confirmation failed ({result.reason}): {result.detail}"
                    return
                blocks[side].append(result)
        self.answer.confirmed = blocks
        self.answer.gain = paired_gain(*([b.speed for b in blocks[side]] for side in "AB"))

    def _confirm_seconds(self, settings: LoaderSettings) -> float:
        """Measured seconds of a confirmation block: settings whose rate varies are measured longer."""
        spreads = [b.spread or 0.0 for b in self.trials.candidates() if b.settings == settings]
        noisy = max(spreads, default=0.0) >= POLICY.noisy
        return self.options.block_s * (POLICY.longer if noisy else 1.0)
