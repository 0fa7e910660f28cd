"""Makes prompts from a request's text: renders, tokenizes and checks it.

The functions are synchronous. Short texts run on the event loop, longer ones in a thread, and long
bodies in a text process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock_proto.limits import MAX_BAD_WORD_TOKENS
from penstock_proto.types import Constraint
from penstock_router.errors import BadRequest, ContextExceeded, ImageUnusable
from penstock_router.json_fields import INT32_MAX, JsonObject
from penstock_router.request import (
    ChatRequest,
    CompletionRequest,
    ImageSizes,
    Message,
    Options,
    TextWithImages,
)
from penstock_router.text.answer_constraint import answer_constraint, tools_held_to, tools_of
from penstock_router.text.chat_template import ChatTemplate, TemplateUnusable
from penstock_router.text.contents import as_text, join_contents, text_part
from penstock_router.text.formats.json_formats.plain_json import instructions
from penstock_router.text.image_tokens.base import ImagePlace, ImageTokens
from penstock_router.text.image_tokens.expand import encode_with_images
from penstock_router.text.image_tokens.plain_text import cut_spelled
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import reasoning_begun, reasoning_over
from penstock_router.text.schema_keywords import keyword_warnings
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.tools import completed_tool
from penstock_router.text.tokenizer import Tokenizer, Truncation, prompt_too_long


@dataclass(frozen=True, slots=True)
class TextModel:
    """The facts about a model that preparing prompts needs."""

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    # True if requests may bring their own chat template.
    trusts_templates: bool
    conventions: Conventions
    # None: the model takes no images. `images_unusable` says why, if the model itself can see.
    image_tokens: ImageTokens | None = None
    images_unusable: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its ids, its text if an answer may echo it, and the places of its images.

    The ids of a long prompt are an `array` of 32-bit integers, which Python code should not loop
    over.
    """

    token_ids: Sequence[int]
    text: str | None = None
    images: tuple[ImagePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The result of `prepare_prompts`."""

    prompts: tuple[Prompt, ...]
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    # The text that the answer begins with (`echo`).
    full_text: str = ""
    # The conversation before the answer, as a JSON array; empty if not stored.
    conversation: bytes = b""
    # Fields of the request that the response repeats, as JSON.
    repeated: Mapping[str, bytes] = field(default_factory=dict)
    constraint: Constraint | None = None
    # True if the prompt ends within reasoning.
    reasoning_begun: bool = False
    # A line for each part of the request that has no effect.
    warnings: tuple[str, ...] = ()
    # Tools whose grammars are shown to the model but not enforced.
    unenforced: tuple[str, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """The bytes that are held until the answer ends."""
        return len(self.conversation) + sum(map(len, self.repeated.values()))


# Stands for an image in a tool's result.
_UNSEEN = text_part("(an image, which this model cannot see)")


def prepare_prompts(request: Options, model: TextModel) -> PreparedPrompts:
    """Prepare the prompts of a chat or completion; one invalid prompt refuses the request."""
    begun, style = False, model.conventions.reasoning
    if isinstance(request, ChatRequest):
        pieces = render(request, model)
        prompts = [_tokenize(request, model, pieces, model.max_model_len)]
        if style is not None:
            text = "".join(pieces)
            continued = _last_message(request) if request.continue_final_message else ""
            begun = reasoning_begun(text, style, continued)
            style = None if reasoning_over(text, style) else style
    else:
        assert isinstance(request, CompletionRequest)
        prompts = completion_prompts(request, model)
    _check_ids(model, request)
    return PreparedPrompts(
        tuple(prompts),
        _bad_words(model, request),
        request.allowed_token_ids,
        constraint=answer_constraint(
            request,
            model.conventions.tool_format,
            style,
            begun=begun,
            separators=_separators(model),
        ),
        reasoning_begun=begun,
        warnings=_warnings(request, model),
    )


def thinking_mark_ids(model: TextModel) -> tuple[int, int] | None:
    """Return the token ids of the reasoning marks, for thinking budgets; None if a mark is not one
    token.
    """
    style = model.conventions.reasoning
    begin_id, end_id = map(model.tokenizer.token_id, style.marks if style else ("", ""))
    return None if begin_id is None or end_id is None else (begin_id, end_id)


def _warnings(request: Options, model: TextModel) -> tuple[str, ...]:
    if not isinstance(request, ChatRequest):
        return ()
    found = []
    has_budget = request.thinking_tokens is not None and not request.requires_thinking_budget
    if has_budget and thinking_mark_ids(model) is None:
        found.append(
            "thinking.budget_tokens: the model does not mark its reasoning, which has no bound"
        )
    if model.image_tokens is None and any(map(_has_images, request.messages)):
        found.append("images in results of tools: the model cannot see them")
    for tool in tools_held_to(request, model.conventions.tool_format):
        found += keyword_warnings(f"tools: {tool.name}", [tool.parameters])
    return tuple(found)


def _separators(model: TextModel) -> tuple[str, str] | None:
    """Return the template's separators in tool arguments. If the model writes the same ones, the
    next turn finds the answer in the prefix cache.
    """
    template = model.chat_template
    return None if template is None else template.traits(with_tools=True).argument_separators


def embedding_prompts(request: CompletionRequest, model: TextModel) -> PreparedPrompts:
    if request.truncate_prompt_tokens == -1:
        # Embeddings have no output, so the input may fill the whole context.
        request = dataclasses.replace(request, truncate_prompt_tokens=model.max_model_len)
    prompts = completion_prompts(request, model, "input")
    if not all(prompt.token_ids for prompt in prompts):
        raise BadRequest("input: one of the inputs has no tokens", param="input")
    return PreparedPrompts(tuple(prompts))


# ---- Completions -------------------------------------------------------------------------------


def completion_prompts(
    request: CompletionRequest, model: TextModel, param: str = "prompt"
) -> list[Prompt]:
    """Tokenize texts and check ids; `param` is their field in the body."""
    truncation = _truncation(request, model)
    pairs = [(prompt, pieces_of(prompt, model)) for prompt in request.prompts]
    encoded = iter(
        model.tokenizer.encode(
            [prompt for prompt, pieces in pairs if isinstance(prompt, str) and not pieces],
            add_special_tokens=request.add_special_tokens,
            max_tokens=model.max_model_len,
            truncation=truncation,
        )
    )
    sizes, prompts = iter(request.image_sizes), []
    for prompt, pieces in pairs:
        if pieces:
            num_images = len(prompt.texts) - 1 if isinstance(prompt, TextWithImages) else 0
            of_it = tuple(islice(sizes, num_images))
            made = _encode_pieces(request, model, pieces, of_it, model.max_model_len)
        elif isinstance(prompt, str) and truncation is None:
            made = Prompt(next(encoded))
        else:
            ids = prompt if isinstance(prompt, list) else next(encoded)
            made = _prompt_of_ids(ids if truncation is None else truncation.cut(ids), model, param)
        if request.echo:
            whole = prompt if isinstance(prompt, str) and truncation is None else None
            text = _decoded(request, model, made.token_ids) if whole is None else whole
            made = dataclasses.replace(made, text=text)
        prompts.append(made)
    if rest := len(tuple(sizes)):
        raise BadRequest(f"{param}: it has no place for {rest} of the images", param=param)
    return prompts


def pieces_of(prompt: str | list[int] | TextWithImages, model: TextModel) -> Sequence[str]:
    """Return the texts to tokenize separately, with an anchor for each image; () for ids and plain
    text.
    """
    with_images = isinstance(prompt, TextWithImages)
    if model.image_tokens is None and with_images:
        raise takes_no_images(model)
    if model.image_tokens is None or isinstance(prompt, list):
        return ()
    given = prompt.texts if isinstance(prompt, TextWithImages) else (prompt,)
    texts, mark = cut_spelled(given, model.image_tokens.reserved)
    return _split(model.image_tokens.written.join(texts), mark) if mark or with_images else ()


def _split(text: str, mark: str) -> Sequence[str]:
    return text.split(mark) if mark else (text,)


def has_images(pieces: Sequence[str], sizes: ImageSizes, model: TextModel) -> bool:
    """Tell whether these pieces have images, or spell an image token."""
    images = model.image_tokens
    return images is not None and bool(sizes or len(pieces) > 1 or images.is_spelled_in(pieces[0]))


def takes_no_images(model: TextModel, param: str = "") -> ImageUnusable:
    why = f" ({model.images_unusable})" if model.images_unusable else ""
    text = f"the model {model.name} takes no images{why}"
    return ImageUnusable(f"{param}: {text}" if param else text, param=param or None)


def _encode_pieces(
    request: Options,
    model: TextModel,
    pieces: Sequence[str],
    sizes: ImageSizes,
    max_tokens: int,
) -> Prompt:
    """Tokenize a prompt that has images, or spells an image token. The result has no `text`."""
    assert model.image_tokens is not None
    ids, places = encode_with_images(
        model.tokenizer,
        pieces,
        model.image_tokens,
        sizes,
        add_special_tokens=request.add_special_tokens,
        max_tokens=max_tokens,
        truncation=_truncation(request, model),
    )
    return Prompt(ids, None, places)


def _prompt_of_ids(token_ids: list[int], model: TextModel, param: str) -> Prompt:
    # Check the length before the ids: there may be millions.
    if len(token_ids) > model.max_model_len:
        raise prompt_too_long(len(token_ids), model.max_model_len)
    largest = max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=param)
    return Prompt(token_ids)


def _decoded(request: Options, model: TextModel, token_ids: Sequence[int]) -> str:
    return model.tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)


def _truncation(request: Options, model: TextModel) -> Truncation | None:
    """Return where to cut long prompts; None: refuse them."""
    wanted, limit = request.truncate_prompt_tokens, model.max_model_len
    if wanted is None:
        return None
    if wanted > limit:
        raise ContextExceeded(
            f"truncate_prompt_tokens: must be at most {limit}, the model's context length; "
            f"given: {wanted}",
            limit_tokens=limit,
            wanted_tokens=wanted,
            param="truncate_prompt_tokens",
        )
    if wanted == -1:
        may_follow = request.max_tokens
        if may_follow is None:
            may_follow = request.default_max_tokens or 1
        elif request.bounds_max_tokens:
            # Leave the prompt at least half of the context.
            may_follow = min(may_follow, limit // 2)
        wanted = max(1, limit - max(1, may_follow))
    return Truncation(wanted, request.truncation_side or model.tokenizer.truncation_side)


# ---- Chats -------------------------------------------------------------------------------------


def chat_prompt(request: ChatRequest, model: TextModel, max_tokens: int | None = None) -> Prompt:
    """Render and tokenize a chat's messages; refuse more than `max_tokens`, by default the model's
    context.
    """
    pieces = render(request, model)
    return _tokenize(request, model, pieces, max_tokens or model.max_model_len)


def _tokenize(
    request: ChatRequest, model: TextModel, pieces: Sequence[str], max_tokens: int
) -> Prompt:
    if has_images(pieces, request.image_sizes, model):
        prompt = _encode_pieces(request, model, pieces, request.image_sizes, max_tokens)
        return dataclasses.replace(prompt, text=_last_message(request) if request.echo else None)
    [token_ids] = model.tokenizer.encode(
        pieces,
        add_special_tokens=request.add_special_tokens,
        max_tokens=max_tokens,
        truncation=_truncation(request, model),
    )
    return Prompt(token_ids, _last_message(request) if request.echo else None)


def render(request: ChatRequest, model: TextModel) -> Sequence[str]:
    """Render the prompt's text, in pieces to tokenize separately. A request may bring its own
    template if the operator allows it.
    """
    if request.image_sizes and model.image_tokens is None:
        raise takes_no_images(model)
    template = model.chat_template
    if request.chat_template is not None:
        template = _template_of_request(request.chat_template, model)
    if template is None:
        raise BadRequest(
            f"the model {model.name} has no chat template; start the router with "
            "--chat-template FILE to give it one",
            param="messages",
        )
    messages, tools = request.messages, tools_of(request)
    if model.image_tokens is None:
        messages = [_with_images_told(message) for message in messages]
    tool_format = model.conventions.tool_format
    shown_tools = [tool for tool in tools if tool.shown]
    if shown_tools and not template.takes_tools:
        messages = _add_system_text(messages, instructions(shown_tools, tool_format))
    shown, documents, kwargs = (
        [tool.shown for tool in shown_tools] or None,
        request.documents,
        template.thinking(request.template_kwargs),
    )
    messages = fit(
        messages,
        template.traits(with_tools=shown is not None),
        native_call_id=None if tool_format is None else tool_format.call_id,
        calls_in_words=None if tool_format is None else tool_format.calls_in_words,
        keep_last=request.continue_final_message,
    )
    mark = ""
    if (images := model.image_tokens) is not None:
        of_users = messages, shown, documents, kwargs
        (messages, shown, documents, kwargs), mark = cut_spelled(of_users, images.reserved)
        messages = _with_images_in_form(messages, template, images, with_tools=shown is not None)
    rendered = functools.partial(
        template.render,
        messages,
        documents=documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=kwargs,
    )
    return _split(_with_tools(rendered, shown), mark)


def _with_images_told(message: Message) -> Message:
    """Replace a message's images with words, because the model cannot see them."""
    if not _has_images(message):
        return message
    parts = [_UNSEEN if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def _with_tools(rendered: Callable[..., str], shown: list[JsonObject] | None) -> str:
    """Render with these tools; if the template refuses them, retry with missing fields added."""
    try:
        return rendered(tools=shown)
    except BadRequest:
        completed = [completed_tool(tool) for tool in shown or ()]
        if completed == (shown or []):
            raise
        return rendered(tools=completed)


def _with_images_in_form(
    messages: list[Message], template: ChatTemplate, images: ImageTokens, *, with_tools: bool
) -> list[Message]:
    return [
        {**message, "content": as_text(message["content"], images.written)}
        if _has_images(message)
        and not template.takes_images(message["role"], images.anchor, with_tools=with_tools)
        else message
        for message in messages
    ]


def _has_images(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _add_system_text(messages: list[Message], text: str) -> list[Message]:
    """Put the text first: many templates take only one system message, at the beginning."""
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    content = join_contents(first.get("content", ""), text, "\n\n")
    return [{**first, "content": content}, *messages[1:]]


def _template_of_request(source: str, model: TextModel) -> ChatTemplate:
    if not model.trusts_templates:
        raise BadRequest(
            "chat_template: this server takes none from requests (--trust-request-chat-template)",
            param="chat_template",
        )
    known = model.chat_template
    special_tokens = {} if known is None else known.special_tokens
    try:
        return _template(source, tuple(special_tokens.items()))
    except TemplateUnusable as error:
        raise BadRequest(f"chat_template: {error}", param="chat_template") from None


@functools.lru_cache(maxsize=4)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compile a template once for clients that send it with each request."""
    return ChatTemplate({"default": source}, dict(special_tokens))


def _last_message(request: ChatRequest) -> str:
    """Return the text that `echo` puts before the answer: the last message, if the assistant's."""
    last = request.messages[-1]
    return as_text(last.get("content", ""), "") if last["role"] == "assistant" else ""


# ---- Other checks that need the model's vocabulary ---------------------------------------------


def _check_ids(model: TextModel, request: Options) -> None:
    # Shards refuse this too, but only after receiving the ids for each choice.
    if (count := len(request.allowed_token_ids)) > model.vocab_size:
        text = f"allowed_token_ids: at most {model.vocab_size} ids; given: {count}"
        raise BadRequest(text, param="allowed_token_ids")
    for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids", "logit_bias"):
        largest = max(getattr(request, name), default=0)
        if largest >= model.vocab_size:
            allowed = f"0..{model.vocab_size - 1} (the vocabulary)"
            text = f"{name}: {largest} is out of bounds; allowed: {allowed}"
            raise BadRequest(text, param=name)


def _bad_words(model: TextModel, request: Options) -> list[list[int]]:
    """Return the ids of each word, both at the beginning of a text and after a space."""
    words = [form for word in request.bad_words for form in (word, f" {word.lstrip()}")]
    if not words:
        return []
    encoded = model.tokenizer.encode(words, add_special_tokens=False, max_tokens=INT32_MAX)
    longest = max(map(len, encoded))
    if longest > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            f"bad_words: a word may have {MAX_BAD_WORD_TOKENS} tokens; one has {longest}",
            param="bad_words",
        )
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]


# ---- Ids as bytes ------------------------------------------------------------------------------


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack ids as 32 bits each, little-endian."""
    values = ids if isinstance(ids, array) else array("I", ids)
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()
