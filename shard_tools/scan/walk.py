"""Walk a source folder. Links are followed; what is no readable file is listed, never skipped in silence."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from shard_tools.errors import BadInput
from shard_tools.records import Entry


@dataclass
class Walk:
    """What lies under a root.

    Attributes:
        root: the folder that was walked.
        files: readable regular files, links to such files included, sorted by path.
        links: paths of those files that are links.
        linked_folders: links to folders that were followed.
        link_cycles: links to a folder above themselves, not followed.
        broken_links: links to nothing.
        special: pipes, sockets and devices.
        unreadable: files and folders that the user may not read.
        empty_folders: folders with nothing in them.
    """

    root: Path
    files: list[Entry] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    linked_folders: list[str] = field(default_factory=list)
    link_cycles: list[str] = field(default_factory=list)
    broken_links: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)

    def not_packed(self) -> dict[str, list[str]]:
        """What lies in the folder and cannot become a sample, by kind."""
        return {
            "broken_links": self.broken_links,
            "link_cycles": self.link_cycles,
            "special": self.special,
        }


def walk(root: Path) -> Walk:
    """Find all files under a folder, in the order of their paths.

    Raises:
        BadInput: there is no such folder, or it may not be read.
    """
    if not root.exists():
        raise BadInput(f"there is no folder {root}", "check the path")
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder", "name the folder that holds the files")
    found = Walk(root)
    status = root.stat()
    # (path with trailing slash relative to the root, device and inode of it and of all folders above it)
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [
        ("", frozenset([(status.st_dev, status.st_ino)])),
    ]
    while pending:
        folder, above = pending.pop()
        _walk_folder(found, folder, above, pending)
    found.files.sort()
    for names in (found.links, found.linked_folders, found.link_cycles, found.broken_links, found.special):
        names.sort()
    found.unreadable.sort()
    return found


def _walk_folder(
    found: Walk,
    folder: str,
    above: frozenset[tuple[int, int]],
    pending: list[tuple[str, frozenset[tuple[int, int]]]],
) -> None:
    empty = True
    try:
        with os.scandir(os.path.join(found.root, folder)) as entries:
            for entry in entries:
                empty = False
                path = folder + entry.name
                try:
                    status = entry.stat()
                except PermissionError:
                    found.unreadable.append(path)
                    continue
                except OSError:  # a link to nothing, or in a circle of links
                    found.broken_links.append(path)
                    continue
                if stat.S_ISREG(status.st_mode):
                    _add_file(found, entry, path, status)
                elif stat.S_ISDIR(status.st_mode):
                    _add_folder(found, entry, path, status, above, pending)
                else:
                    found.special.append(path)
    except PermissionError:
        found.unreadable.append(folder or str(found.root))
        return
    if empty:
        found.empty_folders.append(folder)


def _add_file(found: Walk, entry: os.DirEntry[str], path: str, status: os.stat_result) -> None:
    if not os.access(entry.path, os.R_OK):
        found.unreadable.append(path)
        return
    if entry.is_symlink():
        found.links.append(path)
    found.files.append(Entry(path, status.st_size, status.st_mtime_ns))


def _add_folder(
    found: Walk,
    entry: os.DirEntry[str],
    path: str,
    status: os.stat_result,
    above: frozenset[tuple[int, int]],
    pending: list[tuple[str, frozenset[tuple[int, int]]]],
) -> None:
    identity = (status.st_dev, status.st_ino)
    if entry.is_symlink():
        if identity in above:
            found.link_cycles.append(path)
            return
        found.linked_folders.append(path)
    pending.append((path + "/", above | {identity}))
