"""Asks shards by the client library that is on the PYTHONPATH: run as a process of its own.

Reads a job as JSON, writes answers as JSON. Of the library it takes the documented names only, so
that it asks with any revision's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from penstock_client import (
    Constraint,
    ConstraintKind,
    EmbeddingRequest,
    Fleet,
    GenerationRequest,
    LoadReport,
    Objective,
    Output,
    PenstockError,
    SamplingParams,
    ShardClient,
    ShardInfo,
    SyncShardClient,
    ThinkingBudget,
)

Answer = dict[str, Any]
# What is asked of a client: the request's kind and its fields by the names of the dataclasses.
Question = Mapping[str, Any]

_READY_TIMEOUT_S = 30.0
# Columns of log-probabilities that every revision has.
_COLUMNS = ("chosen", "ranks", "top_n", "top_token_ids", "top_logprobs", "requested")
# With so many tokens an answer has begun.
_BEGUN_TOKENS = 20
_PARTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "sampling": lambda given: SamplingParams(
        **{**given, "logit_bias": {int(i): b for i, b in given.get("logit_bias", {}).items()}}
    ),
    "constraint": lambda given: Constraint(
        **{**given, "kind": ConstraintKind(given["kind"])},
    ),
    "thinking_budget": lambda given: ThinkingBudget(**given),
    "objective": lambda given: Objective(**given),
}


def generation_request(given: Question) -> GenerationRequest:
    return GenerationRequest(
        **{name: _PARTS[name](value) if name in _PARTS else value for name, value in given.items()}
    )


def description(info: ShardInfo) -> Answer:
    """Return what questions and comparisons need to know of a shard."""
    return {
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "embeds": info.embedding is not None,
        "numerics_fingerprint": info.numerics_fingerprint,
    }


class WholeAnswer:
    """The outputs of one request, joined."""

    def __init__(self) -> None:
        self.answer: Answer = {"token_ids": [], "logprobs": {}, "prompt_logprobs": {}}

    def add(self, output: Output) -> None:
        self.answer["token_ids"] += output.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            columns = getattr(output, name)
            for column in _COLUMNS if columns else ():
                values = getattr(columns, column)
                known = self.answer[name].get(column)
                joined = isinstance(values, list) and known is not None
                self.answer[name][column] = known + values if joined else values
        if output.finish_reason is not None:
            self.answer["finish_reason"] = output.finish_reason.value
            self.answer["stop_token_id"] = output.stop_token_id


def refusal(error: PenstockError) -> Answer:
    """Return an error's kind and the field that it names, but not its words, which may improve."""
    return {"error": type(error).__name__, "field": getattr(error, "field", "")}


class Asker:
    """Asks with one asyncio client. Once every question is amid its answer, it may end a process by
    a signal.
    """

    def __init__(self, client: ShardClient | Fleet, job: Mapping[str, Any]) -> None:
        self._client = client
        self._ending = job["ending"]
        self._to_begin = set(job["questions"]) if self._ending else set()

    async def ask(self, name: str, question: Question) -> Answer:
        ((kind, given),) = question.items()
        try:
            if kind == "generate":
                return await self._generate(name, given)
            if kind == "embed":
                return {"vectors": await self._client.embed(EmbeddingRequest(**given))}
            assert isinstance(self._client, ShardClient)
            return await _OF_ONE_SHARD[kind](self._client, given)
        except PenstockError as error:
            return refusal(error)
        finally:
            self._has_begun(name)

    async def _generate(self, name: str, fields: Question) -> Answer:
        whole = WholeAnswer()
        async with self._client.submit(generation_request(fields)) as stream:
            async for output in stream:
                whole.add(output)
                if self._ending and len(whole.answer["token_ids"]) >= _BEGUN_TOKENS:
                    self._has_begun(name)
        return {**whole.answer, "attempts": len(stream.attempts)}

    def _has_begun(self, name: str) -> None:
        if name in self._to_begin:
            self._to_begin.remove(name)
            if not self._to_begin:
                os.kill(self._ending["pid"], self._ending["signal"])


async def _load_adapter(client: ShardClient, given: Question) -> Answer:
    adapter = await client.load_adapter(given["name"], given["source"])
    return {"content_hash": adapter.content_hash, "rank": adapter.rank}


async def _unload_adapter(client: ShardClient, given: Question) -> Answer:
    await client.unload_adapter(given["name"])
    return {}


async def _abandon(client: ShardClient, given: Question) -> Answer:
    """Leave a stream after its first output; the shard is idle then."""
    async with client.submit(generation_request(given)) as stream:
        async for _ in stream:
            break
    reports = [report async for report in _until_idle(client)]
    return {"running": reports[-1].running}


async def _until_idle(client: ShardClient) -> AsyncIterator[LoadReport]:
    async with asyncio.timeout(_READY_TIMEOUT_S):
        async for report in client.watch_load():
            yield report
            if not report.running:
                return


async def _tokenizer(client: ShardClient, given: Question) -> Answer:
    files = await client.tokenizer_files()
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


async def _drain(client: ShardClient, given: Question) -> Answer:
    left = [progress async for progress in client.drain(**given)]
    return {"running": left[-1].running, "waiting": left[-1].waiting}


_OF_ONE_SHARD: Mapping[str, Callable[[ShardClient, Question], Awaitable[Answer]]] = {
    "load_adapter": _load_adapter,
    "unload_adapter": _unload_adapter,
    "abandon": _abandon,
    "tokenizer": _tokenizer,
    "drain": _drain,
}


async def _ask_all(asker: Asker, job: Mapping[str, Any]) -> dict[str, Answer]:
    questions = job["questions"]
    if not job["together"]:
        return {name: await asker.ask(name, question) for name, question in questions.items()}
    answers = await asyncio.gather(*(asker.ask(*question) for question in questions.items()))
    return dict(zip(questions, answers, strict=True))


async def _with_shard(job: Mapping[str, Any]) -> Answer:
    async with ShardClient(job["shards"][0]) as client:
        answers = await _ask_all(Asker(client, job), job)
        return {"shard": description(await client.info()), "answers": answers}


async def _with_fleet(job: Mapping[str, Any]) -> Answer:
    async with Fleet(job["shards"]) as fleet:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while not all(shard.ready for shard in fleet.shards):
                await fleet.wait_changed()
        answers = await _ask_all(Asker(fleet, job), job)
        return {"shard": description(fleet.info()), "answers": answers}


def _with_sync(job: Mapping[str, Any]) -> Answer:
    with SyncShardClient(job["shards"][0]) as client:
        answers = {name: _blocking(client, each) for name, each in job["questions"].items()}
        return {"shard": description(client.info()), "answers": answers}


def _blocking(client: SyncShardClient, question: Question) -> Answer:
    whole = WholeAnswer()
    try:
        if "embed" in question:
            return {"vectors": client.embed(EmbeddingRequest(**question["embed"]))}
        for output in client.generate(generation_request(question["generate"])):
            whole.add(output)
    except PenstockError as error:
        return refusal(error)
    return whole.answer


def main() -> None:
    job = json.load(sys.stdin)
    if job["client"] == "sync":
        found = _with_sync(job)
    else:
        found = asyncio.run((_with_fleet if job["client"] == "fleet" else _with_shard)(job))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
