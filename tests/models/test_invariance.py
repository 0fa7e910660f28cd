"""Logits have the same bits however steps are cut, and where they have not, the shard says so."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_maker import make_model
from models.driver import load
from models.test_decoder import SERVED
from models.tiny_families import make_family
from safetensors.torch import load_file, save_file
from support.budget import in_soak
from torch import Tensor

from penstock_shard.attention.cpu import CpuBackend
from penstock_shard.config import ShardConfig
from penstock_shard.kernels.cpu import CpuKernels
from penstock_shard.model_loader import fingerprint
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.ops.cpu_ops import CpuMatrix, CpuOps
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("whole_check")

# The gate of its shared expert is one value a token, before a sigmoid: see docs/models.md.
_MAY_VARY = {"qwen2_moe"}


_INVARIANT = [family for family in SERVED if family not in _MAY_VARY]
# In make test those that differ most with one kind of weights each, and one of them with each.
_KINDS = ("auto", "float32", "bfloat16", "int8", "int4")
_UNLIKE = ("gemma2", "gemma4", "deepseek_v3", "llama4", "gpt2", "opt", "gpt_oss", "deepseek_v2")
_ALWAYS = {
    *zip(_UNLIKE, itertools.cycle(_KINDS)),
    *itertools.product(("llama",), _KINDS),
    ("mixtral", "int4"),
}


@pytest.mark.parametrize(
    ("family", "weights"),
    [pair if pair in _ALWAYS else in_soak(*pair) for pair in itertools.product(_INVARIANT, _KINDS)],
)
def test_every_family_is_batch_invariant_on_the_cpu_kernels(
    family: str, weights: str, model_dir: Directory
) -> None:
    is_kind = weights in ("int8", "int4")
    settings = {"quantization": weights} if is_kind else {"dtype": weights}
    info = load(model_dir(family), **{"dtype": "auto", **settings}).info
    assert info.batch_invariant
    assert len(info.numerics_fingerprint) == 32


def test_a_hybrid_of_short_contexts_is_checked_at_load_too(tmp_path: Path) -> None:
    assert load(make_family(tmp_path, "lfm2"), max_model_len=32).info.batch_invariant


def lines_of_a_load(directory: Path, **settings: object) -> tuple[ModelRunner, list[str]]:
    values: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_blocks": 64, **settings}
    lines: list[str] = []
    return load_model_runner(ShardConfig(**values), directory, progress=lines.append), lines


def check_variance_is_found(directory: Path, way: str, **settings: object) -> None:
    runner, lines = lines_of_a_load(directory, **settings)
    assert not runner.info.batch_invariant
    assert runner.info.numerics_fingerprint == ""
    (line,) = [line for line in lines if "depend on the batch" in line]
    assert way in line


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_product_whose_bits_depend_on_the_number_of_rows_is_found(
    family: str, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuMatrix.linear

    def linear(
        self: CpuMatrix, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        product = good(self, x, bias, out)
        # As if another kernel ran that rounds its sums otherwise.
        return product.mul_(1 + 2**-22) if len(x) >= 300 else product

    monkeypatch.setattr(CpuMatrix, "linear", linear)
    check_variance_is_found(model_dir(family), "512 rows with 1 threads")


def test_cached_values_that_differ_are_found_though_no_logit_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention adds nothing in a model whose output matrices are zero."""
    directory = make_model(tmp_path / "model", "llama")
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("o_proj.weight"):
            weight.zero_()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load(directory, dtype="auto").info.batch_invariant
    rope_and_cache = CpuKernels.rope_and_cache

    def differing(self: CpuKernels, qkv: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if len(qkv) == 1:
            qkv = qkv.clone()
            qkv[:, -1] += 1.0
        return rope_and_cache(self, qkv, *arguments, **named)

    monkeypatch.setattr(CpuKernels, "rope_and_cache", differing)
    runner, lines = lines_of_a_load(directory, enforce_eager=True)
    assert not runner.info.batch_invariant
    assert any("in the KV cache decodes after a chunk with 1 threads" in line for line in lines)


def test_attention_whose_bits_depend_on_chunks_is_found(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuBackend.attend

    def attend(self: CpuBackend, cache: Any, query: Tensor, batch: Any, **options: Any) -> Tensor:
        attended = good(self, cache, query, batch, **options)
        return attended.mul_(1 + 2**-22) if batch.query_lens == [1] else attended

    monkeypatch.setattr(CpuBackend, "attend", attend)
    check_variance_is_found(model_dir("llama"), "decodes after a chunk with 1 threads")


def test_rows_that_differ_where_they_are_not_the_first_are_found(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuMatrix.linear

    def linear(
        self: CpuMatrix, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        product = good(self, x, bias, out)
        if len(x) in (64, 512):
            product[1:].mul_(1 + 2**-22)
        return product

    monkeypatch.setattr(CpuMatrix, "linear", linear)
    check_variance_is_found(model_dir("llama"), "64 rows with 1 threads")


def test_a_feed_forward_part_that_differs_in_a_large_step_is_found(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuOps.gated_activation

    def gated(self: CpuOps, gate_up: Tensor, *args: Any, **options: Any) -> Tensor:
        active = good(self, gate_up, *args, **options)
        return active.mul_(1 + 2**-12) if len(gate_up) > 400 else active

    monkeypatch.setattr(CpuOps, "gated_activation", gated)
    check_variance_is_found(model_dir("llama"), "512 rows with 1 threads")


@pytest.mark.parametrize("first_key", [37, 256])
def test_decodes_that_differ_past_some_keys_are_found(
    first_key: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuBackend.attend

    def attend(self: CpuBackend, cache: Any, query: Tensor, batch: Any, **options: Any) -> Tensor:
        attended = good(self, cache, query, batch, **options)
        differs = batch.query_lens == [1] and batch.seq_lens[0] > first_key
        return attended.mul_(1 + 2**-12) if differs else attended

    directory = make_model(tmp_path, "llama", max_position_embeddings=512)
    monkeypatch.setattr(CpuBackend, "attend", attend)
    check_variance_is_found(directory, "decodes after a chunk with 1 threads")


def test_bits_that_depend_on_the_threads_that_serve_are_found(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuBackend.attend

    def attend(self: CpuBackend, *args: Any, **options: Any) -> Tensor:
        attended = good(self, *args, **options)
        return attended.mul_(1 + 2**-12) if torch.get_num_threads() > 2 else attended

    monkeypatch.setattr(CpuBackend, "attend", attend)
    check_variance_is_found(model_dir("llama"), "the whole sequence with 3 threads", threads=3)
    assert lines_of_a_load(model_dir("llama"), threads=2)[0].info.batch_invariant


def test_bits_that_depend_on_threads_are_found(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuBackend.attend

    def attend(self: CpuBackend, *args: Any, **options: Any) -> Tensor:
        attended = good(self, *args, **options)
        return attended.mul_(1 + 2**-22) if torch.get_num_threads() == 2 else attended

    monkeypatch.setattr(CpuBackend, "attend", attend)
    check_variance_is_found(model_dir("llama"), "the whole sequence with 2 threads")


def test_plain_torch_does_not_claim_it(model_dir: Directory) -> None:
    info = load(model_dir("llama"), attention_backend="sdpa").info
    assert not info.batch_invariant
    assert info.numerics_fingerprint == ""


@pytest.mark.parametrize("name", ["exp", "tanh", "cos", "layer_norm", "log_softmax"])
def test_torch_bits_tell_one_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.torch_bits()
    good = fingerprint._FUNCTIONS[name]

    def function(x: Tensor) -> Tensor:
        result = good(x).clone()
        result[77] = result[77].nextafter(torch.tensor(9.0, dtype=x.dtype))
        return result

    monkeypatch.setitem(fingerprint._FUNCTIONS, name, function)
    assert fingerprint.torch_bits() != before


def test_torch_bits_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(fingerprint.torch_bits())
    torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.soak
def test_other_instructions_of_torch_have_another_fingerprint() -> None:
    """Torch's library is told to compute as on another processor. Where its results differ, so must
    the fingerprint.
    """
    code = (
        "import torch\n"
        "from penstock_shard.model_loader.fingerprint import torch_bits\n"
        "x = torch.linspace(-8, 8, 4099)\n"
        "print(torch_bits(), x.tanh().numpy().tobytes().hex() + x.exp().numpy().tobytes().hex())"
    )
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    command = [sys.executable, "-c", code]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    bits_there, values_there = there.stdout.split()
    x = torch.linspace(-8, 8, 4099)
    values = x.tanh().numpy().tobytes().hex() + x.exp().numpy().tobytes().hex()
    if values_there != values:
        assert bits_there != fingerprint.torch_bits()


def test_a_check_leaves_the_threads_as_they_were_asked_for(model_dir: Directory) -> None:
    before = torch.get_num_threads()
    load(model_dir("opt"), threads=3)
    assert torch.get_num_threads() == 3
    load(model_dir("opt"), threads=before)
    assert torch.get_num_threads() == before
