from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shard_tools.errors import BadInput, Missing, ToolError
from shard_tools.manifest import read_manifest
from shard_tools.pack import pack_folder, work
from shard_tools.pack.pool import run_tasks
from shard_tools.pack.rename import exchange
from shard_tools.scan import walk
from shard_tools.verify import verify

Contents = Callable[[Path], dict[str, bytes]]
SMALL = 120_000


def work_of(destination: Path) -> Path:
    return work.work_folder(destination)


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_workers_change_no_byte(form: str, many: Path, tmp_path: Path, contents: Contents) -> None:
    for workers in (1, 2, 5):
        pack_folder(many, tmp_path / f"out{workers}", form=form, shard_size=SMALL, workers=workers)
    first = contents(tmp_path / "out1")
    assert sum(name.endswith((".tar", ".lmdb")) for name in first) > 10
    assert first == contents(tmp_path / "out2") == contents(tmp_path / "out5")
    assert not work_of(tmp_path / "out1").exists()


@pytest.mark.parametrize("form", ["wds", "lmdb"])
def test_p3_p12_count_in_is_count_out(form: str, tree: Path, tmp_path: Path, names: list[bytes]) -> None:
    result = pack_folder(tree, tmp_path / "out", form=form)
    assert result.manifest.samples == len(names)
    assert result.manifest.classes == (".git", "__x__", "cat", "dog")
    assert verify(tmp_path / "out", tree).identical


def test_p7_an_exception_publishes_nothing_and_leaves_nothing(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BadInput("stop")

    monkeypatch.setattr("shard_tools.tar_store.writer.SourceReader.read_into", fail)
    with pytest.raises(BadInput, match="stop"):
        pack_folder(many, tmp_path / "out", workers=1)
    assert os.listdir(tmp_path) == ["many"]


@pytest.mark.parametrize("workers", [1, 2])
def test_p13_a_stopped_run_goes_on_where_it_was(
    workers: int, many: Path, tmp_path: Path, contents: Contents
) -> None:
    pack_folder(many, tmp_path / "whole", shard_size=SMALL)
    destination = tmp_path / "out"
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_folder(many, destination, shard_size=SMALL, workers=workers, on_samples=stop)
    assert not destination.exists()
    left = contents(work_of(destination))
    assert not any(name.endswith(".tmp") for name in left)
    # One finished shard is damaged meanwhile: it is written again.
    shard = sorted((work_of(destination) / "shards").glob("*.tar"))[0]
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    result = pack_folder(many, destination, shard_size=SMALL, workers=3 - workers)
    assert result.kept >= 4
    assert contents(destination) == contents(tmp_path / "whole")
    assert not work_of(destination).exists()


def test_p13_a_half_done_pack_of_other_options_is_refused(many: Path, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    destination = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        pack_folder(many, destination, shard_size=SMALL, workers=1, on_samples=stop)
    with pytest.raises(BadInput, match="half-done pack of other files or options"):
        pack_folder(many, destination, shard_size=SMALL, seed=5)
    pack_folder(many, destination, shard_size=SMALL, seed=5, force=True)
    assert verify(destination, many).identical


def test_p9_an_earlier_pack_is_refused_or_replaced_whole(
    many: Path, tmp_path: Path, contents: Contents
) -> None:
    destination = tmp_path / "out"
    pack_folder(many, destination, shard_size=SMALL)
    before = contents(destination)
    for path in list(many.rglob("*.bin"))[100:]:
        path.unlink()
    with pytest.raises(BadInput, match="holds a finished pack"):
        pack_folder(many, destination, shard_size=SMALL)
    assert contents(destination) == before
    assert not work_of(destination).exists()
    pack_folder(many, destination, shard_size=SMALL, force=True)
    assert len(contents(destination)) < len(before)
    assert verify(destination, many).identical


def test_p9_replacing_works_where_folders_cannot_be_exchanged(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_tools.pack.work.exchange", lambda *_: False)
    pack_folder(many, tmp_path / "out", seed=1)
    pack_folder(many, tmp_path / "out", seed=2, force=True)
    assert verify(tmp_path / "out", many).identical
    assert sorted(os.listdir(tmp_path)) == ["many", "out"]


def test_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "b" / "2").mkdir(parents=True)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["2"]
    assert not exchange(tmp_path / "a", tmp_path / "none")


def test_force_never_removes_files_that_no_pack_made(many: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    destination.mkdir()
    (destination / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match="holds files that no pack made"):
        pack_folder(many, destination, force=True)
    assert (destination / "thesis.txt").read_text() == "mine"
    with pytest.raises(BadInput, match="holds files that no pack made"):
        pack_folder(many, tmp_path, force=True)


def test_an_empty_destination_is_taken(many: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    pack_folder(many, tmp_path / "out")
    assert verify(tmp_path / "out", many).identical
    pack_folder(many, tmp_path / "new" / "deep", form="lmdb")
    assert verify(tmp_path / "new" / "deep", many).identical


def test_bad_source_and_destination(many: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    cases = [
        (tmp_path / "none", tmp_path / "out", "there is no folder"),
        (tmp_path / "file", tmp_path / "out", "is not a folder"),
        (tmp_path / "empty", tmp_path / "out", "there are no files"),
        (many, many / "out", "lies in the source"),
        (many, many, "lies in the source"),
        (many, tmp_path / "file", "is a file"),
        (many, Path("/proc"), "mount point"),
    ]
    for source, destination, message in cases:
        with pytest.raises(BadInput, match=message):
            pack_folder(source, destination)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "many"]


def test_a_source_that_changes_meanwhile_is_an_error(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(*_: object) -> None:
        with open(many / "class0" / "0000.bin", "ab") as file:
            file.write(b"more")

    monkeypatch.setattr("shard_tools.pack.job._refuse_full_disk", grow)
    with pytest.raises(BadInput, match="changed its size"):
        pack_folder(many, tmp_path / "out", shard_size=SMALL, workers=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["wds", "lmdb"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_the_run_goes_on_later(
    form: str, workers: int, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shard_tools.pack import job

    real = job._settle

    def full(folder: Path, info: object) -> None:
        if "000003" in info.name:  # type: ignore[attr-defined]
            from shard_tools.manifest import target_error

            raise target_error(folder, OSError(errno.ENOSPC, "No space left on device"))
        real(folder, info)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("shard_tools.pack.job._settle", full)
        with pytest.raises(Missing, match="disk is full"):
            pack_folder(many, tmp_path / "out", form=form, shard_size=SMALL, workers=workers)
    assert not (tmp_path / "out").exists()
    result = pack_folder(many, tmp_path / "out", form=form, shard_size=SMALL, workers=workers)
    assert result.kept > 0
    assert verify(tmp_path / "out", many).identical


def test_a_pack_larger_than_the_disk_is_refused_at_once(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail = 10
        f_frsize = 4096

    monkeypatch.setattr("shard_tools.pack.job.os.statvfs", lambda _: Full())
    with pytest.raises(Missing, match=r"has 41 kB free"):
        pack_folder(many, tmp_path / "out")
    assert os.listdir(tmp_path) == ["many"]


def test_p14_a_dead_worker_is_noticed_at_once() -> None:
    def work_on(task: int) -> int:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    done: list[int] = []
    with pytest.raises(Missing, match="killed by signal 9"):
        run_tasks(range(50), work_on, lambda _: None, 2, lambda task, _: done.append(task))
    assert 3 not in done


def test_the_error_of_a_worker_that_is_gone_before_it_gets_its_next_task_is_told() -> None:
    def work_on(task: int) -> int:
        if task % 2:
            raise BadInput(f"task {task} is odd", "take another one")
        return task

    def slow(*_: object) -> None:
        for process in multiprocessing.active_children():
            process.join()

    with pytest.raises(BadInput, match="is odd"):
        run_tasks(range(50), work_on, lambda _: None, 2, slow)


def test_p11_all_results_are_in_before_the_pool_returns() -> None:
    settled: list[int] = []
    done: dict[int, int] = {}
    run_tasks(range(7), lambda task: task * task, settled.append, 1, done.__setitem__)
    assert settled == [task * task for task in range(7)]
    run_tasks(range(40), lambda task: task * task, lambda _: None, 3, done.__setitem__)
    assert done == {task: task * task for task in range(40)}


def test_links_are_packed_as_the_files_they_point_to(tmp_path: Path) -> None:
    root = tmp_path / "src"
    (root / "a").mkdir(parents=True)
    (root / "a" / "1.txt").write_text("one")
    (root / "a" / "link.txt").symlink_to("1.txt")
    (root / "a" / "broken").symlink_to("nowhere")
    result = pack_folder(root, tmp_path / "out")
    assert result.manifest.samples == 2
    assert result.found.not_packed()["broken_links"] == ["a/broken"]
    assert verify(tmp_path / "out", root).identical


def test_three_thousand_classes(tmp_path: Path) -> None:
    root = tmp_path / "src"
    for number in range(3000):
        (root / f"c{number:04d}").mkdir(parents=True)
        (root / f"c{number:04d}" / "x.bin").write_bytes(b"%d" % number)
    assert len(pack_folder(root, tmp_path / "out").manifest.classes) == 3000
    assert verify(tmp_path / "out", root).identical


def as_nobody(many: Path, destination: Path, answer: Any) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        pack_folder(many, destination, workers=1)
        answer.send("packed")
    except ToolError as error:
        answer.send((walk(many).unreadable, error.exit_code, str(error)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_read_is_named_before_anything_is_written(many: Path, tmp_path: Path) -> None:
    (many / "class3" / "0003.bin").chmod(0)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    (tmp_path / "w").mkdir()
    (tmp_path / "w").chmod(0o777)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=as_nobody, args=(many, tmp_path / "w" / "out", there))
    child.start()
    unreadable, code, message = here.recv()
    child.join()
    here.close()
    there.close()
    child.close()
    assert (unreadable, code) == (["class3/0003.bin"], 2)
    assert "class3/0003.bin" in message
    assert os.listdir(tmp_path / "w") == []


def test_p13_a_torn_line_of_the_journal_costs_one_shard_only(many: Path, tmp_path: Path) -> None:
    def stop_after(count: int) -> Any:
        seen: list[int] = []

        def stop(_: int) -> None:
            seen.append(1)
            if len(seen) == count:
                raise KeyboardInterrupt

        return stop

    destination = tmp_path / "out"
    journal = work_of(destination) / "journal.jsonl"
    for count in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            pack_folder(many, destination, shard_size=SMALL, workers=1, on_samples=stop_after(count))
        os.truncate(journal, journal.stat().st_size - 9)
    assert pack_folder(many, destination, shard_size=SMALL, workers=1).kept == 4
    assert verify(destination, many).identical


def test_force_that_was_interrupted_does_not_replace_without_force(many: Path, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    destination = tmp_path / "out"
    pack_folder(many, destination, shard_size=SMALL, seed=1)
    with pytest.raises(KeyboardInterrupt):
        pack_folder(many, destination, shard_size=SMALL, workers=1, force=True, on_samples=stop)
    with pytest.raises(BadInput, match="holds a finished pack"):
        pack_folder(many, destination, shard_size=SMALL)
    assert read_manifest(destination).seed == 1
    assert pack_folder(many, destination, shard_size=SMALL, force=True).kept == 1
    assert read_manifest(destination).seed == 0
    assert verify(destination, many).identical


def test_a_run_killed_after_publishing_is_taken_as_done(many: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shard_tools.pack.work.shutil.rmtree", die)
        with pytest.raises(Killed):
            pack_folder(many, destination, shard_size=SMALL)
    assert work_of(destination).exists()
    assert pack_folder(many, destination, shard_size=SMALL).manifest == read_manifest(destination)
    assert not work_of(destination).exists()
