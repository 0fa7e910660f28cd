"""A well-formed body -> a `Job`: rendered, tokenized, its lengths checked, its choices fanned out.

Knows models and token counts, not streams and not answers. Whatever is wrong with any part of a
request is found here, before any shard has heard of it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_client.types import GenerationRequest, Objective, SamplingParams, random_seed
from penstock_router.chat_template import ChatTemplate, TemplateUnusable
from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.fields import INT32_MAX
from penstock_router.models import Models, ServedModel
from penstock_router.request import ChatRequest, CompletionRequest, Options
from penstock_router.tokenizer import INLINE_CHARS, Truncation, prompt_too_long

# What an item of a message costs a template, in characters of text.
_ITEM_CHARS = 10
# As shards have it.
_MAX_BAD_WORD_IDS = 64
# Up to so many ids are decoded on the event loop (about 0.2 us each).
_INLINE_IDS = 1000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and its text where an answer may echo it."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a client has of one choice already, from an answer that was cut off."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False

    @property
    def begun(self) -> bool:
        """There is something that must not be shown again."""
        return bool(self.tokens or self.characters or self.finished)


NOTHING_DELIVERED = Delivered()


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can run: choice `i` is `requests[i]`, of prompt `i // choices_per_prompt`.

    `delivered` says for each choice what not to show again; empty for an answer from its beginning.
    """

    model: ServedModel
    options: Options
    prompts: tuple[Prompt, ...]
    requests: tuple[GenerationRequest, ...]
    delivered: tuple[Delivered, ...] = ()

    @property
    def choices_per_prompt(self) -> int:
        return len(self.requests) // len(self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.choices_per_prompt]

    def delivered_of(self, index: int) -> Delivered:
        return self.delivered[index] if self.delivered else NOTHING_DELIVERED


async def prepare(request: Options, models: Models) -> Job:
    """The job of a request of either kind. One bad prompt refuses it before any work."""
    model = await models.get(request.model)
    if isinstance(request, ChatRequest):
        prompts, choices = [await chat_prompt(request, model, models)], request.n
    else:
        assert isinstance(request, CompletionRequest)
        prompts, choices = await completion_prompts(request, model, models), request.best_of
    _check_ids(model, request)
    bad_words = await _bad_words(model, request)
    return _job(model, request, prompts, choices, bad_words)


async def completion_prompts(
    request: CompletionRequest, model: ServedModel, models: Models, param: str = "prompt"
) -> list[Prompt]:
    """Texts tokenized, ids checked; `param` is the field that they came in."""
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    truncation = _truncation(request, model)
    encoded = iter(
        await model.tokenizer.encode(
            texts,
            add_special_tokens=request.add_special_tokens,
            max_tokens=model.info.max_model_len,
            truncation=truncation,
        )
    )
    prompts = []
    for prompt in request.prompts:
        ids = next(encoded) if isinstance(prompt, str) else prompt
        if truncation is None and isinstance(prompt, str):
            prompts.append(Prompt(ids, prompt if request.echo else None))
        else:
            ids = ids if truncation is None else truncation.cut(ids)
            prompts.append(await _prompt_of_ids(ids, model, request, models, param))
    return prompts


def _truncation(request: Options, model: ServedModel) -> Truncation | None:
    """How long a prompt may be and which end is cut off; None: a longer one is refused."""
    wanted, limit = request.truncate_prompt_tokens, model.info.max_model_len
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
        wanted = max(1, limit - max(1, may_follow))
    return Truncation(wanted, request.truncation_side or model.tokenizer.truncation_side)


def _check_ids(model: ServedModel, request: Options) -> None:
    # Shards refuse it too, but once for each choice that the ids were sent for.
    if (count := len(request.allowed_token_ids)) > model.info.vocab_size:
        text = f"allowed_token_ids: at most {model.info.vocab_size} ids; given: {count}"
        raise BadRequest(text, param="allowed_token_ids")
    for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids", "logit_bias"):
        largest = max(getattr(request, name), default=0)
        if largest >= model.info.vocab_size:
            allowed = f"0..{model.info.vocab_size - 1} (the vocabulary)"
            text = f"{name}: {largest} is out of bounds; allowed: {allowed}"
            raise BadRequest(text, param=name)


async def _bad_words(model: ServedModel, request: Options) -> list[list[int]]:
    """The ids of each word as it begins a text, and as it stands behind another."""
    words = [form for word in request.bad_words for form in (word, f" {word.lstrip()}")]
    if not words:
        return []
    encoded = await model.tokenizer.encode(words, add_special_tokens=False, max_tokens=INT32_MAX)
    longest = max(map(len, encoded))
    if longest > _MAX_BAD_WORD_IDS:
        raise BadRequest(
            f"bad_words: a word may have {_MAX_BAD_WORD_IDS} tokens; one has {longest}",
            param="bad_words",
        )
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]


async def _prompt_of_ids(
    token_ids: list[int], model: ServedModel, request: Options, models: Models, param: str
) -> Prompt:
    # First, as there may be millions of them to look at.
    if len(token_ids) > model.info.max_model_len:
        raise prompt_too_long(len(token_ids), model.info.max_model_len)
    largest = max(token_ids, default=0)
    if largest >= model.info.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=param)
    if not request.echo:
        return Prompt(token_ids)
    decode = functools.partial(
        model.tokenizer.decode, token_ids, skip_special_tokens=request.skip_special_tokens
    )
    if len(token_ids) <= _INLINE_IDS:
        return Prompt(token_ids, decode())
    loop = asyncio.get_running_loop()
    return Prompt(token_ids, await loop.run_in_executor(models.executor, decode))


async def chat_prompt(
    request: ChatRequest, model: ServedModel, models: Models, max_tokens: int | None = None
) -> Prompt:
    """A chat's messages, rendered by a template and tokenized; refused where they have more than
    `max_tokens`, or else than the model's context.
    """
    text = await rendered(request, model, models)
    [token_ids] = await model.tokenizer.encode(
        [text],
        add_special_tokens=request.add_special_tokens,
        max_tokens=max_tokens or model.info.max_model_len,
        truncation=_truncation(request, model),
    )
    return Prompt(token_ids, _last_message(request) if request.echo else None)


async def rendered(request: ChatRequest, model: ServedModel, models: Models) -> str:
    """The prompt's text, by the model's template or, where those are trusted, the request's."""
    loop = asyncio.get_running_loop()
    template = model.chat_template
    if request.chat_template is not None:
        template = await loop.run_in_executor(
            models.executor, _template_of_request, request.chat_template, model, models
        )
    if template is None:
        raise BadRequest(
            f"the model {model.info.model} has no chat template; start the router with "
            "--chat-template FILE to give it one",
            param="messages",
        )
    render = functools.partial(
        template.render,
        request.messages,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=request.template_kwargs,
    )
    # What a request's own template does with little text nobody knows.
    is_known = request.chat_template is None
    if is_known and _is_small([request.messages, request.documents, request.template_kwargs]):
        return render()
    return await loop.run_in_executor(models.executor, render)


def _template_of_request(source: str, model: ServedModel, models: Models) -> ChatTemplate:
    if not models.trusts_templates:
        raise BadRequest(
            "chat_template: this server takes none from requests (--trust-request-chat-template)",
            param="chat_template",
        )
    known = model.chat_template
    try:
        return ChatTemplate({"default": source}, {} if known is None else known.special_tokens)
    except TemplateUnusable as error:
        raise BadRequest(f"chat_template: {error}", param="chat_template") from None


def _is_small(value: object) -> bool:
    """Whether a template is through with it in no time: all text counts, and so does each item.

    Looks no further than to the answer.
    """
    size, rest = 0, [value]
    while rest and size <= INLINE_CHARS:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | dict):
            size += _ITEM_CHARS * len(item)
            if size <= INLINE_CHARS:
                rest += item.values() if isinstance(item, dict) else item
    return size <= INLINE_CHARS


def _last_message(request: ChatRequest) -> str:
    """What `echo` puts before the answer: a last message of the answer's own role."""
    last = request.messages[-1]
    return str(last.get("content", "")) if last["role"] == "assistant" else ""


def _job(
    model: ServedModel,
    options: Options,
    prompts: Sequence[Prompt],
    choices: int,
    bad_words: Sequence[Sequence[int]],
) -> Job:
    # The best of several are told apart by their tokens' log-probabilities.
    scored = choices > options.n and options.logprobs is None
    requests: list[GenerationRequest] = []
    for number, prompt in enumerate(prompts):
        max_tokens = _max_tokens(model, options, prompt)
        _check_min_tokens(options, max(max_tokens, 1))
        seed = _seed(options, number)
        requests += (
            GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                sampling=_sampling(options, choice_seed(seed, choice), bad_words),
                # Scoring a prompt still takes a step that samples; its token is not shown.
                max_tokens=max(max_tokens, 1),
                min_tokens=options.min_tokens,
                stop_token_ids=options.stop_token_ids,
                ignore_eos=options.ignore_eos,
                logprobs=0 if scored else options.logprobs,
                prompt_logprobs=_prompt_logprobs(options),
                logprob_token_ids=options.logprob_token_ids,
                model=model.info.model,
                tokenizer_hash=model.info.tokenizer_hash,
                cache_salt=options.cache_salt,
                exact=options.exact,
                numerics=options.numerics,
                session=options.session,
                shard=options.shard,
                label=options.request_id or "",
                objective=Objective(
                    priority=options.priority,
                    seconds_between_tokens=options.seconds_between_tokens,
                    latency_sensitive=options.latency_sensitive,
                ),
            )
            for choice in range(choices)
        )
    return Job(model, options, tuple(prompts), tuple(requests))


def _max_tokens(model: ServedModel, options: Options, prompt: Prompt) -> int:
    """How many tokens may follow; refuses what cannot fit into the context."""
    limit, given = model.info.max_model_len, len(prompt.token_ids)
    if given == 0:
        raise BadRequest("the prompt has no tokens", param="prompt")
    room = limit - given
    wanted = options.max_tokens
    # Also where none is wanted: scoring a prompt takes a step that samples one.
    if room < 1:
        raise prompt_too_long(given, limit)
    if wanted is None:
        default = options.default_max_tokens
        return room if default is None else min(default, room)
    if wanted > room:
        raise ContextExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{wanted} output tokens and your prompt contains {given} input tokens, for a total "
            f"of {given + wanted} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens.",
            limit_tokens=limit,
            prompt_tokens=given,
            wanted_tokens=wanted,
            param=options.max_tokens_field,
        )
    return wanted


def _check_min_tokens(options: Options, max_tokens: int) -> None:
    # Shards refuse it too, but one after another, when the prompts before this one are at work.
    if options.min_tokens is not None and options.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens: must be at most {max_tokens}, as many as may follow the prompt; "
            f"given: {options.min_tokens}",
            param="min_tokens",
        )


def _prompt_logprobs(options: Options) -> int | None:
    """As many as any part of the answer shows."""
    echoed = None
    if options.echo and not isinstance(options, ChatRequest):
        echoed = options.logprobs
    wanted = [count for count in (echoed, options.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


def _sampling(options: Options, seed: int, bad_words: Sequence[Sequence[int]]) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=options.allowed_token_ids,
        seed=seed,
    )


def _seed(options: Options, number: int) -> int:
    """Of a prompt's first choice. Where none was given prompts draw apart from each other."""
    if options.seed is not None:
        return options.seed
    if options.drawn_seed is None:
        return random_seed()
    return choice_seed(options.drawn_seed, number << 32)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request with `seed`; part of the public contract.

    Choice 0 has the seed itself. Choice i has the first 8 bytes, little-endian, of blake2b over
    the seed and i as little-endian 64-bit numbers.
    """
    unsigned = seed % 2**64
    if choice == 0:
        return unsigned
    data = unsigned.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
