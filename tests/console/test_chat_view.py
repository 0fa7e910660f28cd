"""The playground: streamed, stopped, asked again, looked into, and carried on by another shard."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.image_files import picture, saved
from support.image_models import IMAGE_MODELS
from support.processes import Router, Shard, running

from console.conftest import Fleet, Opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Request

TOKENS = ".message.assistant:last-child .token"


def go_to_chat(page: Page, **settings: str) -> None:
    page.click("nav a[data-view=chat]")
    page.wait_for_selector("#set-model option", state="attached")
    for name, value in settings.items():
        page.fill(f"#set-{name}", value)


def say(page: Page, text: str) -> Locator:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return page.locator(".message.assistant").last


def body_of(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = request.post_data_json or {}
    return body


def roles(request: Request) -> list[str]:
    return [message["role"] for message in body_of(request)["messages"]]


def answer_with(page: Page, *deltas: dict[str, Any], finish_reason: str = "stop") -> None:
    """Answer the page's chats in place of the router: no fake model reasons or calls on request."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices[-1]["finish_reason"] = finish_reason
    frames = [f"data: {json.dumps({**head, 'choices': [choice]})}\n\n" for choice in choices]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(frames) + "data: [DONE]\n\n"
        ),
    )


def entries_of(*tokens: str) -> list[dict[str, Any]]:
    return [{"token": one, "logprob": -1.0, "bytes": None, "top_logprobs": []} for one in tokens]


def wait_for_end(page: Page, state: str = "done") -> None:
    page.wait_for_selector(f".message.assistant:last-child[data-state={state}]")


def test_an_answer_comes_token_by_token_with_its_figures(page: Page) -> None:
    go_to_chat(page, max_tokens="40")
    answer = say(page, "What is a shard?")
    page.wait_for_selector(f"{TOKENS} >> nth=3", state="attached")
    seen = page.locator(TOKENS).count()
    assert 4 <= seen < 40
    assert answer.get_attribute("data-state") == "running"
    wait_for_end(page)
    # Of tokens that came at once those that make no whole character are shown as one.
    assert 20 < page.locator(TOKENS).count() <= 40
    figures = answer.locator(".meta").inner_text()
    assert re.search(
        r"first token [\d.]+ m?s · [\d.]+ tokens/s · \d+ tokens in, 40 out · length", figures
    )
    # The feed says where it was made.
    page.wait_for_selector(".message.assistant .place")


def test_a_conversation_says_what_was_said_before_and_can_be_asked_again(page: Page) -> None:
    go_to_chat(page, max_tokens="5", seed="7")
    with page.expect_request("**/v1/chat/completions"):
        say(page, "First")
    wait_for_end(page)
    text = page.locator(".message.assistant .text").inner_text()
    page.fill("#set-seed", "8")
    with page.expect_request("**/v1/chat/completions") as again:
        page.click("#again")
    assert roles(again.value) == ["user"]
    wait_for_end(page)
    assert page.locator(".message.assistant").count() == 1
    assert page.locator(".message.assistant .text").inner_text() != text
    with page.expect_request("**/v1/chat/completions") as second:
        say(page, "Second")
    assert roles(second.value) == ["user", "assistant", "user"]
    asked = body_of(second.value)
    assert (asked["seed"], asked["temperature"], asked["stream"]) == (8, 0.8, True)
    assert "top_p" not in asked
    wait_for_end(page)


def test_stopping_an_answer_frees_the_shard(page: Page) -> None:
    go_to_chat(page, max_tokens="2000")
    say(page, "Go on and on")
    page.wait_for_selector(f"{TOKENS} >> nth=3", state="attached")
    page.click("nav a[data-view=fleet]")
    page.get_by_text("1 / 8").wait_for()
    page.click("nav a[data-view=chat]")
    page.click("#stop")
    wait_for_end(page, "stopped")
    page.click("nav a[data-view=fleet]")
    until(page, lambda: page.get_by_text("0 / 8").count() == 2)
    page.wait_for_selector(".request[data-state=cut] .mark.end-cut", state="attached")


def test_a_conversation_that_is_cleared_in_the_middle_leaves_nothing_behind(page: Page) -> None:
    go_to_chat(page, max_tokens="2000")
    say(page, "Go on and on")
    page.wait_for_selector(f"{TOKENS} >> nth=3", state="attached")
    page.click("#clear")
    page.wait_for_selector("#send:enabled")
    page.fill("#set-max_tokens", "3")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Anew")
    assert roles(asked.value) == ["user"]
    wait_for_end(page)


def test_alternatives_show_when_a_token_is_pointed_at_and_when_it_has_the_focus(page: Page) -> None:
    go_to_chat(page, max_tokens="6", top_logprobs="4")
    say(page, "Which word?")
    wait_for_end(page)
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator(TOKENS).nth(2).hover()
    tip.wait_for()
    assert tip.locator("li").count() in (4, 5)
    assert tip.locator("li.chosen").count() == 1
    shown = tip.locator(".value").all_inner_texts()
    shares = [float(text.split()[0].lstrip("<")) for text in shown]
    assert shares[:4] == sorted(shares[:4], reverse=True)
    page.mouse.move(5, 5)
    tip.wait_for(state="hidden")
    page.locator(TOKENS).first.focus()
    tip.wait_for()
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.matches('.token:nth-child(2)')")
    assert tip.inner_text() != first
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_without_probabilities_the_text_is_plain(page: Page) -> None:
    go_to_chat(page, max_tokens="8")
    page.uncheck("#set-logprobs")
    answer = say(page, "Plainly")
    wait_for_end(page)
    assert page.locator(TOKENS).count() == 0
    assert answer.locator(".text").inner_text().strip()


def test_a_refusal_is_shown_in_the_server_s_words(fleet: Fleet, open_page: Opened) -> None:
    page, watched = open_page(fleet.url)
    watched.expected = ["status of 400"]
    go_to_chat(page, temperature="3")
    with page.expect_response("**/v1/chat/completions") as refused:
        answer = say(page, "<b>bold</b>")
    wait_for_end(page, "failed")
    words = refused.value.json()["error"]["message"]
    assert "temperature" in words
    assert answer.locator(".error").inner_text() == words
    assert page.locator(".message.user .text").inner_text() == "<b>bold</b>"


def test_an_answer_goes_on_when_its_shard_is_killed(page: Page, fleet: Fleet) -> None:
    go_to_chat(page, max_tokens="120")
    answer = say(page, "Tell a long story")
    page.wait_for_selector(f"{TOKENS} >> nth=10", state="attached")
    page.wait_for_selector(".message.assistant .place")
    victim = fleet.shard_at(answer.locator(".place .mono").inner_text())
    victim.engine.kill()
    page.wait_for_selector(".message.assistant[data-moves='1']")
    wait_for_end(page)
    assert 60 < page.locator(TOKENS).count() <= 120
    assert ", 120 out · length" in answer.locator(".meta").inner_text()
    assert answer.locator(".error").is_hidden()
    assert answer.locator(".place").count() == 2
    assert "went on (engine died)" in answer.locator(".moved").inner_text()
    page.click("nav a[data-view=fleet]")
    page.wait_for_selector(f".shard[data-address='{victim.address}'][data-state=serving]")


def test_reasoning_is_folded_away_when_the_answer_begins_and_can_be_opened(page: Page) -> None:
    go_to_chat(page)
    answer_with(
        page,
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me <b>see</b>"},
        {"reasoning_content": ", well.\nYes."},
        {"content": "It is "},
        {"content": "so."},
    )
    answer = say(page, "Is it?")
    wait_for_end(page)
    assert answer.locator(".text").inner_text() == "It is so."
    thoughts = answer.locator(".thoughts")
    assert thoughts.is_hidden()
    answer.get_by_text("Reasoning").click()
    assert thoughts.inner_text() == "Let me <b>see</b>, well.\nYes."
    quiet, loud = (
        page.locator(where).evaluate("element => getComputedStyle(element).color")
        for where in (".thoughts", ".message.assistant .text")
    )
    assert quiet != loud
    # It is said to nobody again.
    with page.expect_request("**/v1/chat/completions") as second:
        say(page, "Sure?")
    assert body_of(second.value)["messages"][1] == {"role": "assistant", "content": "It is so."}


def test_reasoning_that_nothing_follows_stays_open(page: Page) -> None:
    go_to_chat(page)
    answer_with(page, {"reasoning_content": "Well, well"}, finish_reason="length")
    answer = say(page, "Is it?")
    wait_for_end(page)
    assert answer.locator(".thoughts").inner_text() == "Well, well"
    assert "1 tokens · length" in answer.locator(".meta").inner_text()


def test_calls_are_shown_with_their_names_and_arguments(page: Page) -> None:
    go_to_chat(page)
    begun = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
    other = {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer_with(
        page,
        {"content": "I look."},
        {"tool_calls": [{"index": 0, **begun}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"word":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "<i>"}'}}, {"index": 1, **other}]},
        finish_reason="tool_calls",
    )
    answer = say(page, "What is it?")
    wait_for_end(page)
    assert answer.locator(".text").inner_text() == "I look."
    shown = [text.removeprefix("Calls ") for text in answer.locator(".call").all_text_contents()]
    assert shown == ['look_up {"word": "<i>"}', "add {}"]
    font = "element => getComputedStyle(element).fontFamily"
    assert "mono" in answer.locator(".call").first.evaluate(font)
    assert "tool_calls" in answer.locator(".meta").inner_text()


def test_tokens_of_reasoning_and_calls_are_not_shown_as_those_of_the_text(page: Page) -> None:
    go_to_chat(page)
    frames: list[tuple[dict[str, Any], list[str]]] = [
        ({"reasoning_content": "Hm"}, ["<think>", "Hm"]),
        ({}, ["</think>"]),
        ({"content": "Yes"}, ["Yes"]),
        ({"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": "{}"}}]}, ["{}"]),
        ({}, ["<|im_end|>"]),
    ]
    lines = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": entries_of(*tokens)}}]}
        for delta, tokens in frames
    ]
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    answer = say(page, "Is it?")
    wait_for_end(page)
    assert page.locator(TOKENS).all_inner_texts() == ["Yes"]
    assert "6 tokens" in answer.locator(".meta").inner_text()


# ---- Images ------------------------------------------------------------------------------------

WIDE, NARROW = (saved(picture(width=width), "PNG") for width in (60, 30))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router of a model that sees images."""
    folder = tmp_path_factory.mktemp("seeing")
    for name, content in IMAGE_MODELS["qwen3_vl"].files().items():
        (folder / name).write_bytes(content)
    shard = Shard(folder / "log", "--runner", "fake", "--model", str(folder), "--step-ms", "5")
    router = Router(folder / "router.log", [shard.address])
    with running(shard, router):
        yield router


def file_of(name: str, content: bytes, kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": content}


def give(page: Page, event: str, where: str, name: str, content: bytes, kind: str) -> None:
    """Drop or paste a file."""
    page.evaluate(
        """([event, where, name, content, kind]) => {
          const data = new DataTransfer();
          const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
          data.items.add(new File([bytes], name, { type: kind }));
          const options = { bubbles: true, cancelable: true };
          document.querySelector(where).dispatchEvent(event === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: data })
            : new DragEvent(event, { ...options, dataTransfer: data }));
        }""",
        [event, where, name, base64.b64encode(content).decode(), kind],
    )


def urls_of(message: dict[str, Any]) -> list[bytes]:
    parts = [part["image_url"]["url"] for part in message["content"] if "image_url" in part]
    return [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in parts]


def test_images_from_files_by_drop_and_by_paste_are_sent_and_shown(
    seeing: Router, open_page: Opened
) -> None:
    page, _ = open_page(f"{seeing.url}/")
    go_to_chat(page, max_tokens="5")
    waiting = page.locator("#attachments img")
    page.set_input_files("#file", [file_of("a.png", WIDE), file_of("b.png", NARROW)])
    waiting.nth(1).wait_for()
    give(page, "paste", "#prompt", "c.png", WIDE, "image/png")
    waiting.nth(2).wait_for()
    give(page, "dragover", "#conversation", "d.png", NARROW, "image/png")
    assert page.locator("#talk[data-dropping]").count() == 1
    give(page, "drop", "#conversation", "d.png", NARROW, "image/png")
    waiting.nth(3).wait_for()
    assert page.locator("#talk[data-dropping]").count() == 0
    assert [image.get_attribute("alt") for image in waiting.all()] == [
        f"{letter}.png" for letter in "abcd"
    ]
    assert page.locator("#attachments-note").is_hidden()
    page.get_by_label("Remove a.png").click()
    assert waiting.count() == 3
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "What are they?")
    [message] = body_of(asked.value)["messages"]
    assert urls_of(message) == [NARROW, WIDE, NARROW]
    assert message["content"][-1] == {"type": "text", "text": "What are they?"}
    wait_for_end(page)
    assert waiting.count() == 0
    shown = page.locator(".message.user img")
    assert shown.count() == 3
    widths = "elements => elements.map((element) => element.naturalWidth)"
    assert shown.evaluate_all(widths) == [30, 60, 30]
    # Without words, and with what was said before.
    page.set_input_files("#file", [file_of("a.png", WIDE)])
    waiting.first.wait_for()
    with page.expect_request("**/v1/chat/completions") as second:
        page.press("#prompt", "Enter")
    first, _, last = body_of(second.value)["messages"]
    assert (urls_of(first), urls_of(last)) == ([NARROW, WIDE, NARROW], [WIDE])
    wait_for_end(page)


def test_what_is_no_image_is_left_out_and_a_broken_one_is_refused_by_the_server(
    seeing: Router, open_page: Opened
) -> None:
    page, watched = open_page(f"{seeing.url}/")
    watched.expected = ["status of 400"]
    go_to_chat(page, max_tokens="5")
    files = [file_of("notes.txt", b"x", "text/plain"), file_of("cut.png", WIDE[:60])]
    page.set_input_files("#file", files)
    page.get_by_text("notes.txt is no image.").wait_for()
    assert page.locator("#attachments img").count() == 1
    answer = say(page, "What is it?")
    wait_for_end(page, "failed")
    assert "messages[0].content[0]: the image is not valid PNG" in answer.inner_text()


def test_a_model_that_takes_no_images_says_so_before_and_after(
    fleet: Fleet, open_page: Opened
) -> None:
    page, watched = open_page(fleet.url)
    watched.expected = ["status of 400"]
    go_to_chat(page)
    page.set_input_files("#file", [file_of("a.png", WIDE)])
    page.get_by_text("The model penstock-toy takes no images.").wait_for()
    answer = say(page, "What is it?")
    assert page.locator("#attachments-note").is_hidden()
    wait_for_end(page, "failed")
    assert answer.locator(".error").inner_text() == (
        "messages[0].content[0]: the model penstock-toy takes no images"
    )
    page.click("#clear")
    page.fill("#set-max_tokens", "3")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Words alone")
    assert body_of(asked.value)["messages"] == [{"role": "user", "content": "Words alone"}]
    wait_for_end(page)
