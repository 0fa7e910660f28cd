"""Shards with models: how they are served, and whether answers are those of the baseline."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparison.cases import Json
from comparison.differences import differences
from comparison.shard_cases import ADAPTER, Questions
from comparison.stacks import Reply, ask, questions_for, shard_of
from support.adapters import make_adapter
from support.checkouts import Checkout
from support.processes import running

needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="torch is not installed"
)
CPU = (
    *("--runner", "model", "--device", "cpu", "--threads", "1"),
    *("--kv-memory", "64M", "--max-model-len", "512"),
)
_QUERIES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in (0, 1)}


@dataclass(frozen=True)
class Way:
    """A way to serve the same model and to ask it. No token may depend on the way."""

    flags: tuple[str, ...] = ()
    # If false, one question is asked after the other.
    together: bool = True


_SMALL_STEPS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
_DRAFTS = ("--speculative-tokens", "4")
SMALL_STEPS_AND_DRAFTS = {"small steps and drafts": Way(_SMALL_STEPS + _DRAFTS)}
ONE_BY_ONE = {"one after the other": Way(together=False)}
WAYS = {
    "as before": Way(),
    **ONE_BY_ONE,
    "small steps": Way(_SMALL_STEPS),
    "drafts": Way(_DRAFTS),
    "small steps and drafts": Way(_SMALL_STEPS + _DRAFTS),
    "no cached prefixes": Way(("--no-enable-prefix-caching",)),
    # Requests are put down and taken up again.
    "few blocks": Way(("--kv-memory", "2M")),
    "two threads": Way(("--threads", "2")),
}


def adapter_for_builtin(folder: Path) -> tuple[str, str]:
    """Flags that load an adapter which fits the built-in model."""
    return "--lora", f"{ADAPTER}={make_adapter(folder / 'adapter', _QUERIES, size=0.05)}"


def differences_of(
    before: Checkout,
    now: Checkout,
    folder: Path,
    flags: tuple[str, ...],
    ways: Mapping[str, Way],
    asked: Callable[[Questions], Mapping[str, Json]] = Questions.each_field,
) -> list[str]:
    """Return a line for each difference between the answers of `before` and the answers of `now`.

    `before` is served with `flags` alone and asked as in the first way. `now` is served and asked
    in each of the ways. If the results of `before` depend on the batch, all is asked one by one.
    """
    shard = shard_of(before, folder / "before.log", *flags)
    with running(shard):
        of_model = questions_for(before, shard)
        questions = asked(of_model)
        ways = ways if of_model.is_exact else ONE_BY_ONE
        together = next(iter(ways.values())).together
        reply_before = ask(before, [shard], questions, together=together)
    lines = []
    for name, way in ways.items():
        shard = shard_of(now, folder / "now.log", *flags, *way.flags)
        with running(shard):
            reply = ask(now, [shard], questions, together=way.together)
        found = differences(reply_before.answers, reply.answers)
        lines += [f"{name}: {line}" for line in found]
        lines += _of_fingerprints(reply_before, reply) if found else []
    return lines


def _of_fingerprints(before: Reply, now: Reply) -> list[str]:
    """Return a line if both shards state one fingerprint: a change of tokens must change it."""
    name = "numerics_fingerprint"
    if not before.shard[name] or before.shard[name] != now.shard[name]:
        return []
    return [f"and {name} is the same: raise MODEL_REVISION or SAMPLER_REVISION"]
