"""Predicted needs against the machine's limits: settings that would break one are never run."""

from __future__ import annotations

from dataclasses import dataclass

from feedtune.analysis.policy import POLICY
from feedtune.records import Reason
from feedtune.settings import LoaderSettings
from shard_tools.units import format_bytes


@dataclass(frozen=True)
class Needs:
    """What the predictions stand on.

    Attributes:
        ranks: processes that load on this node.
        batch_bytes: bytes of one batch of one rank.
        tensors: tensors in a batch; each in flight holds one descriptor in the main process.
        worker_bytes: private memory of one worker; ``None`` before a block with workers ran.
        ram_bytes: memory that is available to the trials.
        shm_bytes: free bytes of /dev/shm.
        nofile: soft limit of open files of a rank.
        open_in_main: data files that the script has opened in the main process before any fetch.
        default_workers: the user's own worker count; what it already shares is no new danger.
    """

    ranks: int
    batch_bytes: int
    tensors: int
    worker_bytes: int | None
    ram_bytes: int
    shm_bytes: int
    nofile: int
    open_in_main: tuple[str, ...] = ()
    default_workers: int = 0


def broken_limit(settings: LoaderSettings, needs: Needs) -> tuple[Reason, str] | None:
    """The first limit that the settings would break, with the numbers; ``None`` if they fit."""
    if settings.num_workers == 0:
        return None
    if needs.open_in_main and needs.default_workers == 0:
        return "opened_in_main", (
            f"the script opens {needs.open_in_main[0]} in the main process; workers would share its file "
            "position and read wrong data; open it lazily in __getitem__"
        )
    shm = settings.in_flight * needs.batch_bytes * needs.ranks
    if shm > POLICY.fill * needs.shm_bytes:
        return "shm", (
            f"{settings.num_workers} workers x {settings.prefetch_factor} batches x "
            f"{format_bytes(needs.batch_bytes)} x {needs.ranks} ranks = {format_bytes(shm)} of "
            f"{format_bytes(needs.shm_bytes)} free in /dev/shm"
        )
    ram = shm + settings.num_workers * needs.ranks * (needs.worker_bytes or 0)
    if ram > POLICY.fill * needs.ram_bytes:
        return "ram", f"needs {format_bytes(ram)} of {format_bytes(needs.ram_bytes)} available memory"
    # Each tensor in flight is one descriptor in the main process; each worker takes about five for its pipes.
    files = (settings.in_flight + 2) * needs.tensors + 5 * settings.num_workers
    if files > POLICY.fill * needs.nofile:
        return "descriptors", f"needs {files} open files of {needs.nofile} (raise ulimit -n)"
    return None
