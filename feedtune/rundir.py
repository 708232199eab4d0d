"""The run folder: every stage ends in a file here that the next one reads; if a file exists, it is whole."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shard_tools.errors import BadInput

RUN_FORMAT = "feedtune.rundir/1"
_SCHEMAS = Path(__file__).parent / "docs" / "schemas"
RESULTS = ("feedtune.tune/1", "feedtune.run/1")  # what a result.json may hold
_SECRET_NAME = (
    r"(?:[\w.-]*(?:token|secret|password|passwd|passphrase|api[-_.]?key|credentials?)"
    r"|(?:[\w.-]*[-_.])?(?:auth|key|pwd))(?![A-Za-z])[\w.-]*"
)
_OPTION = re.compile(rf"(?i)-{{1,2}}{_SECRET_NAME}$")  # its value is the next word
_SECRETS = (
    re.compile(rf"(?i)(\b{_SECRET_NAME}=)[^\s;,\"']+"),
    re.compile(r"(://)[^/@\s]+(?=@)"),
    re.compile(r"(?i)(\bauthorization\s*:\s*|\bbearer\s+)[^\"';]+"),
)


def default_runs_folder() -> Path:
    """``$XDG_STATE_HOME/feedtune/runs``, outside anybody's work folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "feedtune" / "runs"


class RunDir:
    """A run folder that is being written.

    Args:
        path: the folder; it must not hold another run.

    Raises:
        BadInput: the folder holds something already, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.path} is no folder", "name a new folder with --out")
        if self.path.exists() and any(self.path.iterdir()):
            raise BadInput(
                f"{self.path} is not empty: it may hold another run", "name a new folder with --out"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"cannot make the run folder {self.path}: {error.strerror}", "name another with --out"
            ) from error

    @classmethod
    def new(cls, out: Path | None, name: str) -> RunDir:
        """The folder named by ``--out``, else ``<time>-<name>`` below the default folder."""
        if out is not None:
            return cls(out)
        word = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "run"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = default_runs_folder() / f"{stamp}-{word}"
        path, number = base, 1
        while path.exists():
            number += 1
            path = base.with_name(f"{base.name}.{number}")
        return cls(path)

    @property
    def log(self) -> Path:
        """Output of the user's command."""
        return self.path / "command.log"

    @property
    def journal(self) -> Path:
        """The Optuna study."""
        return self.path / "study.journal"

    def write_json(self, name: str, document: dict[str, Any]) -> None:
        """Write one document whole: temporary name, fsync, rename."""
        target = self.path / name
        temporary = target.with_name(f".{name}.tmp")
        with open(temporary, "w", encoding="utf-8", opener=_private) as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def append_json(self, name: str, document: dict[str, Any]) -> None:
        """Append one line to a ``.jsonl`` file."""
        with open(self.path / name, "a", encoding="utf-8", opener=_private) as file:
            file.write(json.dumps(document) + "\n")

    def read_steps(self, rank: int, offset: int) -> tuple[list[list[Any]], int]:
        """Step lines of a rank from a byte offset on: ``([[k, step, ...], ...], new offset)``."""
        path = self.path / f"steps.rank{rank}.jsonl"
        if not path.exists():
            return [], offset
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a killed rank can leave half a line
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)


def _private(path: str, flags: int) -> int:
    """An opener: a folder that is named by --out may be open to others, what a run writes there is not."""
    return os.open(path, flags, 0o600)


def read_result(run: Path) -> dict[str, Any]:
    """The result of a run folder.

    Raises:
        BadInput: no such folder, or no result in it yet.
    """
    path = run / "result.json" if run.is_dir() else run
    if not path.exists():
        if (path.parent / "run.json").exists():
            kept = sorted(one.name for one in path.parent.glob("*.jsonl")) or ["nothing"]
            raise BadInput(
                f"{run} was killed before it had a result", f"what it had recorded: {', '.join(kept)} there"
            )
        raise BadInput(f"{run} holds no result.json", "name the folder that a feedtune run has printed")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") not in RESULTS:
        raise BadInput(f"{path} is no result of feedtune", "name the folder that a feedtune run has printed")
    schema = _SCHEMAS / f"{document['schema'].replace('/', '-')}.json"
    missing = set(json.loads(schema.read_text(encoding="utf-8"))["required"]) - document.keys()
    if missing:
        raise BadInput(f"{path} is not whole: it lacks {', '.join(sorted(missing))}", "run it again")
    return document


def redact(command: Sequence[str]) -> list[str]:
    """The command line with the values of secret-looking arguments taken out, for storing."""
    return list(_redacted(command))


def _redacted(command: Sequence[str]) -> Iterator[str]:
    hide = False
    for word in command:
        if hide and not word.startswith("--"):
            yield "***"
            hide = False
            continue
        hide = bool(_OPTION.match(word))
        for pattern in _SECRETS:
            word = pattern.sub(r"\1***", word)
        yield word
