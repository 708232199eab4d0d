"""Start-up folders that outlive their run: made once, shared by all starts, holding nothing secret."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feedtune.launch.boot import BootFolder


def lasting_folder(parent: Path, config: Mapping[str, Any]) -> BootFolder:
    """The start-up folder below ``parent`` for a configuration.

    Its name tells its content, so one that is there is the same one. It is made under another name first:
    two starts at the same time do not see each other's half.

    Raises:
        OSError: the parent cannot be written.
    """
    parent.mkdir(mode=0o700, exist_ok=True)
    making = parent / f".making-{secrets.token_hex(8)}"
    try:
        run_id = "apply"
        BootFolder(making, run_id, config).set_start(1)
        content = _content(making)
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        target = parent / digest
        if target.is_dir() and _content(target) != content:  # damaged: nothing that runs can use it
            aside = making.with_suffix(".old")
            os.rename(target, aside)
            shutil.rmtree(aside)
        try:
            os.rename(making, target)
        except OSError:  # it is there already, or another start was faster
            if not target.is_dir() or _content(target) != content:
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return BootFolder(target, run_id, config)


def _content(folder: Path) -> dict[str, str]:
    """Relative names and hashes of what a folder holds, compiled files left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and "seen" not in path.parts:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
