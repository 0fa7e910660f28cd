"""Long bodies: what a text process makes of them is what would be made of them here."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.budget import seeded
from support.router_doubles import (
    INFO,
    Answer,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_common.child_process.framing import HEADER_BYTES, decode_header
from penstock_router import errors
from penstock_router.admission.shared_budget import MEMORY_BYTES, SharedBudget
from penstock_router.apis.base import AnyKind, Api
from penstock_router.apis.openai.requests import COMPLETIONS, parse_completion
from penstock_router.config import RouterConfig
from penstock_router.errors import ApiError, BadRequest, ContextExceeded, TooManyRequests
from penstock_router.generation.event_ids import job_digest
from penstock_router.generation.job import make_job
from penstock_router.images.images import Images
from penstock_router.observe.metrics import Metrics
from penstock_router.offload import (
    body_kinds,
    dispatch,
    request_templates,
    text_pool,
    text_process,
)
from penstock_router.offload.body_kinds import KINDS, Reading
from penstock_router.offload.dispatch import MAX_BODIES, Bodies, Body, Incoming
from penstock_router.offload.request_templates import Programs
from penstock_router.offload.text_messages import (
    ModelFacts,
    Outcome,
    Read,
    Show,
    Task,
    Work,
    decode_outcome,
    decode_task,
    encode_outcome,
    encode_task,
)
from penstock_router.offload.text_pool import SECONDS_A_BYTE, Parts, TextPool
from penstock_router.offload.text_process import TextWorker
from penstock_router.served_models import Models, ServedModel
from penstock_router.server import read_body
from penstock_router.server.parts import ROUTER
from penstock_router.text.prompts import PreparedPrompts, Prompt, pack_ids
from penstock_router.thread_pool import Threads

USER = {"role": "user", "content": "the quick brown fox 日本語 😀"}
ANSWER = {"role": "assistant", "content": "Hello"}
ITEM = {"type": "message", "id": "msg_1", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "before"}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "a fox"}
FLAT = {"type": "function", "name": "look"}
LOOK = {"type": "function", "function": {"name": "look", "strict": True}}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# By kind: bodies that are well, and bodies that are refused for all sorts of reasons.
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "the fox"}),
    ("completions", {"prompt": ["the fox", "😀 café"], "n": 2, "best_of": 3, "seed": 5}),
    ("completions", {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0}),
    ("completions", {"prompt": [[5, 6], [7]], "truncate_prompt_tokens": 1}),
    ("completions", {"prompt": "the fox and the dog", "truncate_prompt_tokens": -1}),
    ("completions", {"prompt": "x", "bad_words": ["fox", " the dog"], "logit_bias": {"7": -3}}),
    ("completions", {"prompt": "x", "allowed_token_ids": [3, 4, 5], "stop": ["a", "b"]}),
    ("completions", {"prompt": "x", "echo": True, "stream": True, "timeout": 3, "slo": 0.5}),
    ("completions", {"prompt": "x", "stop_token_ids": [9], "logprobs": 1, "request_id": "me"}),
    ("completions", {"prompt": "x", "response_format": {"type": "json_object"}}),
    ("completions", {"prompt": "x", "guided_choice": ["a", "b"], "guided_regex": "a"}),
    ("completions", {"prompt": "x", "guided_choice": ["a", "b"], "n": 2}),
    ("completions", {"prompt": "the fox " * 2000}),
    ("completions", {"prompt": [5] * 600}),
    ("completions", {"prompt": [5, 10**6]}),
    ("completions", {"prompt": "x", "allowed_token_ids": [10**6]}),
    ("completions", {"prompt": "x", "truncate_prompt_tokens": 10**6}),
    ("completions", {"prompt": "x", "bad_words": ["zebra jumps " * 80]}),
    ("completions", {"prompt": ""}),
    ("completions", {"prompt": "x", "temperature": 9}),
    ("completions", {"suffix": "x"}),
    ("chats", {"messages": [USER]}),
    ("chats", {"messages": [USER, ANSWER], "add_generation_prompt": False, "echo": True,
               "continue_final_message": True}),
    ("chats", {"messages": [USER], "documents": [{"text": "d"}], "reasoning_effort": "low",
               "chat_template_kwargs": {"mood": "calm"}, "logprobs": True, "top_logprobs": 3}),
    ("chats", {"messages": [USER], "chat_template": "{{ messages[0].content }}!"}),
    ("chats", {"messages": [USER], "chat_template": "{{ nothing"}),
    ("chats", {"messages": [USER], "chat_template": "{{ raise_exception('not so') }}"}),
    ("chats", {"messages": [USER], "guided_json": {"type": "object"}, "include_reasoning": False}),
    ("chats", {"messages": [USER], "tools": [LOOK], "parallel_tool_calls": False}),
    ("chats", {"messages": [USER], "tools": [LOOK], "tool_choice": "required", "n": 2}),
    ("chats", {"messages": [USER], "tools": [LOOK], "tool_choice": LOOK}),
    ("chats", {"messages": [USER], "tools": [LOOK], "tool_choice": {"type": "function"}}),
    ("chats", {"messages": [USER], "response_format": {"type": "json_schema"}}),
    ("chats", {"messages": [{**USER, "content": "the fox " * 2000}]}),
    ("chats", {"messages": []}),
    ("messages", {"model": INFO.model, "messages": [USER], "max_tokens": 4, "system": "be brief"}),
    ("messages", {"model": INFO.model, "messages": [USER, ANSWER], "max_tokens": 4}),
    ("messages", {"model": INFO.model, "messages": [USER]}),
    ("responses", {"input": "the fox", "instructions": "be brief"}),
    ("responses", {"input": [USER, ANSWER, USER], "store": False, "metadata": {"a": "b"}}),
    ("responses", {"input": "the fox", "previous_response_id": "resp_1", "truncation": "auto"}),
    ("responses", {"input": [USER, CALL, OUTPUT], "tools": [FLAT], "tool_choice": "required"}),
    ("responses", {"input": [USER, OUTPUT], "text": {"format": {"type": "json_object"}}}),
    ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}, "tools": [FLAT]}),
    ("responses", {"input": "x", "tools": [{**FLAT, "parameters": {"maximum": 10**30}}]}),
    ("responses", {"input": []}),
    ("generate", {"inputs": "the fox", "parameters": {"best_of": 2, "return_full_text": True}}),
    ("generate", {"inputs": "the fox " * 40, "parameters": {"truncate": 5, "details": True}}),
    ("generate", {"inputs": "the fox " * 2000}),
    ("generate", {"inputs": ""}),
    ("generate", {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "a+"}}}),
    ("generate", {"inputs": "x", "parameters": {"grammar": {"type": "json"}}}),
    ("generate_stream", {"inputs": "the fox", "parameters": {"top_n_tokens": 2}}),
    ("compat", {"inputs": "the fox"}),
    ("compat", {"inputs": "the fox", "stream": True}),
    ("embeddings", {"input": ["the fox", "the dog"], "encoding_format": "base64"}),
    ("embeddings", {"input": [[5, 6], [7]], "truncate_prompt_tokens": -1, "dimensions": 4}),
    ("embeddings", {"input": "the fox " * 2000, "truncate_prompt_tokens": -1}),
    ("embeddings", {"input": "the fox " * 2000}),
    ("embeddings", {"input": [""]}),
    ("invocations", {"inputs": "the fox"}),
    ("invocations", {"messages": [USER]}),
    ("invocations", {"prompt": "the fox"}),
    ("invocations", {"input": "the fox"}),
    ("invocations", {"inputs": ""}),
    ("invocations", {"nothing": "the fox"}),
    ("count_tokens", {"model": INFO.model, "messages": [USER]}),
    ("tokenize", {"prompt": "the fox 😀", "return_token_strs": True}),
    ("tokenize", {"messages": [USER]}),
    ("tokenize", {"inputs": "the fox 😀"}),
    ("tokenize", {"inputs": 7}),
    ("tokenize", {"model": INFO.model}),
    ("chat_tokenize", {"messages": [USER]}),
    ("detokenize", {"tokens": [5, 6, 7]}),
    ("detokenize", {"tokens": [10**6]}),
]  # fmt: skip


@pytest.fixture
def models(fleet: FakeFleet) -> Iterator[Models]:
    with ThreadPoolExecutor(1) as executor:
        yield Models(fleet, Threads(executor, 8), RouterConfig(shards="fake:1"))


class UsedBodies(Bodies):
    models: Models
    # Of the bodies that come.
    scope: ExitStack


@asynccontextmanager
async def made_bodies(fleet: FakeFleet, **settings: Any) -> AsyncIterator[UsedBodies]:
    """Yield bodies with one text process, which is started when it is needed."""
    config = RouterConfig(shards="fake:1", trust_request_chat_template=True, **settings)
    with ThreadPoolExecutor(1) as executor:
        threads = Threads(executor, 8)
        pool, metrics = TextPool(1, "info"), Metrics()
        own = Programs(TextPool(1, "info"), metrics)
        memory = SharedBudget(MEMORY_BYTES)
        images = Images(config, threads, metrics)
        bodies = UsedBodies(threads, pool, own, memory, metrics, images, config.max_images)
        bodies.models = Models(fleet, threads, config)
        with ExitStack() as bodies.scope:
            try:
                yield bodies
            finally:
                await bodies.close()


def pids(pool: TextPool) -> list[int]:
    """Return the ids of the processes that are idle, or are kept for a body that they have read."""
    kept = [lease.process for lease in pool._held.values() if lease.process is not None]
    return [process.pid for process in (*pool._free, *kept)]


async def read(bodies: UsedBodies, kind: str, *pieces: bytes) -> Body:
    """A body that comes in these pieces."""
    incoming = bodies.scope.enter_context(bodies.incoming("a client"))
    for piece in pieces:
        incoming.add(piece)
    return await bodies.read(KINDS[kind], incoming, with_digest=True)


async def outcome(bodies: UsedBodies, kind: str, data: bytes, earlier: bytes = b"") -> Any:
    """Return all that comes of a body, in a form that can be compared."""
    try:
        body = await read(bodies, kind, data[:9], data[9:])
        if body.refusal is not None:
            return body.kind.name, type(body.refusal), body.refusal.args, vars(body.refusal)
        model = await bodies.models.get(body.asked.model)
        if earlier:
            body.add_earlier(earlier)
        made = await body.work(model)
        asked = body.asked.without_text()
        if isinstance(made, PreparedPrompts) and isinstance(body.kind, Api):
            job = await make_job(asked, model, made, drawn_seed=1)
            return body.kind.name, body.digest, plain(asked), plain(job)
        return body.kind.name, body.digest, plain(asked), plain(made)
    except ApiError as error:
        return type(error), error.args, vars(error)
    finally:
        bodies.scope.close()


def plain(value: Any) -> Any:
    """Return a value without what sets equal values apart: arrays become lists, and items lose the
    ids that are drawn for them.
    """
    if isinstance(value, array | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, bytes | bytearray | memoryview | msgspec.Raw):
        items = msgspec.json.decode(value) if value else []
        return [{**item, "id": ""} for item in items] if isinstance(items, list) else items
    if dataclasses.is_dataclass(value) and not isinstance(value, ServedModel):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    return value


async def test_a_text_process_makes_of_a_body_what_is_made_of_it_here(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made_bodies(fleet) as bodies:
        for kind, body in BODIES:
            data, earlier = msgspec.json.encode(body), b""
            if "previous_response_id" in body:
                earlier = msgspec.json.encode([ITEM])
            monkeypatch.setattr(dispatch, "LONG_BYTES", 2**30)
            here = await outcome(bodies, kind, data, earlier)
            monkeypatch.setattr(dispatch, "LONG_BYTES", 0)
            there = await outcome(bodies, kind, data, earlier)
            assert here == there, (kind, body)
        # One, for all of them.
        assert len(pids(bodies.pool)) == 1


def _asking_for_calls(arguments: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    properties = {f"a{at}": schema for at, schema in enumerate(arguments)}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": [USER], "tools": [tool], "tool_choice": mode}


@pytest.mark.parametrize(
    ("body", "is_there"),
    [
        ({"messages": [USER, ANSWER] * 30}, False),
        ({"messages": [USER, ANSWER] * 50}, True),
        ({"messages": [{**USER, "content": "the quick brown fox " * 700}]}, False),
        ({"messages": [USER], "logit_bias": {str(at): 1 for at in range(300)}}, True),
        (_asking_for_calls([{}] * 20, "required"), False),
        (_asking_for_calls([{}] * 70, "required"), True),
        (_asking_for_calls([{}] * 70, "auto"), False),
        (_asking_for_calls([{}] * 300, "auto"), True),
        (_asking_for_calls([{"enum": [1] * 100}], "required"), True),
        (_asking_for_calls([{"anyOf": [{}] * 100}], "required"), True),
    ],
)
async def test_what_python_takes_long_for_is_done_in_a_text_process(
    body: dict[str, Any], is_there: bool, fleet: FakeFleet
) -> None:
    fleet.shards[0].info = dataclasses.replace(INFO, max_model_len=10**6)
    data = msgspec.json.encode(body)
    assert len(data) < dispatch.LONG_BYTES
    async with made_bodies(fleet, tool_call_parser="hermes") as bodies:
        assert (await outcome(bodies, "chats", data))[0] == "chats"
        assert bool(pids(bodies.pool)) == is_there


SHOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["the fox", [5, 6, 7]], "n": 2, "echo": True, "logprobs": 2,
                         "return_token_ids": True}),
    ("/v1/completions", {"prompt": [[5, 6, 7], "x"], "echo": True, "logprobs": 0, "max_tokens": 0,
                         "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "the fox", "best_of": 3, "stream_interval": 2,
                         "logit_bias": {"7": 3}, "allowed_token_ids": [5, 6, 7]}),
    ("/v1/completions", {"prompt": "the fox", "stream": True, "echo": True,
                         "return_token_ids": True, "stop": ["q"]}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2,
                              "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": [USER, ANSWER], "echo": True}),
    ("/v1/messages", {"model": INFO.model, "messages": [USER], "max_tokens": 5, "stream": True}),
    ("/v1/messages", {"model": INFO.model, "messages": [USER], "max_tokens": 9999}),
    ("/v1/responses", {"input": "the fox", "instructions": "be brief", "store": False,
                       "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/generate", {"inputs": "the fox", "parameters": {"details": True, "best_of": 2,
                   "decoder_input_details": True, "return_full_text": True, "do_sample": True}}),
    ("/generate_stream", {"inputs": "the fox", "parameters": {"top_n_tokens": 2}}),
    ("/", {"inputs": "the fox " * 2000}),
    ("/v1/embeddings", {"input": ["the fox", [5, 6]], "dimensions": 4}),
    ("/invocations", {"inputs": ""}),
    ("/tokenize", {"inputs": "the fox"}),
    ("/tokenize", {"inputs": 7}),
    ("/v1/messages/count_tokens", {"model": "nobody", "messages": [USER]}),
]  # fmt: skip


async def _shown(router: MemoryRouter, path: str, body: dict[str, Any]) -> Any:
    """Return what a client is shown, without times and without what is drawn."""
    answer = await router.post(path, body)
    text = re.sub(r"(msg|req|resp|cmpl|chatcmpl)[-_]\w+", "ID", answer.body.decode())
    text = re.sub(r'("(created|created_at|completed_at)":)[\d.]+', "TIME", text)
    names = ("content-type", "x-compute-characters", "x-prompt-tokens", "retry-after")
    return answer.status, text, [answer.headers.get(name) for name in names]


async def test_what_a_client_is_shown_does_not_depend_on_the_length_of_its_body(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not of the seed, which some APIs always draw.
    fleet.script = lambda request: [3 + token % 400 for token in request.prompt_token_ids[:9]]
    async with memory_router(fleet) as router:
        for path, body in SHOWN:
            if "parameters" in body:
                body = {**body, "parameters": {"seed": 1, **body["parameters"]}}
            monkeypatch.setattr(dispatch, "LONG_BYTES", 2**30)
            short = await _shown(router, path, body)
            monkeypatch.setattr(dispatch, "LONG_BYTES", 0)
            assert await _shown(router, path, body) == short, (path, body)
        assert len(pids(router.app[ROUTER].bodies.pool)) == 1


async def test_of_a_long_body_no_text_and_no_list_of_ids_comes_back(
    fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    text = "the fox " * 20_000
    fleet.shards[0].info = dataclasses.replace(INFO, max_model_len=10**6)
    async with made_bodies(fleet) as bodies:
        body = await read_long(bodies, "completions", {"prompt": [text, [5] * 10]})
        assert body.asked.prompts == ("", "")
        made = await body.work(await bodies.models.get(""))
        assert isinstance(made, PreparedPrompts)
        assert made.prompts == (Prompt(array("I", byte_level.encode(text).ids)),
                                Prompt(array("I", [5] * 10)))  # fmt: skip


async def test_a_long_conversation_before_a_short_body_makes_it_a_long_one(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.shards[0].info = dataclasses.replace(INFO, max_model_len=10**6)
    part = {"type": "input_text", "text": "the fox " * 10_000}
    earlier = msgspec.json.encode([{**ITEM, "content": [part]}])
    async with made_bodies(fleet) as bodies:
        there = await outcome(bodies, "responses", b'{"input": "and the dog"}', earlier)
        assert len(pids(bodies.pool)) == 1
        monkeypatch.setattr(dispatch, "LONG_BYTES", 2**30)
        assert there == await outcome(bodies, "responses", b'{"input": "and the dog"}', earlier)


async def read_long(bodies: UsedBodies, kind: str, body: dict[str, Any]) -> Body:
    # JSON may have as much space as it likes.
    return await read(bodies, kind, msgspec.json.encode(body), b" " * 70_000)


async def answered(body: Body, model: ServedModel) -> Any:
    made = await body.work(model)
    assert not isinstance(made, PreparedPrompts)
    return msgspec.json.decode(made)


async def test_a_body_is_sent_again_where_its_process_was_wanted_elsewhere(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_HOLD_S", 0.01)
    async with made_bodies(fleet) as bodies:
        model = await bodies.models.get("")
        first = await read_long(bodies, "detokenize", {"tokens": [5, 6]})
        second = await read_long(bodies, "detokenize", {"tokens": [7]})
        wanted = [model.tokenizer.decode(ids, skip_special_tokens=False) for ids in ([5, 6], [7])]
        answers = [await answered(body, model) for body in (first, second)]
        assert [answer["prompt"] for answer in answers] == wanted


async def test_a_replaced_tokenizer_is_replaced_in_the_process_too(
    fleet: FakeFleet, sentencepiece: Tokenizer
) -> None:
    async with made_bodies(fleet) as bodies:
        for tokenizer_hash in ("t", "new"):
            fleet.shards[0].info = dataclasses.replace(INFO, tokenizer_hash=tokenizer_hash)
            model = await bodies.models.get("")
            body = await read_long(bodies, "tokenize", {"prompt": "the fox"})
            answer = await answered(body, model)
            wanted = model.tokenizer.encode(["the fox"], add_special_tokens=True, max_tokens=99)
            assert [answer["tokens"]] == wanted
            fleet.files = model_files(sentencepiece)
        assert len(pids(bodies.pool)) == 1


async def test_shards_are_asked_for_files_once(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    get = fleet.tokenizer_files

    async def counted(*key: str) -> dict[str, bytes]:
        nonlocal asked
        asked += 1
        return await get(*key)

    monkeypatch.setattr(fleet, "tokenizer_files", counted)
    async with made_bodies(fleet) as bodies:
        model = await bodies.models.get("")
        for _ in range(3):
            await (await read_long(bodies, "tokenize", {"prompt": "x"})).work(model)
            [pid] = pids(bodies.pool)
            os.kill(pid, 9)
            until_ended(pid)
        assert asked == 1


async def test_of_many_long_bodies_a_few_are_read_from_in_one_turn_of_the_loop(
    fleet: FakeFleet,
) -> None:
    async with made_bodies(fleet) as bodies:
        tasks = [asyncio.create_task(bodies.take_turn()) for _ in range(40)]
        done, turns = 0, 0
        while done < len(tasks):
            await asyncio.sleep(0)
            before, done = done, sum(task.done() for task in tasks)
            assert done - before <= 4
            turns += 1
        assert turns < 60


async def test_what_a_job_is_made_of_does_not_depend_on_where_its_text_was_worked_on(
    models: Models,
) -> None:
    """Check also that cursors of earlier routers hold: they packed ids in this way."""
    model, ids = await models.get(""), [5, 6, 499]
    request = parse_completion({"prompt": ids})
    here, there = [
        await make_job(request, model, PreparedPrompts((Prompt(given), Prompt([7]))), drawn_seed=1)
        for given in (ids, array("I", ids))
    ]
    info = model.info
    known = f"{info.tokenizer_hash} {info.eos_token_ids} {info.default_sampling}".encode()
    packed = struct.pack("<4I", 3, *ids) + struct.pack("<2I", 1, 7)
    expected = hashlib.blake2b(known + packed, digest_size=8).digest()
    assert job_digest(here) == job_digest(there) == expected


async def test_a_process_with_as_many_models_as_it_may_have_makes_way_for_another(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "MAX_MODELS", 2)
    used = []
    async with made_bodies(fleet) as bodies:
        for tokenizer_hash in ("a", "b", "a", "c", "a", "c"):
            fleet.shards[0].info = dataclasses.replace(INFO, tokenizer_hash=tokenizer_hash)
            body = await read_long(bodies, "tokenize", {"prompt": "the fox"})
            assert await answered(body, await bodies.models.get(""))
            used += pids(bodies.pool)
    first, third = used[0], used[3]
    assert used == [first, first, first, third, third, third]
    assert first != third


def test_a_process_parses_a_body_once_where_its_work_follows(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def noted(kind: AnyKind, data: bytes, *, with_digest: bool) -> Reading:
        parsed.append(data)
        return body_kinds.read(kind, data, with_digest=with_digest)

    monkeypatch.setattr(text_process, "read", noted)
    worker, bodies = TextWorker(), [b'{"prompt": "a"}', b'{"prompt": "b"}']
    facts = ModelFacts("m", "t", 512, 500, False, "none", "none")
    files = list(fleet.files.values())
    works = [Work(number, "tokenize", facts, tuple(fleet.files)) for number in (0, 1)]
    worker.load(works[0], [b"", b"", *files])
    for number in (0, 1):
        worker.do(Read(number, "tokenize", False), bodies[number : number + 1])
    # The first one's parsed form is gone by now.
    for number in (1, 0):
        assert b"tokens" in worker.do(works[number], [bodies[number], b"", *files])
    assert parsed == [*bodies, bodies[0]]


# ---- processes that are lost -------------------------------------------------------------------


def until_ended(pid: int) -> None:
    """Wait for a child that was killed, and leave it to its parent to take note of."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def endless_body(bodies: UsedBodies) -> tuple[Body, ServedModel]:
    """Return a body whose work never ends, and its model. A process is ready to begin at once."""
    chat = {"messages": [USER], "chat_template": ENDLESS}
    body, model = await read_long(bodies, "chats", chat), await bodies.models.get("")
    # After a short body the process has the model's files.
    short = {"messages": [USER], "chat_template": "x"}
    await (await read(bodies, "chats", msgspec.json.encode(short))).work(model)
    return body, model


async def test_a_process_that_dies_costs_its_request_and_the_next_one_gets_another(
    fleet: FakeFleet,
) -> None:
    async with made_bodies(fleet) as bodies:
        body, model = await endless_body(bodies)
        [pid] = pids(bodies.programs.pool)
        task = asyncio.create_task(body.work(model))
        await asyncio.sleep(0.1)
        os.kill(pid, 9)
        with pytest.raises(errors.Unavailable, match="text ended; try again"):
            await task
        await endless_body(bodies)
        assert pids(bodies.programs.pool) != [pid]


async def test_a_process_that_dies_between_two_tasks_of_a_body_costs_nobody_anything(
    fleet: FakeFleet,
) -> None:
    async with made_bodies(fleet) as bodies:
        model = await bodies.models.get("")
        body = await read_long(bodies, "tokenize", {"prompt": "x"})
        [pid] = pids(bodies.pool)
        os.kill(pid, 9)
        until_ended(pid)
        assert (await answered(body, model))["count"] == 1


async def test_where_no_process_can_be_started_the_answer_is_503(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made_bodies(fleet) as bodies:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="try again"):
                await read_long(bodies, "tokenize", {"prompt": "x"})
        monkeypatch.undo()
        assert await outcome(bodies, "tokenize", b'{"prompt": "x"}' + b" " * 70_000)


async def test_a_text_process_imports_nothing_from_the_folder_it_is_in(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)
    async with made_bodies(fleet) as bodies:
        assert await read_long(bodies, "tokenize", {"prompt": "x"})


def test_work_without_end_ends_without_its_router_too() -> None:
    """Check work that holds the interpreter lock, so that no thread can look for the router."""
    program = (
        "import os; from penstock_router.offload import text_process as t; t.MAX_TASK_S = 1; "
        "t.TextWorker.do = lambda *_: (os.write(1, b'!'), 9 ** 9 ** 9); "
        "t.main(['%d', 'info', 'text'])"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", program % fd], pass_fds=(fd,), stdout=subprocess.PIPE
        )
    with ours, process:
        ours.sendall(encode_task(Read(1, "tokenize", False), []))
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        time.sleep(0.1)
        ours.close()
        try:
            assert process.wait(20) == -signal.SIGALRM
        finally:
            process.kill()


async def test_a_process_that_died_while_idle_costs_nobody_anything(fleet: FakeFleet) -> None:
    async with made_bodies(fleet) as bodies:
        data = b'{"prompt": "x"}' + b" " * 70_000
        before = await outcome(bodies, "tokenize", data)
        [pid] = pids(bodies.pool)
        os.kill(pid, 9)
        until_ended(pid)
        assert await outcome(bodies, "tokenize", data) == before


@pytest.mark.parametrize("gone", [True, False])
async def test_work_without_end_is_killed_when_its_client_leaves_or_its_time_is_up(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(text_pool, "_GRACE_S", 0.05)
    async with made_bodies(fleet) as bodies:
        body, model = await endless_body(bodies)
        [pid] = pids(bodies.programs.pool)
        with monkeypatch.context() as patched:
            patched.setattr(request_templates, "MAX_PROGRAM_S", 60.0 if gone else 0.2)
            task = asyncio.create_task(body.work(model))
            await asyncio.sleep(0.1)
            if gone:
                task.cancel()
            with pytest.raises(asyncio.CancelledError if gone else errors.TimedOut):
                await task
        await endless_body(bodies)
        assert pids(bodies.programs.pool) != [pid]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_work_that_ends_soon_after_its_client_left_keeps_the_process(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Soon on any machine.
    monkeypatch.setattr(text_pool, "_GRACE_S", 60.0)
    async with made_bodies(fleet) as bodies:
        model = await bodies.models.get("")
        await (await read_long(bodies, "tokenize", {"prompt": "x"})).work(model)
        before = pids(bodies.pool)
        body = await read_long(bodies, "tokenize", {"prompt": "the fox " * 20_000})
        task = asyncio.create_task(body.work(model))
        await asyncio.sleep(0.005)
        task.cancel()
        assert await outcome(bodies, "tokenize", b'{"prompt": "x"}' + b" " * 70_000)
        assert pids(bodies.pool) == before


async def tokenized(bodies: UsedBodies, client: str, num_words: int, done: list[str]) -> None:
    with bodies.incoming(client) as incoming:
        incoming.add(msgspec.json.encode({"prompt": "the fox " * num_words}))
        body = await bodies.read(KINDS["tokenize"], incoming)
        assert body.refusal is None
        await body.work(await bodies.models.get(""))
        done.append(client)


async def test_one_clients_long_bodies_leave_others_a_process(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that short bodies are read while long ones wait. Each long one takes a second or more,
    each short one a fiftieth of its time.
    """
    monkeypatch.setattr("penstock_router.admission.turns.LONG_S", 0.05)
    done: list[str] = []
    async with made_bodies(fleet) as bodies:
        long = [asyncio.create_task(tokenized(bodies, "a", 450_000, done)) for _ in range(4)]
        async with asyncio.timeout(30):
            while not bodies.pool._turns.num_working:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(tokenized(bodies, "b", 9_000, done) for _ in range(3)))
        # At most one of the four long bodies is done: the one that was being worked on.
        assert done.count("a") <= 1
        await asyncio.gather(*long)


# ---- who is next, without processes ------------------------------------------------------------


@dataclasses.dataclass
class FakeProcess:
    """Says what it is asked, when it is told to."""

    told: list[str]
    go_on: asyncio.Event
    pid: int = 1
    is_alive: bool = True

    def has_room_for(self, task: Task) -> bool:
        return True

    async def do(self, task: Task, parts: Parts, files: object) -> Outcome:
        await self.go_on.wait()
        [[name]] = parts
        self.told.append(name.decode())
        return b"" if isinstance(task, Show) else Reading(COMPLETIONS)

    async def kill(self) -> int:
        self.is_alive = False
        return 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    process = FakeProcess([], asyncio.Event())
    monkeypatch.setattr(text_pool, "TextProcess", lambda log_level, log_format: process)
    return process


SHOW = Show(None)
READ = Read(1, "completions", False)
MEGA = 10**6


async def ask(
    pool: TextPool,
    name: str,
    num_bytes: int,
    arrived_s: float,
    task: Task = SHOW,
    client: str = "a client",
) -> None:
    arrival = arrived_s + SECONDS_A_BYTE * num_bytes, int(arrived_s * 10)
    await pool.run(client, arrival, task, [[name.encode()]])


async def begun(pool: TextPool, *bodies: tuple[str, int, float]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(ask(pool, *body)) for body in bodies]
    await asyncio.sleep(0.01)
    return tasks


async def test_short_bodies_pass_long_ones_that_came_a_little_before(process: FakeProcess) -> None:
    pool = TextPool(1, "info")
    tasks = await begun(
        pool,
        ("first", MEGA, 0.0),
        ("long", 10 * MEGA, 0.0),
        ("short", MEGA, 1.0),
        ("shorter", MEGA // 2, 2.0),
        # The long one has waited for long enough.
        ("late", MEGA, 5.0),
    )
    process.go_on.set()
    await asyncio.gather(*tasks)
    assert process.told == ["first", "short", "shorter", "long", "late"]
    await pool.close()


async def test_clients_have_turns_and_each_its_short_ones_first(process: FakeProcess) -> None:
    pool = TextPool(1, "info")
    names = [f"a{number}" for number in range(9)]
    tasks = await begun(pool, *((name, MEGA, number) for number, name in enumerate(names)))
    others = [("b long", 9 * MEGA, 20.0), ("b short", MEGA, 21.0), ("b late", MEGA, 22.0)]
    tasks += [asyncio.create_task(ask(pool, *each, client="b")) for each in others]
    await asyncio.sleep(0)
    process.go_on.set()
    await asyncio.gather(*tasks)
    # Each of these takes no time; of those that do, `test_image_turns` tells.
    assert [name for name in process.told if name[0] == "b"] == ["b short", "b late", "b long"]
    assert process.told.index("b short") <= 2
    await pool.close()


async def test_while_one_clients_task_takes_long_others_have_a_process_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock_router.admission.turns.LONG_S", 0.01)
    started: list[FakeProcess] = []

    def start(log_level: str, log_format: str) -> FakeProcess:
        started.append(FakeProcess([], asyncio.Event(), pid=len(started)))
        return started[-1]

    monkeypatch.setattr(text_pool, "TextProcess", start)
    pool = TextPool(1, "info")
    long = await begun(pool, ("long", MEGA, 0.0), ("long too", MEGA, 1.0))
    other = asyncio.create_task(ask(pool, "other", MEGA, 2.0, client="b"))
    async with asyncio.timeout(30):
        while len(started) < 2:
            await asyncio.sleep(0.005)
        started[1].go_on.set()
        await other
        # For many others one after the other the same one; none for the client itself.
        for number in range(3, 9):
            await ask(pool, f"{number}", 1, number, client=f"client {number}")
    assert (len(started), started[0].told) == (2, [])
    assert not any(task.done() for task in long)
    started[0].go_on.set()
    await asyncio.gather(*long)
    # Then there is one too many.
    await asyncio.sleep(0.01)
    assert [process.is_alive for process in started].count(True) == 1
    await pool.close()


async def test_who_stops_waiting_leaves_at_once_and_the_next_one_has_its_turn(
    process: FakeProcess,
) -> None:
    pool = TextPool(1, "info")
    tasks = await begun(pool, *((name, 10, number) for number, name in enumerate("abcd")))
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert pool._turns.num_waiting == 2
    process.go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert process.told == ["a", "c", "d"]
    await pool.close()


async def test_who_leaves_in_the_moment_of_its_turn_passes_it_on(process: FakeProcess) -> None:
    pool = TextPool(1, "info")
    lease = await pool._lease("a", (0.0, 0))
    second = asyncio.create_task(ask(pool, "b", 1, 1))
    await asyncio.sleep(0)
    pool._give_back(lease)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    process.go_on.set()
    async with asyncio.timeout(30):
        await ask(pool, "c", 1, 2)
    assert process.told == ["c"]
    await pool.close()


async def test_who_waits_or_comes_when_the_pool_stops_is_refused(process: FakeProcess) -> None:
    pool = TextPool(1, "info")
    tasks = await begun(pool, ("a", 1, 0), ("b", 1, 1), ("c", 1, 2))
    tasks[1].cancel()
    pool.stop()
    for late in (tasks[2], ask(pool, "d", 1, 3)):
        with pytest.raises(errors.Unavailable, match="shutting down"):
            await late
    process.go_on.set()
    await tasks[0]
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    assert process.told == ["a"]
    assert not process.is_alive


@pytest.mark.parametrize("comes", [True, False])
async def test_a_body_that_was_read_is_worked_on_next_unless_that_is_not_asked_for_at_once(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(text_pool, "_HOLD_S", 60.0 if comes else 0.005)
    process.go_on.set()
    pool = TextPool(1, "info")
    reading = asyncio.create_task(ask(pool, "read", 1, 1, READ))
    waiting = asyncio.create_task(ask(pool, "long", 10 * MEGA, 0))
    await reading
    if not comes:
        await waiting
    await asyncio.sleep(0.01)
    await ask(pool, "work", 1, 1)
    assert process.told[:2] == (["read", "work"] if comes else ["read", "long"])
    waiting.cancel()
    await pool.close()


async def test_no_process_is_started_while_another_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[FakeProcess] = []
    go_on = asyncio.Event()

    def start(log_level: str, log_format: str) -> FakeProcess:
        started.append(FakeProcess([], go_on))
        return started[-1]

    monkeypatch.setattr(text_pool, "TextProcess", start)
    pool = TextPool(2, "info")
    tasks = await begun(pool, ("a", 1, 0), ("b", 1, 1))
    started[1].is_alive = False
    go_on.set()
    await asyncio.gather(*tasks)
    await ask(pool, "c", 1, 2)
    assert len(started) == 2
    await pool.close()


async def test_what_is_held_for_a_body_is_one_process(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_HOLD_S", 60.0)
    process.go_on.set()
    pool = TextPool(2, "info")
    await ask(pool, "read", 1, 0, READ)
    async with asyncio.timeout(30):
        await ask(pool, "another", 1, 1)
    await pool.close()


# ---- how many there may be ---------------------------------------------------------------------


def taken(bodies: Bodies) -> tuple[int, int]:
    return bodies.queue.held, bodies.memory.held


def take_all(bodies: Bodies, scope: ExitStack, take: Callable[[Incoming], None]) -> None:
    for _ in range(MAX_BODIES):
        take(scope.enter_context(bodies.incoming("greedy")))


async def test_one_clients_bodies_leave_memory_and_places_to_others(fleet: FakeFleet) -> None:
    body = b'{"prompt": "x"}' + b" " * 70_000
    async with made_bodies(fleet) as bodies:
        with ExitStack() as scope:
            # None of them is complete.
            with pytest.raises(TooManyRequests, match="bytes of yours are in memory, of 201326592"):
                take_all(bodies, scope, lambda incoming: incoming.add(b" " * 16_000_000))
            assert await outcome(bodies, "tokenize", body)
        assert taken(bodies) == (0, 0)
        with ExitStack() as scope:
            with pytest.raises(TooManyRequests, match="1024 long bodies of yours are in the queue"):
                take_all(bodies, scope, Incoming.enqueue)
            assert await outcome(bodies, "tokenize", body)
        assert taken(bodies) == (0, 0)
        assert bodies._metrics.refused.labels("long_bodies")._value.get() == 2


async def test_a_body_that_finds_nothing_else_here_may_have_any_length(fleet: FakeFleet) -> None:
    async with made_bodies(fleet) as bodies:
        with bodies.incoming("a") as one, bodies.incoming("b") as other:
            one.add(b" " * (MEMORY_BYTES + 1))
            with pytest.raises(TooManyRequests) as refused:
                other.add(b" ")
            assert refused.value.headers() == {"Retry-After": "1"}
            one.drop()
            one.drop()
            other.add(b" ")
        assert taken(bodies) == (0, 0)


async def test_short_bodies_whose_work_is_long_are_bounded_too(fleet: FakeFleet) -> None:
    earlier = msgspec.json.encode([{**ITEM, "id": "x" * 70_000}])
    async with made_bodies(fleet) as bodies:
        with ExitStack() as scope:
            for _ in range(MAX_BODIES // 2):
                scope.enter_context(bodies.incoming("a client")).enqueue()
            kind, *_ = await outcome(bodies, "responses", b'{"input": "x"}', earlier)
            assert kind is TooManyRequests


async def test_a_body_counts_until_its_text_is_worked_on(fleet: FakeFleet) -> None:
    async with made_bodies(fleet) as bodies:
        model = await bodies.models.get("")
        with bodies.incoming("a client") as incoming:
            incoming.add(b'{"prompt": "x"}' + b" " * 70_000)
            body = await bodies.read(KINDS["tokenize"], incoming)
            await asyncio.sleep(0.1)
            # Also while its process works for somebody else.
            assert taken(bodies) == (1, 70_015)
            await body.work(model)
            assert taken(bodies) == (0, 0)
            assert incoming.pieces == []


async def test_the_time_of_a_request_counts_while_its_body_comes(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_router(fleet) as router:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: memory\r\nContent-Length: 99\r\n"
        for header, pause_s in ((b"x-penstock-timeout-s: 0.05\r\n", 60), (b"", 0.05)):
            monkeypatch.setattr(read_body, "_MAX_PAUSE_S", pause_s)
            connection = router.connect()
            connection.send_raw(head + header + b"\r\n{")
            async with asyncio.timeout(30):
                assert (await connection.read_answer()).status == 504
            connection.close()


# ---- messages ----------------------------------------------------------------------------------

ERRORS: list[ApiError] = [
    BadRequest("a: must be b", param="a"),
    ContextExceeded("too long", limit_tokens=5, prompt_tokens=7, wanted_tokens=3, param="prompt"),
    ContextExceeded("too long", limit_tokens=5),
    errors.TemplateFailed("no", param="messages"),
    errors.Unavailable("not now"),
    ApiError("internal error"),
]


async def after_its_way(outcome: Outcome | ApiError) -> Outcome:
    return await decode_outcome(encode_outcome(outcome)[HEADER_BYTES:])


@pytest.mark.parametrize("error", ERRORS)
async def test_an_error_is_the_same_after_its_way(error: ApiError) -> None:
    with pytest.raises(ApiError) as raised:
        await after_its_way(error)
    reading = await after_its_way(Reading(COMPLETIONS, refusal=error))
    assert isinstance(reading, Reading)
    for again in (raised.value, reading.refusal):
        assert again is not None
        assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


async def test_ids_are_little_endian_and_come_back_in_one_block() -> None:
    rng = seeded("ids")
    ids = [rng.randrange(2**32) for _ in range(1000)]
    for given in (ids, array("I", ids), tuple(ids)):
        assert pack_ids(given)[:4] == ids[0].to_bytes(4, "little")
        again = await after_its_way(PreparedPrompts((Prompt(given),)))
        assert isinstance(again, PreparedPrompts)
        assert again.prompts[0].token_ids == array("I", ids)


async def test_long_ids_come_back_in_many_turns_of_the_loop() -> None:
    outcome = PreparedPrompts((Prompt(array("I", range(1_000_000))),))
    task = asyncio.create_task(after_its_way(outcome))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    again = task.result()
    assert isinstance(again, PreparedPrompts)
    assert again.prompts == outcome.prompts
    assert turns > 10


async def test_prompts_are_the_same_after_their_way() -> None:
    prompts = (Prompt([5, 6], "text"), Prompt([], None), Prompt(array("I", [7])))
    repeated = {"store": b"true", "user": b'"me"'}
    given = PreparedPrompts(prompts, [[1], [2, 3]], (9, 8), "full", b'[{"a":1}]', repeated)
    frame = encode_outcome(given)
    assert decode_header(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    again = await after_its_way(given)
    assert isinstance(again, PreparedPrompts)
    assert plain(again) == plain(given)
    assert all(isinstance(prompt.token_ids, array) for prompt in again.prompts)


@pytest.mark.parametrize("data", [b"", b"\x80", msgspec.msgpack.encode({"type": "Nothing"})])
async def test_what_is_no_message_is_not_taken_for_one(data: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode_task(data)
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        await decode_outcome(data)


# ---- threads -----------------------------------------------------------------------------------


async def test_what_finds_no_room_among_the_threads_is_refused_at_once() -> None:
    with ThreadPoolExecutor(1) as executor:
        threads = Threads(executor, 2)
        until = threading.Event()
        waiting = [asyncio.create_task(threads.run(until.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="2 pieces of work wait"):
            await threads.run(int)
        # One that nobody waits for any more leaves, if it has not begun.
        waiting[1].cancel()
        await asyncio.sleep(0)
        last = asyncio.create_task(threads.run(int))
        await asyncio.sleep(0)
        until.set()
        assert (await waiting[0], await last) == (True, 0)
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)


async def test_a_model_is_loaded_for_all_however_much_work_one_client_has_sent(
    fleet: FakeFleet,
) -> None:
    with ThreadPoolExecutor(1) as executor:
        threads, until = Threads(executor, 2), threading.Event()
        waiting = [asyncio.create_task(threads.run(until.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        models = Models(fleet, threads, RouterConfig(shards="fake:1"))
        loading = asyncio.create_task(models.get(""))
        await asyncio.sleep(0.01)
        until.set()
        assert (await loading).info == INFO
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("num_chars", [40, 100_000])
async def test_what_names_images_is_not_kept_with_the_request(
    fleet: FakeFleet, num_chars: int
) -> None:
    image = {"type": "image_url", "image_url": f"data:image/png;base64,{'A' * num_chars}"}
    message = {"role": "user", "content": [image]}
    async with made_bodies(fleet) as bodies:
        body = await read(bodies, "chats", msgspec.json.encode({"messages": [message]}))
        assert body.asked.images == ()
        assert [len(source.url) for source in body._sources] == [22 + num_chars]
        with pytest.raises(BadRequest, match="takes no images"):
            await body.work(await bodies.models.get(""))
        assert body._sources == ()


async def test_one_clients_work_for_threads_is_done_between_that_of_others(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    made = body_kinds.work

    def noted(kind: Any, asked: Any, *more: Any) -> Any:
        order.append("greedy" if "greedy" in repr(asked) else "other")
        return made(kind, asked, *more)

    monkeypatch.setattr(dispatch, "work", noted)
    async with memory_router(fleet) as router:

        def tokenize(word: str, address: str) -> asyncio.Task[Answer]:
            body = msgspec.json.encode({"prompt": f"{word} " * 1000})
            headers = {"Content-Type": "application/json"}
            return asyncio.create_task(
                router.request("POST", "/tokenize", body, headers, address=address)
            )

        tasks = [tokenize("greedy", "10.0.0.1") for _ in range(40)]
        await asyncio.sleep(0)
        tasks += [tokenize("other", "10.0.0.2") for _ in range(4)]
        assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
    assert len(order) == 44
    assert max(place for place, whose in enumerate(order) if whose == "other") < 20
