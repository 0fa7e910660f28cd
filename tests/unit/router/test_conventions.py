"""The way a model writes calls and reasoning: how it is chosen, shown to a template, and sent."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support.router_doubles import CHATML, INFO, byte_level_tokenizer, model_files
from tokenizers import AddedToken
from unit.router.chat_template_styles import STYLES as TEMPLATES

from penstock_common.child_process.framing import HEADER_BYTES
from penstock_proto.types import Constraint, ConstraintKind, ThinkingBudget
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest
from penstock_router.generation.job import make_job
from penstock_router.offload.text_messages import decode_outcome, encode_outcome
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.served_models import ServedModel
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.model_conventions import Conventions, conventions_of
from penstock_router.text.prompts import (
    PreparedPrompts,
    TextModel,
    prepare_prompts,
)
from penstock_router.text.prompts import (
    render as render_pieces,
)
from penstock_router.text.tokenizer import Tokenizer, load_tokenizer

ADD = Tool(
    "add",
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    shown={"type": "function", "function": {"name": "add", "description": "Adds."}},
)
USER = {"role": "user", "content": "1 + 1?"}
QWEN = TEMPLATES["qwen-tools"]
# Begins the answer's reasoning itself.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CONFIG = RouterConfig(shards="a:1")


def template(source: str, tool_use: str = "") -> ChatTemplate:
    sources = {"default": source} | ({"tool_use": tool_use} if tool_use else {})
    return ChatTemplate(sources, {})


def chosen(source: str, calls: str = "auto", reasoning: str = "auto") -> tuple[str, str]:
    found = conventions_of(template(source), calls, reasoning)
    return found.names


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    fast = byte_level_tokenizer()
    fast.add_special_tokens([AddedToken(text, special=True) for text in ("<think>", "</think>")])
    return load_tokenizer(model_files(fast))


def model_of(tokenizer: Tokenizer, source: str, tool_use: str = "") -> TextModel:
    chat_template = template(source, tool_use)
    found = conventions_of(chat_template, "auto", "auto")
    return TextModel(
        INFO.model,
        INFO.max_model_len,
        INFO.vocab_size,
        tokenizer,
        chat_template,
        False,
        found,
    )


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER]} | fields)


WITH_TOOLS: dict[str, Any] = {"tools": (ADD,), "tool_choice": ToolChoice("auto")}

# ---- What is chosen ----------------------------------------------------------------------------


def test_conventions_are_the_template_s_or_what_the_operator_says() -> None:
    assert chosen(QWEN) == ("hermes", "think")
    assert chosen(CHATML) == ("plain_json", "")
    assert chosen("{# tools #} </think>") == ("plain_json", "think")
    assert chosen(QWEN, "none", "none") == ("", "")
    assert chosen(QWEN, "llama3_json", "mistral") == ("llama_json", "mistral")
    assert chosen(CHATML, "hermes") == ("hermes", "")
    two = template(CHATML, QWEN)
    assert conventions_of(two, "auto", "auto").names == ("hermes", "")
    assert conventions_of(None, "auto", "auto").names == ("plain_json", "")


def test_a_text_process_finds_the_same_by_what_was_asked_for() -> None:
    for source in (QWEN, CHATML):
        for asked in (("auto", "auto"), ("none", "none"), ("llama", "mistral")):
            found = conventions_of(template(source), *asked)
            assert conventions_of(template(source), *found.asked) == found


def render(request: ChatRequest, model: TextModel) -> str:
    return "".join(render_pieces(request, model))


# ---- What the template is given ----------------------------------------------------------------


def test_a_template_that_takes_tools_is_given_them(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, QWEN)
    text = render(chat(**WITH_TOOLS), model)
    assert f"<tools>\n{json.dumps(ADD.shown)}\n</tools>" in text
    assert render(chat(**WITH_TOOLS | {"tool_choice": ToolChoice("none")}), model) == render(
        chat(), model
    )


def test_where_a_template_takes_none_a_system_message_tells_of_them(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, CHATML)
    text = render(chat(**WITH_TOOLS), model)
    begin = "<|im_start|>system\nYou can call these functions."
    assert text.startswith(begin)
    assert '"name": "add", "description": "Adds."' in text
    assert text.endswith(render(chat(), model))
    system = {"role": "system", "content": "Be brief."}
    text = render(chat(messages=[system, USER], **WITH_TOOLS), model)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions.")
    assert text.count("<|im_start|>system") == 1
    assert render(chat(**WITH_TOOLS | {"tool_choice": ToolChoice("none")}), model) == render(
        chat(), model
    )


def test_a_template_that_knows_no_tools_is_told_of_calls_and_results_in_words(
    tokenizer: Tokenizer,
) -> None:
    def call(call_id: str, name: str) -> dict[str, Any]:
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": {"a": 1}},
        }

    calls = [call("c1", "add"), call("c2", "look_up")]
    asked = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
        {"role": "tool", "tool_call_id": "c2", "content": "found"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Once more.", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "c9", "content": "three"},
    ]
    add = '{"name": "add", "arguments": {"a": 1}}'
    looked_up = add.replace("add", "look_up")
    told = [
        USER,
        {"role": "assistant", "content": f"[{add}, {looked_up}]"},
        {"role": "user", "content": "Result of add:\ntwo\n\nResult of look_up:\nfound\n\nAnd now?"},
        {"role": "assistant", "content": f"Once more.\n\n{add}"},
        {"role": "user", "content": "Result of add:\nthree"},
    ]
    for source in (CHATML, TEMPLATES["gemma"], TEMPLATES["phi"]):
        model = model_of(tokenizer, source)
        assert render(chat(messages=asked), model) == render(chat(messages=told), model)
    knows = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content }}{% for call in message.tool_calls %}<{{ call.function.name }}>"
        "{% endfor %}",
    )
    assert "assistant\n<add><look_up><|im_end|>" in render(
        chat(messages=asked), model_of(tokenizer, knows)
    )


def test_of_two_templates_the_one_for_tools_is_used_where_there_are_some(
    tokenizer: Tokenizer,
) -> None:
    model = model_of(tokenizer, CHATML, "tools: {{ tools | length }}")
    assert render(chat(**WITH_TOOLS), model) == "tools: 1"
    assert render(chat(), model).startswith("<|im_start|>user")


# ---- What becomes of the prompt ----------------------------------------------------------------


def test_a_prompt_says_whether_reasoning_has_begun(tokenizer: Tokenizer) -> None:
    json_object = Constraint(ConstraintKind.JSON_OBJECT)

    def prepared(source: str, **fields: Any) -> PreparedPrompts:
        asked = chat(constraint=json_object, **fields)
        return prepare_prompts(asked, model_of(tokenizer, source))

    assert not prepared(CHATML).reasoning_begun
    assert prepared(CHATML).constraint is json_object
    begun = prepared(THINKING + "{# </think> #}")
    assert begun.reasoning_begun
    assert begun.constraint is not None
    assert '"begin":"","content":{"type":"any_text"},"end":"</think>"' in begun.constraint.value
    maybe = prepared(QWEN)
    assert not maybe.reasoning_begun
    assert maybe.constraint is not None
    assert '"begin":"<think>"' in maybe.constraint.value
    over = prepared(QWEN, template_kwargs={"enable_thinking": False})
    assert not over.reasoning_begun
    assert over.constraint is json_object
    answer = {"role": "assistant", "content": "<think>Well"}
    go_on = {"messages": [USER, answer], "add_generation_prompt": False}
    assert prepared(CHATML + "{# </think> #}", **go_on, continue_final_message=True).reasoning_begun
    asks = {"role": "user", "content": "What is <think>"}
    assert not prepared(QWEN, messages=[asks]).reasoning_begun


async def test_what_was_prepared_elsewhere_has_its_constraint(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, THINKING + "{# </think> #}")
    choice = Constraint(ConstraintKind.CHOICE, options=("a", "ü"))
    calls_only = Conventions(model.conventions.tool_format)
    without_reasoning = dataclasses.replace(model, conventions=calls_only)
    for text_model in (model, without_reasoning):
        for constraint in (None, choice, Constraint(ConstraintKind.JSON_SCHEMA, "{}")):
            given = prepare_prompts(chat(constraint=constraint), text_model)
            found = await decode_outcome(encode_outcome(given)[HEADER_BYTES:])
            assert isinstance(found, PreparedPrompts)
            assert _values(found.constraint) == _values(given.constraint)
            assert found.reasoning_begun == given.reasoning_begun


def _values(constraint: Constraint | None) -> object:
    return constraint and (constraint.kind, constraint.value, list(constraint.options))


# ---- What shards are sent ----------------------------------------------------------------------


async def sent(text: TextModel, **fields: Any) -> Any:
    model = ServedModel(INFO, text)
    asked = chat(**fields)
    job = await make_job(asked, model, prepare_prompts(asked, text), drawn_seed=1)
    assert all(request.constraint == job.requests[0].constraint for request in job.requests)
    return job


async def test_every_choice_is_sent_the_constraint_and_the_budget(tokenizer: Tokenizer) -> None:
    text = model_of(tokenizer, THINKING + "{# </think> #}")
    job = await sent(text, n=2, thinking_tokens=7, constraint=Constraint(ConstraintKind.REGEX, "a"))
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert begin is not None
    assert end is not None
    assert job.prepared.reasoning_begun
    for request in job.requests:
        assert request.constraint.kind is ConstraintKind.STRUCTURAL_TAG
        assert request.thinking_budget == ThinkingBudget(7, begin, end, begun=True)
    job = await sent(model_of(tokenizer, QWEN))
    assert job.requests[0].constraint is None
    assert job.requests[0].thinking_budget is None


async def test_a_budget_needs_marks_that_are_tokens(tokenizer: Tokenizer) -> None:
    for source in (CHATML, "Here is my response: [/INST]"):
        with pytest.raises(BadRequest, match="thinking_token_budget: fake-model") as refused:
            await sent(model_of(tokenizer, source), thinking_tokens=7)
        assert refused.value.param == "thinking_token_budget"


# ---- Texts of tokens ---------------------------------------------------------------------------


def test_only_special_tokens_have_to_be_shown_on_purpose(tokenizer: Tokenizer) -> None:
    begin = tokenizer.token_id("<think>")
    assert tokenizer.special_ids_of(("<think>", "the", "<tool call>", "nothing")) == {begin}
    assert tokenizer.special_ids_of(()) == frozenset()
    assert tokenizer.token_id("no such token") is None
