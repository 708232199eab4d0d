"""The changing functions of ``os`` over a redirecting view. Standard library only, Python 3.9.

Each method stands for the function of its name, as in `guard_os`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, Optional

from .guard_os import Reads
from .guard_raw import copy_file, lexists, raw

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), path)


class Calls(Reads):
    """Replacements for functions of ``os``."""

    # -- files -----------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> int:
        if flags & _WRITING or flags & os.O_TMPFILE == os.O_TMPFILE:
            target = self.view.for_writing(path, flags, dir_fd)
        else:
            target = self.view.find(path, dir_fd, not flags & os.O_NOFOLLOW)
            if target is path:
                return int(raw.open(path, flags, mode, dir_fd=dir_fd))
        return int(raw.open(target, flags, mode))

    def _changing(self, path: Any, dir_fd: Optional[int], follow: bool) -> str:
        """Where to change what exists at a path."""
        canonical = self._canonical(path, dir_fd, follow)
        return canonical if self.view.is_through(canonical) else self.view.copy_up(canonical)

    def truncate(self, path: Any, length: int) -> None:
        raw.truncate(path if isinstance(path, int) else self._changing(path, None, True), length)

    def chmod(
        self, path: Any, mode: int, *, dir_fd: Optional[int] = None, follow_symlinks: bool = True
    ) -> None:
        if isinstance(path, int):
            raw.chmod(path, mode)
        else:
            raw.chmod(self._changing(path, dir_fd, follow_symlinks), mode)

    def chown(
        self, path: Any, uid: int, gid: int, *, dir_fd: Optional[int] = None, follow_symlinks: bool = True
    ) -> None:
        target = path if isinstance(path, int) else self._changing(path, dir_fd, follow_symlinks)
        raw.chown(target, uid, gid, **({} if isinstance(path, int) else {"follow_symlinks": follow_symlinks}))

    def lchown(self, path: Any, uid: int, gid: int) -> None:
        self.chown(path, uid, gid, follow_symlinks=False)

    def utime(
        self,
        path: Any,
        times: Any = None,
        *,
        dir_fd: Optional[int] = None,
        follow_symlinks: bool = True,
        **ns: Any,
    ) -> None:
        if isinstance(path, int):
            raw.utime(path, times, **ns)
        else:
            raw.utime(
                self._changing(path, dir_fd, follow_symlinks), times, follow_symlinks=follow_symlinks, **ns
            )

    def setxattr(
        self, path: Any, name: Any, value: Any, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        target = path if isinstance(path, int) else self._changing(path, None, follow_symlinks)
        raw.setxattr(target, name, value, flags, follow_symlinks=follow_symlinks)

    def removexattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> None:
        target = path if isinstance(path, int) else self._changing(path, None, follow_symlinks)
        raw.removexattr(target, attribute, follow_symlinks=follow_symlinks)

    # -- entries ---------------------------------------------------------------------------------

    def _new(self, path: Any, dir_fd: Optional[int]) -> Optional[str]:
        """Where to make a new entry; None: for real, where the arguments say."""
        canonical = self._canonical(path, dir_fd, False)
        if self.view.is_through(canonical):
            return None
        if self.view.exists(canonical):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.view.prepare_parent(canonical)
        return self.view.copy_of(canonical)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> None:
        place = self._new(path, dir_fd)
        raw.mkdir(path, mode, dir_fd=dir_fd) if place is None else raw.mkdir(place, mode)
        self.view.changed()

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: Optional[int] = None
    ) -> None:
        place = self._new(dst, dir_fd)
        if place is None:
            raw.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        else:
            raw.symlink(src, place, target_is_directory)
        self.view.changed()

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: Optional[int] = None) -> None:
        place = self._new(path, dir_fd)
        raw.mkfifo(path, mode, dir_fd=dir_fd) if place is None else raw.mkfifo(place, mode)
        self.view.changed()

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: Optional[int] = None) -> None:
        place = self._new(path, dir_fd)
        raw.mknod(path, mode, device, dir_fd=dir_fd) if place is None else raw.mknod(place, mode, device)
        self.view.changed()

    def link(
        self, src: Any, dst: Any, *, src_dir_fd: Optional[int] = None, dst_dir_fd: Optional[int] = None,
        follow_symlinks: bool = True,
    ) -> None:  # fmt: skip
        source = self._canonical(src, src_dir_fd, follow_symlinks)
        target = self._canonical(dst, dst_dir_fd, False)
        if self.view.is_through(source) and self.view.is_through(target):
            raw.link(source, target)
            return
        place = self._new(target, None) or target
        try:
            raw.link(source if self.view.is_through(source) else self.view.copy_up(source), place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(self.view.place(source), place)
        self.view.changed()

    def unlink(self, path: Any, *, dir_fd: Optional[int] = None) -> None:
        canonical = self._canonical(path, dir_fd, False)
        if self.view.is_through(canonical):
            raw.unlink(canonical)
            return
        place = self.view.place(canonical)
        if place != canonical:
            raw.unlink(place)
        elif stat.S_ISDIR(raw.lstat(place).st_mode):
            raise _error(errno.EISDIR, path)
        self._forget(canonical)

    def rmdir(self, path: Any, *, dir_fd: Optional[int] = None) -> None:
        canonical = self._canonical(path, dir_fd, False)
        if self.view.is_through(canonical):
            raw.rmdir(canonical)
            return
        place = self.view.place(canonical)
        if not stat.S_ISDIR(raw.lstat(place).st_mode):
            raise _error(errno.ENOTDIR, path)
        if self.view.names(canonical):
            raise _error(errno.ENOTEMPTY, path)
        if place != canonical:
            raw.rmdir(place)
        self._forget(canonical)

    def _forget(self, canonical: str) -> None:
        if self.view.original_visible(canonical):
            self.view.mark_gone(canonical)
        self.view.changed()

    # -- renames ---------------------------------------------------------------------------------

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: Optional[int] = None, dst_dir_fd: Optional[int] = None
    ) -> None:
        view = self.view
        source, target = self._canonical(src, src_dir_fd, False), self._canonical(dst, dst_dir_fd, False)
        if view.is_through(source) and view.is_through(target):
            raw.rename(source, target)
            return
        kind = raw.lstat(view.place(source)).st_mode
        if source == target:
            return
        self._make_room(source, target, stat.S_ISDIR(kind))
        if not view.is_through(target):
            view.prepare_parent(target)
        place = target if view.is_through(target) else view.copy_of(target)
        whole = view.place(source) != source and not (stat.S_ISDIR(kind) and view.original_visible(source))
        if whole and not view.is_through(target):
            raw.rename(view.place(source), place)
        else:
            self._copy_merged(source, place)
            self._remove_merged(source)
        self._forget(source)

    replace = rename

    def _make_room(self, source: str, target: str, folder: bool) -> None:
        """Check a rename's target as the system does, and hide an original folder there."""
        try:
            found = raw.lstat(self.view.place(target)).st_mode
        except FileNotFoundError:
            return
        if folder and not stat.S_ISDIR(found):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), source, None, target)
        if stat.S_ISDIR(found):
            if not folder:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), source, None, target)
            self.rmdir(target)

    def _copy_merged(self, source: str, place: str) -> None:
        found = raw.lstat(self.view.place(source))
        if not stat.S_ISDIR(found.st_mode):
            self._copy(self.view.place(source), place)
            return
        raw.mkdir(place, 0o700)
        for name in self.view.names(source):
            self._copy_merged(os.path.join(source, name), os.path.join(place, name))
        raw.chmod(place, stat.S_IMODE(found.st_mode))
        raw.utime(place, ns=(found.st_atime_ns, found.st_mtime_ns))

    def _copy(self, source: str, place: str) -> None:
        found = raw.lstat(source)
        if stat.S_ISLNK(found.st_mode):
            if lexists(place):
                raw.unlink(place)
            raw.symlink(raw.readlink(source), place)
        else:
            copy_file(source, place, found)

    def _remove_merged(self, path: str) -> None:
        if stat.S_ISDIR(raw.lstat(self.view.place(path)).st_mode):
            for name in self.view.names(path):
                self._remove_merged(os.path.join(path, name))
            self.rmdir(path)
        else:
            self.unlink(path)
