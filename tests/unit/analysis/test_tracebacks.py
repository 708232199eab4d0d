"""Tracebacks in texts: the exceptions in them, the line for a person, and where they begin and end."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from feedtune.analysis.tracebacks import clean_lines, error_line, last_line, raised, sentence, tracebacks

DATA = Path(__file__).parents[2] / "data" / "failures"


def recorded(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def formatted(act) -> str:
    """The traceback of what an action raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (any)
        act()
    error = caught.value
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_what_a_worker_has_raised_is_what_counts() -> None:
    found = raised(recorded("worker_value"))
    assert found == [
        "ValueError: Caught ValueError in DataLoader worker process 1.",
        "ValueError: Bus error in sample 3",
    ]
    assert error_line(recorded("worker_value")) == "ValueError: Bus error in sample 3"
    assert error_line(recorded("worker_key")) == "KeyError: 'image'"


def test_a_message_of_several_lines_is_told_by_its_first() -> None:
    assert raised(recorded("worker_multi"))[-1] == "ValueError: cannot decode\n  file: x\n  at: 3"
    assert error_line(recorded("worker_multi")) == "ValueError: cannot decode"

    def cuda() -> None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported at "
            "some other API call.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )

    assert error_line(formatted(cuda)) == "RuntimeError: CUDA error: device-side assert triggered"


def test_a_first_line_that_only_announces_takes_the_next() -> None:
    def load() -> None:
        raise RuntimeError("Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight")

    def compare() -> None:
        raise AssertionError("\nNot equal to tolerance rtol=1e-07\n more")

    assert error_line(formatted(load)).endswith("for Linear: size mismatch for weight")
    assert error_line(formatted(compare)) == "AssertionError: Not equal to tolerance rtol=1e-07"


def test_a_chain_ends_with_what_was_raised_last() -> None:
    def chained() -> None:
        try:
            raise OSError(24, "Too many open files")
        except OSError as error:
            raise KeyError("image") from error

    def meanwhile() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("gave up")  # noqa: B904 (what this is about)

    assert raised(formatted(chained)) == ["OSError: [Errno 24] Too many open files", "KeyError: 'image'"]
    assert raised(formatted(meanwhile)) == ["MemoryError", "RuntimeError: gave up"]


def test_an_exception_of_a_function_or_of_a_module_has_its_whole_name() -> None:
    class Bad(Exception):
        pass

    def own() -> None:
        raise Bad("no label")

    assert raised(formatted(own)) == [f"{Bad.__module__}.{Bad.__qualname__}: no label"]
    assert "<locals>" in error_line(formatted(own))
    ray = "ray.exceptions.RayTaskError(ValueError): ray::f()"
    assert error_line(f"Traceback (most recent call last):\n  File x\n{ray}") == ray


def test_a_syntax_error_is_told_by_its_name() -> None:
    text = formatted(lambda: compile("f(", "train.py", "exec"))
    assert error_line(text) == "SyntaxError: '(' was never closed"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_a_group_is_told_with_its_first_member() -> None:
    def inner() -> None:
        raise ValueError("sample 7")

    def group() -> None:
        try:
            inner()
        except ValueError as error:
            raise ExceptionGroup("reading", [error, ExceptionGroup("more", [KeyError("b")])]) from None  # noqa: F821

    text = formatted(group)
    assert raised(text) == [
        "ExceptionGroup: reading (2 sub-exceptions)",
        "ValueError: sample 7",
        "ExceptionGroup: more (1 sub-exception)",
        "KeyError: 'b'",
    ]
    assert error_line(text) == "ExceptionGroup: reading (2 sub-exceptions): ValueError: sample 7"
    (found,) = tracebacks(clean_lines(f"step 1\n{text}done: 3\n"))
    assert found == text.rstrip()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_notes_do_not_hide_the_exception() -> None:
    def noted() -> None:
        error = ValueError("bad")
        error.add_note("look at sample 3")
        raise error

    assert error_line(formatted(noted)) == "ValueError: bad"


def test_a_text_that_begins_within_a_frame() -> None:
    """A rank sends the last 4,000 characters."""
    whole = recorded("worker_value")
    for cut in range(0, len(whole) - 60, 7):
        assert error_line(whole[cut:]) == "ValueError: Bus error in sample 3", whole[cut : cut + 40]


def test_a_text_without_any_exception_is_told_by_its_last_line() -> None:
    assert error_line("loading\nkilled\n\n") == "killed"
    assert error_line("1\n2\nValueError: skipped, says the log\nepoch: 3\n") == "epoch: 3"
    assert error_line("") == ""
    assert raised("") == []
    assert last_line("a\n  b \n\n") == "b"
    assert last_line("") == ""
    assert len(error_line("x" * 100_000)) <= 500
    assert len(sentence("ValueError: " + "x" * 100_000)) <= 500


def test_lines_of_source_are_no_exceptions() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    ValueError: no\nKeyError: 1'
    assert raised(text) == ["KeyError: 1"]


def test_colours_control_characters_and_long_lines_go() -> None:
    assert clean_lines("\x1b[1;31mred\x1b[0m \x1b]0;title\x07on\x07") == ["red on"]
    assert clean_lines("a\r\nb\r\n") == ["a", "b", ""]
    assert clean_lines("\x00\x01\ufffdab\x7fc\td") == ["\ufffdabc\td"]
    assert clean_lines("x" * 10_000) == ["x" * 500]
    assert clean_lines("") == [""]


def test_ranks_that_torch_marks_are_told_apart() -> None:
    found = tracebacks(clean_lines(recorded("torchrun_raise")))
    assert [error_line(trace)[:24] for trace in found] == [
        "ValueError: loss is nan",
        "RuntimeError: [/pytorch/",
        "torch.distributed.elasti",
    ]
    assert found[0].splitlines()[0] == "Traceback (most recent call last):"
    assert not any("[rank" in line for trace in found[:2] for line in trace.splitlines())


def test_ranks_that_write_at_once_are_told_apart() -> None:
    one = ["[rank0]: " + line for line in recorded("worker_value").rstrip().splitlines()]
    two = ["[rank1]: " + line for line in recorded("worker_key").rstrip().splitlines()]
    mixed = [line for pair in zip(one, two, strict=False) for line in pair]
    mixed += one[len(two) :] + two[len(one) :]
    found = tracebacks(mixed)
    assert [error_line(trace) for trace in found] == [
        "ValueError: Bus error in sample 3",
        "KeyError: 'image'",
    ]
    assert found[0] == recorded("worker_value").rstrip()


def test_a_traceback_behind_a_progress_bar_is_seen() -> None:
    bar = " 10%|#   | 10/100 [00:01<00:09]\r 20%|##  | 20/100 [00:02<00:08]"
    found = tracebacks(clean_lines(bar + recorded("worker_segv")))
    assert [error_line(trace)[:12] for trace in found] == ["RuntimeError"]


def test_what_follows_a_traceback_is_no_part_of_it() -> None:
    trace = recorded("worker_segv").rstrip()
    log = "W1129 23:15:04.371000 2 torch/x.py:1] words\n"
    assert tracebacks(clean_lines(f"start\n{trace}\n\nepoch: 4\n{log}")) == [trace]
    assert tracebacks(clean_lines(f"{trace}\n{log}[rank1]: words\n")) == [trace]


def test_a_chain_and_a_spawned_process_stay_one_traceback() -> None:
    for name in ("worker_chain", "spawn_raise"):
        (found,) = tracebacks(clean_lines(recorded(name)))
        assert error_line(found) == error_line(recorded(name))
    assert len(tracebacks(clean_lines(recorded("processes_raise")))) == 2


def test_a_message_without_end_is_cut() -> None:
    (found,) = tracebacks(clean_lines(recorded("worker_segv").rstrip() + "\nmore" * 1000))
    assert len(found.splitlines()) < 30


def test_no_traceback_at_all() -> None:
    assert tracebacks([]) == []
    assert tracebacks(clean_lines("epoch 1\nepoch 2")) == []
    head = "Traceback (most recent call last):"
    assert tracebacks(clean_lines(head)) == [head]
