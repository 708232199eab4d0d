"""What a user asks of a tuning, and where its run folder may lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shard_tools.errors import BadInput


@dataclass(frozen=True)
class TuneOptions:
    """What the user asks for.

    Attributes:
        command: the training command, as it is typed without feedtune.
        out: run folder; ``None`` makes one outside the work folder.
        budget_s: seconds that the whole tuning should take.
        trials: settings measured before the confirmation.
        pairs: interleaved pairs of the confirmation; at least 4 for a usable interval.
        block_s: measured seconds of a block.
        max_workers: upper bound of workers a rank; ``None`` lets the core count decide.
        fixed: settings held fast.
        writable: folders that the script really writes.
        hang_timeout_s: silence of all ranks after which a block counts as hanging; a step that is known to
            take longer than a tenth of it is given ten times its length.
        isolate: start the script anew for each trial; start methods of workers are searched, too.
        allow_semantic: also try settings that can change what is learned.
        loader: the training loader, as ``FILE:LINE`` where it is made; ``None`` finds it.
    """

    command: Sequence[str]
    out: Path | None = None
    budget_s: float = 120.0
    trials: int = 12
    pairs: int = 4
    block_s: float = 1.2
    max_workers: int | None = None
    fixed: Mapping[str, int | bool | str] = field(default_factory=dict)
    writable: Sequence[Path] = ()
    start_timeout_s: float = 900.0
    guard: str = "auto"
    hang_timeout_s: float = 60.0
    isolate: bool = False
    allow_semantic: bool = False
    loader: str | None = None


def check_out(out: Path | None) -> None:
    """Refuse run folders that would undo the write guard or break PYTHONPATH."""
    if out is None:
        return
    path, cwd = Path(os.path.realpath(out)), Path.cwd()
    if path == cwd or path in cwd.parents:
        raise BadInput(
            f"--out {out} holds the work folder, and the run folder is really written",
            "name a folder of its own",
        )
    if os.pathsep in str(path):
        raise BadInput(f"--out {out}: a '{os.pathsep}' in its path would split PYTHONPATH", "name another")


def check_fixed(options: TuneOptions) -> None:
    """Refuse settings that need an option which was not given."""
    if "multiprocessing_context" in options.fixed and not options.isolate:
        raise BadInput("--set multiprocessing_context changes how processes start", "add --isolate")
    if options.fixed.get("in_order") is False and not options.allow_semantic:
        raise BadInput("--set in_order=false changes what is learned", "add --allow-semantic")


def existing_folders(paths: Sequence[Path]) -> Sequence[Path]:
    """The folders of ``--writable``, if they are there."""
    for path in paths:
        if not path.is_dir():
            raise BadInput(f"--writable {path}: no such folder")
    return paths


def working_folder() -> Path:
    """The folder the command is started in.

    Raises:
        BadInput: it has been deleted meanwhile.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise BadInput("the working folder has been deleted", "change to a folder that exists") from error


def run_name(command: Sequence[str]) -> str:
    """A name for the run folder: the script's, else the program's."""
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    return scripts[0] if scripts else Path(command[0]).name
