"""First code of ours in a process: arm the hook on torch's DataLoader, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from .signs import mark, note

LOADERS, MODELS = "torch.utils.data.dataloader", "torch.nn.parallel.distributed"


def start(folder: str) -> None:
    """Arm this process with the run's configuration, read from the start-up folder."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    config["folder"] = folder
    if config.get("mode") != "apply":  # nobody reads the signs of a folder that outlives its run
        mark(folder, "python")
    _restore(folder)
    guard = os.environ.get("FEEDTUNE_GUARD")
    if guard:
        from . import guard as write_guard

        write_guard.install(json.loads(guard), folder)
        if os.environ.get(write_guard.ONLY):
            return  # a rank has started this program: it is no rank, and writes as little for real
    sys.meta_path.insert(0, _Finder(config))


def _restore(folder: str) -> None:
    """Set the write guard's variables where a launcher has dropped them."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "variables.json")) as file:
        for name, value in json.load(file).items():
            os.environ.setdefault(name, value)


class _Finder:
    """Lets the other finders find torch's dataloader module, and patches it once it has run."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._asked = False
        traced = config.get("trace") or config.get("mode") == "run"
        self._names = (LOADERS, MODELS) if traced else (LOADERS,)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names or self._asked:
            return None
        self._asked = True  # another run's finder asks back
        try:
            return self._find(name, path, target)
        finally:
            self._asked = False

    def _find(self, name: str, path: Any, target: Any) -> Any:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._config)
                return spec
        return None


class _Loader:
    """The real loader of the module, with our patch after it."""

    def __init__(self, loader: Any, config: dict[str, Any]) -> None:
        self._loader = loader
        self._config = config

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        try:
            from . import hook

            if module.__name__ == LOADERS:
                hook.patch(module, self._config)
            else:
                hook.patch_models(module)
        except Exception as error:  # noqa: BLE001  # the user's import of torch must work whatever we do
            self._failed(repr(error))

    def _failed(self, error: str) -> None:
        if self._config.get("mode") == "apply" and sys.stderr is not None:
            sys.stderr.write(f"feedtune apply: cannot hook into torch ({error}); settings are not applied\n")
        else:
            note(self._config["folder"], "error", error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
