"""What ranks have recorded, and what is made of it: the trainings of a ``feedtune.run/1`` document."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feedtune.analysis.align import line_up
from feedtune.analysis.apart import advise, tell_pauses
from feedtune.analysis.budget import measure_budget
from feedtune.analysis.classes import classify, tell_other
from feedtune.analysis.steps import StepSeen, choose_steps, measure_steps
from feedtune.analysis.workers import Line, WorkersSeen, measure_queue, measure_workers
from feedtune.inside.linefiles import LineFile

SCHEMA = "feedtune.run/1"
_RANK_FILE = re.compile(r"rank(\d+)(?:\.(\d+))?\.json")
_MOST_READ = 64 << 20  # bytes of records, over all ranks
# Of a rank's description, what stands in the document as it is.
_TOLD = ("pid", "host", "cuda", "own_thread", "missed", "ddp", "clock", "clock_note", "cost_s", "copies")


@dataclass(frozen=True)
class RankSeen:
    """What one rank has written: who it is, its steps, and lines on its workers."""

    about: Mapping[str, Any]
    records: Sequence[StepSeen]
    workers: Sequence[Line] = field(default_factory=tuple)

    @property
    def loop_waits(self) -> bool:
        """Whether the wait for a batch was that of the training itself, and not of a prefetcher."""
        return bool(self.about["own_thread"]) and self.about["clock_note"] is None

    @property
    def syncs_seen(self) -> bool:
        """Whether all points where it waits for other ranks were seen."""
        return bool(self.about["ddp"]["models"]) and self.about["ddp"]["why"] is None

    @property
    def trained_too(self) -> list[Mapping[str, Any]]:
        """What is known of other loaders that its steps took batches from."""
        return [other for other in self.about.get("others") or () if other["trains"]]

    def supply_s(self, own: WorkersSeen | None) -> float | None:
        """Seconds that workers need for what a step consumes: those of the slowest of its loaders.

        Args:
            own: what the workers of the recorded loader did.
        """
        steps = self.about["missed"] + self.records[-1].step + 1
        found = [
            other["supply_s"] * other["batches"] / steps for other in self.trained_too if other["supply_s"]
        ]
        return max([*found, *([] if own is None else [own.supply_s])], default=None)

    def with_copies(self) -> Sequence[StepSeen]:
        """The steps; where copies of batches to the GPU were not seen, with what they take by their bytes."""
        copies = self.about["copies"]
        if copies is None or copies["seconds"] is None:
            return self.records
        each = {"h": copies["seconds"]}
        return [
            one if one.parts is None else one._replace(parts={**each, **one.parts}) for one in self.records
        ]


def read_trainings(folder: Path) -> dict[int, dict[int, RankSeen]]:
    """What ranks have written: ``{training: {rank: what it wrote}}``.

    A rank that was started anew, or a second training in a row, counts as training 2. Of a run that was too
    long for memory, the same stretches of all ranks are read.
    """
    size, one_in = sum(path.stat().st_size for path in folder.glob("steps.rank*.jsonl")), 1
    while size > one_in * _MOST_READ:
        one_in *= 2
    found: dict[int, dict[int, RankSeen]] = {}
    for path in sorted(folder.glob("rank*.json")):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None:
            continue
        rank, part = int(match[1]), int(match[2] or 1)
        records = read_steps(path.with_name(f"steps.{path.name}l"), one_in)
        if records:
            about = json.loads(path.read_text(encoding="utf-8"))
            workers = _read_lines(path.with_name(f"workers.{path.name}l"))
            found.setdefault(part, {})[rank] = RankSeen(about, records, workers)
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


def _read_lines(path: Path) -> list[Line]:
    found = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def training(number: int, ranks: Mapping[int, RankSeen]) -> dict[str, Any]:
    """One training of the document: its loader, each rank, the job, and what it loses time to."""
    ranks = dict(sorted(ranks.items()))
    about = ranks[min(ranks)].about
    loader, world = about["loader"], about["world"]
    shape = loader["num_workers"], loader["prefetch_factor"]
    records = {rank: seen.with_copies() for rank, seen in ranks.items()}
    loop_waits = all(seen.loop_waits for seen in ranks.values())
    timeline = line_up(records, *shape, world, loop_waits, all(seen.syncs_seen for seen in ranks.values()))
    budget = measure_budget(timeline)
    workers = {rank: measure_workers(seen.workers) for rank, seen in ranks.items()}
    needed = {rank: seen.supply_s(workers[rank]) for rank, seen in ranks.items()}
    supply = {rank: seconds for rank, seconds in needed.items() if seconds is not None}
    queues = {rank: measure_queue(seen.records) for rank, seen in ranks.items()}
    empty = {rank: queue.empty_share for rank, queue in queues.items() if queue is not None}
    chosen = choose_steps(records, *shape)
    job = measure_steps(chosen, records, loop_waits)
    figures = {
        rank: measure_steps(chosen, {rank: records[rank]}, seen.loop_waits) for rank, seen in ranks.items()
    }
    others = {rank: seen.trained_too for rank, seen in ranks.items()}
    kind = classify(timeline, budget, supply, empty)
    finding = kind.as_dict()
    finding["evidence"] += [*tell_other(kind, timeline, others), *tell_pauses(job, figures)]
    return {
        "number": number,
        "world_size": world,
        "loader": loader,
        "job": {
            **job.as_dict(),
            "budget": budget.job.as_dict(),
            "left_out": budget.left_out,
            "data_at_least_s": budget.data_at_least_s,
        },
        "finding": finding,
        "ranks": [
            {
                **{name: seen.about[name] for name in _TOLD},
                "rank": rank,
                "detailed": sum(one.parts is not None for one in seen.records),
                "dropped": seen.about.get("dropped"),
                "others": _others(seen, figures[rank].seconds),
                **figures[rank].as_dict(),
                "budget": budget.ranks[rank].as_dict(),
                "queue": None if (queue := queues[rank]) is None else queue.as_dict(),
                "pinned": {"batches": seen.about["pin_s"][0], "seconds": seen.about["pin_s"][1]},
                "workers": None if (found := workers[rank]) is None else found.as_dict(),
            }
            for rank, seen in ranks.items()
        ],
    }


def _others(seen: RankSeen, seconds: float) -> list[dict[str, Any]] | None:
    """Loaders besides the recorded one, each with advice; ``None``: not known."""
    others = seen.about.get("others")
    return None if others is None else [{**other, "advice": advise(other, seconds)} for other in others]


_REMEDIES = {
    "imbalance/compute": "What one rank does alone (logs, metrics) belongs in a thread, or in fewer steps; "
    "if it does nothing alone, look at its GPU's clocks and its cores.",
    "imbalance/lengths": "Batches of like sizes: bucket samples by length, alike on all ranks.",
    "communication": "Fewer exchanges: no_sync() while gradients are added up. Smaller ones: "
    "bf16_compress_hook of torch.distributed.algorithms.ddp_comm_hooks.",
    "sched/gc": "Less garbage collection: gc.freeze() once all is set up, or gc.disable() and gc.collect() "
    "every so many steps.",
}


def reading(trainings: Sequence[Mapping[str, Any]], against_free_data: bool = False) -> str:
    """What the parts of a step are, and the next command."""
    if not trainings:
        return ""
    found = ["data: what steps would be shorter if no rank had waited for its batch."]
    if any(rank["clock"] == "cuda" for t in trainings for rank in t["ranks"]):
        found.append(
            "On a GPU that is time in which it had nothing left to do; waits behind queued work are not."
        )
    if any(t["world_size"] > 1 for t in trainings):
        found.append(
            "comm: what even the last rank waits for the others; straggle: what the last rank works longer."
        )
    classes = {t["finding"]["class"] for t in trainings}
    if classes & {"data", "imbalance/input", "mixed"}:
        found.append("Better loader settings: feedtune tune -- CMD.")
    mixed = [t["finding"]["losses"][:2] for t in trainings if t["finding"]["class"] == "mixed"]
    leading = {one["kind"] for losses in mixed for one in losses}
    found += [said for kind, said in _REMEDIES.items() if kind in classes | leading]
    if not against_free_data and classes & {"data", "imbalance/input", "mixed", "healthy", "unknown"}:
        found.append("Against its speed when data is free: feedtune run --ceiling -- CMD.")
    return " ".join(found)
