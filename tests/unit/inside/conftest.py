"""One zygote for the live tests of a module, and live scenarios that end with their test."""

from __future__ import annotations

import pytest
from live_driver import Live, Zygote


@pytest.fixture(scope="module")
def zygote():
    """Ends with its module: tests of the reaper count the children of this process."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def live(zygote, tmp_path):
    started = []

    def start(name: str, **request) -> Live:
        started.append(Live(zygote, tmp_path / str(len(started)), name, **request))
        return started[-1]

    yield start
    for scenario in started:
        scenario.close()
