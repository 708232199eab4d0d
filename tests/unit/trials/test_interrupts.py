"""Signals end a tuning once, and never break off its end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from feedtune.trials.interrupts import Interrupts

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(0.001)  # the handler runs between two instructions


def ended_by(body) -> type[BaseException] | None:
    """What leaves the context when ``body`` runs in it."""
    try:
        with Interrupts() as interrupts:
            body(interrupts)
    except (KeyboardInterrupt, ValueError) as error:
        return type(error)
    return None


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_interrupts_and_no_later_one(number) -> None:
    reached = []

    def body(_) -> None:
        try:
            send(number)
            reached.append("after the first")
        finally:
            for later in NUMBERS:
                send(later)
            reached.append("end")

    assert ended_by(body) is KeyboardInterrupt
    assert reached == ["end"]


def test_a_signal_that_comes_in_the_end_waits_for_it() -> None:
    reached = []

    def body(interrupts: Interrupts) -> None:
        interrupts.hold()
        send(signal.SIGTERM)
        reached.append("end")

    assert ended_by(body) is KeyboardInterrupt
    assert reached == ["end"]


def test_an_error_is_not_replaced_by_a_late_signal() -> None:
    def body(interrupts: Interrupts) -> None:
        interrupts.hold()
        send(signal.SIGINT)
        raise ValueError("of the tuning")

    assert ended_by(body) is ValueError


def test_without_a_signal_nothing_is_raised() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()


def test_what_was_ignored_stays_ignored() -> None:
    """``nohup feedtune tune`` goes on when its terminal is closed."""
    reached = []

    def body(_) -> None:
        send(signal.SIGHUP)
        reached.append(signal.getsignal(signal.SIGHUP))

    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ended_by(body) is None
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert reached == [signal.SIG_IGN]


def test_a_call_that_must_be_whole_is_interrupted_at_its_end() -> None:
    reached = []

    def body(interrupts: Interrupts) -> None:
        with interrupts.whole():
            send(signal.SIGINT)
            send(signal.SIGTERM)
            reached.append("end of the call")
        reached.append("after it")

    assert ended_by(body) is KeyboardInterrupt
    assert reached == ["end of the call"]


def test_signals_after_a_whole_call_interrupt_again_and_only_once() -> None:
    reached = []

    def body(interrupts: Interrupts) -> None:
        with interrupts.whole():
            reached.append("call")
        try:
            send(signal.SIGHUP)
        finally:
            with interrupts.whole():
                send(signal.SIGINT)
            reached.append("end")

    assert ended_by(body) is KeyboardInterrupt
    assert reached == ["call", "end"]


def test_the_error_of_a_whole_call_is_not_replaced_by_a_signal() -> None:
    def body(interrupts: Interrupts) -> None:
        with interrupts.whole():
            send(signal.SIGINT)
            raise ValueError

    assert ended_by(body) is ValueError
