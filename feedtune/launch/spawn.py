"""Start the command under the best write guard that works here. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from feedtune.launch import landlock, overlay, scratch, syscalls

CONFIG_VARIABLE = "FEEDTUNE_GUARD"
VARIABLES_FILE = "variables.json"
TIERS = ("overlay", "python+landlock", "python")
_REFUSED = (
    "only writes by Python code are redirected; writes by other programs and native libraries are refused "
    "(EACCES), and their changes of mode, owner and times are not guarded"
)
_UNGUARDED = (
    "only writes by Python code are redirected; writes by other programs and native libraries are NOT "
    "guarded (Landlock is not active)"
)
# What Python and the guardian ignore would stay ignored in the command: signals survive an exec.
_RESET = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGPIPE,
    signal.SIGXFSZ, signal.SIGCHLD,
)  # fmt: skip


class GuardRefused(Exception):
    """A tier does not work here; the next one is tried."""


class CannotStart(Exception):
    """The command itself cannot be started."""


@dataclass
class Started:
    """A command that runs, and how it is guarded."""

    pid: int
    tier: str
    notes: list[str]
    scratch: scratch.Scratch
    upper: str


def start(request: Mapping[str, Any]) -> Started:
    """Start the command under the best tier that works here.

    Raises:
        GuardRefused: no tier that was asked for works.
        CannotStart: the command cannot be executed.
    """
    wanted = TIERS if request["tier"] == "auto" else (request["tier"],)
    refusals: list[str] = []
    bases = scratch.candidates(request["env"], request["policy"])
    for tier in wanted:
        for base in bases:
            started = _try_tier(request, tier, base, refusals)
            if started:
                return started
    raise GuardRefused("; ".join(dict.fromkeys(refusals)) or "no folder for scratch can be written")


def _try_tier(request: Mapping[str, Any], tier: str, base: str, refusals: list[str]) -> Started | None:
    try:
        return _start_tier(request, tier, base, refusals)
    except GuardRefused as error:
        refusals.append(f"{tier} guard not available ({error})")
        return None


def _start_tier(request: Mapping[str, Any], tier: str, base: str, refusals: Sequence[str]) -> Started:
    with contextlib.suppress(OSError):
        scratch.sweep(base)
    try:
        place = scratch.Scratch(base)
    except OSError as error:
        raise GuardRefused(f"{base}: {error.strerror}") from error
    inner = place.inner()
    try:
        pid, notes = _spawn(request, tier, inner)
    except BaseException:
        place.remove()
        raise
    if base == "/dev/shm":
        notes.append("redirected writes are kept in memory (/dev/shm): no other folder could hold them")
    return Started(pid, tier, [*dict.fromkeys(refusals), *notes], place, os.path.join(inner, "upper"))


def _spawn(request: Mapping[str, Any], tier: str, inner: str) -> tuple[int, list[str]]:
    """Fork, guard the child, execute the command in it; the pipe closes at the exec."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(request, tier, inner, writer)
    os.close(writer)
    answer: dict[str, Any] = {}
    with os.fdopen(reader, "rb") as stream:
        for line in stream:
            answer.update(json.loads(line))
    if "refused" in answer or "cannot" in answer or "notes" not in answer:
        os.waitpid(pid, 0)
    if "cannot" in answer:
        raise CannotStart(answer["cannot"])
    if "notes" not in answer:
        raise GuardRefused(answer.get("refused", "the guarded process ended early"))
    return pid, answer["notes"]


def _child(request: Mapping[str, Any], tier: str, inner: str, writer: int) -> NoReturn:
    def answer(**words: Any) -> None:
        os.write(writer, json.dumps(words).encode() + b"\n")

    try:
        env = dict(request["env"])
        _detach(request["log"])
        notes = _guard(request["policy"], tier, inner, env)
        _leave_in(request["boot"], {name: env[name] for name in env if env[name] != request["env"].get(name)})
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(request["cwd"])
        answer(notes=notes)
    except OSError as error:
        answer(refused=f"{error.filename}: {error.strerror}" if error.filename else str(error))
        os._exit(126)
    try:
        os.execvpe(request["command"][0], request["command"], env)
    except OSError as error:
        answer(cannot=error.strerror)
    finally:
        os._exit(127)


def _detach(log: str) -> None:
    """A session of its own, signals as a shell would hand them on, no terminal, output to the log."""
    signal.set_wakeup_fd(-1)
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _guard(policy: Mapping[str, Sequence[str]], tier: str, inner: str, env: dict[str, str]) -> list[str]:
    """Put this process under a tier; adds to the environment what the hook needs to know of it."""
    env.pop(CONFIG_VARIABLE, None)
    if tier == "overlay":
        notes, user_namespace = overlay.enter(inner, policy)
        if user_namespace:
            # Overlayfs without privileges cannot rename existing folders; the hook copies them then.
            env[CONFIG_VARIABLE] = json.dumps({"renames_only": True})
        return notes
    os.mkdir(os.path.join(inner, "upper"))
    os.mkdir(os.path.join(inner, "tmp"))
    paths = [*landlock.writable_paths(policy), inner]
    config = {"upper": os.path.join(inner, "upper"), "passthrough": paths, "writable": [], "protect": []}
    config["protect"] = [path for path in policy["protect"] if not landlock.is_writable(path, paths, policy)]
    notes = _own_tmp(os.path.join(inner, "tmp"), policy, paths, env)
    env[CONFIG_VARIABLE] = json.dumps(config)
    if tier == "python+landlock":
        landlock.restrict(paths)
        return [*notes, _REFUSED]
    return [*notes, _UNGUARDED]


def _leave_in(folder: str | None, variables: Mapping[str, str]) -> None:
    """Leave the variables of the guard in the start-up folder, too: launchers may drop them."""
    if folder is None:
        return
    path = os.path.join(folder, VARIABLES_FILE)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a tier that was refused
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as stream:
        json.dump(dict(variables), stream)


def _own_tmp(
    fresh: str, policy: Mapping[str, Sequence[str]], paths: Sequence[str], env: dict[str, str]
) -> list[str]:
    """Give the command a temporary folder of its own where its usual one holds something protected."""
    usual = os.path.realpath(env.get("TMPDIR") or "/tmp")
    if landlock.is_writable(usual, paths, policy):
        return []
    env["TMPDIR"] = fresh
    return [f"TMPDIR is a private folder in trials: {usual} holds a folder that is protected"]
