"""A real browser in front of a real router and its shards.

The browser is the system's Chromium; the Python package brings only what drives it. What holds for
every page is checked at the end of each test: nothing wrong in the browser's console, no violation
of the policy, and no request to any other host.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.processes import Router, Shard, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STEP_MS = "20"


def _missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


# Not of the session: while it runs no other test can have an event loop of its own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed")
    # The first has no windows at all, and takes half of the processor's time.
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        _missing("there is no chromium (Debian: apt-get install chromium-headless-shell)")
    # As root it has no sandbox.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@dataclass
class Fleet:
    """A router and two shards, which may be killed and started again."""

    folder: Path
    shards: list[Shard]
    router: Router
    started: list[Shard] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.router.url}/"

    def shard_at(self, address: str) -> Shard:
        return next(shard for shard in self.shards if shard.address == address)

    def start_again(self, dead: Shard) -> None:
        """Start a new shard on the dead one's port, as a supervisor would."""
        port = int(dead.address.rpartition(":")[2])
        again = _shard(self.folder / f"again-{len(self.started)}.log", port)
        self.shards[self.shards.index(dead)] = again
        self.started.append(again)
        again.wait_healthy()


def _shard(log_file: Path, port: int | None = None) -> Shard:
    return Shard(log_file, "--step-ms", STEP_MS, "--max-num-seqs", "8", port=port)


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("console")
    shards = [_shard(folder / f"shard-{index}.log") for index in range(2)]
    router = Router(folder / "router.log", [shard.address for shard in shards])
    fleet = Fleet(folder, list(shards), router)
    try:
        with running(*shards, router):
            yield fleet
    finally:
        for shard in fleet.started:
            shard.close()


class Watched:
    """The errors and warnings in a page's browser, and the URLs of the page's requests."""

    def __init__(self, page: Page, origin: str) -> None:
        self._page = page
        self.origin = origin
        self.problems: list[str] = []
        self.urls: list[str] = []
        # Patterns of the problems that a test causes: a browser reports each refusal of a request.
        self.expected: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", self._failed)
        page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _failed(self, error: Any) -> None:
        self.problems.append(str(error))

    def _asked(self, request: Any) -> None:
        self.urls.append(request.url)

    def close(self) -> None:
        """Stop watching the page."""
        self._page.remove_listener("console", self._heard)
        self._page.remove_listener("pageerror", self._failed)
        self._page.remove_listener("request", self._asked)

    def check(self) -> None:
        unexpected = [
            problem
            for problem in self.problems
            if not any(re.search(pattern, problem) for pattern in self.expected)
        ]
        assert unexpected == []
        assert [url for url in self.urls if not url.startswith(self.origin)] == []
        assert self.urls, "no request was seen at all"


def until(page: Page, holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Poll while the browser goes on. Its own way to wait for a function is eval, which the page's
    policy forbids.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        page.wait_for_timeout(50)


Opened = Callable[..., tuple["Page", Watched]]


def _new_page(browser: Browser, **options: Any) -> Page:
    """Return a page in a new context, in which nothing is stored and nothing cached."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(15_000)
    return context.new_page()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opened]:
    """Opens the console of a router in a context of its own."""
    watched: list[Watched] = []
    contexts = []

    def open_at(url: str, **options: Any) -> tuple[Page, Watched]:
        page = _new_page(browser, **options)
        contexts.append(page.context)
        watched.append(Watched(page, url.partition("#")[0]))
        page.goto(url)
        return page, watched[-1]

    yield open_at
    for context in contexts:
        context.close()
    for one in watched:
        one.check()


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Page]:
    """The page that is shared by tests that need no context of their own. It saves time: a new
    context with a page takes longer than most tests.
    """
    page = _new_page(browser)
    yield page
    page.context.close()


@pytest.fixture
def page(fleet: Fleet, tab: Page) -> Iterator[Page]:
    """The console, live: loaded anew, and with nothing that a test before has stored."""
    watched = Watched(tab, fleet.url)
    tab.goto(fleet.url)
    tab.wait_for_selector("#feed-state[data-state=live]")
    yield tab
    watched.close()
    tab.evaluate("localStorage.clear(), sessionStorage.clear()")
    tab.unroute_all()
    tab.mouse.move(0, 0)
    tab.goto("about:blank")
    watched.check()
