"""The run folder: whole files, no other run overwritten, no secret stored."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

import feedtune
from feedtune.rundir import RUN_FORMAT, RunDir, default_runs_folder, read_result, redact
from shard_tools.errors import BadInput

SCHEMA = "feedtune.tune/1"
_RULES = json.loads((Path(feedtune.__file__).parent / "docs/schemas/feedtune.tune-1.json").read_text())
RESULT = {**dict.fromkeys(_RULES["required"]), "schema": SCHEMA}
SECRET = "s3cr3t"


def test_a_new_folder_is_the_users_alone(tmp_path) -> None:
    run = RunDir(tmp_path / "deep" / "run")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.write_json("run.json", {})
    run.append_json("blocks.jsonl", {})
    assert [stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()] == [0o600, 0o600]


def test_an_empty_folder_is_taken_and_another_run_is_not(tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    RunDir(empty).write_json("run.json", {})
    with pytest.raises(BadInput, match="another run"):
        RunDir(empty)
    assert [entry.name for entry in empty.iterdir()] == ["run.json"]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput):
        RunDir(file)
    with pytest.raises(BadInput, match="cannot make"):
        RunDir(file / "below")


def test_the_default_folder_lies_in_the_state_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_runs_folder() == tmp_path / "feedtune" / "runs"
    runs = [RunDir.new(None, "my train/../x").path for _ in range(3)]
    assert len(set(runs)) == 3
    for path in runs:
        assert path.parent == tmp_path / "feedtune" / "runs"
        assert "/" not in path.name
    assert RunDir.new(tmp_path / "mine", "name").path == tmp_path / "mine"
    assert RunDir.new(None, "///").path.name.endswith("-run")


def test_a_document_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    run = RunDir(tmp_path / "run")
    run.write_json("result.json", {**RESULT, "n": 1})

    def broken(*_) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space"):
        run.write_json("result.json", {**RESULT, "n": 2})
    assert read_result(run.path) == {**RESULT, "n": 1}
    with pytest.raises(TypeError):
        run.write_json("result.json", {**RESULT, "n": object()})
    assert read_result(run.path)["n"] == 1


def test_lines_are_appended(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    for k in range(3):
        run.append_json("blocks.jsonl", {"k": k})
    lines = (run.path / "blocks.jsonl").read_text().splitlines()
    assert [json.loads(line)["k"] for line in lines] == [0, 1, 2]


def test_half_a_line_waits_for_its_other_half(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.read_steps(0, 0) == ([], 0)
    path = run.path / "steps.rank0.jsonl"
    path.write_text("[0,0,1.0,2.0,null,4,0.0]\n[0,1,2.0,")
    lines, offset = run.read_steps(0, 0)
    assert lines == [[0, 0, 1.0, 2.0, None, 4, 0.0]]
    assert run.read_steps(0, offset) == ([], offset)
    with open(path, "a") as file:
        file.write('3.0,"eval",4,0.0]\n')
    lines, offset = run.read_steps(0, offset)
    assert lines == [[0, 1, 2.0, 3.0, "eval", 4, 0.0]]
    assert offset == path.stat().st_size


def test_results_are_found_by_folder_or_file(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    run.write_json("result.json", RESULT)
    assert read_result(run.path) == read_result(run.path / "result.json")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"schema": "feedtune.tune/2"}'])
def test_what_is_no_result_is_said(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(BadInput, match=r"result"):
        read_result(tmp_path)


def test_another_document_of_the_run_is_no_result(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    run.write_json("run.json", {"schema": RUN_FORMAT})
    with pytest.raises(BadInput, match="is no result") as caught:
        read_result(run.path / "run.json")
    assert "run.json" in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--token", SECRET],
        ["--token=" + SECRET],
        ["--hf-token", SECRET],
        ["--hf_token=" + SECRET],
        ["--api-key", SECRET],
        ["--api_key=" + SECRET],
        ["--wandb-apikey=" + SECRET],
        ["--wandb-key", SECRET],
        ["--key=" + SECRET],
        ["--access-key=" + SECRET],
        ["--pwd", SECRET],
        ["--token", "-" + SECRET],
        ["--env=WANDB_API_KEY=" + SECRET],
        [f"https://{SECRET}@github.com/x"],
        ["-H", "Authorization: Bearer " + SECRET],
        ["bash", "-c", f"export A=1; HF_TOKEN={SECRET} python t.py"],
        ["--password", SECRET],
        ["--passwd=" + SECRET],
        ["--client-secret", SECRET],
        ["--credentials=" + SECRET],
        ["--auth", SECRET],
        ["env", "WANDB_API_KEY=" + SECRET, "python"],
        ["HF_TOKEN=" + SECRET],
        ["+trainer.api_key=" + SECRET],
        ["logger.token=" + SECRET],
        ["--storage", f"mysql://user:{SECRET}@host/db"],
        [f"--storage=postgresql://user:{SECRET}@host/db"],
        ["--TOKEN", SECRET],
    ],
)
def test_secrets_are_not_stored(words) -> None:
    stored = redact(["python", "train.py", *words, "--epochs", "3"])
    assert not any(SECRET in word for word in stored)
    assert len(stored) == len(words) + 4
    assert stored[:2] == ["python", "train.py"]
    assert stored[-2:] == ["--epochs", "3"]


def test_the_rest_of_a_command_is_kept() -> None:
    command = [
        "torchrun",
        "--nproc_per_node=2",
        "train.py",
        "--lr",
        "1e-3",
        "--data=/d",
        "s3://bucket/x",
        "-v",
    ]
    assert redact(command) == command
    assert redact(["x", "--token", "--epochs", "3"]) == ["x", "--token", "--epochs", "3"]


def test_a_result_that_lacks_something_is_told_so(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    run.write_json("result.json", {name: value for name, value in RESULT.items() if name != "outcome"})
    with pytest.raises(BadInput, match="not whole: it lacks outcome"):
        read_result(run.path)


def test_a_run_that_was_killed_is_told_from_another_folder(tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    run.write_json("run.json", {"schema": RUN_FORMAT})
    with pytest.raises(BadInput, match="killed before it had a result") as found:
        read_result(run.path)
    assert "nothing there" in str(found.value.hint)
    (run.path / "steps.rank0.jsonl").touch()
    with pytest.raises(BadInput) as found:
        read_result(run.path)
    assert "steps.rank0.jsonl there" in str(found.value.hint)
    with pytest.raises(BadInput, match=r"holds no result\.json"):
        read_result(tmp_path)
