"""A copy-on-write view of the file system, kept in a folder: copies, and marks for what is deleted.

``UPPER/files`` mirrors absolute paths; what exists there hides the original. ``UPPER/gone/H/NAME``
says that the original NAME in the folder with hash H is deleted. ``UPPER/generation`` changes with
every change, so that a read costs a comparison and a dictionary look-up while nothing near it
was redirected. All processes of a run share the folder. Standard library only, Python 3.9.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from typing import Any, Dict, List, Optional

from .guard_raw import copy_file, isdir, lexists, makedirs, raw

_LINKS_MAX = 40


class View:
    """Finds where a path is read from, and where it is written to.

    Args:
        upper: folder for copies and marks.
        through: folders that are really written.
        cover: folders that are redirected although a folder of ``through`` holds them.
    """

    def __init__(self, upper: str, through: List[str], cover: List[str]) -> None:
        self.files = os.path.join(upper, "files")
        self._gone = os.path.join(upper, "gone")
        self._through = dict.fromkeys(through, True)
        self._through.update(dict.fromkeys(cover, False))
        for folder in (self.files, self._gone):
            if not isdir(folder):
                makedirs(folder)
        self._generation = _shared(os.path.join(upper, "generation"))
        self._zero = bytes(8)
        self._clean: Dict[str, bytes] = {}
        self.cwd = self.virtual(raw.getcwd())

    # -- names -----------------------------------------------------------------------------------

    def virtual(self, path: str) -> str:
        """The path a program knows, for one that may lie in the mirror."""
        if path.startswith(self.files) and path[len(self.files) : len(self.files) + 1] in ("", "/"):
            return path[len(self.files) :] or "/"
        return path

    def absolute(self, path: Any, dir_fd: Optional[int] = None) -> str:
        """An absolute path; may still hold links and ``..``."""
        text = os.fsdecode(path)
        if text.startswith("/"):
            return self.virtual(text)
        base = self.cwd if dir_fd is None else self.of_handle(dir_fd)
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return base.rstrip("/") + "/" + text

    def of_handle(self, handle: int) -> str:
        """The path that an open folder was opened by."""
        return self.virtual(raw.readlink("/proc/self/fd/%d" % handle))

    def canonical(self, path: str, follow: bool) -> str:
        """Without links and ``..``, in the merged view; the last name's link only if ``follow``."""
        done = "/"
        names = [name for name in path.split("/") if name not in ("", ".")][::-1]
        links = 0
        while names:
            name = names.pop()
            if name == "..":
                done = os.path.dirname(done)
                continue
            candidate = done.rstrip("/") + "/" + name
            target = self._link_at(candidate) if names or follow else None
            if target is None:
                done = candidate
                continue
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            names += [part for part in target.split("/") if part not in ("", ".")][::-1]
            done = "/" if target.startswith("/") else done
        return done

    def _link_at(self, path: str) -> Optional[str]:
        place = self.place(path)
        try:
            if stat.S_ISLNK(raw.lstat(place).st_mode):
                return self.virtual(raw.readlink(place))
        except OSError:
            pass
        return None

    # -- reading ---------------------------------------------------------------------------------

    def is_through(self, path: str) -> bool:
        """Whether a canonical path is really written."""
        while path not in self._through:
            if path == "/":
                return False
            path = os.path.dirname(path)
        return self._through[path]

    def copy_of(self, path: str) -> str:
        """Where a canonical path's copy is, or would be."""
        return self.files + path

    def place(self, path: str) -> str:
        """Where a canonical path is read from."""
        copy = self.files + path
        return copy if lexists(copy) or self.hidden(path) else path

    def hidden(self, path: str) -> bool:
        """Whether the original at a canonical path, or a folder above it, is deleted."""
        while path != "/":
            folder, name = os.path.split(path)
            if lexists("%s/%s/%s" % (self._gone, _hash(folder), name)):
                return True
            path = folder
        return False

    def find(self, path: Any, dir_fd: Optional[int] = None, follow: bool = True) -> Any:
        """What to hand to the system to read ``path``; the argument itself where nothing changed."""
        now = self._generation[:8]
        if now == self._zero:
            return path
        absolute = self.absolute(path, dir_fd)
        folder = os.path.dirname(absolute)
        if self._clean.get(folder) == now and not self._leaf_is_link(absolute):
            return absolute
        canonical = self.canonical(absolute, follow)
        if self._is_clean(os.path.dirname(canonical)) and os.path.dirname(canonical) == folder:
            if len(self._clean) > 10000:
                self._clean.clear()
            self._clean[folder] = now
        return self.place(canonical)

    def _leaf_is_link(self, path: str) -> bool:
        try:
            return stat.S_ISLNK(raw.lstat(path).st_mode)
        except OSError:
            return True

    def _is_clean(self, folder: str) -> bool:
        marks = "%s/%s" % (self._gone, _hash(folder))
        return not (lexists(self.files + folder) or lexists(marks) or self.hidden(folder))

    def exists(self, path: str) -> bool:
        """Whether a canonical path exists in the merged view, dangling links included."""
        return lexists(self.place(path))

    def original_visible(self, path: str) -> bool:
        """Whether a canonical path has an original that is not deleted."""
        return lexists(path) and not self.hidden(path)

    def names(self, path: str) -> List[str]:
        """The entries of a folder in the merged view.

        Raises:
            OSError: it does not exist, or is no folder.
        """
        copy, found = self.files + path, set()
        has_copy = lexists(copy)
        if has_copy:
            found = set(raw.listdir(copy))
            if self.hidden(path) or not isdir(path):
                return sorted(found)
        elif self.hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        marks = "%s/%s" % (self._gone, _hash(path))
        deleted = set(raw.listdir(marks)) if isdir(marks) else set()
        return sorted(found | (set(raw.listdir(path)) - deleted))

    # -- writing ---------------------------------------------------------------------------------

    def changed(self) -> None:
        """Tell all processes that something was redirected; after the change itself."""
        self._generation[:8] = os.urandom(7) + b"\1"

    def mark_gone(self, path: str) -> None:
        """Delete the original at a canonical path from the view."""
        folder, name = os.path.split(path)
        marks = "%s/%s" % (self._gone, _hash(folder))
        makedirs(marks)
        raw.close(raw.open("%s/%s" % (marks, name), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self.changed()

    def prepare_parent(self, path: str) -> None:
        """Make the mirror's folders above a canonical path, as far as they exist in the view."""
        folder = os.path.dirname(path)
        if not lexists(self.files + folder) and self.exists(folder):
            self.prepare_parent(folder)
            self._mirror_folder(folder)

    def _mirror_folder(self, path: str) -> None:
        copy = self.files + path
        try:
            raw.mkdir(copy, 0o700)
        except FileExistsError:
            return
        found = raw.stat(path)
        raw.chmod(copy, stat.S_IMODE(found.st_mode) | 0o300)
        raw.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.changed()

    def copy_up(self, path: str, contents: bool = True) -> str:
        """Make sure that a canonical path that exists has its copy; where that is.

        Args:
            path: canonical path.
            contents: False if they are cut off anyway.
        """
        copy = self.files + path
        if lexists(copy) or not self.original_visible(path):
            self.prepare_parent(path)
            return copy
        self.prepare_parent(path)
        found = raw.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            self._mirror_folder(path)
        elif stat.S_ISLNK(found.st_mode):
            raw.symlink(raw.readlink(path), copy)
        elif stat.S_ISREG(found.st_mode):
            copy_file(path, copy, found, contents, keep=True)
        else:
            return path
        self.changed()
        return copy

    def for_writing(self, path: Any, flags: int, dir_fd: Optional[int] = None) -> str:
        """Where to open a file that is written; its old contents are there if ``flags`` keep them.

        Raises:
            FileExistsError: O_EXCL, and it exists in the view.
        """
        canonical = self.canonical(self.absolute(path, dir_fd), follow=not flags & os.O_EXCL)
        if self.is_through(canonical):
            return canonical
        if flags & os.O_EXCL and flags & os.O_CREAT and self.exists(canonical):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        place = self.copy_up(canonical, contents=not flags & os.O_TRUNC)
        self.changed()
        return place

    # -- for libraries that open a path themselves -----------------------------------------------

    def written(self, path: Any, flags: int = os.O_CREAT) -> Any:
        """Where a library that writes a file from scratch or in place has to write; no path: as it is."""
        return self.for_writing(path, flags) if isinstance(path, (str, bytes, os.PathLike)) else path

    def read(self, path: Any) -> Any:
        """Where a library has to read a file; what is no path stays as it is."""
        return self.find(os.fspath(path)) if isinstance(path, (str, bytes, os.PathLike)) else path


def _shared(path: str) -> Any:
    handle = raw.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        raw.ftruncate(handle, mmap.PAGESIZE)
        return mmap.mmap(handle, mmap.PAGESIZE)
    finally:
        raw.close(handle)


def _hash(folder: str) -> str:
    return hashlib.blake2b(os.fsencode(folder), digest_size=16).hexdigest()
