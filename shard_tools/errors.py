"""The one error tree of both packages: every error carries its exit code.

Exit codes: 0 done; 1 ran, and the answer is bad; 2 wrong use or bad input; 3 a tool, device or
permission is missing; 4 the user's command failed.
"""

from __future__ import annotations


class ToolError(Exception):
    """An error to show to a person: what is wrong, where, and what to do next.

    Args:
        what: what is wrong and where, one sentence.
        hint: the next thing to do; shown on a line of its own.
    """

    exit_code = 2

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.hint}" if self.hint else self.what


class BadAnswer(ToolError):
    """The job ran and its answer is bad: verify found damage, a gate failed."""

    exit_code = 1


class BadInput(ToolError):
    """Wrong use of a command, or input that cannot be worked with."""

    exit_code = 2


class Missing(ToolError):
    """A tool, device or permission that the job needs is missing."""

    exit_code = 3


class CommandFailed(ToolError):
    """The user's own command failed."""

    exit_code = 4
