"""Datasets as they were before the first fetch.

A block without workers fetches in the main process and may open a file or an LMDB environment there; a
worker forked later would share that handle and read wrong data. Each block therefore gets a copy of the
dataset with the attributes it had before anybody fetched from it.
"""

from __future__ import annotations

import os
from typing import Any

_DEPTH = 4  # Subset of ConcatDataset of ... : deeper nesting is left as it is


def take(dataset: Any, depth: int = _DEPTH) -> dict[int, dict[str, Any]]:
    """Remember the attributes of a dataset and of the datasets inside it.

    Returns:
        ``id(object) -> attributes``; objects without a ``__dict__`` are not in it.
    """
    seen: dict[int, dict[str, Any]] = {}
    _take(dataset, seen, depth)
    return seen


def _take(dataset: Any, seen: dict[int, dict[str, Any]], depth: int) -> None:
    attributes = getattr(dataset, "__dict__", None)
    if depth == 0 or id(dataset) in seen or not isinstance(attributes, dict):
        return
    seen[id(dataset)] = dict(attributes)
    for value in list(attributes.values()):
        for inner in value if isinstance(value, (list, tuple)) and len(value) < 1000 else (value,):
            if _is_dataset(inner):
                _take(inner, seen, depth - 1)


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(value, Dataset)


def fresh(dataset: Any, snapshot: dict[int, dict[str, Any]]) -> Any:
    """A shallow copy with the remembered attributes; the dataset itself where it cannot be copied."""
    attributes = snapshot.get(id(dataset))
    if attributes is None:
        return dataset
    try:
        copy = object.__new__(type(dataset))
    except TypeError:
        return dataset  # a class on top of list, tensor or another C type
    for name, value in attributes.items():
        if _is_dataset(value):
            value = fresh(value, snapshot)
        elif isinstance(value, (list, tuple)) and any(id(item) in snapshot for item in value[:1000]):
            value = type(value)([fresh(item, snapshot) for item in value])
        copy.__dict__[name] = value
    return copy


def open_data_files() -> list[str]:
    """Regular files that this process holds open for reading: what forked workers would share."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as file:
                flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags"))
        except (OSError, StopIteration):
            continue  # closed between listing and reading
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if not writable and path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")):
            found.append(path)
    return sorted(p for p in set(found) if os.path.isfile(p))
