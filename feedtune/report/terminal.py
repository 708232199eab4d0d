"""Results on a terminal: what a person reads in ten seconds."""

from __future__ import annotations

from typing import Any


def print_tune(document: dict[str, Any]) -> None:
    """Print a ``feedtune.tune/1`` document: the answer, the three rates, the blocks, what to do."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    outcome = document["outcome"]
    style = {"gain": "bold green", "failed": "bold red"}.get(outcome, "bold")
    console.print()
    console.print(f"[{style}]{outcome.upper().replace('_', ' ')}[/]  {escape(document['verdict'])}")
    console.print()
    _rates(console, document)
    _blocks(console, document)
    for line in document["advice"]:
        console.print(f"- {escape(line)}")
    if document["gain"]:
        console.print("\nPaste this:")
        console.print(f"  {escape(document['snippet'])}", style="bold")
    console.print(
        f"\n{document['seconds']:.0f} s, starts of the script: {document['starts']}; "
        f"write guard: {document['guard']['tier']}. Again: feedtune report {escape(document['run'])}",
        style="dim",
        soft_wrap=True,
    )


def _rates(console: Any, document: dict[str, Any]) -> None:
    ceiling = document["ceiling"]["rate"]
    rows = [("ceiling (data is free)", ceiling, None)]
    for name, key in (("your settings", "baseline"), ("best settings", "best")):
        side = document[key]
        if side and side["rate"] and not (key == "best" and not document["gain"]):
            rows.append((name, side["rate_with_edges"], side["starvation"]))
    for name, rate, starved in rows:
        if rate is None:
            continue
        bar = "█" * min(16, max(1, round(16 * rate / ceiling))) if ceiling else ""
        text = "" if starved is None else f"starved {max(starved, 0):6.1%}"
        console.print(f"  {name:<23}{rate:>10.2f} steps/s  {text:<15} {bar}")
    console.print()


def print_demo(document: dict[str, Any]) -> None:
    """Print a ``feedtune.demo/1`` document."""
    from rich.console import Console

    print_tune(document["tune"])
    console = Console(highlight=False)
    small, full = document["resized"]["baseline"]["rate"], document["tune"]["best"]["rate"]
    console.print(
        f"\nThe same images resized to 256 pixels beforehand, with these settings: {small:.2f} instead of "
        f"{full:.2f} steps/s, {document['resized_ratio']:.2f}x (two runs one after the other, no interval)."
    )
    console.print(f"All of it in {document['seconds']:.0f} s.")


def _blocks(console: Any, document: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("block")
    for name in ("workers", "prefetch", "pin", "steps", "steps/s", "starved"):
        table.add_column(name, justify="right")
    others = any(_other_settings(block["settings"]) for block in document["blocks"])
    if others:
        table.add_column("other")
    table.add_column("state")
    for block in document["blocks"]:
        if block["kind"] == "confirm":
            continue  # they are in the interval
        settings = block["settings"]
        pin = "yes" if settings["pin_memory"] else "no"
        columns = [str(settings["num_workers"]), str(settings["prefetch_factor"] or "-"), pin]
        if block["kind"] == "ceiling":
            columns = ["cached", "-", pin]
        state = block["state"] if block["reason"] is None else f"{block['state']}: {block['reason']}"
        starved = block["starvation"]
        table.add_row(
            block["kind"],
            *columns,
            str(block["steps"] or ""),
            "" if block["rate"] is None else f"{block['rate']:.2f}",
            "" if starved is None else f"{max(starved, 0):.1%}",
            *([_other_settings(settings)] if others else []),
            escape("" if state == "ok" else state),
        )
    console.print(table)
    compared = document["compared"]
    if compared:
        pairs = sum(b["kind"] == "confirm" and b["rate"] is not None for b in document["blocks"]) // 2
        console.print(
            f"\nConfirmed in {pairs} interleaved pairs: {compared['ratio']:.3f}x "
            f"(95 % interval {compared['low']:.3f} to {compared['high']:.3f}){_edges_note(document)}\n"
        )


def _other_settings(settings: dict[str, Any]) -> str:
    """What few tunings vary."""
    order = [] if settings.get("in_order", True) else ["any order"]
    return ", ".join([*order, settings.get("multiprocessing_context") or ""]).strip(", ")


def _edges_note(document: dict[str, Any]) -> str:
    """Said where the compared speeds have worker starts in them and differ from the rates of the blocks."""
    confirmed = [b for b in document["blocks"] if b["kind"] == "confirm" and b["rate"]]
    paid = any((b["rate_with_edges"] or b["rate"]) < 0.99 * b["rate"] for b in confirmed)
    return ", over an epoch, worker starts included" if paid else ""
