"""Figures of a walk: sizes, extensions, classes, and names that other tools trip over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shard_tools.records import Entry, label_of
from shard_tools.scan.walk import Walk

USTAR_NAME_BYTES = 100


@dataclass(frozen=True)
class ScanReport:
    """What a scan found; paths are relative to the root, sizes are bytes.

    Attributes:
        root: the scanned folder.
        files: how many files a pack would hold.
        bytes: their bytes in all.
        min_bytes: smallest size; None without files.
        median_bytes: middle size (lower of the two middle ones); None without files.
        max_bytes: largest size; None without files.
        empty_files: files of 0 bytes.
        extensions: last extension, lower case, -> count; ``""`` for files without one.
        classes: class name -> count.
        unlabelled: files that lie in no folder.
        case_collisions: groups of paths that are the same name once case is folded.
        hidden: paths with a part that begins with a dot.
        without_extension: file names without an extension.
        dotted: file names with more than one dot, where readers that split at the first dot lose files.
        not_utf8: paths whose bytes are no UTF-8.
        long_names: paths of more than 100 bytes, the name field of a USTAR header.
        links: links to files, packed as the files they point to.
        linked_folders: links to folders, followed.
        link_cycles: links to a folder above themselves, not followed.
        broken_links: links to nothing.
        special: pipes, sockets, devices.
        unreadable: what the user may not read.
        empty_folders: folders with nothing in them.
    """

    root: str
    files: int
    bytes: int
    min_bytes: int | None
    median_bytes: int | None
    max_bytes: int | None
    empty_files: int
    extensions: dict[str, int]
    classes: dict[str, int]
    unlabelled: int
    case_collisions: list[list[str]]
    hidden: list[str]
    without_extension: list[str]
    dotted: list[str]
    not_utf8: list[str]
    long_names: list[str]
    links: list[str]
    linked_folders: list[str]
    link_cycles: list[str]
    broken_links: list[str]
    special: list[str]
    unreadable: list[str]
    empty_folders: list[str]


def report_on(found: Walk) -> ScanReport:
    """Compute the figures of a walk."""
    sizes = sorted(entry.size for entry in found.files)
    labels = Counter(label_of(entry.path) for entry in found.files)
    unlabelled = labels.pop(None, 0)
    paths = [entry.path for entry in found.files]
    return ScanReport(
        root=str(found.root),
        files=len(sizes),
        bytes=sum(sizes),
        min_bytes=sizes[0] if sizes else None,
        median_bytes=sizes[(len(sizes) - 1) // 2] if sizes else None,
        max_bytes=sizes[-1] if sizes else None,
        empty_files=sizes.count(0),
        extensions=_extensions(found.files),
        classes={str(name): labels[name] for name in sorted(filter(None, labels))},
        unlabelled=unlabelled,
        case_collisions=case_collisions(paths),
        hidden=[path for path in paths if path.startswith(".") or "/." in path],
        without_extension=[path for path in paths if not _extension(path)],
        dotted=[path for path in paths if path.rpartition("/")[2].lstrip(".").count(".") > 1],
        not_utf8=[path for path in paths if not _is_utf8(path)],
        long_names=[path for path in paths if _bytes_of(path) > USTAR_NAME_BYTES],
        links=found.links,
        linked_folders=found.linked_folders,
        link_cycles=found.link_cycles,
        broken_links=found.broken_links,
        special=found.special,
        unreadable=found.unreadable,
        empty_folders=found.empty_folders,
    )


def case_collisions(paths: Iterable[str]) -> list[list[str]]:
    """Groups of paths that differ in case only: ``["a.JPG", "a.jpg"]``."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.casefold(), []).append(path)
    return [group for group in groups.values() if len(group) > 1]


def _extension(path: str) -> str:
    name = path.rpartition("/")[2].lstrip(".")
    return name.rpartition(".")[2].lower() if "." in name else ""


def _extensions(files: list[Entry]) -> dict[str, int]:
    counts = Counter(_extension(entry.path) for entry in files)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _is_utf8(path: str) -> bool:
    return path.isascii() or not any("\ud800" <= char <= "\udfff" for char in path)


def _bytes_of(path: str) -> int:
    return len(path) if path.isascii() else len(path.encode("utf-8", "surrogateescape"))
