"""Runs convolutions and scans of transformers' layers on our states.

Modelling code is not changed. Without a cache, a mixer calls one function of its file for its short
convolution and one for its recurrence, over all tokens as one sequence. While a step is served, our
functions, which know the sequences and their states, replace these two. Lightning attention calls
neither and is replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from penstock_shard.attention.base import AttentionBatch, StateSpec
from penstock_shard.errors import ModelError
from penstock_shard.models.paged_caches import StateCache
from penstock_shard.ops.base import Ops

# Layer types with a state. Hybrid layers also have attention.
WITH_STATE = {"linear_attention", "conv", "hybrid"}
WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
LAYER_TYPES = WITH_STATE | WITHOUT_ATTENTION
# Models whose mixers are served. Each has a test of its tokens.
_SERVED = {
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "zamba2",
}

_SILU = ("silu", "swish")

# (layer index, the caller's spec) -> the layer's state, and the step's sequences.
FindState = Callable[[int, StateSpec], tuple[StateCache, AttentionBatch]]


class _Step:
    """A served step: functions that replace those of modelling code."""

    def __init__(self, ops: Ops, find: FindState) -> None:
        self._ops = ops
        self._find = find
        self.layer_index = -1

    def _state(self, **sizes: int) -> tuple[StateCache, AttentionBatch]:
        spec = StateSpec(**({"channels": 0, "taps": 1} | sizes))
        return self._find(self.layer_index, spec)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """x [1, C, T], weight [C, K] -> [1, C, T]."""
        if activation not in (None, *_SILU):
            raise ModelError(f"short convolutions with {activation} are not served, only with silu")
        cache, batch = self._state(channels=weight.shape[0], taps=weight.shape[1])
        mixed = self._ops.short_conv(
            x[0].T.contiguous(),
            weight.float().T.contiguous(),
            None if bias is None else bias.float(),
            cache.inputs,
            batch,
            silu=activation in _SILU,
        )
        return mixed.T.unsqueeze(0)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query and key [1, T, Hk, D], value [1, T, H, Dv], g [1, T, H] or [1, T, H, D], beta [1,
        T, H] -> [1, T, H, Dv].
        """
        if not use_qk_l2norm_in_kernel:
            raise ModelError("a delta rule whose keys are of any length is not served")
        heads, dim_v = value.shape[2:]
        cache, batch = self._state(heads=heads, dim=key.shape[3], dim_v=dim_v)
        qkv = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=1)
        decay, beta = g[0].float().exp(), beta[0].float().contiguous()
        found = self._ops.delta_rule(qkv, decay, beta, cache.matrices, batch)
        return found.unsqueeze(0), None

    def scan_heads(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        D: Tensor,  # noqa: N803
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        **_: Any,
    ) -> Tensor:
        """Mamba-2: x [1, T, H, P], dt [1, T, H], b and c [1, T, G, N] -> [1, T, H, P]."""
        cache, batch = self._state(heads=x.shape[2], dim=x.shape[3], dim_v=b.shape[3])
        found = self._ops.selective_scan(
            x[0].contiguous(),
            self._ops.softplus(dt[0].contiguous(), dt_bias.float(), *dt_limit),
            a.float(),
            b[0].contiguous(),
            c[0].contiguous(),
            D.float(),
            cache.matrices,
            batch,
        )
        return found.unsqueeze(0)

    def scan_channels(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        D: Tensor,  # noqa: N803
        z: Tensor,
        delta_bias: Tensor,
        **_: Any,
    ) -> Tensor:
        """Mamba: x, dt and z [1, I, T], a [I, N], b and c [1, N, T] -> [1, I, T]."""
        inner, width = a.shape
        cache, batch = self._state(heads=inner, dim=1, dim_v=width)
        found = self._ops.selective_scan(
            x[0].T.contiguous().unsqueeze(-1),
            self._ops.softplus(dt[0].T.contiguous(), delta_bias.float(), 0.0, float("inf")),
            a.float(),
            b[0].T.contiguous().unsqueeze(1),
            c[0].T.contiguous().unsqueeze(1),
            D.float(),
            cache.matrices,
            batch,
        )
        gated = torch.cat((z[0].T, found.squeeze(-1)), dim=-1)
        return self._ops.gated_activation(gated, "silu").T.unsqueeze(0)

    def attend_lightning(
        self, mixer: Any, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Lightning Attention-2 (Qin et al., 2024): [1, T, C] -> [1, T, C]."""
        heads, dim = mixer.num_attention_heads, mixer.head_dim
        qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))[0].view(-1, heads, 3 * dim)
        query, key, value = (part.contiguous() for part in qkv.split(dim, dim=-1))
        cache, batch = self._state(heads=heads, dim=dim, dim_v=dim)
        dt = torch.ones(len(query), heads, device=query.device)
        rates = -mixer.slope_rate.flatten().float()
        found = self._ops.selective_scan(value, dt, rates, key, query, None, cache.matrices, batch)
        normed = mixer.norm(found.flatten(1).unsqueeze(0))
        return mixer.out_proj(mixer.output_gate(hidden_states).sigmoid() * normed), None


# Functions that modelling code calls if it has no cache, and their replacements.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _Step.convolve,
    "torch_chunk_gated_delta_rule": _Step.delta_rule,
    "chunk_kimi_delta_attention": _Step.delta_rule,
    "mamba2_chunk_scan": _Step.scan_heads,
    "mamba_selective_scan": _Step.scan_channels,
}
# Mixers without a separate function for their recurrence, and their replacements.
_REPLACED: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _Step.attend_lightning,
}

# The step in progress. A module global, because modelling code calls functions of its file; the
# engine runs one forward at a time.
_step: _Step | None = None


def are_served(text: PreTrainedConfig) -> bool:
    """True if layers with a state are served in this type of model."""
    return text.model_type in _SERVED


@contextmanager
def serving(ops: Ops, find: FindState) -> Iterator[None]:
    """Inside the context, mixers that `run_on_states` changed compute on our states."""
    global _step
    outer, _step = _step, _Step(ops, find)
    try:
        yield
    finally:
        _step = outer


def run_on_states(module: PreTrainedModel) -> None:
    """Have the module's mixers compute on our states while a step is served."""
    limit = _time_step_limit(module.config.get_text_config())
    mixer: Any
    for mixer in module.modules():
        functions = _functions_of(mixer)
        if not functions and type(mixer).__name__ not in _REPLACED:
            continue
        for name in functions:
            # The globals of the code's file; the class may have inherited the code.
            of_file = inspect.unwrap(type(mixer).forward).__globals__
            of_file[name] = _served(of_file[name], _FUNCTIONS[name])
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = limit
        mixer.forward = _with_index(mixer)


def _time_step_limit(text: PreTrainedConfig) -> tuple[float, float]:
    """Return the configured limit. For prompts, some mixers instead use the smallest step of their
    initial weights as a bound. Raises ModelError unless the limit is two numbers.
    """
    limit = getattr(text, "time_step_limit", None)
    if limit is None:
        return 0.0, float("inf")
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ModelError(f"time_step_limit is {limit}; it must be two numbers")
    low, high = limit
    return float(low), float(high)


def recording(specs: dict[int, StateSpec], device: torch.device) -> FindState:
    """A `FindState` for a step of one token. It makes a state at each call, and records each
    layer's needs in `specs`.
    """
    one, sums = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([1], [0, 1]))
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    batch = AttentionBatch([1], [1], 1, 1, slots, sums, sums, one, torch.zeros_like(one)[None])

    def find(layer_index: int, spec: StateSpec) -> tuple[StateCache, AttentionBatch]:
        known = specs.get(layer_index, StateSpec(channels=0, taps=1))
        # Convolutions state some sizes, recurrences others.
        pairs = zip(dataclasses.astuple(known), dataclasses.astuple(spec), strict=True)
        specs[layer_index] = StateSpec(*map(max, pairs))
        return StateCache.of(spec, 1, device), batch

    return find


def _functions_of(module: nn.Module) -> list[str]:
    """The `_FUNCTIONS` that a mixer's code calls; none for other modules."""
    if not hasattr(module, "layer_idx"):
        return []
    code = inspect.unwrap(type(module).forward).__code__
    return [name for name in code.co_names if name in _FUNCTIONS]


def _served(function: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "of_modelling_file"):
        return function

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named) if _step is None else ours(_step, *args, **named)

    call.of_modelling_file = function  # type: ignore[attr-defined]
    return call


def _with_index(mixer: Any) -> Callable[..., Any]:
    """Return a forward that calls the replacement for the mixer's class, if there is one, while a
    step is served.
    """
    forward, index = mixer.forward, int(mixer.layer_idx)
    ours = _REPLACED.get(type(mixer).__name__)

    def run(*args: Any, **named: Any) -> Any:
        if _step is None:
            return forward(*args, **named)
        _step.layer_index = index
        return forward(*args, **named) if ours is None else ours(_step, mixer, *args, **named)

    return run
