"""The functions that open files, over a redirecting view. Standard library only, Python 3.9."""

from __future__ import annotations

import functools
import io
import os
from typing import Any, Callable, Dict

from .guard_raw import raw
from .guard_view import View

_FLAGS = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}


def _place(view: View, file: Any, mode: str) -> Any:
    """Where to open a file; the argument itself where nothing is redirected."""
    if mode[:1] == "r" and "+" not in mode:
        return view.find(file)
    flags = next((_FLAGS[letter] for letter in mode if letter in _FLAGS), 0)
    return view.for_writing(file, flags | (os.O_RDWR if "+" in mode else 0))


def _opening(target: Any) -> Dict[str, Any]:
    """Options that let a file object keep the name that it was given."""
    return {"opener": lambda _, flags: raw.open(target, flags, 0o666)}


def open_in(view: View) -> Callable[..., Any]:
    """``open`` over the view."""
    raw_open = raw.open_file

    @functools.wraps(raw_open)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or len(args) > 5 or kwargs.get("opener"):
            return raw_open(file, mode, *args, **kwargs)
        target = _place(view, file, mode)
        if target is file:
            return raw_open(file, mode, *args, **kwargs)
        try:
            return raw_open(file, mode, *args, **{**kwargs, **_opening(target)})
        except OSError as error:
            error.filename = file
            raise

    return open


def file_io_in(view: View) -> type:
    """``io.FileIO`` over the view; what ``open`` makes counts as one, as it always did."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, io_class) if cls is FileIO else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, io_class) if cls is FileIO else type.__subclasscheck__(cls, other)

    io_class = io.FileIO

    class FileIO(io_class, metaclass=Kind):  # type: ignore[misc,valid-type]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            target = file if isinstance(file, int) or opener else _place(view, file, mode)
            if target is not file:
                opener = _opening(target)["opener"]
            super().__init__(file, mode, closefd, opener)

    return FileIO
