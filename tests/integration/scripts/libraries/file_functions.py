"""Ways to write files beside ``open``: each function overwrites, makes and reads back in the working folder.

Run as ``python file_functions.py OUTCOME NAME...``; the outcome file gets what failed, as JSON.
"""

import bz2
import io
import json
import logging.handlers
import lzma
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import traceback


def copies_of_new_files():
    os.makedirs("made/deep")
    with open("made/deep/file", "w") as file:
        file.write("new")
    shutil.copytree("made", "twin")
    shutil.copy2("made/deep/file", "old.txt")
    shutil.move("twin", "moved")
    with open("old.txt") as file:
        assert file.read() == "new"
    with open("moved/deep/file") as file:
        assert file.read() == "new"


def attributes():
    with open("fresh", "w") as file:
        file.write("x")
    for name in ("fresh", "old.txt"):
        os.setxattr(name, "user.key", b"1")
        assert os.getxattr(name, "user.key") == b"1"
        assert "user.key" in os.listxattr(name)
        os.removexattr(name, "user.key")
        assert "user.key" not in os.listxattr(name)
    os.makedirs("room")
    assert shutil.disk_usage("room").total == shutil.disk_usage("room").total > 0


def compressed():
    for opened in (bz2.open, lzma.open):
        for name in ("old.txt", "packed"):
            with opened(name, "wb") as file:
                file.write(b"packed")
            with opened(name) as file:
                assert file.read() == b"packed"
    with tarfile.open("all.tar.bz2", "w:bz2") as archive:
        archive.add("packed")
    with tarfile.open("all.tar.bz2") as archive:
        assert archive.getnames() == ["packed"]


def raw_files():
    for name in ("old.txt", "fresh"):
        with io.FileIO(name, "w") as file:
            file.write(b"raw")
            assert file.name == name
        with io.FileIO(name, "a") as file:
            file.write(b"er")
        with io.FileIO(name) as file:
            assert file.read() == b"rawer"
    with open("fresh", "rb", buffering=0) as file:
        assert isinstance(file, io.FileIO)
        assert not isinstance(file, type("Own", (io.FileIO,), {}))
    assert issubclass(type(file), io.FileIO)
    assert not isinstance(None, io.FileIO)


def nodes():
    os.mknod("node")
    assert os.path.exists("node")
    try:
        os.mknod("old.txt")
    except FileExistsError:
        return
    raise AssertionError("made over a file")


def temporary_files_here():
    with tempfile.NamedTemporaryFile(dir=".") as file:
        assert os.path.exists(file.name)
    assert not os.path.exists(file.name)
    with tempfile.TemporaryDirectory(dir=".") as folder, open(folder + "/file", "w") as file:
        file.write("x")
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(b"x")


def rotating_log():
    handler = logging.handlers.RotatingFileHandler("old.txt", maxBytes=20, backupCount=2)
    for number in range(6):
        handler.emit(logging.LogRecord("log", 20, "", 1, "line %d", (number,), None))
    handler.close()
    assert os.path.exists("old.txt.2")


def databases_by_uri():
    for name in ("old.db", "new.db"):
        base = sqlite3.connect("file:" + name + "?mode=rwc", uri=True)
        base.execute("create table if not exists t (a)")
        base.execute("insert into t values (1)")
        base.commit()
        base.close()
    base = sqlite3.connect("file:" + os.path.abspath("old.db") + "?mode=ro", uri=True)
    assert base.execute("select count(*) from t").fetchone() == (2,)
    base.close()
    base = sqlite3.connect("file::memory:?cache=shared", uri=True)
    base.close()


def programs_with_an_environment_of_their_own():
    code = "open('old.txt', 'w').write('child'); open('by_child', 'w').write('1')"
    # A torch or feedtune of ours would not be found there, and need not be.
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": os.environ["PATH"]})
    assert os.path.exists("by_child")
    with open("old.txt") as file:
        assert file.read() == "child"


def torch_script():
    import torch

    model = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    for name in ("old.txt", "model.ts"):
        torch.jit.save(model, name)
        model.save(name)
        assert torch.equal(torch.jit.load(name).weight, model.weight)


def torch_profile():
    import torch

    for name in ("old.txt", "trace.json", "trace.json.gz"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3).sum()
        profile.export_chrome_trace(name)
        assert os.path.getsize(name) > 100
    handler = torch.profiler.tensorboard_trace_handler("runs/profile")
    with torch.profiler.profile(on_trace_ready=handler):
        torch.ones(3).sum()
    assert len(os.listdir("runs/profile")) == 1


def torch_memory():
    import torch

    for name in ("old.txt", "mapped"):
        torch.from_file(name, shared=True, size=4)[:] = 7
        assert torch.from_file(name, size=4).tolist() == [7] * 4


def torch_meeting_file():
    import torch.distributed as dist

    place = "file://" + os.path.abspath("meeting")
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    dist.destroy_process_group()
    store = dist.FileStore("old.store", 1)
    store.set("a", "1")
    assert store.get("a") == b"1"


def safetensors_types():
    import inspect

    import safetensors

    assert inspect.isclass(safetensors.safe_open)  # it stands in annotations


def main():
    outcome, names = sys.argv[1], sys.argv[2:]
    start, bad = os.getcwd(), {}
    for name in names:
        os.chdir(os.path.join(start, name))
        try:
            globals()[name]()
        except Exception:  # noqa: BLE001  # the others are still to be tried
            bad[name] = traceback.format_exc()
    with open(outcome, "w") as file:
        json.dump(bad, file)


if __name__ == "__main__":
    main()
