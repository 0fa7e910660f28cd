"""Shards and routers of a checkout, what they are asked, and what they say that they take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from comparison.cases import Json, of_fields
from comparison.shard_cases import (
    GENERATE,
    MODEL,
    Questions,
    Vocabulary,
    embed_cases,
    generate_cases,
)
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.checkouts import Checkout
from support.processes import Router, Shard, running

Answers = dict[str, Any]

_ASKER = Path(__file__).with_name("asker.py")
_SERVICE = "penstock.v1.Shard"
_TIMEOUT_S = 600
# More would only have them wait.
_HTTP_CLIENTS = 8
# Of a stream's events: texts in pieces, counts that grow, and the rest in order.
_JOINED = ("text", "content", "response", "delta", "name", "arguments", "partial_json")
_COUNTS = (
    *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
    *("prompt_eval_count", "eval_count"),
)
_LISTED = ("finish_reason", "stop_reason", "stop_sequence", "done_reason", "logprob")
# Of the clock, or drawn anew for each answer.
_OF_ITS_OWN = frozenset(
    {
        *("id", "call_id", "created", "created_at", "completed_at", "modified_at"),
        *("total_duration", "prompt_eval_duration", "eval_duration"),
    }
)


def shard_of(checkout: Checkout, log_file: Path, *flags: str) -> Shard:
    """A shard process of this checkout, not yet healthy."""
    named = ("--served-model-name", MODEL)
    return Shard(log_file, *named, *flags, python_path=checkout.python_path)


def router_of(checkout: Checkout, log_file: Path, *shards: Shard) -> Router:
    """A router process of this checkout in front of shards of any."""
    addresses = [shard.address for shard in shards]
    return Router(log_file, addresses, python_path=checkout.python_path)


# ---- asking shards -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Answers to questions, how many attempts each took, and what a shard said of itself."""

    answers: Answers
    attempts: dict[str, int]
    shard: Json


def ask(
    checkout: Checkout,
    shards: Sequence[Shard],
    questions: Mapping[str, Json],
    *,
    client: str = "shard",
    together: bool = True,
    ending: tuple[Shard, signal.Signals] | None = None,
) -> Reply:
    """Asks shards by the client library of a checkout; `client` is "shard", "sync" or "fleet".

    Once all that is asked together has begun, `ending` gets a signal.
    """
    job = {
        "shards": [shard.address for shard in shards],
        "questions": questions,
        "client": client,
        "together": together,
        "ending": ending and {"pid": ending[0].process.pid, "signal": ending[1]},
    }
    done = subprocess.run(
        # -P: the modules beside the script are none of its own.
        [sys.executable, "-P", str(_ASKER)],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": checkout.python_path},
        timeout=_TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    answers: Answers = found["answers"]
    attempts = {name: answer.pop("attempts", 1) for name, answer in answers.items()}
    return Reply(answers, attempts, found["shard"])


def questions_for(checkout: Checkout, shard: Shard) -> Questions:
    """Return the questions for shards with this shard's model: each case that this checkout knows,
    if its field is among those that the shard's reflection shows.
    """
    generate_fields = wire_fields(shard, "Generate")
    found = ask(checkout, [shard], {"": {"generate": GENERATE}})
    vocabulary = Vocabulary(
        found.shard["vocab_size"],
        found.shard["eos_token_ids"][0],
        found.answers[""]["token_ids"],
    )
    embed_fields = wire_fields(shard, "Embed") if found.shard["embeds"] else []
    return Questions(
        generate=of_fields(generate_cases(vocabulary), generate_fields),
        embed=of_fields(embed_cases(), embed_fields),
        is_exact=bool(found.shard["numerics_fingerprint"]),
    )


def wire_fields(shard: Shard, rpc: str) -> list[str]:
    """The fields of an RPC's request, as the shard's reflection has them."""
    with grpc.insecure_channel(shard.address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        return list(_leaves(pool.FindServiceByName(_SERVICE).methods_by_name[rpc].input_type))


def _leaves(message: Descriptor, before: str = "") -> Iterator[str]:
    for field in message.fields:
        within = field.message_type
        if within is None or within.GetOptions().map_entry:
            yield before + field.name
        else:
            yield from _leaves(within, f"{before}{field.name}.")


# ---- asking routers ----------------------------------------------------------------------------


def ask_router(router: Router, requests: Mapping[str, tuple[str, Json]]) -> Answers:
    """The answers to requests of (path, body), without what is of one answer only."""

    def answer(request: tuple[str, Json]) -> Any:
        status, text = router.ask(*request)
        return {"status": status, "body": _without_ids_and_times(_content(text))}

    with ThreadPoolExecutor(_HTTP_CLIENTS) as pool:
        return dict(zip(requests, pool.map(answer, requests.values()), strict=True))


def _content(text: str) -> Any:
    if text.count("\n") > 1 and text.startswith('{"'):
        return _join([json.loads(line) for line in text.splitlines()])
    if not text.startswith(("data:", "event:")):
        return json.loads(text)
    payloads = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return _join([json.loads(payload) for payload in payloads if payload != "[DONE]"])


def _join(events: list[Any]) -> Json:
    """Return what a stream said, no matter which tokens came in one event."""
    said: dict[str, list[Any]] = {}
    for event in events:
        for key, value in _strings_and_numbers(event):
            said.setdefault(key, []).append(value)
    texts = {key: "".join(map(str, said.get(key, ()))) for key in _JOINED}
    # Usage may come with every event: the last one counts.
    ends = {key: said[key][-1] for key in _COUNTS if key in said}
    return {**texts, **ends, **{key: said.get(key, []) for key in _LISTED}}


def _strings_and_numbers(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, within in value.items():
            yield from _strings_and_numbers(within, name)
    elif isinstance(value, list):
        for within in value:
            yield from _strings_and_numbers(within, key)
    elif value is not None:
        yield key, value


def _without_ids_and_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_ids_and_times(v) for k, v in value.items() if k not in _OF_ITS_OWN}
    if isinstance(value, list):
        return [_without_ids_and_times(each) for each in value]
    return value


def http_fields(router: Router) -> dict[str, list[str]]:
    """The fields of each route's body, as the router's OpenAPI document has them; those
    of an object within are named with a dot.
    """
    document = json.loads(router.ask("/openapi.json")[1])
    found = {}
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        if "properties" in schema:
            found[path] = list(_fields(schema))
    return found


def _fields(schema: Json, before: str = "") -> Iterator[str]:
    for name, value in schema["properties"].items():
        forms = [form for form in value.get("anyOf", [value]) if form != {"type": "null"}]
        within = [form for form in forms if "properties" in form]
        if len(within) == len(forms) == 1:
            yield from _fields(within[0], f"{before}{name}.")
        else:
            yield before + name


@contextlib.contextmanager
def pair_of(checkout: Checkout, folder: Path, *flags: str) -> Iterator[tuple[Shard, Router]]:
    """A shard and a router of one checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = shard_of(checkout, folder / "shard.log", *flags)
    router = router_of(checkout, folder / "router.log", shard)
    with running(shard, router):
        yield shard, router
