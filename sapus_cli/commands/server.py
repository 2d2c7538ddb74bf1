"""`sapus server`: the server and the evaluator of a run whose workers are started by hand."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
import shlex
import socket
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapus_cli import join
from sapus_cli.commands.options import (
    AsJson,
    Name,
    Quiet,
    Results,
    check_port,
    endpoint_parts,
    flag,
    option,
    takes_real_run_options,
)
from sapus_cli.commands.run import launch
from sapus_cli.config import RunConfig  # noqa: TC001 - typer reads the annotations
from sapus_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sapus_cli.drivers.security import Security

EXAMPLES = (
    "Examples:\n\n"
    "sapus server --bind tcp://127.0.0.1:5555 --strategy asp --workers 2\n\n"
    "sapus worker --connect tcp://127.0.0.1:5555\n\n"
    "sapus server --bind tcp://0.0.0.0:5555 --join-file join.toml --workers 2\n\n"
    "sapus worker --join join.toml"
)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
ANY = "0.0.0.0"  # noqa: S104 - it is what users ask for
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
EXPIRES = "24h"
LONGEST_S = 366 * SECONDS["d"]


@takes_real_run_options
def command(
    config: RunConfig,
    *,
    bind: Annotated[
        str,
        option(
            "--bind",
            metavar="ENDPOINT",
            text="Where to listen, as tcp://HOST:PORT; HOST is an IPv4 address, an interface or * for all, "
            "port * a free one.",
        ),
    ] = "tcp://127.0.0.1:*",
    join_file: Annotated[
        Path | None,
        option(
            "--join-file",
            metavar="FILE",
            text="Make keys, admit their holders only, and write this file for sapus worker --join. "
            "Encrypting takes CPU time.",
        ),
    ] = None,
    join_expires: Annotated[
        str | None,
        option(
            "--join-expires",
            metavar="TIME",
            text="How long the join file lets workers connect, as in 30min, 24h or 7d.",
            show_default=EXPIRES,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        option(
            "--advertise",
            metavar="HOST",
            text="Name or address under which workers reach this machine.",
            show_default="the address of --bind, or the host name",
        ),
    ] = None,
    insecure: Annotated[
        bool, flag("--insecure", text="Listen beyond loopback without keys: whoever connects takes part.")
    ] = False,
    results: Results = Path("results"),
    name: Name = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Start the server and the evaluator of a run, and wait for workers started by hand."""
    endpoint = checked_endpoint(bind)
    if insecure and join_file is not None:
        raise UserError(f"--insecure and --join-file {join_file}: leave one of the two out")
    if join_expires is not None and join_file is None:
        raise UserError(f"--join-expires {join_expires}: there is no join file; give --join-file FILE, or leave it out")
    host = _advertised(advertise, endpoint)
    start = partial(launch, config, results, name, endpoint, own_workers=False, quiet=quiet, as_json=as_json)
    if join_file is None:
        open_to_all = not _is_loopback(endpoint)
        if open_to_all and not insecure:
            raise UserError(
                f"--bind {bind}: other machines can connect; give --join-file FILE, which admits its holders only, "
                "or --insecure to admit everybody"
            )

        def invite_plainly(bound: str) -> str:
            if open_to_all:
                typer.echo(f"sapus: warning: whoever reaches {bound} can read and change what is trained", err=True)
            return f"sapus worker --connect {_reached(bound, host)}"

        return start(invite=invite_plainly)
    valid_s = _expires_s(join_expires or EXPIRES)
    join.check_free(join_file)
    with _keys(join_file, host, valid_s) as (security, invite):
        return start(security=security, invite=invite)


def checked_endpoint(bind: str) -> str:
    """The endpoint to listen at: an IPv4 address and a port, or * for a free one.

    Raises:
        UserError: it is malformed, or its host is neither an address nor an interface of this machine.
    """
    host, port = endpoint_parts("--bind", bind)
    if port != "*":
        check_port(f"--bind {bind}", port, ", or * for a free one")
    return f"tcp://{_address(bind, host, port)}:{port}"


def _address(bind: str, host: str, port: str) -> str:
    if host in LOOPBACK_HOSTS:
        return LOOPBACK_HOSTS[0]
    if host == "*":
        return ANY
    try:
        return str(ipaddress.IPv4Address(host))
    except ipaddress.AddressValueError:
        import psutil  # noqa: PLC0415 - it is heavy, and seldom needed

        interfaces = psutil.net_if_addrs()
    if host not in interfaces:
        raise UserError(
            f"--bind {bind}: {host} is neither an IPv4 address nor an interface of this machine "
            f"({', '.join(sorted(interfaces))}); give one of these, or tcp://{ANY}:{port} for all"
        )
    addresses = [str(entry.address) for entry in interfaces[host] if entry.family == socket.AF_INET]
    if not addresses:
        raise UserError(f"--bind {bind}: the interface {host} has no IPv4 address; give another")
    return addresses[0]


def _is_loopback(endpoint: str) -> bool:
    host, _ = endpoint_parts("--bind", endpoint)
    return ipaddress.IPv4Address(host).is_loopback


def _advertised(asked: str | None, endpoint: str) -> str:
    """The host that workers connect to."""
    bound, _ = endpoint_parts("--bind", endpoint)
    host = asked or (socket.gethostname() if bound == ANY else bound)
    if re.fullmatch(r"[A-Za-z0-9._-]+", host) and host != ANY:
        return host
    if asked is None:
        raise UserError(f"the name of this machine, {host!r}, is none to connect to; give --advertise HOST")
    raise UserError(f"--advertise {asked}: must be a host name or an IPv4 address and nothing else, as in node17")


def _reached(bound: str, host: str) -> str:
    """The endpoint to connect to, from where the server listens."""
    return f"tcp://{host}:{bound.rpartition(':')[2]}"


def _expires_s(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text)
    if match is None or match[2] not in SECONDS:
        raise UserError(f"--join-expires {text}: must be a number with a unit ({', '.join(SECONDS)}), as in {EXPIRES}")
    seconds = float(match[1]) * SECONDS[match[2]]
    if not 1 <= seconds <= LONGEST_S:
        raise UserError(f"--join-expires {text}: must be from 1s to {LONGEST_S // SECONDS['d']}d")
    return seconds


@contextmanager
def _keys(path: Path, host: str, valid_s: float) -> Iterator[tuple[Security, Callable[[str], str]]]:
    """Keys of a run, and what writes its join file once the server listens; with the run, the file goes."""
    from sapus_cli.drivers.security import new_keys  # noqa: PLC0415 - heavy imports wait until they are needed

    created = dt.datetime.now(dt.UTC).replace(microsecond=0)
    expires = created + dt.timedelta(seconds=valid_s)
    security = new_keys(expires.timestamp())
    invitations: list[join.Invitation] = []

    def invite(bound: str) -> str:
        invitation = join.Invitation(_reached(bound, host), created, expires, security.workers)
        join.write(path, invitation)
        invitations.append(invitation)
        until = join.utc(expires)
        return f"sapus worker --join {shlex.quote(str(path))}  # {invitation.endpoint}, until {until}"

    try:
        yield security, invite
    finally:
        for invitation in invitations:
            join.remove(path, invitation)


command.__name__ = "server"
