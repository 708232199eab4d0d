"""The start-up folder: a ``sitecustomize`` and a copy of ``feedtune.inside``, reached through PYTHONPATH.

It needs nothing of feedtune in the command's interpreter, and only ``PYTHONPATH`` has to survive the
launchers in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import feedtune

_SITECUSTOMIZE = '''\
"""Start-up of a feedtune run; another sitecustomize further down the path is run after it."""
import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _start():
    try:
        import {package}.bootstrap as bootstrap

        bootstrap.start(_here)
    except Exception as error:  # the user's command must run whatever is wrong with us
        try:
            with open(os.path.join(_here, "seen", "error"), "a") as file:
                file.write(repr(error) + "\\n")
        except OSError:
            pass  # the folder is gone, or not ours to write


def _next():
    paths = [os.path.abspath(p or os.getcwd()) for p in sys.path]
    rest = sys.path[paths.index(_here) + 1 :] if _here in paths else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "{package}" not in sys.modules:  # others pass on in the same way, and could come back here
    _start()
    _next()
'''


class BootFolder:
    """The start-up folder of one run, mode 0700.

    It is made anew for each start of the command, and removed by the guardian of that start: it holds a
    token, and must not outlive a driver that was killed.

    Args:
        path: where to make it.
        run_id: unique name of the run; the copied package is called after it.
        config: what the processes need to know (host, port, token, records folder).
    """

    def __init__(self, path: Path, run_id: str, config: Mapping[str, Any]) -> None:
        self.path = path
        self._config = dict(config)
        self._package = f"_feedtune_{run_id}"
        self._signs: dict[str, str] = {}

    def configure(self, **more: Any) -> None:
        """Tell starts from now on more than the first ones."""
        self._config.update(more)

    def set_start(self, start: int) -> None:
        """Make the folder for a start of the command, without any sign in it."""
        self.remove()
        self._signs = {}
        self.path.mkdir(mode=0o700)
        (self.path / "seen").mkdir(mode=0o700)
        (self.path / self._package).mkdir()
        for source in (Path(feedtune.__file__).parent / "inside").glob("*.py"):
            shutil.copyfile(source, self.path / self._package / source.name)
        (self.path / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(package=self._package))
        descriptor = os.open(self.path / "config.json", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump({**self._config, "start": start}, stream)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The command's environment: ours in front of PYTHONPATH, nothing else that matters."""
        rest = base.get("PYTHONPATH")
        path = f"{self.path}{os.pathsep}{rest}" if rest else str(self.path)
        return {**base, "PYTHONPATH": path}

    def seen(self) -> set[str]:
        """How far any process of the command came: python, torch, loader, iterated, stepped, error."""
        self.keep_signs()
        return set(self._signs)

    def error(self) -> str:
        """What went wrong in our start-up code in the command's interpreters; empty if nothing did."""
        return self.sign("error")

    def sign(self, name: str) -> str:
        """What processes of the command have noted under a name; empty if nothing."""
        self.keep_signs()
        return self._signs.get(name, "").strip()

    def keep_signs(self) -> None:
        """Read the signs now: the guardian removes the folder at the command's end."""
        with contextlib.suppress(OSError):  # gone already; an end must not fail for its signs
            for entry in (self.path / "seen").iterdir():
                self._signs[entry.name] = entry.read_text(errors="replace")

    def loaders(self) -> list[str]:
        """Where the command has made loaders: ``FILE:LINE``, each once."""
        self.keep_signs()
        return list(dict.fromkeys(self._signs.get("loaders", "").split("\n")[:-1]))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
