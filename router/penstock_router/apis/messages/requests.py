"""Anthropic's Messages API: bodies -> requests. Turns and answers have modules of their own."""

from __future__ import annotations

from typing import Any, TypedDict

from penstock_router.apis.base import TIMEOUT, Api, BodyKind
from penstock_router.apis.chat_messages import TEXT
from penstock_router.apis.images import take_images
from penstock_router.apis.messages.answers import (
    ERRORS,
    MessageAnswer,
    MessageEvent,
    MessageShape,
)
from penstock_router.apis.messages.content_blocks import TURNS
from penstock_router.apis.structured_output import FORMAT, only_constraint
from penstock_router.apis.tools import (
    MESSAGE_CHOICE,
    MESSAGE_TOOLS,
    check_one_form,
    tool_options,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANYTHING,
    ARRAY,
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    POSITIVE,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    array_of,
    integer,
    not_served,
    number,
    one_of,
    or_null,
    read_fields,
    read_object,
    string,
    table,
)
from penstock_router.request import ChatRequest
from penstock_router.text.prompts import TextModel, chat_prompt

_MAX_STOPS = 16


# ---- Thinking ----------------------------------------------------------------------------------

_THINKING_TYPE = one_of("enabled", "disabled", "adaptive")
_DISPLAY = one_of("summarized", "omitted")
# Templates decide whether a model reasons, by a variable with one of these names.
_THINKING_KWARGS = ("enable_thinking", "thinking")


def _read_thinking(name: str, value: Any) -> JsonObject:
    """Options of `ChatRequest`, and `thinks`, which becomes template variables."""
    thinking = read_object(name, value)
    kind = _THINKING_TYPE.read(f"{name}.type", thinking.get("type"))
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    result: JsonObject = {"thinks": kind != "disabled"}
    if kind == "enabled":
        result["thinking_tokens"] = POSITIVE.read(f"{name}.budget_tokens", budget)
    elif budget is not None:
        text = f"{name}.budget_tokens: only where {name}.type is enabled"
        raise BadRequest(text, param=name)
    if display is not None:
        result["include_reasoning"] = _DISPLAY.read(f"{name}.display", display) != "omitted"
    return result


def _thinking_schema(kinds: list[str], *required: str, **more: JsonObject) -> JsonObject:
    display = or_null(_DISPLAY.schema)
    properties = {"type": {"enum": kinds}, "display": display, **more}
    return {"type": "object", "properties": properties, "required": ["type", *required]}


_THINKING = Kind(
    _read_thinking,
    {
        "anyOf": [
            _thinking_schema(["enabled"], "budget_tokens", budget_tokens=POSITIVE.schema),
            _thinking_schema(["disabled", "adaptive"], budget_tokens={"type": "null"}),
        ]
    },
)


# ---- What the answer is like -------------------------------------------------------------------


def _read_output(name: str, value: Any) -> JsonObject:
    """The two entries that have an effect, read."""
    given = read_object(name, value)
    kinds = {"format": FORMAT, "effort": STRING}
    return {
        key: kind.read(f"{name}.{key}", given[key])
        for key, kind in kinds.items()
        if given.get(key) is not None
    }


_OUTPUT = Kind(
    _read_output,
    {
        "type": "object",
        "properties": {
            "format": or_null(FORMAT.schema),
            "effort": or_null(STRING.schema),
        },
    },
)


# ---- The two bodies ----------------------------------------------------------------------------

_PROMPT_FIELDS = (
    Field("model", STRING, "One of /v1/models.", required=True),
    Field("messages", TURNS, "The chat so far; the last may be to continue.", required=True),
    Field("system", TEXT, "What comes before the chat: a text, or text blocks."),
    Field("tools", MESSAGE_TOOLS, "Functions that the answer may call."),
    Field("tool_choice", MESSAGE_CHOICE, "Whether it calls one, any, or none; default: auto."),
    Field(
        "thinking",
        _THINKING,
        "Whether to reason, and in how many tokens at most; default: as the template has it.",
    ),
    Field("output_config", _OUTPUT, "The form of the text, and how much effort to make."),
    Field("output_format", FORMAT, "The same as format in output_config."),
)
COUNT_FIELDS = table(_PROMPT_FIELDS)
FIELDS = table(
    [
        *_PROMPT_FIELDS,
        Field("max_tokens", POSITIVE, "At most so many tokens.", required=True),
        Field(
            "stop_sequences",
            array_of(string(1, 1024), at_most=_MAX_STOPS, unit="strings"),
            "Strings that end the answer; they are cut off.",
        ),
        Field("stream", BOOLEAN, "Answer with events as tokens come."),
        Field("temperature", number(0, 1), "Below 1e-5 the likeliest token is always taken."),
        Field("top_p", number(0, 1, above_low=True), "Nucleus sampling: likeliest up to this sum."),
        Field("top_k", integer(0, INT32_MAX), "Sample among so many of the likeliest; 0: all."),
        Field("metadata", OBJECT, "Accepted without effect."),
        Field("service_tier", STRING, "Accepted without effect."),
        TIMEOUT,
        not_served("container", ANYTHING),
        not_served("mcp_servers", ARRAY, []),
    ]
)


def parse(body: JsonObject) -> ChatRequest:
    """A body of /v1/messages."""
    values = read_fields(FIELDS, body)
    names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
    request = ChatRequest(
        **_prompt(values),
        stop=values.get("stop_sequences", ()),
        timeout_s=values.get("timeout"),
        **{name: values[name] for name in names if name in values},
    )
    check_one_form(request)
    return request


def parse_count(body: JsonObject) -> ChatRequest:
    """A body of /v1/messages/count_tokens."""
    return ChatRequest(**_prompt(read_fields(COUNT_FIELDS, body)))


def _prompt(values: JsonObject) -> JsonObject:
    """The options that the prompt and the parsing of its answer depend on."""
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    # If the last message is the assistant's, the answer continues it.
    continues = values["messages"][-1]["role"] == "assistant"
    return {
        "model": values["model"],
        WARNINGS: values.get(WARNINGS, ()),
        "messages": [*system, *values["messages"]],
        "images": take_images(values["messages"]),
        "add_special_tokens": False,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        **tool_options(values),
        **_format(values),
        **_thinking(values),
        "template_kwargs": _template_kwargs(values),
    }


def _format(values: JsonObject) -> JsonObject:
    output = values.get("output_config", {})
    asked = {"output_config": output.get("format"), "output_format": values.get("output_format")}
    return only_constraint(asked)


def _thinking(values: JsonObject) -> JsonObject:
    asked = values.get("thinking", {})
    return {name: value for name, value in asked.items() if name != "thinks"}


def _template_kwargs(values: JsonObject) -> JsonObject:
    """Whether to reason, and how hard, under the variable names that templates use."""
    kwargs: JsonObject = {}
    if "thinking" in values:
        kwargs = dict.fromkeys(_THINKING_KWARGS, values["thinking"]["thinks"])
    effort = values.get("output_config", {}).get("effort")
    return kwargs if effort is None else {**kwargs, "reasoning_effort": effort}


class TokenCount(TypedDict):
    """The number of tokens in a prompt."""

    input_tokens: int


def _count(asked: ChatRequest, model: TextModel) -> TokenCount:
    return {"input_tokens": len(chat_prompt(asked, model, INT32_MAX).token_ids)}


MESSAGES_API = Api(
    name="messages",
    request_type=ChatRequest,
    fields=FIELDS,
    parse=parse,
    make_shape=MessageShape,
    name_answer=lambda request_id, named_by_client: f"msg_{request_id}",
    errors=ERRORS,
    answer=MessageAnswer,
    event=MessageEvent,
)
COUNT_TOKENS = BodyKind(
    name="count_tokens",
    request_type=ChatRequest,
    parse=parse_count,
    work=_count,
    errors=ERRORS,
)
