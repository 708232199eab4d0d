"""What a training's steps go to, on a terminal: its class, the budgets of ranks and job, its workers."""

from __future__ import annotations

from typing import Any

from feedtune.analysis.budget import FLAGS
from feedtune.inside.pace import ALL_OF
from shard_tools.units import format_seconds

_PARTS = {
    "data_wait_s": "data", "h2d_s": "copy", "compute_s": "compute", "communication_s": "comm",
    "straggle_s": "straggle", "stall_s": "gc", "rest_s": "rest",
}  # fmt: skip
_UNLIKE = 0.1  # what starvation and the steps' own share of waiting differ by where something is wrong
_MOST = 0.95  # of the steps; where fewer were taken down in full, it is told


def finding_lines(training: dict[str, Any]) -> list[str]:
    """The class, the evidence for it, and what the training would gain at most."""
    found = training["finding"]
    where = "" if found["rank"] is None else f", rank {found['rank']}"
    said = list(found["evidence"])
    if found["gain"] is not None:
        said.append(f"The steps themselves could be up to {found['gain']:.2f}x as fast.")
    return [f"{found['class'].upper()}{where}", " ".join(said)]


def budget_table(training: dict[str, Any]) -> Any:
    """One row a rank, the job's, and its shares; empty cells were not seen."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("step", *_PARTS.values()):
        table.add_column(name, justify="right")
    ranks = training["ranks"]
    rows = [(f"rank {rank['rank']}", rank["budget"]) for rank in ranks]
    rows += [("job", training["job"]["budget"])] if len(ranks) > 1 else []
    for name, budget in rows:
        table.add_row(name, _time(budget["step_s"]), *(_time(budget["parts"][part]) for part in _PARTS))
    job = training["job"]["budget"]
    halves = (job["half_widths"][part] for part in _PARTS)
    table.add_row("±", "", *(_time(half) for half in halves), style="dim")
    shares = (job["shares"][part.removesuffix("_s")] for part in _PARTS)
    table.add_row("share", "", *("" if share is None else f"{share:.1%}" for share in shares))
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def notes(training: dict[str, Any]) -> list[str]:
    """What limits the figures, and what taking them has cost."""
    ranks, job = training["ranks"], training["job"]
    found = [FLAGS[flag] for flag in job["budget"]["flags"]]
    found += dict.fromkeys(rank["ddp"]["why"] for rank in ranks if rank["ddp"]["why"])
    found += dict.fromkeys(rank["clock_note"] for rank in ranks if rank["clock_note"])
    copies = next((rank["copies"] for rank in ranks if rank["copies"] and rank["copies"]["bytes"]), None)
    if copies is not None:
        kind = "pinned" if copies["pinned"] else "pageable"
        how = "could not be timed" if copies["seconds"] is None else "is its bytes at a rate timed once"
        found.append(f"copies to the GPU were not seen; that of a {kind} batch {how}")
    if job["data_at_least_s"]:
        found.append(f"every rank waits for data at least {format_seconds(job['data_at_least_s'])} a step")
    dropped = sum(rank["dropped"] or 0 for rank in ranks)
    if dropped:
        found.append(f"{dropped} steps could not be recorded")
    cost = max(rank["cost_s"] / rank["steps"] for rank in ranks)
    if cost:
        least = min(ranks, key=lambda rank: rank["detailed"] / rank["steps"])
        if least["detailed"] < _MOST * least["steps"]:
            of = f"the parts are those of {least['detailed']:,} of {least['steps']:,} steps"
            found.append(
                f"{of}, taken down in stretches to stay cheap, which stand for the steps around them; what "
                "that costs is in them, and not in the other steps"
                if least["steps"] > ALL_OF
                else f"{of}: what trains is known once its optimizer has stepped twice"
            )
        found.append(f"taking this down cost {format_seconds(cost)} a step")
    return [f"note: {text}" for text in found]


def worker_lines(training: dict[str, Any]) -> list[str]:
    """What a batch takes in the workers of each rank, and what was read."""
    found = []
    for rank in training["ranks"]:
        seen = rank["workers"]
        if seen is None:
            continue
        one = seen["all"]
        times = {
            name: format_seconds(one[f"{name}_s"])
            for name in ("fetch", "transform", "collate", "cpu", "wait")
        }
        line = (
            f"workers of rank {rank['rank']}: {times['fetch']} a batch (transform {times['transform']}, "
            f"collate {times['collate']}); {times['cpu']} CPU, {times['wait']} waiting"
        )
        cold = [seen[half]["cold_share"] for half in ("first_half", "last_half")]
        if any(share is not None and share >= 0.01 for share in cold):
            line += "; from disk " + ", then ".join(
                "?" if share is None else f"{share:.0%}" for share in cold
            )
        queue = rank["queue"]
        if queue is not None:
            line += f"; {queue['mean']:.1f} batches ready, none in {queue['empty_share']:.0%} of the steps"
        if seen["slow"] is not None:
            line += f"; worker {seen['slow']} takes {seen['slow_ratio']:.1f}x as long as the others"
        found.append(line)
    return found


def _unlike(document: dict[str, Any], starvation: float) -> str:
    """What it means that starvation is not the share of the steps that waits for data."""
    shares = [training["job"]["budget"]["shares"]["data_wait"] for training in document["trainings"]]
    if not shares or shares[0] is None or abs(starvation - shares[0]) < _UNLIKE:
        return ""
    why = "other work on this machine meanwhile"
    if starvation > shares[0]:
        why = f"copies to the GPU that are faster when pinned, workers that take CPU time, or {why}"
    return f"; the steps wait {shares[0]:.1%} for data: the difference may be {why}"


def ceiling_lines(document: dict[str, Any]) -> list[str]:
    """The training against free data."""
    found = document["ceiling"]
    if found is None:
        return []
    if not found["ceiling"] or not found["rate"]:
        return ["no ceiling could be measured"]
    kinds = [f"{kind} {found[kind]:.2f}" for kind in ("pinned", "pageable") if found[kind]]
    starved = max(found["starvation"], 0)
    told = f"accelerator utilization {found['au']:.1%}, starvation {starved:.1%} of its steps"
    if found["au"] > 1:
        told = f"{found['au'] - 1:.1%} above it, which is noise: no starvation is to be seen"
    else:
        told += _unlike(document, found["starvation"])
    lines = [
        f"ceiling (data is free) {found['ceiling']:.2f} steps/s ({', '.join(kinds)}); as it is "
        f"{found['rate']:.2f}: {told}"
    ]
    if found["sync"]:
        sync = found["sync"]
        lines.append(
            f"gradient synchronization by difference: {format_seconds(max(sync['exposed_s'], 0))} of a "
            f"step of {format_seconds(sync['step_s'])} ({sync['pairs']} pairs of blocks of cached batches)"
        )
    return lines
