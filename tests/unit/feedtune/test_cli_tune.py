"""What the command makes of its options."""

from __future__ import annotations

import pytest

from feedtune.cli.tune import _loader
from shard_tools.errors import BadInput


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, None),
        ("train.py:42", "train.py:42"),
        ("./train.py:42", "train.py:42"),
        ("src//data.py:7", "src/data.py:7"),
        ("/a/b:c/train.py:1", "/a/b:c/train.py:1"),
    ],
)
def test_the_place_of_a_loader(text, place) -> None:
    assert _loader(text) == place


@pytest.mark.parametrize("text", ["train.py", "42", ":42", "train.py:", "train.py:x", "train.py:-1", ""])
def test_what_is_no_place(text) -> None:
    with pytest.raises(BadInput, match=r"not FILE:LINE\s.*train\.py:42") as caught:
        _loader(text)
    assert caught.value.exit_code == 2
