"""A recorded step as a line of text, made in the training loop: the cheapest way that was measured.

``json.dumps`` writes every float with 17 digits, which takes longer than all else here and fills the file;
rounding each first costs more still. One ``%``, with a pattern kept for each shape of row, costs half.
"""

from __future__ import annotations

import json
from typing import Any, Optional, Union

# enter_s, return_s, tag, made_s: see feedtune.analysis.steps
Row = tuple[float, float, Optional[str], Optional[float]]
# The same, and what else was seen of the step, such as {"t": 0.5, "b": 0.2, "y": [["call", 0.2, 0.3]]}
FullRow = tuple[float, float, Optional[str], Optional[float], Optional[dict[str, Any]]]

_SHAPES = 256  # patterns kept; a script whose steps all differ must not fill memory
encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_patterns: dict[tuple[Any, ...], str] = {}


def step_line(step: int, row: Union[Row, FullRow]) -> str:
    """A step as one line of JSON; nulls at its end are left out.

    >>> step_line(7, (1.0, 1.25, None, None)).strip()
    '[7,1.000000,1.250000]'
    >>> step_line(8, (2.0, 2.5, "eval", None, {"t": 0.5, "b": 0.25, "q": 2})).strip()
    '[8,2.000000,2.500000,"eval",null,{"t":0.5,"b":0.25,"q":2}]'
    >>> step_line(9, (3.0, 3.5, None, None, {})).strip()
    '[9,3.000000,3.500000,null,null,{}]'
    """
    parts = row[4] if len(row) > 4 else None
    if parts is not None:  # of a step in which nothing happened there is nothing in it
        text = "[%d,%.6f,%.6f,%s,%s,%s]\n"
        return text % (step, row[0], row[1], _null(row[2]), _null(row[3]), _parts(parts))
    if row[3] is not None:
        return "[%d,%.6f,%.6f,%s,%.6f]\n" % (step, row[0], row[1], _null(row[2]), row[3])
    if row[2] is not None:
        return "[%d,%.6f,%.6f,%s]\n" % (step, row[0], row[1], encode(row[2]))
    return "[%d,%.6f,%.6f]\n" % (step, row[0], row[1])


def _null(value: Any) -> str:
    return "null" if value is None else encode(value)


def _parts(parts: dict[str, Any]) -> str:
    """What was seen of a step, seconds with 7 digits.

    >>> _parts({"g": 0}), _parts({"g": 0.25}), _parts({"g": None}), _parts({"w": []})
    ('{"g":0}', '{"g":0.25}', '{"g":null}', '{"w":[]}')
    """
    try:
        shape, values = _flat(parts)
        pattern = _patterns.get(shape)
        text = (pattern or _remember(shape, parts)) % values
    except (TypeError, ValueError):  # something that is no number, where there should be one
        return encode(parts)
    return encode(parts) if "nan" in text or "inf" in text else text  # JSON has its own words for these


def _flat(parts: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What tells the pattern of a row, and its numbers in order."""
    shape: list[Any] = []
    values: list[Any] = []
    for name, value in parts.items():
        kind = type(value)
        if kind is float:
            shape.append(name)
            values.append(value)
        elif kind is int:  # as %.7g it would lose digits
            shape += (name, int)
            values.append(value)
        elif kind is not list:
            raise TypeError(name)
        elif value and type(value[0]) is list:
            shape += (name, -len(value))
            for word, begin, end in value:
                shape.append(word)
                values += (begin, end)
        else:
            shape += (name, len(value))
            values += value
    return tuple(shape), tuple(values)


def _remember(shape: tuple[Any, ...], parts: dict[str, Any]) -> str:
    if len(_patterns) >= _SHAPES:
        _patterns.clear()
    _patterns[shape] = "{" + ",".join(f"{_word(name)}:{_pattern(v)}" for name, v in parts.items()) + "}"
    return _patterns[shape]


def _pattern(value: Any) -> str:
    if type(value) is int:
        return "%d"
    if type(value) is float:
        return "%.7g"
    if value and type(value[0]) is list:
        return "[" + ",".join(f"[{_word(word)},%.7g,%.7g]" for word, *_ in value) + "]"
    return "[" + ",".join(["%.7g"] * len(value)) + "]"


def _word(word: str) -> str:
    return encode(word).replace("%", "%%")
