"""Cover the file system copy-on-write, in a mount namespace of the calling process alone.

A new root is built from pieces and becomes ``/`` of this process and its children: overlays for
what is protected, bind mounts for what passes through, and plain folders (*skeletons*) where the
kernel allows no overlay because the scratch folder, or a locked mount, lies inside. Nothing of it
is visible to other processes, and all of it goes when the last process inside is gone.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import shutil
import stat
from collections.abc import Mapping, Sequence

from feedtune.launch import syscalls
from feedtune.launch.mounts import Mount, below, depth, parse_mountinfo
from feedtune.launch.rules import COVER, THROUGH, all_rules, kind_at, listening_sockets, policy_rules

COPIED = "copied"
# A skeleton costs one mount for each entry.
SKELETON_ENTRIES_MAX = 4000
OWNERS_LOOKED_AT = 2000
# Files directly in a skeleton are copied up to this size, and in all.
COPY_BYTES_MAX, COPY_BYTES_TOTAL = 1 << 18, 1 << 26


def enter(scratch: str, policy: Mapping[str, Sequence[str]]) -> tuple[list[str], bool]:
    """Move this process into the covered file system; its working directory becomes ``/``.

    Args:
        scratch: an empty folder of this user's, not on overlayfs; redirected writes go below it.
        policy: ``protect``, ``writable`` and ``passthrough`` folders, real paths.

    Returns:
        Notes for the report (what is read-only instead of redirected, and why), and whether a
        user namespace was needed: folders that were there before cannot be renamed then.

    Raises:
        OSError: the kernel refuses an essential step; the process must end without running
            anything, since it may be left in between.
    """
    private = _unshare()
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = parse_mountinfo(file.read())
    guarded = [path for path in policy["protect"] if kind_at(path, policy_rules(policy)) == COVER]
    before = {path: _identity(path) for path in guarded}
    for path in guarded if private else ():
        _check_owners(path)
    os.chdir(scratch)
    _try_out(user_namespace=private)
    builder = _Builder(scratch, policy, mounts, user_namespace=private)
    builder.build()
    _become_root(builder.root)
    _verify(before)
    return builder.notes, private


def _unshare() -> bool:
    """Enter a mount namespace; True if it took a user namespace to be allowed to."""
    uid, gid = os.getuid(), os.getgid()
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
    except PermissionError:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True
    return False


def _check_owners(top: str) -> None:
    """In a user namespace copies can be made of files of this user and group only.

    Raises:
        OSError: a protected folder holds others that this user may write; a program that changes
            one would fail here although it works outside. Looks at a bounded number of entries.
    """
    own = (os.getuid(), os.getgid())
    waiting, looked = [top], 0
    while waiting and looked < OWNERS_LOOKED_AT:
        folder = waiting.pop(0)
        found = os.stat(folder)
        if found.st_mode & stat.S_ISGID and found.st_gid != own[1] and os.access(folder, os.W_OK):
            raise OSError(errno.EOVERFLOW, "new files get a group that has no number here", folder)
        with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                looked += 1
                found = entry.stat(follow_symlinks=False)
                foreign = (found.st_uid, found.st_gid) != own
                if foreign and stat.S_ISREG(found.st_mode) and os.access(entry.path, os.W_OK):
                    raise OSError(errno.EOVERFLOW, "it belongs to another user or group", entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _try_out(*, user_namespace: bool) -> None:
    """Cover a folder inside the scratch folder, and delete a file there.

    Raises:
        OSError: this scratch folder cannot hold redirected writes (it lies on overlayfs, say); the
            same refusal for every folder would otherwise make the whole system read-only.
    """
    for name in ("", "/lower", "/upper", "/work", "/merged"):
        os.mkdir("trial" + name)
    os.close(os.open("trial/lower/file", os.O_CREAT | os.O_WRONLY, 0o600))
    options = "lowerdir=trial/lower,upperdir=trial/upper,workdir=trial/work"
    syscalls.mount(
        "feedtune", "trial/merged", "overlay", 0, options + (",userxattr" if user_namespace else "")
    )
    os.unlink("trial/merged/file")
    kept = os.path.lexists("trial/lower/file") and not os.path.lexists("trial/merged/file")
    syscalls.umount_detach("trial/merged")
    if not kept:
        raise OSError(errno.EIO, "a deletion was not redirected", "overlay")


def _become_root(root: str) -> None:
    os.chdir(root)
    try:
        syscalls.pivot_root(".", ".")
    except OSError:
        # An initramfs cannot be pivoted away from.
        os.chroot(".")
    else:
        syscalls.umount_detach(".")
    os.chdir("/")


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _verify(before: Mapping[str, tuple[int, int]]) -> None:
    """Each protected folder must now be another one than it was, or be read-only."""
    for path, identity in before.items():
        if _identity(path) == identity and not os.statvfs(path).f_flag & syscalls.MS_RDONLY:
            raise OSError(errno.EIO, "the folder is not covered", path)


class _Builder:
    """Builds the new root below the scratch folder, which is the working directory."""

    def __init__(
        self,
        scratch: str,
        policy: Mapping[str, Sequence[str]],
        mounts: Sequence[Mount],
        *,
        user_namespace: bool,
    ) -> None:
        self.root = "root"
        self.notes: list[str] = []
        self._scratch = os.path.realpath(scratch)
        self._rules = all_rules(policy, mounts)
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            for path in listening_sockets(file.read(), policy_rules(policy)):
                if _is_socket(path):
                    self._rules.setdefault(path, THROUGH)
        self._essential = set(policy["protect"])
        self._mounts = [mount.point for mount in mounts]
        self._user_namespace = user_namespace
        self._count = 0
        self._copy_bytes = COPY_BYTES_TOTAL
        self._queue = [(depth(path), path) for path in self._rules]

    def build(self) -> None:
        """Place every piece, outer folders first."""
        for name in ("root", "upper", "work", "lower", "plain"):
            os.mkdir(name, 0o700)
        syscalls.bind(self.root, self.root, recursive=False)
        # Unbindable, so that passing /tmp through does not copy the new root into itself.
        syscalls.mount("none", self.root, None, syscalls.MS_UNBINDABLE)
        heapq.heapify(self._queue)
        while self._queue:
            _, path = heapq.heappop(self._queue)
            self._place(path, self._rules[path])
        syscalls.mount("none", self.root, None, syscalls.MS_PRIVATE)

    def _place(self, path: str, kind: str) -> None:
        if not os.path.lexists(path) or (path != "/" and not os.path.lexists(self._target(path))):
            return
        if kind == THROUGH:
            with contextlib.suppress(FileNotFoundError):  # a socket that was closed just now
                syscalls.bind(path, self._target(path), recursive=True)
        elif not os.path.isdir(path):
            self._read_only(path)
        elif path == "/" or path == self._scratch or below(self._scratch, path):
            self._skeleton(path)
        else:
            self._cover(path)

    def _target(self, path: str) -> str:
        return self.root if path == "/" else self.root + path

    def _cover(self, path: str) -> None:
        try:
            self._overlay(path)
            return
        except OSError as error:
            reason = error.strerror
        if self._user_namespace and any(below(point, path) for point in self._mounts):
            # Mounts taken over from outside a user namespace are locked together.
            with contextlib.suppress(OSError):
                self._skeleton(path)
                if os.access(path, os.W_OK):
                    self.notes.append(
                        f"{path}: larger files directly in it are read-only in trials ({reason})"
                    )
                return
        if os.access(path, os.W_OK):
            self.notes.append(f"{path}: read-only in trials (overlay refused: {reason})")
        self._read_only(path)

    def _overlay(self, path: str) -> None:
        self._count += 1
        upper, work, lower = f"upper/{self._count}", f"work/{self._count}", path
        os.mkdir(upper)
        os.mkdir(work)
        _copy_attributes(path, upper)
        if any(char in path for char in ",:\\"):
            # These separate options and layers: hand the folder over under a plain name.
            lower = f"lower/{self._count}"
            os.mkdir(lower)
            syscalls.bind(path, lower, recursive=False)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        flags = syscalls.mount_flags(path)
        if self._user_namespace:
            syscalls.mount("feedtune", self._target(path), "overlay", flags, options + ",userxattr")
            return
        try:
            # Without redirect_dir a rename of an existing folder fails with EXDEV.
            syscalls.mount("feedtune", self._target(path), "overlay", flags, options + ",redirect_dir=on")
        except OSError:
            syscalls.mount("feedtune", self._target(path), "overlay", flags, options)

    def _read_only(self, path: str) -> None:
        target = self._target(path)
        try:
            syscalls.bind(path, target, recursive=True)
            syscalls.make_read_only(target)
        except OSError:
            if path in self._essential or os.access(path, os.W_OK):
                raise

    def _skeleton(self, path: str) -> None:
        """A plain folder with each entry of ``path`` placed in it on its own."""
        entries = [entry for entry in os.scandir(path) if entry.path != self._scratch]
        if len(entries) > SKELETON_ENTRIES_MAX:
            raise OSError(errno.E2BIG, "too many entries to cover one by one", path)
        self._count += 1
        plain = f"plain/{self._count}"
        os.mkdir(plain)
        for entry in entries:
            self._mount_point(entry, os.path.join(plain, entry.name))
        _copy_attributes(path, plain)
        syscalls.bind(plain, self._target(path), recursive=False)
        for entry in entries:
            if not entry.is_symlink() and entry.path not in self._rules:
                self._rules[entry.path] = COVER
                heapq.heappush(self._queue, (depth(entry.path), entry.path))

    def _mount_point(self, entry: os.DirEntry[str], place: str) -> None:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir():
            os.mkdir(place)
        elif self._is_small(entry):
            shutil.copyfile(entry.path, place)
            _copy_attributes(entry.path, place)
            self._rules[entry.path] = COPIED
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))

    def _is_small(self, entry: os.DirEntry[str]) -> bool:
        """Whether a file is copied, so that it can be changed; a larger one is read-only."""
        found = entry.stat(follow_symlinks=False)
        small = stat.S_ISREG(found.st_mode) and found.st_size <= min(COPY_BYTES_MAX, self._copy_bytes)
        if not small or entry.path in self._rules or not os.access(entry.path, os.R_OK):
            return False
        self._copy_bytes -= found.st_size
        return True


def _is_socket(path: str) -> bool:
    """The path of an open socket may long be another thing's."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _copy_attributes(source: str, target: str) -> None:
    """Owner, mode, access lists and times: the upper folder's are the ones that programs see."""
    found = os.stat(source)
    mode = stat.S_IMODE(found.st_mode)
    if os.getuid() != found.st_uid:
        try:
            os.chown(target, found.st_uid, found.st_gid)
        except OSError:
            # Owned by this user now: take the right to write away where it was not there.
            mode = mode if os.access(source, os.W_OK) else mode & ~0o222
    os.chmod(target, mode)
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        with contextlib.suppress(OSError):
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
