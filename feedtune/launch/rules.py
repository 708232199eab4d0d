"""What happens to each folder under the write guard: pure functions of policy and mounts.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from feedtune.launch.mounts import PSEUDO, Mount

COVER, THROUGH = "cover", "through"
SOCKETS_MAX = 500


def policy_rules(policy: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Folder -> what happens to it, from the policy alone."""
    rules = {"/": COVER}
    rules.update(dict.fromkeys(policy["passthrough"], THROUGH))
    rules.update(dict.fromkeys(policy["protect"], COVER))
    rules.update(dict.fromkeys(policy["writable"], THROUGH))
    return rules


def listening_sockets(text: str, rules: Mapping[str, str]) -> list[str]:
    r"""Sockets with a path in a covered region, from the text of /proc/net/unix.

    Nobody listens at an overlay's image of a socket: agents, display servers and CUDA's MPS would
    be gone.

    >>> text = "Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 00010000 0001 01 9 /tmp/a b\n"
    >>> listening_sockets(text, {"/": "cover"})
    ['/tmp/a b']
    """
    rows = (line.split(None, 7) for line in text.splitlines())
    paths = dict.fromkeys(fields[7] for fields in rows if len(fields) == 8 and fields[7][0] == "/")
    return [path for path in paths if kind_at(path, rules) == COVER][:SOCKETS_MAX]


def kind_at(path: str, rules: Mapping[str, str]) -> str:
    """The rule of the deepest folder that holds ``path``."""
    while path not in rules:
        path = os.path.dirname(path)
    return rules[path]


def all_rules(policy: Mapping[str, Sequence[str]], mounts: Iterable[Mount]) -> dict[str, str]:
    """Policy rules, and one for each mount in a covered region: an overlay does not see submounts."""
    by_policy = policy_rules(policy)
    rules = dict(by_policy)
    for mount in mounts:
        if mount.point in by_policy or kind_at(mount.point, by_policy) == THROUGH:
            continue
        rules[mount.point] = THROUGH if mount.read_only or mount.fstype in PSEUDO else COVER
    return rules
