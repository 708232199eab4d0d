"""Blocks of a training under trial: starts, restarts, and which records count."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from fake_ranks import FakeProcess, FakeRank, in_background, plan

from feedtune.inside.client import ControlLost
from feedtune.launch.boot import BootFolder
from feedtune.rundir import RunDir
from feedtune.trials import session as module
from feedtune.trials import waiting
from feedtune.trials.server import ControlServer
from feedtune.trials.session import Launch, Session
from shard_tools.errors import CommandFailed, Missing

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad'


class Played(Session):
    """A session whose command is a function: it gets the session and the number of the start."""

    def __init__(self, folder, script, **launch) -> None:
        run = RunDir(folder / "run")
        run.log.touch()
        boot = BootFolder(run.path / "boot", "ab12", {})
        boot.set_start(1)
        values = {"hang_timeout_s": 30.0, "start_timeout_s": 30.0, **launch}
        told: list[str] = []
        super().__init__(
            Launch(["python", "train.py"], folder, {}, None, **values),
            run,
            "ab12",
            ControlServer("secret", lambda *_: 0),
            boot,
            told.append,
        )
        self.told = told
        self.processes: list[FakeProcess] = []
        self.ranks: list[FakeRank] = []
        self._threads: list[threading.Thread] = []
        self._script = script

    def start(self) -> None:
        self.starts += 1
        self._blocks_in_start = 0
        self._cached = False
        self.process = FakeProcess()
        self.processes.append(self.process)
        number = self.starts

        def play() -> None:
            with contextlib.suppress(ControlLost):  # it was ended
                self._script(self, number)

        self._threads.append(in_background(play))

    def rank(self, number: int = 0, world: int = 1, pid: int = 0) -> FakeRank:
        self.ranks.append(FakeRank(self.server.port, self.run_dir.path, number, world, pid, self.starts))
        return self.ranks[-1]

    def stop(self) -> None:
        super().stop()
        for rank in self.ranks:
            rank.dies()

    def close(self) -> None:
        self.stop()
        self.server.close()
        for thread in self._threads:
            thread.join(30.0)
        for rank in self.ranks:
            rank.goes()


@pytest.fixture
def play(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "_LAST_WORDS_S", 0.2)
    started = []

    def make(script, **launch) -> Played:
        started.append(Played(tmp_path, script, **launch))
        return started[-1]

    yield make
    for session in started:
        session.close()


def trains(session: Played, _: int) -> None:
    """Does every block that it is asked for."""
    rank = session.rank()
    k = None
    while True:
        k = rank.asks(k)["k"]
        rank.does(k)
        k += 1


def ends_after(blocks: int, steps: int = 4):
    """A script that ends within its next block, after so many steps of it."""

    def script(session: Played, _: int) -> None:
        rank = session.rank()
        process = session.process
        k = None
        for _ in range(blocks):
            k = rank.asks(k)["k"]
            rank.does(k)
            k += 1
        k = rank.asks(k)["k"]
        rank.does(k, steps=steps, partial=True)
        rank.goes()
        process.code = 0

    return script


def test_blocks_run_in_one_start(play) -> None:
    session = play(trains)
    results = [session.run(plan(workers=workers)) for workers in (1, 2, 3)]
    assert [result.k for result in results] == [0, 1, 2]
    assert [result.settings.num_workers for result in results] == [1, 2, 3]
    for result in results:
        assert result.rate == pytest.approx(100.0)
    assert (session.starts, session.told) == (1, [])
    assert session.batch == (4, 32, 1)


def test_a_block_that_the_scripts_end_has_cut_off_is_done_in_a_new_start(play) -> None:
    session = play(ends_after(2))
    results = [session.run(plan()) for _ in range(5)]
    assert all(result.rate == pytest.approx(100.0) for result in results)
    assert session.starts == 3
    assert len(session.told) == 2
    assert [result.k for result in results] == sorted({result.k for result in results})


def test_a_cut_off_block_that_has_enough_steps_counts(play) -> None:
    session = play(ends_after(1, steps=40))
    assert [session.run(plan()).state for _ in range(2)] == ["ok", "ok"]
    assert session.starts == 1


def test_a_script_that_is_too_short_for_a_single_block_is_not_started_for_ever(play) -> None:
    session = play(ends_after(0))
    result = session.run(plan())
    assert (result.state, result.reason) == ("failed", "too_few_steps")
    assert session.starts == 1
    assert session.process is None


def test_starts_have_a_limit(play, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_STARTS", 2)
    session = play(ends_after(1))
    states = [session.run(plan()).state for _ in range(3)]
    assert states == ["ok", "ok", "failed"]
    assert session.starts == 2


def test_a_failed_block_ends_the_start_and_keeps_its_cause(play) -> None:
    def fails(session: Played, _: int) -> None:
        rank = session.rank()
        process = session.process
        rank.asks()
        rank.says("uncaught", text=TRACE)
        rank.does(0, partial=True)
        rank.goes()
        process.code = 1

    session = play(fails)
    result = session.run(plan(workers=3))
    assert (result.state, result.reason, result.detail) == (
        "failed",
        "script_failed",
        "rank 0: ValueError: bad",
    )
    assert result.settings.num_workers == 3
    assert result.stack == TRACE
    assert session.process is None
    assert session.processes[0].killed


def test_isolated_blocks_have_a_start_each(play) -> None:
    session = play(trains, isolate=True)
    assert [session.run(plan()).state for _ in range(3)] == ["ok"] * 3
    assert session.starts == 3
    assert session.told == []
    assert all(process.killed for process in session.processes[:2])


def test_a_ceiling_in_a_new_start_fills_its_cache_first(play) -> None:
    kinds: list[str] = []

    def script(session: Played, _: int) -> None:
        rank = session.rank()
        k = None
        while True:
            asked = rank.asks(k)
            kinds.append(asked["kind"])
            rank.does(asked["k"], cached=[0, 1, 2] if asked["cache"] else [])
            k = asked["k"] + 1

    session = play(script)
    baseline = plan(kind="baseline", cache=3, cache_bytes=100)
    session.run(baseline)
    session.run(plan(kind="ceiling"))
    session.stop()
    assert session.run(plan(kind="ceiling")).state == "ok"
    assert kinds == ["baseline", "ceiling", "baseline", "ceiling"]
    assert session.starts == 2


def test_an_isolated_ceiling_shares_the_start_of_what_filled_its_cache(play) -> None:
    def script(session: Played, _: int) -> None:
        rank = session.rank()
        k = None
        while True:
            asked = rank.asks(k)
            rank.does(asked["k"], cached=[0, 1, 2] if asked["cache"] else [])
            k = asked["k"] + 1

    session = play(script, isolate=True)
    session.run(plan(kind="baseline", cache=3, cache_bytes=100))
    session.run(plan(kind="ceiling"))
    assert session.starts == 1
    session.run(plan())
    session.run(plan(kind="ceiling"))
    assert session.starts == 3


def test_ranks_that_begin_anew_within_a_block(play) -> None:
    """The first ranks' part of it is measured; the second ones go on with the next."""

    def script(session: Played, _: int) -> None:
        first = session.rank(pid=1)
        first.asks()
        first.does(0, steps=30, partial=True)
        first.goes()
        time.sleep(0.5)
        again = session.rank(pid=2)
        k = again.asks()["k"]  # the first block still, or the next one already
        again.does(k, pace_s=0.05)
        if k == 0:
            again.does(again.asks(1)["k"], pace_s=0.05)

    session = play(script)
    result = session.run(plan())
    assert (result.state, result.rate, result.steps) == ("ok", pytest.approx(100.0), 28)
    assert session.run(plan()).rate == pytest.approx(20.0)
    assert session.starts == 1


def test_records_of_a_block_that_was_done_twice_are_told_apart(play) -> None:
    session = play(lambda *_: None)
    session.start()
    rank, state = session.rank(), session.state()
    for steps in (30, 20):
        rank.does(0, steps=steps, pace_s=0.001)
        assert session.server.wait(lambda n=steps: state.results.get((0, 0), {}).get("steps") == n, 30.0)
        ends = {**state.results[0, 0]}
        time.sleep(0.05)
    rank.does(0, steps=10, pace_s=0.001)
    records = session._rank_block(0, 0, ends).records
    assert [record.step for record in records] == list(range(20))


def test_repeats_are_those_of_the_latest_block(play) -> None:
    def script(session: Played, _: int) -> None:
        rank = session.rank()
        k = None
        for repeated in ([128, 64], None):
            k = rank.asks(k)["k"]
            rank.does(k, repeated=repeated)
            k += 1
        rank.asks(k)
        rank.says("fail", k=k, reason="loader_failed", text="nothing")

    session = play(script)
    session.run(plan())
    assert session.repeated == (128, 64)
    session.run(plan())
    assert session.repeated is None
    session.run(plan())
    assert session.repeated is None


def test_repeats_of_a_failed_block_are_not_those_of_the_one_before(play) -> None:
    def script(session: Played, _: int) -> None:
        rank = session.rank()
        k = rank.asks()["k"]
        rank.does(k, repeated=[128, 64])
        rank.asks(k + 1)
        rank.says("fail", k=k + 1, reason="loader_failed", text="nothing")

    session = play(script)
    session.run(plan())
    assert session.run(plan()).state == "failed"
    assert session.repeated is None


def test_ranks_that_disagree_on_their_steps(play) -> None:
    def script(session: Played, _: int) -> None:
        one, two = session.rank(0, 2), session.rank(1, 2)
        one.does(0, steps=30)
        two.does(0, steps=31)

    result = play(script).run(plan())
    assert (result.state, result.reason) == ("failed", "ranks_diverged")
    assert "30" in result.detail
    assert "31" in result.detail


def test_the_first_hello_describes_the_training(play) -> None:
    session = play(trains)
    session.start()
    assert session.hello()["loader"] == {"number": 0, "site": "train.py:3"}


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (0, Missing, "without a training that feedtune can tune"),
        (1, CommandFailed, "failed with exit code 1 before it was seen to train\nno such file"),
        (-9, CommandFailed, "failed with SIGKILL before it was seen to train\nno such file"),
    ],
)
def test_a_command_that_ends_before_it_trains(play, code, error, text) -> None:
    def script(session: Played, _: int) -> None:
        session.run_dir.log.write_text("\x1b[31mno such file\x1b[0m\n")
        session.process.code = code

    session = play(script)
    session.start()
    with pytest.raises(error, match=text):
        session.hello()
    assert session.process is None


def test_a_start_that_takes_too_long(play) -> None:
    session = play(lambda *_: None, start_timeout_s=0.3)
    session.start()
    with pytest.raises(Missing, match="no training step within 0 s"):
        session.hello()
    assert session.process is None


def test_the_end_waits_for_all_ranks(play) -> None:
    def script(session: Played, _: int) -> None:
        rank = session.rank()
        rank.does(rank.asks()["k"])
        assert rank.asks(1)["kind"] == "done"
        rank.says("done")

    session = play(script)
    session.run(plan())
    session.finish()
    assert session.state().done == {0}
    assert session.process is None


def test_stack_files_go_with_the_start(play) -> None:
    session = play(trains)
    session.run(plan())
    (session.run_dir.path / "stack.1234").touch()
    session.stop()
    assert not list(session.run_dir.path.glob("stack.*"))
    session.stop()
