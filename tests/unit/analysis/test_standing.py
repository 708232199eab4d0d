"""Who hangs, from stacks as py-spy and faulthandler write them."""

from __future__ import annotations

import pytest

from feedtune.analysis.standing import Standing, blame

LIB = "/venv/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
OURS = "/runs/1/boot/_feedtune_ab12"
TRAIN = "/project/train.py"


def stack(*calls: str, pid: int = 1) -> Standing:
    """Calls as ``name file``, innermost first; each at line 7."""
    return Standing(pid, tuple((call.split(" ")[0], call.split(" ")[1], 7) for call in calls))


MAIN = (f"main {TRAIN}", f"<module> {TRAIN}")
QUEUE = (
    f"select {LIB}/selectors.py",
    f"wait {LIB}/multiprocessing/connection.py",
    f"_poll {LIB}/multiprocessing/connection.py",
    f"poll {LIB}/multiprocessing/connection.py",
    f"get {LIB}/multiprocessing/queues.py",
)
NEXT = (
    f"__next__ {TORCH}/utils/data/dataloader.py",
    f"next {OURS}/swap.py",
    f"next_batch {OURS}/machine.py",
    f"__next__ {OURS}/watched.py",
    *MAIN,
)
LOOP = (
    f"_worker_loop {TORCH}/utils/data/_utils/worker.py",
    f"run {LIB}/multiprocessing/process.py",
    f"_bootstrap {LIB}/multiprocessing/process.py",
    f"_launch {LIB}/multiprocessing/popen_fork.py",
    f"__init__ {TORCH}/utils/data/dataloader.py",
    *NEXT,
)
FETCH = (f"<listcomp> {TORCH}/utils/data/_utils/fetch.py", f"fetch {TORCH}/utils/data/_utils/fetch.py")
GET = (f"_try_get_data {TORCH}/utils/data/dataloader.py", f"_get_data {TORCH}/utils/data/dataloader.py")
BACKWARD = (
    f"_engine_run_backward {TORCH}/autograd/graph.py",
    f"backward {TORCH}/autograd/__init__.py",
    f"backward {TORCH}/_tensor.py",
)
REDUCE = (
    f"all_reduce {TORCH}/distributed/distributed_c10d.py",
    f"wrapper {TORCH}/distributed/c10d_logger.py",
)
SAMPLE = "__getitem__ /project/data.py"

WAITS_BATCH = stack(*QUEUE, *GET, *NEXT)
WAITS_RANKS = stack(*BACKWARD, *MAIN)
DEVICE = stack(f"synchronize {TORCH}/cuda/__init__.py", *MAIN)
IN_LOOP = stack(f"log {TRAIN}", *MAIN)
IN_FETCH = stack(SAMPLE, *FETCH, f"_next_data {TORCH}/utils/data/dataloader.py", *NEXT)
IDLE = stack(*QUEUE, *LOOP, pid=20)
STUCK = stack(f"read {LIB}/socket.py", SAMPLE, *FETCH, f"timed {OURS}/probe.py", *LOOP, pid=21)
HELPER = stack(f"main {LIB}/multiprocessing/resource_tracker.py", "<module> <string>", pid=22)


@pytest.mark.parametrize(
    ("standing", "waits"),
    [
        (WAITS_BATCH, "batch"),
        (stack(f"poll {LIB}/selectors.py", "_try_get_data "
               f"{LIB}/site-packages/torchdata/stateful_dataloader/stateful_dataloader.py", *MAIN), "batch"),
        (WAITS_RANKS, "ranks"),
        (stack(*REDUCE, *MAIN), "ranks"),
        (stack(f"_sync_buffers {TORCH}/nn/parallel/distributed.py", *MAIN), "ranks"),
        (stack(f"barrier {TORCH}/distributed/distributed_c10d.py", SAMPLE, *FETCH, *NEXT), "ranks"),
        (DEVICE, "device"),
        (IDLE, "work"),
        (IN_LOOP, None),
        (IN_FETCH, None),
        (STUCK, None),
        (stack(), None),
    ],
)  # fmt: skip
def test_what_a_process_waits_for(standing, waits) -> None:
    assert standing.waits == waits


@pytest.mark.parametrize(
    "around",
    [
        (f"wrapper {TORCH}/distributed/elastic/multiprocessing/errors/__init__.py",),  # @record
        (f"run {TORCH}/distributed/run.py", f"launch {TORCH}/distributed/launcher/api.py"),
        (f"forward {TORCH}/distributed/fsdp/fully_sharded_data_parallel.py",),
        (f"forward {TORCH}/nn/parallel/distributed.py",),
    ],
)
def test_what_lies_around_the_scripts_own_calls_is_no_waiting(around) -> None:
    assert stack(f"forward {TRAIN}", *around, *MAIN).waits is None
    assert stack("sleep /usr/lib/python3.11/x.py", f"forward {TRAIN}", *around, *MAIN).waits is None


def test_the_launchers_frames_around_a_script_in_a_package_are_no_waiting() -> None:
    wrapper = f"wrapper {TORCH}/distributed/elastic/multiprocessing/errors/__init__.py"
    assert stack(f"main {LIB}/site-packages/trainer/main.py", wrapper).waits is None


def test_names_of_the_scripts_own_are_not_torchs() -> None:
    assert stack("_get_data /project/my_dataloader.py", *MAIN).waits is None
    assert stack("Loader._try_get_data /project/dataloader.py", *MAIN).waits is None
    assert not stack("fetch /project/prefetch.py", *MAIN).fetches
    assert stack("fetch /project/prefetch.py", *BACKWARD, *MAIN).waits is None


def test_names_may_be_qualified_as_py_spy_writes_them() -> None:
    loader = f"{TORCH}/utils/data/dataloader.py"
    assert stack(f"_MultiProcessingDataLoaderIter._try_get_data {loader}", *MAIN).waits == "batch"
    worker = stack(*QUEUE, f"x._worker_loop {TORCH}/utils/data/_utils/worker.py")
    assert (worker.is_worker, worker.waits) == (True, "work")


@pytest.mark.parametrize(
    "call",
    [
        "init_worker /project/data.py",  # worker_init_fn
        "__iter__ /project/data.py",  # of an iterable dataset
        f"connect {LIB}/socket.py",
        f"acquire {LIB}/site-packages/filelock/_api.py",
    ],
)
def test_a_worker_that_hangs_before_its_first_fetch_does_not_wait_for_work(call) -> None:
    hangs = stack(call, f"__call__ {OURS}/probe.py", *LOOP, pid=21)
    assert hangs.is_worker
    assert hangs.waits is None
    assert stack(call, *LOOP, *QUEUE).waits is None  # a queue that its parent stood at
    assert "a worker of rank 0 hangs in" in blame({0: WAITS_BATCH}, {0: [IDLE, hangs]}).text


def test_the_place_is_the_scripts_innermost_call() -> None:
    assert STUCK.place == "__getitem__ (/project/data.py:7)"
    assert stack(*QUEUE).place == f"select ({LIB}/selectors.py:7)"
    assert stack().place == "an unknown place"
    for foreign in ("/usr/lib64/python3.12/socket.py", "/usr/lib/python3/dist-packages/x.py", "<frozen x>"):
        assert stack(f"recv {foreign}", *MAIN).place == f"main ({TRAIN}:7)"
    assert stack("<module> <string>").place == "<module> (<string>:7)"


def test_a_worker_that_hangs_in_a_foreign_extension_has_the_place_that_called_it() -> None:
    cv = stack(f"imread {LIB}/site-packages/cv2/__init__.py", SAMPLE, *FETCH, *LOOP, pid=30)
    assert (
        blame({0: WAITS_BATCH}, {0: [cv]}).text
        == "a worker of rank 0 hangs in __getitem__ (/project/data.py:7)"
    )
    # A data set that is a library's, too: the script's own calls are those of the parent alone.
    image = f"{LIB}/site-packages/PIL/Image.py"
    library = stack(f"load {image}", *FETCH, *LOOP, pid=30)
    assert blame({0: WAITS_BATCH}, {0: [library]}).text == f"a worker of rank 0 hangs in load ({image}:7)"


RANKS = {
    "device": DEVICE,
    "batch": WAITS_BATCH,
    "ranks": WAITS_RANKS,
    "loop": IN_LOOP,
    "fetch": IN_FETCH,
    "unread": None,
}


@pytest.mark.parametrize(
    ("ranks", "workers", "text"),
    [
        (["batch"], {0: [IDLE, STUCK]}, "a worker of rank 0 hangs in __getitem__ (/project/data.py:7)"),
        (["batch"], {0: [IDLE, HELPER]}, "rank 0 waits for its workers"),
        (["batch"], {}, "rank 0 waits for its workers"),
        (["ranks"], {0: [IDLE]}, "rank 0 waits for the other ranks"),
        (["loop"], {0: [IDLE, IDLE]}, f"rank 0 hangs in its loop, in log ({TRAIN}:7)"),
        (["fetch"], {}, "rank 0 hangs in a fetch, in __getitem__ (/project/data.py:7)"),
        (["unread"], {}, "no stack could be read"),
        (["unread"], {0: [IDLE]}, "no stack could be read"),
        (["unread"], {0: [STUCK]}, "a worker of rank 0 hangs in __getitem__ (/project/data.py:7)"),
        (["ranks", "batch"], {0: [IDLE], 1: [IDLE, STUCK]},
         "a worker of rank 1 hangs in __getitem__ (/project/data.py:7)"),
        (["batch", "batch"], {0: [IDLE], 1: [STUCK]},
         "a worker of rank 1 hangs in __getitem__ (/project/data.py:7)"),
        (["ranks", "loop"], {0: [IDLE], 1: [IDLE]}, f"rank 1 hangs in its loop, in log ({TRAIN}:7)"),
        (["fetch", "ranks"], {}, "rank 0 hangs in a fetch, in __getitem__ (/project/data.py:7)"),
        (["loop", "fetch", "ranks"], {},
         f"rank 0 hangs in its loop, in log ({TRAIN}:7); "
         "rank 1 hangs in a fetch, in __getitem__ (/project/data.py:7)"),
        (["ranks", "ranks"], {}, "rank 0 waits for the other ranks; rank 1 waits for the other ranks"),
        (["ranks", "batch"], {}, "rank 0 waits for the other ranks; rank 1 waits for its workers"),
        # As NCCL has it: its ranks wait in the stream, and that for whoever sleeps.
        (["device", "loop"], {}, f"rank 1 hangs in its loop, in log ({TRAIN}:7)"),
        (["device"], {}, "rank 0 waits for its GPU, or there for the other ranks"),
        (["ranks", "unread"], {}, "rank 0 waits for the other ranks"),
        (["unread", "loop"], {}, f"rank 1 hangs in its loop, in log ({TRAIN}:7)"),
        # A worker that still fetches ahead is no hang where its rank waits for others.
        (["ranks", "loop"], {0: [STUCK], 1: []}, f"rank 1 hangs in its loop, in log ({TRAIN}:7)"),
    ],
)  # fmt: skip
def test_who_hangs(ranks, workers, text) -> None:
    standings = {rank: RANKS[name] for rank, name in enumerate(ranks)}
    cause = blame(standings, workers)
    assert (cause.reason, cause.text) == ("hang", text)
    for rank in standings:
        assert f"rank {rank}" in cause.stack


def test_ranks_come_in_their_order_whatever_the_mapping_is() -> None:
    cause = blame({1: IN_LOOP, 0: IN_LOOP}, {})
    assert cause.text.index("rank 0") < cause.text.index("rank 1")
    assert cause.stack.index("rank 0") < cause.stack.index("rank 1")


def test_the_stack_shows_ranks_and_busy_workers_only() -> None:
    shown = blame({0: WAITS_BATCH, 1: None}, {0: [IDLE, STUCK, HELPER]}).stack
    assert "rank 0, process 1:\n  select (" in shown
    assert "rank 0, worker process 21:\n  read (" in shown
    assert "worker process 20" not in shown
    assert "resource_tracker" not in shown
    assert "rank 1: no stack" in shown


def test_nobody_at_all() -> None:
    assert blame({}, {}).text == "no stack could be read"
