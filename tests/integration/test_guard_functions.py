"""Less common ways to write a file: under every tier of the write guard, and in every Python that is here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from test_guard_tiers import DRIVER, PLAIN, PROGRAM, ROOT, TIERS, Place, base, digest, prepare
from tuning import SCRIPTS

from feedtune.launch.boot import BootFolder

__all__ = ["base"]  # a fixture

SCRIPT = (SCRIPTS / "libraries" / "file_functions.py").read_text()
NAMES = re.findall(r"^def (\w+)\(\):$", SCRIPT, re.MULTILINE)
NAMES.remove("main")
STANDARD = [name for name in NAMES if not name.startswith(("torch_", "safetensors_"))]
OTHERS = ("3.9", "3.10", "3.12", "3.13", "3.14")


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "old.txt").write_text("old" * 10)
    with sqlite3.connect(folder / "old.db") as data:
        data.execute("create table t (a)")
        data.execute("insert into t values (0)")
    data.close()


def here(names: list[str]) -> list[str]:
    """Without what needs a package that is not installed."""
    missing = importlib.util.find_spec("safetensors") is None
    return [name for name in names if not (missing and name.startswith("safetensors_"))]


@pytest.mark.parametrize("tier", TIERS)
def test_other_ways_to_write_are_redirected(base: Path, tier: str) -> None:
    if base.parent != Path("/tmp") and tier == "python":
        pytest.skip("the same code as under /tmp")
    place = Place(base, os.getuid())
    for name in NAMES:
        fill(place.cwd / name)
    (place.cwd / "program.py").write_text(SCRIPT)
    before = digest(place.cwd)
    result, log = place.guarded(["program.py", str(place.run / "outcome.json"), *here(NAMES)], tier)
    assert result["code"] == 0, log
    bad = json.loads((place.run / "outcome.json").read_text())
    assert not bad, "\n".join(bad.values())
    assert digest(place.cwd) == before


def interpreter(version: str) -> str:
    """A Python of another version: by its name, or where pyenv keeps it."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for path in [*map(str, kept), shutil.which(f"python{version}")]:
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", OTHERS)
def test_python_of_other_versions_is_redirected(base: Path, version: str) -> None:
    if base.parent != Path("/tmp"):
        pytest.skip("the same code as under /tmp")
    python = interpreter(version)
    place = Place(base, os.getuid())
    for name in PLAIN:
        prepare(place.cwd / name)
    for name in STANDARD:
        fill(place.cwd / name)
    (place.cwd / "tiers.py").write_text(PROGRAM)
    (place.cwd / "functions.py").write_text(SCRIPT)
    before = digest(place.cwd)
    outcomes = [place.run / "outcome.json", place.run / "functions.json"]
    for words in (["tiers.py", place.run, *PLAIN], ["functions.py", outcomes[1], *STANDARD]):
        request = {
            "command": [python, *map(str, words)], "cwd": str(place.cwd), "writable": [str(place.run)],
            "env": {"PYTHONPATH": str(place.site)}, "log": str(place.run / "log"),
            "run_id": uuid.uuid4().hex, "tier": "python",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(request)], capture_output=True, text=True, check=False,
            cwd="/", env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(base)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["code"] == 0, (place.run / "log").read_text()
    (Path("/dev/shm") / place.run.name).unlink()
    for outcome in outcomes:
        bad = json.loads(outcome.read_text())
        assert not bad, "\n".join(bad.values())
    assert digest(place.cwd) == before


@pytest.mark.parametrize("only", [True, False])
def test_what_a_rank_starts_is_guarded_but_no_rank_itself(tmp_path: Path, only: bool) -> None:
    boot = BootFolder(tmp_path / "boot", "00ff", {"records": str(tmp_path), "mode": "tune"})
    boot.set_start(1)
    guard = {"upper": str(tmp_path / "upper"), "passthrough": [], "writable": [], "protect": []}
    env = boot.environment({**os.environ, "FEEDTUNE_GUARD": json.dumps(guard)})
    code = "open('new', 'w').write('1'); import torch.utils.data.dataloader as d; "
    code += "print(hasattr(d.DataLoader.__init__, '__wrapped__'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**env, "FEEDTUNE_GUARD_ONLY": "1"} if only else env,
    )  # fmt: skip
    assert done.stdout.strip() == str(not only), done.stderr
    assert not (tmp_path / "new").exists()
