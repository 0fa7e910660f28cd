"""Bodies: what is accepted, what it becomes, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any, NoReturn

import pytest
from support.budget import budget, seeded
from support.router_doubles import random_text

from penstock_router.apis.chat_messages import FunctionCall, assistant_message, tool_message
from penstock_router.apis.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from penstock_router.apis.openai.requests import parse_chat, parse_completion
from penstock_router.errors import BadRequest
from penstock_router.json_fields import WARNINGS, Use, decode_object, read_fields
from penstock_router.request import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": MESSAGES, **fields})


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON: it is empty"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"[]", "must be a JSON object, not an array"),
        (b'"x"', "not a string"),
        (b"null", "not null"),
        (b"3", "not a number"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_in_one_line(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        decode_object(body)
    assert "\n" not in caught.value.message


# ---- fields ------------------------------------------------------------------------------------


def test_defaults_are_the_apis() -> None:
    request = completion()
    assert (request.n, request.best_of, request.max_tokens, request.stream) == (1, 1, None, False)
    assert request.add_special_tokens
    assert not chat().add_special_tokens
    assert chat().add_generation_prompt


def test_null_is_the_same_as_not_given() -> None:
    names = COMPLETION_FIELDS.keys() - {"prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    names = CHAT_FIELDS.keys() - {"messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_unknown_fields_have_no_effect() -> None:
    plain = completion()
    given = completion(nothing={"a": 1}, x=True)
    assert given.warnings == ("unknown fields without effect: 'nothing', 'x'",)
    assert dataclasses.replace(given, warnings=()) == plain


@pytest.mark.parametrize(
    ("route", "entry"),
    [
        (route, entry)
        for route, fields in (("completion", COMPLETION_FIELDS), ("chat", CHAT_FIELDS))
        for entry in fields.values()
        if entry.use is Use.REFUSED
    ],
)
def test_a_known_field_that_does_not_work_yet_is_refused_by_name_unless_neutral(
    route: str, entry: Any
) -> None:
    parse = parse_completion if route == "completion" else parse_chat
    base = {"prompt": "x"} if route == "completion" else {"messages": MESSAGES}
    for neutral in entry.neutral:
        parse({**base, entry.name: neutral})
    asking: dict[str, Any] = {
        "length_penalty": 2,
        "modalities": ["audio"],
        "use_beam_search": True,
    }
    candidates = [asking.get(entry.name, True), {"a": 1}, ["a"], [1], "a", 7, 2, False, 7.5]
    refusals = []
    for value in candidates:
        if value not in entry.neutral:
            with pytest.raises(BadRequest) as caught:
                parse({**base, entry.name: value})
            assert caught.value.param == entry.name
            assert entry.name in caught.value.message
            refusals.append(caught.value.message)
    assert any("not served" in message for message in refusals)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "at least 0 and at most 2"),
        ("temperature", 2.1, "at most 2"),
        ("temperature", "hot", "a number; given: 'hot'"),
        ("temperature", True, "a number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 0.5, "an integer"),
        ("min_p", 1.5, "at most 1"),
        ("n", 0, "at least 1"),
        ("n", 16385, "at most 16384"),
        ("n", "2", "an integer"),
        ("n", True, "an integer"),
        ("max_tokens", -2, "at least 0"),
        ("max_tokens", 10**30, "at most"),
        ("seed", 2**63, "less_than_equal"),
        ("seed", -(2**63) - 1, "greater_than_equal"),
        ("stop", ["a"] * 4097, "at most 4096 characters in all strings; given: 4097"),
        ("stop", "", "at least 1 character"),
        ("stop", ["a", ""], "at least 1 character"),
        ("stop", [1], "string"),
        ("stop", {"a": 1}, "array"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", "a", "array"),
        ("stop_token_ids", [1] * 1025, "at most 1024"),
        ("logprobs", -2, "at least -1"),
        ("logprobs", True, "an integer"),
        ("echo", 1, "true or false"),
        ("stream", "yes", "true or false"),
        ("model", 3, "a string"),
        ("stream_options", {"include_usage": True}, "stream is true"),
        ("stream_options", [], "object"),
        ("best_of", 0, "at least 1"),
        ("prompt", "", "must be provided and non-empty"),
        ("prompt", None, "must be provided and non-empty"),
        ("prompt", [], "must be provided and non-empty"),
        ("prompt", [[]], "must be provided and non-empty"),
        ("prompt", ["a", ""], "must be provided and non-empty"),
        ("prompt", 5, "a string"),
        ("prompt", {}, "a string"),
        ("prompt", [1, "a"], "must be an integer"),
        ("prompt", [[1, True]], "must be an integer"),
        ("prompt", [[1, -1]], "out of vocabulary"),
        ("prompt", [2**40], "out of vocabulary"),
        ("prompt", ["a", 1], "a string"),
        ("prompt", ["a"] * 1025, "at most 1024"),
        ("max_tokens", 0, "at least 1 without echo"),
    ],
)
def test_values_out_of_bounds_are_refused_by_field(field: str, value: object, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(**{field: value})
    assert words in caught.value.message
    assert caught.value.param == field
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("messages", [], "at least one message"),
        ("messages", "Hi", "an array"),
        ("messages", ["Hi"], "an object"),
        ("messages", [{"content": "x"}], "role"),
        ("messages", [{"role": 3, "content": "x"}], "role"),
        ("messages", [{"role": "user"}], "needs content"),
        ("messages", [{"role": "user", "content": 3}], "content"),
        ("messages", [{"role": "user", "content": [3]}], "an object"),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio'"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "text"),
        ("messages", [{"role": "assistant", "tool_calls": {}}], "array"),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": 1}]}], "object"),
        ("max_tokens", 0, "at least 1"),
        ("logprobs", 1, "true or false"),
        ("top_logprobs", 2, "needs logprobs"),
        ("messages", [{"role": "user", "content": None, "tool_calls": []}], "needs content"),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": 3}], "a string; given: 3"),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "x"}]}], "must be an object"),
        ("messages", [{"role": "assistant", "tool_calls": [{"name": 3}]}], ".name: must be a str"),
        ("messages", [{"role": "assistant", "content": [{"type": "thinking"}]}], ".text: must be"),
        ("messages", [{"role": "assistant", "reasoning_content": ["x"]}], "a string; given: an"),
        ("messages", [{"role": "assistant", "reasoning": {}}], ".reasoning: must be a string; giv"),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": 3}]}], ".id: must be a string"),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}], ".name: must be"),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "function.arguments: must be an object; given: an array",
        ),
        ("tool_choice", "required", "needs tools"),
        ("thinking_token_budget", -1, "at least 0"),
        ("chat_template_kwargs", {"messages": []}, "a field of its own"),
        ("continue_final_message", "x", "true or false"),
    ],
)
def test_chat_values_out_of_bounds_are_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**{field: value})
    assert words in caught.value.message
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_completion_tokens", 5), ("top_logprobs", 2), ("tools", [{}])),
        *(("tool_choice", "auto"), ("thinking_token_budget", 5)),
    ],
)
def test_a_chats_field_in_a_completion_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name) as refused:
        parse_completion({"prompt": "x", name: value})
    assert refused.value.param == name
    parse_completion({"prompt": "x", name: None})


def test_best_of_in_a_chat_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="best_of") as refused:
        parse_chat({"messages": [{"role": "user", "content": "x"}], "best_of": 2})
    assert refused.value.param == "best_of"


def test_the_four_forms_of_a_prompt() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion(prompt=[[1], [2, 3]]).prompts == ([1], [2, 3])


def test_a_whole_float_is_an_integer() -> None:
    assert completion(max_tokens=5.0, n=2.0).max_tokens == 5


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5
    assert chat().max_tokens is None


def test_best_of_is_at_least_n_and_not_for_streams() -> None:
    assert completion(n=2, best_of=3).best_of == 3
    assert completion(n=2).best_of == 2
    with pytest.raises(BadRequest, match="at least n"):
        completion(n=2, best_of=1)
    with pytest.raises(BadRequest, match="streaming"):
        completion(best_of=2, stream=True)


def test_usage_options_need_each_other() -> None:
    request = completion(stream=True, stream_options={"continuous_usage_stats": True})
    assert (request.include_usage, request.continuous_usage) == (False, False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = completion(stream=True, stream_options=options)
    assert (request.include_usage, request.continuous_usage) == (True, True)
    assert completion(stream_options={}) == completion()


def test_chat_logprobs_are_a_count_with_zero_for_the_chosen_alone() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_a_continued_message_needs_no_generation_prompt() -> None:
    assert not chat(continue_final_message=True).add_generation_prompt
    with pytest.raises(BadRequest, match="not together"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_messages_come_as_templates_expect_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first, second, third = chat(
        messages=[
            {"role": "user", "content": parts},
            {"role": "user", "content": parts[:1]},
            {"role": "assistant", "content": None, "name": None, "extra": {"x": 1}},
        ]
    ).messages
    # What joins them is the template's to say.
    assert first == {"role": "user", "content": parts}
    assert second == {"role": "user", "content": "a"}
    assert third == {"role": "assistant", "extra": {"x": 1}}


def test_tool_calls_arguments_become_an_object_where_they_are_one() -> None:
    for given, wanted in [
        *(('{"a": 1}', {"a": 1}), ("", {}), ("[1]", "[1]"), ("{", "{"), ({}, {}), (None, {})),
        ({"a": 1}, {"a": 1}),
    ]:
        call = {"function": {"name": "f", "arguments": given}}
        [message] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
        assert message["tool_calls"][0]["function"]["arguments"] == wanted


def test_no_calls_at_all_are_not_shown_to_a_template() -> None:
    [message] = chat(messages=[{"role": "assistant", "content": "x", "tool_calls": []}]).messages
    assert message == {"role": "assistant", "content": "x"}


def test_reasoning_of_earlier_answers_has_either_name_or_both_or_is_null() -> None:
    for said in ({"reasoning": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"}):
        [message] = chat(messages=[{"role": "assistant", "content": "x", **said}]).messages
        assert message == {"role": "assistant", "content": "x", **said}
    nothing = {"reasoning": None, "reasoning_content": None}
    [message] = chat(messages=[{"role": "assistant", "content": "x", **nothing}]).messages
    assert message == {"role": "assistant", "content": "x"}


def test_what_other_apis_say_becomes_the_same_messages() -> None:
    given = [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    calls = [FunctionCall("c1", "f", {"a": 1}), FunctionCall("c2", "g", "{")]
    made = [assistant_message(None, "hm", calls), tool_message("c1", "7")]
    assert chat(messages=given).messages == made
    assert assistant_message("x") == {"role": "assistant", "content": "x"}
    assert assistant_message(None) == {"role": "assistant", "content": ""}
    assert assistant_message("x", calls=calls[:1])["content"] == "x"
    assert tool_message("c1", "7", "f")["name"] == "f"


def test_no_body_of_nonsense_raises_anything_but_a_refusal() -> None:
    rng = seeded("nonsense")
    values: list[Any] = [
        *(None, True, False, 0, 1, -1, 0.5, 1e308, 2**70, -(2**70), "", "x", "\x00", [], {}),
        *([1], ["x"], [[1]], [[]], [None], {"a": None}, {"type": "text"}, [{}], [{"role": "user"}]),
        *([{"role": "user", "content": None}], [{"role": "user", "content": [{}]}], [[[1]]]),
        *(MESSAGES, {"include_usage": 1}, random_text(rng, 3)),
    ]
    names = sorted({*COMPLETION_FIELDS, *CHAT_FIELDS})
    longest = 0
    for _ in range(budget(20_000, 500_000)):
        body = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 5))}
        for parse in (parse_completion, parse_chat):
            try:
                parse(body)
            except BadRequest as error:
                longest = max(longest, len(error.message))
    assert longest <= 1000


def test_a_logit_bias_is_read_by_id_and_cut_to_its_bounds() -> None:
    request = parse_completion({"prompt": "x", "logit_bias": {"5": 1, "7": -1000.0}})
    assert request.logit_bias == {5: 1.0, 7: -100.0}


@pytest.mark.parametrize(
    "bias", [{"five": 1}, {"-1": 1}, {"5": "much"}, {"4294967296": 1}, {"9" * 5000: 1}, [5]]
)
def test_a_logit_bias_that_is_none_is_refused(bias: object) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        parse_completion({"prompt": "x", "logit_bias": bias})


def test_allowing_no_token_at_all_is_refused() -> None:
    with pytest.raises(BadRequest, match="allowed_token_ids"):
        parse_completion({"prompt": "x", "allowed_token_ids": []})


def test_over_http_nobody_gets_in_front_of_others() -> None:
    assert parse_completion({"prompt": "x", "priority": 3}).priority == 3
    with pytest.raises(BadRequest, match="priority"):
        parse_completion({"prompt": "x", "priority": -1})


def test_a_body_is_read_without_collecting_what_it_is_built_of() -> None:
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    body = b'{"a": [' + b"[]," * 200_000 + b"[]]}"
    gc.callbacks.append(note)
    try:
        given = decode_object(body)
        assert not collected
        # Whoever is refused leaves it as it was.
        with pytest.raises(BadRequest):
            decode_object(b"[")
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    assert len(given["a"]) == 200_001


def test_names_that_mean_nothing_are_not_gone_through() -> None:
    class Body(dict[str, Any]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("went through all names")

        items = keys = __iter__

    many = {f"nothing{number}": 1 for number in range(1025)}
    values = read_fields(COMPLETION_FIELDS, Body(prompt="a", **many))
    assert values == {"prompt": ("a",)}


def test_names_that_mean_nothing_are_named_in_a_warning() -> None:
    values = read_fields(COMPLETION_FIELDS, {"prompt": "a", "nothing": None, "n0": {}, "x": 1})
    assert values[WARNINGS] == ("unknown fields without effect: 'n0', 'x'",)
    assert WARNINGS not in read_fields(COMPLETION_FIELDS, {"prompt": "a", "nothing": None})
    many = {f"n{number:02}": 1 for number in range(30)}
    [warning] = read_fields(COMPLETION_FIELDS, {"prompt": "a", **many})[WARNINGS]
    assert "'n15' and 14 more" in warning


def test_too_many_prompts_are_refused_before_any_of_them_is_looked_at() -> None:
    class Prompt:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("was looked at")

    with pytest.raises(BadRequest, match="at most 1024 prompts; given: 1025"):
        COMPLETION_FIELDS["prompt"].kind.read("prompt", [Prompt()] * 1025)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, "2"], "must be an integer; given: '2'"),
        ([1, True], "must be an integer; given: True"),
        ([1.0, 1.5], "must be an integer; given: 1.5"),
        ([1.0, None], "must be an integer; given: null"),
        ([1, -1], "at least 0"),
        ([1, 2.0**40], "at most 4294967295"),
    ],
)
def test_the_one_that_is_no_id_is_named(value: list[Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse_completion({"prompt": "x", "stop_token_ids": value})


def test_ids_may_be_written_as_whole_floats() -> None:
    assert parse_completion({"prompt": "x", "stop_token_ids": [1.0, 2]}).stop_token_ids == (1, 2)


def test_what_is_nested_deeper_than_it_can_be_shown_is_refused_like_anything_else() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    messages = [{"role": "user", "content": [{"type": deep}]}]
    with pytest.raises(BadRequest, match="parts of type an array are not served"):
        parse_chat({"messages": messages})


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_how_images_are_read_is_not_for_requests_to_say(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        parse_chat({"messages": MESSAGES, name: {"max_pixels": 50_176}})


def test_the_refusal_of_a_part_names_the_kinds_that_are_served() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    words = r"content\[0\]: parts of type 'image' are not served, only text and image_url$"
    with pytest.raises(BadRequest, match=words):
        parse_chat({"messages": messages})


def test_a_message_has_a_bounded_number_of_keys() -> None:
    most = {"role": "user", "content": "x", **{f"key{index}": 1 for index in range(62)}}
    assert parse_chat({"messages": [most]}).messages == [most]
    with pytest.raises(BadRequest, match=r"messages\[0\]: at most 64 keys; given: 65"):
        parse_chat({"messages": [{**most, "more": 1}]})
