"""A ``feedtune.run/1`` document on a terminal."""

from __future__ import annotations

from typing import Any

from feedtune.analysis.steps import PAUSES
from feedtune.report.budget import budget_table, ceiling_lines, finding_lines, notes, worker_lines
from shard_tools.units import format_count, format_seconds


def print_run(document: dict[str, Any], to_stderr: bool = False) -> None:
    """Print what each rank and the job spent their time on, and what that says.

    Args:
        document: the result.
        to_stderr: leave stdout to the command whose result this is.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, stderr=to_stderr)
    console.print()
    if document["note"]:
        console.print(escape(document["note"]), style="bold", soft_wrap=True)
    for training in document["trainings"]:
        if len(document["trainings"]) > 1:
            console.print(f"training {training['number']}", style="bold")
        console.print(escape(_loader(training)), soft_wrap=True)
        headline, evidence = finding_lines(training)
        console.print(f"[bold]{escape(headline)}[/]  {escape(evidence)}")
        console.print()
        console.print(budget_table(training))
        console.print(_table(training))
        lines = [*_apart(training["job"]), *_others(training), *worker_lines(training)]
        lines += [*_guessed(training["loader"]), *notes(training)]
        for line in lines:
            console.print(escape(line), soft_wrap=True)
        console.print()
    for line in ceiling_lines(document):
        console.print(escape(line), soft_wrap=True)
    if document["reading"]:
        console.print(escape(document["reading"]))
    console.print(
        f"{document['seconds']:.0f} s, exit code {document['exit_code']}. "
        f"Again: feedtune report {escape(document['run'])}",
        style="dim",
        soft_wrap=True,
    )


def _loader(training: dict[str, Any]) -> str:
    loader = training["loader"]
    return (
        f"{loader['dataset']} at {loader['site']}, num_workers={loader['num_workers']}, "
        f"batch size {loader['batch_size']}"
    )


def _table(training: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("steps", "measured", "steps/s", "waited", "median", "p95", "max"):
        table.add_column(name, justify="right")
    rows = [(f"rank {rank['rank']}", rank) for rank in training["ranks"]]
    rows += [("job", training["job"])] if len(rows) > 1 else []
    for name, figures in rows:
        waits = figures["waits"]
        times = (
            [] if waits is None else [format_seconds(waits[key]) for key in ("median_s", "p95_s", "max_s")]
        )
        table.add_row(
            name,
            format_count(figures["steps"]),
            format_count(figures["measured_steps"]),
            "" if figures["rate"] is None else f"{figures['rate']:.2f}",
            "" if waits is None else f"{waits['share']:.1%}",
            *times,
        )
    return table


def _apart(job: dict[str, Any]) -> list[str]:
    """What is not in the rates."""
    parts = [("first batches", job["first"])]
    parts += [(PAUSES[tag], counted) for tag, counted in job["excluded"].items()]
    said = ", ".join(
        f"{name} {format_seconds(counted['seconds'])} ({counted['count']}x)"
        for name, counted in parts
        if counted["count"]
    )
    found = [f"apart: {said}"] if said else []
    if not job["measured_steps"]:
        found.append("no rate: pauses leave no two steps in a row")
    elif not job["settled"]:
        found.append(
            "too few steps between pauses for the workers' queue to turn over: full queues flatter the rate"
        )
    return found


def _guessed(loader: dict[str, Any]) -> list[str]:
    """That nothing but its batches tells that it is the training loader."""
    if loader.get("trained", True):
        return []
    return [
        "note: no torch optimizer was seen to step: the loader with most batches is taken for the training's"
    ]


def _others(training: dict[str, Any]) -> list[str]:
    """Other loaders, with what each rank waited for them."""
    found = []
    ranks = [rank for rank in training["ranks"] if rank["others"]]
    for number, other in enumerate(ranks[0]["others"] if ranks else ()):
        same = [
            (rank["rank"], one)
            for rank in ranks
            for one in rank["others"][number : number + 1]
            if (one["site"], one["dataset"]) == (other["site"], other["dataset"])
        ]
        several = len(training["ranks"]) > 1
        waits = ", ".join(
            f"{format_seconds(one['wait_s'])}{f' (rank {rank})' if several else ''}" for rank, one in same
        )
        needed = [one["supply_s"] for _, one in same if one["supply_s"]]
        made = f", its workers need {format_seconds(max(needed))} for a batch" if needed else ""
        kind = "trains too: waits for it are in data, not in waited" if other["trains"] else "no training"
        found.append(
            f"other loader ({kind}): {other['dataset']} at {other['site']}, "
            f"{format_count(other['batches'])} batches in {format_count(other['iterations'])} iterations, "
            f"waited {waits}, for first batches {format_seconds(other['first_s'])}{made}"
        )
        found += [f"  {one['advice']}" for _, one in same if one.get("advice")][:1]
    return found
