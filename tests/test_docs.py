"""What the pages say can be done is done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import sapus

from strategies import REGISTRY

if TYPE_CHECKING:
    from inside import Inside

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the strategy of CONTRIBUTING.md, from which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half.py").write_text(blocks("CONTRIBUTING.md", "python")[0])
    return tmp_path


@pytest.mark.slow
def test_the_strategy_in_30_lines_has_30_lines_and_trains(half: Path, inside: Inside) -> None:
    lines = [line for line in (half / "half.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
    done = inside("run", "-s", "half:HalfAsync", "--param", "h=8", "-w", "3", "--epochs", "40", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] > 0.8


def test_its_page_and_its_range_are_shown(half: Path) -> None:
    page = sapus("strategies", "half:HalfAsync", cwd=half)
    assert "made up for this page" in page.stdout
    wrong = sapus("run", "-s", "half:HalfAsync", "--param", "h=0", cwd=half)
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == "sapus: strategy half:HalfAsync: h = 0: must be a whole number of at least 1"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_of_strategies_is_what_its_command_prints(tmp_path: Path) -> None:
    page = (ROOT / "docs/strategies.md").read_text()
    command = re.fullmatch(r"<!-- Made by: sapus (.+) > docs/strategies.md -->", page.splitlines()[0])
    assert command
    done = sapus(*command[1].split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == page, f"run: sapus {command[1]} > docs/strategies.md"
    for name in REGISTRY:
        assert f"| [`{name}`](#{name}) |" in page
        assert f"\n## {name}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}, "a bar in a cell is not escaped"


def test_the_markdown_of_one_strategy_is_its_section(tmp_path: Path) -> None:
    done = sapus("strategies", "ssp", "--format", "markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## ssp\n")
    assert done.stdout in (ROOT / "docs/strategies.md").read_text()


def test_the_first_screen_shows_what_its_first_command_prints() -> None:
    page = (ROOT / "README.md").read_text()
    first, second = re.findall(r"^python -m pip install .*$", page, re.MULTILINE)[:2]
    assert first.endswith("sapus run --strategy sapus --workers 8")
    assert second.endswith("pytest")
    shown = re.search(r"Run folder: results/\S+?_([a-z-]+)_w(\d+)_s0", page)
    assert shown is not None
    assert shown.groups() == ("sapus", "8")
