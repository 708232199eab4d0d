"""The control server: what is written once, what closes a connection, what concurrent ranks see."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from feedtune.inside.client import Client, ControlLost
from feedtune.records import BlockPlan
from feedtune.settings import LoaderSettings
from feedtune.trials.server import MAX_LINE, ControlServer

PATIENCE_S = 30.0  # only a failing test waits so long


def plan(k: int, workers: int = 1) -> BlockPlan:
    return BlockPlan(k, "candidate", LoaderSettings(workers), warmup=2, cycle=1, target_s=1.0, max_s=8.0)


class Rule:
    """Counts how often it is asked; each answer is another one."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, plan, step, pauses, pace_s, elapsed_s) -> int:
        self.calls.append((plan.k, step, set(pauses), pace_s, elapsed_s))
        return len(self.calls) * 10


@pytest.fixture
def rule() -> Rule:
    return Rule()


@pytest.fixture
def server(rule):
    server = ControlServer("right", rule)
    yield server
    server.close()


@pytest.fixture
def connect(server):
    clients = []

    def make(token: str = "right") -> Client:
        clients.append(Client("127.0.0.1", server.port, token))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def hello(
    client: Client, rank: int = 0, start: int = 1, number: int = 0, rivals=(), pid: int | None = None
) -> dict:
    return client.ask(
        {
            "type": "hello",
            "rank": rank,
            "world": 2,
            "start": start,
            "pid": pid,
            "loader": {"number": number},
            "rivals": list(rivals),
        }
    )


def mark(client: Client, k: int, number: int, step: int) -> int:
    message = {"type": "mark", "k": k, "mark": number, "step": step, "pace_s": 0.1, "elapsed_s": 1.0}
    return client.ask(message)["go"]


def test_a_plan_is_written_once(server, connect) -> None:
    server.publish(plan(0, workers=2))
    server.publish(plan(0, workers=9))
    client = connect()
    hello(client)
    answer = client.ask({"type": "plan", "k": 0, "rank": 0})
    assert answer == {**plan(0, workers=2).as_dict(), "kind": "candidate"}
    server.publish_end(0)
    assert client.ask({"type": "plan", "k": 0, "rank": 0})["kind"] == "candidate"


def test_the_first_question_of_a_start_gets_the_block_of_the_day(server, connect) -> None:
    for k in range(3):
        server.publish(plan(k))
    client = connect()
    hello(client)
    assert client.ask({"type": "plan", "k": None, "rank": 0})["k"] == 2


def test_a_rank_waits_for_a_plan_that_is_not_there_yet(server, connect) -> None:
    server.publish(plan(0))
    client = connect()
    hello(client)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.ask({"type": "plan", "k": 1, "rank": 0})))
    thread.start()
    state = server.start_state(1)
    assert server.wait(lambda: state.asked.get(0) == 1, PATIENCE_S)
    assert not answers
    server.publish(plan(1, workers=5))
    thread.join(PATIENCE_S)
    assert answers[0]["settings"]["num_workers"] == 5
    assert server.wait(lambda: 0 not in state.asked, PATIENCE_S)


def test_the_first_answer_to_a_mark_is_the_answer_of_all(server, connect, rule) -> None:
    server.publish(plan(0))
    one, two = connect(), connect()
    hello(one, 0)
    hello(two, 1)
    assert mark(one, 0, 0, 20) == 10
    assert mark(two, 0, 0, 21) == 10
    assert mark(two, 0, 1, 30) == 20
    assert mark(one, 0, 1, 29) == 20
    assert [call[1] for call in rule.calls] == [20, 30]


@pytest.mark.parametrize(
    ("missing", "pace_s", "elapsed_s", "go"),
    [
        (0, 0.1, 1.0, 0),
        (7, 0.1, 1.0, 8),  # whole cycles
        (40, 0.5, 5.0, 8),  # no longer than the block may take
        (40, 0.5, 8.0, 0),
        (40, None, 1.0, 0),
    ],
)
def test_a_block_goes_on_until_the_ceilings_cache_is_full(missing, pace_s, elapsed_s, go) -> None:
    server = ControlServer("right", lambda *_: 0)
    try:
        server.publish(replace(plan(0), cycle=4))
        client = Client("127.0.0.1", server.port, "right")
        hello(client)
        message = {"type": "mark", "k": 0, "mark": 0, "step": 20, "pace_s": pace_s, "elapsed_s": elapsed_s}
        assert client.ask({**message, "missing": missing})["go"] == go
        assert client.ask({**message, "missing": 0})["go"] == go  # the first rank's answer is that of all
        client.close()
    finally:
        server.close()


def test_a_rank_of_a_later_start_gets_the_same_answers(server, connect, rule) -> None:
    server.publish(plan(0))
    one = connect()
    hello(one)
    assert mark(one, 0, 0, 20) == 10
    again = connect()
    hello(again, start=2)
    assert mark(again, 0, 0, 25) == 10
    assert len(rule.calls) == 1


def test_pauses_of_all_ranks_reach_the_rule(server, connect, rule) -> None:
    server.publish(plan(0))
    server.publish(plan(1))
    one, two = connect(), connect()
    hello(one, 0)
    hello(two, 1)
    one.send({"type": "pause", "k": 0, "step": 4})
    two.send({"type": "pause", "k": 0, "step": 9})
    one.send({"type": "pause", "k": 1, "step": 5})
    mark(one, 1, 0, 20)
    mark(two, 0, 0, 20)  # each connection is read in its order: both pauses of block 0 have been seen
    assert rule.calls[0][2] == {5}
    assert rule.calls[1][2] == {4, 9}


def test_many_ranks_at_once_get_one_answer_a_mark(server, connect, rule) -> None:
    server.publish(plan(0))
    together = threading.Barrier(8)
    answers: dict[int, list[int]] = {}

    def rank(number: int) -> None:
        client = connect()
        hello(client, number)
        together.wait(PATIENCE_S)
        answers[number] = [mark(client, 0, j, 20 + number) for j in range(20)]
        client.send({"type": "result", "k": 0, "rank": number})
        client.send({"type": "done", "rank": number})

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(answers) == 8
    assert all(got == answers[0] for got in answers.values())
    assert answers[0] == [10 * (j + 1) for j in range(20)]
    assert len(rule.calls) == 20
    state = server.start_state(1)
    assert server.wait(lambda: state.done == set(range(8)), PATIENCE_S)
    assert set(state.results) == {(0, number) for number in range(8)}
    assert set(state.hellos) == set(range(8))


def leaves(client: Client, rank: int, code: int = 0) -> threading.Thread:
    """A rank that comes to its end; the thread ends when the rank may."""

    def ask() -> None:
        with contextlib.suppress(ControlLost):
            client.ask({"type": "leave", "rank": rank, "code": code})

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_the_last_rank_that_ends_is_kept(server, connect) -> None:
    """Its launcher would end with it, and go on to what stands behind the training."""
    ranks = [connect() for _ in range(3)]
    for number, client in enumerate(ranks):
        hello(client, number, pid=20 + number)
    for number in (2, 0):
        thread = leaves(ranks[number], number)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    last = leaves(ranks[1], 1)
    state = server.start_state(1)
    assert server.wait(lambda: set(state.left) == {0, 1, 2}, PATIENCE_S)
    last.join(0.2)
    assert last.is_alive()
    assert {20, 21, 22} <= set(state.lost)
    server.close()
    last.join(PATIENCE_S)
    assert not last.is_alive()


def test_a_rank_that_fails_is_kept_whoever_else_goes_on(server, connect) -> None:
    ranks = [connect() for _ in range(2)]
    for number, client in enumerate(ranks):
        hello(client, number)
    failing = leaves(ranks[1], 1, code=3)
    state = server.start_state(1)
    assert server.wait(lambda: state.left == {1: 3}, PATIENCE_S)
    failing.join(0.2)
    assert failing.is_alive()
    server.close()
    failing.join(PATIENCE_S)


def test_starts_are_kept_apart(server, connect) -> None:
    one, two = connect(), connect()
    hello(one, 0, start=1)
    hello(two, 0, start=2)
    one.send({"type": "fail", "k": 0, "rank": 0, "text": "late word of a dead start"})
    assert server.wait(lambda: bool(server.start_state(1).failures), PATIENCE_S)
    assert server.start_state(2).failures == []


def test_of_two_training_loaders_the_one_that_waits_longer_is_chosen(server, connect) -> None:
    client = connect()
    rivals = [[0, 0.1], [3, 2.5]]
    assert hello(client, number=0, rivals=rivals) == {"ok": True, "loader": 3}
    assert server.start_state(1).hellos == {}
    assert hello(client, number=3, rivals=rivals) == {"ok": True, "loader": 3}
    # The choice stands, whatever another rank has measured.
    assert hello(connect(), rank=1, number=0, rivals=[[0, 9.0], [3, 1.0]])["loader"] == 3
    assert set(server.start_state(1).hellos) == {0}


def test_one_training_loader_is_taken_as_it_is(connect) -> None:
    assert hello(connect(), rivals=[[0, 0.1]]) == {"ok": True}


def test_a_second_process_of_the_same_rank_is_left_alone_while_the_first_is_connected(
    server, connect
) -> None:
    first, second = connect(), connect()
    assert hello(first, pid=11) == {"ok": True}
    assert hello(second, pid=12) == {"ok": False}
    assert hello(connect(), rank=1, pid=12) == {"ok": True}
    assert hello(first, pid=11) == {"ok": True}
    assert server.start_state(1).hellos[0]["pid"] == 11


def test_a_rank_that_has_gone_can_be_followed_by_another_process(server, connect) -> None:
    first = connect()
    assert hello(first, pid=11) == {"ok": True}
    first.close()
    state = server.start_state(1)
    deadline = time.monotonic() + PATIENCE_S
    while not server.wait(lambda: 11 in state.lost, 0.02):
        assert time.monotonic() < deadline
    assert hello(connect(), pid=12) == {"ok": True}
    assert state.hellos[0]["pid"] == 12


def raw(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it was closed with our bytes unread
        return True


HELLO = {"type": "hello", "rank": 0, "world": 1, "start": 1, "loader": {"number": 0}}


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({**HELLO, "token": "wrong"}).encode(),
        json.dumps({**HELLO, "token": ""}).encode(),
        json.dumps({**HELLO, "token": 7}).encode(),
        json.dumps(HELLO).encode(),
        b"[1, 2]",
        b'"right"',
        b"GET / HTTP/1.1",
        b"\x80\x04\x95\xff",
        b"",
        b'{"token": "\\u00e9", "type": "hello"}',
        b"[" * 100_000,
    ],
)
def test_a_line_without_the_token_closes_its_connection(server, connect, line) -> None:
    with raw(server) as connection:
        connection.sendall(line + b"\n")
        assert is_closed(connection)
    assert server.start_state(1).hellos == {}
    assert hello(connect()) == {"ok": True}  # others are served as before


@pytest.mark.parametrize("kind", ["hello", "plan", "mark", "result"])
def test_a_message_without_its_parts_closes_its_connection_quietly(
    server, connect, monkeypatch, kind
) -> None:
    raised: list = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with raw(server) as connection:
        connection.sendall(json.dumps({"token": "right", "type": kind}).encode() + b"\n")
        assert is_closed(connection)
    assert hello(connect()) == {"ok": True}
    for thread in threading.enumerate():
        if thread.name.endswith("(_serve)"):
            thread.join(0.1)
    assert not raised


def test_a_closed_server_takes_no_connection(server, connect) -> None:
    assert hello(connect()) == {"ok": True}
    time.sleep(0.1)  # its thread waits for the next connection
    server.close()
    with pytest.raises(ConnectionRefusedError):
        raw(server)


def test_a_wrong_token_is_the_end_for_a_client(connect) -> None:
    with pytest.raises(ControlLost):
        hello(connect("wrong"))


def test_a_line_above_the_limit_closes_its_connection(server, connect) -> None:
    message = json.dumps({**HELLO, "token": "right", "pad": "x" * MAX_LINE}).encode() + b"\n"
    with raw(server) as connection:
        connection.settimeout(PATIENCE_S)
        try:
            connection.sendall(message)
        except OSError:
            pass  # it was closed while we wrote
        else:
            assert is_closed(connection)
    assert server.start_state(1).hellos == {}
    assert hello(connect()) == {"ok": True}


def test_a_client_does_not_send_such_a_line(connect) -> None:
    with pytest.raises(ValueError, match="control message"):
        connect().send({"type": "fail", "text": "x" * MAX_LINE})


def test_an_unknown_message_is_a_sign_of_life(server, connect) -> None:
    client = connect()
    client.send({"type": "beat", "doing": "save"})
    assert hello(client) == {"ok": True}
    client.send({"type": "beat", "doing": "save"})
    state = server.start_state(1)
    assert server.wait(lambda: state.doing == {0: "save"}, PATIENCE_S)


def test_each_rank_has_its_own_doing(server, connect) -> None:
    """Rank 1 stands at a barrier while rank 0 saves; its last word ends nothing of rank 0's."""
    one, two = connect(), connect()
    hello(one, 0, pid=11)
    hello(two, 1, pid=12)
    state = server.start_state(1)
    one.send({"type": "beat", "doing": "save"})
    two.send({"type": "beat", "doing": "eval"})
    assert server.wait(lambda: state.doing == {0: "save", 1: "eval"}, PATIENCE_S)
    two.send({"type": "beat", "doing": None})
    assert server.wait(lambda: state.doing == {0: "save"}, PATIENCE_S)
    one.send({"type": "pause", "k": 0, "step": 3})
    assert server.wait(lambda: state.doing == {}, PATIENCE_S)


def test_a_long_evaluation_is_one_sign_of_life(server, connect) -> None:
    client = connect()
    hello(client, pid=11)
    state = server.start_state(1)
    client.send({"type": "beat", "doing": "eval"})
    assert server.wait(lambda: state.doing == {0: "eval"}, PATIENCE_S)
    heard = state.heard_s
    client.send({"type": "beat", "doing": "eval"})
    client.send({"type": "error", "k": 7, "rank": 0, "text": "", "doing": "eval"})
    assert server.wait(lambda: 7 in state.errors, PATIENCE_S)
    assert state.heard_s == heard
    client.send({"type": "beat", "doing": "save"})
    assert server.wait(lambda: state.doing == {0: "save"}, PATIENCE_S)
    assert state.heard_s > heard


def test_a_connection_that_claimed_no_rank_is_no_loss(server, connect) -> None:
    """A process says hello with each of two training loaders; only one of them is tuned."""
    state = server.start_state(1)
    first = connect()
    assert hello(first, number=0, rivals=[[0, 0.1], [3, 2.5]], pid=11)["loader"] == 3
    second = connect()
    assert hello(second, number=3, pid=11)["loader"] == 3
    stranger = connect()
    assert hello(stranger, number=3, pid=12) == {"ok": False}
    first.close()
    stranger.close()
    until_closed(server, 1)
    assert state.lost == []
    second.close()
    assert server.wait(lambda: state.lost == [11], PATIENCE_S)


def until_closed(server, left: int) -> None:
    """Wait until the server serves so many connections only."""
    assert server.wait(lambda: len(server._open) == left, PATIENCE_S)


def test_closing_wakes_the_ranks_that_wait(server, connect) -> None:
    server.publish(plan(0))
    client = connect()
    hello(client)
    caught = []

    def ask() -> None:
        try:
            client.ask({"type": "plan", "k": 1, "rank": 0})
        except ControlLost as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    state = server.start_state(1)
    assert server.wait(lambda: state.asked.get(0) == 1, PATIENCE_S)
    server.close()
    thread.join(PATIENCE_S)
    assert len(caught) == 1


def test_a_child_that_drops_its_copy_leaves_the_connection_open(connect) -> None:
    client = connect()
    copy = Client.__new__(Client)
    copy._token, copy._socket = "right", socket.socket(fileno=client._socket.dup().detach())
    copy._file = copy._socket.makefile("rb")
    copy.close()
    assert hello(client) == {"ok": True}


def test_only_loopback_listens(server) -> None:
    assert server._listener.getsockname()[0] == "127.0.0.1"
