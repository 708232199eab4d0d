"""The reading functions of ``os`` over a redirecting view. Standard library only, Python 3.9.

Each method stands for the function of its name. A handle in place of a path goes straight to the
system: it was redirected when it was opened.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Callable, Iterator, List, Optional

from .guard_raw import raw
from .guard_view import View


class Entry:
    """What ``os.scandir`` yields, for folders that were redirected."""

    def __init__(self, calls: Reads, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(folder, name)
        self._calls = calls

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return "<DirEntry %r>" % (self.name,)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._calls.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class _Scan:
    def __init__(self, entries: List[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class Reads:
    """Replacements for functions of ``os`` that change nothing."""

    def __init__(self, view: View) -> None:
        self.view = view

    def _canonical(self, path: Any, dir_fd: Optional[int], follow: bool) -> str:
        return self.view.canonical(self.view.absolute(path, dir_fd), follow)

    def stat(
        self, path: Any, *, dir_fd: Optional[int] = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        if isinstance(path, int):
            return raw.stat(path)  # type: ignore[no-any-return]
        found = self.view.find(path, dir_fd, follow_symlinks)
        if found is path:
            return raw.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)  # type: ignore[no-any-return]
        return raw.stat(found, follow_symlinks=follow_symlinks)  # type: ignore[no-any-return]

    def lstat(self, path: Any, *, dir_fd: Optional[int] = None) -> os.stat_result:
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def access(
        self, path: Any, mode: int, *, dir_fd: Optional[int] = None, effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:  # fmt: skip
        found = path if isinstance(path, int) else self.view.find(path, dir_fd, follow_symlinks)
        options = {"dir_fd": dir_fd} if found is path else {}
        return bool(
            raw.access(found, mode, effective_ids=effective_ids, follow_symlinks=follow_symlinks, **options)
        )

    def readlink(self, path: Any, *, dir_fd: Optional[int] = None) -> Any:
        found = self.view.find(path, dir_fd, False)
        return raw.readlink(path, dir_fd=dir_fd) if found is path else raw.readlink(found)

    def listdir(self, path: Any = ".") -> Any:
        given = "." if path is None else path
        folder = self.view.of_handle(given) if isinstance(given, int) else given
        found = self.view.find(folder)
        if found is folder:
            return raw.listdir(given)
        names = self.view.names(self._canonical(folder, None, True))
        return [os.fsencode(name) for name in names] if isinstance(given, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        given = "." if path is None else path
        folder = self.view.of_handle(given) if isinstance(given, int) else os.fspath(given)
        if self.view.find(folder) is folder:
            return raw.scandir(given)
        names = self.view.names(self._canonical(folder, None, True))
        kind = os.fsencode if isinstance(folder, bytes) else str
        return _Scan([Entry(self, folder, kind(name)) for name in names])

    def chdir(self, path: Any) -> None:
        if isinstance(path, int):
            raw.chdir(path)
            self.view.cwd = self.view.of_handle(path)
            return
        canonical = self._canonical(path, None, True)
        raw.chdir(self.view.place(canonical))
        self.view.cwd = canonical

    def getcwd(self) -> str:
        found: str = raw.getcwd()
        return self.view.virtual(found)

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def statvfs(self, path: Any) -> Any:
        return raw.statvfs(path if isinstance(path, int) else self.view.find(path))

    def getxattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> Any:
        found = path if isinstance(path, int) else self.view.find(path, None, follow_symlinks)
        return raw.getxattr(found, attribute, follow_symlinks=follow_symlinks)

    def listxattr(self, path: Any = None, *, follow_symlinks: bool = True) -> Any:
        given = "." if path is None else path
        found = given if isinstance(given, int) else self.view.find(given, None, follow_symlinks)
        return raw.listxattr(found, follow_symlinks=follow_symlinks)
