"""Which mounts a process sees, from the text of /proc/self/mountinfo. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

# File systems that are interfaces of the kernel, not places where anybody's data lies.
PSEUDO = frozenset((
    "autofs", "bpf", "binfmt_misc", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs",
    "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs",
    "selinuxfs", "sysfs", "tracefs",
))  # fmt: skip


@dataclass(frozen=True)
class Mount:
    """One visible mount: where it is, of which type, and whether anything can be written there."""

    point: str
    fstype: str
    read_only: bool


@dataclass(frozen=True)
class _Row:
    ident: str
    parent: str
    mount: Mount


def parse_mountinfo(text: str) -> list[Mount]:
    r"""The mounts that can be seen, parents before children.

    A mount over another one, or over a folder that holds others, hides them.

    >>> row = "29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    >>> row += r"31 29 0:26 / /mnt/a\040b ro,nosuid - tmpfs tmpfs rw" + "\n"
    >>> [(m.point, m.fstype, m.read_only) for m in parse_mountinfo(row)]
    [('/', 'ext4', False), ('/mnt/a b', 'tmpfs', True)]
    """
    rows = [_row(line) for line in text.splitlines() if line.strip()]
    by_ident = {row.ident: row for row in rows}
    siblings: dict[str, list[_Row]] = {}
    for row in rows:
        siblings.setdefault(row.parent, []).append(row)

    def covered(row: _Row, seen: int = 0) -> bool:
        others = (other.mount.point for other in siblings[row.parent] if other is not row)
        if any(below(row.mount.point, point) for point in others):
            return True
        parent = by_ident.get(row.parent)
        return parent is not None and parent is not row and seen < 64 and covered(parent, seen + 1)

    def stacked(row: _Row) -> bool:
        return any(
            over.mount.point == row.mount.point for over in siblings.get(row.ident, ()) if over is not row
        )

    seen = [row.mount for row in rows if not covered(row) and not stacked(row)]
    return sorted(seen, key=lambda mount: (depth(mount.point), mount.point))


def _row(line: str) -> _Row:
    left, _, right = line.partition(" - ")
    fields, kind = left.split(" "), right.split(" ")
    read_only = "ro" in fields[5].split(",") or "ro" in kind[2].split(",")
    return _Row(fields[0], fields[1], Mount(_unescape(fields[4]), kind[0], read_only))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def below(path: str, folder: str) -> bool:
    """Whether ``path`` lies strictly inside ``folder``."""
    return path != folder and path.startswith(folder if folder == "/" else folder + "/")


def depth(path: str) -> int:
    """How many names an absolute path has; ``/`` has none."""
    return 0 if path == "/" else path.count("/")
