"""Presets: TOML files with one table for each command, such as ``configs/quick.toml``."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shard_tools.errors import BadInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Commands that load presets; a file may hold a table for each, and no others.
PRESET_COMMANDS = ("tune",)

_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list of texts",
}


def load_preset(
    path: Path,
    allowed: Mapping[str, type],
    *,
    command: str = "tune",
    commands: Collection[str] = PRESET_COMMANDS,
) -> dict[str, object]:
    """Read one command's table of a preset.

    Args:
        path: the TOML file.
        allowed: the keys that the command knows, each with ``int``, ``float``, ``str``, ``bool`` or ``list``
            (of texts). A whole number is accepted where a ``float`` is wanted and returned as one.
        command: the table to return.
        commands: the tables that the file may have.

    Returns:
        The keys that the table sets; keys that it leaves out are left out here too.

    Raises:
        BadInput: the file is missing or no TOML, has no table for the command, or has a table, a key or a
            type that is not known. The message names the file and, for a wrong name, the nearest right one.
    """
    tables = _parse(path)
    for name, table in tables.items():
        if name not in commands:
            kind = "table" if isinstance(table, dict) else "key outside of any table"
            raise BadInput(f"{path}: unknown {kind} '{name}'", _nearest(name, commands, "[{}]"))
        if not isinstance(table, dict):
            raise BadInput(
                f"{path}: '{name}' is a value, not a table", f"write [{name}] on a line of its own"
            )
    if command not in tables:
        raise BadInput(
            f"{path}: no table [{command}]", f"start the settings of this command with [{command}]"
        )
    return {key: _checked(path, command, key, value, allowed) for key, value in tables[command].items()}


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(
            f"there is no preset {path}", "give the path of a TOML file, such as configs/quick.toml"
        ) from None
    except OSError as error:
        raise BadInput(
            f"cannot read the preset {path}: {error.strerror}", "give the path of a TOML file"
        ) from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text", "give the path of a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}", _shown(text, str(error))) from None


def _shown(text: str, message: str) -> str:
    """The line that the parser stopped at, as a hint."""
    match = re.search(r"at line (\d+)", message)
    lines = text.splitlines() or [""]
    number = min(int(match.group(1)), len(lines)) if match else len(lines)
    return f"correct line {number}: {lines[number - 1].strip()}"


def _checked(path: Path, command: str, key: str, value: object, allowed: Mapping[str, type]) -> object:
    if key not in allowed:
        raise BadInput(f"{path}: unknown key '{key}' in [{command}]", _nearest(key, allowed, "'{}'"))
    wanted = allowed[key]
    if wanted is float and type(value) is int:
        return float(value)
    # type() and not isinstance(): true is no number here, although bool is a kind of int.
    right = type(value) is wanted
    if isinstance(value, list):
        right = right and all(isinstance(item, str) for item in value)
    if not right:
        raise BadInput(
            f"{path}: '{key}' in [{command}] has to be {_NAMES[wanted]}, and is {value!r}",
            _example(key, wanted),
        )
    return value


def _example(key: str, wanted: type) -> str:
    examples = {int: "8", float: "2.5", str: '"text"', bool: "true", list: '["text"]'}
    return f"write it like: {key} = {examples[wanted]}"


def _nearest(name: str, known: Iterable[str], form: str) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {form.format(near[0])}?"
    return "known here: " + ", ".join(form.format(other) for other in names)
