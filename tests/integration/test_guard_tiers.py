"""Programs that overwrite, rename and delete, under every tier of the write guard: they see their own
changes and end well, and the folder stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("overlay", "python+landlock", "python")
ORDINARY_USER = 12345

# Runs a command guarded and prints what happened; as any user, with any Python.
DRIVER = """
import json, os, sys, time
from pathlib import Path
from feedtune.launch.policy import default_policy
from feedtune.launch.process import GuardedProcess
a = json.loads(sys.argv[1])
cwd, env = Path(a["cwd"]), dict(os.environ, **a["env"])
policy = default_policy(a["command"], cwd, env, [Path(p) for p in a["writable"]])
began = time.monotonic()
p = GuardedProcess.start(
    a["command"], env=env, cwd=cwd, log=Path(a["log"]), run_id=a["run_id"], policy=policy, tier=a["tier"])
started = time.monotonic() - began
while p.poll() is None:
    time.sleep(0.01)
scratch = str(p.upper)
p.kill()
left = os.path.exists(scratch)
print(json.dumps(dict(code=p.poll(), tier=p.tier, notes=p.notes, started=started, left=left)))
"""

SITECUSTOMIZE = """
import os, json
if os.environ.get("FEEDTUNE_GUARD"):
    from ft_guard_under_test import guard
    guard.install(json.loads(os.environ["FEEDTUNE_GUARD"]), os.path.dirname(os.path.abspath(__file__)))
"""

# Each function works in a folder of its own that `prepare` filled.
PROGRAM = r"""
import glob, io, json, os, pathlib, shutil, sqlite3, subprocess, sys, tempfile, traceback

def overwrite():
    with open("ckpt.pt", "wb") as f: f.write(b"new")
    assert open("ckpt.pt", "rb").read() == b"new"
    assert os.path.getsize("ckpt.pt") == 3

def append():
    with open("train.log", "a") as f: f.write("line 2\n")
    assert pathlib.Path("train.log").read_text() == "line 1\nline 2\n"

def update_in_place():
    with open("data.bin", "r+b") as f: f.seek(2); f.write(b"XX")
    assert open("data.bin", "rb").read() == b"01XX456789"
    os.truncate("data.bin", 4)
    assert os.stat("data.bin").st_size == 4

def exclusive():
    try: open("ckpt.pt", "x")
    except FileExistsError: pass
    else: raise AssertionError("opened")
    open("fresh", "x").write("1")
    assert os.path.exists("fresh") and "fresh" in os.listdir(".")

def temporary_then_replace():
    with open("ckpt.pt.tmp", "w") as f: f.write("new")
    os.replace("ckpt.pt.tmp", "ckpt.pt")
    assert open("ckpt.pt").read() == "new" and not os.path.exists("ckpt.pt.tmp")
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as f: f.write("newer")
    os.replace(f.name, "ckpt.pt")
    assert open("ckpt.pt").read() == "newer"
    assert not [n for n in os.listdir(".") if n.startswith("tmp")]

def remove_tree_and_make_again():
    shutil.rmtree("out")
    assert not os.path.exists("out") and "out" not in os.listdir(".")
    os.makedirs("out/sub")
    assert os.listdir("out") == ["sub"], os.listdir("out")
    open("out/sub/a", "w").write("fresh")
    assert open("out/sub/a").read() == "fresh" and not os.path.exists("out/old.txt")
    shutil.rmtree("out")
    assert not os.path.exists("out")
    os.mkdir("out")
    assert os.listdir("out") == []

def rename_folder():
    os.rename("out", "moved")
    assert not os.path.exists("out") and open("moved/old.txt").read() == "old"
    assert sorted(n for _, _, names in os.walk("moved") for n in names) == ["deep.txt", "old.txt"]
    open("moved/old.txt", "w").write("changed")
    os.rename("moved", "out")
    assert open("out/old.txt").read() == "changed" and open("out/deep/deep.txt").read() == "deep"
    try: os.rename("out", "checkpoint-1")
    except OSError: pass
    else: raise AssertionError("renamed onto a full folder")

def rotation():
    os.makedirs("tmp-checkpoint-3")
    open("tmp-checkpoint-3/w", "w").write("3")
    os.rename("tmp-checkpoint-3", "checkpoint-3")
    for old in sorted(glob.glob("checkpoint-*"))[:-1]: shutil.rmtree(old)
    assert glob.glob("checkpoint-*") == ["checkpoint-3"]
    assert [p.name for p in pathlib.Path(".").glob("checkpoint-*/w")] == ["w"]

def delete_files():
    for name in ("ckpt.pt", "train.log"): os.remove(name)
    pathlib.Path("data.bin").unlink()
    assert not {"ckpt.pt", "train.log", "data.bin"} & set(os.listdir("."))
    assert not {"ckpt.pt", "train.log"} & {e.name for e in os.scandir(".")}
    try: open("ckpt.pt")
    except FileNotFoundError as error: assert error.filename == "ckpt.pt", error.filename
    else: raise AssertionError("opened")
    open("ckpt.pt", "w").write("again")
    assert open("ckpt.pt").read() == "again"

def links():
    os.symlink("ckpt.pt", "latest")
    assert os.readlink("latest") == "ckpt.pt" and open("latest").read() == "old weights"
    open("link", "w").write("through the link")
    assert open("ckpt.pt").read() == "through the link" and os.path.islink("link")
    os.remove("link"); os.symlink("train.log", "link")
    assert open("link").read() == "line 1\n"
    os.link("train.log", "hard")
    assert open("hard").read() == "line 1\n"
    open("folder-link/new.txt", "w").write("n")
    assert open("out/new.txt").read() == "n" and "new.txt" in os.listdir("out")

def modes_and_times():
    os.chmod("ckpt.pt", 0o600); os.utime("ckpt.pt", (1, 2)); os.chmod("out", 0o700); os.utime("out/old.txt")
    assert os.stat("ckpt.pt").st_mode & 0o777 == 0o600 and os.stat("ckpt.pt").st_mtime == 2
    pathlib.Path("train.log").touch()
    shutil.copytree("out", "copy"); shutil.copy2("ckpt.pt", "copy/"); shutil.move("copy", "out/copy")
    assert sorted(os.listdir("out/copy")) == ["ckpt.pt", "deep", "old.txt"]

def move_working_folder():
    here = os.getcwd()
    os.makedirs("runs/1"); os.chdir("runs/1")
    assert os.getcwd() == os.path.join(here, "runs/1"), os.getcwd()
    open("log", "w").write("1"); assert os.path.exists(os.path.join(here, "runs", "1", "log"))
    assert open("../../train.log").read() == "line 1\n"
    out = subprocess.run([sys.executable, "-c", "import os; print(os.getcwd(), open('log').read())"],
                         stdout=subprocess.PIPE, check=True, text=True, cwd=".").stdout.split("\n")[0]
    assert out == os.getcwd() + " 1", out
    os.chdir(here)

def child_sees_and_changes():
    open("ckpt.pt", "w").write("parent"); os.remove("train.log")
    code = "assert open('ckpt.pt').read() == 'parent'; import os; assert not os.path.exists('train.log');"
    code += "open('c', 'w').write('child'); os.remove('data.bin')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert open("c").read() == "child" and not os.path.exists("data.bin")

def sqlite():
    base = sqlite3.connect("base.db"); base.execute("insert into t values (2)"); base.commit(); base.close()
    base = sqlite3.connect(os.path.abspath("base.db"))
    assert base.execute("select count(*) from t").fetchone() == (2,)
    base.close()
    fresh = sqlite3.connect("fresh.db"); fresh.execute("create table t (a)"); fresh.commit(); fresh.close()
    assert os.path.exists("fresh.db")

def low_level():
    fd = os.open("ckpt.pt", os.O_WRONLY | os.O_TRUNC); os.write(fd, b"low"); os.fsync(fd); os.close(fd)
    assert io.open("ckpt.pt").read() == "low"
    folder = os.open("out", os.O_RDONLY)
    os.unlink("old.txt", dir_fd=folder)
    assert os.listdir(folder) == ["deep"]
    os.close(folder)

def absolute_paths():
    here = os.path.abspath(".")
    open(here + "/ckpt.pt", "w").write("abs")
    assert open("ckpt.pt").read() == "abs" and open(here + "/../absolute_paths/./ckpt.pt").read() == "abs"
    os.remove(here + "/train.log"); assert not os.path.exists("train.log")

if __name__ == "__main__":
    run, names = sys.argv[1], sys.argv[2:]
    start, bad = os.getcwd(), {}
    for name in names:
        os.chdir(os.path.join(start, name))
        try: globals()[name]()
        except BaseException: bad[name] = traceback.format_exc()
        os.chdir(start)
    with open(os.path.join(run, "outcome.json"), "w") as f: json.dump(bad, f)
    shm = "/dev/shm/" + os.path.basename(run); open(shm, "w").write("shared")
    prefix = "passes-" + os.path.basename(run)
    with tempfile.NamedTemporaryFile("w", delete=False, prefix=prefix) as f: f.write("t")
"""
PLAIN = [line[4:-3] for line in PROGRAM.splitlines() if line.startswith("def ") and line.endswith("():")]

TORCH_PROGRAM = r"""
import os, sys, torch, numpy as np
import torch.distributed.checkpoint as dcp
x = {"w": torch.arange(6.0)}
with open("ckpt.pt", "wb") as f: torch.save(x, f)
torch.save({"w": x["w"] + 1}, "out/by_path.pt")
torch.save({"w": x["w"] + 2}, os.path.abspath("ckpt.pt"))
assert torch.load("ckpt.pt")["w"][0] == 2 and torch.load("out/by_path.pt")["w"][0] == 1
assert torch.load("ckpt.pt", mmap=True)["w"][5] == 7
np.save("data.npy", np.arange(4)); np.savez("out/z.npz", a=np.arange(3))
assert np.load("data.npy")[3] == 3 and np.load("out/z.npz")["a"][2] == 2
m = np.memmap("data.bin", mode="r+", dtype="u1"); m[0] = 7; m.flush(); del m
assert open("data.bin", "rb").read()[0] == 7
dcp.save({"w": torch.ones(3)}, checkpoint_id="checkpoint-1")
state = {"w": torch.zeros(3)}; dcp.load(state, checkpoint_id="checkpoint-1"); assert state["w"].sum() == 3
loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
assert len(list(loader)) == 8
try: from safetensors.torch import save_file, load_file
except ImportError: print("no safetensors")
else:
    save_file({"a": torch.ones(2)}, "model.safetensors")
    assert load_file("model.safetensors")["a"].sum() == 2
print("all done")
"""


def prepare(folder: Path) -> None:
    (folder / "out" / "deep").mkdir(parents=True)
    for name, text in {
        "ckpt.pt": "old weights", "train.log": "line 1\n", "data.bin": "0123456789", "out/old.txt": "old",
        "out/deep/deep.txt": "deep", "model.safetensors": "old", "data.npy": "old",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    for step in (1, 2):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "w").write_text(str(step))
    (folder / "link").symlink_to("ckpt.pt")
    (folder / "folder-link").symlink_to("out")
    import sqlite3

    base = sqlite3.connect(folder / "base.db")
    base.execute("create table t (a)")
    base.execute("insert into t values (1)")
    base.commit()
    base.close()


def digest(folder: Path) -> str:
    """Names, contents, modes, owners and times of everything in a folder."""
    total = hashlib.sha256()
    for path in sorted([folder, *folder.rglob("*")]):
        found = path.lstat()
        total.update(
            f"{path.relative_to(folder)} {found.st_mode} {found.st_uid} {found.st_mtime_ns}\n".encode()
        )
        if stat.S_ISREG(found.st_mode):
            total.update(path.read_bytes())
        elif path.is_symlink():
            total.update(os.readlink(path).encode())
    return total.hexdigest()


def interpreter(user: int) -> str:
    """A Python that the user may execute."""
    candidates = [sys.executable, "/usr/bin/python3"] if user else [sys.executable]
    for path in candidates:
        if (
            subprocess.run([path, "-c", ""], user=user, capture_output=True, check=False, cwd="/").returncode
            == 0
        ):
            return path
    pytest.skip("no Python that an ordinary user may execute")


def python_of(user: int) -> str:
    try:
        return interpreter(user)
    except PermissionError:
        return "/usr/bin/python3"


def reads_torch(user: int) -> bool:
    """Whether the user can import torch out of this environment."""
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    command = [python_of(user), "-c", "import torch"]
    env = {"PYTHONPATH": packages}
    return not subprocess.run(
        command, user=user, env=env, capture_output=True, check=False, cwd="/"
    ).returncode


def _temporary_site(base: Path) -> Path:
    return Path("/tmp") / f"ft-site-{hashlib.sha256(str(base).encode()).hexdigest()[:12]}"


class Place:
    """A project folder and a run folder of one user, and a way to run programs there."""

    def __init__(self, base: Path, user: int) -> None:
        self.base, self.user = base, user
        self.cwd, self.run = base / "project", base / f"run-{uuid.uuid4().hex[:8]}"
        self.cwd.mkdir(parents=True)
        self.run.mkdir()
        # PYTHONPATH cannot name a folder with a colon in it.
        self.site = base / "site" if ":" not in str(base) else _temporary_site(base)
        self.site.mkdir(exist_ok=True)
        self.site.chmod(0o755)
        shutil.copytree(ROOT / "feedtune" / "inside", self.site / "ft_guard_under_test")
        (self.site / "ft_guard_under_test" / "__init__.py").write_text("")
        (self.site / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def own(self) -> None:
        for path in [self.base, *self.base.rglob("*")]:
            os.lchown(path, self.user, self.user)

    def guarded(self, arguments: list[str], tier: str, **env: str) -> tuple[dict, str]:
        python = python_of(self.user)
        packages = [path for path in sys.path if path.endswith("site-packages")] if self.user else []
        env = {
            "HOME": str(self.base), "PYTHONPATH": os.pathsep.join([str(self.site), *packages]),
            "PYTHONDONTWRITEBYTECODE": "", **env,
        }  # fmt: skip
        request = {
            "command": [python, *arguments], "cwd": str(self.cwd), "env": env, "writable": [str(self.run)],
            "log": str(self.run / "log"), "run_id": uuid.uuid4().hex, "tier": tier,
        }  # fmt: skip
        done = subprocess.run(
            [python, "-c", DRIVER, json.dumps(request)], user=self.user, group=self.user, extra_groups=[],
            capture_output=True, text=True, check=False, cwd="/", timeout=120,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.base)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), (self.run / "log").read_text()


def user_of(name: str) -> int:
    if os.getuid() == 0 and name != "root":
        command = [python_of(ORDINARY_USER), "-c", "import feedtune.launch.process"]
        env = {"PYTHONPATH": str(ROOT)}
        if subprocess.run(
            command, user=ORDINARY_USER, env=env, capture_output=True, check=False, cwd="/"
        ).returncode:
            pytest.skip("an ordinary user cannot read this checkout")
        return ORDINARY_USER
    if os.getuid() == 0:
        return 0
    if name == "root":
        pytest.skip("the tests do not run as root")
    return os.getuid()


@pytest.fixture(params=["/tmp/ft x", pytest.param("/var/lib/ft, y:z", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Below TMPDIR, and outside of it; with characters that mount options give a meaning."""
    stem = Path(request.param)
    if not os.access(stem.parent, os.W_OK):
        pytest.skip(f"{stem.parent} cannot be written")
    folder = Path(tempfile.mkdtemp(prefix=stem.name, dir=stem.parent))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
    shutil.rmtree(_temporary_site(folder), ignore_errors=True)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("user", ["root", "user"])
def test_a_program_sees_its_changes_and_the_folder_keeps_its_state(base: Path, tier: str, user: str) -> None:
    place = Place(base, user_of(user))
    for name in PLAIN:
        prepare(place.cwd / name)
    (place.cwd / "program.py").write_text(PROGRAM)
    place.own()
    before = digest(place.cwd)
    result, log = place.guarded(["program.py", str(place.run), *PLAIN], tier)
    assert result["code"] == 0, log
    assert result["tier"] == tier
    assert not result["left"]
    bad = json.loads((place.run / "outcome.json").read_text())
    assert not bad, "\n".join(bad.values())
    assert digest(place.cwd) == before
    shared = Path("/dev/shm") / place.run.name
    assert shared.read_text() == "shared"
    shared.unlink()
    if tier == "overlay" or base.parent != Path("/tmp"):
        passed = list(Path("/tmp").glob(f"passes-{place.run.name}*"))
        assert len(passed) == 1
        passed[0].unlink()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("user", ["root", pytest.param("user", marks=pytest.mark.slow)])
def test_torch_and_numpy_saves_are_redirected(base: Path, tier: str, user: str) -> None:
    if base.parent != Path("/tmp") and tier == "python":
        pytest.skip("the same code as under /tmp")
    place = Place(base, user_of(user))
    if place.user and not reads_torch(place.user):
        pytest.skip("an ordinary user cannot read this environment's torch")
    prepare(place.cwd)
    (place.cwd / "train.py").write_text(TORCH_PROGRAM)
    place.own()
    before = digest(place.cwd)
    result, log = place.guarded(["train.py"], tier)
    assert result["code"] == 0, log
    assert "all done" in log
    assert digest(place.cwd) == before


@pytest.mark.parametrize("tier", ["overlay", "python+landlock"])
def test_other_programs_do_no_harm(base: Path, tier: str) -> None:
    """A shell is redirected under overlay, and refused by the kernel under Landlock."""
    place = Place(base, user_of("root" if os.getuid() == 0 else "user"))
    prepare(place.cwd)
    place.own()
    before = digest(place.cwd)
    shell = "echo x > ckpt.pt; rm -r out; mkdir new; test -d new"
    code = f"import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', {shell!r}]).returncode)"
    result, log = place.guarded(["-c", code], tier)
    assert digest(place.cwd) == before
    assert (result["code"] == 0) == (tier == "overlay"), log


def test_the_whole_temporary_folder_as_working_folder() -> None:
    """``cd /tmp; train.py``: what lies in /tmp is protected, new files there are redirected."""
    name = f"ft-own-{uuid.uuid4().hex}"
    base = Path(tempfile.mkdtemp(prefix="ft", dir="/var/tmp"))
    old = Path("/tmp") / name
    try:
        base.chmod(0o755)
        place = Place(base, os.getuid())
        place.cwd = Path("/tmp")
        old.write_text("old")
        code = f"open('{name}', 'w').write('new'); open('{name}-2', 'w').write('2'); open('{name}').read()"
        for tier in TIERS:
            result, log = place.guarded(["-c", code], tier)
            assert (result["code"], result["tier"]) == (0, tier), log
            assert old.read_text() == "old"
            assert not Path(f"/tmp/{name}-2").exists()
    finally:
        old.unlink()
        shutil.rmtree(base)


def test_a_folder_shared_by_a_group_is_guarded_by_another_tier_without_privileges(base: Path) -> None:
    """A user namespace knows one group only: new files with the folder's group could not be made."""
    if os.getuid() != 0:
        pytest.skip("needs root to make another group's folder")
    place = Place(base, user_of("user"))
    prepare(place.cwd)
    place.own()
    shared = ORDINARY_USER + 1
    os.chown(place.cwd, ORDINARY_USER, shared)
    place.cwd.chmod(0o2775)
    before = digest(place.cwd)
    result, log = place.guarded(
        ["-c", "open('new', 'w').write('1'); open('ckpt.pt', 'w').write('2')"], "auto"
    )
    assert result["code"] == 0, log
    assert result["tier"] == "python+landlock"
    assert any("overlay guard not available" in note and "group" in note for note in result["notes"])
    assert digest(place.cwd) == before


def test_sockets_of_the_surroundings_still_answer(base: Path) -> None:
    place = Place(base, os.getuid())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place.cwd / "agent"))
        server.listen()
        code = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('agent'); s.close()"
        result, log = place.guarded(["-c", code], "overlay")
    assert result["code"] == 0, log


def test_mounts_inside_the_project_are_seen_and_protected(base: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to mount")
    place = Place(base, 0)
    (place.cwd / "in").mkdir()
    code = "print(open('in/deep/f').read()); open('in/deep/f', 'w'); open('in/g', 'w')"
    request = {
        "command": [sys.executable, "-c", code],
        "cwd": str(place.cwd), "env": {}, "writable": [str(place.run)], "log": str(place.run / "log"),
        "run_id": uuid.uuid4().hex, "tier": "overlay",
    }  # fmt: skip
    script = """set -e
    mount --make-rprivate /; mount -t tmpfs one "$1/in"; mkdir "$1/in/deep"; mount -t tmpfs two "$1/in/deep"
    echo kept > "$1/in/deep/f"; "$2" -c "$3" "$4"; cat "$1/in/deep/f"; ls "$1/in"
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", place.cwd, sys.executable, DRIVER, json.dumps(request)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.split("\n")
    assert json.loads(first)["code"] == 0, (place.run / "log").read_text()
    assert rest == ["kept", "deep", ""]
    assert (place.run / "log").read_text() == "kept\n\n"
