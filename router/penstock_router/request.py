"""A request for tokens, to which all APIs are translated.

A request is checked without its model; `generation/job.py` checks the rest. None means the model's
own default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from penstock_client.types import Constraint, Retain
from penstock_router.argument_kinds import outline

# A message as chat templates expect it: without nulls, and with its content as one string. With
# images, the content is a list of parts, as in `text/contents.py`.
Message = dict[str, Any]
# Width and height in pixels of each image.
ImageSizes = tuple[tuple[int, int], ...]
# Number of log-probabilities that means all tokens.
WHOLE_VOCABULARY = -1
# The bound of `Options.session`, in any field.
MAX_SESSION_CHARS = 256
# The bound of `Options.request_id`, in any field.
MAX_REQUEST_ID_CHARS = 256
# The bounds of `Options.timeout_s`: shards get the deadline as 32-bit milliseconds.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, (2**32 - 1) // 1000


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a chat's answer may call."""

    name: str
    # JSON schema of the arguments; None: any object.
    parameters: dict[str, Any] | None = None
    # True if the schema is enforced even if calling a tool is optional.
    strict: bool = False
    # The tool as the chat template gets it; {}: the prompt shows it in a message, or not at all.
    shown: dict[str, Any] = field(default_factory=dict)
    # A structural tag's format of the tool's only argument, a string, if the model writes strings
    # in calls literally.
    text_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Permission or duty to call tools; with mode "named", `name` is the tool to call."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""

    @property
    def forces(self) -> bool:
        """True if the answer must be one or several calls."""
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice()


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that a body names: an http, https, file or data URL, and the field that has it."""

    url: str
    param: str
    # True if the image is in a tool's result: then no user chose the model for this image.
    in_result: bool = False


@dataclass(frozen=True, slots=True)
class TextWithImages:
    """A text to complete, with an image between every two of its `texts`."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Fields that all requests for tokens share."""

    model: str = ""
    n: int = 1
    # None: up to the end of the context.
    max_tokens: int | None = None
    # The body's field of `max_tokens`, for errors.
    max_tokens_field: str = "max_tokens"
    # True if a `max_tokens` beyond the end of the context means that end; false: it is refused.
    bounds_max_tokens: bool = False
    # The limit if `max_tokens` is None; None: up to the end of the context.
    default_max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Tokens before the next one to which the three penalties apply; None: all; 0: none.
    penalty_window_tokens: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    # The constraint of the answer's text, and the field that asks for it.
    constraint: Constraint | None = None
    constraint_field: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Log-probabilities of the answer and of the prompt. None: none; 0: only the token's; k: also
    # the k best, or the `WHOLE_VOCABULARY`, whose size a job has.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Tokens whose log-probability is reported at every position, in place of the k best.
    logprob_token_ids: tuple[int, ...] = ()
    echo: bool = False
    add_special_tokens: bool = True
    # Cut the prompt to this many tokens; -1: to as many as fit beside `max_tokens`.
    truncate_prompt_tokens: int | None = None
    # The end that is cut off: "left" or "right"; None: the tokenizer's default.
    truncation_side: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    # The fewest tokens in an event of a stream, except the first and the last.
    stream_interval: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    # For the scheduler: lower values run first.
    priority: int | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool | None = None
    cache_salt: str = ""
    # Images in the order of their places; and their sizes once they are loaded.
    images: tuple[ImageSource, ...] = ()
    image_sizes: ImageSizes = ()
    request_id: str | None = None
    # W3C trace context for shards.
    traceparent: str = ""
    # The client's name for shards.
    caller: str = ""
    # The API key's name, for the audit log.
    key_name: str = ""
    # Time limit from arrival to end; None: the server's.
    timeout_s: float | None = None
    # `exact`: continue only at shards that compute the same bits. `session`: a name shared by
    # related requests. `shard`: the address of the only shard that may run the request.
    exact: bool = False
    session: str = ""
    shard: str = ""
    # Retention of the KV blocks after the end; None: the answer's end decides.
    retain: Retain | None = None
    # Lines about parts of the body without effect, for the answer's headers.
    warnings: tuple[str, ...] = ()

    @property
    def best_logprobs(self) -> int | None:
        """The number of likeliest tokens reported at each position of the answer; None: not even
        the sampled token.
        """
        return 0 if self.logprobs is not None and self.logprob_token_ids else self.logprobs

    @property
    def places(self) -> tuple[int, str]:
        """The number of requested sequences, and the field that requests it."""
        return self.n, "n"

    @property
    def brings_template(self) -> bool:
        """True if the request brings a program that makes its prompt."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Options):
    """Completes texts or token ids. `max_tokens` 0 asks only for the prompt's own scores."""

    prompts: tuple[str | list[int] | TextWithImages, ...]
    best_of: int = 1

    def without_text(self) -> Self:
        """A copy without fields that may be long: only the number of its prompts is left."""
        count = len(self.prompts)
        return dataclasses.replace(
            self, prompts=("",) * count, bad_words=(), allowed_token_ids=(), constraint=None
        )

    @property
    def places(self) -> tuple[int, str]:
        """The number of requested sequences, and the field that requests it."""
        param = "best_of" if self.best_of > self.n else "n" if self.n > 1 else "prompt"
        return len(self.prompts) * self.best_of, param


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Options):
    """Answers messages, which the model's chat template turns into a prompt."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    # True if one answer may make several calls.
    parallel_tool_calls: bool = True
    # True if reasoning is shown; and its maximum tokens (None: no bound).
    include_reasoning: bool = True
    thinking_tokens: int | None = None
    # True if the request is refused when the model cannot bound its reasoning; false: the reasoning
    # is then unbounded.
    requires_thinking_budget: bool = True
    # The request's own template, allowed only with --trust-request-chat-template.
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def brings_template(self) -> bool:
        """True if the request brings a program that makes its prompt."""
        return self.chat_template is not None

    def without_text(self) -> Self:
        return dataclasses.replace(
            self,
            messages=[],
            documents=None,
            # Names and argument types are needed to read calls.
            tools=tuple(Tool(tool.name, outline(tool.parameters)) for tool in self.tools),
            # Keep the information whether there is a template.
            chat_template=None if self.chat_template is None else "",
            template_kwargs={},
            bad_words=(),
            allowed_token_ids=(),
            constraint=None,
        )
