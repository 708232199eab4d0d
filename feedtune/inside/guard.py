"""Redirect the writes of this process, for machines that refuse a mount namespace.

Called before any user code runs. Every function that names a path goes through a copy-on-write
view (`guard_view`), so that the program sees its own writes and the disk does not. What writes
from C or Rust is taken care of where it is known (`guard_libs`); for the rest Landlock refuses, if
the kernel has it. Standard library only, Python 3.9.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import stat
import subprocess
import sys
from typing import Any, Callable, Dict

from . import guard_libs
from .guard_os import Calls
from .guard_view import View, copy_file, raw

_READ = (
    "stat", "lstat", "access", "readlink", "listdir", "scandir", "chdir", "getcwd", "getcwdb",
)  # fmt: skip
_WRITE = (
    "open", "truncate", "chmod", "chown", "lchown", "utime", "setxattr", "mkdir", "symlink", "mkfifo", "link",
    "unlink", "rmdir", "rename", "replace",
)  # fmt: skip
_FLAGS = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}


def install(config: Dict[str, Any]) -> None:
    """Redirect writes from now on, in this process and what it forks.

    Args:
        config: ``upper`` (folder for redirected writes), ``passthrough`` and ``writable`` (folders
            that are really written), ``protect`` (redirected even below those). Or only
            ``renames_only``: under a covered file system without privileges, where the kernel
            refuses to rename a folder that was there before.
    """
    if getattr(os, "_feedtune_guard", False):
        return
    os._feedtune_guard = True  # type: ignore[attr-defined]
    if config.get("renames_only"):
        _install_renames()
        return
    sys.dont_write_bytecode = True  # the import system writes below our hooks
    view = View(config["upper"], [*config["passthrough"], *config["writable"]], list(config["protect"]))
    calls = Calls(view)
    for name in (*_READ, *_WRITE):
        _replace(os, name, _named(view, getattr(calls, name), getattr(os, name)))
    _replace(os, "remove", os.unlink)
    opener = _opener(view)
    _replace(builtins, "open", opener)
    _replace(io, "open", opener)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    _popen_in_view(view)
    _old_pathlib()
    guard_libs.install(view)


def _replace(module: Any, name: str, function: Any) -> None:
    original = getattr(module, name)
    for group in ("supports_follow_symlinks", "supports_effective_ids"):
        if module is os and original in getattr(os, group):
            getattr(os, group).add(function)
    setattr(module, name, function)


def _named(view: View, method: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """The method as a function whose errors name the path that the program gave."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = view.virtual(error.filename)
            raise

    return call


def _opener(view: View) -> Callable[..., Any]:
    find, raw_open = view.find, raw.open_file

    @functools.wraps(raw_open)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or len(args) > 5 or kwargs.get("opener"):
            return raw_open(file, mode, *args, **kwargs)
        if mode[:1] == "r" and "+" not in mode:
            target = find(file)
            if target is file:
                return raw_open(file, mode, *args, **kwargs)
        else:
            flags = next((_FLAGS[letter] for letter in mode if letter in _FLAGS), 0)
            target = view.for_writing(file, flags | (os.O_RDWR if "+" in mode else 0))
        # The name that the file object shows stays the one that was given.
        try:
            return raw_open(
                file, mode, *args, opener=lambda _, flags: raw.open(target, flags, 0o666), **kwargs
            )
        except OSError as error:
            error.filename = file
            raise

    return open


def _popen_in_view(view: View) -> None:
    """Start programs in a working folder that exists only in the view."""
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cwd") is not None:
            kwargs["cwd"] = view.find(os.fspath(kwargs["cwd"]))
        original(self, *args, **kwargs)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


def _old_pathlib() -> None:
    """Until Python 3.10 pathlib keeps its own references to the functions of os."""
    accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)
    for name in (*_READ, *_WRITE):
        if accessor is not None and name != "open" and hasattr(accessor, name):
            setattr(accessor, name, staticmethod(getattr(os, name)))


def _install_renames() -> None:
    """Copy where a rename of an existing folder crosses overlay layers."""

    def falling_back(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def rename(src: Any, dst: Any, **handles: Any) -> None:
            try:
                original(src, dst, **handles)
            except OSError as error:
                if error.errno != errno.EXDEV or handles or not _same_mount(src, dst):
                    raise
                if os.path.lexists(dst):
                    os.rmdir(dst)
                _copy_tree(os.fspath(src), os.fspath(dst))
                shutil.rmtree(src)

        return rename

    os.rename = falling_back(os.rename)
    os.replace = falling_back(os.replace)
    _old_pathlib()


def _same_mount(src: Any, dst: Any) -> bool:
    """A folder whose rename was refused although source and target lie in one file system."""
    parent = os.path.dirname(os.path.abspath(dst))
    found = os.lstat(src)
    return stat.S_ISDIR(found.st_mode) and found.st_dev == os.stat(parent).st_dev


def _copy_tree(source: Any, target: Any) -> None:
    found = os.lstat(source)
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
    elif not stat.S_ISDIR(found.st_mode):
        copy_file(source, target, found)
    else:
        os.mkdir(target, 0o700)
        for name in os.listdir(source):
            _copy_tree(os.path.join(source, name), os.path.join(target, name))
        os.chmod(target, stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
