"""Tokens go to the experts that transformers would choose, and get from them the same bits in any
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from model_maker import make_config, make_model, write_tokenizer
from models.driver import load
from models.test_decoder import change_weights
from safetensors.torch import load_file
from support.budget import budget, seeded
from torch import Tensor
from torch.nn import functional

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.errors import ModelError
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.feed_forward import Dense, FeedForwardScratch, Sparse
from penstock_shard.ops.base import Experts, Ops, RoutingRule
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.experts import ExpertList
from penstock_shard.ops.torch_ops import TorchOps, packs_half

NO_SCRATCH = FeedForwardScratch(None, None, None)


def torch_ops(dtype: torch.dtype = torch.float32, weights: str = "float32") -> TorchOps:
    return TorchOps(torch.device("cpu"), dtype, weights, SdpaBackend())  # type: ignore[arg-type]


def all_ops() -> dict[str, Ops]:
    kernels = load_kernels()
    found: dict[str, Ops] = {
        "torch": torch_ops(),
        "cpu": CpuOps(kernels, "float32"),
        "cpu half": CpuOps(kernels, "float16"),
        "cpu int8": CpuOps(kernels, "int8"),
        "cpu int4": CpuOps(kernels, "int4"),
        "bfloat16": torch_ops(torch.bfloat16, "bfloat16"),
    }
    if packs_half():
        found["torch half"] = torch_ops(weights="float16")
    return found


def test_a_model_whose_experts_look_at_their_rows_is_not_recorded() -> None:
    """The host cannot look in a CUDA graph."""
    ops = torch_ops()
    experts = ops.pack_experts(([torch.ones(8, 8)] for _ in range(2)), 2)
    router = ops.pack([torch.ones(2, 8)])
    assert not experts.capturable
    assert not Sparse(ops, "silu", RoutingRule(1), router, experts, experts).capturable
    listed = ExpertList(ops.pack([torch.ones(8, 8)]) for _ in range(2))
    assert not listed.capturable


# How far a product may be off, relative to its spread.
TOLERANCES = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2, "int8": 5e-2, "int4": 2e-1}


@pytest.mark.parametrize("name", list(all_ops()))
def test_rows_of_each_expert_are_multiplied_with_its_own_weight(name: str) -> None:
    ops = all_ops()[name]
    rng = seeded(f"products of experts, {name}")
    torch.manual_seed(rng.randrange(1 << 30))
    for _ in range(budget(5, 100)):
        count, wide, narrow = rng.randint(1, 9), rng.randint(1, 70), rng.randint(1, 70)
        first = rng.randint(0, wide)
        weights = torch.randn(count, wide, narrow)
        parts: Iterator[Sequence[Tensor]] = (
            [part for part in (weight[:first], weight[first:]) if len(part)] for weight in weights
        )
        experts = ops.pack_experts(parts, count)
        assert (experts.out_features, experts.in_features) == (wide, narrow)
        # Many an expert has no rows.
        lengths = [rng.choice([0, 0, 1, rng.randint(1, 40)]) for _ in range(count)]
        x = torch.randn(sum(lengths), narrow)
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        expected = torch.cat(
            [part @ weight.T for part, weight in zip(x.split(lengths), weights, strict=True)]
        )
        found = experts.grouped(x.to(ops.dtype), offsets)
        assert found.shape == expected.shape
        assert found.dtype is ops.dtype
        error = (found.float() - expected).norm()
        # Each element is a sum of `narrow` products of variance 1. A few elements may all be among
        # those that rounding hits hardest; many may not.
        spread = (narrow * expected.numel()) ** 0.5
        outliers = 1 + 3 / max(1, expected.numel()) ** 0.5
        assert error <= TOLERANCES[ops.weights] * spread * outliers


def reference(
    hidden: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalised: bool
) -> Tensor:
    """Return what the experts compute, one token after the other, in float64."""
    result = torch.zeros_like(hidden, dtype=torch.float64)
    for token, x in enumerate(hidden.double()):
        chances = torch.softmax(router.double() @ x, dim=0)
        best = sorted(range(len(router)), key=lambda expert: -float(chances[expert]))[:top_k]
        share = float(sum(chances[expert] for expert in best)) if normalised else 1.0
        for expert in best:
            gate, up = (gate_up[expert].double() @ x).chunk(2)
            active = functional.silu(gate) * up
            result[token] += chances[expert] / share * (down[expert].double() @ active)
    return result


def make_sparse(ops: Ops, sizes: tuple[int, int, int], top_k: int, normalised: bool) -> Sparse:
    return sparse_of(ops, *made_up(sizes), top_k, normalised)


def made_up(sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Router, gate and up, down of (experts, hidden size, intermediate size)."""
    count, hidden, wide = sizes
    return (
        torch.randn(count, hidden),
        torch.randn(count, 2 * wide, hidden) * 0.1,
        torch.randn(count, hidden, wide) * 0.1,
    )


def sparse_of(
    ops: Ops, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalised: bool
) -> Sparse:
    packed: list[Experts] = [
        ops.pack_experts(([weight] for weight in stack), len(stack)) for stack in (gate_up, down)
    ]
    matrix = ops.pack([router], exact=True)
    rule = RoutingRule(top_k, is_normalised=normalised)
    return Sparse(ops, "silu", rule, matrix, packed[0], packed[1])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_a_token_gets_the_weighted_sum_of_its_best_experts(name: str, normalised: bool) -> None:
    ops = all_ops()[name]
    rng = seeded(f"weighted sums, {name}, {normalised}")
    torch.manual_seed(rng.randrange(1 << 30))
    for _ in range(budget(5, 100)):
        count = rng.randint(1, 12)
        top_k = rng.randint(1, count)
        weights = made_up((count, rng.randint(2, 40), rng.randint(1, 40)))
        sparse = sparse_of(ops, *weights, top_k, normalised)
        hidden = torch.randn(rng.choice([0, 1, 2, 17]), weights[0].shape[1])
        expected = reference(hidden, *weights, top_k, normalised)
        found = sparse(hidden, NO_SCRATCH)
        assert found.shape == hidden.shape
        assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["float32", "float16", "int8", "int4"])
def test_bits_of_a_token_do_not_depend_on_the_others(weights: str) -> None:
    rng = seeded(f"bits of experts, {weights}")
    torch.manual_seed(rng.randrange(1 << 30))
    named = {"float32": "cpu", "float16": "cpu half", "int8": "cpu int8", "int4": "cpu int4"}
    ops = all_ops()[named[weights]]
    for normalised in (True, False):
        # Sizes that are no multiples of a vector's width.
        sizes = (rng.randint(5, 70), rng.randint(30, 70), rng.randint(30, 70))
        sparse = make_sparse(ops, sizes, rng.randint(1, 5), normalised)
        hidden = torch.randn(300, sizes[1])
        whole = sparse(hidden, NO_SCRATCH)
        for _ in range(budget(20, 500)):
            chosen = rng.sample(range(300), rng.choice([1, 2, 3, 8, 33, 200]))
            found = sparse(hidden[chosen].contiguous(), NO_SCRATCH)
            assert torch.equal(found, whole[chosen])


def test_the_same_logit_chooses_the_same_experts_in_any_batch() -> None:
    """Torch decides which of several equal experts are taken; other rows must not matter."""
    rng = seeded("experts that are equal")
    ops = all_ops()["cpu"]
    for count in (4, 8, 60, 128):
        tied = torch.tensor([[rng.choice([0.0, 1.0]) for _ in range(count)] for _ in range(64)])
        whole = ops.route(tied, RoutingRule(4))
        for token in range(64):
            alone = ops.route(tied[token : token + 1], RoutingRule(4))
            assert torch.equal(alone.weights[0], whole.weights[token])
            assert torch.equal(experts_of(alone, 0), experts_of(whole, token))


def experts_of(routing: object, token: int) -> Tensor:
    """The experts of a token, its best first."""
    return torch.searchsorted(routing.offsets, routing.rows[token], right=True) - 1  # type: ignore[attr-defined]


def test_experts_are_packed_one_at_a_time() -> None:
    """The checkpoint's pages of one expert are given back before the next expert's are read."""
    events = []

    def parts() -> Iterator[Sequence[Tensor]]:
        for expert in range(3):
            events.append(f"read {expert}")
            yield [torch.ones(4, 4)]
            events.append(f"done {expert}")

    for ops in all_ops().values():
        events.clear()
        ops.pack_experts(parts(), 3)
        assert events == [f"{what} {expert}" for expert in range(3) for what in ("read", "done")]


def test_dense_layers_among_sparse_ones_are_dense(tmp_path: Path) -> None:
    runner = load(make_model(tmp_path, "qwen3_moe"))
    assert isinstance(runner.model, Decoder)
    parts = [layer.feed_forward for layer in runner.model._weights.layers]
    assert [type(part) for part in parts] == [Sparse, Dense, Sparse]
    with runner.model.shortened():
        kinds = {type(layer.weights.feed_forward) for layer in runner.model._running}
    assert kinds == {Sparse, Dense}, "checks and measurements must see both"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_made_up_weights_are_served(family: str, tmp_path: Path) -> None:
    make_config(family).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    runner = load(tmp_path, load_format="dummy", dtype="auto")
    assert isinstance(runner.model, Decoder)
    experts = runner.model._weights.layers[0].feed_forward
    assert isinstance(experts, Sparse)
    assert isinstance(experts.gate_up, ExpertList)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("qwen3_moe", "model.layers.2.mlp.experts.7.down_proj.weight"),
    ],
)
def test_a_weight_of_an_expert_beyond_half_precision_is_refused_by_name(
    family: str, name: str, tmp_path: Path
) -> None:
    directory = make_model(tmp_path, family)
    tensor = load_file(directory / "model.safetensors")[name]
    tensor[3, 5] = 1e5
    change_weights(directory, **{name: tensor})
    with pytest.raises(ModelError, match=rf"{name}.* 65504.*use --dtype float32"):
        load(directory, dtype="auto")
