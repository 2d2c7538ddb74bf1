"""What can go wrong, by who must act on it. Every message says what is wrong, with the value, and what to do."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class UserError(Exception):
    """The call was wrong: shown as one line, exit code 2, nothing created."""


class RunFailedError(Exception):
    """A run started and could not end as asked: shown without a traceback, exit code 1.

    `next_step` is a line that says what to do now, or empty.
    """

    exit_code = 1
    next_step = ""


class InterruptedRunError(RunFailedError):
    """The user or the system asked the run to end; what it had written is kept. Exit code 130."""

    exit_code = 130


class ProtocolError(Exception):
    """A rule of the wire protocol was broken."""


class DivergedError(RunFailedError):
    """No worker computes finite numbers any more."""


class LocalProtocolError(ProtocolError):
    """Our own side broke a rule: a fault in a strategy or a driver."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule or sent bytes that are no message."""


class DroppedError(ProtocolError):
    """The server does not know this client any more: it has been let go, or the server is another one."""


class DeadlockError(LocalProtocolError):
    """Every live worker waits for a reply, so no push can ever come."""


class DamagedFileError(Exception):
    """A file of a run folder cannot be read: names the file and the row."""


def unknown(what: str, value: str, valid: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that is not in a list: says the nearest valid names, then all of them.

    Args:
        what: the kind of thing, as in "strategy".
        value: the name that was given.
        valid: every valid name.
        hint: one more sentence about what to do.
    """
    names = sorted(valid)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(near)}?" if near else "."
    tail = f" {hint}" if hint else ""
    return UserError(f"unknown {what} '{value}'{guess} Valid: {', '.join(names) or '(none)'}.{tail}")
