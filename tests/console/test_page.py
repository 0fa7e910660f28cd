"""The page around its views: colours, narrow screens, the keyboard, keys, the API's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import Router, running

from console.conftest import Fleet, Opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

VIEWS = ("fleet", "chat", "api")


def background(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def brightness(page: Page) -> int:
    return sum(int(part) for part in background(page).strip("rgb()").split(","))


def test_colours_follow_the_system_and_whoever_chooses_others(
    fleet: Fleet, open_page: Opened
) -> None:
    page, _ = open_page(fleet.url, color_scheme="dark")
    assert brightness(page) < 150
    page.emulate_media(color_scheme="light")
    assert brightness(page) > 600
    page.select_option("#theme", "dark")
    assert brightness(page) < 150
    page.reload()
    assert brightness(page) < 150
    assert page.locator("#theme").input_value() == "dark"


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(fleet: Fleet, open_page: Opened, view: str) -> None:
    size = {"width": 375, "height": 700}
    page, _ = open_page(f"{fleet.url}#{view}", viewport=size, is_mobile=True, has_touch=True)
    page.wait_for_selector("#feed-state[data-state=live]")
    if view == "chat":
        page.tap("summary >> text=Model and sampling")
        page.fill("#set-max_tokens", "30")
        page.fill("#prompt", "a" * 200)
        page.tap("#send")
        page.wait_for_selector(".message.assistant[data-state=done]")
    if view == "api":
        page.wait_for_selector(".operation form")
        page.tap(".operation button[type=submit]")
        page.wait_for_selector(".answer-status[data-kind=good]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def press_until(page: Page, key: str, selector: str, at_most: int = 60) -> None:
    for _ in range(at_most):
        page.keyboard.press(key)
        if page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector):
            return
    raise AssertionError(f"{at_most} times {key} do not lead to {selector}")


def test_a_chat_needs_no_mouse(page: Page) -> None:
    press_until(page, "Tab", "#skip", 1)
    at = page.locator("#skip").bounding_box()
    assert at is not None
    assert at["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur()")
    press_until(page, "Tab", "nav a[data-view=chat]")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-chat:visible")
    press_until(page, "Tab", "#set-max_tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("6")
    press_until(page, "Shift+Tab", "#prompt")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant[data-state=done]")
    press_until(page, "Shift+Tab", ".token", 3)
    page.wait_for_selector("#tip:visible")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.matches('.token:last-child')")


@pytest.fixture(scope="module")
def locked(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router of the same shards that asks for keys."""
    folder: Path = tmp_path_factory.mktemp("locked")
    addresses = [shard.address for shard in fleet.shards]
    router = Router(folder / "router.log", addresses, "--admin-key", "open-sesame")
    with running(router):
        yield router


def test_a_key_is_asked_for_refused_and_taken(locked: Router, open_page: Opened) -> None:
    page, watched = open_page(f"{locked.url}/")
    watched.expected = ["status of 401"]
    page.wait_for_selector("#feed-state[data-state=refused]")
    assert "missing or wrong" in page.locator("#banner").inner_text()
    page.click("#banner-action")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog", state="hidden")
    page.wait_for_selector("#banner:visible")
    page.click("#key-button")
    page.fill("#key", "open-sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("#feed-state[data-state=live]")
    assert page.locator("#banner").is_hidden()
    page.reload()
    page.wait_for_selector("#feed-state[data-state=live]")
    assert page.evaluate("Object.values(localStorage).join() + document.cookie") == ""
    assert page.evaluate("Object.values(sessionStorage).join()") == "open-sesame"


def test_a_route_of_the_api_is_chosen_edited_and_sent(page: Page, fleet: Fleet) -> None:
    page.click("nav a[data-view=api]")
    page.fill("#route-filter", "tokenize")
    page.click(".route:has-text('POST/tokenize')")
    body = page.locator(".operation textarea")
    assert json.loads(body.input_value())
    body.fill('{"prompt": "it\'s"}')
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer-status[data-kind=good]")
    assert page.locator(".answer-status").inner_text().startswith("200")
    answer = page.locator(".operation pre[aria-label='The answer']")
    assert json.loads(answer.inner_text())["tokens"]
    page.click("summary >> text=/^Headers$/")
    assert "x-request-id" in page.locator(".headers").inner_text()
    page.click("text=Copy as curl")
    command = page.locator(".curl").inner_text()
    assert command.startswith(f"curl '{fleet.url}tokenize' -H 'Content-Type: application/json'")
    assert "it'\\''s" in command


def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(page: Page) -> None:
    page.click("nav a[data-view=api]")
    page.wait_for_selector(".operation form")
    answer = page.locator(".operation pre[aria-label='The answer']")
    message = {"role": "user", "content": "x"}
    body = {"messages": [message], "max_tokens": 500, "stream": True}
    page.fill(".operation textarea", json.dumps(body))
    page.click(".operation button[type=submit]")
    until(page, lambda: "data: " in (answer.text_content() or ""))
    page.click(".operation button:has-text('Stop')")
    page.wait_for_selector(".answer-status:has-text('stopped after')")
    assert "[DONE]" not in answer.inner_text()


def test_a_wrong_body_is_answered_with_the_field_at_fault(fleet: Fleet, open_page: Opened) -> None:
    page, watched = open_page(f"{fleet.url}#api")
    watched.expected = ["status of 400"]
    page.wait_for_selector(".operation form")
    page.fill(".operation textarea", '{"messages": 7}')
    page.click(".operation button[type=submit]")
    page.wait_for_selector(".answer-status[data-kind=bad]")
    assert "messages" in page.locator(".operation pre[aria-label='The answer']").inner_text()
