"""Fields that clients of other servers add: honoured, refused by name, or taken and named in a
warning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema_rs
import pytest
from unit.router.test_every_field import NEEDED, PARSERS, PROOFS, ROUTES

from penstock_router.apis.openai.other_servers import with_other_servers
from penstock_router.errors import BadRequest
from penstock_router.json_fields import Use, body_schema

OTHER_NAMES = [
    (route, name)
    for route, (_, fields) in ROUTES.items()
    for name, entry in fields.items()
    if entry.stands_for and entry.use is Use.HONOURED
]
OTHERS = with_other_servers([])


def parsed(route: str, /, **fields: Any) -> Any:
    return PARSERS[route]({**NEEDED[route], **fields})


# ---- Other names -------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "name"), OTHER_NAMES)
def test_another_name_means_the_same_and_contradicts_it_by_name(route: str, name: str) -> None:
    field = ROUTES[route][1][name].stands_for
    proof = PROOFS[route][field]
    base = {key: value for key, value in NEEDED[route].items() if key != field}
    base |= proof.beside
    parse = PARSERS[route]
    ours = parse({**base, field: proof.value})
    assert parse({**base, name: proof.value}) == ours
    assert parse({**base, name: proof.value, field: proof.value}) == ours
    assert parse({**base, name: None}) == parse(base)
    other = {
        "include_stop_str_in_output": False,
        "return_token_ids": False,
        "request_id": "another",
        "session_id": "another",
        "stop": "another",
    }.get(field, 1)
    with pytest.raises(BadRequest, match=f"{name}: not together with another name of {field}"):
        parse({**base, field: proof.value, name: other})


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "n_predict"])
@pytest.mark.parametrize("route", ROUTES)
def test_minus_one_token_is_all_up_to_the_end_of_the_context(route: str, name: str) -> None:
    base = {key: value for key, value in NEEDED[route].items() if key != "max_tokens"}
    asked: Any = PARSERS[route]({**base, name: -1})
    assert (asked.max_tokens, asked.default_max_tokens) == (None, None)


@pytest.mark.parametrize("name", ["thinking_budget", "reasoning_budget_tokens"])
def test_a_budget_of_minus_one_is_none(name: str) -> None:
    assert parsed("chat", **{name: -1}).thinking_tokens is None
    assert parsed("chat", **{name: 5}).thinking_tokens == 5


def test_a_seed_of_minus_one_is_none_in_particular() -> None:
    assert parsed("chat", seed=-1).seed is None
    assert parsed("chat", seed=-2).seed == -2


def test_biases_may_come_in_pairs_and_false_bans_a_token() -> None:
    assert parsed("chat", logit_bias=[[7, 1.5], [3, False]]).logit_bias == {7: 1.5, 3: -100.0}
    for wrong in ([["Hello", 1]], [[1]], [7], [[True, 1]], [[1, True]], [[-1, 1]]):
        with pytest.raises(BadRequest, match="logit_bias: must be"):
            parsed("chat", logit_bias=wrong)


@pytest.mark.parametrize("given", ["", [], [None], [""]])
def test_no_adapter_may_be_asked_for_in_several_ways(given: Any) -> None:
    assert parsed("chat", lora_path=given, model="m").model == "m"
    assert parsed("chat", lora_path=["a"], model="m").model == "a"


# ---- Reasoning ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kwargs", "budget", "shows"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}, None, True),
        ({"thinking": True}, {"enable_thinking": True}, None, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None, True),
        ({"thinking": {"type": "auto"}}, {}, None, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}, 9, True),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            {"enable_thinking": True, "clear_thinking": False},
            None,
            True,
        ),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}, None, True),
        ({"reasoning": {"max_tokens": 5}}, {}, 5, True),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}, None, True),
        ({"reasoning": {"exclude": True}}, {}, None, False),
        ({"reasoning": {"effort": None, "summary": "auto"}}, {}, None, True),
        ({"reasoning": {"generate_summary": "auto"}}, {}, None, True),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            None,
            True,
        ),
    ],
)
def test_every_way_to_ask_for_reasoning_says_the_same(
    fields: Any, kwargs: Any, budget: int | None, shows: bool
) -> None:
    asked = parsed("chat", **fields)
    assert asked.template_kwargs == kwargs
    assert (asked.thinking_tokens, asked.include_reasoning) == (budget, shows)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": {"type": "often"}}, "thinking.type: must be one of enabled"),
        ({"thinking": {}}, "thinking.type: must be one of"),
        ({"thinking": "on"}, "thinking: must be an object"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: must be"),
        ({"thinking": {"type": "enabled", "depth": 3}}, "thinking: has no entry 'depth'"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort: must be a string"),
        ({"reasoning": {"depth": 3}}, "reasoning: has no entry 'depth'"),
        (
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "thinking: not together with enable_thinking",
        ),
        ({"reasoning_effort": 0.5}, "reasoning_effort: must be a word"),
    ],
)
def test_what_does_not_ask_for_reasoning_is_refused_by_name(fields: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parsed("chat", **fields)


# ---- What is refused, and what is taken --------------------------------------------------------

ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "top_n_sigma": (0.0, -1, -0.5),
    "nsigma": (0.0, -1),
    "dynatemp_range": (0.0,),
    "dynamic_temperature": (False,),
    "smoothing_factor": (0.0,),
    "adaptive_target": (0.0, -1),
    "top_a": (0.0,),
    "tfs": (1.0,),
    "tfs_z": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_keep": (0, 1),
    "samplers": ([],),
    "sampler_priority": ([],),
    "sampler_order": ([],),
    "temperature_last": (False,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "negative_prompt": ("",),
    "custom_logit_processor": (),
    "stop_regex": ("", []),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "n_indent": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "preserved_tokens": ([],),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": (True,),
    "response_fields": ([],),
    "post_sampling_probs": (False,),
    "n_probs": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "input_ids": (),
    "input_embeds": (),
    "image_data": ([],),
    "multimodal_data": ([],),
    "tool_prompt": (),
    "guideline": (),
    "safe_prompt": (False,),
    "task": (),
    "plugins": ([],),
    "session_params": ({},),
    "images_config": ({},),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "lora": ([],),
}
VALUES: tuple[Any, ...] = (True, False, 2, 0.5, -3.5, "some", ["some"], [{"a": 1}], {"a": 1})


def test_each_field_that_is_refused_has_its_values_that_ask_for_nothing() -> None:
    refused = {name for name, entry in OTHERS.items() if entry.use is Use.REFUSED}
    assert refused == ASKS_FOR_NOTHING.keys()


def others_than_nothing(name: str) -> list[Any]:
    nothing = ASKS_FOR_NOTHING[name]
    return [value for value in VALUES if value not in (*nothing, -3.5 if -1 in nothing else None)]


@pytest.mark.parametrize("name", ASKS_FOR_NOTHING)
def test_the_schema_of_what_is_refused_is_what_asks_for_nothing(name: str) -> None:
    schema = jsonschema_rs.validator_for(OTHERS[name].schema)
    assert all(schema.is_valid(value) for value in (None, *ASKS_FOR_NOTHING[name]))
    assert not any(schema.is_valid(value) for value in others_than_nothing(name))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ASKS_FOR_NOTHING)
def test_what_would_change_the_answer_is_refused_by_name(route: str, name: str) -> None:
    plain, nothing = parsed(route), ASKS_FOR_NOTHING[name]
    for value in (None, *nothing):
        assert parsed(route, **{name: value}) == plain
    refusals = []
    for value in others_than_nothing(name):
        with pytest.raises(BadRequest) as caught:
            parsed(route, **{name: value})
        assert caught.value.param == name
        refusals.append(caught.value.message)
    assert any("not served" in message for message in refusals)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", [name for name, entry in OTHERS.items() if entry.use is Use.TAKEN])
@pytest.mark.parametrize("value", VALUES)
def test_what_cannot_change_the_answer_is_taken_and_named(
    route: str, name: str, value: Any
) -> None:
    asked = parsed(route, **{name: value})
    assert asked.warnings == (() if value is False else (f"{name}: taken without effect",))
    assert dataclasses.replace(asked, warnings=()) == parsed(route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier"])
def test_a_client_s_own_labels_are_taken_silently(route: str, name: str) -> None:
    assert parsed(route, **{name: {"a": 1}}) == parsed(route)


def test_several_tools_of_one_name_are_named_and_the_last_counts() -> None:
    tools = [
        {"type": "function", "function": {"name": "look", "description": how}}
        for how in ("here", "there")
    ]
    asked = parsed("chat", tools=tools)
    assert [tool.shown["function"]["description"] for tool in asked.tools] == ["there"]
    assert asked.warnings == ("tools: several are named look; the last counts",)


def test_tools_in_the_form_of_responses_are_those_of_chats() -> None:
    flat = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    nested = {"type": "function", "function": {key: flat[key] for key in flat if key != "type"}}
    assert parsed("chat", tools=[flat]).tools == parsed("chat", tools=[nested]).tools


@pytest.mark.parametrize(
    "given",
    [
        {"function": {"name": "f", "parameters": {"type": "object", "title": "t"}}},
        {"type": None, "name": "f", "parameters": {"type": "object", "title": "t"}},
        {"name": "f", "input_schema": {"type": "object", "title": "t"}},
    ],
)
def test_a_tool_without_a_type_is_a_function(given: Any) -> None:
    """vLLM's clients leave it out, and Cursor sends the form of Messages."""
    function = {"name": "f", "parameters": {"type": "object", "title": "t"}}
    usual = {"type": "function", "function": function}
    assert parsed("chat", tools=[given]) == parsed("chat", tools=[usual])


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_without_tools_is_taken(choice: str) -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"tools": []})
    for tools in given:
        assert parsed("chat", tool_choice=choice, **tools) == parsed("chat")


def test_every_field_is_documented() -> None:
    for _, fields in ROUTES.values():
        properties = body_schema(fields)["properties"]
        assert properties.keys() == fields.keys()
        assert all(entry.get("description") for entry in properties.values())
