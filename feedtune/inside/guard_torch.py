"""Paths that torch's C++ code opens by itself: hand it the redirected ones. Python 3.9, no imports of torch.

What torch opens in Python is redirected already.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable

from .guard_view import View

# (owner below torch, function, position of the path); a torch that lacks one has nothing to redirect.
_WRITERS = (
    ("_C.ScriptModule", "save", 1),
    ("_C.ScriptModule", "_save_for_mobile", 1),
    ("_C", "_save_jit_module", 1),
    ("_C._autograd._ProfilerResult", "save", 1),
)
_READERS = (("_C", "import_ir_module", 1), ("_C", "_load_jit_module_from_file", 0))


def patch(torch: Any, view: View) -> None:
    """Redirect checkpoints, TorchScript files, profiler traces and mapped tensors."""
    for owner, name, position in _WRITERS:
        _redirect(torch, owner, name, position, view.written)
    for owner, name, position in _READERS:
        _redirect(torch, owner, name, position, view.read)
    _zip_files(torch._C, view)
    torch.from_file = _mapped(torch.from_file, view)
    storage = torch.UntypedStorage
    storage.from_file = staticmethod(_mapped(storage.from_file, view))


def _redirect(torch: Any, owner: str, name: str, position: int, place: Callable[[Any], Any]) -> None:
    holder = torch
    for part in owner.split("."):
        holder = getattr(holder, part, None)
    original = getattr(holder, name, None)
    if original is None:
        return

    # The name of the argument differs between versions, and torch itself passes it by position.
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], place(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    setattr(holder, name, functools.wraps(original)(call))


def _zip_files(core: Any, view: View) -> None:
    class PyTorchFileWriter(core.PyTorchFileWriter):  # type: ignore[misc]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(view.written(file, os.O_CREAT | os.O_TRUNC), *args, **kwargs)

    class PyTorchFileReader(core.PyTorchFileReader):  # type: ignore[misc]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(view.read(file), *args, **kwargs)

    core.PyTorchFileWriter = PyTorchFileWriter
    core.PyTorchFileReader = PyTorchFileReader


def _mapped(original: Any, view: View) -> Any:
    def from_file(filename: Any, shared: Any = False, *args: Any, **kwargs: Any) -> Any:
        place = view.written(filename) if shared else view.read(filename)
        return original(place, shared, *args, **kwargs)

    return functools.wraps(original)(from_file)


def patch_distributed(distributed: Any, view: View) -> None:
    """Redirect the file by which ranks find each other (``init_method="file://..."``)."""
    original = getattr(distributed, "FileStore", None)
    if original is None:
        return

    class FileStore(original):  # type: ignore[misc,valid-type]
        def __init__(self, file_name: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(view.written(file_name), *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("FileStore") is original:
            module.FileStore = FileStore  # type: ignore[attr-defined]
