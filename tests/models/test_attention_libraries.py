"""Backends over attention libraries, driven through strict stand-ins, within a model."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import library_stand_ins
from models.driver import Driver, load, make_sequence

from penstock_shard.attention import torch_varlen
from penstock_shard.attention.base import AttentionBackend, LayerSpec
from penstock_shard.attention.flash_attn import FlashAttention2, FlashAttention3
from penstock_shard.attention.torch_varlen import TorchVarlen
from penstock_shard.errors import ModelError

FLASH_2 = FlashAttention2(library_stand_ins.flash_attn_2())
FLASH_3 = FlashAttention3(library_stand_ins.flash_attn_3())
VARLEN = TorchVarlen(library_stand_ins.varlen_attn)
SPEC = LayerSpec(0, 4, 2, head_dim=64, head_dim_v=64, scale=0.125)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions called, in order, with flash-attn 2 as if installed."""
    monkeypatch.setitem(sys.modules, "flash_attn", library_stand_ins.flash_attn_2())
    library_stand_ins.calls.clear()
    return library_stand_ins.calls


@pytest.mark.parametrize("backend", [FLASH_2, FLASH_3, VARLEN], ids=lambda b: b.name + b.version)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_sinks": True}, "does not know attention sinks"),
        ({"head_dim": 320, "head_dim_v": 320}, "at most 256, not 320"),
        ({"head_dim": 12, "head_dim_v": 12}, "multiple of 8, at most 256, not 12"),
    ],
)
def test_what_no_library_can_do_is_refused(
    backend: AttentionBackend, change: dict[str, Any], reason: str
) -> None:
    assert backend.refusal(SPEC, torch.bfloat16) is None
    assert "float16 and bfloat16, not float32" in str(backend.refusal(SPEC, torch.float32))
    assert reason in str(backend.refusal(dataclasses.replace(SPEC, **change), torch.bfloat16))


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        (FLASH_2, {"head_dim_v": 32}, "keys and values of one size, not 64 and 32"),
        (VARLEN, {"head_dim_v": 32}, "keys and values of one size, not 64 and 32"),
        (VARLEN, {"softcap": 30.0}, "does not know softcaps"),
        (FLASH_3, {"head_dim": 128}, "no kernel for keys of 128 and values of 64"),
        (FLASH_3, {"head_dim": 192}, "no kernel for keys of 192 and values of 64"),
    ],
    ids=["flash 2", "varlen", "varlen softcap", "flash 3 at 128", "flash 3 at 192"],
)
def test_what_one_library_cannot_do_is_refused(
    backend: AttentionBackend, change: dict[str, Any], reason: str
) -> None:
    assert reason in str(backend.refusal(dataclasses.replace(SPEC, **change), torch.bfloat16))


def test_the_stand_in_for_varlen_attn_has_the_signature_of_this_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn).parameters
    if not set(real) >= torch_varlen._NEEDED:
        pytest.skip(f"torch {torch.__version__} has another one")
    ours = inspect.signature(library_stand_ins.varlen_attn).parameters
    assert list(ours) == list(real)
    assert [p.kind for p in ours.values()] == [p.kind for p in real.values()]
    assert [p.default for p in ours.values()] == [p.default for p in real.values()]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_gives_the_log_probabilities_of_sdpa(
    family: str, calls: list[str], model_dir: Callable[[str], Path]
) -> None:
    """Logits of two backends in bfloat16 differ by rounding, so tokens are fixed beforehand."""
    prompts = [list(range(5, 45)), list(range(100, 107))]
    found = {}
    for name in ("sdpa", "flash_attn"):
        runner = load(model_dir(family), attention_backend=name, dtype="bfloat16", block_size=256)
        assert runner.info.attention_backend.startswith(name)
        driver = Driver(runner)
        sequences = [make_sequence(prompt, prompt_logprobs=0) for prompt in prompts]
        chosen: list[float] = []
        # The first token alone, a chunk, decode-shaped steps beside the other row, the rest.
        for counts in ((1, 4), (20, 1), (1, 1), (1, 1), (17, None)):
            rows = [(r, c) for r, c in zip(sequences, counts, strict=True) if c]
            for result in driver.step(rows):
                if result.prompt_logprobs:
                    chosen += result.prompt_logprobs.chosen
        found[name] = torch.tensor(chosen)
    assert {"kvcache", "varlen"} <= set(calls)
    assert len(found["sdpa"]) == 39 + 6
    scale = found["sdpa"].std()
    assert (found["flash_attn"] - found["sdpa"]).abs().max() < 0.1 * scale


def test_info_names_the_version_and_that_it_is_untested(
    calls: list[str], model_dir: Callable[[str], Path]
) -> None:
    info = load(model_dir("llama"), attention_backend="flash_attn", dtype="bfloat16").info
    assert info.attention_backend == "flash_attn 2.8.3 (untested on cpu)"
    assert info.block_size == 256


@pytest.mark.parametrize(
    ("family", "flags", "reason"),
    [
        ("llama", {"block_size": 16}, "needs --block-size to be a multiple of 256, not 16"),
        ("gpt_oss", {}, "does not know attention sinks"),
        ("llama", {"dtype": "float32"}, r"serves float16 and bfloat16, not float32"),
    ],
)
def test_what_a_named_backend_cannot_do_is_refused_at_load(
    family: str,
    flags: dict[str, object],
    reason: str,
    calls: list[str],
    model_dir: Callable[[str], Path],
) -> None:
    settings = {"attention_backend": "flash_attn", "dtype": "bfloat16", **flags}
    line = f"^--attention-backend flash_attn: .*{reason}.*use .*sdpa"
    with pytest.raises(ModelError, match=line):
        load(model_dir(family), **settings)


def test_the_stand_ins_refuse_what_the_kernels_refuse() -> None:
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    cache = torch.zeros(2, 256, 2, 8, dtype=torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)
    sums = torch.tensor([0, 1], dtype=torch.int32)
    flash_3 = library_stand_ins.flash_attn_3_with_kvcache

    def flash_2(q: Any, cache: Any, table: Any, lengths: Any) -> None:
        library_stand_ins.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, block_table=table, softmax_scale=1.0
        )

    def flash_3_call(q: Any, cache: Any, table: Any, lengths: Any) -> None:
        flash_3(q, cache, cache, cache_seqlens=lengths, page_table=table, softmax_scale=1.0)

    def varlen(q: Any, cache: Any, table: Any, lengths: Any) -> None:
        library_stand_ins.varlen_attn(
            q.squeeze(1), cache, cache, sums, sums, 1, 256, scale=1.0, enable_gqa=True,
            seqused_k=lengths, block_table=table,
        )  # fmt: skip

    faults: list[dict[str, torch.Tensor]] = [
        {"q": q.float()},
        {"q": q[..., :4]},
        {"cache": cache[:, :128].contiguous()},
        {"cache": cache.transpose(0, 1)},
        {"table": table.long()},
        {"table": table + 2},
        {"lengths": lengths.long()},
        {"lengths": lengths * 257},
    ]
    right = {"q": q, "cache": cache, "table": table, "lengths": lengths}
    for call in (flash_2, flash_3_call, varlen):
        call(**right)
        for fault in faults:
            if call is flash_3_call and fault is faults[2]:
                call(**{**right, **fault})  # blocks of any size
                continue
            with pytest.raises(AssertionError):
                call(**{**right, **fault})
