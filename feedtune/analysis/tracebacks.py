"""Tracebacks in texts: what was raised, and the one line of it that a person wants to read."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LONGEST_LINE = 500
_LONGEST_MESSAGE = 20  # lines; in a command's output nothing tells where a message ends

_HEADER = re.compile(r"(?:Original |  \+ Exception Group )?Traceback \(most recent call last\):")
# A module's exception, as in torch.OutOfMemoryError: or main.<locals>.Bad; Ray writes Outer(Inner).
_ERROR = re.compile(r"[A-Za-z_][\w.<>]*(?:\([\w.]+\))?(?::\s|:?$)")
_SURELY = re.compile(r"[\w.<>]*(?:Error|Exception|Exit|Interrupt)(?::\s|:?$)")
_CHAIN = re.compile(
    r"The above exception was the direct cause of|During handling of the above exception|-- Process \d+ term"
)
_FOREIGN_LINE = re.compile(r"\[(?:rank|default)\d+\]:|[WEIF]\d{4} \d\d:")  # of another rank, or torch's log
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)")
_IN_GROUP = re.compile(r"\s*(?:\| ?|\+ (?=Exception Group))")
_GROUP_EDGE = re.compile(r"\s*\+[-+]+(?: \d+ -+)?$")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def clean_lines(text: str) -> list[str]:
    r"""Lines of an output without colours and control characters, each in its last state.

    >>> clean_lines("\x1b[31mred\x1b[0m\r\n 10%|#   |\r 20%|##  |\nend")
    ['red', ' 20%|##  |', 'end']
    """
    lines = _ESCAPE.sub("", text).split("\n")
    return [_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2])[:_LONGEST_LINE] for line in lines]


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def raised(text: str) -> list[str]:
    r"""The exceptions of a traceback with their whole messages, in the order in which they stand.

    Causes come before what they led to, and torch's "Caught ... in DataLoader worker" before what the
    worker has raised: the last one says most, except in a group.

    >>> raised('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n  at 3')
    ['ValueError: bad\n  at 3']
    """
    found: list[list[str]] = []
    message: list[str] | None = None
    before = False  # whether the line before can stand before an exception: a frame, a header
    for number, line in enumerate(_ungrouped(text)):
        edge = bool(_HEADER.match(line) or _CHAIN.match(line) or _GROUP_EDGE.match(line))
        if edge:
            message = None
        elif message is not None:
            message.append(line)
        elif (_ERROR if before else _SURELY).match(line) and (before or number < 2):
            message = [line]  # a text that was cut can begin with it, or within the last frame
            found.append(message)
        before = edge or line[:1] in (" ", "\t")
    return ["\n".join(message).strip() for message in found]


def _ungrouped(text: str) -> Iterator[str]:
    """Lines of a traceback without the rails of exception groups."""
    grouped = " + Exception Group Traceback" in text
    for line in text.split("\n"):
        rails = _IN_GROUP.match(line) if grouped else None
        while rails:
            line = line[rails.end() :]
            rails = _IN_GROUP.match(line) if line.lstrip().startswith("|") else None
        yield line.replace("Exception Group Traceback", "Traceback") if grouped else line


def sentence(message: str) -> str:
    r"""The first line of an exception's message, and the next one where the first only announces it.

    >>> sentence("RuntimeError: Error(s) in loading state_dict:\n\tsize mismatch\n\tand more")
    'RuntimeError: Error(s) in loading state_dict: size mismatch'
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return said[:_LONGEST_LINE]


def error_line(text: str) -> str:
    r"""What a traceback says in one line; of a text without one, its last line.

    >>> error_line('Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad\nnote\n')
    'ValueError: bad'
    """
    found = raised(text)
    group = next((i for i, message in enumerate(found) if _GROUP.search(message.split("\n")[0])), None)
    if group is not None and group + 1 < len(found):
        return f"{sentence(found[group])}: {sentence(found[group + 1])}"
    return sentence(found[-1]) if found else last_line(text)[:_LONGEST_LINE]


def tracebacks(lines: list[str]) -> list[str]:
    """The tracebacks in a command's output, each whole; ranks that write at once are told apart.

    Args:
        lines: of `clean_lines`.
    """
    found = []
    taken: set[int] = set()
    for start, line in enumerate(lines):
        head = _HEADER.search(line)
        if head is None or start in taken:
            continue
        prefix = line[: head.start()]
        if not prefix.strip() or not any(other.startswith(prefix) for other in lines[start + 1 :]):
            prefix = ""  # no launcher's mark, but a progress bar before it
        mark = prefix.rstrip()
        numbers = [number for number in range(start + 1, len(lines)) if lines[number].startswith(mark)]
        rows = [lines[number][len(prefix) :] for number in numbers]
        length = _extent(rows, grouped=" + " in head.group())
        taken.update(numbers[:length])
        found.append("\n".join([line[head.start() :], *rows[:length]]).rstrip())
    return found


def _extent(rows: list[str], grouped: bool) -> int:
    """How many of the lines after a header belong to its traceback."""
    told = 0  # lines of the message so far; 0 between the frames
    for number, row in enumerate(rows):
        head = _HEADER.match(row)
        if head and told and not row.startswith("Original"):
            return number
        if head or _CHAIN.match(row):
            told = 0
        elif _FOREIGN_LINE.match(row) or (grouped and row[:1] not in (" ", "")) or told > _LONGEST_MESSAGE:
            return number
        elif not row.strip():
            following = next((other for other in rows[number:] if other.strip()), "")
            if told and not _HEADER.match(following) and not _CHAIN.match(following):
                return number
        elif told or (row[0] not in " \t" and _ERROR.match(row)):
            told += 1
    return len(rows)
