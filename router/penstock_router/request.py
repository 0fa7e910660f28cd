"""A request for tokens, whichever API it came by: the type to which all are translated.

A request is well-formed by itself; what depends on a model is checked in `generation/job.py`. None
means: the model's own default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from penstock_client.types import Constraint
from penstock_router.argument_kinds import outline

# A message as chat templates expect it: no nulls, its text as one string. One with images has a
# list of parts instead, as `text/contents.py` has them.
Message = dict[str, Any]
# Width and height in pixels of each image.
ImageSizes = tuple[tuple[int, int], ...]
# As a number of log-probabilities: of all tokens that there are.
WHOLE_VOCABULARY = -1
# The bound of `Options.session`, in whichever field it was given.
MAX_SESSION_CHARS = 256
# The bound of `Options.request_id`, likewise.
MAX_REQUEST_ID_CHARS = 256
# The bounds of `Options.timeout_s`: shards get the deadline as 32-bit milliseconds.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, (2**32 - 1) // 1000


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a chat's answer may call."""

    name: str
    # The JSON schema of its arguments; None: any object.
    parameters: dict[str, Any] | None = None
    # Whether the schema is enforced even if calling a tool is optional.
    strict: bool = False
    # The tool as the chat template gets it; {}: the prompt shows it in a message, or not at all.
    shown: dict[str, Any] = field(default_factory=dict)
    # What its only argument, a string, must be where calls have strings as they are: a format of a
    # structural tag.
    text_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Permission or duty to call tools; with mode "named", `name` is the one to call."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""

    @property
    def forces(self) -> bool:
        """Tell whether the answer must be one or several calls."""
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice()


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that a body names: an http, https, file or data URL, and the field that has it."""

    url: str
    param: str
    # Whether a tool's result has it, and so no user chose the model for it.
    in_result: bool = False


@dataclass(frozen=True, slots=True)
class TextWithImages:
    """A text to complete, with an image between each two of its `texts`."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Fields that all requests for tokens share."""

    model: str = ""
    n: int = 1
    # None: up to the end of the context.
    max_tokens: int | None = None
    # The body's field that it came from, for error messages.
    max_tokens_field: str = "max_tokens"
    # Whether a `max_tokens` beyond the end of the context means up to that end, or is refused.
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
    # How many tokens before the next one the three penalties look at; None: all; 0: none.
    penalty_window_tokens: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    # What the answer's text must be like, and the field that asks for it.
    constraint: Constraint | None = None
    constraint_field: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # None: none; 0: of the chosen token; k: also of the k best, or of the `WHOLE_VOCABULARY`, for
    # which a job has the number. Likewise for the prompt's.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Tokens whose log-probability is reported at every position, in place of the k best.
    logprob_token_ids: tuple[int, ...] = ()
    echo: bool = False
    add_special_tokens: bool = True
    # Cut the prompt to this many tokens; -1: to as many as fit beside `max_tokens`.
    truncate_prompt_tokens: int | None = None
    # Which end is cut off: "left" or "right"; None: as the tokenizer has it.
    truncation_side: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    # The fewest tokens in an event of a stream, except the first and the last.
    stream_interval: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    # PriorityPolicy for the scheduler. Lower priorities run first.
    priority: int | None = None
    seconds_between_tokens: float | None = None
    latency_sensitive: bool | None = None
    cache_salt: str = ""
    # Its images, in the order of their places; and what is known of them once they were loaded.
    images: tuple[ImageSource, ...] = ()
    image_sizes: ImageSizes = ()
    request_id: str | None = None
    # The W3C trace context that shards get.
    traceparent: str = ""
    # The name of its client that shards get.
    caller: str = ""
    # The name of the API key, for the audit log.
    key_name: str = ""
    # Its time limit, from arrival to end; None: the server's.
    timeout_s: float | None = None
    # `exact`: continue only at shards that compute the same bits. `session`: requests that
    # belong together. `shard`: the address of the only shard that may run it.
    exact: bool = False
    session: str = ""
    shard: str = ""
    # What of the body has no effect on the answer: a line each, for the answer's headers.
    warnings: tuple[str, ...] = ()

    @property
    def best_logprobs(self) -> int | None:
        """The number of the likeliest that are reported at each position of the answer; None: not
        even the chosen token is reported.
        """
        return 0 if self.logprobs is not None and self.logprob_token_ids else self.logprobs

    @property
    def places(self) -> tuple[int, str]:
        """Count the sequences it asks for, and name the field that asks for so many."""
        return self.n, "n"

    @property
    def brings_template(self) -> bool:
        """Tell whether a program of its own is to make its prompt."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Options):
    """Completes texts or token ids. `max_tokens` 0 asks only for the prompt's own scores."""

    prompts: tuple[str | list[int] | TextWithImages, ...]
    best_of: int = 1

    def without_text(self) -> Self:
        """A copy without fields that may be long: of its prompts only their number is left."""
        count = len(self.prompts)
        return dataclasses.replace(
            self, prompts=("",) * count, bad_words=(), allowed_token_ids=(), constraint=None
        )

    @property
    def places(self) -> tuple[int, str]:
        """Count the sequences it asks for, and name the field that asks for so many."""
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
    # Whether one answer may make several calls.
    parallel_tool_calls: bool = True
    # Whether reasoning is shown, and how many tokens it may have; None: any number.
    include_reasoning: bool = True
    thinking_tokens: int | None = None
    # Whether a model that cannot be kept to so many refuses them, or answers without that bound.
    requires_thinking_budget: bool = True
    # The request's own template, allowed only with --trust-request-chat-template.
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def brings_template(self) -> bool:
        """Tell whether a program of its own is to make its prompt."""
        return self.chat_template is not None

    def without_text(self) -> Self:
        """A copy without fields that may be long."""
        return dataclasses.replace(
            self,
            messages=[],
            documents=None,
            # Their names, and the types of their arguments, are needed to read calls.
            tools=tuple(Tool(tool.name, outline(tool.parameters)) for tool in self.tools),
            # Whether there is one is still known.
            chat_template=None if self.chat_template is None else "",
            template_kwargs={},
            bad_words=(),
            allowed_token_ids=(),
            constraint=None,
        )
