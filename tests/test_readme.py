"""README holds: its commands, options and paths exist, and help is quick to come."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
APPS = {"feedtune": "feedtune.cli", "shard-tools": "shard_tools.cli"}
SETUP = ["pip install -e '.[dev]' && feedtune demo", "pip install -e '.[dev]' && pytest"]


def fenced(language: str, text: str = README) -> list[str]:
    """Lines of all fenced blocks of a language, without comments."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\s+#.*$", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def inline(text: str = README) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def command_lines() -> list[list[str]]:
    """Every call of our commands, in a block or in a sentence, as words."""
    parts = [part for line in fenced("sh") for part in line.split("&&")]
    words = [shlex.split(part) for part in [*parts, *inline()]]
    return [line for line in words if line and line[0] in APPS]


def files_named() -> list[str]:
    """Links, paths between backticks, and scripts and presets in calls, as far as they lie in this folder."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    words = [word for text in (*fenced("sh"), *inline()) for word in shlex.split(text)]
    tops = {entry.name for entry in ROOT.iterdir()}
    return sorted({*links, *(word for word in words if "/" in word and word.split("/")[0] in tops)})


@functools.cache
def help_of(*words: str) -> str:
    """The help of a command; it is a failure if there is none."""
    done = run_help(list(words))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_help(words: list[str], probe: str = "pass") -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        f"sys.argv = {[*words, '--help']!r}\n"
        f"from {APPS[words[0]]} import main\n"
        f"try:\n    main()\nfinally:\n    {probe}\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def options(words: list[str]) -> set[str]:
    """Options of ours in a call: what stands behind ``--`` is the user's command."""
    own = words[: words.index("--")] if "--" in words else words
    return {word.partition("=")[0] for word in own if word.startswith("-")}


def commands(app: str) -> list[str]:
    """Names of the commands that the help lists."""
    listed = help_of(app).partition("Commands")[2]
    return re.findall(r"^[\s│|]*([a-z]+)\b", listed, re.MULTILINE)


@pytest.mark.parametrize("line", SETUP)
def test_both_set_up_commands_are_there(line) -> None:
    assert line in fenced("sh")


def test_set_up_installs_an_extra_that_exists() -> None:
    extras = metadata("feedtune").get_all("Provides-Extra")
    named = [extra for line in fenced("sh") for extra in re.findall(r"\.\[(\w+)\]", line)]
    assert named
    assert set(named) <= set(extras)
    assert set(APPS) <= {script.name for script in entry_points(group="console_scripts")}


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_every_command_has_its_options(words) -> None:
    app, *rest = words
    names = [word for word in rest[:1] if not word.startswith("-")]
    assert set(names) <= set(commands(app))
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(app, *names)))
    assert options(words) <= known


def test_calls_were_found() -> None:
    """Else the test above would pass on a README that it cannot read."""
    found = {tuple(words[:2]) for words in command_lines()}
    assert {("feedtune", "demo"), ("feedtune", "tune"), ("feedtune", "report")} <= found
    assert {("shard-tools", name) for name in ("scan", "pack", "verify", "info", "unpack")} <= found
    assert any("--against" in words for words in command_lines())
    assert options(["feedtune", "tune", "--json", "--set=a=1", "--", "x", "--lr"]) == {"--json", "--set"}


@pytest.mark.parametrize("name", files_named())
def test_every_path_exists(name) -> None:
    assert (ROOT / name).exists()


def test_paths_were_found() -> None:
    assert {"feedtune/CHANGELOG.md", "feedtune/records.py", "tests/test_floors.py"} <= set(files_named())
    assert {"configs/thorough.toml", "tests/integration/scripts/latency.py"} <= set(files_named())


def test_options_between_backticks_exist() -> None:
    known = set()
    for app in APPS:
        for name in commands(app):
            known |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(app, name)))
    said = {text.split()[0].partition("=")[0] for text in inline() if re.match(r"--[a-z]", text)}
    assert "--budget" in said
    assert said <= known


@pytest.mark.parametrize(("app", "module"), APPS.items())
def test_every_docstring_ends_with_an_example_that_holds(app, module) -> None:
    assert commands(app)
    for name in commands(app):
        function = getattr(importlib.import_module(f"{module}.{name}"), name)
        last = function.__doc__.strip().splitlines()[-1].strip()
        assert last.startswith(f"Example: {app} {name} "), (name, last)
        words = shlex.split(last.removeprefix("Example: "))
        assert options(words) <= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(app, name)))


@pytest.mark.parametrize("app", APPS)
def test_help_imports_nothing_heavy(app) -> None:
    heavy = ("torch", "optuna", "numpy", "scipy", "PIL", "lmdb")
    done = run_help([app], f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)")
    assert "Usage" in done.stdout
    assert done.stderr.strip() == "[]"
