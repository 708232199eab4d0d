"""What a trial may write for real, and what it may only believe to have written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Kernel interfaces and device nodes: covering them breaks programs and protects nothing.
KERNEL_FOLDERS = ("/dev", "/proc", "/sys", "/run")
# Caches that training programs fill; a trial that downloads again each time would time the network.
CACHE_VARIABLES = (
    "XDG_CACHE_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_KERNEL_CACHE_PATH", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_CACHE_PATH",
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE",
    "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "PYTHONPYCACHEPREFIX",
)  # fmt: skip
CACHES_AT_HOME = (".cache", ".nv", ".triton")


@dataclass(frozen=True)
class WritePolicy:
    """Which folders a trial writes for real; everything else is copy-on-write.

    Of the folders that contain a path, the deepest decides; at a tie ``writable`` comes before
    ``protect``, and ``protect`` before ``passthrough``.

    Args:
        protect: folders that are protected even below a pass-through folder.
        writable: folders that are really written: the run folder, ``--writable`` of the user.
        passthrough: folders that are really written because covering them would disturb the
            training: TMPDIR, shared memory, caches, kernel interfaces.
    """

    protect: tuple[str, ...]
    writable: tuple[str, ...]
    passthrough: tuple[str, ...]


def default_policy(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], writable: Sequence[Path]
) -> WritePolicy:
    """The policy for a command: everything it names is protected, TMPDIR and caches are not.

    Args:
        command: the user's command line, program first.
        cwd: the folder it is started in.
        env: its environment.
        writable: the run folder and the user's ``--writable`` folders; they must exist.
    """
    passthrough = _existing([*KERNEL_FOLDERS, "/dev/shm", *_temporary(env), *_caches(env)])
    protect = [str(cwd.resolve()), *_git_top(cwd.resolve()), *_named(command, cwd, passthrough)]
    return WritePolicy(
        protect=_existing(protect),
        writable=tuple(dict.fromkeys(os.path.realpath(path) for path in writable)),
        passthrough=passthrough,
    )


def _existing(paths: Iterable[str]) -> tuple[str, ...]:
    real = (os.path.realpath(os.path.expanduser(path)) for path in paths if path)
    return tuple(dict.fromkeys(path for path in real if os.path.isdir(path)))


def _temporary(env: Mapping[str, str]) -> list[str]:
    return ["/tmp", *_not_too_wide(env, [env.get("TMPDIR", "")])]


def _caches(env: Mapping[str, str]) -> list[str]:
    home = env.get("HOME", "")
    at_home = [os.path.join(home, name) for name in CACHES_AT_HOME] if home else []
    return [*at_home, *_not_too_wide(env, [env.get(name, "") for name in CACHE_VARIABLES])]


def _not_too_wide(env: Mapping[str, str], folders: Iterable[str]) -> list[str]:
    """Without ``/`` and the home folder: a careless TMPDIR must not switch the guard off."""
    wide = {"/", os.path.realpath(env["HOME"]) if env.get("HOME") else "/"}
    return [folder for folder in folders if folder and os.path.realpath(folder) not in wide]


def _git_top(cwd: Path) -> list[str]:
    return [str(folder) for folder in (cwd, *cwd.parents) if (folder / ".git").exists()][:1]


def _named(command: Sequence[str], cwd: Path, passthrough: Sequence[str]) -> list[str]:
    """Folders that the command line names: existing ones, parents of files, of outputs to be made."""
    found = []
    for word in command[1:]:
        for text in {word, word.partition("=")[2]}:
            folder = _folder_of(text, cwd, passthrough)
            if folder and folder not in ("/dev/shm", *KERNEL_FOLDERS) and not _in_kernel(folder):
                found.append(folder)
    return found


def _folder_of(text: str, cwd: Path, passthrough: Sequence[str]) -> str | None:
    if not text or text.startswith("-") or "://" in text or len(text) > 4096 or "\0" in text:
        return None
    path = os.path.realpath(os.path.join(cwd, os.path.expanduser(text)))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        return os.path.dirname(path)
    if "/" not in text:
        return None
    # An output that is still to be made: left behind in /tmp it would change the next real run
    # (a script that finds its output folder resumes from it).
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path if any(path == top or path.startswith(top + "/") for top in passthrough) else None


def _in_kernel(folder: str) -> bool:
    return folder.startswith(("/proc/", "/sys/"))
