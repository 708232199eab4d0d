"""Start-up folders of trainings that are the user's real ones: several at once, damaged, or gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from feedtune.launch.boot import BootFolder

FINDERS = (
    "import sys; print([f.__module__.split('.')[0] for f in sys.meta_path if type(f).__name__ == '_Finder'])"
)


def boot(path: Path, name: str, mode: str) -> BootFolder:
    identity = {"frames": [], "dataset": "D", "sampler": "S", "batch_size": 1}
    config = {"mode": mode, "records": str(path.parent), "steps": None, "settings": {}, "identity": identity}
    folder = BootFolder(path, name, config)
    folder.set_start(1)
    return folder


def python(env: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_run_inside_another_hooks_once_for_each(tmp_path: Path) -> None:
    outer, inner = boot(tmp_path / "outer", "outer", "run"), boot(tmp_path / "inner", "inner", "apply")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins; builtins.MINE = 1\n")
    env = inner.environment(outer.environment({**clean(), "PYTHONPATH": str(tmp_path / "mine")}))
    assert python(env, FINDERS).stdout.strip() == "['_feedtune_outer', '_feedtune_inner']"
    done = python(env, "from torch.utils.data import DataLoader as D; print(len(D([1])), MINE)")
    assert done.stdout == "1 1\n"
    assert done.stderr.count("feedtune apply: no DataLoader") == 1
    assert outer.seen() == {"python", "torch", "loader"}


def test_another_tools_sitecustomize_that_passes_on_as_ours_does(tmp_path: Path) -> None:
    """It looks for the next one everywhere but in its own folder, and finds ours again."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "sitecustomize.py").write_text(
        "import builtins, importlib.machinery, importlib.util, os, sys\n"
        "builtins.TIMES = getattr(builtins, 'TIMES', 0) + 1\n"
        "assert TIMES < 5\n"
        "rest = [p for p in sys.path if p != os.path.dirname(__file__)]\n"
        "spec = importlib.machinery.PathFinder.find_spec('sitecustomize', rest)\n"
        "if spec:\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
    )
    env = boot(tmp_path / "boot", "ours", "run").environment(
        {**clean(), "PYTHONPATH": str(tmp_path / "tool")}
    )
    done = python(env, FINDERS + "; print(TIMES)")
    assert done.stdout == "['_feedtune_ours']\n1\n"
    assert done.stderr == ""


@pytest.mark.parametrize("mode", ["run", "apply"])
def test_a_hook_that_cannot_be_made_leaves_torch_as_it_is(tmp_path: Path, mode: str) -> None:
    folder = boot(tmp_path / "boot", "broken", mode)
    (folder.path / "_feedtune_broken" / "hook.py").write_text("def patch(*_): raise KeyError('changed')\n")
    code = "from torch.utils.data import DataLoader as D; print(len(D([1])))"
    done = python(folder.environment(clean()), code)
    assert done.stdout == "1\n"
    if mode == "apply":
        assert done.stderr == (
            "feedtune apply: cannot hook into torch (KeyError('changed')); settings are not applied\n"
        )
    else:
        assert done.stderr == ""
        assert "changed" in folder.error()


def test_a_folder_that_goes_while_a_program_runs_breaks_nothing(tmp_path: Path) -> None:
    """A program in the background can import torch after the run has ended."""
    folder = boot(tmp_path / "boot", "gone", "run")
    code = (
        f"import shutil; shutil.rmtree({str(folder.path)!r})\n"
        "from torch.utils.data import DataLoader as D; print(len(D([1])))"
    )
    done = python(folder.environment(clean()), code)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_folder_without_a_place_for_signs_and_with_a_fault(tmp_path: Path) -> None:
    folder = boot(tmp_path / "boot", "half", "apply")
    shutil.rmtree(folder.path / "seen")
    (folder.path / "config.json").write_text("{")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins; builtins.MINE = 1\n")
    done = python(folder.environment({**clean(), "PYTHONPATH": str(tmp_path / "mine")}), "print(MINE)")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_apply_leaves_no_signs_in_a_folder_that_stays(tmp_path: Path) -> None:
    folder = boot(tmp_path / "boot", "quiet", "apply")
    python(folder.environment(clean()), "import torch.utils.data")
    assert folder.seen() == set()
