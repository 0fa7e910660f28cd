"""Layers on one input are one product, with the bits that each had by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.driver import load
from models.model_steps import cut_logits, relative_errors
from support.budget import budget, in_soak, seeded
from torch import Tensor, nn

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.model_loader import load_model
from penstock_shard.models.transformers import packed_weights
from penstock_shard.models.transformers.fused_linears import (
    FusedPart,
    find_siblings,
    fuse_linears,
    probing,
)
from penstock_shard.models.transformers.transformers_model import TransformersModel
from penstock_shard.ops.base import Ops
from penstock_shard.ops.cpu_ops import CpuMatrix, CpuOps
from penstock_shard.ops.torch_ops import DenseMatrix, TorchOps
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
# Sets of siblings in each of the three layers, of seven projections at most.
SETS = {"opt": 1, "olmo": 2, "stablelm": 2, "olmoe": 1, "gpt2": 0}
# Dense and shared experts' gates and ups, of three layers two with experts.
SETS_OF_DEEPSEEK = 3


def sets_of(runner: ModelRunner) -> int:
    assert isinstance(runner.model, TransformersModel)
    weights = (getattr(module, "weight", None) for module in runner.model.module.modules())
    return len({weight.fused for weight in weights if isinstance(weight, FusedPart)})


@pytest.mark.parametrize("backend", ["cpu", in_soak("sdpa")])
@pytest.mark.parametrize("family", SETS)
def test_queries_keys_and_values_are_one_product(
    family: str, backend: str, model_dir: Directory
) -> None:
    runner = load(model_dir(family), attention_backend=backend)
    assert sets_of(runner) == 3 * SETS[family]


def test_dense_and_shared_parts_are_one_product(model_dir: Directory) -> None:
    assert sets_of(load(model_dir("deepseek_v2"))) == SETS_OF_DEEPSEEK


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("family", ["olmo", in_soak("stablelm"), "olmoe"])
def test_logits_are_those_of_transformers(family: str, backend: str, model_dir: Directory) -> None:
    worst, _ = relative_errors(model_dir(family), attention_backend=backend)
    assert worst < 1e-4


WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float32"},
    "half": {"dtype": "auto"},
    "int8": {"dtype": "auto", "quantization": "int8"},
}
FUSED = (*(name for name in SETS if SETS[name]), "deepseek_v2")
IN_EVERY_RUN = {*((family, "half") for family in FUSED), ("olmo", "int8"), ("olmoe", "int8")}


def without_fusing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed_weights, "find_siblings", lambda module: iter(()))
    patch.setattr(load_model, "fuse_linears", lambda module, ops: None)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (family, settings) if (family, weights) in IN_EVERY_RUN else in_soak(family, settings)
        for family in FUSED
        for weights, settings in WEIGHTS.items()
    ],
)
def test_bits_are_those_of_products_apart(
    family: str, settings: dict[str, Any], model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = cut_logits(load(model_dir(family), **settings))[1]
    without_fusing(monkeypatch)
    runner = load(model_dir(family), **settings)
    assert sets_of(runner) == 0
    assert torch.equal(cut_logits(runner)[1], fused)


def test_each_set_is_computed_once_a_step(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(model_dir("stablelm"))
    products = []
    good = CpuMatrix.linear

    def linear(self: CpuMatrix, *args: Any) -> Tensor:
        products.append(self.out_features)
        return good(self, *args)

    monkeypatch.setattr(CpuMatrix, "linear", linear)
    cut_logits(runner)
    steps = 4
    # Three layers of QKV, output, gate and up, down; and the head.
    assert len(products) == steps * (3 * 4 + 1)


class Attention(nn.Module):
    """A layer that asks for its projections as modelling code does."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, rng: torch.Generator, *, bias: bool, width: int = 24) -> None:
        super().__init__()
        sizes = {"q_proj": 40, "k_proj": 10, "v_proj": 7}
        for name, size in sizes.items():
            linear = nn.Linear(width, size, bias=bias)
            linear.requires_grad_(False)
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng))
            self.add_module(name, linear)

    def forward(self, x: Tensor, way: str = "shared") -> list[Tensor]:
        query = self.q_proj(x)
        if way == "changed in place":
            x.mul_(2)
        key = self.k_proj(x + 1 if way == "another input" else x.view(x.shape))
        if way == "asked twice":
            key = key + self.k_proj(x)
        value = key if way == "not asked" else self.v_proj(x)
        return [query, key, value]


WAYS = ("shared", "another input", "changed in place", "asked twice", "not asked")


def make_ops() -> dict[str, Ops]:
    backend = SdpaBackend()
    return {
        "torch": TorchOps(torch.device("cpu"), torch.float32, "float32", backend),
        "cpu": CpuOps(load_kernels(), "float32"),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_layers_that_do_not_share_their_input_are_taken_apart_and_right(
    name: str, way: str
) -> None:
    rng = seeded(f"fused linears, {name}, {way}")
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    ops = make_ops()[name]
    for bias in (True, False):
        own = Attention(generator, bias=bias)
        fused = Attention(generator, bias=bias)
        fused.load_state_dict(own.state_dict())
        fuse_linears(fused, ops)
        with torch.inference_mode(), probing(fused) as apart:
            fused(torch.randn(1, 1, 24, generator=generator), way)
        assert apart == ([] if way == "shared" else [".q_proj"])
        for _ in range(budget(2, 100)):
            x = torch.randn(1, rng.randint(0, 9), 24, generator=generator)
            with torch.inference_mode():
                found, expected = fused(x.clone(), way), own(x.clone(), way)
            for part, wanted in zip(found, expected, strict=True):
                assert torch.allclose(part, wanted, atol=1e-5)


def test_another_input_is_noticed_in_any_step() -> None:
    """Though layers shared it when the model was probed."""
    generator = torch.Generator().manual_seed(0)
    own = Attention(generator, bias=True)
    fused = Attention(generator, bias=True)
    fused.load_state_dict(own.state_dict())
    fuse_linears(fused, make_ops()["torch"])
    x = torch.randn(1, 5, 24, generator=generator)
    with probing(fused) as apart:
        fused(x)
    assert not apart
    for way in ("another input", "asked twice", "not asked", "shared"):
        for part, wanted in zip(fused(x, way), own(x, way), strict=True):
            assert torch.allclose(part, wanted, atol=1e-5)


def test_a_result_is_not_kept_when_all_have_their_parts_of_it() -> None:
    module = Attention(torch.Generator().manual_seed(0), bias=False)
    fuse_linears(module, make_ops()["torch"])
    x = torch.randn(1, 5, 24)
    parts = module(x)
    alive = weakref.ref(x)
    del x
    assert alive() is None
    whole = weakref.ref(parts[0]._base)
    del parts
    assert whole() is None


def test_the_next_input_in_the_same_place_is_another_input() -> None:
    module = Attention(torch.Generator().manual_seed(0), bias=True)
    expected = Attention(torch.Generator().manual_seed(0), bias=True)
    fuse_linears(module, make_ops()["torch"])
    x = torch.randn(1, 3, 24)
    for _ in range(3):
        for part, wanted in zip(module(x), expected(x), strict=True):
            assert torch.allclose(part, wanted, atol=1e-5)
        x.mul_(-1.5)


def test_weights_are_in_memory_once() -> None:
    module = Attention(torch.Generator().manual_seed(0), bias=True)
    weight = weakref.ref(module.q_proj.weight)
    fuse_linears(module, make_ops()["torch"])
    gc.collect()
    assert weight() is None
    assert all(parameter.dim() == 1 for parameter in module.parameters())
    query, value = module.q_proj.weight, module.v_proj.weight
    assert isinstance(query, FusedPart)
    assert isinstance(value, FusedPart)
    assert query.fused is value.fused
    assert isinstance(query.fused._matrix, DenseMatrix)


@pytest.mark.parametrize("change", ["class", "width", "bias", "tied", "missing"])
def test_layers_that_do_not_fit_are_left_as_they_are(change: str) -> None:
    module = Attention(torch.Generator().manual_seed(0), bias=True)
    if change == "class":
        module.k_proj = type("Odd", (nn.Linear,), {})(24, 10)
    elif change == "width":
        module.k_proj = nn.Linear(20, 10)
    elif change == "bias":
        module.k_proj = nn.Linear(24, 10, bias=False)
    elif change == "tied":
        module.k_proj = module.v_proj
    else:
        del module.k_proj
    assert not list(find_siblings(module))
