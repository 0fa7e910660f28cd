"""The fleet as a browser shows it: shards, requests on their time line, and what befalls them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import processes
from support.processes import Router, running

from console.conftest import Fleet, Opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def complete(fleet: Fleet, request_id: str, max_tokens: int, prompt: str = "Hello") -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    status, answer = fleet.router.ask("/v1/completions", body, {"X-Request-Id": request_id})
    assert status == 200, answer


@contextmanager
def completing(fleet: Fleet, request_id: str, max_tokens: int) -> Iterator[None]:
    """A request that runs within this scope, which is left when it has its answer."""
    thread = threading.Thread(target=complete, args=(fleet, request_id, max_tokens))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def bar(page: Page, request_id: str) -> Locator:
    return page.locator(f".request[data-id='{request_id}']")


def told_of(page: Page, request_id: str) -> str:
    """Return the text that a screen reader says for a request's bar."""
    return bar(page, request_id).get_attribute("aria-label") or ""


def card(page: Page, address: str) -> Locator:
    return page.locator(f".shard[data-address='{address}']")


def test_a_shard_s_batch_fills_and_empties(page: Page, fleet: Fleet) -> None:
    with completing(fleet, "fills", 60):
        busy = page.locator(".shard", has=page.get_by_text("1 / 8"))
        busy.wait_for()
        assert busy.count() == 1
        # A step takes what it was told to, and the machine's own time.
        step = busy.locator(".row").nth(3).locator(".value")
        until(page, lambda: step.inner_text().endswith("s"))
        assert float(step.inner_text().split()[0]) >= 20
        assert page.locator(".spark .line[points]").count() == 4
    until(page, lambda: page.get_by_text("0 / 8").count() == 2)


def test_a_request_is_a_bar_that_says_all_that_is_known_of_it(page: Page, fleet: Fleet) -> None:
    complete(fleet, "told-in-full", 12)
    row = bar(page, "told-in-full")
    page.wait_for_selector(".request[data-id='told-in-full'][data-state='good']")
    assert row.locator(".part.tokens").count() == 1
    assert re.search(r"length, 12 tokens in .* at 127\.0\.0\.1:", told_of(page, "told-in-full"))
    row.hover()
    told = page.locator("#details").inner_text()
    for words in ("told-in-full", "/v1/completions", "penstock-toy", "12 out", "least load"):
        assert words in told


def test_bars_are_walked_with_the_arrow_keys(page: Page, fleet: Fleet) -> None:
    for name in ("walk-1", "walk-2"):
        complete(fleet, name, 2)
    bar(page, "walk-2").wait_for()
    page.focus("#pause")
    page.keyboard.press("Tab")
    newest = page.evaluate("document.activeElement.dataset.id")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.id") == newest == "walk-2"
    page.keyboard.press("ArrowDown")
    assert "walk-1" in page.locator("#details").inner_text()


def test_a_filter_hides_other_requests_and_a_pause_holds_the_line(page: Page, fleet: Fleet) -> None:
    complete(fleet, "wanted-one", 2)
    complete(fleet, "other-one", 2)
    bar(page, "other-one").wait_for()
    page.fill("#request-filter", "wanted")
    assert bar(page, "wanted-one").is_visible()
    assert not bar(page, "other-one").is_visible()
    page.fill("#request-filter", "")
    page.click("#pause")
    lane = bar(page, "wanted-one").locator(".lane")
    before = lane.get_attribute("viewBox")
    complete(fleet, "while-paused", 2)
    page.wait_for_timeout(600)
    assert lane.get_attribute("viewBox") == before
    assert bar(page, "while-paused").count() == 0
    page.click("#pause")
    bar(page, "while-paused").wait_for()
    until(page, lambda: lane.get_attribute("viewBox") != before)


def test_where_more_requests_run_than_are_followed_this_is_said(page: Page) -> None:
    router = {"in_flight": 7, "queued": 0, "loop_lag_worst_s": 0.0}
    told: dict[str, Any] = {
        "fleet": {
            **{"version": "", "worker": 0, "workers": 1, "now": time.time(), "shards": []},
            "router": {**router, "requests_running": 7, "followed": 3},
        },
        "requests": [
            {
                **{"id": "one", "route": "/", "model": "", "key": "", "outcome": "", "error": ""},
                **{"status": 0, "attempts": [], "arrived_at": time.time(), "placed_at": None},
                **{"first_token_at": None, "ended_at": None, "output_tokens": 0},
            }
        ],
    }
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told.items())
    page.route("**/console/feed", lambda route: route.fulfill(body=body))
    page.reload()
    bar(page, "one").wait_for()
    assert "of those that run the first 3" in page.locator("#requests-note").inner_text()


def test_what_a_client_says_is_shown_as_text(page: Page, fleet: Fleet) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    complete(fleet, hostile, 2)
    row = page.locator(".request", has_text="=alert(1)>")
    row.hover()
    assert hostile in page.locator("#details").inner_text()
    assert page.locator("#requests img, #details img").count() == 0


@pytest.mark.parametrize(
    "whole_shard",
    [pytest.param(False, id="engine", marks=pytest.mark.soak), pytest.param(True, id="shard")],
)
def test_a_request_is_seen_going_on_when_its_shard_is_killed(
    page: Page, fleet: Fleet, whole_shard: bool
) -> None:
    name = f"moves-{whole_shard}"
    with completing(fleet, name, 150):
        page.wait_for_selector(f".request[data-id='{name}'] .part.tokens")
        found = re.search(r"at (127\.0\.0\.1:\d+)", told_of(page, name))
        assert found is not None
        address = found[1]
        victim = fleet.shard_at(address)
        if whole_shard:
            # What it leaves behind is looked for at the end.
            _ = victim.children
            victim.process.kill()
            page.wait_for_selector(f".shard[data-address='{address}'][data-state=gone]")
        else:
            victim.engine.kill()
        page.wait_for_selector(f".request[data-id='{name}'][data-moves='1']")
        page.wait_for_selector(f".request[data-id='{name}'] .part.tokens >> nth=1")
    page.wait_for_selector(f".request[data-id='{name}'][data-state=good]")
    row = bar(page, name)
    colours = {part.get_attribute("class") for part in row.locator(".part.tokens").all()}
    assert len(colours) == 2
    assert row.locator(".mark.move").count() == 1
    assert "went on at" in told_of(page, name)
    row.hover()
    why = "unavailable" if whole_shard else "engine died"
    assert f"ended: {why}" in page.locator("#details").inner_text()
    if whole_shard:
        victim.close()
        fleet.start_again(victim)
    page.wait_for_selector(f".shard[data-address='{address}'][data-state=serving]")
    # At rest again, for the next one.
    assert card(page, address).locator(".problem").inner_text() == ""


def test_a_lost_feed_is_said_and_taken_up_again(
    fleet: Fleet, open_page: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [shard.address for shard in fleet.shards]
    router = Router(tmp_path / "first.log", addresses)
    with running(router):
        page, watched = open_page(f"{router.url}/")
        # Browsers report each request that gets no answer.
        watched.expected = ["net::ERR_"]
        page.wait_for_selector("#feed-state[data-state=live]")
        router.process.kill()
        page.wait_for_selector("#banner:visible")
        assert "live feed is lost" in page.locator("#banner").inner_text()
    port = int(router.address.rpartition(":")[2])
    monkeypatch.setattr(processes, "free_port", lambda: port)
    with running(Router(tmp_path / "again.log", addresses)):
        page.wait_for_selector("#banner", state="hidden")
        page.wait_for_selector("#feed-state[data-state=live]")
        page.context.close()
