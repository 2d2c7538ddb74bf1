"""Figures of the pages are made again by the command beside them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
LARGEST_PNG = 200_000


def drawn(folder: Path) -> tuple[str, dict[str, bytes]]:
    """What the figure's command prints, and the files it makes."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(FIGURES / "marginal_value.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_figure_of_the_trigger_is_made_again_to_the_byte(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as side_by_side:
        (printed, files), again = side_by_side.map(drawn, (tmp_path / "once", tmp_path / "twice"))
    assert printed == "c = 4: H = 18\nc = 20: H = 32\n"
    assert again == (printed, files)
    assert set(files) == {"marginal_value.svg", "marginal_value.png"}
    assert len(files["marginal_value.png"]) < LARGEST_PNG
    for name in files:
        assert (FIGURES / name).is_file(), name


def test_its_page_names_the_same_intervals() -> None:
    page = " ".join((FIGURES.parent / "algorithm.md").read_text().split())
    assert "For c = 4 the trigger alone fires at H = 18, for c = 20 at H = 32;" in page
