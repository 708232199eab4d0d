"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = sorted(
    str(path.relative_to(ROOT))
    for package in ("feedtune", "shard_tools")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


def test_there_are_examples() -> None:
    assert "feedtune/analysis/failures.py" in WITH_EXAMPLES


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_the_examples_of_a_module(path: str) -> None:
    module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
