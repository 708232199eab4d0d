"""The start-up folder: private, self-contained, and harmless to whatever Python starts with it."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import feedtune.inside
from feedtune.launch.boot import BootFolder

INSIDE = Path(feedtune.inside.__file__).parent
STOCK = Path("/usr/bin/python3")  # an interpreter that has neither feedtune nor torch
CONFIG = {"host": "127.0.0.1", "port": 1, "token": "s3cr3t", "records": "/nowhere"}


@pytest.fixture
def boot(tmp_path) -> BootFolder:
    folder = BootFolder(tmp_path / "boot", "abc123", CONFIG)
    folder.set_start(1)
    return folder


def python(boot: BootFolder, code: str, *options: str, interpreter=sys.executable, **variables: str) -> str:
    """The output of a Python program that starts with the folder; what it says on stderr must be nothing."""
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FEEDTUNE_GUARD")}
    done = subprocess.run(
        [str(interpreter), *options, "-c", code],
        env=boot.environment({**base, **variables}),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_it(boot) -> None:
    assert mode(boot.path) == 0o700
    assert mode(boot.path / "seen") == 0o700
    assert mode(boot.path / "config.json") == 0o600
    boot.set_start(2)
    assert mode(boot.path / "config.json") == 0o600
    assert not list(boot.path.glob("*.tmp"))


def test_the_token_stands_in_no_variable_and_in_no_other_file(boot) -> None:
    assert not any("s3cr3t" in value for value in boot.environment({}).values())
    holding = [p for p in boot.path.rglob("*") if p.is_file() and b"s3cr3t" in p.read_bytes()]
    assert holding == [boot.path / "config.json"]


def test_the_users_pythonpath_is_kept_behind_ours(boot, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_module.py").write_text("VALUE = 5\n")
    env = boot.environment({"PYTHONPATH": str(tmp_path / "mine"), "OTHER": "x"})
    assert env == {"PYTHONPATH": f"{boot.path}{os.pathsep}{tmp_path / 'mine'}", "OTHER": "x"}
    assert boot.environment({})["PYTHONPATH"] == str(boot.path)
    assert boot.environment({"PYTHONPATH": ""})["PYTHONPATH"] == str(boot.path)
    found = python(boot, "import my_module; print(my_module.VALUE)", PYTHONPATH=str(tmp_path / "mine"))
    assert found == "5"


def test_a_python_that_starts_leaves_its_sign(boot) -> None:
    assert boot.seen() == set()
    assert python(boot, "print('ran')") == "ran"
    assert boot.seen() == {"python"}
    boot.set_start(2)
    assert boot.seen() == set()


def test_nothing_is_imported_that_the_script_did_not_ask_for(boot) -> None:
    code = "import sys; print([m for m in ('torch', 'numpy', 'feedtune', 'typer') if m in sys.modules])"
    assert python(boot, code) == "[]"


def test_the_users_own_sitecustomize_is_run(boot, tmp_path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import builtins\nbuiltins.MINE = __file__\n")
    code = "import sys, sitecustomize; print(MINE, sitecustomize.__file__)"
    mine_file = str(mine / "sitecustomize.py")
    assert python(boot, code, PYTHONPATH=str(mine)).split() == [mine_file, mine_file]
    assert boot.seen() == {"python"}


@pytest.mark.skipif(not STOCK.exists(), reason="no system Python")
def test_the_systems_sitecustomize_is_run(boot) -> None:
    """Debian keeps one in the folder of the standard library."""
    stock = python(boot, "import sitecustomize; print(sitecustomize.__file__)", interpreter=STOCK)
    without = subprocess.run(
        [STOCK, "-I", "-c", "import sitecustomize; print(sitecustomize.__file__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if without.returncode:
        pytest.skip("this system has none")
    assert stock == without.stdout.strip()


@pytest.mark.skipif(not STOCK.exists(), reason="no system Python")
def test_an_interpreter_without_feedtune_and_torch_can_load_it(boot) -> None:
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('feedtune') is None\n"
        "import _feedtune_abc123.bootstrap, _feedtune_abc123.client\n"
        "print(sys.meta_path[0].__class__.__name__, 'torch' in sys.modules)"
    )
    assert python(boot, code, interpreter=STOCK) == "_Finder False"


def test_the_copied_package_imports_the_standard_library_torch_and_itself() -> None:
    outside = set()
    for path in INSIDE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                outside |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                outside.add((node.module or "").split(".")[0])
    assert outside - set(sys.stdlib_module_names) <= {"torch"}


@pytest.mark.parametrize("damage", ["config.json", "_feedtune_abc123/bootstrap.py"])
def test_a_start_that_fails_never_breaks_the_script(boot, tmp_path, damage) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import builtins\nbuiltins.MINE = 1\n")
    (boot.path / damage).write_text("{ not this")
    assert python(boot, "print('ran', MINE)", PYTHONPATH=str(mine)) == "ran 1"
    assert boot.seen() >= {"error"}
    assert re.search(r"Error", (boot.path / "seen" / "error").read_text())


def test_an_isolated_interpreter_is_not_reached(boot) -> None:
    assert python(boot, "print('ran')", "-I") == "ran"
    assert boot.seen() == set()


def test_the_hook_finds_torch_in_any_importing_order(boot) -> None:
    code = "import torch.utils.data as d; print(d.DataLoader.__iter__.__wrapped__ is not None)"
    assert python(boot, code) == "True"
    assert boot.seen() == {"python", "torch"}


def test_a_new_start_finds_nothing_of_the_one_before(boot) -> None:
    (boot.path / "seen" / "error").write_text("of the first start\n")
    (boot.path / "_feedtune_abc123" / "hook.py").write_text("damaged")
    assert boot.error() == "of the first start"
    boot.set_start(2)
    assert (boot.seen(), boot.error()) == (set(), "")
    assert python(boot, "import _feedtune_abc123.signs; print('whole')") == "whole"
    assert '"start": 2' in (boot.path / "config.json").read_text()


def test_signs_outlive_the_folder_that_the_guardian_removes(boot) -> None:
    (boot.path / "seen" / "error").write_text("OSError\n")
    boot.keep_signs()
    boot.remove()
    assert (boot.seen(), boot.error()) == ({"error"}, "OSError")


def test_variables_that_a_launcher_has_dropped_are_set_again_and_others_kept(boot) -> None:
    (boot.path / "variables.json").write_text('{"DROPPED": "guard", "KEPT": "guard"}')
    code = "import os; print(os.environ['DROPPED'], os.environ['KEPT'])"
    assert python(boot, code, KEPT="launcher") == "guard launcher"


def test_it_can_be_removed_twice(boot) -> None:
    boot.remove()
    boot.remove()
    assert not boot.path.exists()
    assert boot.seen() == set()
