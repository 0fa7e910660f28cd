"""Tests at load that vLLM continues earlier output as if it had drawn that output."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.load_checks.trials import (
    CUT,
    GREEDY,
    CheckedCore,
    bounded,
    cut,
    run_trials,
    trial,
)
from penstock_shard.vllm_engine.requests import COUNTED

logger = logging.getLogger(__name__)


async def find_uncontinued(core: CheckedCore, info: RunnerInfo, adapter: int = 0) -> frozenset[str]:
    """Find fields with which requests do not continue exactly: in about 40 steps, if the core
    `keeps_output`. `adapter` is a loaded adapter's number, or 0. Raises ModelError if trials never
    end, and vLLM's error if its core dies.
    """
    if info.embedding is not None:
        return frozenset()
    if not core.keeps_output:
        return COUNTED
    async with bounded():
        plain = await run_trials(core, {"": trial(info, "plain", GREEDY)})
        trials = _trials(info, plain[""])
        if not adapter:
            del trials["adapter"]
        wholes = await run_trials(core, trials, adapter)
        cuts = {name: cut(request, wholes[name]) for name, request in trials.items()}
        rests = await run_trials(core, cuts, adapter, preempts=True)
    failed = frozenset(name for name in trials if wholes[name][CUT:] != rests[name])
    if failed:
        told = ", ".join(sorted(failed))
        logger.warning("requests with %s do not go on exactly from output", told)
    return failed


def _trials(info: RunnerInfo, plain: list[int]) -> dict[str, EngineRequest]:
    """Return a request for each field to try; `plain` is the output without these fields. The bad
    word and the minimal length reach across the cut.
    """
    across = (tuple(plain[CUT - 1 : CUT + 1]),)
    fields: Mapping[str, tuple[EngineSampling, dict[str, Any]]] = {
        "presence_penalty": (EngineSampling(temperature=0.0, presence_penalty=2.0), {}),
        "frequency_penalty": (EngineSampling(temperature=0.0, frequency_penalty=2.0), {}),
        "bad_words": (EngineSampling(temperature=0.0, bad_words=across), {}),
        "seed": (EngineSampling(temperature=1.0, seed=7), {}),
        "adapter": (GREEDY, {"adapter": "any"}),
        "min_tokens": (GREEDY, {"min_tokens": CUT + 4, "stop_token_ids": frozenset(plain)}),
    }
    return {name: trial(info, name, each, **more) for name, (each, more) in fields.items()}
