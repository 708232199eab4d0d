"""The command behind ``--``."""

from __future__ import annotations

import sys

# For a command's ``context_settings``: from the first word on that is no option, all belongs to CMD.
SETTINGS = {"allow_interspersed_args": False}


def check_behind(command: list[str] | None, example: str) -> None:
    """A command has to stand behind ``--``, where none of its own options is taken for one of feedtune's.

    Args:
        command: its words, the last ones of the command line.
        example: how to type it, for the error message.

    Raises:
        BadInput: it stands somewhere else.
    """
    from shard_tools.errors import BadInput

    if command and sys.argv[-len(command) - 1] != "--":
        raise BadInput("the command has to stand behind --", example)
