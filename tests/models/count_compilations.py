"""Counts, without a card, how often a kernel would be compiled for steps of different sizes: a step
must not wait for a compiler because its number of rows is another than before.

    PYTHONPATH=tests python tests/models/count_compilations.py

Run as a process of its own, like `compile_launches.py`. Prints a line for each kernel that would be
compiled twice for the same constants and types, then how many kernels were looked at.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from models.compile_launches import Card, batch_of, heads_of
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from penstock_shard.attention.base import LayerSpec
from penstock_shard.attention.triton import TritonBackend
from penstock_shard.kernels.triton_draw import draw_by_id
from penstock_shard.kernels.triton_layers import combine_rows
from penstock_shard.kernels.triton_quantize import round_rows
from penstock_shard.kernels.triton_rank import draw_ranked
from penstock_shard.ops.base import HeadNorm, Rope, RoutingRule
from penstock_shard.ops.experts import route
from penstock_shard.ops.triton_ops import TritonOps

# Numbers of rows that are 1, odd, even, and multiples of 16.
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 64, 255, 256)
_HOST, _DTYPE = torch.device("cpu"), torch.bfloat16
_LAYER = LayerSpec(0, 32, 8, 128, 128, 0.1)

# A kernel with its constants and types, and what it was compiled for beside them.
_Found = dict[tuple[object, ...], set[str]]


def main() -> int:
    found = _listen()
    driver.set_active(Card(90))
    for rows in ROWS:
        for exact in (False, True):
            _launch(
                rows, TritonOps(_HOST, _DTYPE, "bfloat16", TritonBackend(exact=exact), exact=exact)
            )
        _layers(rows, TritonOps(_HOST, _DTYPE, "fp8", TritonBackend()))
    again = {what: keys for what, keys in found.items() if len(keys) > 1}
    for (name, *_), keys in again.items():
        print(f"{name}: {len(keys)} times, as {sorted(keys)}")
    print(f"{len({name for name, *_ in found})} kernels, {len(again)} compiled again")
    return 1 if again else 0


def _listen() -> _Found:
    """Prevent all compilations and launches from now on. Return a dict that gets each kernel and
    what it would have been compiled for.
    """
    found: _Found = defaultdict(set)

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        constants, signature = compile["constants"], compile["signature"]
        declared = [param.num for param in fn.jit_function.params if param.is_constexpr]
        fixed = tuple((place, constants[(place,)]) for place in declared if (place,) in constants)
        # Numbers are left out: a 1 is a constant, any other number is not.
        pointers = tuple(kind for kind in signature.values() if kind.startswith("*"))
        what = (fn.name, compile["num_warps"], fixed, pointers)
        found[what].add(f"{compile['configs'][0]} {sorted(map(str, constants.items()))}")
        return True

    knobs.runtime.jit_cache_hook = note
    return found


def _launch(rows: int, ops: TritonOps) -> None:
    for work in (_layers, _heads, _states, _experts, _draws):
        work(rows, ops)


def _slice(rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a slice of a larger tensor, so that it may have any alignment: a step's inputs lie one
    behind the other.
    """
    return torch.zeros(3 * rows, dtype=dtype)[rows : 2 * rows]


def _layers(rows: int, ops: TritonOps) -> None:
    x = torch.zeros(rows, 4096, dtype=_DTYPE)
    ops.add_rms_norm(x, x.clone(), torch.zeros(4096), 1e-6, 0.0)
    ops.add_rms_norm(x, None, torch.zeros(4096), 1e-6, 0.0)
    ops.gated_activation(x, "silu")
    round_rows(x)
    ops.pack([torch.zeros(512, 4096)]).linear(x)


def _heads(rows: int, ops: TritonOps) -> None:
    spec, backend = _LAYER, TritonBackend(exact=ops.exact)
    cache = backend.make_cache(spec, 4, 16, _DTYPE, _HOST)
    qkv = torch.zeros(rows, (32 + 2 * 8) * 128, dtype=_DTYPE)
    rope = Rope(torch.zeros(64, 64), torch.zeros(64, 64))
    weight = torch.zeros(128)
    norm = HeadNorm(weight, weight, 1e-6, 0.0)
    ops.rope_and_cache(qkv, spec, cache, _slice(rows), _slice(rows), rope, norm)
    heads = torch.zeros(rows, 8, 128, dtype=_DTYPE)
    backend.write(cache, heads, heads, _slice(rows))
    for counts in ([1] * rows, [1] * (rows - 1) + [20]):
        heads_of(backend, _DTYPE, spec, counts, None, "")[1]()


def _states(rows: int, ops: TritonOps) -> None:
    batch = batch_of([1] * rows)
    x, weight = torch.zeros(rows, 8192, dtype=_DTYPE), torch.zeros(4, 8192)
    ops.short_conv(x, weight, weight[0], torch.zeros(1, 3, 8192), batch, silu=True)
    decay, state = torch.zeros(rows, 32), torch.zeros(1, 32, 128, 128)
    ops.delta_rule(x, decay, decay, state, batch)


def _experts(rows: int, ops: TritonOps) -> None:
    experts = ops.pack_experts([[torch.zeros(256, 512)]] * 4, 4)
    ops.route(torch.zeros(rows, 128), RoutingRule(3))
    routing = route(torch.zeros(rows, 4), RoutingRule(2))
    experts.grouped(torch.zeros(2 * rows, 512, dtype=_DTYPE), routing.offsets)
    combine_rows(torch.zeros(2 * rows, 256, dtype=_DTYPE), routing.rows, routing.weights)


def _draws(rows: int, ops: TritonOps) -> None:
    del ops
    # As they come from a device, whose memory is aligned; settings are what the host has copied.
    # An odd vocabulary, as GPT-2's: no size is a multiple of 16 because of it.
    logits = torch.zeros(rows, 50_257, dtype=_DTYPE)
    best = torch.zeros(rows, dtype=_DTYPE)
    draw_by_id(logits, best, torch.zeros(rows, 4, dtype=torch.float64), 2.0**42)
    draw_ranked(logits, best, torch.zeros(rows, 6, dtype=torch.float64), 2.0**42)


if __name__ == "__main__":
    sys.exit(main())
