"""Strangers: who has no key of the run gets nothing in; who has one trains as anybody. Files that are no join file."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
import zmq
from processes import SAPUS, Background, launch

from sapus_cli import join
from sapus_cli.cli import run_line
from sapus_cli.codec import PROTOCOL_VERSION, Hello, encode
from sapus_cli.drivers import process, security
from sapus_cli.drivers.client import Client
from sapus_cli.errors import InterruptedRunError, RunFailedError, UserError
from sapus_cli.join import ClientKeys, Invitation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOUR = dt.timedelta(hours=1)
NOW = dt.datetime(2026, 1, 31, 12, 0, tzinfo=dt.UTC)
KEYS = ClientKeys("a" * 40, "b" * 40, "c" * 40)
REMEDY = "give the file that sapus server has written"


def invitation(**changes: Any) -> Invitation:
    """One that counts for an hour from now on."""
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    said: dict[str, Any] = {
        "endpoint": "tcp://127.0.0.1:5555",
        "created": now,
        "expires": now + HOUR,
        "keys": KEYS,
    } | changes
    return Invitation(**said)


# The file.


def test_a_join_file_is_ours_alone_and_says_it_all(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    written = invitation(created=NOW, expires=NOW + HOUR)
    join.write(path, written)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.read_text().splitlines()[1:] == [
        "version = 1",
        'endpoint = "tcp://127.0.0.1:5555"',
        "created = 2026-01-31T12:00:00Z",
        "expires = 2026-01-31T13:00:00Z",
        f'server_public_key = "{"a" * 40}"',
        f'worker_public_key = "{"b" * 40}"',
        f'worker_secret_key = "{"c" * 40}"',
    ]
    assert join.read(path, NOW + HOUR - dt.timedelta(seconds=1)) == written
    assert "c" * 10 not in repr(written)
    join.remove(path, written)
    assert list(tmp_path.iterdir()) == []
    join.remove(path, written)


def test_a_join_file_takes_nobody_s_place(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    first, second = invitation(), invitation(endpoint="tcp://127.0.0.1:5556")
    join.write(path, first)
    with pytest.raises(UserError, match=r"cannot write it: File exists; choose another place"):
        join.write(path, second)
    assert path.read_text() == join.text(first)
    join.remove(path, second)
    assert [child.name for child in tmp_path.iterdir()] == ["join.toml"]
    with pytest.raises(UserError, match="exists already, and may hold the keys of another run; remove it, or choose"):
        join.check_free(path)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(UserError, match="exists already"):
        join.check_free(path)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The one line that `sapus worker --join j` gets; it never tells a key."""
    monkeypatch.chdir(tmp_path)

    def line() -> str:
        code = run_line(["worker", "--join", "j"])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert not re.search("[abc]{10}", err)
        return str(err).removeprefix("sapus: join file j: ").rstrip("\n")

    return line


GOOD = join.text(Invitation("tcp://127.0.0.1:5555", NOW, dt.datetime(9999, 1, 1, tzinfo=dt.UTC), KEYS))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", f"Object missing required field `version`; {REMEDY}"),
        ("no TOML", f"Expected '=' after a key in a key/value pair (at line 1, column 4); {REMEDY}"),
        (b"\xff", f"'utf-8' codec can't decode byte 0xff in position 0: invalid start byte; {REMEDY}"),
        (GOOD.replace('endpoint = "tcp://127.0.0.1:5555"', ""), f"Object missing required field `endpoint`; {REMEDY}"),
        (GOOD + "more = 1\n", f"Object contains unknown field `more`; {REMEDY}"),
        (GOOD.replace('"tcp://127.0.0.1:5555"', "5555"), f"Expected `str`, got `int` - at `$.endpoint`; {REMEDY}"),
        (
            GOOD.replace("a" * 40, "a" * 39),
            "server_public_key is no key, which has 40 characters of Z85; copy the file",
        ),
        (GOOD.replace("b" * 40, "b" * 39 + ","), "worker_public_key is no key"),
        (GOOD.replace("c" * 40, "c" * 41), "worker_secret_key is no key"),
        (GOOD.replace("c" * 40, "#" * 40), "worker_secret_key is no key"),  # 85**5 - 1 needs more than 32 bits
        (
            GOOD.replace("version = 1", f'version = "{"c" * 40}"'),
            f"Expected `int`, got `str` - at `$.version`; {REMEDY}",
        ),
        (GOOD.replace("12:00:00Z", "12:00:00"), "created has no time zone; copy the file anew"),
        (GOOD.replace("9999", "2026"), "it expired at 2026-01-01T00:00:00Z, and it is 20"),
        (
            GOOD.replace("version = 1", "version = 2"),
            "it has version 2, and this sapus reads version 1; install the same",
        ),
        (GOOD.replace("version = 1", "version = true"), f"Expected `int`, got `bool` - at `$.version`; {REMEDY}"),
        (GOOD.replace("tcp", "udp"), "endpoint udp://127.0.0.1:5555: must be tcp://HOST:PORT"),
        (GOOD.replace("127.0.0.1", "[::1]"), "endpoint tcp://[::1]:5555: IPv6 is not supported; give an IPv4 address"),
        (GOOD.replace("5555", "0"), "endpoint tcp://127.0.0.1:0: the port must be a whole number from 1 to 65535"),
        (
            GOOD.replace("127.0.0.1", 64 * "n"),  # a label of a host name has at most 63 characters
            f"endpoint tcp://{64 * 'n'}:5555: this machine knows no IPv4 address of {64 * 'n'}; correct it in the file",
        ),
        (GOOD + "#" * join.MAX_BYTES, f"it is longer than 16,384 bytes; {REMEDY}"),
    ],
)
def test_what_is_no_join_file(tmp_path: Path, refused: Callable[[], str], content: str | bytes, said: str) -> None:
    path = tmp_path / "j"
    path.touch(0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert refused().startswith(said)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_join_file_that_others_may_use(tmp_path: Path, refused: Callable[[], str], mode: int) -> None:
    path = tmp_path / "j"
    path.write_text(GOOD)
    path.chmod(mode)
    assert refused() == (
        f"others may use it (mode 0{mode:o}), and whoever reads it can join; chmod 600 it, or start the server again "
        "if somebody else may have read it"
    )


def test_what_is_no_file_at_all(tmp_path: Path, refused: Callable[[], str]) -> None:
    assert refused() == f"No such file or directory; {REMEDY}"
    (tmp_path / "j").mkdir()
    assert refused() == f"it is no file; {REMEDY}"
    (tmp_path / "j").rmdir()
    os.mkfifo(tmp_path / "j")
    assert refused() == f"it is no file; {REMEDY}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_join_file_of_somebody_else(tmp_path: Path, refused: Callable[[], str]) -> None:
    path = tmp_path / "j"
    path.touch(0o600)
    path.write_text(GOOD)
    os.chown(path, 12345, -1)
    assert refused().startswith("it belongs to user 12345, and you are user 0; give a file of your own")


# Who gets a message in.


HELLO = encode(Hello(protocol=PROTOCOL_VERSION, role="worker", incarnation=1))


class Guarded(NamedTuple):
    """A socket that listens, where, and the keys of its run."""

    socket: zmq.Socket[bytes]
    endpoint: str
    keys: security.Security

    def got(self, timeout_ms: int) -> list[bytes]:
        """What has come within this time, without the sender's identity; nothing: empty."""
        return self.socket.recv_multipart()[1:] if self.socket.poll(timeout_ms) else []


@contextmanager
def listening(*, valid_s: float = 60, plain: bool = False, most_bytes: int = -1) -> Iterator[Guarded]:
    """A server's socket whose workers' keys are valid for so long, or that takes no keys."""
    keys = security.new_keys(time.time() + valid_s)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    if not plain:
        security.secure_server(router, keys.server)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield Guarded(router, f"tcp://127.0.0.1:{port}", keys)
    finally:
        router.close()
        context.term()  # which ends the gate


@contextmanager
def dealer(endpoint: str, keys: ClientKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket that has sent a greeting."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sending:
        sending.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            security.secure_client(sending, keys)
        sending.connect(endpoint)
        sending.send(HELLO)
        yield sending


@contextmanager
def raw(endpoint: str, *parts: bytes) -> Iterator[None]:
    """A TCP connection that sends the parts, each after an answer to the one before, if one comes."""
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(0.3)
        with suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
                with suppress(TimeoutError):
                    connection.recv(64, socket.MSG_WAITALL)
        yield


READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
ZMTP = (
    b"\xff" + bytes(8) + b"\x7f\x03\0NULL".ljust(55, b"\0"),
    bytes([4, len(READY)]) + READY + bytes([0, len(HELLO)]) + HELLO,
)
"""A plain peer that is written out by hand (ZeroMQ RFC 23), up to its greeting to the server."""


def test_strangers_get_nothing_in_and_do_not_disturb() -> None:
    other = security.new_keys(time.time() + 60).workers
    with listening() as server, ExitStack() as stack:
        ours = server.keys.workers
        for stranger in (
            None,
            ClientKeys(other.server, ours.public, ours.secret),
            ClientKeys(ours.server, other.public, other.secret),
        ):
            stack.enter_context(dealer(server.endpoint, stranger))
        for parts in (ZMTP, [b"GET / HTTP/1.1\r\n\r\n"], [bytes(range(256)) * 256]):
            stack.enter_context(raw(server.endpoint, *parts))
        with dealer(server.endpoint, ours), dealer(server.endpoint, server.keys.evaluator):
            assert [server.got(5000), server.got(5000)] == [[HELLO], [HELLO]]
            assert server.got(300) == []


def test_the_same_bytes_get_into_a_plain_socket() -> None:
    with listening(plain=True) as server, raw(server.endpoint, *ZMTP), dealer(server.endpoint, None):
        assert [server.got(5000), server.got(5000)] == [[HELLO], [HELLO]]


def test_without_its_gate_a_socket_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "Gate", lambda _context, _admitted: None)
    with listening() as server, dealer(server.endpoint, server.keys.workers):
        assert server.got(500) == []


def test_an_expired_key_opens_no_new_connection(caplog: pytest.LogCaptureFixture) -> None:
    with listening(valid_s=-1) as server:
        with dealer(server.endpoint, server.keys.workers):
            assert server.got(300) == []
        with dealer(server.endpoint, server.keys.evaluator):
            assert server.got(5000) == [HELLO]
        assert refusal(server.endpoint, server.keys.workers).startswith("refused the key of the join file")
    assert set(caplog.messages) == {"refused a connection from 127.0.0.1: its join file has expired"}


def test_a_connection_outlives_its_key() -> None:
    with listening(valid_s=1) as server, dealer(server.endpoint, server.keys.workers) as there:
        assert server.got(5000) == [HELLO]
        time.sleep(1)
        there.send(b"later")
        assert server.got(5000) == [b"later"]
        with dealer(server.endpoint, server.keys.workers):
            assert server.got(300) == []


def refusal(endpoint: str, keys: ClientKeys | None) -> str:
    """What a client says that is not let in, long before it gives up waiting."""
    began = time.monotonic()
    with pytest.raises(RunFailedError) as caught:
        Client(endpoint, "worker", keys=keys)
    assert time.monotonic() - began < 15
    return str(caught.value).removeprefix(f"the server at {endpoint} ")


def test_a_client_that_is_not_let_in_knows_why() -> None:
    other = security.new_keys(time.time() + 60).workers
    with listening() as server:
        said = refusal(server.endpoint, None)
        assert said == "admits nobody without its join file; give it with --join in place of --connect"
        said = refusal(server.endpoint, other)
        unknown = (
            "does not know the keys of the join file, which is of another run; take the file of the run that is on"
        )
        assert said.startswith(unknown)
        said = refusal(server.endpoint, ClientKeys(server.keys.workers.server, other.public, other.secret))
        assert said.startswith("refused the key of the join file: it has expired, or is not of this run")
    with listening(plain=True) as server:
        assert refusal(server.endpoint, other).startswith(unknown)


@pytest.mark.parametrize(("n_bytes", "arrives"), [(1000, True), (1001, False)])
def test_encryption_is_not_counted_in_the_largest_message(n_bytes: int, arrives: bool) -> None:  # noqa: FBT001
    most_bytes = 1000 + security.CURVE_BYTES
    with listening(most_bytes=most_bytes) as server, dealer(server.endpoint, server.keys.workers) as sending:
        assert server.got(5000) == [HELLO]
        sending.send(bytes(n_bytes))
        assert server.got(5000 if arrives else 500) == ([bytes(n_bytes)] if arrives else [])


def test_a_worker_that_is_not_let_in_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "settle", lambda _threads: None)
    with listening(valid_s=-1) as server:
        join.write(tmp_path / "j", invitation(endpoint=server.endpoint, keys=server.keys.workers))
        for words, said in (
            (["--join", str(tmp_path / "j")], "refused the key of the join file"),
            (["--connect", server.endpoint], "admits nobody without its join file"),
        ):
            assert run_line(["worker", *words]) == 1
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert err.startswith(f"sapus: the server at {server.endpoint} {said}")


@pytest.mark.parametrize(
    ("words", "bound", "endpoint", "valid"),
    [
        (["--bind", "tcp://0.0.0.0:5"], "tcp://0.0.0.0:5", f"tcp://{socket.gethostname()}:5", 24 * HOUR),
        (["--bind", "tcp://*:*", "--advertise", "node17"], "tcp://0.0.0.0:77", "tcp://node17:77", 24 * HOUR),
        (["--bind", "tcp://lo:5", "--join-expires", "30min"], "tcp://127.0.0.1:5", "tcp://127.0.0.1:5", 0.5 * HOUR),
        (["--bind", "tcp://10.0.0.9:*", "--join-expires", "7d"], "tcp://10.0.0.9:77", "tcp://10.0.0.9:77", 168 * HOUR),
    ],
)
def test_a_join_file_lives_as_long_as_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], bound: str, endpoint: str, valid: dt.timedelta
) -> None:
    path = tmp_path / "j o"

    def interrupted(*asked: Any, security: security.Security, invite: Callable[[str], str], **_: Any) -> int:
        assert asked[3].partition("*")[0] in bound
        assert not path.exists()
        said = invite(bound)
        invited = join.read(path, dt.datetime.now(dt.UTC))
        assert invited == Invitation(endpoint, invited.created, invited.created + valid, security.workers)
        assert security.server.admitted[invited.keys.public] == invited.expires.timestamp()
        assert said == f"sapus worker --join '{path}'  # {endpoint}, until {join.utc(invited.expires)}"
        raise InterruptedRunError("interrupted by SIGTERM")

    monkeypatch.setattr("sapus_cli.commands.server.launch", interrupted)
    assert run_line(["server", *words, "--join-file", str(path)]) == 130
    assert list(tmp_path.iterdir()) == []


# Real processes.

ADDRESS = "10.213.7.1"
ASKED = ("--strategy", "local-sgd", "--param", "h=4", "--steps", "10", "--model", "mlp", "--eval-every", "0.1")


class Place(NamedTuple):
    """Where servers listen: what stands before their commands, what they bind, and what workers are told."""

    prefix: list[str]
    bind: str
    host: str


@pytest.fixture
def beyond_loopback() -> Iterator[Place]:
    """A network of its own, with an address that is not loopback and that nobody outside can reach."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and the program ip")
    name = f"sapus-join-{os.getpid()}"

    def ip(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["ip", *words], check=False, capture_output=True)

    if ip("netns", "add", name).returncode:
        pytest.skip("there can be no network namespace here")
    try:
        ip("-n", name, "link", "set", "lo", "up").check_returncode()
        ip("-n", name, "address", "add", f"{ADDRESS}/32", "dev", "lo").check_returncode()
        yield Place(["ip", "netns", "exec", name], "tcp://0.0.0.0:*", ADDRESS)
    finally:
        ip("netns", "delete", name).check_returncode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Background]]:
    """Starts a command line that goes on; none is left running."""
    started: list[Background] = []

    def start(place: Place, *arguments: str) -> Background:
        command = [*place.prefix, *SAPUS, *arguments]
        run = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Background(run, tmp_path / "results"))
        return started[-1]

    yield start
    for background in started:
        if background.process.poll() is None:
            os.killpg(background.process.pid, signal.SIGKILL)
        background.process.communicate()


def lines_until(server: Background, beginning: str) -> list[str]:
    """What the server says, up to the line that begins so."""
    assert server.process.stderr is not None
    lines = []
    for line in server.process.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"the server ended: {lines}")


def told_outside(pid: int) -> bytes:
    """What others can see of a process and its children: their command lines and environments."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return b"".join(Path(f"/proc/{one}/{what}").read_bytes() for one in family for what in ("cmdline", "environ"))


def check_that_keys_are_nowhere(keys: ClientKeys, *places: bytes) -> None:
    for key in (keys.server, keys.public, keys.secret):
        assert [key for place in places if key.encode() in place] == []


@pytest.mark.slow
def test_who_holds_the_join_file_trains_and_nobody_else(
    tmp_path: Path, beyond_loopback: Place, start: Callable[..., Background]
) -> None:
    place = beyond_loopback
    asked = ("--bind", place.bind, "--advertise", place.host, "--join-file", "j.toml", "--workers", "2", "--json")
    server = start(place, "server", *asked, *ASKED)
    path = tmp_path / "j.toml"
    waiting = lines_until(server, "waiting for 2 workers")[-1]
    invited = join.read(path, dt.datetime.now(dt.UTC))
    until = join.utc(invited.expires)
    assert waiting == f"waiting for 2 workers: sapus worker --join j.toml  # {invited.endpoint}, until {until}"
    assert invited.expires - invited.created == 24 * HOUR
    assert re.fullmatch(rf"tcp://{place.host}:\d+", invited.endpoint)

    keys = security.new_keys(time.time() + 60).workers
    join.write(tmp_path / "stale.toml", Invitation(invited.endpoint, invited.created, invited.expires, keys))
    stale = start(place, "worker", "--join", "stale.toml")
    first = start(place, "worker", "--join", "j.toml")
    code, out, err = stale.end(40)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith(f"sapus: the server at {invited.endpoint} does not know the keys")
    seen = told_outside(server.process.pid) + told_outside(first.process.pid)

    second = start(place, "worker", "--join", "j.toml")
    ends = {first.end(60), second.end(40)}
    assert {code for code, _, _ in ends} == {0}
    assert {err for _, _, err in ends} == {"worker 0: done\n", "worker 1: done\n"}
    code, out, err = server.end()
    assert code == 0, err
    assert sorted(child.name for child in tmp_path.iterdir()) == ["results", "stale.toml"]

    written = b"".join(file.read_bytes() for file in server.folder.rglob("*") if file.is_file())
    check_that_keys_are_nowhere(invited.keys, seen, written, out.encode(), err.encode(), waiting.encode())
    assert b"a stranger" not in (server.folder / "logs" / "server.log").read_bytes()
    assert server.record()["transport"]["curve"] is True
    launched = launch(tmp_path / "launched", params={"h": 4}, steps=10)
    assert json.loads(out)["state_sha256"] == launched.record["state_sha256"]
    assert launched.record["transport"]["curve"] is False


@pytest.mark.slow
def test_a_server_that_is_open_to_all_says_so(
    tmp_path: Path, beyond_loopback: Place, start: Callable[..., Background]
) -> None:
    place = beyond_loopback
    server = start(place, "server", "--bind", f"tcp://{place.host}:*", "--insecure", "--workers", "1", "--model", "mlp")
    warning, *_, waiting = lines_until(server, "waiting for 1 workers")
    endpoint = waiting.removeprefix("waiting for 1 workers: sapus worker --connect ")
    assert re.fullmatch(rf"tcp://{place.host}:\d+", endpoint)
    assert warning == f"sapus: warning: whoever reaches {endpoint} can read and change what is trained"
    joins = start(place, "worker", "--connect", endpoint)
    server.wait_for_pushes()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 130
    joins.end()
