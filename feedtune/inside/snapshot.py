"""Datasets as they were before the first fetch.

A block without workers fetches in the main process and may open a file or an LMDB environment there; a
worker forked later would share that handle and read wrong data. Each block therefore gets a copy of the
dataset with the attributes it had before anybody fetched from it.
"""

from __future__ import annotations

import enum
import os
import types
from collections import Counter
from typing import Any

_DEPTH = 6  # Subset of ConcatDataset of ... (each list counts too): deeper nesting is left as it is
_SMALL = 1000  # a longer container holds data, not handles; copying it each block would cost
_LMDB_TYPES = ("Environment", "Transaction", "Cursor", "_Database")
_LEFT_ALONE = (enum.Enum, type, types.ModuleType, types.FunctionType, types.MethodType)


def take(dataset: Any, depth: int = _DEPTH) -> dict[int, tuple[Any, Any]]:
    """Remember a dataset and the objects and small containers inside it.

    Returns:
        ``id -> (object, its attributes or items)``; the objects are held, so that ids stay theirs.
    """
    seen: dict[int, tuple[Any, Any]] = {}
    _take(dataset, seen, depth)
    return seen


def _take(value: Any, seen: dict[int, tuple[Any, Any]], depth: int) -> None:
    if depth < 0 or id(value) in seen:
        return
    state = _state(value)
    if state is None:
        return
    seen[id(value)] = (value, state)
    for inner in state.values() if isinstance(state, dict) else state:
        _take(inner, seen, depth - 1)


def _state(value: Any) -> Any:
    """A shallow copy of what can change in an object or container; ``None`` for all else."""
    if type(value) in (dict, list, set) or isinstance(value, tuple):
        if len(value) > _SMALL:
            return None
        return dict(value) if isinstance(value, dict) else list(value)
    import torch
    from torch.utils.data import Dataset

    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (*_LEFT_ALONE, torch.Tensor)):
        return None
    # An object without attributes is a marker that is compared by identity, unless it is a dataset.
    return dict(attributes) if attributes or isinstance(value, Dataset) else None


def fresh(dataset: Any, snapshot: dict[int, tuple[Any, Any]]) -> Any:
    """A copy in the remembered state; what cannot be copied is shared."""
    return _fresh(dataset, snapshot, {})


def _fresh(value: Any, snapshot: dict[int, tuple[Any, Any]], done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if id(value) not in snapshot:
        return value
    state = snapshot[id(value)][1]
    if isinstance(value, tuple):
        items = [_fresh(item, snapshot, done) for item in state]
        done[id(value)] = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return done[id(value)]
    try:
        copy = object.__new__(type(value)) if hasattr(value, "__dict__") else type(value)()
    except TypeError:
        return value  # a class on top of list, tensor or another C type
    done[id(value)] = copy  # before its parts: they may refer back to it
    if isinstance(copy, list):
        copy.extend(_fresh(item, snapshot, done) for item in state)
    elif isinstance(copy, set):
        copy.update(state)
    elif isinstance(state, dict):
        target = copy if type(value) is dict else copy.__dict__
        target.update({name: _fresh(item, snapshot, done) for name, item in state.items()})
    return copy


def release_lmdb(snapshot: dict[int, tuple[Any, Any]]) -> None:
    """Take LMDB handles that fetching has opened out of a dataset again; it opens them anew when it is used.

    LMDB opens an environment once in a process and in what is forked from it: no copy of the dataset could
    open it while the script's own keeps it open. What was there before the first fetch stays.
    """
    for value, state in snapshot.values():
        if not isinstance(state, dict):
            continue
        now = value if type(value) is dict else value.__dict__
        opened = [n for n, item in now.items() if _is_lmdb(item) and state.get(n) is not item]
        for name in opened:
            if name in state:
                now[name] = state[name]
            else:
                del now[name]


def _is_lmdb(value: Any) -> bool:
    """Whether it is a handle of py-lmdb, whose C types call themselves builtin."""
    kind = type(value)
    return kind.__name__ in _LMDB_TYPES and kind.__module__.split(".")[0] in ("builtins", "lmdb")


def open_data_files(moved: bool = False) -> Counter[str]:
    """Regular files that this process holds open for reading, and how often: workers would share them.

    Memory-mapped files do not count: a mapping has no position that reads could disturb.

    Args:
        moved: count only files whose position has moved; positional reads (``pread``) leave it at 0 and
            disturb nobody.
    """
    found: Counter[str] = Counter()
    with open("/proc/self/maps", errors="replace") as file:
        mapped = {line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")}
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as file:
                info = dict(line.split(":", 1) for line in file if line.startswith(("pos:", "flags:")))
        except (OSError, ValueError):
            continue  # closed between listing and reading
        writable = int(info["flags"], 8) & os.O_ACCMODE != os.O_RDONLY
        harmless = path in mapped or (moved and int(info["pos"]) == 0)
        if not writable and not harmless and _is_data(path):
            found[path] += 1
    return found


def _is_data(path: str) -> bool:
    return path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")) and os.path.isfile(path)


def shared_files(
    base: Counter[str], before: Counter[str], during: Counter[str], after: Counter[str]
) -> list[str]:
    """Files that fetching opens in a place which all copies of the dataset share.

    Args:
        base: open files before the first fetch.
        before: before a block without workers.
        during: at its end, the dataset's copy alive.
        after: with the copy gone. A handle of the copy itself has come and gone with it.
    """
    found = []
    for path in after:
        own_handle = during[path] > before[path] and after[path] <= before[path]
        if after[path] > base[path] and not own_handle:
            found.append(path)
    return sorted(found)
