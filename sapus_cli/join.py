"""The join file: what a worker on another machine needs to be let into a run, and nobody else may read."""

from __future__ import annotations

import datetime as dt
import os
import stat
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sapus_cli.errors import UserError

FORMAT = 1
MAX_BYTES = 16 * 1024
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Digits of base 85 (ZeroMQ RFC 32); five of them are four bytes, and a key has 32 bytes."""


@dataclass(frozen=True)
class ClientKeys:
    """CURVE keys of a client, as Z85: the server's public one, and its own pair."""

    server: str = field(repr=False)
    public: str = field(repr=False)
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Invitation:
    """What a join file says.

    Attributes:
        endpoint: where to connect.
        created: when the keys were made, UTC.
        expires: from when on the server admits nobody with them any more, UTC.
        keys: those of every worker of the run.
    """

    endpoint: str
    created: dt.datetime
    expires: dt.datetime
    keys: ClientKeys


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    endpoint: str
    created: dt.datetime
    expires: dt.datetime
    server_public_key: str
    worker_public_key: str
    worker_secret_key: str


def text(invitation: Invitation) -> str:
    """The join file of an invitation, TOML."""
    keys = invitation.keys
    return (
        "# Lets workers into one run of sapus. Whoever can read it can join: keep it to yourself (mode 0600).\n"
        f"version = {FORMAT}\n"
        f'endpoint = "{invitation.endpoint}"\n'
        f"created = {utc(invitation.created)}\n"
        f"expires = {utc(invitation.expires)}\n"
        f'server_public_key = "{keys.server}"\n'
        f'worker_public_key = "{keys.public}"\n'
        f'worker_secret_key = "{keys.secret}"\n'
    )


def utc(moment: dt.datetime) -> str:
    """A moment to the second, as in 2026-01-31T23:59:59Z."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_free(path: Path) -> None:
    """Check, without creating anything, that a join file can be written.

    Raises:
        UserError: there is something of that name, or its folder is none or may not be written.
    """
    if os.path.lexists(path):
        raise UserError(
            f"--join-file {path}: it exists already, and may hold the keys of another run; "
            "remove it, or choose another name"
        )
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"--join-file {path}: there is no folder {folder}; create it, or choose another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--join-file {path}: {folder} may not be written; choose another folder")


def write(path: Path, invitation: Invitation) -> None:
    """Write a join file that only its owner may read. It appears all at once, and never in place of another file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        file, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
        try:
            with os.fdopen(file, "w", encoding="ascii") as stream:
                stream.write(text(invitation))
            os.link(name, path)
        finally:
            Path(name).unlink()
    except OSError as error:
        raise UserError(f"--join-file {path}: cannot write it: {error.strerror}; choose another place") from error


def remove(path: Path, invitation: Invitation) -> None:
    """Remove the join file of an invitation, if it is still there and still that one."""
    try:
        if path.read_text(encoding="ascii") == text(invitation):
            path.unlink()
    except (OSError, UnicodeDecodeError):
        return


def read(path: Path, now: dt.datetime) -> Invitation:
    """Read a join file.

    Raises:
        UserError: it is not there, others may read or write it, it is malformed, or its time is over.
    """
    where = f"join file {path}"
    try:
        table = tomllib.loads(_private(where, path).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{where}: {error}; give the file that sapus server has written") from None
    invitation = _invitation(where, table)
    if invitation.expires <= now:
        raise UserError(
            f"{where}: it expired at {utc(invitation.expires)}, and it is {utc(now)} now; "
            "start the server again, with a longer --join-expires"
        )
    return invitation


def _private(where: str, path: Path) -> bytes:
    """What stands in a file that is ours alone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_private(where, os.fstat(file))
            content = os.read(file, MAX_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; give the file that sapus server has written") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{where}: it is longer than {MAX_BYTES:,} bytes; give the file that sapus server has written")
    return content


def _check_private(where: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{where}: it is no file; give the file that sapus server has written")
    if status.st_uid != os.geteuid():
        raise UserError(
            f"{where}: it belongs to user {status.st_uid}, and you are user {os.geteuid()}; "
            "give a file of your own, as made by install -m 600"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{where}: others may use it (mode {stat.S_IMODE(status.st_mode):04o}), and whoever reads it can join; "
            "chmod 600 it, or start the server again if somebody else may have read it"
        )


def _invitation(where: str, table: dict[str, Any]) -> Invitation:
    """Raises UserError, which never shows a key."""
    version = table.get("version")
    if isinstance(version, int) and version != FORMAT:
        raise UserError(
            f"{where}: it has version {version}, and this sapus reads version {FORMAT}; "
            "install the same sapus on both sides"
        )
    try:
        said = msgspec.convert(table, _Table)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}; give the file that sapus server has written") from None
    for name in ("server_public_key", "worker_public_key", "worker_secret_key"):
        if not _is_key(getattr(said, name)):
            raise UserError(f"{where}: {name} is no key, which has 40 characters of Z85; copy the file anew")
    for name in ("created", "expires"):
        if getattr(said, name).tzinfo is None:
            raise UserError(f"{where}: {name} has no time zone; copy the file anew")
    keys = ClientKeys(said.server_public_key, said.worker_public_key, said.worker_secret_key)
    return Invitation(said.endpoint, said.created, said.expires, keys)


def _is_key(text: str) -> bool:
    if len(text) != 40 or not set(text) <= set(Z85):  # noqa: PLR2004 - 32 bytes
        return False
    groups = (text[first : first + 5] for first in range(0, 40, 5))
    return all(
        sum(Z85.index(digit) * 85**place for place, digit in enumerate(group[::-1])) < 1 << 32 for group in groups
    )
