"""Presets: what is accepted, and how each kind of mistake is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedtune.config import load_preset
from shard_tools.errors import BadInput

ROOT = Path(__file__).resolve().parents[3]
ALLOWED: dict[str, type] = {
    "budget": float,
    "trials": int,
    "pairs": int,
    "block_seconds": float,
    "max_workers": int,
    "writable": list,
    "set": list,
    "out": str,
    "isolate": bool,
}


def preset(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_every_type_comes_through(tmp_path) -> None:
    text = '[tune]\nbudget = 60\nblock_seconds = 2.5\ntrials = 4\nset = ["prefetch_factor=2"]\n'
    text += 'out = "r"\nisolate = true\n'
    values = load_preset(preset(tmp_path, text), ALLOWED)
    assert values == {
        "budget": 60.0,
        "block_seconds": 2.5,
        "trials": 4,
        "set": ["prefetch_factor=2"],
        "out": "r",
        "isolate": True,
    }
    assert isinstance(values["budget"], float)


def test_the_table_of_another_command_is_left_alone(tmp_path) -> None:
    path = preset(tmp_path, "[tune]\ntrials = 4\n[pack]\nworkers = 3\n")
    assert load_preset(path, ALLOWED, commands=("tune", "pack")) == {"trials": 4}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[tune]\ntrails = 4\n", ["mine.toml", "'trails'", "[tune]", "did you mean 'trials'?"]),
        ("[tune]\nzzz = 4\n", ["'zzz'", "known here: 'block_seconds', 'budget'"]),
        ("[tuned]\ntrials = 4\n", ["mine.toml", "unknown table 'tuned'", "did you mean [tune]?"]),
        ("trials = 4\n", ["key outside of any table 'trials'", "[tune]"]),
        ("tune = 4\n", ["'tune' is a value, not a table", "[tune]"]),
        ("", ["no table [tune]"]),
        ('[tune]\ntrials = "four"\n', ["mine.toml", "'trials'", "whole number", "'four'", "trials = 8"]),
        ("[tune]\ntrials = 2.5\n", ["whole number", "2.5"]),
        ("[tune]\ntrials = true\n", ["whole number", "True"]),
        ("[tune]\nbudget = true\n", ["a number", "True"]),
        ('[tune]\nset = "prefetch_factor=2"\n', ["list of texts", 'set = ["text"]']),
        ("[tune]\nset = [2]\n", ["list of texts", "[2]"]),
        ("[tune]\nisolate = 1\n", ["true or false"]),
        ("[tune]\ntrials = = 4\n", ["mine.toml is not valid TOML", "line 2", "correct line 2: trials = = 4"]),
        ("[tune]\ntrials =", ["not valid TOML", "correct line 2: trials ="]),
        ("[tune]\ntrials = 1\ntrials = 2\n", ["not valid TOML", "trials"]),
    ],
)
def test_a_mistake_names_the_file_and_the_way_out(tmp_path, text, parts) -> None:
    with pytest.raises(BadInput) as caught:
        load_preset(preset(tmp_path, text), ALLOWED)
    message = str(caught.value)
    assert "mine.toml" in message
    assert [part for part in parts if part not in message] == []
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"[tune]\nout = '\xe9'\n")
    for path, part in [
        (tmp_path / "gone.toml", "there is no preset"),
        (tmp_path, "cannot read the preset"),
        (tmp_path / "latin.toml", "not UTF-8"),
    ]:
        with pytest.raises(BadInput, match=part):
            load_preset(path, ALLOWED)


def test_the_presets_that_come_along() -> None:
    quick = load_preset(ROOT / "configs/quick.toml", ALLOWED)
    thorough = load_preset(ROOT / "configs/thorough.toml", ALLOWED)
    keys = {"budget", "trials", "pairs", "block_seconds", "max_workers"}
    assert set(quick) == set(thorough) == keys
    assert all(quick[key] < thorough[key] for key in keys)  # type: ignore[operator]
    assert quick["pairs"] == 4
    assert thorough["pairs"] == 8


def test_every_shipped_preset_says_what_its_keys_mean() -> None:
    for path in (ROOT / "configs").glob("*.toml"):
        settings = [line for line in path.read_text().splitlines() if "=" in line.partition("#")[0]]
        assert settings
        assert [line for line in settings if "#" not in line] == []
