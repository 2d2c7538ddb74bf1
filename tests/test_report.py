"""The HTML page: whole, self-contained, legible without its pictures, the same bytes each time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs import make_run

from sapus_cli import figures
from sapus_cli.cli import run_line

SERVER = ((0.0, 0.0, 0, 0), (5.0, 0.5, 1_000_000_000, 500_000_000), (10.0, 2.5, 2_000_000_000, 1_000_000_000))
QUICK = ((0.0, 0.0), (2.5, 0.5), (5.0, 1.0))
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would find: elements in order, their texts, what is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if len(dict(attrs)) < len(attrs):
            self.faults.append(f"{tag} has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        """All words."""
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups, names that HTML would take for tags, a run that is not finished, and in `page.html` their report."""
    folder = tmp_path_factory.mktemp("report")
    host = {"versions": {"torch": "2.0"}, "host": {"cpu": "Fast & <Furious>"}}
    make_run(folder / "r" / "a", "bsp", server=SERVER, staleness=[0, 1], environment=host)
    make_run(folder / "r" / "b", "asp", evals=QUICK, server=SERVER, staleness=[0], config={"lr": 0.2})
    make_run(folder / "r" / "c", "m:<X>", evals=QUICK, status="failed", failure="no <space> left")
    assert run_line(["report", str(folder / "r"), "-o", str(folder / "out" / "page.html"), "--target", "50%"]) == 0
    return folder


@pytest.fixture(scope="module")
def source(folder: Path) -> str:
    """The page as it stands in its file."""
    return (folder / "out" / "page.html").read_text()


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    """The page as a browser finds it."""
    return Page(source)


@pytest.fixture
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of figure only."""
    monkeypatch.setattr(figures, "KINDS", {"loss": "Test loss"})


def test_the_page_is_whole_and_needs_nothing_else(page: Page, source: str) -> None:
    assert page.open == []
    assert page.faults == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "img", "iframe", "object"}
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target.startswith("#")
            assert target == "#" or target[1:] in ids
    assert set(re.findall(r"https?://[^\s\"]+", source)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert all(name in ids for name in re.findall(r"url\(#([^)]+)\)", source))
    assert "@import" not in source


def test_it_can_be_read_without_seeing_the_pictures(page: Page) -> None:
    pictures = page.all("svg")
    assert len(pictures) == len(page.all("figure")) == len(page.all("figcaption"))
    assert len(pictures) == len(figures.KINDS) - 2, "neither weights nor scaling"
    for picture in pictures:
        assert picture["role"] == "img"
        assert len(picture["aria-label"] or "") > 40
    assert page.all("html") == [{"lang": "en"}]
    assert {attributes.get("scope") for attributes in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table"))
    levels = [tag for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels == ["h1", "h2", "h2", "h2", "h2"]


def test_it_says_what_compare_says(page: Page) -> None:
    text = page.text
    assert "target 50 %: as asked" in text
    assert "baseline: bsp" in text
    assert "asp 2.50 2.00 100.00" in text, "seconds to the target, speed-up, final accuracy"
    assert "lr differs: 0.2 (asp), 0.1 (bsp, m:<X>)" in text
    assert "c (failed)" in text
    assert "Training throughput" in text
    assert "Weight of every push: no weight of a push to draw" in text


@pytest.mark.usefixtures("_inside", "_quick")
def test_the_baseline_may_be_the_fastest_of_several() -> None:
    words = ["report", "r/a", "r/b", "-o", "best.html", "--target", "50%", "--baseline", "bsp, asp"]
    assert run_line(words) == 0
    text = Page(Path("best.html").read_text()).text
    assert "baseline, the fastest of bsp, asp in its setting: asp" in text
    assert "bsp 5.00 0.50 100.00" in text


def test_every_run_stands_there_with_what_it_was_made_with(page: Page) -> None:
    assert len(page.all("details")) == 3
    assert "environment.host.cpu Fast & <Furious>" in page.text
    assert "failure no <space> left" in page.text
    assert "config.lr 0.2" in page.text
    assert "environment.versions.torch 2.0" in page.text


def test_colours_follow_the_page(source: str) -> None:
    light, dark = re.findall(r"\{[^{}]*--c-d55e00|--c-222222: (#[0-9a-f]{6})", source)
    assert (light, dark) == ("#222222", "#cecece")
    used = set(re.findall(r"var\(--c-([0-9a-f]{6})\)", source))
    assert all(source.count(f"--c-{color}: #") == 2 for color in used)
    assert "prefers-color-scheme: dark" in source
    assert "@media print" in source


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 600])
def test_a_browser_lays_it_out_legibly(source: str, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    # The page has no script of its own; this one says how wide the page is, and how high each heading of a row.
    measure = (
        "<script>document.title = [document.documentElement.scrollWidth - innerWidth, ...Array.from("
        "document.querySelectorAll('.wide tbody th'), cell => cell.offsetHeight)].join(' ')</script></body>"
    )
    (tmp_path / "page.html").write_text(source.replace("</body>", measure))
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    command = [browser, *words, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    title = re.search(r"<title>([-0-9 ]+)</title>", done.stdout)
    assert title is not None
    beyond, *heights = map(int, title[1].split())
    assert beyond <= 0
    # Two lines at most: a name, or a cell beside it with its interval.
    assert heights
    assert max(heights) < 80


@pytest.mark.usefixtures("_inside", "_quick")
def test_one_group_alone_has_a_page_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["report", "r/a", "-o", "one.html"]) == 0
    text = Page(Path("one.html").read_text()).text
    assert "Nothing differs between the runs" in text
    assert "n=1, no interval: bsp" in text
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_inside")
def test_the_same_runs_give_the_same_page_in_another_process(source: str) -> None:
    code = "from sapus_cli.cli import run_line; run_line(['report', 'r', '-o', 'other.html', '--target', '0.5'])"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert Path("other.html").read_text() == source


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["r", "--target", "x"], "--target x: must be an accuracy"),
        (["r", "--baseline", "ssp"], "--baseline ssp: there is no such group"),
        (["r/a", "-o", "r/a/run.json/x.html"], "cannot write r/a/run.json/x.html: r/a/run.json is no folder"),
        (["r/a", "-o", "r"], "cannot write r: Is a directory; choose another place with --output"),
    ],
)
@pytest.mark.usefixtures("_inside", "_quick")
def test_wrong_calls_end_in_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["report", *words]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == ""
    assert last.startswith(f"sapus: {error}")
    assert not Path("report.html").exists()
