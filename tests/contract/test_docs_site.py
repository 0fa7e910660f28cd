"""The documentation as a site: it builds strictly, is whole in itself, and its links hold."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
# What a browser fetches for a page without being asked to.
_FETCHED = {
    ("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"),
    ("video", "src"), ("audio", "src"), ("object", "data"), ("image", "href"), ("use", "href"),
}  # fmt: skip
# Fetched by none of them: a page's own address, and where to go next.
_NOT_FETCHED = {"canonical", "prev", "next"}


@dataclass
class Page(HTMLParser):
    """The references of one page: what it fetches and links to, and the ids that links can name."""

    path: Path
    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        for name, value in given.items():
            if (tag, name) in _FETCHED and given.get("rel") not in _NOT_FETCHED:
                self.fetched.append(value)
            if name == "style":
                self.fetched += _fetched_by_css(value)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.fetched += _fetched_by_css(data)


def _fetched_by_css(text: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
    return [first or second for first, second in found]


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def fetched_from_elsewhere(page: Page) -> list[str]:
    return [address for address in page.fetched if is_elsewhere(address)]


def broken_links(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """Links within the site that lead nowhere."""
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        anchor = unquote(parts.fragment)
        has_anchor = not anchor or path not in pages or anchor in pages[path].ids
        if not (path.is_file() and has_anchor):
            yield f"{page.path.name}: {link}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        if os.environ.get("CI"):
            pytest.fail("mkdocs is not installed: pip install -e '.[docs]'")
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site").resolve()
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    """All pages by path, except 404.html: that page does not know at which address it is shown."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_no_page_fetches_anything_from_another_host(pages) -> None:
    assert len(pages) > 20
    found = {page.path.name: fetched_from_elsewhere(page) for page in pages.values()}
    assert {name: addresses for name, addresses in found.items() if addresses} == {}


def test_no_style_fetches_anything_from_another_host(site) -> None:
    styles = {path.name: _fetched_by_css(path.read_text()) for path in site.rglob("*.css")}
    assert styles
    assert [url for urls in styles.values() for url in urls if is_elsewhere(url)] == []


def test_all_links_and_their_anchors_hold(pages) -> None:
    assert [link for page in pages.values() for link in broken_links(page, pages)] == []


def test_everything_that_pages_fetch_is_there(pages) -> None:
    missing = [
        f"{page.path.name}: {address}"
        for page in pages.values()
        for address in page.fetched
        if not address.startswith(("data:", "#"))
        and not (page.path.parent / urlsplit(address).path).is_file()
    ]
    assert missing == []


def test_every_drawing_is_drawn(pages) -> None:
    """Mermaid is drawn by a script of another host, and stays text where that is not fetched."""
    texts = {path.name: path.read_text() for path in pages}
    assert [name for name, text in texts.items() if "mermaid" in text] == []
    drawings = {"concepts.html": 3, "failover.html": 1, "scheduling.html": 1, "tls.html": 1}
    assert {name: texts[name].count('class="drawing"') for name in drawings} == drawings


def test_search_finds_words_of_the_references(site) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for word in ("hand_back", "x-penstock-session", "max_new_tokens", "POOLING_MEAN"):
        assert word in index


def test_references_name_every_route_and_every_message(site) -> None:
    http, grpc = (Page(site / f"{name}-reference.html") for name in ("http", "grpc"))
    assert {"post-v1chatcompletions", "get-metrics", "chatanswer"} <= http.ids
    assert {"generaterequest", "finishreason", "drain", "loadreport"} <= grpc.ids


def test_a_page_that_breaks_these_rules_is_found_out(tmp_path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<img src="//cdn.example.com/a.png"><script src="https://cdn.example.com/a.js"></script>'
        "<style>@import 'https://cdn.example.com/a.css'; p { color: url(//e.com/b.png) }</style>"
        '<p id="there"></p><a href="#there"></a><a href="#gone"></a><a href="other.html"></a>'
    )
    page = Page(path)
    assert len(fetched_from_elsewhere(page)) == 4
    assert list(broken_links(page, {path: page})) == ["page.html: #gone", "page.html: other.html"]
