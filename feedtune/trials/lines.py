"""One line for a person on each thing that happens in a tuning."""

from __future__ import annotations

from feedtune.analysis.failures import last_line
from feedtune.records import BlockResult
from feedtune.trials.server import Message


def loader_line(hello: Message) -> str:
    """Which loader is tuned."""
    loader = hello["loader"]
    length = f", {loader['epoch_steps']} batches an epoch" if loader["epoch_steps"] else ""
    ranks = f"{hello['world']} ranks" if hello["world"] > 1 else "1 process"
    chosen = "" if loader["trained"] else " (no optimizer step was seen: it is the loader with most batches)"
    return (
        f"{loader['dataset']} at {loader['site']}, num_workers={loader['num_workers']}, "
        f"batch size {loader['batch_size']}{length}, {ranks}{chosen}"
    )


def block_line(block: BlockResult) -> str:
    """What a block has measured, or why it has not."""
    what = f"{block.kind:<9} {block.settings.arguments():<58}"
    if block.kind == "ceiling":
        kind = "pinned" if block.settings.pin_memory else "pageable"
        what = f"{block.kind:<9} {'cached batches, ' + kind:<58}"
    if not block.measured:
        return f"{what} {block.state}: {block.reason} {last_line(block.detail)}"
    starved = f"  starved {max(block.starvation, 0):6.1%}" if block.starvation is not None else ""
    unstable = f"  unstable ({block.reason})" if block.state == "unstable" else ""
    return f"{what} {block.rate:9.2f} steps/s{starved}{unstable}"
