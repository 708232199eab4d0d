"""Settings that would break the machine are named with their numbers and never run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from feedtune.analysis.limits import Needs, broken_limit
from feedtune.settings import LoaderSettings

MB, GB = 10**6, 10**9
ROOMY = Needs(
    ranks=2,
    batch_bytes=10 * MB,
    tensors=2,
    worker_bytes=100 * MB,
    ram_bytes=64 * GB,
    shm_bytes=32 * GB,
    nofile=65536,
)


def test_what_fits_breaks_nothing() -> None:
    assert broken_limit(LoaderSettings(16, 4), ROOMY) is None


def test_t7_shared_memory_of_64_mib_is_refused_before_the_bus_error() -> None:
    """pytorch #5040, #108861: /dev/shm of a container has 64 MiB."""
    small = replace(ROOMY, shm_bytes=64 * 1024 * 1024)
    reason, text = broken_limit(LoaderSettings(4, 2), small)
    assert reason == "shm"
    assert text == "4 workers x 2 batches x 10 MB x 2 ranks = 160 MB of 67.1 MB free in /dev/shm"
    assert broken_limit(LoaderSettings(1, 2), small) is None
    assert broken_limit(LoaderSettings(0), small) is None


@pytest.mark.parametrize(("shm", "fits"), [(99 * MB, False), (101 * MB, True)])
def test_t7_a_fifth_of_shared_memory_stays_free(shm, fits) -> None:
    need = replace(ROOMY, shm_bytes=shm)
    assert (broken_limit(LoaderSettings(2, 2), need) is None) is fits  # 80 MB


def test_t16_prefetch_256_is_refused_for_its_memory() -> None:
    """axolotl #3069: prefetch_factor=256 ran out of memory."""
    need = replace(ROOMY, ram_bytes=32 * GB, shm_bytes=400 * GB)
    reason, text = broken_limit(LoaderSettings(8, 256), need)
    assert reason == "ram"
    assert text == "needs 42.6 GB of 32 GB available memory"  # 41 GB of batches, 1.6 GB of workers
    assert broken_limit(LoaderSettings(8, 16), need) is None


def test_workers_count_with_their_own_memory_once_it_is_known() -> None:
    need = replace(ROOMY, ram_bytes=10 * GB, batch_bytes=1000)
    assert broken_limit(LoaderSettings(39), need) is None
    assert broken_limit(LoaderSettings(41), need)[0] == "ram"
    assert broken_limit(LoaderSettings(41), replace(need, worker_bytes=None)) is None


def test_t9_open_files_are_predicted() -> None:
    """pytorch #973, #11201: too many open files; each tensor in flight is one."""
    need = replace(ROOMY, nofile=1024, tensors=10, batch_bytes=1000)
    reason, text = broken_limit(LoaderSettings(32, 4), need)
    assert reason == "descriptors"
    assert text == "needs 1460 open files of 1024 (raise ulimit -n)"  # (128 + 2) x 10 + 5 x 32
    assert broken_limit(LoaderSettings(8, 4), need) is None


def test_a_file_opened_in_the_main_process_forbids_workers() -> None:
    need = replace(ROOMY, open_in_main=("/data/train.bin",))
    reason, text = broken_limit(LoaderSettings(2), need)
    assert reason == "opened_in_main"
    assert "/data/train.bin" in text
    assert broken_limit(LoaderSettings(0), need) is None
    # A script that already has workers shares it already.
    assert broken_limit(LoaderSettings(2), replace(need, default_workers=4)) is None
