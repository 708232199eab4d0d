"""Libraries that open files below Python: hand them the redirected path. Python 3.9, no imports of theirs.

Each is patched when it gets imported, never before.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from typing import Any, Callable, Dict, List, Optional

from .guard_view import View, lexists


def install(view: View) -> None:
    """Patch known libraries at their import; those imported already, now."""
    patches: Dict[str, Callable[[Any, View], None]] = {
        "sqlite3.dbapi2": _sqlite,
        "sqlite3": _sqlite,
        "torch.serialization": _torch,
        "safetensors": _safetensors,
        "lmdb": _lmdb,
    }
    for name in list(patches):
        if name in sys.modules:
            patches.pop(name)(sys.modules[name], view)
    sys.meta_path.insert(0, _Finder(patches, view))


class _Finder(importlib.abc.MetaPathFinder):
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


def _written(view: View, path: Any, flags: int = os.O_CREAT) -> Any:
    """Where a library that writes a file from scratch or in place has to write."""
    return view.for_writing(path, flags) if isinstance(path, (str, bytes, os.PathLike)) else path


def _read(view: View, path: Any) -> Any:
    return view.find(os.fspath(path)) if isinstance(path, (str, bytes, os.PathLike)) else path


def _sqlite(module: Any, view: View) -> None:
    original = module.connect
    if getattr(original, "_feedtune", False):
        return

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        text = os.fsdecode(database) if isinstance(database, (str, bytes, os.PathLike)) else ""
        if not text or text == ":memory:" or kwargs.get("uri"):
            return original(database, *args, **kwargs)
        place = _written(view, text)
        for suffix in ("-journal", "-wal"):
            if lexists(text + suffix):
                _written(view, text + suffix)
        return original(place, *args, **kwargs)

    connect._feedtune = True  # type: ignore[attr-defined]
    module.connect = connect


def _torch(module: Any, view: View) -> None:
    core = module.torch._C

    class PyTorchFileWriter(core.PyTorchFileWriter):  # type: ignore[misc,name-defined]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(_written(view, file, os.O_CREAT | os.O_TRUNC), *args, **kwargs)

    class PyTorchFileReader(core.PyTorchFileReader):  # type: ignore[misc,name-defined]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(_read(view, file), *args, **kwargs)

    core.PyTorchFileWriter = PyTorchFileWriter
    core.PyTorchFileReader = PyTorchFileReader
    storage = module.torch.UntypedStorage
    from_file = storage.from_file

    def mapped(filename: Any, shared: bool = False, *args: Any, **kwargs: Any) -> Any:
        place = _written(view, filename) if shared else _read(view, filename)
        return from_file(place, shared, *args, **kwargs)

    storage.from_file = staticmethod(mapped)


def _safetensors(module: Any, view: View) -> None:
    serialize_file, safe_open = module.serialize_file, module.safe_open

    @functools.wraps(serialize_file)
    def write(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return serialize_file(tensors, _written(view, filename, os.O_CREAT | os.O_TRUNC), *args, **kwargs)

    @functools.wraps(safe_open)
    def read(filename: Any, *args: Any, **kwargs: Any) -> Any:
        return safe_open(_read(view, filename), *args, **kwargs)

    module.serialize_file, module.safe_open = write, read


def _lmdb(module: Any, view: View) -> None:
    original = module.open

    @functools.wraps(original)
    def open_environment(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("readonly"):
            # Its lock file would be written beside data that must not be touched.
            return original(os.fspath(_read(view, path)), *args, **{**kwargs, "lock": False})
        names: List[str] = [""] if not kwargs.get("subdir", True) else ["/data.mdb", "/lock.mdb"]
        folder: Optional[str] = os.fsdecode(path)
        for name in names:
            place = _written(view, "%s%s" % (folder, name))
        return original(place[: len(place) - len(names[-1])] if names[-1] else place, *args, **kwargs)

    module.open = open_environment
