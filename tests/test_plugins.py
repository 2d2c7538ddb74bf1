"""Strategies of third parties: installed as a plugin, or named as a class in the working directory."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from processes import sapus

from strategies import REGISTRY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

STRATEGY = '''\
"""A strategy that is no part of sapus."""

from __future__ import annotations

from dataclasses import dataclass

from sapus_cli.strategy import Push, Reply, ServerState, Strategy, require_whole


@dataclass(frozen=True)
class Halves(Strategy[None, ServerState]):
    """Halves: half of every update is added, and [nobody] waits for anybody.

    Rule: x <- x + u / 2.

    Source: made up for this test.

    Hyper-parameters:
        h: local steps between two pushes, in [1, inf).
    """

    h: int = 2

    def __post_init__(self) -> None:
        require_whole("h", self.h, 1)

    def init_worker(self, x0, worker):
        return None

    def after_step(self, w, step):
        return Push() if step.k >= self.h else None

    def init_server(self, x0, n_workers):
        return ServerState(x0)

    def on_push(self, s, msg):
        s.x.add_(msg.vector, alpha=0.5)
        return (Reply(msg.worker, info={"weight": 0.5}),)
'''
GOOD = {"halves": "sapus_halves.rule:Halves"}
BROKEN = {
    "raises": "sapus_halves.raises:Any",
    "no-module": "sapus_halves.gone:Any",
    "no-class": "sapus_halves.rule:Whole",
    "no-strategy": "sapus_halves.rule:ServerState",
    "no-form": "sapus_halves",
    "bsp": "sapus_halves.rule:Halves",
}
SAID = {
    "raises": "sapus: strategy 'raises': cannot import sapus_halves.raises: RuntimeError: no licence",
    "no-module": "sapus: strategy 'no-module': cannot import sapus_halves.gone: ModuleNotFoundError: "
    "No module named 'sapus_halves.gone'",
    "no-class": "sapus: strategy 'no-class': the module sapus_halves.rule has no class Whole; correct the name",
    "no-strategy": "sapus: strategy 'no-strategy': ServerState is not a strategy: it is not a frozen dataclass "
    "(put @dataclass(frozen=True) above the class)",
    "no-form": "sapus: strategy 'no-form': 'sapus_halves' is not of the form package.module:Class",
}
TEN_STEPS = ("--workers", "2", "--steps", "10", "--model", "mlp", "--json")


def wheel(folder: Path, points: dict[str, str]) -> Path:
    """A distribution as a third party would publish it."""
    info = "sapus_halves-1.0.dist-info"
    files = {
        "sapus_halves/__init__.py": "",
        "sapus_halves/rule.py": STRATEGY,
        "sapus_halves/raises.py": "raise RuntimeError('no licence')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: sapus-halves\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[sapus.strategies]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()),
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    archive = folder / "sapus_halves-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path, text in files.items():
            zipped.writestr(path, text)
    return archive


def install(folder: Path, points: dict[str, str]) -> str:
    """Install the distribution with pip. Returns the folder to put on PYTHONPATH."""
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--no-compile", "--target", str(target), str(wheel(folder, points))]
    subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return str(target)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a plugin that works is installed."""
    return install(tmp_path_factory.mktemp("good"), GOOD)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where plugins that do not work are installed, and one that takes the name of a shipped strategy."""
    return install(tmp_path_factory.mktemp("broken"), BROKEN)


def test_a_plugin_is_listed_and_described(tmp_path: Path, good: str) -> None:
    listed = sapus("strategies", cwd=tmp_path, PYTHONPATH=good, COLUMNS="80")
    assert (listed.returncode, listed.stderr) == (0, "")
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip() and not line.startswith(" ")]
    assert names == ["strategy", *sorted({*REGISTRY, "halves"})]
    (row,) = [line for line in listed.stdout.splitlines() if line.startswith("halves ")]
    assert row.rstrip().endswith("h=2")

    shown = sapus("strategies", "halves", cwd=tmp_path, PYTHONPATH=good, COLUMNS="100")
    assert "half of every update is added, and [nobody] waits" in shown.stdout, "text in brackets is no markup"
    assert "made up for this test." in shown.stdout
    assert "in [1, inf)" in shown.stdout


def test_a_plugin_trains(tmp_path: Path, good: str) -> None:
    done = sapus("run", "--strategy", "halves", *TEN_STEPS, cwd=tmp_path, PYTHONPATH=good)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["pushes"]) == ("finished", 10)
    record = json.loads((tmp_path / summary["run"] / "run.json").read_text())
    assert record["strategy"] == {
        "name": "halves",
        "class": "sapus_halves.rule:Halves",
        "hyper_parameters": {"h": 2},
    }
    wrong = sapus("run", "--strategy", "halves", "-p", "h=0", cwd=tmp_path, PYTHONPATH=good)
    assert wrong.returncode == 2
    assert wrong.stderr == "sapus: strategy halves: h = 0: must be a whole number of at least 1\n"


def test_broken_plugins_are_named_and_break_nothing_else(tmp_path: Path, broken: str) -> None:
    listed = sapus("strategies", cwd=tmp_path, PYTHONPATH=broken)
    assert listed.returncode == 0
    assert sorted(listed.stderr.splitlines()) == sorted(SAID.values())
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip() and not line.startswith(" ")]
    assert names == ["strategy", *sorted(REGISTRY)]

    for name, said in SAID.items():
        one = sapus("run", "--strategy", name, cwd=tmp_path, PYTHONPATH=broken)
        assert (one.returncode, one.stdout, one.stderr) == (2, "", said + "\n")
    assert list(tmp_path.iterdir()) == []


def test_a_shipped_name_is_not_shadowed(tmp_path: Path, broken: str) -> None:
    shown = sapus("strategies", "bsp", cwd=tmp_path, PYTHONPATH=broken)
    assert shown.returncode == 0
    assert shown.stdout.startswith("bsp  Bulk-synchronous: ")
    assert shown.stdout == sapus("strategies", "bsp", cwd=tmp_path).stdout


def test_a_class_in_the_working_directory_trains_whatever_is_installed(tmp_path: Path, broken: str) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rule.py").write_text(STRATEGY)
    words = ("run", "--strategy", "mine.rule:Halves", "-p", "h=5", *TEN_STEPS)
    done = sapus(*words, cwd=tmp_path, PYTHONPATH=broken)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["pushes"] == 4
    assert summary["run"].endswith("_mine.rule-Halves_w2_s0")
    assert done.stderr == ""
