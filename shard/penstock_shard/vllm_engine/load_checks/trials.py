"""Trial requests for a core at load."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.adapters import AdaptedCore
from penstock_shard.vllm_engine.bridge import Core
from penstock_shard.vllm_engine.requests import core_id, core_request

GREEDY = EngineSampling(temperature=0.0)
# Tokens of a trial, and tokens before the cut. The prompt is longer than a block, so the part after
# the cut finds a cached prefix.
LENGTH, CUT = 16, 7
# The time limit in seconds, including time to compile kernels.
_MOST_S = 300.0


class CheckedCore(Core, AdaptedCore, Protocol):
    """A core with adapters that can preempt requests."""

    async def preempt_all(self) -> None: ...


@contextlib.asynccontextmanager
async def bounded() -> AsyncIterator[None]:
    """Raise ModelError if trials in the context take too long."""
    try:
        async with asyncio.timeout(_MOST_S):
            yield
    except TimeoutError:
        raise ModelError(f"vLLM: trial requests did not end within {_MOST_S:g} s") from None


def trial(
    info: RunnerInfo, name: str, sampling: EngineSampling, num_more: int = 8, **more: Any
) -> EngineRequest:
    """Make a request with a prompt that is `num_more` tokens longer than a block."""
    size = min(info.block_size + num_more, info.max_model_len - LENGTH - 1)
    prompt = array("I", [(7 * i) % min(info.vocab_size, 97) for i in range(size)])
    return EngineRequest(
        request_id=f"check-{name}",
        attempt=0,
        prompt=prompt.tobytes(),
        sampling=sampling,
        max_tokens=LENGTH,
        **more,
    )


def cut(request: EngineRequest, token_ids: list[int]) -> EngineRequest:
    """Make the request that continues `request` after `CUT` tokens."""
    output = array("I", token_ids[:CUT]).tobytes()
    return msgspec.structs.replace(request, attempt=1, output=output)


async def run_trials(
    core: CheckedCore,
    requests: Mapping[str, EngineRequest],
    adapter: int = 0,
    *,
    preempts: bool = False,
) -> dict[str, list[int]]:
    """Return the tokens of each request. If `preempts`, preempt all requests after their first
    token.
    """
    scored = await run_scored(core, requests, adapter, preempts=preempts)
    return {name: [token_id for token_id, _ in each] for name, each in scored.items()}


async def run_scored(
    core: CheckedCore,
    requests: Mapping[str, EngineRequest],
    adapter: int = 0,
    *,
    preempts: bool = False,
) -> dict[str, list[tuple[int, bytes]]]:
    """Run requests like `run_trials`; return each token with its log-probability's bits, if asked
    for.
    """
    news: dict[str, list[tuple[int, bytes]]] = {name: [] for name in requests}
    left = {core_id(each.request_id, each.attempt): name for name, each in requests.items()}
    for each in requests.values():
        await core.add(core_request(each, as_output=True), adapter if each.adapter else 0)
    while left:
        for output in (await core.step()).outputs:
            news[left[output.request_id]] += _scored(output)
            if output.finish_reason is not None:
                del left[output.request_id]
        if preempts and all(news.values()):
            await core.preempt_all()
            preempts = False
    return news


def _scored(output: Any) -> list[tuple[int, bytes]]:
    token_ids = output.new_token_ids
    if output.new_logprobs is None:
        return [(token_id, b"") for token_id in token_ids]
    chosen = np.asarray(output.new_logprobs[1])[:, 0].astype("<f4")
    return [(token_id, chosen[i].tobytes()) for i, token_id in enumerate(token_ids)]
