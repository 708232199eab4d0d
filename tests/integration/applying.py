"""Run folders and scripts for tests of ``feedtune run`` and ``feedtune apply``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tuning import result_of

import feedtune

SCHEMAS = Path(feedtune.__file__).parent / "docs" / "schemas"


def tuned(folder: Path, identity: dict, **settings) -> Path:
    """A run folder as a tuning leaves it, with settings for a loader."""
    values = {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, **settings}
    required = json.loads((SCHEMAS / "feedtune.tune-1.json").read_text())["required"]
    document = {
        **dict.fromkeys(required),
        "schema": "feedtune.tune/1",
        "outcome": "gain",
        "gain": {"ratio": 2.0, "low": 1.9, "high": 2.1},
        "best": {"settings": values},
        "loader": {"identity": identity},
        "command": ["python", "train.py"],
        "verdict": "",
    }
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(document))
    return folder


def identity_of(run: Path) -> dict:
    return result_of(run)["trainings"][0]["loader"]["identity"]


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return path
