"""Imports go down only: the rooms of both packages, checked on the source with ``ast``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room -> floor. A module may import rooms on lower floors, or modules of its own room.
FLOORS = {
    "shard_tools.errors": -1, "shard_tools.records": 0, "shard_tools.units": 0,
    "shard_tools.console": 1, "shard_tools.scan": 1, "shard_tools.plan": 1, "shard_tools.manifest": 1,
    "shard_tools.tar_store": 2, "shard_tools.lmdb_store": 2,
    "shard_tools.pack": 3, "shard_tools.verify": 3, "shard_tools.convert": 3, "shard_tools.stage": 3,
    "shard_tools.engines": 3, "shard_tools.read": 3,
    "shard_tools.cli": 4, "shard_tools.__main__": 5,
    "feedtune.settings": -1, "feedtune.records": 0,
    "feedtune.rundir": 1, "feedtune.config": 1, "feedtune.machine": 1,
    "feedtune.inside": 2, "feedtune.workloads": 2, "feedtune.beside": 2, "feedtune.probes": 2,
    "feedtune.analysis": 3, "feedtune.lint": 3,
    "feedtune.launch": 4, "feedtune.trials": 4, "feedtune.search": 4,
    "feedtune.scale": 4, "feedtune.diagnose": 4,
    "feedtune.report": 5,
    "feedtune.cli": 6, "feedtune.__main__": 7,
}  # fmt: skip
# Rooms of one floor that still see each other, in this one direction.
SIDEWAYS = {
    ("shard_tools.verify", "shard_tools.scan"),
    ("feedtune.trials", "feedtune.launch"),
    ("feedtune.trials", "feedtune.search"),
}
TORCH_ROOMS = {"feedtune.inside", "feedtune.workloads", "shard_tools.read"}
OPTUNA_ROOMS = {"feedtune.search"}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("feedtune", "shard_tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(module: str, path: Path) -> set[str]:
    """Absolute names of all imported modules, wherever in the file the import stands."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                head = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*head, base] if base else head)
            names.add(base)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def top_level_ok(module: str, target: str) -> bool:
    source, other = room(module), room(target)
    if source == other or other in ("feedtune", "shard_tools") or other not in FLOORS:
        return True
    if module.startswith("shard_tools") and target.startswith("feedtune"):
        return False
    if module.startswith("feedtune") and target.startswith("shard_tools"):
        # All of shard_tools but its commands lies under feedtune's own rooms.
        return other != "shard_tools.cli"
    return FLOORS[other] < FLOORS[source] or (source, other) in SIDEWAYS


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=lambda value: str(value))
def test_imports_go_down_only(module: str, path: Path) -> None:
    if room(module) not in ("feedtune", "shard_tools"):
        assert room(module) in FLOORS, f"{module} lies in no known room"
    bad = sorted(t for t in imports(module, path) if not top_level_ok(module, t))
    assert not bad, f"{module} imports upwards: {bad}"


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=lambda value: str(value))
def test_heavy_libraries_stay_in_their_rooms(module: str, path: Path) -> None:
    heads = {name.split(".")[0] for name in imports(module, path)}
    if "torch" in heads:
        assert room(module) in TORCH_ROOMS or module == "feedtune.probes.collectives"
    if "optuna" in heads:
        assert room(module) in OPTUNA_ROOMS


def test_no_cycles_between_modules() -> None:
    known = modules()
    graph = {
        name: {t for t in imports(name, path) if t in known and t != name and not name.startswith(t + ".")}
        for name, path in known.items()
    }
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"cycle: {' -> '.join([*trail, name])}"
        state[name] = 1
        for target in graph[name]:
            visit(target, [*trail, name])
        state[name] = 2

    for name in graph:
        visit(name, [])


def test_inside_needs_only_the_standard_library_and_torch() -> None:
    """The hook is copied beside the user's code and runs in an interpreter without feedtune."""
    import sys

    allowed = set(sys.stdlib_module_names) | {"torch", "__future__"}
    for module, path in modules().items():
        if room(module) != "feedtune.inside":
            continue
        for name in imports(module, path):
            assert name.split(".")[0] in allowed or name.startswith("feedtune.inside"), (module, name)


def test_analysis_reads_no_file_and_no_clock() -> None:
    for module, path in modules().items():
        if room(module) == "feedtune.analysis":
            heads = {name.split(".")[0] for name in imports(module, path)}
            assert not heads & {"os", "time", "subprocess", "pathlib", "socket", "io", "psutil"}, module
            assert "open(" not in path.read_text(), module
