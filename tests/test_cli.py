"""The command line as a reader meets it: help, version, completion, the list of strategies."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from processes import sapus

import sapus_cli
from sapus_cli.cli import run_line
from sapus_cli.commands.view import say_json
from strategies import REGISTRY

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("torch", "torchvision", "polars", "zmq", "sklearn", "matplotlib", "numpy", "scipy")
RUN_OPTIONS = (
    *("--strategy", "--param", "--workers", "--seed", "--results", "--name", "--quiet", "--json"),
    *("--dataset", "--model", "--data-dir", "--download", "--partition"),
    *("--batch-size", "--optimizer", "--lr", "--momentum", "--weight-decay", "--device", "--threads", "--wire"),
    *("--epochs", "--steps", "--seconds", "--target-accuracy", "--eval-every"),
    *("--cluster", "--step-time", "--link", "--slow", "--pause", "--fault", "--wire-scale"),
)
FAULT_OPTIONS = ("--worker-timeout", "--min-workers", "--max-restarts", "--checkpoint-every")
COMMANDS = {
    "run": [*RUN_OPTIONS, *FAULT_OPTIONS, "--port", "--transport", "--resume"],
    "simulate": [*RUN_OPTIONS, "--seeds", "--jobs"],
    "suite": ["--jobs", "--dry-run", "--only", "--clock", "--retry", "--results", "--quiet"],
    "validate": [
        *(
            option
            for option in RUN_OPTIONS
            if option not in {"--strategy", "--param", "--cluster", "--name", "--quiet"}
        ),
        "--strategies",
    ],
    "calibrate": ["--cluster", "--output"],
    "server": [*RUN_OPTIONS, *FAULT_OPTIONS, "--bind", "--join-file", "--join-expires", "--advertise", "--insecure"],
    "worker": ["--connect", "--join", "--rank", "--data-dir", "--threads"],
    "show": ["--json"],
    "compare": ["--target", "--baseline", "--metrics", "--sort", "--pivot", "--format", "--force"],
    "plot": ["--x", "--target", "--baseline", "--output", "--format", "--theme", "--width", "--window", "--show"],
    "report": ["--target", "--baseline", "--output"],
    "export": ["--to", "--output"],
    "strategies": ["--format"],
    "doctor": ["--results", "--workers", "--endpoint", "--json"],
}


@pytest.fixture(params=[80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of the terminal."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def page(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a right call prints."""
    assert run_line(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.rstrip() for line in out.splitlines()]


def test_help_names_every_command(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(["--help"], capsys)
    assert page([], capsys) == lines, "no command at all asks for help"
    assert max(map(len, lines)) <= width
    for command in COMMANDS:
        assert any(re.match(rf"│ {command} +[A-Z]", line) for line in lines), command
    for option in ("--debug", "--version", "--install-completion", "--show-completion"):
        assert any(option in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_its_options_and_examples(
    width: int, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    lines = page([command, "--help"], capsys)
    assert page([command, "-h"], capsys) == lines
    assert max(map(len, lines)) <= width
    shown = {match[1] for line in lines if (match := re.match(r"│ (?:\* |  )? *(--[a-z-]+) ", line))}
    assert shown == {*COMMANDS[command], "--help"}
    heading = next(i for i, line in enumerate(lines) if line.strip() in {"Example:", "Examples:"})
    examples = [line.strip() for line in lines[heading + 1 :] if line.strip()]
    assert examples
    assert all(example.startswith("sapus ") and example.count(f"sapus {command}") <= 1 for example in examples), (
        examples
    )


def test_the_examples_of_run_are_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(page(["run", "--help"], capsys))
    assert "sapus run --strategy local-sgd --param h=4 --workers 8\n" in text
    assert "sapus run -s my_module:MyStrategy --json\n" in text


@pytest.mark.usefixtures("width")
def test_defaults_and_kinds_of_values_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(" ".join(page(["run", "--help"], capsys)).replace("│", " ").split())
    assert "--workers -w N Number of worker processes. [default: 8]" in text
    assert "--param -p KEY=VALUE A hyper-parameter" in text
    assert "[default: (120 for digits, 30 for mnist5k, 3 for pydoc, else 10)]" in text
    assert "[default: 0.1]" in text
    assert "sgd|adamw" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(["--version"], capsys) == [f"sapus {sapus_cli.__version__}"]


@pytest.mark.parametrize("words", [[], ["--help"], ["run", "--help"], ["strategies", "--help"]])
def test_the_command_line_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from sapus_cli.cli import run_line\n"
        "words = sys.argv[1:]\n"
        "code = run_line(words) if words else 0\n"
        f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    disabled = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = sapus("--show-completion", shell, cwd=tmp_path, **disabled)
    assert script.returncode == 0, script.stderr
    assert "_SAPUS_COMPLETE=complete_" in script.stdout
    assert "sapus" in script.stdout


def test_completion_of_commands_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        done = sapus(
            cwd=tmp_path,
            _SAPUS_COMPLETE="complete_bash",
            COMP_WORDS=line,
            COMP_CWORD=str(len(line.split(" ")) - 1),
        )
        return done.stdout.split()

    assert {"server", "show", "simulate", "strategies", "suite"} == set(completed("sapus s"))
    assert "--strategy" in completed("sapus run --st")


def test_the_list_of_strategies_is_whole_and_legible(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(["strategies"], capsys)
    assert max(map(len, lines)) <= width
    first_words = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert first_words == ["strategy", *sorted(REGISTRY)]
    (local,) = [line for line in lines if line.startswith("local-sgd ")]
    assert "Local SGD: every worker takes" in local
    assert local.endswith("h=16")


def test_the_page_of_a_strategy(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(["strategies", "local-sgd"], capsys)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.startswith("local-sgd Local SGD: every worker takes H local steps, then all average.")
    assert "Rule: x <- x + (1/N) sum_i u_i" in text
    assert 'Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019' in text
    assert "--param type default meaning h int 16 the update interval H" in text


@pytest.mark.parametrize("name", REGISTRY)
def test_every_page_tells_rule_source_and_each_hyper_parameter(capsys: pytest.CaptureFixture[str], name: str) -> None:
    lines = page(["strategies", name], capsys)
    assert any(line.startswith("Rule: ") for line in lines)
    assert any(line.startswith("Source: ") for line in lines)
    if "It has no hyper-parameters." in lines:
        return
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("--param")) + 1 :]
    rows = [line for line in table if line and not line.startswith(" ")]
    assert rows
    assert all(len(row.split()) > 4 for row in rows), "name, type, default and a meaning"


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"loss": math.nan, "steps": 3})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": None, "steps": 3}
