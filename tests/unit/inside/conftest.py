"""One zygote for all live tests, and live scenarios that end with their test."""

from __future__ import annotations

import pytest
from live_driver import Live, Zygote


@pytest.fixture(scope="session")
def zygote():
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
