"""The flash_attn backend, driven through a strict stand-in for the library."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import flash_stand_in
from models.driver import Driver, load, make_request
from models.test_attention import OPTIONS, check_backend

from penstock_shard.models.attention import choose_backend
from penstock_shard.models.attention.base import AttentionBackend, LayerSpec
from penstock_shard.models.errors import ModelError

BACKEND_MODULE = "penstock_shard.models.attention.flash_attn"
CPU = torch.device("cpu")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions called, in order."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_stand_in.as_module())
    monkeypatch.delitem(sys.modules, BACKEND_MODULE, raising=False)
    flash_stand_in.calls.clear()
    yield flash_stand_in.calls
    sys.modules.pop(BACKEND_MODULE, None)


@pytest.fixture
def backend(stand_in: list[str]) -> AttentionBackend:
    return choose_backend("flash_attn", CPU, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_it_equals_attention_written_out(
    name: str, dtype: torch.dtype, backend: AttentionBackend, stand_in: list[str]
) -> None:
    check_backend(
        backend,
        block_size=256,
        lengths=[300, 9, 17, 257],
        dtype=dtype,
        tolerance=2e-2 if dtype is torch.bfloat16 else 3e-3,
        **OPTIONS[name],
    )
    assert set(stand_in) == {"varlen", "kvcache"}


def test_what_the_library_cannot_do_is_refused(backend: AttentionBackend) -> None:
    spec = LayerSpec(0, 4, 2, head_dim=64, head_dim_v=64, scale=0.125)
    assert backend.refusal(spec, torch.bfloat16) is None
    assert "not torch.float32" in str(backend.refusal(spec, torch.float32))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"has_sinks": True}, "sinks"),
        ({"head_dim_v": 32}, "64 and 32"),
        ({"head_dim": 320, "head_dim_v": 320}, "320"),
        ({"head_dim": 12, "head_dim_v": 12}, "multiple of 8"),
    ]
    for change, reason in changes:
        changed = dataclasses.replace(spec, **change)
        assert reason in str(backend.refusal(changed, torch.bfloat16))


def test_float32_is_refused_by_name(stand_in: list[str]) -> None:
    with pytest.raises(ModelError, match=r"serves float16 and bfloat16, not torch\.float32"):
        choose_backend("flash_attn", CPU, torch.float32)


def test_auto_takes_it_on_cuda_only(stand_in: list[str]) -> None:
    cuda = torch.device("cuda")
    assert choose_backend("auto", cuda, torch.bfloat16).name == "flash_attn"
    assert choose_backend("auto", cuda, torch.float32).name == "sdpa"
    assert choose_backend("auto", CPU, torch.bfloat16).name == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_gives_the_log_probabilities_of_sdpa(
    family: str, stand_in: list[str], model_dir: Callable[[str], Path]
) -> None:
    """Logits of two backends in bfloat16 differ by rounding, so tokens are fixed beforehand."""
    prompts = [list(range(5, 45)), list(range(100, 107))]
    found = {}
    for name in ("sdpa", "flash_attn"):
        runner = load(model_dir(family), attention_backend=name, dtype="bfloat16", block_size=256)
        assert runner.info.attention_backend == name
        driver = Driver(runner)
        requests = [make_request(prompt, prompt_logprobs=0) for prompt in prompts]
        chosen: list[float] = []
        # The first token alone, a chunk, decode-shaped steps beside the other row, the rest.
        for counts in ((1, 4), (20, 1), (1, 1), (1, 1), (17, None)):
            rows = [(r, c) for r, c in zip(requests, counts, strict=True) if c]
            for result in driver.step(rows):
                if result.prompt_logprobs:
                    chosen += result.prompt_logprobs.chosen
        found[name] = torch.tensor(chosen)
    assert "kvcache" in stand_in
    assert "varlen" in stand_in
    assert len(found["sdpa"]) == 39 + 6
    scale = found["sdpa"].std()
    assert (found["flash_attn"] - found["sdpa"]).abs().max() < 0.1 * scale


def test_a_block_size_the_library_refuses_is_refused_at_load(
    stand_in: list[str], model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=r"--block-size 16: .* multiple of 256"):
        load(model_dir("llama"), attention_backend="flash_attn", dtype="bfloat16", block_size=16)


def test_sinks_are_refused_at_load(stand_in: list[str], model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"GptOssForCausalLM: .* flash_attn does not know .* sdpa"):
        load(model_dir("gpt_oss"), attention_backend="flash_attn", dtype="bfloat16")


def test_the_stand_in_refuses_what_the_kernels_refuse() -> None:
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    cache = torch.zeros(2, 256, 2, 8, dtype=torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)

    def call(
        q: torch.Tensor = q,
        cache: torch.Tensor = cache,
        table: torch.Tensor = table,
        lengths: torch.Tensor = lengths,
    ) -> None:
        flash_stand_in.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, block_table=table, softmax_scale=1.0
        )

    call()
    for fault in (
        {"q": q.float()},
        {"q": q[..., :4]},
        {"cache": cache[:, :128].contiguous()},
        {"cache": cache.transpose(0, 1)},
        {"table": table.long()},
        {"table": table + 2},
        {"lengths": lengths.long()},
        {"lengths": lengths * 257},
    ):
        with pytest.raises(AssertionError):
            call(**fault)
