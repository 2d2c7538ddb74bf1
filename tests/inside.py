"""The command line within the process of the tests, where what is tested needs none of its own: torch is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sapus_cli.cli import run_line

if TYPE_CHECKING:
    import pytest


class Said(NamedTuple):
    """How a command line ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Inside:
    """Runs command lines in the working directory; what they fork comes from one fork server that stays warm.

    Args:
        capsys: pytest's hold on both outputs.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Said:
        """A command line, run to its end."""
        self._capsys.readouterr()
        code = run_line(list(words))
        return Said(code, *self._capsys.readouterr())
