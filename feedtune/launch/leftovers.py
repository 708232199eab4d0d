"""What killed processes leave in shared memory and in the temporary folder. Standard library only.

Libraries clean up at exit, not at SIGKILL. Only names that libraries generate are ever removed, of
this user, made after the tree was started, and tied to one of its processes: by a pid in the name,
or by a process that had it open, mapped, bound as a socket or named in its environment. A data set
that someone keeps in /dev/shm is none of these.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable

_SHM = "/dev/shm"
_TORCH_SEGMENT = re.compile(r"torch_(\d+)_")
# Python, NCCL, UCX, OpenMPI, glibc semaphores.
_SEGMENT = re.compile(r"(torch_\d+_|psm_|mp-|pym-|sem\.|nccl-|vader_segment|ucx_shm)")
# torchrun's log folder, torch's shared memory manager, multiprocessing's sockets.
_FOLDER = re.compile(r"(/[^\0\n:=]*?/(?:torchelastic_|torch-shm-dir-|pymp-)\w+)")


def held_by(pids: Iterable[int]) -> set[str]:
    """Paths of shared memory and temporary folders that processes hold now."""
    sockets, segments = _socket_paths(), _segments()
    found: set[str] = set()
    for pid in pids:
        found |= {segments[key] for key in _mapped(pid) if key in segments}
        for text in _texts(pid, sockets):
            found |= set(_FOLDER.findall(text))
            if text.startswith(_SHM + "/"):
                found.add(text)
    return found


def _segments() -> dict[tuple[int, int], str]:
    """Device and inode -> path of everything in shared memory."""
    found = {}
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):  # gone between listing and looking
            status = entry.stat(follow_symlinks=False)
            found[status.st_dev, status.st_ino] = entry.path
    return found


def _mapped(pid: int) -> set[tuple[int, int]]:
    """Device and inode of what a process has mapped from shared memory.

    Not the path: in its creator a semaphore is mapped under a name that glibc has removed since.
    """
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            if _SHM in line:
                device, inode = line.split(None, 5)[3:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def named_by(pid: int) -> set[str]:
    """Temporary folders that stand in a process's environment: torchrun's, in those of its ranks."""
    try:
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            return set(_FOLDER.findall(file.read()))
    except OSError:
        return set()


def _socket_paths() -> dict[str, str]:
    """Inode -> path of every socket that has one."""
    with open("/proc/net/unix", errors="replace") as file:
        rows = [line.split(None, 7) for line in file]
    return {row[6]: row[7].strip() for row in rows if len(row) == 8}


def _texts(pid: int, sockets: dict[str, str]) -> list[str]:
    """Everything a process shows that can name a path."""
    texts = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", errors="replace") as file:
        texts += file.read().split("\0")
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                texts.append(sockets.get(target[8:-1], "") if target.startswith("socket:[") else target)
    return texts


def noted_workers(folder: str) -> set[int]:
    """Pids of workers that the hook has noted in a start-up folder: some live too shortly to be seen."""
    try:
        with open(os.path.join(folder, "seen", "workers")) as file:
            return {int(line) for line in file if line.strip().isdigit()}
    except (OSError, ValueError):
        return set()


def remove_leftovers(pids: Iterable[int], held: Iterable[str], since: float) -> list[str]:
    """Remove what a killed tree left behind.

    Args:
        pids: processes of the tree, dead by now; one that lives is another process with its number.
        held: what they held, from `held_by`.
        since: Unix time when the tree was started.

    Returns:
        The paths that went.
    """
    dead, wanted = {pid for pid in pids if not _lives(pid)}, set(held)
    paths = [path for path in wanted if os.path.dirname(path) != _SHM]
    for entry in os.scandir(_SHM):
        match = _TORCH_SEGMENT.match(entry.name)
        if int(match.group(1)) in dead if match else entry.path in wanted and _SEGMENT.match(entry.name):
            paths.append(entry.path)
    return [path for path in paths if _remove(path, since)]


def _lives(pid: int) -> bool:
    """Whether the number belongs to a process now: another one's, where the tree is dead."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _remove(path: str, since: float) -> bool:
    try:
        found = os.lstat(path)
        if found.st_uid != os.getuid() or found.st_ctime < since - 1:
            return False
        if os.path.isdir(path) and not os.path.islink(path):
            return remove_tree(path)
        os.unlink(path)
    except OSError:
        return False
    return True


def remove_tree(path: str) -> bool:
    """Remove a scratch folder, entries without permissions (overlay's work folders) included."""
    if not os.path.lexists(path):
        return True
    for folder, names, _ in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                inner = os.path.join(folder, name)
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
