"""Models that run through the code of transformers, with their products on our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from models.driver import load
from models.model_steps import relative_errors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from penstock_shard.errors import ModelError
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.models.transformers.fused_linears import FusedPart
from penstock_shard.models.transformers.packed_weights import (
    PackedWeight,
    _Matrices,
    pack_weights,
)
from penstock_shard.models.transformers.transformers_model import TransformersModel
from penstock_shard.ops.base import Matrix
from penstock_shard.ops.cpu_ops import CpuOps

Directory = Callable[[str], Path]
FAMILIES = ("gpt2", "opt", "phi", "olmo", "olmoe", "deepseek_v2")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, model_dir: Directory) -> None:
    worst, _ = relative_errors(model_dir(family))
    assert worst < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_near_as_it_can_be(family: str, model_dir: Directory) -> None:
    _, mean = relative_errors(model_dir(family), dtype="auto")
    assert mean < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_without_kernels_half_precision_is_as_near(family: str, model_dir: Directory) -> None:
    _, mean = relative_errors(model_dir(family), dtype="auto", attention_backend="sdpa")
    assert mean < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_is_left_to_torch(
    family: str, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(model_dir(family))
    assert isinstance(runner.model, TransformersModel)
    for holder in runner.model.module.modules():
        if isinstance(holder, nn.Linear | Conv1D):
            assert isinstance(holder.weight, PackedWeight | FusedPart)
            assert "weight" not in dict(holder.named_parameters(recurse=False))
    large = [p for p in runner.model.module.parameters() if p.dim() > 2]
    assert not large, "experts must not be in memory twice"


def test_a_use_of_a_weight_that_is_not_foreseen_fails(model_dir: Directory) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir("opt"))
    pack_weights(module, CpuOps(load_kernels(), "float32"), lambda line: None)
    weight = module.lm_head.weight
    x = torch.ones(2, 32)
    assert functional.linear(x, weight).shape == (2, 384)
    with pytest.raises(NotImplementedError, match="conv1d of a packed weight"):
        functional.conv1d(x, weight)
    with pytest.raises(ValueError, match="33"):
        functional.linear(torch.ones(2, 33), weight)


@pytest.mark.parametrize("fault", ["rows", "scale", "nan"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "olmoe"])
def test_a_matrix_that_is_packed_wrongly_is_found(
    family: str, fault: str, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuOps.pack

    def pack(self: CpuOps, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        faults = {
            "rows": lambda part: part.roll(1, dims=0),
            "scale": lambda part: part * 1.1,
            "nan": lambda part: part * float("nan"),
        }
        return good(self, [faults[fault](part) for part in parts], exact=exact)

    monkeypatch.setattr(CpuOps, "pack", pack)
    with pytest.raises(ModelError, match=r"(weight|proj): self-check failed"):
        load(model_dir(family))


def test_packing_loses_no_more_than_rounding_explains() -> None:
    """Outliers, values below float16's smallest and zeros are what they are, and served."""
    torch.manual_seed(0)
    outlier = torch.randn(64, 48)
    outlier[:, 3] = 100.0
    weights = [outlier, torch.randn(64, 48) * 1e-9, torch.zeros(64, 48), torch.randn(1, 1)]
    for weight in weights:
        for kind in ("float32", "float16", "int8"):
            ops = CpuOps(load_kernels(), kind)
            _Matrices(ops).pack([weight])


def test_a_model_that_uses_weights_in_its_own_way_is_refused(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, x: torch.einsum("...k,nk", x, self.weight)
    )
    with pytest.raises(ModelError, match="einsum of a packed weight; use --attention-backend sdpa"):
        load(model_dir("gpt2"))


def test_a_weight_beyond_half_precision_is_refused_by_name(
    model_dir: Directory, tmp_path: Path
) -> None:
    for path in model_dir("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    tensors[name][2, 3] = -1e5
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=r"h\.1\.mlp\.c_fc\.weight.*--dtype float32"):
        load(tmp_path, dtype="auto")
    assert load(tmp_path).info.dtype == "float32"
