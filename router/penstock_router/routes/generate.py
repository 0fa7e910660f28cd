"""The path from a request for tokens to its answer, the same for every API.

Reading, translation, admission, preparation, generation and rendering are other modules' work. This
one has no text work and no policy.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohttp import web

from penstock_client.fleet.discovery import check_address
from penstock_proto.facts import ShardInfo
from penstock_proto.types import random_seed
from penstock_router import sessions
from penstock_router.admission.admission import Ticket, TimeLimit
from penstock_router.apis import json_in_thread
from penstock_router.apis.base import AnyRequest, Api, Envelope, Shape
from penstock_router.errors import BadRequest
from penstock_router.generation.choice import LOGPROB_BYTES
from penstock_router.generation.client_progress import BEGINNING, ResumePoint
from penstock_router.generation.deltas import Deltas, Hold, bound, bundle, collect
from penstock_router.generation.generation import Generation
from penstock_router.generation.job import SEQUENCES_A_TURN, Job, make_job
from penstock_router.json_fields import STRING, Field, one_of, string, table
from penstock_router.observe import endpoint_load
from penstock_router.observe.request_record import Usage
from penstock_router.offload.dispatch import Body
from penstock_router.request import MAX_SESSION_CHARS, Options, Sender
from penstock_router.routes.base import Handler, admit_request, with_body
from penstock_router.routes.warnings import warn
from penstock_router.served_models import ServedModel
from penstock_router.server import request_headers, sse
from penstock_router.server.caller import caller_of, check_admin, client_of
from penstock_router.server.parts import RECORD, REQUEST_ID, ROUTER
from penstock_router.server.request_headers import flag_header, usable_request_id
from penstock_router.server.send import LONG_ANSWER_BYTES, encoded_response, send, too_much_unread
from penstock_router.text.prompts import PreparedPrompts
from penstock_router.text.stop_strings import compile_stops

_Result = TypeVar("_Result")

# What a log-probability takes in objects, while an answer is made, for each byte in the answer.
_OBJECT_BYTES = 3
# Answers of at most so many tokens are rendered on the event loop: some tens of microseconds.
_INLINE_TOKENS = 10_000
# Stop strings of so many characters are compiled on the event loop, in 0.4 ms.
_INLINE_STOP_CHARS = 512

_SHARD = "x-penstock-shard"
# Headers of each route that generates: described here, read below.
HEADERS = table(
    [
        *request_headers.HEADERS.values(),
        Field(
            "x-penstock-exact",
            one_of("0", "1"),
            "1: fail rather than continue on a shard whose tokens might differ.",
        ),
        Field(
            sessions.HEADER,
            string(0, MAX_SESSION_CHARS),
            "Requests with the same value go to the same shard, and its prefix cache.",
        ),
        *(
            Field(name, STRING, f"The same, as {client} names its sessions.")
            for name, client in sessions.CLIENTS_HEADERS.items()
        ),
        Field(
            _SHARD,
            STRING,
            "HOST:PORT of the only shard that may serve it: for keys of the scope admin.",
        ),
        Field(
            endpoint_load.ASKED,
            STRING,
            "TEXT or JSON: how busy the model's shards are, in a header of an answer that is not "
            "streamed.",
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnyRequest]):
    """An HTTP request for tokens: what was sent, what it asks for, and how to answer."""

    request: web.Request
    body: Body
    asked: AnyRequest
    sender: Sender
    api: Api[AnyRequest]
    # Whether the client chose the request's id.
    named: bool
    response_id: str
    # What the answer's seeds are made of if the request has none.
    drawn_seed: int

    @classmethod
    def read(cls, request: web.Request, body: Body) -> Call[AnyRequest]:
        """Combine a body with the options in headers; raises `BadRequest`."""
        api = body.kind
        assert isinstance(api, Api)
        if flag_header(request, "x-penstock-resumable") and not api.resumable:
            raise BadRequest("x-penstock-resumable: not on this route")
        named = _name_request(request, body.asked)
        record = request[RECORD]
        record.stream = body.asked.stream
        record.session = sessions.session_of(request.headers, body.asked.session)
        sender = Sender(
            request_id=request[REQUEST_ID],
            traceparent=record.traceparent,
            caller=caller_of(request),
            key_name=record.key_name,
            session=record.session,
            exact=flag_header(request, "x-penstock-exact"),
            shard=_pinned_shard(request),
            bounds_max_tokens=request.app[ROUTER].config.bound_max_tokens,
        )
        response_id = api.name_answer(request[REQUEST_ID], named)
        return cls(request, body, body.asked, sender, api, named, response_id, random_seed())


Answerer = Callable[[Call[Any]], Awaitable[web.StreamResponse]]
# Called with the whole answer before its end is sent.
BeforeEnd = Callable[[Shape], Awaitable[None]]


def make_handler(api: Api[Any], answer_call: Answerer) -> Handler:
    """A handler of bodies that ask for tokens."""
    return with_body(api, lambda request, body: answer_call(Call.read(request, body)))


async def answer(call: Call[AnyRequest], before_end: BeforeEnd | None = None) -> web.StreamResponse:
    """Generate and answer; `before_end` is called with the whole answer before its end is sent."""
    with admit(call) as ticket:
        job = await prepare_job(call, ticket)
        with hold_memory(call, job) as hold:
            await take_places(call, job, ticket)
            if call.asked.stream:
                return await _stream(call, job, ticket, before_end, hold)
            response = await _make_whole(call, job, ticket, before_end, hold)
        # Its places are given back once the client has it, and all but its bytes is gone by then.
        del job
        ticket.charge.settle()
        await send(call.request, response)
        return response


async def _stream(
    call: Call[AnyRequest], job: Job, ticket: Ticket, before_end: BeforeEnd | None, hold: Hold
) -> web.StreamResponse:
    router = call.request.app[ROUTER]
    async with make_generation(call, job, ticket.limit) as generation:
        shape = make_shape(call, job, generation, int(time.time()))
        return await sse.stream(
            call.request,
            generation,
            _deltas(call, generation, hold),
            shape,
            request_id=call.request[REQUEST_ID],
            config=router.config,
            framing=call.api.framing,
            limit=ticket.limit,
            threads=router.threads,
            run_work=functools.partial(run_work, call, generation.usage)
            if call.api.repeats_answer
            else None,
            before_end=None if before_end is None else lambda: before_end(shape),
        )


async def _make_whole(
    call: Call[AnyRequest], job: Job, ticket: Ticket, before_end: BeforeEnd | None, hold: Hold
) -> web.Response:
    max_bytes = call.request.app[ROUTER].config.max_answer_bytes
    async with make_generation(call, job, ticket.limit) as generation:
        shape = make_shape(call, job, generation, int(time.time()))
        usage = generation.usage
        async with ticket.limit.scope():
            deltas = await collect(generation, job, max_bytes, hold)
            body = [await run_work(call, usage, functools.partial(shape.whole, deltas))]
            if before_end is not None:
                await before_end(shape)
            data = await run_work(call, usage, functools.partial(_encode_and_free, body))
    response = encoded_response(data)
    response.headers.update(shape.headers())
    if usage.approximate:
        response.headers["x-penstock-continued"] = "approximate"
    response.headers.update(_load_header(call, job))
    return response


def _load_header(call: Call[Any], job: Job) -> dict[str, str]:
    router, form = call.request.app[ROUTER], call.request.headers.get(endpoint_load.ASKED, "")
    load = endpoint_load.endpoint_load(
        form, router.fleet.shards, job.model.info.model, router.admission.queued
    )
    return {} if load is None else {endpoint_load.ANSWERED: load}


def make_generation(
    call: Call[Any], job: Job, limit: TimeLimit, point: ResumePoint = BEGINNING
) -> Generation:
    """The generation of the job, not submitted yet."""
    router, record = call.request.app[ROUTER], call.request[RECORD]
    return Generation(
        job,
        router.fleet,
        router.metrics,
        record,
        point=point,
        ends_at_s=limit.at_s,
        silence_timeout_s=router.config.silence_timeout_s,
        pauses=router.pauses,
    )


def _deltas(call: Call[Any], generation: Generation, hold: Hold) -> Deltas:
    deltas = bundle(generation, call.asked.stream_interval)
    if not call.api.repeats_answer:
        return deltas
    max_bytes = call.request.app[ROUTER].config.max_answer_bytes
    return bound(deltas, generation.job.options, max_bytes, hold)


@contextmanager
def hold_memory(call: Call[Any], job: Job) -> Iterator[Hold]:
    """Count what an answer takes while it is made as memory of its client: log-probabilities, those
    of the prompts at once and others by what is yielded, and what of the request is kept for it.

    Raises `TooManyRequests` where a client's long answers take its share of memory already.
    """
    router = call.request.app[ROUTER]
    with router.memory.hold(client_of(call.request)) as held:

        def hold(num_bytes: int) -> None:
            num_bytes *= _OBJECT_BYTES
            if held.amount + num_bytes > LONG_ANSWER_BYTES:
                held.grow(num_bytes, functools.partial(too_much_unread, router.metrics, num_bytes))
            else:
                held.add(num_bytes)

        hold(_prompt_scores_bytes(job))
        if (kept_bytes := job.prepared.kept_bytes) > LONG_ANSWER_BYTES:
            held.grow(kept_bytes, functools.partial(too_much_unread, router.metrics, kept_bytes))
        yield hold


def _encode_and_free(body: list[object]) -> bytes:
    """Encode the body alone in the list, and free it here: it may be thousands of objects."""
    return json_in_thread.encode(body.pop())


async def run_work(call: Call[Any], usage: Usage, work: Callable[[], _Result]) -> _Result:
    """The result of `work` on an answer: run here, or in a thread if it may take long."""
    has_scores = call.asked.logprobs is not None or call.asked.prompt_logprobs is not None
    num_sequences, _ = call.asked.places
    is_wide = num_sequences > SEQUENCES_A_TURN or usage.completion_tokens > _INLINE_TOKENS
    if has_scores or call.body.is_long or is_wide:
        return await call.request.app[ROUTER].threads.run(work, client_of(call.request))
    return work()


def make_shape(call: Call[AnyRequest], job: Job, generation: Generation, created: int) -> Shape:
    """The shape of this call's answer."""
    received_s = call.request[RECORD].arrived_s
    envelope = Envelope(
        call.response_id, created, received_s, generation.usage, generation.point.begun
    )
    return call.api.make_shape(job, envelope)


def admit(call: Call[Any]) -> AbstractContextManager[Ticket]:
    """Admit the call: its ticket; raises the error that refuses it."""
    sequences, param = call.asked.places
    return admit_request(call.request, sequences, param, call.asked.timeout_s)


async def prepare_job(call: Call[Any], ticket: Ticket) -> Job:
    """The call's job, its prompts tokenized; raises if the call's time is up before."""
    router, asked = call.request.app[ROUTER], call.asked
    async with ticket.limit.scope():
        model = await router.models.get(asked.model)
        made = await call.body.work(model)
        assert isinstance(made, PreparedPrompts)
        warn(call.request, made.warnings)
        if sum(map(len, asked.stop)) > _INLINE_STOP_CHARS:
            # The generation finds them compiled.
            compile_all = functools.partial(compile_stops, asked.stop)
            await router.threads.run(compile_all, client_of(call.request))
        job = await make_job(
            asked, model, made, call.drawn_seed, call.body.images, sender=call.sender
        )
    _check_size(job, router.config.max_answer_bytes)
    for shard in router.fleet.shards:
        if shard.address == call.sender.shard and shard.info is not None:
            _check_pinned(shard.info, job.model, f"{_SHARD}: {shard.address}")
    return job


def _check_pinned(info: ShardInfo, model: ServedModel, what: str) -> None:
    """Raises `BadRequest` if this shard has not got the model or adapter."""
    if info.model != model.info.model:
        raise BadRequest(f"{what} does not serve {model.info.model}")
    if not info.has_adapter(model.adapter):
        raise BadRequest(f"{what} does not have the adapter {model.adapter}")


async def take_places(call: Call[Any], job: Job, ticket: Ticket) -> None:
    """Return when the job's sequences have places; raises as `Ticket.start` does."""
    record = call.request[RECORD]
    record.model, record.prepared_s = job.model.info.model, time.perf_counter()
    record.adapter = job.model.adapter
    record.choices = call.asked.n
    record.max_tokens = max(request.max_tokens or 0 for request in job.requests)
    ticket.charge.follow(record)
    await ticket.start(
        sum(len(prompt.token_ids) for prompt in job.prompts),
        sum(request.max_tokens or 0 for request in job.requests),
    )
    record.placed_s = time.perf_counter()


def _prompt_scores_bytes(job: Job) -> int:
    """Count the bytes that the log-probabilities of the prompts take in the answer."""
    return sum(
        LOGPROB_BYTES * (1 + request.prompt_logprobs) * len(request.prompt_token_ids)
        for request in job.requests
        if request.prompt_logprobs is not None
    )


def _check_size(job: Job, max_bytes: int) -> None:
    """Refuse prompt log-probabilities too large for an answer: they are held in memory whole."""
    num_bytes = _prompt_scores_bytes(job)
    if num_bytes > max_bytes:
        raise BadRequest(
            f"prompt_logprobs: log-probabilities of so many tokens are about {num_bytes} bytes; "
            f"an answer may have {max_bytes}",
            param="prompt_logprobs",
        )


# ---- What headers ask for ----------------------------------------------------------------------


def _name_request(request: web.Request, asked: Options) -> bool:
    """Take the request's id from its body unless a header has one; returns whether the client chose
    the id in either.
    """
    if usable_request_id(request.headers.get("X-Request-Id")):
        return True
    named = usable_request_id(asked.request_id)
    if named is None:
        return False
    request[REQUEST_ID] = request[RECORD].request_id = named
    return True


def _pinned_shard(request: web.Request) -> str:
    given = request.headers.get(_SHARD, "")
    if not given:
        return ""
    # Users would learn which addresses are shards, and could load one of them alone.
    check_admin(request, _SHARD)
    try:
        address = check_address(given)
    except ValueError as error:
        raise BadRequest(f"{_SHARD}: {error}") from None
    if all(shard.address != address for shard in request.app[ROUTER].fleet.shards):
        raise BadRequest(f"{_SHARD}: {address} is not in this fleet")
    return address
