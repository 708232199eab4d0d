"""First code of ours in a process: arm the hook on torch's DataLoader, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .signs import mark

TARGET = "torch.utils.data.dataloader"


def start(folder: str) -> None:
    """Arm this process with the run's configuration, read from the start-up folder."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    config["folder"] = folder
    mark(folder, "python")
    guard = os.environ.get("FEEDTUNE_GUARD")
    if guard:
        from . import guard as write_guard

        write_guard.install(json.loads(guard), folder)
        if os.environ.get(write_guard.ONLY):
            return  # a rank has started this program: it is no rank, and writes as little for real
    sys.meta_path.insert(0, _Finder(config))


class _Finder:
    """Lets the other finders find torch's dataloader module, and patches it once it has run."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TARGET:
            return None
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
        from . import hook

        hook.patch(module, self._config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
