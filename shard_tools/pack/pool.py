"""Run tasks in processes that the parent watches: a dead worker is an error at once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shard_tools import errors
from shard_tools.errors import Missing, ToolError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")
# Tasks that a worker has in hand: it finds the next one waiting when it has finished one.
_IN_HAND = 2
_PR_SET_PDEATHSIG = 1


class _Finisher:
    """Finishes a result in a thread, which mostly waits for the disk, while the next is being written."""

    def __init__(self, finish: Callable[[int, Any], None]) -> None:
        self._finish = finish
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, task: int, result: Any) -> None:
        """Begin with a result, once the one before is finished; raises what went wrong with that."""
        self.join()
        self._thread = threading.Thread(target=self._run, args=(task, result), name="finish")
        self._thread.start()

    def join(self) -> None:
        """Wait for the result in hand; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, task: int, result: Any) -> None:
        try:
            self._finish(task, result)
        except Exception as error:  # noqa: BLE001  # raised again by join, in the thread that asked
            self._error = error


def run_tasks(
    tasks: Sequence[int],
    work: Callable[[int], Result],
    settle: Callable[[Result], None],
    workers: int,
    done: Callable[[int, Result], None],
) -> None:
    """Do ``work`` then ``settle`` for each task, in up to ``workers`` processes; ``done`` is called here.

    Raises:
        ToolError: the first error of a task, or ``Missing`` for a worker that died; no worker is left then.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        _run_here(tasks, work, settle, done)
    else:
        _Pool(tasks, work, settle, done).run(workers)


def _run_here(
    tasks: Sequence[int],
    work: Callable[[int], Result],
    settle: Callable[[Result], None],
    done: Callable[[int, Result], None],
) -> None:
    finisher = _Finisher(lambda _, result: settle(result))
    written: list[tuple[int, Result]] = []
    try:
        for task in tasks:
            result = work(task)
            finisher.start(task, result)
            if written:
                done(*written.pop())
            written.append((task, result))
        finisher.join()
        done(*written.pop())
    finally:
        finisher.join()


class _Pool:
    def __init__(
        self,
        tasks: Sequence[int],
        work: Callable[[int], Any],
        settle: Callable[[Any], None],
        done: Callable[[int, Any], None],
    ) -> None:
        self.tasks = iter(tasks)
        self.left = len(tasks)
        self.work = work
        self.settle = settle
        self.done = done
        self.workers: dict[Connection, tuple[BaseProcess, list[int]]] = {}

    def run(self, count: int) -> None:
        import multiprocessing

        # Forking a process that has threads can copy a lock that nobody will release.
        context = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
        gc.freeze()  # the collector would write to, and so copy, every page that the workers share
        try:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for _ in range(count):
                    self._start(context)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            while self.left:
                self._wait()
            for connection, (process, _) in self.workers.items():
                _send(connection, None)
                process.join()
        finally:
            gc.unfreeze()
            self._end()

    def _start(self, context: Any) -> None:
        here, there = context.Pipe()
        others = [*self.workers, here]
        process = context.Process(
            target=_worker, args=(there, os.getpid(), others, self.work, self.settle), daemon=True
        )
        process.start()
        there.close()
        self.workers[here] = (process, [])
        for _ in range(_IN_HAND):
            self._feed(here)

    def _feed(self, connection: Connection) -> None:
        task = next(self.tasks, None)
        if task is not None:
            self.workers[connection][1].append(task)
            _send(connection, task)

    def _wait(self) -> None:
        from multiprocessing.connection import wait

        for connection in cast("list[Connection[Any, Any]]", wait(list(self.workers))):
            process, in_hand = self.workers[connection]
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                raise _died(process, in_hand) from None
            if message[0] == "failed":
                raise _error(*message[1:])
            _, task, result = message
            in_hand.remove(task)
            self.left -= 1
            self.done(task, result)
            self._feed(connection)

    def _end(self) -> None:
        for connection, (process, _) in self.workers.items():
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            connection.close()
        self.workers.clear()


def _send(connection: Connection, task: int | None) -> None:
    """To a worker that has failed meanwhile there is nothing to say: its own last word is read next."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(task)


def _died(process: BaseProcess, in_hand: list[int]) -> Missing:
    code = process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    doing = f" while it wrote shard {in_hand[0]}" if in_hand else ""
    return Missing(
        f"a worker process {how}{doing}",
        "run the same command again: finished shards are kept (signal 9 often means too little memory)",
    )


def _error(name: str, what: str, hint: str) -> ToolError:
    kind = getattr(errors, name, ToolError)
    made: ToolError = kind(what, hint)
    return made


def _worker(
    connection: Connection,
    parent: int,
    others: list[Connection],
    work: Callable[[int], Any],
    settle: Callable[[Any], None],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with(parent)
    for other in others:
        other.close()  # the parent's ends: a worker that kept them would hide the parent's death

    def finish(task: int, result: Any) -> None:
        settle(result)
        connection.send(("done", task, result))

    finisher = _Finisher(finish)
    try:
        while (task := connection.recv()) is not None:
            finisher.start(task, work(task))
        finisher.join()
    except ToolError as error:
        connection.send(("failed", type(error).__name__, error.what, error.hint))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the parent has gone
    finally:
        connection.close()


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
