"""What the commands print with ``--json``, held against the schemas that are published with the packages."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PACKAGES = {"feedtune": "feedtune", "shard-tools": "shard_tools"}
# Commands that print the document of another one.
SAME_DOCUMENT = {("feedtune", "report"): "feedtune.tune-1.json"}
FORMATS = ["wds", "lmdb"]


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> content of every schema of both installed packages."""
    return {
        entry.name: json.loads(entry.read_text(encoding="utf-8"))
        for package in PACKAGES.values()
        for entry in sorted((files(package) / "docs" / "schemas").iterdir(), key=lambda entry: entry.name)
    }


SCHEMAS = schemas()


def check(document: dict[str, Any], name: str) -> None:
    """Fail with every place where the document departs from the schema."""
    errors = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(SCHEMAS[name]).iter_errors(document)
    ]
    assert not errors, errors


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [BIN / words[0], *words[1:]]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, timeout=500, check=False)


def one_document(stdout: bytes) -> dict[str, Any]:
    """The JSON document that is all of stdout but the newline at its end."""
    text = stdout.decode("utf-8")
    document, end = json.JSONDecoder().raw_decode(text)
    assert text[end:] == "\n"
    assert isinstance(document, dict)
    return document


def shard_tools(command: str, *words: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a command of shard-tools with ``--json``; its document, valid under its schema."""
    done = run("shard-tools", command, *words, "--json")
    assert done.returncode == code, done.stderr
    document = one_document(done.stdout)
    check(document, f"shard_tools.{command}-1.json")
    return document


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder with every kind of name that a scan reports, and what cannot be packed."""
    root = tmp_path_factory.mktemp("source") / "src"
    names = [
        b"cat/img.v1.jpg",
        b"cat/img.v1.JPG",
        b"cat/.hidden",
        b"cat/" + b"long" * 30 + b".txt",
        "dog/ü 😀.png".encode(),
        b"dog/\xff\xfe.dat",
        b"k\xe9/1.jpg",
        b"root.txt",
    ]
    for number, name in enumerate(names):
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name * 300 * number)
    (root / "dog" / "link.jpg").symlink_to("../cat/img.v1.JPG")
    (root / "dog" / "broken").symlink_to("nothing")
    (root / "dog" / "round").symlink_to("..")
    (root / "folder").symlink_to("cat")
    (root / "none").mkdir()
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture(scope="module", params=FORMATS)
def packed(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A pack of several shards, and the document that its making printed."""
    folder = tmp_path_factory.mktemp("packed") / request.param
    options = ["--format", request.param, "--shard-size", "30kB", "--workers", "1"]
    return folder, shard_tools("pack", source, folder, *options)


@pytest.fixture
def pack(packed: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the pack that may be damaged."""
    return Path(shutil.copytree(packed[0], tmp_path / "pack"))


def test_scan(source: Path, tmp_path: Path) -> None:
    document = shard_tools("scan", source)
    assert document["files"] == 13
    assert document["unlabelled"] == 1
    listed = {key for key, value in document.items() if isinstance(value, list) and value}
    lists = {
        name
        for name, schema in SCHEMAS["shard_tools.scan-1.json"]["properties"].items()
        if schema.get("$ref") == "#/$defs/paths"
    }
    assert listed - {"case_collisions"} == lists - {"unreadable"}
    assert document["case_collisions"]
    (tmp_path / "empty").mkdir()
    assert shard_tools("scan", tmp_path / "empty")["median_bytes"] is None


def test_pack(packed: tuple[Path, dict[str, Any]]) -> None:
    _, document = packed
    assert len(document["manifest"]["shards"]) > 1
    assert document["links"] == ["dog/link.jpg"]
    assert document["not_packed"] == {
        "broken_links": ["dog/broken"],
        "link_cycles": ["dog/round"],
        "special": ["pipe"],
    }


def test_pack_in_the_order_of_the_paths(source: Path, tmp_path: Path) -> None:
    assert shard_tools("pack", source, tmp_path / "out", "--no-shuffle")["manifest"]["seed"] is None


def test_info(packed: tuple[Path, dict[str, Any]]) -> None:
    folder, made = packed
    assert shard_tools("info", folder) == {"schema": "shard_tools.info/1", **made["manifest"]}


def test_unpack(packed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, made = packed
    document = shard_tools("unpack", folder, tmp_path / "again")
    assert (document["files"], document["bytes"]) == (
        made["manifest"]["samples"],
        made["manifest"]["payload_bytes"],
    )


def test_verify(packed: tuple[Path, dict[str, Any]], source: Path) -> None:
    folder, made = packed
    alone = shard_tools("verify", folder)
    assert (alone["whole"], alone["identical"], alone["compared"]) == (True, None, None)
    compared = shard_tools("verify", folder, "--against", source)
    assert (compared["identical"], compared["compared"]) == (True, made["manifest"]["samples"])


def first(pack: Path, suffix: str) -> Path:
    return min(path for path in pack.iterdir() if path.suffix == suffix)


def shard(pack: Path) -> Path:
    return first(pack, ".tar" if list(pack.glob("*.tar")) else ".lmdb")


def change_a_payload(pack: Path) -> None:
    """Change the payload of one sample, in whichever shard it lies; payloads repeat their own path."""
    for path in pack.iterdir():
        if path.suffix in (".tar", ".lmdb"):
            data = path.read_bytes()
            path.write_bytes(
                data.replace(b"\xff\xfe.datdog/\xff\xfe.dat", b"\xff\xfe.datdog/\xff\xfe.DAT", 1)
            )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "payload": change_a_payload,
    "cut shard": lambda pack: cut(shard(pack)),
    "no shard": lambda pack: shard(pack).unlink(),
    "no index": lambda pack: first(pack, ".index").unlink(),
    "manifest": lambda pack: (pack / "manifest.json").write_text("{"),
    "strange file": lambda pack: (pack / "more").touch(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_of_a_damaged_pack_is_one_document_too(damage: str, pack: Path, source: Path) -> None:
    DAMAGE[damage](pack)
    compared = shard_tools("verify", pack, "--against", source, code=1)
    assert (compared["whole"], compared["identical"]) == (False, False)
    assert compared["compared"] is not None
    if damage == "payload":
        paths = {problem["path"] for problem in compared["problems"]}
        assert paths == {None, os.fsdecode(b"dog/\xff\xfe.dat")}


def test_verify_of_a_damaged_pack_alone(pack: Path) -> None:
    change_a_payload(pack)
    document = shard_tools("verify", pack, code=1)
    assert (document["whole"], document["identical"], document["compared"]) == (False, None, None)


def test_verify_against_a_folder_with_a_file_more_and_a_file_less(
    packed: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(source / "cat", tmp_path / "other" / "cat")).parent
    (other / "cat" / "new").touch()
    problems = shard_tools("verify", packed[0], "--against", other, code=1)["problems"]
    assert {"file": None, "sample": None, "path": "cat/new"}.items() <= problems[-1].items()
    assert problems[0]["sample"] is not None


def test_without_an_answer_stdout_is_empty(pack: Path, source: Path, tmp_path: Path) -> None:
    (pack / "manifest.json").write_text("{")
    asked: list[tuple[int, tuple[str | Path, ...]]] = [
        (1, ("info", pack)),
        (1, ("unpack", pack, tmp_path / "out")),
        (2, ("scan", tmp_path / "none")),
        (2, ("pack", source, pack)),
        (2, ("verify", tmp_path / "none")),
    ]
    for code, words in asked:
        done = run("shard-tools", *words, "--json")
        assert (done.returncode, done.stdout) == (code, b"")
        assert done.stderr.startswith(b"error: ")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_valid_and_closed(name: str) -> None:
    schema = SCHEMAS[name]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)
    assert name == schema["title"].replace("/", "-") + ".json"
    assert schema["properties"]["schema"] == {"const": schema["title"]}
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == set(schema["properties"])
    errors = Draft202012Validator(schema).iter_errors({"schema": schema["title"], "unknown": 1})
    assert {error.validator for error in errors} >= {"required", "additionalProperties"}


def test_the_manifest_of_pack_is_that_of_info() -> None:
    info, made = SCHEMAS["shard_tools.info-1.json"], SCHEMAS["shard_tools.pack-1.json"]
    manifest = made["properties"]["manifest"]
    assert {"schema": {"const": "shard_tools.info/1"}, **manifest["properties"]} == info["properties"]
    assert info["$defs"].items() <= made["$defs"].items()


def test_package_data_holds_every_schema() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in PACKAGES.values():
        root = ROOT / package
        data = {
            path
            for pattern in patterns[package]
            for path in glob.glob(pattern, root_dir=root, recursive=True)
        }
        assert {str(path.relative_to(root)) for path in root.rglob("*.json")} <= data


def help_of(*words: str) -> str:
    done = run(*words, "--help", COLUMNS="200")
    assert done.returncode == 0
    return done.stdout.decode()


def commands_in(text: str) -> list[str]:
    """Names in the list of commands of a ``--help``."""
    _, found, listed = text.partition("\nCommands:\n")
    return re.findall(r"^  ([a-z][\w-]*)", listed, re.MULTILINE) if found else []


def with_json(*words: str) -> Iterator[tuple[str, ...]]:
    """Every command below this one that has a ``--json`` option."""
    text = help_of(*words)
    if re.search(r"^\s+--json\b", text, re.MULTILINE):
        yield words
    names = commands_in(text)
    with ThreadPoolExecutor() as pool:
        for found in pool.map(lambda name: list(with_json(*words, name)), names):
            yield from found


@pytest.mark.parametrize("program", PACKAGES)
def test_every_command_with_json_has_a_schema(program: str) -> None:
    found = list(with_json(program))
    assert len(found) >= 3
    expected = {
        SAME_DOCUMENT.get(words, f"{PACKAGES[program]}.{'-'.join(words[1:])}-1.json") for words in found
    }
    assert sorted(expected - set(SCHEMAS)) == []


def test_demo_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real steps of the demo, but for the tuning, whose document has a schema of its own."""
    from feedtune.trials import demo
    from feedtune.workloads import demo_data

    side = {"settings": {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False}, "rate": 3.5}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        demo, "tune", lambda *_: {"schema": "feedtune.tune/1", "best": side, "baseline": side}
    )
    monkeypatch.setattr(demo_data, "resize_photos", lambda src, dst, _: shutil.copytree(src, dst))
    images = tmp_path / "images" / "class"
    images.mkdir(parents=True)
    (images / "1.jpg").write_bytes(b"not opened here")
    document = demo.demo(images.parent, 2, lambda _: None)
    check(document, "feedtune.demo-1.json")
    wrong = {**document, "resized": {"schema": "feedtune.tune/2"}}
    with pytest.raises(AssertionError, match="resized"):
        check(wrong, "feedtune.demo-1.json")


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    done = run("feedtune", "demo", "--json", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = one_document(done.stdout)
    check(document, "feedtune.demo-1.json")
    check(document["tune"], "feedtune.tune-1.json")
    check(document["resized"], "feedtune.tune-1.json")
    # Whatever the answer, workers were really tried: shard datasets read by position and share nothing.
    candidates = [b for b in document["tune"]["blocks"] if b["kind"] == "candidate"]
    assert any(b["settings"]["num_workers"] and b["rate"] for b in candidates), candidates
