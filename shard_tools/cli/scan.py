"""``shard-tools scan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scan(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder to look through.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Look through a folder: counts, sizes, classes, and names that other tools lose.

    Links are followed. What cannot be packed is listed, not skipped.

    Example: shard-tools scan /data/photos
    """
    from dataclasses import asdict

    from shard_tools.console import print_json
    from shard_tools.scan import report_on, walk

    report = report_on(walk(source))
    if as_json:
        print_json({"schema": "shard_tools.scan/1", **asdict(report)})
        return
    from shard_tools.cli.show import line, listing, quoted, table
    from shard_tools.units import format_bytes, format_count

    def size(value: int | None) -> str:
        return "-" if value is None else format_bytes(value)

    few = list(report.extensions.items())[:8]
    classes = list(report.classes.items())
    table(
        [
            ("files", format_count(report.files)),
            ("bytes", format_bytes(report.bytes)),
            ("smallest, median, largest", ", ".join(
                map(size, (report.min_bytes, report.median_bytes, report.max_bytes)))),
            ("extensions", ", ".join(f"{name or '(none)'} {count:,}" for name, count in few) or "-"),
            ("classes", f"{len(classes):,}" + (f" ({min(n for _, n in classes):,} to "
                f"{max(n for _, n in classes):,} files each)" if classes else "")),
            ("in no class", format_count(report.unlabelled)),
            ("links to files, packed as files", format_count(len(report.links))),
        ]
    )  # fmt: skip
    listing("names that differ in case only", [" = ".join(group) for group in report.case_collisions])
    listing("hidden", report.hidden)
    listing("without an extension", report.without_extension)
    listing("more than one dot", report.dotted)
    listing("names that are no UTF-8", report.not_utf8)
    listing("paths over 100 bytes", report.long_names)
    listing("links to folders, followed", report.linked_folders)
    listing("empty folders", report.empty_folders)
    listing("NOT PACKED: links to a folder above", report.link_cycles)
    listing("NOT PACKED: links to nothing", report.broken_links)
    listing("NOT PACKED: pipes, sockets, devices", report.special)
    listing("UNREADABLE, pack will refuse", report.unreadable)
    if report.files:
        line(f"next: shard-tools pack {quoted(source)} DST --format wds")
