"""Every wrong call ends with exit code 2 and one line that says what is wrong and what to do; it creates nothing."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from processes import sapus

from sapus_cli.cli import run_line
from sapus_cli.workloads.data import prepare

if TYPE_CHECKING:
    from pathlib import Path

PORT_RANGE = "the port must be a whole number from 1 to 65535"
ENDPOINT_FORM = "must be tcp://HOST:PORT, as in tcp://127.0.0.1:5555"
FRACTION = "must be a number above 0 and at most 1"
COUNT = "must be a whole number from 1 to 1000000000"
POSITIVE = "must be a number above 0"

WRONG: list[tuple[str, list[str]]] = [
    # Names.
    ("run -s bps", ["unknown strategy 'bps'", "did you mean bsp?", "local-sgd, ", "package.module:Class"]),
    ("strategies local", ["unknown strategy 'local'", "did you mean local-sgd", "Valid: adacomm, "]),
    ("run -s local-sgd -p g=3", ["unknown hyper-parameter of local-sgd 'g'", "Valid: h."]),
    ("run -s asp -p h=3", ["unknown hyper-parameter of asp 'h'", "Valid: "]),
    ("run --model cn", ["unknown model 'cn'", "did you mean cnn?", "torchvision:NAME"]),
    ("run --model torchvision:", ["unknown model 'torchvision:'", "did you mean torchvision:NAME?"]),
    ("run --dataset digit", ["unknown data set 'digit'", "did you mean digits?", "fake:CxHxW:K"]),
    ("run --dataset fake:8x8", ["'fake:8x8' does not have the form fake:CxHxW:K", "fake:3x32x32:10"]),
    # Hyper-parameters.
    ("run -s local-sgd -p h=many", ["strategy local-sgd: h = many: must be a whole number"]),
    ("run -s local-sgd -p h=1.5", ["h = 1.5: must be a whole number"]),
    ("run -s local-sgd -p h=", ["h = : must be a whole number"]),
    ("run -s local-sgd -p h=0", ["h = 0: must be a whole number of at least 1"]),
    ("run -s easgd -p beta=x", ["strategy easgd: beta = x: must be a number"]),
    ("run -s easgd -p beta=nan", ["beta = nan: must lie in (0, 1]"]),
    ("run -s easgd -p beta=2", ["beta = 2.0: must lie in (0, 1]"]),
    ("run -s asp -p scale=men", ["scale = men: must be 'mean' | 'sum'"]),
    ("run -p h", ["--param h: must be key=value, as in --param h=8"]),
    ("run -p =3", ["--param =3: must be key=value"]),
    ("run -s local-sgd -p h=3 -p h=4", ["--param h=4: h is given twice; give it once"]),
    # Numbers.
    ("run --workers 0", [f"--workers 0: {COUNT}"]),
    ("run --workers -2", [f"--workers -2: {COUNT}"]),
    ("run --workers 99999999999999999999", [f"--workers 99999999999999999999: {COUNT}"]),
    ("run --workers two", ["--workers two: must be a whole number"]),
    ("run -w 1.5", ["--workers 1.5: must be a whole number"]),
    ("run --batch-size 0", [f"--batch-size 0: {COUNT}"]),
    ("run --batch-size big", ["--batch-size big: must be a whole number"]),
    ("run --worker-timeout 0.1", ["--worker-timeout 0.1: must be a number of at least 0.5"]),
    ("run --worker-timeout soon", ["--worker-timeout soon: must be a number"]),
    ("run --min-workers 0", ["--min-workers 0: must be a whole number from 1 to 8"]),
    ("run --workers 2 --min-workers 3", ["--min-workers 3: must be a whole number from 1 to 2"]),
    ("run --max-restarts -1", ["--max-restarts -1: must be a whole number from 0 to"]),
    ("server --checkpoint-every 0", ["--checkpoint-every 0: must be a number of at least 0.1"]),
    ("run --resume nowhere", ["no run in nowhere: there is no run.json"]),
    ("run --threads 0", ["--threads 0: must be a whole number from 1 to 1024"]),
    ("run --threads 99999999999", ["--threads 99999999999: must be a whole number from 1 to 1024"]),
    ("run --seed -1", ["--seed -1: must be a whole number from 0 to 9223372036854775807"]),
    ("run --seed 9223372036854775808", ["--seed 9223372036854775808: must be a whole number from 0"]),
    ("run --lr 0", [f"--lr 0: {POSITIVE}"]),
    ("run --lr -0.0", [f"--lr -0: {POSITIVE}"]),
    ("run --lr nan", [f"--lr nan: {POSITIVE}"]),
    ("run --lr inf", [f"--lr inf: {POSITIVE}"]),
    ("run --lr fast", ["--lr fast: must be a number"]),
    ("run --momentum 1", ["--momentum 1: must be a number of at least 0 and at most 0.9999"]),
    ("run --momentum -0.1", ["--momentum -0.1: must be a number of at least 0"]),
    ("run --momentum much", ["--momentum much: must be a number"]),
    ("run --weight-decay -1", ["--weight-decay -1: must be a number of at least 0"]),
    ("run --epochs 0", [f"--epochs 0: {POSITIVE} and at most 1000000000"]),
    ("run --epochs -0.0", [f"--epochs -0: {POSITIVE}"]),
    ("run --epochs 1e308", ["--epochs 1e+308: ", "at most 1000000000"]),
    ("run --epochs few", ["--epochs few: must be a number"]),
    ("run --steps 0", [f"--steps 0: {COUNT}"]),
    ("run --steps nan", ["--steps nan: must be a whole number"]),
    ("run --steps 1e3", ["--steps 1e3: must be a whole number"]),
    ("run --steps 99999999999999999999999999", [f"--steps 99999999999999999999999999: {COUNT}"]),
    ("run --seconds 0", [f"--seconds 0: {POSITIVE}"]),
    ("run --seconds inf", [f"--seconds inf: {POSITIVE}"]),
    ("run --seconds soon", ["--seconds soon: must be a number"]),
    ("run --target-accuracy 0", [f"--target-accuracy 0: {FRACTION}"]),
    ("run --target-accuracy 95", [f"--target-accuracy 95: {FRACTION}"]),
    ("run --target-accuracy nan", [f"--target-accuracy nan: {FRACTION}"]),
    ("run --target-accuracy 95%", ["--target-accuracy 95%: must be a number"]),
    ("run --eval-every -1", ["--eval-every -1: must be a number of at least 0"]),
    ("run --steps 3 --seconds 4", ["give one of --epochs, --steps and --seconds", "not --steps and --seconds"]),
    ("run --epochs 1 --seconds 4", ["give one of", "not --epochs and --seconds"]),
    # What does not go together.
    ("run --model gpt", ["model 'gpt' takes text", "give mlp, cnn, lenet5, resnet20 or torchvision:NAME"]),
    ("run --dataset pydoc --model cnn", ["model 'cnn' takes images", "give gpt"]),
    ("run --dataset pydoc --partition dirichlet:1", ["partition 'dirichlet:1' skews class labels", "give iid"]),
    ("run --optimizer adamw --momentum 0.9", ["--momentum 0.9: adamw has no such momentum", "leave it out"]),
    ("run --partition idd", ["unknown partition 'idd'", "did you mean iid?", "dirichlet:ALPHA"]),
    ("run --partition dirichlet", ["partition 'dirichlet': ALPHA must be a number", "dirichlet:0.5"]),
    ("run --partition dirichlet:-1", ["partition 'dirichlet:-1': ALPHA must be a number in [0.001, 1000000]"]),
    ("run --optimizer adam", ["'--optimizer': 'adam' is not one of 'sgd', 'adamw'"]),
    ("run --device gpu", ["'--device': 'gpu' is not one of 'auto', 'cpu', 'cuda'"]),
    # Ports and endpoints.
    ("run --port 0", [f"--port 0: {PORT_RANGE}; leave it out"]),
    ("run --port 65536", [f"--port 65536: {PORT_RANGE}"]),
    ("run --port -1", [f"--port -1: {PORT_RANGE}"]),
    ("run --port http", ["--port http: must be a whole number"]),
    ("worker --connect 127.0.0.1:5555", [f"--connect 127.0.0.1:5555: {ENDPOINT_FORM}"]),
    ("worker --connect ipc:///tmp/x", [f"--connect ipc:///tmp/x: {ENDPOINT_FORM}"]),
    ("worker --connect tcp://:5555", [f"--connect tcp://:5555: {ENDPOINT_FORM}"]),
    ("worker --connect tcp://a:b:5555", [f"--connect tcp://a:b:5555: {ENDPOINT_FORM}"]),
    ("worker --connect tcp://127.0.0.1:0", [f"--connect tcp://127.0.0.1:0: {PORT_RANGE}"]),
    ("worker --connect tcp://127.0.0.1:65536", [f"--connect tcp://127.0.0.1:65536: {PORT_RANGE}"]),
    ("worker --connect tcp://127.0.0.1:5555 --rank -2", ["--rank -2: must be at least 0, or -1"]),
    ("worker --connect tcp://127.0.0.1:5555 --rank one", ["--rank one: must be a whole number"]),
    ("worker --connect tcp://127.0.0.1:5555 --threads 0", ["--threads 0: must be a whole number from 1 to 1024"]),
    ("worker", ["give --join FILE if the server has written a join file, else --connect ENDPOINT"]),
    (
        "worker --connect tcp://127.0.0.1:5 --join j",
        ["--connect tcp://127.0.0.1:5 and --join j: ", "leave one of the two"],
    ),
    ("worker --connect tcp://[::1]:5555", ["--connect tcp://[::1]:5555: IPv6 is not supported; give an IPv4 address"]),
    ("worker --connect tcp://*:5555", ["--connect tcp://*:5555: this machine knows no IPv4 address of *; correct it"]),
    ("worker --join nowhere", ["join file nowhere: No such file or directory; give the file that sapus server has"]),
    ("server --bind 127.0.0.1:5555", [f"--bind 127.0.0.1:5555: {ENDPOINT_FORM}"]),
    ("server --bind tcp://127.0.0.1", [f"--bind tcp://127.0.0.1: {ENDPOINT_FORM}"]),
    ("server --bind tcp://127.0.0.1:x", [f"--bind tcp://127.0.0.1:x: {PORT_RANGE}, or * for a free one"]),
    ("server --bind tcp://0.0.0.0:5555", ["--bind tcp://0.0.0.0:5555: other machines can connect; give --join-file"]),
    ("server --bind tcp://*:5555", ["--bind tcp://*:5555: other machines can connect", "or --insecure to admit"]),
    ("server --bind tcp://192.0.2.1:*", ["--bind tcp://192.0.2.1:*: other machines can connect"]),
    ("server --bind tcp://[::1]:5555", ["--bind tcp://[::1]:5555: IPv6 is not supported; give an IPv4 address"]),
    ("server --bind tcp://::1:5555", [f"--bind tcp://::1:5555: {ENDPOINT_FORM}"]),
    (
        "server --bind tcp://node1:55",
        ["node1 is neither an IPv4 address nor an interface of this machine (", " lo", "tcp://0.0.0.0:55 for all"],
    ),
    ("server --bind tcp://1.2.3:5555", ["1.2.3 is neither an IPv4 address nor an interface of this machine"]),
    ("server --insecure --join-file j", ["--insecure and --join-file j: leave one of the two out"]),
    ("server --join-file /dev/null", ["--join-file /dev/null: it exists already", "remove it, or choose another name"]),
    ("server --join-file no/j", ["--join-file no/j: there is no folder no; create it, or choose another"]),
    ("server --join-file /dev/null/j", ["--join-file /dev/null/j: there is no folder /dev/null"]),
    ("server --join-expires 2h", ["--join-expires 2h: there is no join file; give --join-file FILE, or leave it out"]),
    ("server --join-file j --join-expires soon", ["--join-expires soon: must be a number with a unit (s, min, h, d)"]),
    ("server --join-file j --join-expires 24", ["--join-expires 24: must be a number with a unit", "as in 24h"]),
    ("server --join-file j --join-expires 0s", ["--join-expires 0s: must be from 1s to 366d"]),
    ("server --join-file j --join-expires 367d", ["--join-expires 367d: must be from 1s to 366d"]),
    (
        "server --advertise tcp://a:5",
        ["--advertise tcp://a:5: must be a host name or an IPv4 address and nothing else"],
    ),
    ("server --advertise ::1", ["--advertise ::1: must be a host name or an IPv4 address and nothing else"]),
    ("server --advertise 0.0.0.0", ["--advertise 0.0.0.0: must be a host name or an IPv4 address and nothing else"]),
    # Files.
    ("show nowhere", ["no run in nowhere", "give the folder of a run, as in results/NAME"]),
    ("show .", ["no run in .", "there is no run.json", "give the folder of a run"]),
    ("show /dev/null", ["no run in /dev/null", "give the folder of a run"]),
    ("show", ["Missing argument", "see sapus show --help"]),
    ("run --results /dev/null", ["cannot write results to /dev/null", "/dev/null is not a directory"]),
    ("run --results /dev/null/below", ["cannot write results to /dev/null/below", "/dev/null is not a directory"]),
    # Classes.
    ("run -s nowhere:Any", ["strategy 'nowhere:Any': cannot import nowhere: ModuleNotFoundError"]),
    ("run -s os:Nothing", ["strategy 'os:Nothing': the module os has no class Nothing; correct the name"]),
    ("strategies os:", ["'os:' is not of the form package.module:Class"]),
    ("run -s :Any", ["':Any' is not of the form package.module:Class"]),
    ("run -s .local:Any", ["'.local:Any' is not of the form package.module:Class"]),
    ("run -s os:path", ["path is not a strategy: it is not a class"]),
    ("run -s os:PathLike", ["PathLike is not a strategy", "put @dataclass(frozen=True) above the class"]),
    # The line itself.
    ("run --frobnicate", ["No such option: --frobnicate", "see sapus run --help"]),
    ("run --worker 3", ["No such option: --worker", "--workers"]),
    ("run --steps", ["'--steps' requires an argument", "--help"]),
    ("run extra", ["unexpected extra argument", "extra", "see sapus run --help"]),
    ("runn", ["No such command 'runn'", "sapus --help"]),
    ("--frob", ["No such option: --frob", "see sapus --help"]),
]

FAULTY_STRATEGIES = {
    "Mutable": "it is not a frozen dataclass (put @dataclass(frozen=True) above the class)",
    "NoPush": "it has no method on_push",
    "Narrow": "its method after_step does not take the arguments (self, w: 'WorkerState', step: 'Step')",
    "Hidden": "name 'Missing' is not defined; import what its hyper-parameters are annotated with",
    "Exits": "cannot import exits: SystemExit: 3",
    "Broken": "cannot import broken: SyntaxError: '(' was never closed",
    "TwoLines": "cannot import two_lines: ValueError: one two",
}

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from sapus_cli.strategy import ServerState, Strategy

class _Base(Strategy):
    def init_worker(self, x0, worker): return None
    def after_step(self, w, step): return None
    def init_server(self, x0, n_workers): return ServerState(x0)

@dataclass
class Mutable(_Base):
    def on_push(self, s, msg): return ()

@dataclass(frozen=True)
class NoPush(_Base):
    pass

@dataclass(frozen=True)
class Narrow(_Base):
    def after_step(self, w): return None
    def on_push(self, s, msg): return ()

@dataclass(frozen=True)
class Hidden(_Base):
    h: Missing = 3
    def on_push(self, s, msg): return ()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an empty cache elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SAPUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def line_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong call gets."""
    code = run_line(words)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("sapus: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err.removeprefix("sapus: ").rstrip("\n")


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_one_line_says_what_is_wrong_and_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, said: list[str]
) -> None:
    text = line_of(line.split(), capsys)
    assert [part for part in said if part not in text] == [], text
    assert list(here.iterdir()) == []
    assert not (here.parent / "cache").exists()


@pytest.mark.parametrize("name", FAULTY_STRATEGIES)
def test_a_class_that_is_no_strategy_is_told_why(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    own = here.parent / "own"
    own.mkdir()
    (own / "mine.py").write_text(MINE)
    (own / "exits.py").write_text("raise SystemExit(3)\n")
    (own / "broken.py").write_text("x = (\n")
    (own / "two_lines.py").write_text("raise ValueError('one\\ntwo')\n")
    monkeypatch.syspath_prepend(own)
    module = {"Exits": "exits", "Broken": "broken", "TwoLines": "two_lines"}.get(name, "mine")
    text = line_of(["run", "-s", f"{module}:{name}"], capsys)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert FAULTY_STRATEGIES[name] in text
    assert name in text
    assert list(here.iterdir()) == []


def test_the_folder_of_the_results_is_checked_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "file"
    file.touch()
    assert f"{file} is not a directory" in line_of(["run", "--results", str(file / "below" / "deep")], capsys)
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_results_that_may_not_be_written_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = here / "closed"
    closed.mkdir(mode=0o500)
    text = line_of(["run", "--results", "closed/results"], capsys)
    assert f"{closed} may not be written; choose another folder" in text
    assert list(closed.iterdir()) == []


@pytest.fixture
def warm(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `here`, with the digits in the cache, for what only a child process can find."""
    monkeypatch.setenv("SAPUS_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
    prepare("digits", None, download=False)
    return here


def test_more_workers_than_samples(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_of(["run", "--workers", "5000"], capsys)
    assert text == "5000 workers cannot share 1438 training samples; give 1 to 1438 workers"
    assert list(warm.iterdir()) == []


def test_an_unknown_torchvision_model(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_of(["run", "--model", "torchvision:resnet17"], capsys)
    assert "unknown torchvision model 'resnet17'; did you mean resnet1" in text
    assert list(warm.iterdir()) == []


def test_a_port_that_is_occupied(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for words in (["run", "--port", str(port)], ["server", "--bind", f"tcp://127.0.0.1:{port}"]):
            text = line_of([*words, "--workers", "1"], capsys)
            assert text == (
                f"cannot listen at tcp://127.0.0.1:{port}: Address already in use (addr='tcp://127.0.0.1:{port}'); "
                "choose another port, or leave it out"
            )
    assert list(warm.iterdir()) == []


def test_an_address_that_is_another_machine_s(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_of(["server", "--bind", "tcp://192.0.2.1:*", "--join-file", "j", "--workers", "1"], capsys)
    assert text.startswith("cannot listen at tcp://192.0.2.1:*: Cannot assign requested address")
    assert text.endswith("; give an address of this machine")
    assert list(warm.iterdir()) == []


def test_data_that_are_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["run", "--dataset", "mnist", "--workers", "1"]
    assert line_of(wanted, capsys).endswith("read from files; give their folder with --data-dir")
    gone = line_of([*wanted, "--data-dir", "gone"], capsys)
    assert f"folder {here / 'gone'} does not exist; correct --data-dir, or give --download" in gone
    empty = here.parent / "empty"
    empty.mkdir()
    lacks = line_of([*wanted, "--data-dir", str(empty)], capsys)
    assert f"{empty} lacks MNIST/raw/train-images-idx3-ubyte and 3 more; correct --data-dir" in lacks
    assert list(here.iterdir()) == list(empty.iterdir()) == []
    assert not (here.parent / "cache").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_of(["run", "--device", "cuda", "--workers", "1"], capsys)
    assert text == "--device cuda: torch sees no CUDA device here; use --device cpu or auto"
    assert list(here.iterdir()) == []
    assert not (here.parent / "cache").exists()


def test_names_of_run_folders(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["run", "--workers", "1", "--name"]
    assert line_of([*one, "a/b"], capsys) == "run name 'a/b': must be one folder name, without a slash"
    assert line_of([*one, ".."], capsys) == "run name '..': must be one folder name, without a slash"
    assert list(warm.iterdir()) == []
    taken = warm / "results" / "taken"
    taken.mkdir(parents=True)
    assert line_of([*one, "taken"], capsys) == "the run results/taken exists already; choose another name"
    assert list(taken.iterdir()) == []


def test_the_command_itself(tmp_path: Path) -> None:
    for words, said in (
        (["run", "--model", "cn"], "did you mean cnn?"),
        (["run", "--steps", "nan"], "sapus: --steps nan: must be a whole number\n"),
        (["runn"], "No such command 'runn'"),
    ):
        done = sapus(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("sapus: ")
        assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback_and_keeps_the_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--debug", "run", "-s", "bps"], ["run", "-s", "bps", "--debug"]):
        assert run_line(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):")
        assert "UserError: unknown strategy 'bps'" in err.splitlines()[-1]
    assert list(here.iterdir()) == []


def test_ctrl_c_before_the_run_is_silent(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sapus_cli.traces.check_results", interrupted)
    assert run_line(["run"]) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "")
