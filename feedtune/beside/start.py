"""Start the samplers beside a training, and stop them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from feedtune.beside.readings import FILE_NAME

_STOP_SECONDS = 3.0
_CODE = (
    "import sys; sys.path[:0] = [sys.argv[1]]; sys.path += filter(None, [sys.argv[2]]); "
    "from feedtune.beside.sampler import main; sys.exit(main(sys.argv[3:]))"
)


class SamplerHandle:
    """A sampler process that was started; none of its methods raises on the sampler's account."""

    def __init__(self, process: subprocess.Popen[bytes] | None, why: str = "") -> None:
        self._process = process
        self._why = why

    @property
    def pid(self) -> int | None:
        """Its process; ``None`` if it could not be started."""
        return self._process.pid if self._process else None

    def follow(self, pid: int) -> None:
        """The command runs now, as this process: read its tree and its cgroups from here on."""
        self._order(f"root {pid}\n")

    def stop(self) -> str | None:
        """End it; ``None``, or why it did not record to the end. May be called again."""
        process = self._process
        if process is None or process.stdin is None or process.stderr is None or process.stdin.closed:
            return self._why or None
        self._order("stop\n")
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            self._why = "a read did not return: the samplers had to be killed"
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can hold it even then
                process.wait(_STOP_SECONDS)
        if process.returncode and not self._why:
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            self._why = said[-1] if said else _ended(process.returncode)
        process.stderr.close()
        return self._why or None

    def __enter__(self) -> SamplerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _order(self, text: str) -> None:
        if self._process and self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), text.encode())


def start_sampler(run: Path, root_pid: int | None, interval_s: float = 1.0) -> SamplerHandle:
    """Start the samplers in a process of their own; they write ``readings.jsonl`` in the run folder.

    It takes no signal of the terminal, and ends within seconds of this process, however that ends.

    Args:
        run: the run folder.
        root_pid: the training command; ``None`` if it does not run yet: ``follow`` tells it later.
        interval_s: seconds between ticks.
    """
    root = str(Path(__file__).resolve().parents[2])
    words = [
        str(run.resolve()),
        str(os.getpid()),
        "-" if root_pid is None else str(root_pid),
        str(interval_s),
    ]
    try:
        process = subprocess.Popen(
            # -I: nothing of the user's folders or variables is imported.
            [sys.executable, "-I", "-c", _CODE, root, _nvml_folder(), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        return SamplerHandle(None, f"no process for the samplers could be started: {error.strerror}")
    return SamplerHandle(process)


def _nvml_folder() -> str:
    """Where ``pynvml`` lies; -I hides packages of the user's own site folder."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("pynvml")
        if spec and spec.origin:
            return str(Path(spec.origin).parent)
    return ""


def _ended(code: int) -> str:
    if code < 0:
        return f"the samplers were ended by {signal.Signals(-code).name}"
    return f"the samplers ended with exit code {code}; {FILE_NAME} holds what they had read"
