"""What ends a process, as seen from within, whichever way Python takes to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = """
import json, multiprocessing, os, sys
from feedtune.inside.exits import at_exit, ending_error

def tell():
    if os.getpid() == teller:
        error = ending_error()
        os.write(1, (json.dumps(None if error is None else repr(error)) + "\\n").encode())

def act(*_):
    global teller
    teller = os.getpid()
    at_exit(tell)
    try:
        raise KeyError("lived through")
    except KeyError:
        pass
    {act}

def main():
    {main}

teller = 0
if __name__ == "__main__":
    main()
"""
WAYS = {
    "script": "act()",
    "process": "one = multiprocessing.get_context('fork').Process(target=act); one.start(); one.join()",
    "spawn": "import torch.multiprocessing as mp; mp.start_processes(act, nprocs=1, start_method='fork')",
}


@pytest.mark.parametrize("way", ["script", "process", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("raise ValueError('bad')", "ValueError('bad')"),
        ("pass", None),
        ("sys.exit()", None),
        ("sys.exit(0)", None),
        ("sys.exit(3)", None),  # the launcher tells the code
    ],
)
def test_the_exception_that_ends_a_process(tmp_path, way, act, error) -> None:
    script = tmp_path / "ends.py"
    script.write_text(CODE.format(act=act, main=WAYS[way]))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(map(json.loads, done.stdout.splitlines())) == {error}, done.stderr


LEAVING = """
import atexit, os, sys
from feedtune.inside.exits import exit_code, remember_exit
atexit.register(lambda: os.write(1, b"%d" % exit_code()))
remember_exit()
{act}
"""


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('the data has moved')", 1),
        ("raise ValueError('bad')", 1),
    ],
)
def test_the_code_that_a_process_ends_with(act, code) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.format(act=act)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, str(code)), done.stderr
