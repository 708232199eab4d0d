"""How a block ends that does not end well: ranks that go, begin anew, stay silent."""

from __future__ import annotations

import contextlib
import time

import pytest
from fake_ranks import FakeProcess, FakeRank, in_background, plan

from feedtune.inside.client import ControlLost
from feedtune.rundir import RunDir
from feedtune.trials import causes, waiting
from feedtune.trials.server import ControlServer
from feedtune.trials.waiting import BlockWait

PATIENCE_S = 30.0  # only a failing test waits so long
SHORT_S = 0.3


class Scene:
    """A control server, ranks, and a block that is waited for in the background."""

    def __init__(self, folder) -> None:
        self.run_dir = RunDir(folder / "run")
        self.run_dir.log.touch()
        self.server = ControlServer("secret", lambda *_: 0)
        self.state = self.server.start_state(1)
        self.process = FakeProcess()
        self.ranks: list[FakeRank] = []
        self.server.publish(plan(0))

    def rank(self, rank: int, pid: int = 0, world: int = 2) -> FakeRank:
        self.ranks.append(FakeRank(self.server.port, self.run_dir.path, rank, world, pid))
        return self.ranks[-1]

    def pair(self) -> tuple[FakeRank, FakeRank]:
        return self.rank(0), self.rank(1)

    def wait(self, known: bool = True, hang_s: float = PATIENCE_S, pause_s: float = PATIENCE_S) -> None:
        self.block = BlockWait(
            plan(0), self.server, self.state, self.process, self.run_dir, known, hang_s, pause_s
        )  # fmt: skip
        self.cause = None
        self.raised = None

        def run() -> None:
            try:
                self.cause = self.block.run()
            except Exception as error:  # noqa: BLE001 (shown by the test)
                self.raised = error

        self._thread = in_background(run)

    def runs(self, seconds: float = 0.35) -> bool:
        """Whether it is still waited for after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def ended(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.raised is None
        return self.cause

    def heard(self, ready) -> None:
        assert self.server.wait(ready, PATIENCE_S)

    def lose(self, rank: FakeRank) -> None:
        rank.goes()
        self.heard(lambda: rank.pid in self.state.lost)

    def close(self) -> None:
        self.server.close()  # first: a rank that waits for an answer cannot be closed
        for rank in self.ranks:
            rank.goes()


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "_LAST_WORDS_S", 0.2)
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def test_all_ranks_end_the_block(scene) -> None:
    one, two = scene.pair()
    scene.wait()
    one.does(0)
    assert scene.runs()
    two.does(0)
    assert scene.ended() is None
    assert sorted(scene.block.ends) == [0, 1]
    assert not scene.block.partial


def test_a_rank_that_never_fetches_is_not_waited_for(scene, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_SILENT_GRACE_S", SHORT_S)
    one = scene.rank(0, world=3)
    scene.wait(known=False)
    one.does(0)
    assert scene.ended() is None
    assert sorted(scene.block.ends) == [0]


def test_a_rank_that_claims_a_little_later_is_waited_for(scene) -> None:
    one = scene.rank(0)
    scene.wait(known=False)
    one.does(0)
    assert scene.runs(0.4)
    two = scene.rank(1)
    assert scene.runs(0.4)
    two.does(0)
    assert scene.ended() is None
    assert sorted(scene.block.ends) == [0, 1]


def test_a_failure_that_a_rank_reports(scene) -> None:
    one, _ = scene.pair()
    scene.wait()
    one.says("fail", k=0, reason="loader_failed", text="it yields nothing when it is read again")
    cause = scene.ended()
    assert (cause.reason, cause.text) == ("loader_failed", "it yields nothing when it is read again")


def leaves(rank: FakeRank, code: int) -> None:
    """Come to its own end, where the server keeps it."""

    def ask() -> None:
        with contextlib.suppress(ControlLost):
            rank._client.ask({"type": "leave", "rank": rank.rank, "code": code})

    in_background(ask)


def test_a_rank_that_fails_ends_the_block_of_all(scene) -> None:
    """It is kept, so that its launcher does not see it; the others would wait for it for ever."""
    _, two = scene.pair()
    scene.wait()
    two.says("uncaught", text="Traceback\nRuntimeError: the last step fails")
    two.does(0, partial=True)
    leaves(two, 1)
    cause = scene.ended()
    assert cause.reason == "script_failed"
    assert "rank 1: RuntimeError: the last step fails" in cause.text
    assert scene.process.code is None


@pytest.mark.parametrize(("code", "reason"), [(0, None), (3, "script_failed")])
def test_ranks_that_have_all_come_to_their_end_tell_the_exit_code(scene, code, reason) -> None:
    """Their command goes on for ever: the last one is kept."""
    for rank in scene.pair():
        rank.does(0, partial=True)
        leaves(rank, code)
    scene.wait()
    cause = scene.ended()
    assert (cause and cause.reason) == reason
    assert scene.block.partial
    assert scene.process.code is None


def test_the_commands_end(scene) -> None:
    one, two = scene.pair()
    scene.wait()
    for rank in (one, two):
        rank.goes()
    scene.run_dir.log.write_text("step 1\n")
    scene.process.code = 0
    assert scene.ended().reason == "script_ended"


def test_last_words_that_come_after_the_commands_end_still_count(scene, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_LAST_WORDS_S", PATIENCE_S)
    one, two = scene.pair()
    scene.wait()
    scene.process.code = 1
    assert scene.runs()
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad'
    two.says("uncaught", text=trace)
    two.does(0, partial=True)
    for rank in (one, two):
        rank.goes()
    assert scene.ended().text == "rank 1: ValueError: bad"


def test_a_rank_that_evaluates_after_its_loop_is_waited_for(scene) -> None:
    """Rank 0 evaluates and saves at the end; the others have nothing left to do, and end."""
    one, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    one.says("beat", doing="epoch")
    two.says("beat", doing="epoch")
    two.does(0, partial=True)
    scene.lose(two)
    assert scene.runs(0.7)
    one.says("beat", doing="save")
    assert scene.runs(0.7)
    one.does(0, partial=True)
    scene.lose(one)
    scene.process.code = 0
    assert scene.ended() is None
    assert scene.block.partial


def test_a_rank_that_saves_while_another_reports_is_waited_for(scene) -> None:
    one, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    one.says("beat", doing="save")
    two.says("beat", doing=None)
    assert scene.runs(0.7)
    one.does(0)
    two.does(0)
    assert scene.ended() is None


def test_a_pause_has_an_end_too(scene, monkeypatch) -> None:
    monkeypatch.setattr(causes, "read_stack", lambda *_: None)
    one, _ = scene.pair()
    scene.wait(hang_s=0.1, pause_s=SHORT_S)
    one.says("beat", doing="eval")
    cause = scene.ended()
    assert (cause.reason, cause.text) == ("hang", "no sign of life for 0 s: no stack could be read")


def test_a_rank_that_left_its_loop_while_the_other_went_on(scene) -> None:
    _, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    two.says("beat", doing="epoch")
    two.does(0, partial=True)
    scene.lose(two)
    cause = scene.ended()
    assert cause.reason == "ranks_diverged"
    assert cause.text.startswith(f"rank 1 ended its training after {two.total} steps, while rank 0 went on")


def test_a_rank_that_left_its_loop_and_hangs_in_its_exit_is_told_alike(scene) -> None:
    """Destroying a process group can wait for the others."""
    _, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    two.does(0, partial=True)
    assert scene.ended().reason == "ranks_diverged"


def test_a_rank_that_was_lost_while_its_launcher_did_not_mind(scene) -> None:
    _, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    scene.lose(two)
    cause = scene.ended()
    assert cause.reason == "rank_died"
    assert cause.text.startswith("rank 1 ended without a word")


def test_ranks_that_all_ended_and_begin_anew(scene) -> None:
    """Two mp.spawn one after the other: folds. The ranks of the second one do the block."""
    one, two = scene.pair()
    scene.wait(hang_s=PATIENCE_S)
    scene.lose(one)
    assert scene.runs()
    scene.lose(two)
    assert scene.runs()
    again = scene.rank(0, pid=2000)
    assert scene.runs()  # the other one is a little later
    other = scene.rank(1, pid=2001)
    assert (again.answer["ok"], other.answer["ok"]) == (True, True)
    again.does(0)
    assert scene.runs()
    other.does(0)
    assert scene.ended() is None
    assert {end["rank"] for end in scene.block.ends.values()} == {0, 1}
    assert not scene.block.partial


def test_ranks_that_end_well_and_begin_anew(scene, monkeypatch) -> None:
    """torchrun twice in one command: what the first ranks measured until their end counts."""
    monkeypatch.setattr(waiting, "_EXIT_GRACE_S", 100 * PATIENCE_S)
    one, two = scene.pair()
    scene.wait()
    for rank in (one, two):
        rank.does(0, steps=20, partial=True)
        rank.goes()
    scene.heard(lambda: len(scene.state.lost) == 2)
    time.sleep(0.4)  # the end of the command is waited for now
    scene.rank(0, pid=2000)
    assert scene.ended() is None
    assert scene.block.partial
    assert [end["steps"] for end in scene.block.ends.values()] == [20, 20]


def test_a_rank_that_begins_anew_between_the_results_of_both(scene) -> None:
    one, two = scene.pair()
    scene.wait()
    two.does(0, steps=20, partial=True)
    scene.lose(two)
    assert scene.runs()
    again = scene.rank(1, pid=2001)
    one.does(0, steps=20, partial=True)
    scene.lose(one)
    assert scene.runs()  # rank 1's new process has told nothing yet
    again.does(0)
    scene.process.code = 0
    assert scene.ended() is None
    assert {rank: end["steps"] for rank, end in scene.block.ends.items()} == {0: 20, 1: 40}


def test_ranks_that_all_ended_and_a_command_that_goes_on_without_training(scene) -> None:
    one, two = scene.pair()
    scene.wait(hang_s=SHORT_S)
    scene.lose(one)
    scene.lose(two)
    assert scene.ended().reason == "script_ended"


def test_no_rank_at_all(scene) -> None:
    scene.run_dir.log.write_text("loading the index\n")
    scene.wait(pause_s=SHORT_S)
    cause = scene.ended()
    assert (cause.reason, cause.stack) == ("hang", "loading the index")
    assert "no training step" in cause.text


def test_a_partial_block_of_a_script_that_failed(scene) -> None:
    one, two = scene.pair()
    scene.wait()
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad'
    two.says("uncaught", text=trace)
    one.does(0, partial=True)
    two.does(0, partial=True)
    time.sleep(0.3)
    scene.process.code = 1
    assert scene.ended().text == "rank 1: ValueError: bad"


def test_a_slow_step_that_was_predicted_is_no_hang(scene) -> None:
    one, two = scene.pair()
    scene.wait(hang_s=0.1)
    scene.block.plan = plan(0, step_s=PATIENCE_S)
    assert scene.runs(0.8)
    one.does(0)
    two.does(0)
    assert scene.ended() is None


def test_a_worker_that_cannot_send_its_batch_is_told_by_the_blocks_own_output(scene, monkeypatch) -> None:
    monkeypatch.setattr(causes, "read_stack", lambda *_: None)
    scene.run_dir.log.write_text(FEEDER.replace("lambda", "old"))  # of an earlier block
    scene.rank(0, world=1)
    scene.wait(hang_s=SHORT_S)
    assert scene.runs(0.1)  # it has begun
    with open(scene.run_dir.log, "a") as log:
        log.write("step 3\n" + FEEDER)
    cause = scene.ended()
    assert cause.reason == "hang"
    assert "a worker could not send its batch: AttributeError: Can't pickle local object" in cause.text
    assert "lambda" in cause.text


FEEDER = """Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 244, in _feed
    obj = _ForkingPickler.dumps(obj)
          ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/reduction.py", line 51, in dumps
    cls(buf, protocol).dump(obj)
AttributeError: Can't pickle local object 'main.<locals>.<lambda>'
"""
