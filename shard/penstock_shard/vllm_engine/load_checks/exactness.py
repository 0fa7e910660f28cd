"""Checks at load, for `--exact`, that vLLM's tokens and log-probabilities depend only on the
request, as its batch invariance promises on NVIDIA's GPUs.
"""

from __future__ import annotations

import hashlib
from typing import Any

from penstock_proto.types import EngineSampling
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.load_checks.trials import (
    CUT,
    CheckedCore,
    bounded,
    cut,
    run_scored,
    trial,
)

# Raise this when a change in this folder changes the distributions that requests draw from.
_REVISION = 1
_DIGEST_BYTES = 16
_DRAWN = EngineSampling(temperature=1.0, seed=5)


async def check_bits(core: CheckedCore, info: RunnerInfo) -> None:
    """Try a request alone, among others, and continued after a cut. Raises ModelError if a token or
    a log-probability's bits differ.
    """
    if not core.keeps_output:
        raise ModelError("--exact: this vLLM's model runner does not go on from output")
    request = trial(info, "exact", _DRAWN, logprobs=0)
    others = {
        f"other {more}": trial(info, f"other {more}", _DRAWN, more, logprobs=0)
        for more in (1, 5, 40)
    }
    async with bounded():
        alone = (await run_scored(core, {"": request}))[""]
        among = (await run_scored(core, {**others, "": request}))[""]
        later = cut(request, [token_id for token_id, _ in alone])
        rest = (await run_scored(core, {**others, "": later}))[""]
    for what, found in (("among others", among), ("as a continuation", [*alone[:CUT], *rest])):
        if found != alone:
            raise ModelError(f"--exact: {what} vLLM computed a request otherwise than alone")


def fingerprint(info: RunnerInfo, facts: dict[str, Any]) -> str:
    """Return 32 hex digits (blake2b-128) of all that decides the bits of vLLM's results."""
    told = {
        **facts,
        "weights": info.weights_hash,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "engine": info.attention_backend,
        "revision": _REVISION,
    }
    text = "\0".join(f"{name}={told[name]}" for name in sorted(told))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
