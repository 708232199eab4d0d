"""``feedtune.run/1``: made from what ranks have written, valid under its schema, printed as it is."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from feedtune.analysis.workers import measure_workers
from feedtune.report.watched import print_run
from feedtune.trials.seen import SCHEMA, read_trainings, reading, training

RUN_SCHEMA = json.loads((files("feedtune") / "docs" / "schemas" / "feedtune.run-1.json").read_text())
LOADER = {
    "site": "/home/me/[a]/train.py:7", "dataset": "Photos", "num_workers": 2, "prefetch_factor": 2,
    "pin_memory": True, "batch_size": 8,
    "identity": {"frames": [["/home/me/train.py", 7]], "dataset": "Photos", "sampler": "S", "batch_size": 8},
}  # fmt: skip
OTHER = {
    "site": "/home/me/val.py:9", "dataset": "Photos", "trains": False, "batches": 40, "iterations": 4,
    "wait_s": 0.5, "first_s": 6.0, "supply_s": 0.02, "num_workers": 2, "persistent_workers": False,
}  # fmt: skip


def write_rank(folder: Path, rank: int, steps: int, part: int = 1, **about) -> None:
    name = f"rank{rank}" if part == 1 else f"rank{rank}.{part}"
    values = {
        "rank": rank, "world": 2, "pid": 100 + rank, "host": "node", "cuda": True, "own_thread": True,
        "missed": 0, "loader": LOADER, "others": [OTHER], "clock": "host", "clock_note": None, "cost_s": 0.01,
        "ddp": {"models": 1, "hook": "gradients", "why": None}, "dropped": 0, "pin_s": [3, 0.5],
        "copies": None,
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps({**values, **about}))
    lines = [[0, 10.0, 12.0, None, 1.5], *([step, 12.0 + step, 12.25 + step] for step in range(1, steps))]
    if steps > 50:
        lines[50].append("eval")
    (folder / f"steps.{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def document(folder: Path, **changes) -> dict:
    trainings = [training(number, ranks) for number, ranks in sorted(read_trainings(folder).items())]
    values = {
        "schema": SCHEMA, "machine": {"hostname": "node", "cores": 2}, "command": ["python"], "run": "/r/[x]",
        "exit_code": 0, "seconds": 100.0, "steps_asked": None, "trainings": trainings, "note": None,
        "ceiling": None, "readings": {"cpu_s": 0.1, "lost_ticks": 0, "note": None},
        "reading": reading(trainings),
    }  # fmt: skip
    found = {**values, **changes}
    errors = [f"{e.json_path}: {e.message}" for e in Draft202012Validator(RUN_SCHEMA).iter_errors(found)]
    assert not errors
    return found


def test_a_step_needs_the_workers_of_its_slowest_loader(tmp_path: Path) -> None:
    slow = {**OTHER, "trains": True, "batches": 45, "supply_s": 0.06}  # a batch in every other step
    for rank, others in enumerate([[OTHER], [slow, OTHER], None]):
        write_rank(tmp_path, rank, 80, others=others, missed=10)
    ranks = read_trainings(tmp_path)[1]
    own = measure_workers([[0.0, 0, [[10, 0.2, 0.0, 0.0, 0.0, 0, 0]]]])
    assert [ranks[rank].supply_s(own) for rank in ranks] == pytest.approx([0.02, 0.03, 0.02])
    assert [ranks[rank].supply_s(None) for rank in ranks] == [None, pytest.approx(0.03), None]


def test_two_ranks(tmp_path: Path, capsys) -> None:
    write_rank(tmp_path, 0, 90)
    write_rank(tmp_path, 1, 91, others=None)
    with (tmp_path / "steps.rank1.jsonl").open("a") as file:
        file.write("[91,123.")  # it was killed meanwhile
    found = document(tmp_path)
    (one,) = found["trainings"]
    assert one["world_size"] == 2
    assert [rank["steps"] for rank in one["ranks"]] == [90, 91]
    assert one["job"]["steps"] == 90
    assert one["job"]["rate"] == pytest.approx(1.0)
    assert one["job"]["waits"]["share"] == pytest.approx(0.25)
    assert one["job"]["excluded"]["eval"]["count"] == 1
    assert one["ranks"][1]["others"] is None
    print_run(found)
    out = capsys.readouterr().out
    for word in ("/home/me/[a]/train.py:7", "rank 0", "rank 1", "job", "25.0%", "250 ms", "/r/[x]"):
        assert word in out
    assert "apart: first batches 3.5 s (1x), evaluation 0 µs (1x)" in out
    assert "other loader (no training): Photos at /home/me/val.py:9, 40 batches in 4 iterations" in out
    assert out.count("its workers start anew each time, which persistent_workers=True saves") == 1
    assert "where ranks wait for each other was not seen" in out
    assert "feedtune run --ceiling" in out


def test_ranks_that_were_started_anew_are_another_training(tmp_path: Path, capsys) -> None:
    for part in (1, 2):
        for rank in (0, 1):
            write_rank(tmp_path, rank, 60, part)
    found = document(tmp_path)
    assert [one["number"] for one in found["trainings"]] == [1, 2]
    print_run(found)
    assert "training 2" in capsys.readouterr().out


def test_one_process_says_nothing_of_ddp(tmp_path: Path, capsys) -> None:
    write_rank(tmp_path, 0, 60, world=1, cuda=False, own_thread=False)
    found = document(tmp_path)
    assert found["trainings"][0]["job"]["waits"] is None
    assert "straggle" not in found["reading"]
    assert "On a GPU" not in found["reading"]
    print_run(found)
    assert "job" not in capsys.readouterr().out


@pytest.mark.parametrize("trained", [True, False])
def test_a_loader_that_was_taken_for_its_batches_is_told(tmp_path: Path, capsys, trained: bool) -> None:
    write_rank(tmp_path, 0, 60, world=1, loader={**LOADER, "trained": trained})
    print_run(document(tmp_path))
    out = capsys.readouterr().out
    assert ("note: no torch optimizer was seen to step: the loader with most batches" in out) != trained


@pytest.mark.parametrize(("seconds", "said"), [(0.125, "at a rate timed once"), (None, "could not be timed")])
def test_copies_that_were_not_seen_are_told_by_their_bytes(tmp_path: Path, capsys, seconds, said) -> None:
    copies = {"bytes": 1 << 20, "pinned": True, "seconds": seconds}
    write_rank(tmp_path, 0, 60, world=1, copies=copies)
    rows = [json.loads(line) for line in (tmp_path / "steps.rank0.jsonl").read_text().splitlines()]
    parts = {"t": 1.0, "s": 0.25, "b": 0.75, "o": 0.875}
    lines = [[*row, *[None] * (5 - len(row)), parts] for row in rows]
    (tmp_path / "steps.rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = document(tmp_path)
    (rank,) = found["trainings"][0]["ranks"]
    assert rank["copies"] == copies
    assert rank["budget"]["parts"]["h2d_s"] == seconds
    assert rank["budget"]["parts"]["compute_s"] == pytest.approx(0.625 - (seconds or 0.0))
    print_run(found)
    text = " ".join(capsys.readouterr().out.split())
    assert "copies to the GPU were not seen; that of a pinned batch" in text
    assert said in text


@pytest.mark.parametrize("full", [200, 800])
def test_of_a_long_run_it_is_told_which_steps_the_parts_are_of(tmp_path: Path, capsys, full: int) -> None:
    write_rank(tmp_path, 0, 1000, world=1)
    rows = [json.loads(line) for line in (tmp_path / "steps.rank0.jsonl").read_text().splitlines()]
    rows[:full] = [[*row, *[None] * (5 - len(row)), {"b": 0.5, "o": 0.75}] for row in rows[:full]]
    (tmp_path / "steps.rank0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = document(tmp_path)
    (rank,) = found["trainings"][0]["ranks"]
    assert rank["detailed"] == full
    assert rank["budget"]["steps"] < full
    assert rank["measured_steps"] > full
    print_run(found)
    said = " ".join(capsys.readouterr().out.split())
    assert ("the parts are those of 200 of 1,000 steps" in said) == (full == 200)
    assert "taking this down cost 10 µs a step" in said


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (8.0, "accelerator utilization 80.0%, starvation 20.0% of its steps data:"),
        (5.0, "the steps wait 25.0% for data: the difference may be copies to the GPU that"),
        (
            9.5,
            "the steps wait 25.0% for data: the difference may be other work on this machine",
        ),
        (10.3, "3.0% above it, which is noise"),
    ],
)
def test_a_ceiling_is_told_beside_what_the_steps_wait_for_data(
    tmp_path: Path, capsys, rate: float, said: str
) -> None:
    write_rank(tmp_path, 0, 60, world=1)
    ceiling = {
        "rate": rate, "ceiling": 10.0, "pinned": None, "pageable": 10.0, "spread": 0.01, "au": rate / 10,
        "starvation": 1 - rate / 10, "sync": None,
    }  # fmt: skip
    print_run(document(tmp_path, ceiling=ceiling))
    assert said in " ".join(capsys.readouterr().out.split())


def test_each_rank_tells_what_it_waited_for_another_loader(tmp_path: Path, capsys) -> None:
    for rank, wait_s in enumerate((0.5, 2.0)):
        write_rank(tmp_path, rank, 60, others=[{**OTHER, "trains": True, "wait_s": wait_s}])
    print_run(document(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "waited 500 ms (rank 0), 2.0 s (rank 1)" in said
    assert "its workers need 20 ms for a batch" in said


@pytest.mark.parametrize(
    ("steps", "said"), [(100, "has stepped twice"), (1000, "in stretches to stay cheap")]
)
def test_why_some_steps_have_no_parts(tmp_path: Path, capsys, steps: int, said: str) -> None:
    write_rank(tmp_path, 0, steps, world=1)
    path = tmp_path / "steps.rank0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[20:] = [[*row, *[None] * (5 - len(row)), {"b": 0.5, "o": 0.75}] for row in rows[20 : steps // 2]]
    path.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [*rows, *([n, 12.0 + n, 12.25 + n] for n in range(steps // 2, steps))]
        )
    )
    print_run(document(tmp_path))
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_rank_without_steps_is_none(tmp_path: Path, capsys) -> None:
    write_rank(tmp_path, 0, 60)
    (tmp_path / "steps.rank0.jsonl").write_text("")
    found = document(tmp_path, note="no training was seen: it never made a torch DataLoader")
    assert found["trainings"] == []
    print_run(found)
    assert "never made" in capsys.readouterr().out


def test_a_loop_that_pauses_at_every_batch_has_no_rate(tmp_path: Path, capsys) -> None:
    write_rank(tmp_path, 0, 4)
    lines = [[step, 10.0 + step, 10.5 + step, "epoch" if step else None, 0.25] for step in range(9)]
    (tmp_path / "steps.rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = document(tmp_path)
    assert found["trainings"][0]["job"]["rate"] is None
    print_run(found)
    assert "no rate" in capsys.readouterr().out


def test_what_never_happened_is_not_told(tmp_path: Path, capsys) -> None:
    write_rank(tmp_path, 0, 60, world=1)
    found = document(tmp_path)
    found["trainings"][0]["job"]["first"] = {"seconds": 0.0, "count": 0}
    print_run(found)
    assert "apart: first batches" not in capsys.readouterr().out
