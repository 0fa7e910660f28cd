"""Launches that a step takes on a device: their number in `docs/models.md` and `docs/gpu.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_maker import make_model
from support.triton_interpreter import use_interpreter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if not use_interpreter():
    pytest.skip("there is no Triton here", allow_module_level=True)

from models.test_triton_decoder import VOCABULARY, make_decoder
from triton.runtime.interpreter import InterpretedFunction

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.attention.triton import TritonBackend
from penstock_shard.kernels.triton_quantize import round_rows
from penstock_shard.ops import quantized
from penstock_shard.ops.base import RoutingRule
from penstock_shard.ops.triton_ops import TritonOps
from penstock_shard.selfcheck.random_steps import random_steps
from penstock_shard.worker.sampling import draw as drawing
from penstock_shard.worker.sampling import top_k_top_p
from penstock_shard.worker.sampling.draw import draw
from penstock_shard.worker.sampling.top_k_top_p import Columns

# What launches nothing: memory, and views of it.
_FREE = (
    "empty",
    "view",
    "select",
    "slice",
    "squeeze",
    "expand",
    "unbind",
    "alias",
    "detach",
    "lift",
)


class Launches(TorchDispatchMode):
    """Names of torch's functions, and of our kernels, that were called within it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        run = InterpretedFunction.run

        def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
            before = list(self.names)
            run(kernel, *arguments, **options)
            # The interpreter's own copies are none.
            self.names = [*before, kernel.fn.__name__]

        monkeypatch.setattr(InterpretedFunction, "run", noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1]
        if not any(part in name for part in _FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_rows_with_top_k_and_with_top_p_are_drawn_in_three_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (drawing, top_k_top_p):
        monkeypatch.setattr(module, "is_host", lambda _: False)
    logits, ones = torch.randn(3, 600).bfloat16(), np.ones(3)
    top_k, top_p = np.array([0.0, 20.0, 5.0]), np.array([0.9, 1.0, 0.8])
    best = logits.amax(dim=1)
    columns = Columns(ones, top_k, top_p, 0.01 * ones, ones, 0.5 * ones)
    with torch.inference_mode(), Launches(monkeypatch) as launches:
        draw(logits, best, np.arange(3), columns)
    assert launches.names == ["_scale_kernel", "exp.out", "_rank_kernel"]


@pytest.mark.parametrize("rule", [RoutingRule(8), RoutingRule(4, "sigmoid", groups=4)])
def test_tokens_are_routed_in_two_launches(
    rule: RoutingRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = TritonOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
    logits, bias = torch.randn(3, 128), torch.randn(128)
    with torch.inference_mode(), Launches(monkeypatch) as launches:
        ops.route(logits, rule, bias if rule.scores == "sigmoid" else None)
    assert launches.names == ["_choose_kernel", "_sort_kernel"]


@pytest.mark.parametrize(("family", "more"), [("llama", []), ("gemma2", ["_norm_kernel"])])
def test_a_layer_in_fp8_rounds_attention_alone_in_a_launch_of_its_own(
    family: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program has a whole row of it. `more`: the norms of what a layer's parts give."""
    launches = Launches(monkeypatch)
    monkeypatch.setattr(quantized, "_emulated_mm", _as_one(launches, quantized._emulated_mm))
    monkeypatch.setattr(quantized, "round_in_torch", round_rows)
    ops = TritonOps(torch.device("cpu"), torch.bfloat16, "fp8", TritonBackend())
    directory = make_model(tmp_path, family, num_hidden_layers=2, vocab_size=VOCABULARY)
    model = make_decoder(directory, ops)
    with random_steps(model, VOCABULARY, 16, 6, ops.dtype) as steps, launches:
        steps.run([(steps.sequence(5), 4, 1)])
    # From the first layer's rotation to the second's.
    begin, end = (place for place, name in enumerate(launches.names) if name == "_rope_kernel")
    assert launches.names[begin:end] == [
        "_rope_kernel",
        "split_kernel",
        "combine_kernel",
        "_round_kernel",
        "product",
        *more,
        "_norm_kernel",
        "product",
        "_gated_round_kernel",
        "product",
        *more,
        "_norm_kernel",
        "product",
    ]


def _as_one(launches: Launches, product: Any) -> Any:
    """The emulated product, which is one launch on a device."""

    def multiply(*arguments: Any) -> Tensor:
        before = list(launches.names)
        result: Tensor = product(*arguments)
        launches.names = [*before, "product"]
        return result

    return multiply
