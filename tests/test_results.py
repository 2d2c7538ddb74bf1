"""What docs/results.md shows is what its commands make of the runs that are kept."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sapus_cli import suite, traces

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "figures"))

from results import PAGE, TABLE, around, words_of  # noqa: E402 - not a package

if TYPE_CHECKING:
    from inside import Inside

REFERENCE = "results/reference/"
SMALL = ROOT / REFERENCE / "paper-small"
TABLES = [(found[1], found[0]) for found in TABLE.finditer(PAGE.read_text())]
KEPT = [(command, text) for command, text in TABLES if REFERENCE in command]


@pytest.mark.parametrize(("command", "text"), KEPT, ids=range(len(KEPT)))
def test_a_table_is_what_its_command_prints(
    command: str, text: str, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = inside(*words_of(command))
    assert done.returncode == 0, done.stderr
    assert around(command, done.stdout) == text


def test_the_runs_that_are_kept_are_those_that_the_suite_asks_for() -> None:
    page = ROOT / "experiments" / "paper-small.toml"
    rates = set(tomllib.loads(page.read_text())["tune_lr"])
    asked = [suite.as_recorded(one.config) for one in suite.read(str(page)).asked]
    kept = [traces.config_of(traces.read_run(path.parent)) for path in SMALL.glob("*/run.json")]
    assert {config["lr"] for config in kept} <= rates
    assert sorted(map(_but_lr, kept)) == sorted(map(_but_lr, asked))


def _but_lr(config: dict[str, Any]) -> str:
    return json.dumps(config | {"lr": None}, sort_keys=True)
