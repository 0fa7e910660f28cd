"""A request for tokens. All APIs are translated to it.

It is checked without the model here, and against the model in `generation/job.py`. None means the
model's default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from penstock_proto.types import Constraint, Retain, SamplingNumbers
from penstock_router.argument_kinds import outline

# A message as chat templates expect it: without nulls, and with one string as its content. With
# images, the content is a list of parts, as in `text/contents.py`.
Message = dict[str, Any]
# Width and height of each image in pixels.
ImageSizes = tuple[tuple[int, int], ...]
# A number of log-probabilities that means all tokens.
WHOLE_VOCABULARY = -1
MAX_SESSION_CHARS = 256
MAX_REQUEST_ID_CHARS = 256
# Shards get the deadline as 32-bit milliseconds.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, (2**32 - 1) // 1000


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    # JSON schema of the arguments; None: any object.
    parameters: dict[str, Any] | None = None
    # True if the schema is enforced even if tool calls are optional.
    strict: bool = False
    # The tool's definition for the chat template. Empty if a message shows the tool, or if nothing
    # shows it.
    shown: dict[str, Any] = field(default_factory=dict)
    # The structural tag's format for the tool's text, if the tool has one string argument that the
    # model writes literally.
    text_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Says if the answer may or must call tools. With mode "named", it must call `name`."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""

    @property
    def forces(self) -> bool:
        """True if the answer must consist of calls."""
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice()


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image in a body: an http, https, file or data URL, and the field that has it."""

    url: str
    param: str
    # True if the image is in a tool's result. If the model takes no images, a text replaces it.
    in_result: bool = False


@dataclass(frozen=True, slots=True)
class TextWithImages:
    """A text to complete, with one image between consecutive `texts`."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The sender of a request, as its headers, its key and its connection describe it.

    `traceparent` is the W3C trace context for shards. `caller` is the client's name for shards,
    `key_name` the API key's for the audit log. `session` is a name shared by related requests.
    `exact`: continue only on shards that compute the same bits. `shard`: the address of the only
    shard that may run the request. `bounds_max_tokens`: see `Options`.
    """

    request_id: str = ""
    traceparent: str = ""
    caller: str = ""
    key_name: str = ""
    session: str = ""
    exact: bool = False
    shard: str = ""
    bounds_max_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SamplingNumbers):
    """Fields that all requests for tokens share."""

    model: str = ""
    n: int = 1
    # None: up to the end of the context.
    max_tokens: int | None = None
    # The name of the body's field that set `max_tokens`, for errors.
    max_tokens_field: str = "max_tokens"
    # True: a `max_tokens` beyond the context is reduced. False: it is refused.
    bounds_max_tokens: bool = False
    # The limit if `max_tokens` is None. If both are None, the answer may fill the context.
    default_max_tokens: int | None = None
    min_tokens: int | None = None
    # The three penalties apply to this many of the last tokens; None: all; 0: none.
    penalty_window_tokens: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    # The constraint on the answer's text, and the name of the field that set it.
    constraint: Constraint | None = None
    constraint_field: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Log-probabilities of the answer and of the prompt. None: no log-probabilities; 0: only the
    # chosen token's; k: also the k best tokens'; `WHOLE_VOCABULARY`: all.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Report these tokens' log-probabilities at every position, instead of the k best.
    logprob_token_ids: tuple[int, ...] = ()
    echo: bool = False
    add_special_tokens: bool = True
    # Truncate the prompt to this many tokens. -1 means as many as the context can hold besides
    # `max_tokens`.
    truncate_prompt_tokens: int | None = None
    # The end to cut off: "left" or "right"; None: the tokenizer's default.
    truncation_side: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    # The minimum of tokens in each streamed event except the first and the last.
    stream_interval: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    # Lower values run first.
    priority: int | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool | None = None
    cache_salt: str = ""
    # `images` has the images in the order of their places. `image_sizes` is empty until they are
    # loaded.
    images: tuple[ImageSource, ...] = ()
    image_sizes: ImageSizes = ()
    request_id: str | None = None
    # Time limit from arrival to end; None: the server's.
    timeout_s: float | None = None
    # A name shared by related requests.
    session: str = ""
    # The client's hint to retain KV blocks. None: no hint; the finish reason decides.
    retain: Retain | None = None
    # Warnings, for the answer's headers, about parts of the body that have no effect.
    warnings: tuple[str, ...] = ()

    @property
    def best_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each position of the answer. None: report no
        log-probabilities at all.
        """
        return 0 if self.logprobs is not None and self.logprob_token_ids else self.logprobs

    @property
    def places(self) -> tuple[int, str]:
        """The number of requested sequences, and the field that sets it."""
        return self.n, "n"

    @property
    def brings_template(self) -> bool:
        """True if the request has its own chat template."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Options):
    """Completes texts or token ids. `max_tokens` 0 asks only for the prompt's log-probabilities."""

    prompts: tuple[str | list[int] | TextWithImages, ...]
    best_of: int = 1

    def without_text(self) -> Self:
        """Return a copy without long fields, but with the same number of prompts."""
        count = len(self.prompts)
        return dataclasses.replace(
            self, prompts=("",) * count, bad_words=(), allowed_token_ids=(), constraint=None
        )

    @property
    def places(self) -> tuple[int, str]:
        param = "best_of" if self.best_of > self.n else "n" if self.n > 1 else "prompt"
        return len(self.prompts) * self.best_of, param


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Options):
    """Answers chat messages, which the model's chat template turns into a prompt."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    parallel_tool_calls: bool = True
    # `include_reasoning`: true if reasoning is shown. `thinking_tokens`: the maximum of reasoning
    # tokens; None: no bound.
    include_reasoning: bool = True
    thinking_tokens: int | None = None
    # If the model cannot bound its reasoning, true refuses the request, and false leaves it
    # unbounded.
    requires_thinking_budget: bool = True
    # The request's own template, allowed only with --trust-request-chat-template.
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def brings_template(self) -> bool:
        return self.chat_template is not None

    def without_text(self) -> Self:
        return dataclasses.replace(
            self,
            messages=[],
            documents=None,
            # Names and argument types are needed to read calls.
            tools=tuple(Tool(tool.name, outline(tool.parameters)) for tool in self.tools),
            # Keep the information that there is a template.
            chat_template=None if self.chat_template is None else "",
            template_kwargs={},
            bad_words=(),
            allowed_token_ids=(),
            constraint=None,
        )
