"""Let the kernel refuse writes outside a list of folders (Landlock, Linux 5.13). Standard library only.

What Python-level redirection does not see (C++, Rust, other programs) then fails with EACCES
instead of doing harm. Not covered by Landlock: changes of mode, owner, times and attributes.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from feedtune.launch import syscalls
from feedtune.launch.mounts import below
from feedtune.launch.rules import COVER, THROUGH, kind_at, policy_rules

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_ASK_VERSION = 1
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
# REMOVE_DIR, REMOVE_FILE, MAKE_CHAR .. MAKE_SYM
_ENTRIES = sum(1 << bit for bit in range(4, 13))
EXPANDED_MAX = 5000


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Landlock's ABI on this kernel; 0 where it is missing or switched off."""
    try:
        return syscalls.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(folders: Iterable[str]) -> None:
    """Allow this process and all its children to write below ``folders`` only, for good.

    Raises:
        OSError: the kernel has no Landlock, or refuses.
    """
    abi = version()
    handled = _WRITE_FILE | _ENTRIES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attribute = ctypes.c_uint64(handled)
    ruleset = syscalls.syscall(_CREATE_RULESET, ctypes.byref(attribute), 8, 0, where="landlock")
    try:
        for folder in folders:
            _allow(ruleset, folder, handled)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.syscall(_RESTRICT_SELF, ruleset, 0, where="landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, handled: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # gone since it was listed
    try:
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        allowed = handled if folder else handled & (_WRITE_FILE | _TRUNCATE)
        rule = _Beneath(allowed, handle)
        syscalls.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0, where=path)
    finally:
        os.close(handle)


def writable_paths(policy: Mapping[str, Sequence[str]]) -> list[str]:
    """What may be written for real, as whole hierarchies.

    A rule of Landlock's holds for everything below its folder. A pass-through folder with a
    protected one inside is therefore replaced by its entries without the protected one; what is
    made anew in it is redirected.
    """
    rules = policy_rules(policy)
    covered = [path for path, kind in rules.items() if kind == COVER]
    found: list[str] = []
    waiting = [path for path, kind in rules.items() if kind == THROUGH]
    while waiting:
        path = waiting.pop()
        if path in rules and rules[path] == COVER:
            continue
        if not any(below(inner, path) for inner in covered):
            found.append(path)
        elif os.path.isdir(path) and len(found) < EXPANDED_MAX:
            waiting += [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
    return sorted(found)


def is_writable(path: str, found: Sequence[str], policy: Mapping[str, Sequence[str]]) -> bool:
    """Whether new entries can be made in ``path``."""
    if kind_at(path, policy_rules(policy)) == COVER:
        return False
    return any(path == folder or below(path, folder) for folder in found)
