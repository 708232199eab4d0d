"""The rank's side of the control connection: one JSON object a line, asked and answered in turn."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

MAX_LINE = 1 << 20  # both sides refuse longer lines


class ControlLost(Exception):
    """The driver is gone; the training goes on without us."""


class Client:
    """A blocking connection to the control server; no thread, so that forking workers stays safe."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._token = token
        self._socket = socket.create_connection((host, port), timeout=30)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        line = json.dumps({**message, "token": self._token}, default=str).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"control message of {len(line)} bytes")
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise ControlLost(str(error)) from error

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer."""
        self.send(message)
        try:
            line = self._file.readline(MAX_LINE)
        except OSError as error:
            raise ControlLost(str(error)) from error
        if not line:
            raise ControlLost("the driver closed the connection")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Close this process's copy of the connection."""
        with contextlib.suppress(OSError):  # a forked child drops its copy; there is nobody to tell
            self._file.close()
            self._socket.close()
