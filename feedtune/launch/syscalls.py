"""The few Linux calls that Python lacks: mounts, namespaces, process control.

Standard library only: the guardian runs it without any installed package.
"""

from __future__ import annotations

import ctypes
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE = 1 << 17, 1 << 18, 1 << 19
MS_RELATIME, MS_NOATIME, MS_NODIRATIME = 1 << 21, 1024, 2048
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
SYS_MOUNT_SETATTR = 442
# Numbers that differ between machines; from 424 on all architectures share one table.
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "s390x": 217, "riscv64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, where: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), where)
    return result


def syscall(number: int, *args: object, where: str = "") -> int:
    """A raw system call; integers are passed as 64-bit words.

    Raises:
        OSError: the call failed; ``filename`` is ``where``.
    """
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    _libc.syscall.restype = ctypes.c_long
    return _check(_libc.syscall(ctypes.c_long(number), *words), where)


def mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    """Mount, or change a mount; the target is the file name of the error."""
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            fstype.encode() if fstype else None,
            ctypes.c_ulong(flags),
            os.fsencode(data) if data is not None else None,
        ),
        target,
    )


def bind(source: str, target: str, *, recursive: bool) -> None:
    """Let ``source`` appear at ``target`` too."""
    mount(source, target, None, MS_BIND | (MS_REC if recursive else 0))


def make_read_only(target: str) -> None:
    """Make a bind mount, and the mounts below it, read-only in this namespace.

    Falls back to a plain remount (this one mount only) on kernels before 5.12.
    """
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    try:
        syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            os.fsencode(target),
            AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),
            where=target,
        )
    except OSError:
        flags = mount_flags(target)
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def mount_flags(path: str) -> int:
    """nosuid, nodev, noexec and the atime flags of the mount that holds ``path``."""
    found = os.statvfs(path).f_flag
    flags = found & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    return flags | (MS_RELATIME if found & 4096 else 0)


def umount_detach(target: str) -> None:
    """Take a mount out of the tree now; it is freed when its last user is gone."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make a mount the root of this namespace; the C library does not wrap this call."""
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(38, "pivot_root: unknown system call number on this machine")
    syscall(number, os.fsencode(new_root), os.fsencode(put_old), where="pivot_root")


def unshare(flags: int) -> None:
    """Leave namespaces that are shared with other processes."""
    _check(_libc.unshare(flags), "unshare")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")
