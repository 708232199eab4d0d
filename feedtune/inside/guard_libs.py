"""Libraries that open files below Python: hand them the redirected path. Python 3.9, no imports of theirs.

Each is patched when it gets imported, never before.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Dict, List, Optional
from urllib.parse import quote, unquote

from . import guard_torch
from .guard_raw import lexists
from .guard_view import View


def install(view: View) -> None:
    """Patch known libraries at their import; those imported already, now."""
    patches: Dict[str, Callable[[Any, View], None]] = {
        "sqlite3.dbapi2": _sqlite,
        "sqlite3": _sqlite,
        "torch": guard_torch.patch,
        "torch.distributed": guard_torch.patch_distributed,
        "safetensors": _safetensors,
        "lmdb": _lmdb,
    }
    for name in list(patches):
        if name in sys.modules:
            patches.pop(name)(sys.modules[name], view)
    sys.meta_path.insert(0, _Finder(patches, view))


class _Finder:
    def __init__(self, patches: Dict[str, Callable[[Any, View], None]], view: View) -> None:
        self._patches = patches
        self._view = view

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del target
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = _spec_of_others(self, name, path)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                patch(module, self._view)

            spec.loader.exec_module = exec_module
        return spec


def _spec_of_others(own: Any, name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None and finder is not own else None
        if spec is not None:
            return spec
    return None


def _sqlite(module: Any, view: View) -> None:
    original = module.connect
    if getattr(original, "_feedtune", False):
        return

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        text = os.fsdecode(database) if isinstance(database, (str, bytes, os.PathLike)) else ""
        options = ""
        if kwargs.get("uri") and text.startswith("file:"):
            text, mark, options = text[len("file:") :].partition("?")
            text, options = unquote(text), mark + options
        if text in ("", ":memory:") or "mode=memory" in options:
            return original(database, *args, **kwargs)
        place = view.written(text)
        for suffix in ("-journal", "-wal"):
            if lexists(text + suffix):
                view.written(text + suffix)
        if kwargs.get("uri") and os.fsdecode(database).startswith("file:"):
            place = "file:" + quote(place) + options
        return original(place, *args, **kwargs)

    connect._feedtune = True  # type: ignore[attr-defined]
    module.connect = connect


def _safetensors(module: Any, view: View) -> None:
    serialize_file, original = module.serialize_file, module.safe_open

    @functools.wraps(serialize_file)
    def write(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return serialize_file(tensors, view.written(filename, os.O_CREAT | os.O_TRUNC), *args, **kwargs)

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class safe_open(metaclass=Kind):
        """Stays a class, since others name it in their annotations; it cannot be derived from."""

        def __new__(cls, filename: Any, *args: Any, **kwargs: Any) -> Any:
            return original(view.read(filename), *args, **kwargs)

    module.serialize_file, module.safe_open = write, safe_open


def _lmdb(module: Any, view: View) -> None:
    original = module.open

    @functools.wraps(original)
    def open_environment(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("readonly"):
            # Its lock file would be written beside data that must not be touched.
            return original(os.fspath(view.read(path)), *args, **{**kwargs, "lock": False})
        names: List[str] = [""] if not kwargs.get("subdir", True) else ["/data.mdb", "/lock.mdb"]
        folder: Optional[str] = os.fsdecode(path)
        for name in names:
            place = view.written("%s%s" % (folder, name))
        return original(place[: len(place) - len(names[-1])] if names[-1] else place, *args, **kwargs)

    module.open = open_environment
