"""A request and its prompts -> a `Job`: lengths checked, choices fanned out.

An invalid request is refused here at the latest, before any shard gets a part of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock_proto.facts import ShardInfo
from penstock_proto.limits import NO_PENALTIES
from penstock_proto.types import (
    SAMPLING_NUMBERS,
    GenerationRequest,
    Objective,
    PixelSource,
    PromptImage,
    SamplingParams,
    ThinkingBudget,
)
from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.images.image import NO_IMAGES, Image, LoadedImages
from penstock_router.request import (
    WHOLE_VOCABULARY,
    ChatRequest,
    CompletionRequest,
    Options,
    Sender,
)
from penstock_router.served_models import ServedModel
from penstock_router.text.prompts import PreparedPrompts, Prompt, thinking_mark_ids
from penstock_router.text.tokenizer import prompt_too_long

# How many sequences are made, or changed, in one turn of the event loop: each takes some 6 us.
SEQUENCES_A_TURN = 100
_UNKNOWN = Sender()


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can run: choice `i` is `requests[i]`, of prompt `i // choices_per_prompt`."""

    model: ServedModel
    options: Options
    prepared: PreparedPrompts
    requests: tuple[GenerationRequest, ...]
    # Of its images.
    pixels: PixelSource | None = None

    @property
    def ends_with_context(self) -> bool:
        """Tell whether the context ends before `max_tokens` do."""
        wanted, [first, *_] = self.options.max_tokens, self.requests
        return wanted is None or (first.max_tokens or 0) < wanted

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.prepared.prompts

    @property
    def choices_per_prompt(self) -> int:
        return len(self.requests) // len(self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.choices_per_prompt]


async def make_job(
    options: Options,
    model: ServedModel,
    prepared: PreparedPrompts,
    drawn_seed: int,
    images: LoadedImages = NO_IMAGES,
    *,
    sender: Sender = _UNKNOWN,
) -> Job:
    """Make the job of a request whose text is prepared. One invalid prompt refuses the whole
    request. `images` are those of its prompts, in order.

    `drawn_seed` is what seeds are made of if the request has none. Yields to the event loop every
    `SEQUENCES_A_TURN` sequences.
    """
    options = _with_known_logprobs(options, model.info)
    requests: list[GenerationRequest] = []
    for request in _sequences(options, sender, model, prepared, drawn_seed, images):
        requests.append(request)
        if len(requests) % SEQUENCES_A_TURN == 0:
            await asyncio.sleep(0)
    return Job(model, options, prepared, tuple(requests), images.pixels)


def _sequences(
    options: Options,
    sender: Sender,
    model: ServedModel,
    prepared: PreparedPrompts,
    drawn_seed: int,
    images: LoadedImages,
) -> Iterator[GenerationRequest]:
    """Yield each prompt's choices, which differ in their seeds alone."""
    choices = options.best_of if isinstance(options, CompletionRequest) else options.n
    unplaced = iter(images.images)
    for number, prompt in enumerate(prepared.prompts):
        placed = _placed(prompt, unplaced)
        seed = sequence_seed(options.seed, drawn_seed, number, 0)
        first = _make_request(options, sender, model, prepared, prompt, placed, seed)
        yield first
        for choice in range(1, choices):
            seed = sequence_seed(options.seed, drawn_seed, number, choice)
            sampling = dataclasses.replace(first.sampling, seed=seed)
            yield dataclasses.replace(first, sampling=sampling)


def _with_known_logprobs(options: Options, info: ShardInfo) -> Options:
    """The options with the number of log-probabilities where the whole vocabulary is asked for.
    Refuses more than the model's shards give.
    """
    most = info.limits.max_logprobs
    of_chat = "top_logprobs" if isinstance(options, ChatRequest) else "logprobs"
    known: dict[str, Any] = {}
    for name, param in (("logprobs", of_chat), ("prompt_logprobs", "prompt_logprobs")):
        asked: int | None = getattr(options, name)
        if asked is None:
            continue
        known[name] = info.vocab_size if asked == WHOLE_VOCABULARY else asked
        if known[name] > most:
            all_ = f", all {info.vocab_size} tokens" if asked == WHOLE_VOCABULARY else ""
            raise BadRequest(
                f"{param}: must be at most {most} (--max-logprobs of the model's shards); "
                f"given: {asked}{all_}",
                param=param,
            )
    return dataclasses.replace(options, **known) if known else options


def _placed(prompt: Prompt, images: Iterator[Image]) -> tuple[PromptImage, ...]:
    """The images of a prompt, which are the next ones."""
    return tuple(
        PromptImage(image.digest.hex(), image.width, image.height, place.offset, place.num_tokens)
        for place, image in zip(prompt.images, images, strict=False)
    )


def _make_request(
    options: Options,
    sender: Sender,
    model: ServedModel,
    prepared: PreparedPrompts,
    prompt: Prompt,
    images: tuple[PromptImage, ...],
    seed: int,
) -> GenerationRequest:
    """Make a prompt's first choice."""
    thinking_budget = _thinking_budget(options, model, prepared.reasoning_begun)
    # Scoring a prompt still takes a step that samples: `max_tokens` is 1 there, and that token is
    # not shown. `best_of` ranks its sequences by their tokens' log-probabilities.
    max_tokens = max(_max_tokens(model, options, sender, prompt), 1)
    several = isinstance(options, CompletionRequest) and options.best_of > options.n
    _check_min_tokens(options, max_tokens)
    return GenerationRequest(
        prompt_token_ids=prompt.token_ids,
        sampling=_sampling(options, prepared, model.info.default_sampling, seed),
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=0 if several and options.logprobs is None else options.best_logprobs,
        prompt_logprobs=_prompt_logprobs(options),
        logprob_token_ids=options.logprob_token_ids,
        constraint=prepared.constraint,
        thinking_budget=thinking_budget,
        model=model.info.model,
        tokenizer_hash=model.info.tokenizer_hash,
        adapter=model.adapter,
        cache_salt=options.cache_salt,
        exact=sender.exact,
        session=_session(sender),
        shard=sender.shard,
        label=sender.request_id,
        traceparent=sender.traceparent,
        caller=sender.caller,
        key_name=sender.key_name,
        images=images,
        objective=Objective(
            priority=options.priority,
            seconds_between_tokens=options.seconds_between_tokens,
            latency_sensitive=options.latency_sensitive,
        ),
    )


def _session(sender: Sender) -> str:
    """Name the session apart from sessions of other keys that have the same name."""
    is_of_a_key = sender.session and sender.key_name
    return f"{sender.key_name}/{sender.session}" if is_of_a_key else sender.session


def _thinking_budget(options: Options, model: ServedModel, begun: bool) -> ThinkingBudget | None:
    if not isinstance(options, ChatRequest) or options.thinking_tokens is None:
        return None
    ids = thinking_mark_ids(model.text)
    if ids is None:
        if not options.requires_thinking_budget:
            return None
        raise BadRequest(
            f"thinking_token_budget: {model.info.model} does not mark its reasoning by a token at "
            "each end, so it cannot be kept within a number of tokens",
            param="thinking_token_budget",
        )
    return ThinkingBudget(options.thinking_tokens, *ids, begun)


def _max_tokens(model: ServedModel, options: Options, sender: Sender, prompt: Prompt) -> int:
    """Say how many tokens may follow; refuse a request that cannot fit into the context."""
    limit, given = model.info.max_model_len, len(prompt.token_ids)
    if given == 0:
        raise BadRequest("the prompt has no tokens", param="prompt")
    room = limit - given
    wanted = options.max_tokens
    # Also with `max_tokens` 0: scoring a prompt takes a step that samples one token.
    if room < 1:
        raise prompt_too_long(given, limit)
    if wanted is None:
        default = options.default_max_tokens
        return room if default is None else min(default, room)
    if wanted > room and (options.bounds_max_tokens or sender.bounds_max_tokens):
        return room
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
    # A shard would refuse it too, but only when the earlier prompts of the request already run.
    if options.min_tokens is not None and options.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens: must be at most {max_tokens}, as many as may follow the prompt; "
            f"given: {options.min_tokens}",
            param="min_tokens",
        )


def _prompt_logprobs(options: Options) -> int | None:
    """The largest number of log-probabilities that any part of the answer shows."""
    echoed = None
    if options.echo and not isinstance(options, ChatRequest):
        echoed = options.logprobs
    wanted = [count for count in (echoed, options.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


def _penalty_window(options: Options, defaults: SamplingParams) -> int | None:
    """The window of the penalties; None also where there are none: not all shards know windows."""
    for name, neutral in NO_PENALTIES.items():
        given, default = getattr(options, name), getattr(defaults, name)
        if (default if given is None else given) not in (None, neutral):
            return options.penalty_window_tokens
    return None


def _sampling(
    options: Options, prepared: PreparedPrompts, defaults: SamplingParams, seed: int
) -> SamplingParams:
    """Make the sampling parameters; those that are None have the model's `defaults`."""
    return SamplingParams(
        **{name: getattr(options, name) for name in SAMPLING_NUMBERS},
        seed=seed,
        logit_bias=options.logit_bias,
        bad_words=prepared.bad_words,
        allowed_token_ids=prepared.allowed_token_ids,
        penalty_window_tokens=_penalty_window(options, defaults),
    )


def sequence_seed(given: int | None, drawn: int, prompt: int, choice: int) -> int:
    """The seed of choice number `choice` of prompt number `prompt`. All prompts have the `given`
    one; where the request has none, each has its own, derived from the `drawn` one.
    """
    first = choice_seed(drawn, prompt << 32) if given is None else given
    return choice_seed(first, choice)


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
