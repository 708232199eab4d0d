"""Redirect the writes of this process, for machines that refuse a mount namespace.

Called before any user code runs. Every function that names a path goes through a copy-on-write
view (`guard_view`), so that the program sees its own writes and the disk does not. What writes
from C or Rust is taken care of where it is known (`guard_libs`); for the rest Landlock refuses, if
the kernel has it. Standard library only, Python 3.9.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
import stat
import subprocess
import sys
from typing import Any, Callable, Dict, Optional

from . import guard_libs
from .guard_change import Calls
from .guard_open import file_io_in, open_in
from .guard_raw import copy_file
from .guard_view import View

_READ = (
    "stat", "lstat", "access", "readlink", "listdir", "scandir", "chdir", "getcwd", "getcwdb", "statvfs",
    "getxattr", "listxattr",
)  # fmt: skip
_WRITE = (
    "open", "truncate", "chmod", "chown", "lchown", "utime", "setxattr", "removexattr", "mkdir", "symlink",
    "mkfifo", "mknod", "link", "unlink", "rmdir", "rename", "replace",
)  # fmt: skip
# Set in the environment by a rank: programs that it starts are guarded, and nothing else.
ONLY = "FEEDTUNE_GUARD_ONLY"
_VARIABLE = "FEEDTUNE_GUARD"
# Modules whose functions the interpreter itself calls.
_BELOW = ("posix", "_io")


def install(config: Dict[str, Any], folder: Optional[str] = None) -> None:
    """Redirect writes from now on, in this process and what it forks.

    Args:
        config: ``upper`` (folder for redirected writes), ``passthrough`` and ``writable`` (folders
            that are really written), ``protect`` (redirected even below those). Or only
            ``renames_only``: under a covered file system without privileges, where the kernel
            refuses to rename a folder that was there before.
        folder: the start-up folder, by which programs that this one starts are guarded too.
    """
    if getattr(os, "_feedtune_guard", False):
        return
    os._feedtune_guard = True  # type: ignore[attr-defined]
    if config.get("renames_only"):
        _install_renames()
        return
    sys.dont_write_bytecode = True  # the import system writes below our hooks
    accessor = _old_pathlib()
    view = View(config["upper"], [*config["passthrough"], *config["writable"]], list(config["protect"]))
    calls = Calls(view)
    names = {name: getattr(os, name) for name in (*_READ, *_WRITE)}
    changed = {id(old): _named(view, getattr(calls, name), old) for name, old in names.items()}
    changed[id(open)] = open_in(view)
    changed[id(io.FileIO)] = file_io_in(view)
    changed[id(os.remove)] = changed[id(os.unlink)]
    _keep_abilities(names, changed)
    _rebind(changed)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    _popen_in_view(view, folder)
    _rebind_methods(accessor, changed)
    guard_libs.install(view)


def _rebind(changed: Dict[int, Any]) -> None:
    """Put the new functions wherever a module that was imported before holds an old one by its own name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in changed and module.__name__ not in _BELOW:
                setattr(module, name, changed[id(value)])


def _keep_abilities(names: Dict[str, Any], changed: Dict[int, Any]) -> None:
    """``os`` tells by the function itself which options it takes."""
    for group in (os.supports_follow_symlinks, os.supports_effective_ids):
        group |= {changed[id(old)] for old in names.values() if old in group}


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


def _popen_in_view(view: View, folder: Optional[str]) -> None:
    """Start programs in a working folder that exists only in the view, and under guard."""
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cwd") is not None:
            kwargs["cwd"] = view.find(os.fspath(kwargs["cwd"]))
        if kwargs.get("env") is not None and folder is not None:
            kwargs["env"] = _guarded(kwargs["env"], folder)
        original(self, *args, **kwargs)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


def _guarded(env: Any, folder: str) -> Any:
    """An environment of the program's own making, with what guards a Python that is started in it."""
    paths = env.get("PYTHONPATH", "")
    if folder in paths.split(os.pathsep) or any(isinstance(key, bytes) for key in env):
        return env
    ours = {"PYTHONPATH": folder + (os.pathsep + paths if paths else ""), ONLY: "1"}
    return {**env, _VARIABLE: os.environ[_VARIABLE], **ours} if _VARIABLE in os.environ else env


def _old_pathlib() -> Any:
    """Until Python 3.10 a class of pathlib holds functions of os; to be asked before they are changed.

    Built-in functions in a class are no methods; ours would be.
    """
    if sys.version_info >= (3, 11):
        return None
    import pathlib

    return pathlib._NormalAccessor


def _rebind_methods(holder: Any, changed: Dict[int, Any]) -> None:
    for name, value in list(vars(holder).items()) if holder is not None else ():
        if id(value) in changed:
            setattr(holder, name, staticmethod(changed[id(value)]))


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

    accessor = _old_pathlib()
    changed = {id(original): falling_back(original) for original in (os.rename, os.replace)}
    _rebind_methods(accessor, changed)
    _rebind(changed)


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
