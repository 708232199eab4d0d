"""What a script's signal handlers raise arrives in the script, wherever a signal falls."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import weakref
from collections.abc import Iterator

import pytest

from feedtune.inside.quiet import Quiet
from feedtune.inside.rescue import rescue_from
from feedtune.inside.stepclock import StepClock
from feedtune.inside.taps import Taps


class Node:
    pass


class Ended(SystemExit):
    pass


def ends(*_: object) -> None:
    raise Ended(7)


def collect_and_get(number: int) -> int:
    """A signal arrives in the midst of a collection, in which no Python runs until its callbacks do."""
    kill = ctypes.CDLL(None)["kill"]
    kill.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.py_object]
    gc.collect()  # what others have left: a finalizer of theirs would swallow it as well
    node = Node()
    node.me = node
    ref = weakref.ref(node, functools.partial(kill, os.getpid(), number))
    del node
    gc.collect()
    done = sum(range(100))
    assert ref() is None
    return done


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("handle", "raised", "args"), [(signal.default_int_handler, KeyboardInterrupt, ()), (ends, Ended, (7,))]
)
def test_what_a_handler_raises_in_a_collection_arrives(capsys, handle, raised, args) -> None:
    told = sys.unraisablehook
    taps = Taps(StepClock())
    taps.install()
    signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(raised) as found:
            collect_and_get(signal.SIGUSR1)
    finally:
        taps.remove()
    assert type(found.value) is raised
    assert found.value.args == args
    assert found.traceback[-1].name in ("collect_and_get", "ends")
    assert "ignored" not in capsys.readouterr().err
    assert sys.unraisablehook is told


def test_an_exception_is_let_go_once_it_has_arrived() -> None:
    def watch(phase: str, about: object) -> None:
        pass

    undo = rescue_from(watch)
    gc.callbacks.append(watch)
    signal.signal(signal.SIGUSR1, ends)
    try:
        with pytest.raises(Ended) as found:
            collect_and_get(signal.SIGUSR1)
        ref = weakref.ref(found.value)
        del found
        gc.collect()
        assert ref() is None
    finally:
        gc.callbacks.remove(watch)
        undo()


def test_other_unraisable_exceptions_are_told_as_before(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def watch(phase: str, about: object) -> None:
        pass

    undo = rescue_from(watch)

    class Fails:
        def __del__(self) -> None:
            raise ValueError

    Fails()
    undo()
    assert len(told) == 1
    assert told[0].exc_type is ValueError


def test_an_error_of_the_scripts_handler_is_none_of_ours() -> None:
    class Late(Exception):
        pass

    class Alarm:
        def rings(self, *_: object) -> None:
            raise Late

    signal.signal(signal.SIGUSR1, Alarm().rings)
    quiet = Quiet()

    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        sum(range(10))

    with pytest.raises(Late):
        quiet(work)
    assert not quiet.off
    quiet(lambda: 1 / 0)
    assert quiet.off
