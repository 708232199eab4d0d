"""The control server: plans to the ranks, marks and results back; JSON lines over TCP, nothing unpickled."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from feedtune.records import BlockPlan

MAX_LINE = 1 << 20
_KEPT_ERRORS = 32  # of one block
Message = dict[str, Any]
MarkRule = Callable[[BlockPlan, int, set[int], float | None, float], int]


@dataclass
class StartState:
    """What the ranks of one start of the script have said; guarded by the server's lock."""

    hellos: dict[int, Message] = field(default_factory=dict)
    results: dict[tuple[int, int], Message] = field(default_factory=dict)  # (k, rank)
    failures: list[Message] = field(default_factory=list)
    errors: dict[int, list[Message]] = field(default_factory=dict)  # k -> what its loaders raised
    uncaught: list[Message] = field(default_factory=list)  # what has ended ranks, in order of arrival
    asked: dict[int, int] = field(default_factory=dict)  # rank -> k it waits for
    done: set[int] = field(default_factory=set)
    left: dict[int, int] = field(default_factory=dict)  # rank -> the exit code that it would end with
    lost: list[int] = field(default_factory=list)  # pids whose connection has ended, the first one first
    loader: int | None = None
    heard_s: float = field(default_factory=time.monotonic)
    # rank -> what it does that is no step, by its latest word: a save, an evaluation, the seam of two epochs
    doing: dict[int, str] = field(default_factory=dict)


def _until_cached(plan: BlockPlan, message: Message) -> int:
    """Steps that a block goes on for nothing but its cache, as far as its time goes."""
    left_s = plan.max_s - message["elapsed_s"]
    if not message.get("missing") or not message["pace_s"] or left_s <= 0:
        return 0
    steps = min(int(message["missing"]), int(left_s / message["pace_s"]))
    return -(-steps // plan.cycle) * plan.cycle


class ControlServer:
    """Answers the ranks; the driver publishes plans and waits for what it needs.

    Plan k is written once, and the first answer to mark j of block k is the answer of all ranks, so a
    rank that was started again, or that is a little late, does the same steps as the others.

    Args:
        token: shared secret; a line without it closes its connection.
        mark_rule: ``feedtune.analysis.pacing.next_chunk``, or a rule of the same shape.
    """

    def __init__(self, token: str, mark_rule: MarkRule) -> None:
        self._token = token
        self._rule = mark_rule
        self._changed = threading.Condition()
        self._plans: dict[int, Message] = {}
        self._blocks: dict[int, BlockPlan] = {}
        self._marks: dict[tuple[int, int], int] = {}
        self._pauses: dict[int, set[int]] = defaultdict(set)
        self._starts: dict[int, StartState] = {}
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="control").start()

    def start_state(self, start: int) -> StartState:
        """The state of one start of the script; hold no reference across ``wait``."""
        return self._starts.setdefault(start, StartState())

    def publish(self, plan: BlockPlan) -> None:
        """Fix block k's plan for all ranks."""
        with self._changed:
            self._plans.setdefault(plan.k, plan.as_dict())
            self._blocks.setdefault(plan.k, plan)
            self._changed.notify_all()

    def publish_end(self, k: int) -> None:
        """After block ``k - 1`` there is nothing more to do."""
        with self._changed:
            self._plans.setdefault(k, {"kind": "done", "k": k})
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` (called under the lock) or the time is over; the last answer."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_s)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Look at a ``StartState`` without it changing meanwhile."""
        with self._changed:
            yield

    def close(self) -> None:
        """Close all connections; ranks that wait for an answer end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for connection in list(self._open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.add(connection)
        context: Message = {}
        try:
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE):
                    message = self._read(line)
                    if message is None:
                        return
                    try:
                        answer = self._handle(message, context)
                    except (KeyError, TypeError):
                        return  # the token is right, the message is not one of ours
                    if answer is not None:
                        connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            return  # the rank has ended; the session sees its process end
        finally:
            with self._changed:
                self._open.discard(connection)
                if "lost" in context:
                    context["lost"].append(context["pid"])
                self._changed.notify_all()

    def _read(self, line: bytes) -> Message | None:
        """A message with the right token, else ``None``."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict) or not isinstance(message.get("token"), str):
            return None
        return message if hmac.compare_digest(message["token"].encode(), self._token.encode()) else None

    def _handle(self, message: Message, context: Message) -> Message | None:
        kind = message.get("type")
        with self._changed:
            state = self.start_state(message["start"] if kind == "hello" else context.get("start", 0))
            if kind == "hello":
                context.update(start=message["start"], rank=message["rank"])
            rank, doing = context.get("rank", 0), message.get("doing")
            if doing is None or doing != state.doing.get(rank):  # a long evaluation is one sign, not many
                state.heard_s = time.monotonic()
            state.doing.pop(rank, None)
            if doing is not None:
                state.doing[rank] = doing
            answer = getattr(self, f"_on_{kind}", self._on_unknown)(message, state)
            if kind == "hello" and state.hellos.get(rank) is message:
                context.update(lost=state.lost, pid=message.get("pid"))  # a rank's connection, from now on
            self._changed.notify_all()
            return answer

    def _on_unknown(self, message: Message, _: StartState) -> None:
        """Messages that need no answer: signs of life."""

    def _on_hello(self, message: Message, state: StartState) -> Message:
        if state.loader is None:
            # Two training loaders (GAN): the one that waits longer is tuned, the same on every rank.
            rivals = message.get("rivals") or []
            state.loader = max(rivals, key=lambda pair: pair[1])[0] if len(rivals) > 1 else None
        before = state.hellos.get(message["rank"])
        pid = message.get("pid")
        if before is not None and before.get("pid") not in (pid, *state.lost):
            return {"ok": False}  # a second program that calls itself the same rank: it trains on untouched
        if before is not None and before.get("pid") != pid:  # the script trains once more: folds, stages
            state.left.pop(message["rank"], None)
            state.results = {key: end for key, end in state.results.items() if key[1] != message["rank"]}
        if state.loader is None or state.loader == message["loader"].get("number", state.loader):
            state.hellos[message["rank"]] = message
        return {"ok": True} if state.loader is None else {"ok": True, "loader": state.loader}

    def _on_plan(self, message: Message, state: StartState) -> Message:
        k = message["k"]
        if k is None:  # first question of a start: the block that is being done now
            self._changed.wait_for(lambda: bool(self._plans) or self._closed)
            k = max(self._plans, default=0)
        state.asked[message["rank"]] = k
        self._changed.notify_all()
        self._changed.wait_for(lambda: k in self._plans or self._closed)
        state.asked.pop(message["rank"], None)
        state.heard_s = time.monotonic()
        return self._plans[k]  # a KeyError once the server is closed: the connection ends

    def _on_mark(self, message: Message, _: StartState) -> Message:
        key = (message["k"], message["mark"])
        if key not in self._marks:
            plan = self._blocks[message["k"]]
            steps = self._rule(
                plan, message["step"], self._pauses[message["k"]], message["pace_s"], message["elapsed_s"]
            )
            self._marks[key] = steps or _until_cached(plan, message)
        return {"go": self._marks[key]}

    def _on_pause(self, message: Message, _: StartState) -> None:
        self._pauses[message["k"]].add(message["step"])

    def _on_result(self, message: Message, state: StartState) -> None:
        state.results[message["k"], message["rank"]] = message

    def _on_fail(self, message: Message, state: StartState) -> None:
        state.failures.append(message)

    def _on_error(self, message: Message, state: StartState) -> None:
        kept = state.errors.setdefault(message["k"], [])
        kept.append(message)
        del kept[:-_KEPT_ERRORS]  # a script may live with any number of bad samples

    def _on_uncaught(self, message: Message, state: StartState) -> None:
        state.uncaught.append(message)

    def _on_leave(self, message: Message, state: StartState) -> Message:
        """A rank ends by itself. The last one, and one that fails, is kept until the tree is ended."""
        hello = state.hellos.get(message["rank"], {})
        state.left[message["rank"]] = int(message["code"])
        state.lost.append(hello.get("pid", 0))
        self._changed.notify_all()
        if message["code"] or state.left.keys() >= state.hellos.keys():
            self._changed.wait_for(lambda: self._closed)
        return {"go": True}

    def _on_done(self, message: Message, state: StartState) -> None:
        state.done.add(message["rank"])
