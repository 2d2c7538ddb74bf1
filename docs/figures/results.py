"""Make the tables of `docs/results.md` again: `python docs/figures/results.py`.

A table stands between `<!-- made by: sapus compare ... -->` and `<!-- end -->`, its command above it. One whose runs
are not there is left as it is.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from sapus_cli.cli import run_line

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
TABLE = re.compile(r"<!-- made by: (sapus [^\n]+) -->\n.*?<!-- end -->", re.DOTALL)


def words_of(command: str) -> list[str]:
    """The words of a command line behind `sapus`."""
    return shlex.split(command)[1:]


def around(command: str, output: str) -> str:
    """What stands in the page for a command: between the marks, itself and what it printed."""
    return f"<!-- made by: {command} -->\n\n```\n{command}\n```\n\n{output.strip()}\n\n<!-- end -->"


def main() -> None:
    """Rewrite the page; the runs are looked for from the root of the repository."""

    def again(found: re.Match[str]) -> str:
        command = found[1]
        words = words_of(command)
        if not list(ROOT.glob(words[1])):
            sys.stderr.write(f"left as it is: {command}\n")
            return found[0]
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.chdir(ROOT):
            code = run_line(words)
        if code:
            sys.stderr.write(f"failed, left as it is: {command}\n")
            return found[0]
        return around(command, output.getvalue())

    PAGE.write_text(TABLE.sub(again, PAGE.read_text()))


if __name__ == "__main__":
    main()
