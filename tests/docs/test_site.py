"""The built site: no network, and no broken links or anchors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import blocks

FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
CANONICAL = {"canonical", "index", "search", "next", "prev", "author", "copyright"}


class Page(HTMLParser):
    """What a page fetches (addresses), where it links to, its ids and the names of its elements."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.anchors |= {found[name] or "" for name in ("id", "name") if name in found}
        address = found.get(FETCHED.get(tag, ""))
        if address and not (tag == "link" and found.get("rel") in CANONICAL):
            self.fetched.append(address)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert len(fetched) > 20
    assert [address for address in fetched if re.match(r"(\w+:)?//", address)] == []
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    urls = [url for style in styles for url in re.findall(r"url\(\s*[\"']?([^\"')]+)", style)]
    assert [url for url in urls if re.match(r"(?!data:)(\w+:)?//|https?:", url)] == []
    assert not any("@import" in style for style in styles)
    assert not list(site.rglob("*.woff*"))


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in {*page.links, *page.fetched}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                broken.append((str(file.relative_to(site)), link))
    assert broken == []


def test_pictures_have_a_form_for_the_dark(site: Path) -> None:
    page = (site / "docs/index.html").read_text()
    for name in ("overview", "run"):
        for scheme, file in (("light", f"{name}."), ("dark", f"{name}-dark.")):
            tag = next(one for one in re.findall(r"<img[^>]*>", page) if f"/{file}" in one)
            assert f"only-{scheme}" in tag
            (source,) = re.findall(r'src="([^"]+)"', tag)
            assert (site / "docs" / source).resolve().is_file()


def test_code_has_a_button_that_copies_it(site: Path) -> None:
    pytest.importorskip("sphinx_copybutton")
    assert "copybutton.js" in (site / "docs/quickstart.html").read_text()


def test_formulas_are_written_out(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "docs" / "explanation" / "algorithm.html"]
    assert page.tags.count("math") >= 3
    assert not any("\\frac" in file.read_text(encoding="utf-8") for file in pages)


def test_files_that_are_no_pages_come_along(site: Path, pages: dict[Path, Page]) -> None:
    links = pages[site / "examples" / "README.html"].links
    files = {link.rpartition("/")[2] for link in links if "_downloads" in link}
    assert {"edge_client.py", "own_algorithm.py", "RUN.yaml"} <= files


def test_the_page_of_the_commands_is_written_by_the_program(site: Path) -> None:
    page = (site / "docs" / "reference" / "cli.html").read_text(encoding="utf-8")
    assert "fedone retune" in page
    assert "--cap" in page


def test_the_root_leads_to_the_first_page(site: Path, pages: dict[Path, Page]) -> None:
    assert pages[site / "index.html"].links == ["docs/index.html"]


ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_run(tmp_path: Path) -> None:
    page = blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    (run,) = [block.text for block in page if block.language == "yaml"]
    (tmp_path / "run.yaml").write_text(run, encoding="utf-8")
    (tmp_path / "fedone_sdk").symlink_to(ROOT / "fedone_sdk")  # where the data lies in a checkout
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    (commands,) = [block.text for block in page if block.language == "bash"]
    command = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "training queries" in done.stdout
    assert "Tuned prompt" in done.stdout
    assert re.search("over (no prompt|a label bias)", done.stdout)
    assert json.loads(done.stdout.splitlines()[-1])["label"] in ("0", "1")
    assert {"report.html", "prompt.json"} <= {file.name for file in tmp_path.iterdir()}
    assert (tmp_path / ".fedone" / "feedback.db").is_file()
