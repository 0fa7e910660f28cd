"""Attention backends, all over one table of cases, against attention by its definition."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from models import library_stand_ins
from models.attention_cases import BF16, CASES, F8, F16, F32, Case, check_case, make_batch
from support.budget import in_soak
from torch.overrides import TorchFunctionMode

from penstock_shard.attention import sdpa
from penstock_shard.attention.base import AttentionBackend, make_paged_pair, write_paged_pair
from penstock_shard.attention.cpu import CpuBackend
from penstock_shard.attention.flash_attn import FlashAttention2, FlashAttention3
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.attention.torch_varlen import TorchVarlen
from penstock_shard.kernels.cpu import load_kernels

# Triton's interpreter takes about a second for a case: these always, the others in the soak.
_INTERPRETED = {
    "triton": {
        "heads of 20 and values of 7",
        "all in fp32",
        "fp8 cache under bf16",
        "latents of 576",
        "latents in bf16",
        "images in a window in bf16",
        "one token",
    },
    "triton, exact": {"all in fp32", "one token each in bf16"},
}


def make_backend(name: str) -> AttentionBackend:
    if name == "sdpa":
        return SdpaBackend()
    if name == "cpu":
        return CpuBackend(load_kernels())
    if name == "flash_attn 2":
        return FlashAttention2(library_stand_ins.flash_attn_2())
    if name == "flash_attn 3":
        return FlashAttention3(library_stand_ins.flash_attn_3())
    if name == "torch_varlen":
        return TorchVarlen(library_stand_ins.varlen_attn)
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for a device here and cannot take tensors on cpu")
    from penstock_shard.attention.triton import TritonBackend

    return TritonBackend(exact=name == "triton, exact")


def serves(name: str, case: Case) -> bool:
    """True if a backend of this name must run the case."""
    same = case.head_dim_v in (None, case.head_dim)
    sizes = (case.head_dim, case.head_dim_v or case.head_dim)
    if name == "sdpa":
        return True
    if name == "cpu":
        return case.dtype == F32
    if name.startswith("triton"):
        return case.latent or max(sizes) <= 256
    half = case.dtype in (F16, BF16) and not case.sinks and not case.latent and max(sizes) <= 256
    half = half and all(size % 8 == 0 for size in sizes)
    if name == "flash_attn 3":
        return half and (same or sizes in ((16, 32), (192, 128)))
    return half and same and (name == "flash_attn 2" or case.softcap is None)


def caches(name: str, case: Case) -> bool:
    """True if the backend's cache may have the case's dtype. A backend is never asked for another
    one.
    """
    if name == "cpu":
        return case.cached_as in (F32, F16)
    return case.cached_as == case.dtype or name in ("sdpa", "triton", "triton, exact")


BACKENDS = (
    "sdpa",
    "cpu",
    "flash_attn 2",
    "flash_attn 3",
    "torch_varlen",
    "triton",
    "triton, exact",
)
TABLE = [
    (name, case) if case.name in _INTERPRETED.get(name, {case.name}) else in_soak(name, case)
    for name, case in itertools.product(BACKENDS, CASES)
    if caches(name, case)
]


# What numpy remarks in Triton's interpreter of elements that are computed and then masked out.
@pytest.mark.filterwarnings(r"ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("name", "case"), TABLE, ids=str)
def test_a_backend_gives_attention_by_its_definition_or_refuses(name: str, case: Case) -> None:
    backend = make_backend(name)
    assert (backend.refusal(case.spec, case.dtype) is None) == serves(name, case)
    if serves(name, case):
        check_case(backend, case)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flash_attn 2", {"varlen", "kvcache"}),
        ("flash_attn 3", {"varlen 3", "kvcache 3"}),
        ("torch_varlen", {"decode", "prefill"}),
    ],
)
def test_decodes_and_chunks_take_calls_of_their_own(name: str, expected: set[str]) -> None:
    library_stand_ins.calls.clear()
    check_case(make_backend(name), Case("both", dtype=BF16))
    assert set(library_stand_ins.calls) == expected


_LATENTS = Case("latents", kv_heads=1, head_dim=24, head_dim_v=16, latent=True, dtype=BF16)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, Case("heads", dtype=BF16)) for name in BACKENDS if name not in ("sdpa", "cpu")),
        ("triton", _LATENTS),
    ],
    ids=str,
)
def test_decodes_that_are_captured_read_no_length_on_the_host(name: str, case: Case) -> None:
    """The host knows only the lengths of the step that was captured, as in a CUDA graph."""
    backend = make_backend(name)
    assert backend.capturable
    block_size = case.blocks_for(backend)
    cache = backend.make_cache(case.spec, 6, block_size, BF16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for part in cache:
        part.copy_(torch.randn(part.shape, generator=generator))
    query = torch.randn(2, 4, case.head_dim, generator=generator).to(BF16)
    tables = torch.tensor([[0, 5], [3, 2]])
    lengths = [block_size + 5, 9]
    honest = make_batch([1, 1], lengths, tables, block_size)
    captured = make_batch([1, 1], [1, 1], tables, block_size)
    captured.seq_lens_tensor.copy_(honest.seq_lens_tensor)
    scale = case.spec.scale
    want = SdpaBackend().attend(cache, query.float(), honest, scale=scale)
    got = backend.attend(cache, query, captured, scale=scale)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "case", [Case(name, lengths=(70, 40), **options) for name, options in (
        ("plain", {}),
        ("window", {"window": 7}),
        ("all", {"window": 5, "softcap": 2.0, "sinks": True}),
    )], ids=str,
)  # fmt: skip
def test_long_chunks_are_cut_without_a_difference(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_MAX_SCORES", 16)
    check_case(SdpaBackend(), case)


@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2])
@pytest.mark.parametrize("value", [500.0, 1e6, float("inf")])
def test_what_an_8_bit_cache_cannot_hold_becomes_its_largest_value(
    value: float, dtype: torch.dtype
) -> None:
    cache = make_paged_pair(Case("fp8").spec, 2, 16, dtype, torch.device("cpu"))
    key = torch.full((2, 2, 16), value)
    write_paged_pair(cache, key, -key, torch.tensor([3, 17]))
    held = min(value, torch.finfo(dtype).max)
    assert (cache[0].float()[[0, 1], [3, 1]] == torch.tensor(held).to(dtype).float()).all()
    assert (cache[1].float()[[0, 1], [3, 1]] == torch.tensor(-held).to(dtype).float()).all()


def test_a_nan_stays_one_in_an_8_bit_cache() -> None:
    cache = make_paged_pair(Case("fp8").spec, 1, 16, F8, torch.device("cpu"))
    nothing = torch.full((1, 2, 16), torch.nan)
    write_paged_pair(cache, nothing, nothing, torch.tensor([0]))
    assert cache[0][0, 0].float().isnan().all()


class BytesAlone(TorchFunctionMode):
    """A device that gathers 8-bit floats as bytes only."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.index_select:
            assert args[0].dtype not in (F8, torch.float8_e5m2)
        return function(*args, **(kwargs or {}))


def test_plain_torch_gathers_an_8_bit_cache_as_bytes() -> None:
    with BytesAlone():
        check_case(SdpaBackend(), Case("fp8", kv_dtype=F8))
