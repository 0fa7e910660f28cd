"""ollama's client as it is released: chats, prompts, streams, what is served, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from clients.asked import ENGINE, MAX_TOKENS, MODEL, NO_MODEL
from clients.direct import post
from clients.environments import WITH_EMBEDDINGS, observe


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("anthropic", "with_ollama", fake.url, fake.secured_url)


@pytest.fixture(scope="module")
def chat(fake) -> Any:
    """The same chat by OpenAI's protocol."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]
    url = f"{fake.url}/v1/chat/completions"
    return post(url, messages=messages, max_tokens=MAX_TOKENS, temperature=0, logprobs=True)


def test_an_answer_is_the_text_and_the_counts_of_the_same_chat(seen, chat) -> None:
    whole = seen["whole"]
    assert whole["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert (whole["model"], whole["done"]) == (MODEL, True)
    assert whole["done_reason"] == chat["choices"][0]["finish_reason"]
    assert whole["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert whole["eval_count"] == chat["usage"]["completion_tokens"]
    assert 0 < whole["eval_duration"] <= whole["total_duration"]


def test_a_model_may_be_named_with_its_default_version(seen) -> None:
    assert seen["latest"] == seen["asynchronous"] == seen["whole"]["message"]["content"]


def test_a_stop_string_is_cut_off(seen) -> None:
    answer, stop = seen["stopped"]["answer"], seen["stopped"]["stop"]
    whole = seen["whole"]["message"]["content"]
    assert answer["message"]["content"] == whole.partition(stop)[0]
    assert answer["done_reason"] == "stop"


def test_a_stream_is_the_same_answer_in_many_lines_and_counts_in_the_last(seen) -> None:
    *lines, last = seen["streamed"]
    texts = [line["message"]["content"] for line in lines]
    assert "".join(texts) == seen["whole"]["message"]["content"]
    assert len(texts) > 2
    assert {line["done"] for line in lines} == {False}
    assert (last["done"], last["message"]["content"]) == (True, "")
    assert last["eval_count"] == seen["whole"]["eval_count"]
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


def test_a_prompt_goes_into_the_template_unless_it_is_raw(seen) -> None:
    generated, text = seen["generated"], seen["whole"]["message"]["content"]
    assert generated["templated"]["response"] == "".join(generated["lines"]) == text
    assert generated["raw"] not in ("", text)


def test_an_answer_follows_the_schema_of_its_format(seen) -> None:
    assert list(json.loads(seen["schema"])) == ["age"]


def test_tokens_have_the_log_probabilities_of_the_same_chat(seen, chat) -> None:
    shown = seen["scored"]["logprobs"]
    expected = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in shown] == [each["token"] for each in expected]
    for each, same in zip(shown, expected, strict=True):
        assert each["logprob"] == pytest.approx(same["logprob"], abs=1e-5)
        assert len(each["top_logprobs"]) == 2


def test_without_a_prompt_the_model_is_said_to_be_there(seen) -> None:
    assert (seen["loaded"]["done_reason"], seen["loaded"]["response"]) == ("load", "")
    assert seen["unloaded"]["done_reason"] == "unload"


def test_the_models_are_listed_and_shown(seen) -> None:
    assert [each["model"] for each in seen["tags"]["models"]] == [MODEL]
    (running,) = seen["running"]["models"]
    assert (running["model"], running["context_length"]) == (MODEL, 2048)
    shown = seen["shown"]
    embeds = [] if ENGINE == "vllm" else ["embedding"]
    assert shown["capabilities"] == ["completion", "tools", *embeds]
    name = shown["modelinfo"]["general.architecture"]
    assert shown["modelinfo"][f"{name}.context_length"] == 2048
    assert "messages" in shown["template"]


@pytest.mark.parametrize(
    ("case", "status", "words"),
    [
        ("bad value", 400, "temperature"),
        ("unknown model", 404, f"model '{NO_MODEL}' not found"),
        ("unknown pull", 404, f"model '{NO_MODEL}' not found"),
        ("create", 403, "not served"),
        ("delete", 403, "not served"),
        ("thinking", 400, "does not support thinking"),
        ("image", 400, "takes no images"),
        ("wrong key", 401, "API key"),
    ],
)
def test_an_error_is_its_class_its_status_and_a_line(seen, case, status, words) -> None:
    error = seen["errors"][case]
    assert error["kinds"][0] == "ResponseError"
    assert words in error["text"]
    assert f"(status code: {status})" in error["text"]


def test_a_prompt_that_is_too_long_is_cut(seen) -> None:
    assert seen["errors"]["too long"]["kinds"] == []


def test_pulling_what_is_served_ends_with_success(seen) -> None:
    assert seen["pulled"][-1] == "success"


def test_the_options_of_the_documentation_are_taken(seen) -> None:
    assert 0 < seen["documented"]["eval_count"] <= 6


def test_a_context_goes_on_after_prompt_and_answer(seen) -> None:
    remembered = seen["remembered"]
    assert remembered["context"] == sum(remembered["first"])
    # The conversation begins once.
    assert remembered["second"][0] == remembered["context"] + remembered["first"][0] - 1


@WITH_EMBEDDINGS
def test_an_empty_input_has_no_vector(seen) -> None:
    assert len(seen["vectors"]["several"]) == 2
    assert seen["vectors"]["none"] == []


def test_a_key_opens(seen) -> None:
    assert seen["errors"]["right key"]["kinds"] == []
