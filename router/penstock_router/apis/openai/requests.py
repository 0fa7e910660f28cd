"""OpenAI's completions and chats: parses bodies to requests."""

from __future__ import annotations

from penstock_router.apis.base import ERRORS, Api
from penstock_router.apis.chat_messages import ends_unfinished
from penstock_router.apis.images import take_images
from penstock_router.apis.openai.answers import (
    ChatAnswer,
    ChatChunk,
    ChatShape,
    CompletionAnswer,
    CompletionShape,
)
from penstock_router.apis.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DEFAULT_COMPLETION_TOKENS,
    NO_PROMPT,
)
from penstock_router.apis.openai.thinking import spread_thinking, thinking_kwargs
from penstock_router.apis.structured_output import constraint_options
from penstock_router.apis.tools import check_one_form, tool_options
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject, read_fields, refusal
from penstock_router.request import ChatRequest, CompletionRequest, Options

_OPTION_NAMES = frozenset(Options.__dataclass_fields__)
_RENAMED = {
    "repeat_last_n": "penalty_window_tokens",
    "slo": "seconds_between_tokens",
    "is_latency_sensitive": "latency_sensitive",
    "session_id": "session",
    "kv_hints": "retain",
    "timeout": "timeout_s",
}


def parse_completion(body: JsonObject) -> CompletionRequest:
    if body.get("prompt") is None and body.get("prompt_embeds") is None:
        raise BadRequest(NO_PROMPT, param="prompt")
    values = read_fields(COMPLETION_FIELDS, body)
    common = common_options(values)
    # -1 is read as None, and means no default.
    no_default = "max_tokens" in values and values["max_tokens"] is None
    request = CompletionRequest(
        prompts=values["prompt"],
        best_of=values.get("best_of") or common.get("n", 1),
        default_max_tokens=None if no_default else DEFAULT_COMPLETION_TOKENS,
        **common,
    )
    if request.best_of < request.n:
        raise BadRequest(f"best_of: must be at least n ({request.n})", param="best_of")
    if request.stream and request.best_of > request.n:
        raise BadRequest("best_of: must equal n when streaming", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise refusal("max_tokens", "at least 1 without echo", 0)
    return request


def parse_chat(body: JsonObject) -> ChatRequest:
    if body.get("messages") is None and body.get("input") is not None:
        # Cursor sends bodies of responses here.
        text = "messages: required; a body with input is for /v1/responses"
        raise BadRequest(text, param="messages")
    values = read_fields(CHAT_FIELDS, body)
    spread_thinking(values)
    values["max_tokens"] = values.get("max_completion_tokens", values.get("max_tokens"))
    if "max_completion_tokens" in values:
        values["max_tokens_field"] = "max_completion_tokens"
    values["logprobs"] = _chat_logprobs(values)
    tools = tool_options(values)
    common = common_options(values)
    if common.get("stream") and "prompt_logprobs" in common:
        raise BadRequest("prompt_logprobs: not in streams", param="prompt_logprobs")
    common.setdefault("add_special_tokens", False)
    request = ChatRequest(
        messages=values["messages"],
        images=take_images(values["messages"]),
        include_reasoning=values.get("include_reasoning", True),
        thinking_tokens=values.get("thinking_token_budget"),
        **template_options(values),
        **tools,
        **common,
    )
    check_one_form(request)
    return request


def common_options(values: JsonObject) -> JsonObject:
    constraint = constraint_options(values)
    named = {_RENAMED.get(name, name): value for name, value in values.items()}
    common = {name: value for name, value in named.items() if name in _OPTION_NAMES} | constraint
    if adapter := values.get("lora_path"):
        common["model"] = adapter
    stream = common.get("stream", False)
    stream_options = values.get("stream_options")
    if stream_options and not stream:
        text = "stream_options: only allowed when stream is true"
        raise BadRequest(text, param="stream_options")
    if stream_options and stream_options.get("include_usage"):
        common["include_usage"] = True
        common["continuous_usage"] = bool(stream_options.get("continuous_usage_stats"))
    if stream and common.get("prompt_logprobs"):
        raise BadRequest("prompt_logprobs: not in streams", param="prompt_logprobs")
    if requested := common.get("logprob_token_ids"):
        if common.get("logprobs") is None:
            raise BadRequest("logprob_token_ids: needs logprobs", param="logprob_token_ids")
        # Each position reports an id once.
        common["logprob_token_ids"] = tuple(dict.fromkeys(requested))
    return common


def _chat_logprobs(values: JsonObject) -> int | None:
    top: int = values.get("top_logprobs", 0)
    if values.get("logprobs"):
        return top
    if top:
        raise BadRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return None


def template_options(values: JsonObject) -> JsonObject:
    """Return the options of `ChatRequest`, except messages, that a chat's prompt depends on."""
    continues = values.get("continue_final_message", ends_unfinished(values.get("messages", ())))
    begins = values.get("add_generation_prompt", not continues)
    if continues and begins:
        text = "continue_final_message: not together with add_generation_prompt"
        raise BadRequest(text, param="continue_final_message")
    return {
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        "documents": list(values["documents"]) if values.get("documents") else None,
        "chat_template": values.get("chat_template"),
        "template_kwargs": {**thinking_kwargs(values), **own_kwargs(values)},
    }


# The router sets these variables itself; a request must not override them.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)


def own_kwargs(values: JsonObject) -> JsonObject:
    """Return the template variables that the request gives by name. Raises `BadRequest`."""
    kwargs: JsonObject = values.get("chat_template_kwargs", {})
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        text = f"chat_template_kwargs: {reserved[0]} is a field of its own"
        raise BadRequest(text, param="chat_template_kwargs")
    return kwargs


def _name_completion(request_id: str, named_by_client: bool) -> str:
    # Choices of a completion have numbered request ids; clients expect the id of the first choice.
    return f"cmpl-{request_id}-0" if named_by_client else f"cmpl-{request_id}"


COMPLETIONS = Api(
    name="completions",
    request_type=CompletionRequest,
    fields=COMPLETION_FIELDS,
    parse=parse_completion,
    make_shape=CompletionShape,
    name_answer=_name_completion,
    errors=ERRORS,
    answer=CompletionAnswer,
    event=CompletionAnswer,
    resumable=True,
)
CHATS = Api(
    name="chats",
    request_type=ChatRequest,
    fields=CHAT_FIELDS,
    parse=parse_chat,
    make_shape=ChatShape,
    name_answer=lambda request_id, named_by_client: f"chatcmpl-{request_id}",
    errors=ERRORS,
    answer=ChatAnswer,
    event=ChatChunk,
    resumable=True,
)
