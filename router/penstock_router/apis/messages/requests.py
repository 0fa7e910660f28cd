"""Anthropic's Messages API: parses bodies to requests."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, TypedDict

from penstock_proto.limits import ANTHROPIC_TEMPERATURE, SAMPLING_RANGES
from penstock_router.apis.base import TIMEOUT, Api, BodyKind
from penstock_router.apis.chat_messages import TEXT, check_size, read_parts
from penstock_router.apis.images import take_images
from penstock_router.apis.messages.answers import MessageAnswer, MessageEvent, MessageShape
from penstock_router.apis.messages.billing import without_billing
from penstock_router.apis.messages.errors import ERRORS
from penstock_router.apis.messages.thinking import (
    THINKING,
    thinking_options,
    thinking_variables,
)
from penstock_router.apis.messages.tools import CHOICE, NO_TOOLS, TOOLS, OfferedTools
from penstock_router.apis.messages.turns import TURNS, Turns
from penstock_router.apis.openai.elsewhere import with_fields_of_chats
from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.apis.openai.requests import common_options, own_kwargs
from penstock_router.apis.openai.thinking import thinking_kwargs
from penstock_router.apis.structured_output import CONSTRAINT_FIELDS, FORMAT, constraint_options
from penstock_router.apis.tools import check_one_form, tool_options
from penstock_router.json_fields import (
    ANYTHING,
    BOOLEAN,
    INT32_MAX,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    add_warning,
    another_name,
    integer,
    label,
    not_served,
    object_of,
    or_null,
    read_array,
    read_fields,
    read_object,
    table,
    taken,
    within,
    without_effect,
)
from penstock_router.request import ChatRequest
from penstock_router.sessions import session_of_metadata
from penstock_router.text.contents import Content, as_parts, as_text
from penstock_router.text.prompts import TextModel, chat_prompt


def _read_system(name: str, value: Any) -> str:
    content: Content = ""
    if isinstance(value, list):
        check_size(name, value)
        content = read_parts(name, value, image_parts={})
    else:
        content = TEXT.read(name, value)
    return as_text(without_billing(as_parts(content)), "")


_OUTPUT = object_of(format=FORMAT, effort=STRING, task_budget=ANYTHING)


def _read_edits(name: str, value: Any) -> bool:
    """True if the field asks to leave out or shorten turns. This server always renders whole
    prompts.
    """
    edits = read_object(name, value).get("edits")
    if edits is None:
        return False
    wanted = [
        read_object(f"{name}.edits[{index}]", edit)
        for index, edit in enumerate(read_array(f"{name}.edits", edits))
    ]
    return any(edit.get("keep") != "all" for edit in wanted)


_EDITS = Kind(
    _read_edits,
    {
        "type": "object",
        "properties": {"edits": or_null({"type": "array", "items": {"type": "object"}})},
    },
)


_OF_ANTHROPICS_SERVERS = "For tools that Anthropic's servers run, which are left out."
_PROMPT_FIELDS = (
    Field("model", STRING, "One of /v1/models.", required=True),
    Field(
        "messages",
        TURNS,
        "The chat so far; the last may be to continue.",
        required=True,
    ),
    Field("system", Kind(_read_system, TEXT.schema), "What comes before the chat."),
    Field("tools", TOOLS, "Functions that the answer may call."),
    Field("tool_choice", CHOICE, "Whether it calls one, any, or none; default: auto."),
    Field(
        "thinking",
        THINKING,
        "Whether to reason, and in how many tokens at most; default: as the template has it.",
    ),
    Field("output_config", _OUTPUT, "The form of the text, and how much effort to make."),
    Field("output_format", FORMAT, "The same as format in output_config."),
    *(CHAT_FIELDS[name] for name in ("chat_template_kwargs", "enable_thinking")),
    CHAT_FIELDS["reasoning_effort"],
    Field("context_management", _EDITS, "Taken without effect: no turn is left out."),
    taken("mcp_servers", [], help=_OF_ANTHROPICS_SERVERS),
    taken("container", help=_OF_ANTHROPICS_SERVERS),
    taken("compaction", help="Prompts are not made shorter."),
    taken("fallbacks", [], help="Another model answers only if it is asked."),
    taken("cache_control", {"type": "ephemeral"}, help="All prefixes are cached, while room is."),
    Field("metadata", Kind(session_of_metadata, {}), "Claude Code names its session in user_id."),
    *(label(name) for name in ("user_profile_id", "workspace_id", "betas")),
    *(label(name) for name in ("billing_policy", "fallback_credit_token", "diagnostics")),
    taken("service_tier", "auto", "standard_only", help="There is one tier."),
    taken("speed", "standard", help="There is one speed."),
    taken("inference_geo", help="Shards are where they are."),
    not_served("thread", ANYTHING, help="No turns are kept here: send them."),
)
_MAX_TOKENS = Field(
    "max_tokens",
    integer(0, INT32_MAX),
    "At most so many, and as the context has room; 0: have the prompt in the cache.",
    required=True,
)
_STOPS = dataclasses.replace(CHAT_FIELDS["stop"], name="stop_sequences")
_ANSWER_FIELDS = (
    _MAX_TOKENS,
    another_name("max_completion_tokens", _MAX_TOKENS),
    _STOPS,
    another_name("stop", _STOPS),
    Field("stream", BOOLEAN, "Answer with events as tokens come."),
    Field(
        "temperature",
        within(ANTHROPIC_TEMPERATURE),
        "Below 1e-5 the likeliest token is always taken.",
    ),
    Field("top_p", within(SAMPLING_RANGES["top_p"]), "Nucleus sampling: likeliest up to this sum."),
    Field("top_k", integer(-1, INT32_MAX), "Sample among so many of the likeliest; 0 and -1: all."),
    TIMEOUT,
    # Not in Anthropic's API, but clients of other servers send them.
    *(
        CHAT_FIELDS[name]
        for name in (
            *("seed", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "repeat_last_n", "logit_bias", "allowed_token_ids", "bad_words"),
            *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
            *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
            *("priority", "slo", "is_latency_sensitive", "cache_salt", "session_id"),
            *("request_id", "kv_hints"),
        )
    ),
    *CONSTRAINT_FIELDS,
    label("stream_options"),
)
FIELDS = with_fields_of_chats([*_PROMPT_FIELDS, *_ANSWER_FIELDS])
COUNT_FIELDS = table(
    [
        *_PROMPT_FIELDS,
        *(
            replace(label(entry.name), help="For answers; nothing is counted by it.")
            for entry in _ANSWER_FIELDS
        ),
    ]
)


def parse(body: JsonObject) -> ChatRequest:
    values = read_fields(FIELDS, body)
    prompt = _prompt(values)
    session = values.get("session_id") or values.get("metadata", "")
    asking = {**_asking(values), "stop": values.get(_STOPS.name, ()), "session_id": session}
    options = common_options(asking)
    warnings = {WARNINGS: options.get(WARNINGS, ())}
    request = ChatRequest(**{**options, **prompt, **warnings}, bounds_max_tokens=True)
    check_one_form(request)
    return request


def parse_count(body: JsonObject) -> ChatRequest:
    values = read_fields(COUNT_FIELDS, body)
    return ChatRequest(**_prompt(values), **constraint_options(_asking(values)))


def _asking(values: JsonObject) -> JsonObject:
    """Replace `output_config` by its entry `format`, the format of the answer."""
    return {**values, "output_config": values.get("output_config", {}).get("format")}


def _prompt(values: JsonObject) -> JsonObject:
    """Return the options that determine the prompt and the parsing of the answer."""
    offered = _offered(values)
    turns: Turns = values["messages"]
    messages = turns.chat(offered)
    # The prompt shows these tools within a turn, but they also belong to the body's tools.
    values["tools"] = (*offered.tools, *turns.context.added)
    for warning in (*offered.warnings, *turns.context.warnings, *_without_effect(values)):
        add_warning(values, warning)
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    # If the last message is the assistant's, the answer continues it.
    continues = messages[-1]["role"] == "assistant"
    tools = tool_options(values)
    return {
        "model": values["model"],
        WARNINGS: values.get(WARNINGS, ()),
        "messages": [*system, *messages],
        "images": take_images(messages),
        "add_special_tokens": False,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        **tools,
        **thinking_options(values),
        "template_kwargs": _template_kwargs(values, turns),
    }


def _offered(values: JsonObject) -> OfferedTools:
    offered: OfferedTools = values.get("tools", NO_TOOLS)
    choice = values.get("tool_choice")
    return offered if choice is None else offered.showing(choice.choice.name)


def _without_effect(values: JsonObject) -> list[str]:
    """Return warnings for `context_management` and `task_budget`, which have no effect."""
    found = []
    if values.get("context_management"):
        found.append(without_effect("context_management"))
    if values.get("output_config", {}).get("task_budget") is not None:
        found.append(without_effect("output_config.task_budget"))
    return found


def _template_kwargs(values: JsonObject, turns: Turns) -> JsonObject:
    """Set the template variables of reasoning and its effort."""
    kwargs = {**thinking_kwargs(values), **thinking_variables(values)}
    effort = turns.effort or values.get("output_config", {}).get("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    return {**kwargs, **own_kwargs(values)}


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
