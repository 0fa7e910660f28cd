"""Tries at load whether vLLM goes on from output that a request brings as if it had drawn it."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from penstock_shard.errors import ModelError
from penstock_shard.ipc.request import Request, SamplingParams
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.bridge import Core
from penstock_shard.vllm_engine.requests import (
    AS_PROMPT,
    Continuation,
    core_id,
    prompt_of,
    sampling_of,
)

logger = logging.getLogger(__name__)

_AS_OUTPUT = Continuation(as_output=True, lacks=frozenset())
# Tokens of a trial, and after how many it is cut. Its prompt is longer than a block, so the part
# after the cut finds a prefix.
_LENGTH, _CUT = 16, 7
# Kernels of new shapes are compiled meanwhile.
_MOST_S = 300.0


class CheckedCore(Core, Protocol):
    """A core whose requests can be preempted."""

    @property
    def keeps_output(self) -> bool: ...

    async def preempt_all(self) -> None: ...


async def find_continuation(core: CheckedCore, info: RunnerInfo) -> Continuation:
    """Find out how requests go on here; takes some 40 steps where output can stay output. Raises
    ModelError if they never end, and an error of vLLM's when its core dies of them.
    """
    if not core.keeps_output:
        return AS_PROMPT
    try:
        async with asyncio.timeout(_MOST_S):
            return await _tried(core, info)
    except TimeoutError:
        raise ModelError(f"vLLM: trial requests did not end within {_MOST_S:g} s") from None


async def _tried(core: CheckedCore, info: RunnerInfo) -> Continuation:
    plain = await _generate(core, {"": _trial(info, "plain", SamplingParams(temperature=0.0))})
    trials = _trials(info, plain[""])
    wholes = await _generate(core, trials)
    cuts = {
        name: msgspec.structs.replace(
            request, attempt=1, output=array("I", wholes[name][:_CUT]).tobytes()
        )
        for name, request in trials.items()
    }
    rests = await _generate(core, cuts, preempts=True)
    failed = frozenset(name for name in trials if wholes[name][_CUT:] != rests[name])
    if failed:
        logger.warning(
            "requests with %s do not go on exactly from output, and are left to other shards",
            ", ".join(sorted(failed)),
        )
    return Continuation(as_output=True, lacks=failed)


def _trials(info: RunnerInfo, plain: list[int]) -> dict[str, Request]:
    """Requests by the field that each of them tries; `plain` is what comes without any. The bad
    word lies across the cut, and so does the least length.
    """
    greedy = SamplingParams(temperature=0.0)
    fields: Mapping[str, tuple[SamplingParams, dict[str, Any]]] = {
        "presence_penalty": (SamplingParams(temperature=0.0, presence_penalty=2.0), {}),
        "frequency_penalty": (SamplingParams(temperature=0.0, frequency_penalty=2.0), {}),
        "bad_words": (
            SamplingParams(temperature=0.0, bad_words=(tuple(plain[_CUT - 1 : _CUT + 1]),)),
            {},
        ),
        "min_tokens": (greedy, {"min_tokens": _CUT + 4, "stop_token_ids": frozenset(plain)}),
    }
    return {name: _trial(info, name, each, **more) for name, (each, more) in fields.items()}


def _trial(info: RunnerInfo, name: str, sampling: SamplingParams, **more: Any) -> Request:
    size = min(info.block_size + 8, info.max_model_len - _LENGTH - 1)
    prompt = array("I", [(7 * i) % min(info.vocab_size, 97) for i in range(size)])
    return Request(
        request_id=f"check-{name}",
        attempt=0,
        prompt=prompt.tobytes(),
        sampling=sampling,
        max_tokens=_LENGTH,
        **more,
    )


async def _generate(
    core: CheckedCore, requests: Mapping[str, Request], *, preempts: bool = False
) -> dict[str, list[int]]:
    """The tokens of each request; with `preempts` all are preempted after the first."""
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    left = {core_id(each.request_id, each.attempt): name for name, each in requests.items()}
    for each in requests.values():
        bad_words = [list(word) for word in each.sampling.bad_words]
        name = core_id(each.request_id, each.attempt)
        await core.add(name, prompt_of(each), sampling_of(each, _AS_OUTPUT), bad_words, "", 0)
    while left:
        for output in (await core.step()).outputs:
            tokens[left[output.request_id]] += output.new_token_ids
            if output.finish_reason is not None:
                del left[output.request_id]
        if preempts and all(tokens.values()):
            await core.preempt_all()
            preempts = False
    return tokens
