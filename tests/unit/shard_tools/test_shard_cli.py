from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from shard_tools.cli import main; main()",
        *map(os.fsencode, map(str, args)),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("scan", "pack", "verify", "info", "unpack"))
    code = (
        "import sys, shard_tools.cli\n"
        "heavy = {'torch', 'numpy', 'lmdb', 'rich.table', 'multiprocessing', 'xxhash'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
    assert run("--version").stdout.startswith("shard-tools ")
    for name in ("scan", "pack", "verify", "info", "unpack"):
        assert f"Example: shard-tools {name} " in run(name, "--help").stdout


def test_the_main_job(tree: Path, tmp_path: Path, names: list[bytes]) -> None:
    out = tmp_path / "out"
    scanned = json.loads(run("scan", tree, "--json").stdout)
    assert (scanned["schema"], scanned["files"]) == ("shard_tools.scan/1", len(names))
    assert os.fsdecode(b"dog/\xff\xfe latin \xe9.dat") in scanned["not_utf8"]
    packed = json.loads(run("pack", tree, out, "--shard-size", "20kB", "--json").stdout)
    assert packed["schema"] == "shard_tools.pack/1"
    assert packed["manifest"]["samples"] == len(names)
    verified = json.loads(run("verify", out, "--against", tree, "--json").stdout)
    assert (verified["schema"], verified["identical"]) == ("shard_tools.verify/1", True)
    assert json.loads(run("info", out, "--json").stdout)["schema"] == "shard_tools.info/1"
    unpacked = json.loads(run("unpack", out, tmp_path / "again", "--json").stdout)
    assert (unpacked["schema"], unpacked["files"]) == ("shard_tools.unpack/1", len(names))


def test_what_a_person_reads(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    texts = [
        run("scan", tree),
        run("pack", tree, out, "--format", "lmdb", "--no-shuffle"),
        run("verify", out),
        run("verify", out, "--against", tree),
        run("info", out),
        run("unpack", out, tmp_path / "again"),
    ]
    assert [done.returncode for done in texts] == [0] * 6
    assert [done.stderr for done in texts] == [""] * 6
    scanned, packed, verified, compared, info, _ = (done.stdout for done in texts)
    assert "cat/a.JPG = cat/a.jpg" in scanned
    assert "\\udcff" in scanned
    assert f"next: shard-tools verify {out}" in packed
    assert "whole:" in verified
    assert "identical:" in compared
    assert "as the paths" in info


def test_exit_codes(tree: Path, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("pack", many, out).returncode == 0
    again = run("pack", many, out)
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force replaces it" in again.stderr
    wrong = run("verify", out, "--against", tree)
    assert wrong.returncode == 1
    assert "WRONG: 424" in wrong.stdout
    assert run("verify", tmp_path / "none").returncode == 2
    assert run("pack", tmp_path / "none", tmp_path / "x").returncode == 2
    assert run("pack", many, tmp_path / "x", "--shard-size", "big").returncode == 2
    assert run("pack", many, tmp_path / "x", "--format", "zip").returncode == 2
    assert run("pack", many, "/proc/x").returncode in (2, 3)
    assert not (tmp_path / "x").exists()
