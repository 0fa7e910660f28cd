"""Our decoder over Triton's kernels, in its interpreter: the tokens of plain torch, and bits that
are a token's own; and what the flags make of it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from model_maker import make_model
from support.budget import budget, in_soak
from torch import Tensor

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.config import ShardConfig
from penstock_shard.device import triton_support
from penstock_shard.errors import ModelError
from penstock_shard.model_loader import fingerprint
from penstock_shard.model_loader.choices import choose_attention
from penstock_shard.model_loader.choices import choose_ops as choose
from penstock_shard.model_loader.choices.choose_attention import AttentionOptions
from penstock_shard.model_loader.choices.choose_ops import choose_ops
from penstock_shard.model_loader.load_model import ModelFiles, load_model
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.rope_tables import rope_tables
from penstock_shard.models.decoder.weights import read_weights
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.base import Activation, Ops, WeightKind
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.quantized import round_in_torch
from penstock_shard.ops.torch_ops import TorchOps
from penstock_shard.selfcheck import ops as check
from penstock_shard.selfcheck.batch_invariance import first_variance
from penstock_shard.selfcheck.random_steps import Row, random_steps

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from penstock_shard.attention.triton import TritonBackend
from penstock_shard.kernels import triton_layers
from penstock_shard.kernels.triton_draw import draw_by_id
from penstock_shard.kernels.triton_layers import combine_rows
from penstock_shard.kernels.triton_matmul import fixed_linear, grouped_linear
from penstock_shard.kernels.triton_rank import draw_ranked
from penstock_shard.kernels.triton_recurrent import delta_rule, selective_scan, short_conv
from penstock_shard.kernels.triton_route import route_tokens
from penstock_shard.ops.triton_ops import FixedMatrix, TritonOps

Directory = Callable[[str], Path]
CPU = torch.device("cpu")
F32 = torch.float32
VOCABULARY = 96
# A family, and tokens of a prompt: past the window of those that have one. The interpreter takes
# seconds for each.
PROMPTS = (("gemma2", 10), ("deepseek_v3", 5), ("mixtral", 5), ("llama", 5), ("qwen3", 5))[
    : budget(2, 5)
]


def triton_ops(*, exact: bool = False) -> TritonOps:
    return TritonOps(CPU, F32, "float32", TritonBackend(exact=exact), exact=exact)


@pytest.fixture
def small_model(tmp_path: Path) -> Directory:
    """A function from a family's name to a model of it with one layer of each kind: the interpreter
    takes a second for each.
    """
    layers = {"llama": 1, "qwen3": 1, "mixtral": 1}
    windows: dict[str, dict[str, Any]] = {"gemma2": {"sliding_window": 8}}
    return lambda family: make_model(
        tmp_path / family,
        family,
        num_hidden_layers=layers.get(family, 2),
        vocab_size=VOCABULARY,
        **windows.get(family, {}),
    )


def make_decoder(directory: Path, ops: Ops) -> Decoder:
    config = load_config(directory, trust_remote_code=False)
    spec = decoder_spec(config)
    ropes = rope_tables(config, spec, 64, CPU)
    weights = read_weights(spec, Checkpoint(directory), ropes, ops, lambda line: None)
    return Decoder(spec, weights, ops)


def generated(model: Decoder, prompt: int) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of two sequences, a chunk of one beside a decode of the other; their logits."""
    with random_steps(model, VOCABULARY, 16, 6, F32) as steps:
        long, short = steps.sequence(prompt + 3), steps.sequence(6)
        logits = [steps.run([(long, 0, prompt), (short, 0, 3)])[[prompt - 1, prompt + 2]]]
        for step in range(3):
            rows: list[Row] = [(long, prompt + step, 1), (short, 3 + step, 1)]
            for (sequence, place, _), token in zip(rows, logits[-1].argmax(1), strict=True):
                sequence.token_ids[place] = int(token)
            logits.append(steps.run(rows))
        return [long.token_ids, short.token_ids], torch.cat(logits)


@pytest.mark.parametrize(("family", "prompt"), PROMPTS)
def test_tokens_are_those_of_plain_torch(family: str, prompt: int, small_model: Directory) -> None:
    plain, directory = TorchOps(CPU, F32, "float32", SdpaBackend()), small_model(family)
    want, expected = generated(make_decoder(directory, plain), prompt)
    got, logits = generated(make_decoder(directory, triton_ops()), prompt)
    assert got == want
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", get_args(Activation))
def test_each_activation_is_that_of_plain_torch(kind: Activation) -> None:
    rows = 4 * torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    want = TorchOps(CPU, F32, "float32", SdpaBackend()).gated_activation(rows.clone(), kind)
    torch.testing.assert_close(triton_ops().gated_activation(rows, kind), want)


def test_exact_products_of_a_transposed_weight_are_those_of_it() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 64, generator=generator).t()
    x = torch.randn(3, 32, generator=generator)
    got = triton_ops(exact=True).pack([weight], exact=True).linear(x)
    torch.testing.assert_close(got, x @ weight.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gemma2"][: budget(1, 3)])
def test_exact_ops_give_the_same_bits_in_any_step(family: str, small_model: Directory) -> None:
    model = make_decoder(small_model(family), triton_ops(exact=True))
    with model.shortened(), random_steps(model, VOCABULARY, 16, 10, F32) as steps:
        watched = steps.sequence(9)
        others = [steps.sequence(n) for n in (2, 4, 3)]
        whole = steps.run([(watched, 0, 9)])
        fillers: list[Row] = [(others[0], 0, 1), (others[1], 0, 4), (others[2], 0, 2)]
        chunk = steps.run([fillers[0], (watched, 0, 6), *fillers[1:]])[1:7]
        assert torch.equal(chunk, whole[:6])
        assert torch.equal(steps.run([fillers[0], (watched, 6, 1)])[1:], whole[6:7])
        if budget(0, 1):
            assert torch.equal(steps.run([*fillers, (watched, 7, 2)])[-2:], whole[7:])


def test_the_check_at_load_tells_exact_ops_from_others(
    small_model: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small_model("llama")

    def check(ops: TritonOps) -> str | None:
        model = make_decoder(directory, ops)
        return first_variance(model, VOCABULARY, 64, 16, F32, lambda count: None, 1)

    assert check(triton_ops(exact=True)) is None
    ops = triton_ops(exact=True)
    good = FixedMatrix.linear

    def linear(self: FixedMatrix, x: Tensor, *others: Any) -> Tensor:
        product = good(self, x, *others)
        return product.mul_(1 + 2**-20) if len(x) == 3 else product

    monkeypatch.setattr(FixedMatrix, "linear", linear)
    assert check(ops) is not None


def chosen(directory: Path, **settings: Any) -> Ops:
    config = ShardConfig(device="cpu", **settings)
    hf_config = load_config(directory, trust_remote_code=False)
    return choose_ops(config, hf_config, CPU, lambda line: None)


@pytest.fixture
def few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are checked at load with less to draw from: that takes the interpreter longest."""
    monkeypatch.setattr(check, "_VOCABULARY", 600)
    monkeypatch.setattr(check, "_RANKED", 600)


@pytest.mark.usefixtures("few_logits")
def test_flags_choose_triton_and_exact(model_dir: Directory) -> None:
    directory = model_dir("llama")
    ops = chosen(directory, attention_backend="triton", dtype="float32")
    assert isinstance(ops, TritonOps)
    assert not ops.exact
    ops = chosen(directory, attention_backend="triton", dtype="float32", exact=True)
    assert isinstance(ops, TritonOps)
    assert isinstance(ops.backend, TritonBackend)
    assert ops.exact
    assert ops.backend.exact
    ops = chosen(directory, exact=True)
    assert isinstance(ops, CpuOps)
    assert ops.exact


def test_exact_is_refused_where_it_cannot_be_had(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"--exact: .*sdpa depend on the batch; on cpu only cpu"):
        chosen(model_dir("llama"), attention_backend="sdpa", exact=True)
    monkeypatch.setattr(choose, "_kernels", lambda config, progress: None)
    with pytest.raises(ModelError, match="--exact: on cpu it needs the cpu kernels"):
        chosen(model_dir("llama"), exact=True)


def no_compiler(*arguments: Any, **options: Any) -> Tensor:
    raise subprocess.CalledProcessError(1, ["gcc"])


def without_gate(gate_up: Tensor, **options: Any) -> Tensor:
    return gate_up[:, : gate_up.shape[1] // 2]


@pytest.fixture
def verdict() -> Iterator[None]:
    """A test's verdict on Triton here; it is forgotten after the test."""
    yield
    triton_support.remember("cpu", None)


@pytest.mark.usefixtures("verdict", "few_logits")
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (no_compiler, "Triton fails on cpu with CalledProcessError: Command .* status 1."),
        (without_gate, r"Triton's silu differs from torch's by [\d.]+ on cpu"),
    ],
)
def test_kernels_that_do_not_work_here_are_left_out_with_one_line(
    kernel: Callable[..., Tensor],
    reason: str,
    model_dir: Directory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = triton_layers.gated_activation
    monkeypatch.setattr(triton_layers, "gated_activation", kernel)
    directory, lines = model_dir("llama"), list[str]()
    hf_config = load_config(directory, trust_remote_code=False)
    config = ShardConfig(device="cpu", dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(choose, "_interprets", lambda config: True)
        patch.setattr(choose, "_kernels", lambda config, progress: None)
        assert type(choose_ops(config, hf_config, CPU, lines.append)) is TorchOps
    assert len(lines) == 1
    assert re.fullmatch(rf"without Triton kernels \({reason}\): slower", lines[0])
    # From then on none is launched, attention's included, until a check finds them right.
    assert re.fullmatch(reason, triton_support.fault_on("cpu") or "")
    with pytest.raises(ModelError, match=f"--attention-backend triton: {reason}, or use sdpa"):
        chosen(directory, attention_backend="triton", dtype="float32")
    with pytest.raises(ModelError, match=f"--exact: {reason}"):
        chosen(directory, attention_backend="triton", dtype="float32", exact=True)
    monkeypatch.setattr(triton_layers, "gated_activation", good)
    chosen(directory, attention_backend="triton", dtype="float32")
    assert triton_support.fault_on("cpu") is None


def product_wrong_in(heights: range) -> Callable[..., Tensor]:
    """Return a product that leaves out columns of K from 64 on if `heights` has its row count."""

    def product(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        if len(x) in heights:
            x = x.clone()
            x[:, 64:] = 0
        good = fixed_linear if weight.dim() == 2 else grouped_linear
        return good(x, weight, *others, **options)

    return product


def without(column: int, value: float) -> Any:
    """Draws as if a setting had this value."""

    def draw(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
        settings[:, column] = value
        return draw_ranked(logits, best, settings, one)

    return draw


def without_floor(logits: Tensor, best: Tensor, settings: Tensor, one: float) -> Tensor:
    settings[:, 2] = 0
    return draw_by_id(logits, best, settings, one)


def without_bias(logits: Tensor, bias: Tensor | None, **rule: Any) -> Any:
    return route_tokens(logits, None, **rule)


def unweighted(logits: Tensor, bias: Tensor | None, **rule: Any) -> Any:
    return route_tokens(logits, bias, **{**rule, "scale": 1.0})


def best_first(rows: Tensor, places: Tensor, weights: Tensor, out: Tensor | None) -> Tensor:
    return combine_rows(rows, places, weights.flip(1), out)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = round_in_torch(x)
    return values, scales * 2


def rounds_twice_as_far(kernel: Any) -> Any:
    """Return a kernel that carries scales which are twice those of its result."""

    def compute(*args: Any, rounded: Any, **named: Any) -> Tensor:
        result: Tensor = kernel(*args, rounded=rounded, **named)
        if rounded is not None:
            rounded[1].mul_(2)
        return result

    return compute


def forgetful(kernel: Any) -> Any:
    """Return a kernel that begins each sequence anew."""

    def begin(*args: Any, **named: Any) -> Tensor:
        *rest, state, batch = args
        return kernel(*rest, torch.zeros_like(state), batch, **named)

    return begin


def stateless(kernel: Any) -> Any:
    """Return a kernel that does not keep the new state."""

    def compute(*args: Any, **named: Any) -> Tensor:
        *rest, state, batch = args
        return kernel(*rest, state.clone(), batch, **named)

    return compute


@cache
def _sound(*, exact: bool) -> bool:
    """True if the check finds nothing wrong in the kernels, with what the caller patched."""
    return check.triton_fault(CPU, F32, "float32", exact=exact) is None


@pytest.mark.parametrize(
    ("name", "words"), [("add_rms_norm", "norm"), ("gated_activation", "silu")]
)
def test_the_check_looks_at_what_results_carry_in_fp8(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "multiplies_fp8", lambda device: True)

    def fault() -> str | None:
        return check.triton_fault(
            CPU, torch.bfloat16, "fp8", exact=False, kernels=("rows", "rounding")
        )

    assert fault() is None
    kernel = rounds_twice_as_far(getattr(triton_layers, name))
    monkeypatch.setattr(triton_layers, name, kernel)
    assert (fault() or "").startswith(f"Triton's rounded {words} differs")


@pytest.mark.parametrize(
    ("place", "kernel", "words"),
    [
        ("ops.triton_ops.fixed_linear", product_wrong_in(range(1, 65)), "product of 3 rows"),
        in_soak(
            "ops.triton_ops.fixed_linear", product_wrong_in(range(65, 999)), "product of 70 rows"
        ),
        in_soak(
            "ops.triton_ops.grouped_linear",
            product_wrong_in(range(49)),
            "product of experts of 4",
        ),
        ("ops.triton_ops.grouped_linear", product_wrong_in(range(49, 999)), "of experts of 100"),
        ("ops.triton_ops.route_tokens", without_bias, "weights of experts"),
        in_soak("ops.triton_ops.route_tokens", unweighted, "weights of experts"),
        ("kernels.triton_layers.combine_rows", best_first, "sum of experts"),
        ("kernels.triton_recurrent.short_conv", forgetful(short_conv), "convolution"),
        in_soak("kernels.triton_recurrent.delta_rule", forgetful(delta_rule), "delta rule"),
        ("kernels.triton_recurrent.delta_rule", stateless(delta_rule), "state of the delta rule"),
        ("kernels.triton_recurrent.selective_scan", forgetful(selective_scan), "selective scan"),
        ("kernels.triton_quantize.round_rows", twice, "rounding"),
        in_soak("kernels.triton_rank.draw_ranked", without(2, 0.0), "drawing by rank"),
        ("kernels.triton_rank.draw_ranked", without(3, 1.0), "drawing by rank"),
        in_soak("kernels.triton_rank.draw_ranked", without(4, 0.0), "drawing by rank"),
        ("kernels.triton_draw.draw_by_id", without_floor, "drawing by id"),
    ],
)
def test_the_check_finds_any_kernel_that_is_wrong(
    place: str, kernel: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "multiplies_fp8", lambda device: True)
    assert _sound(exact="fixed" in place)
    with monkeypatch.context() as patch:
        patch.setattr(f"penstock_shard.{place}", kernel)
        fault = check.triton_fault(CPU, F32, "float32", exact="fixed" in place)
    assert fault is not None
    assert f"{words} " in fault or fault.startswith(f"Triton's {words}")


def test_code_of_transformers_is_refused_where_its_products_would_not_be_exact(
    model_dir: Directory,
) -> None:
    directory = model_dir("opt")
    hf_config = load_config(directory, trust_remote_code=False)
    files = ModelFiles(directory, hf_config, 64)
    with pytest.raises(ModelError, match=r"^--exact: .*transformers' code \(.*leave out --exact$"):
        load_model(files, triton_ops(exact=True), lambda line: None)
    load_model(files, triton_ops(), lambda line: None)
    # Packed, they are the cpu kernels' own, which are exact.
    load_model(files, chosen(directory, exact=True), lambda line: None)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_latents_are_kept_where_attention_is_triton(
    family: str, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both our decoder and the code of transformers keep latents."""
    # The check at load takes seconds in the interpreter.
    monkeypatch.setattr(choose_attention, "_tried", lambda *arguments: None)
    directory = model_dir(family)
    files = ModelFiles(directory, load_config(directory, trust_remote_code=False), 64)
    ops = triton_ops()
    loaded = load_model(files, ops, lambda line: None, AttentionOptions("triton"))
    assert isinstance(loaded.model, Decoder) == (family == "deepseek_v3")
    assert isinstance(ops.backend, TritonBackend)
    assert {spec.values_in_keys for spec in loaded.model.layers} == {True}


@pytest.mark.parametrize("weights", ["bfloat16", "fp8", "int4"])
def test_heads_of_latents_are_multiplied_in_one_launch(weights: WeightKind) -> None:
    """A step of decodes can thus be recorded, and the heads are not rounded to fewer bits."""
    ops = TritonOps(CPU, torch.bfloat16, weights, TritonBackend())
    weight = torch.randn(4 * (16 + 8), 32).to(torch.bfloat16)
    heads = LatentHeads.of(weight, 4, 16, ops)
    assert heads.keys.capturable
    assert heads.values.capturable
    query = torch.randn(3, 4, 16 + 8).to(torch.bfloat16)
    want = torch.einsum(
        "thn,hnr->thr", query[..., :16].float(), weight.view(4, 24, 32)[:, :16].float()
    )
    torch.testing.assert_close(heads.absorb(query)[..., :32].float(), want, atol=5e-2, rtol=2e-2)


def test_the_fingerprint_names_triton_and_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = triton_ops(exact=True)
    first = fingerprint.fingerprint("w", ops, F32)
    others = [fingerprint.fingerprint("w", TorchOps(CPU, F32, "float32", SdpaBackend()), F32)]
    for name, value in (("_triton_hash", "0"), ("importlib.metadata.version", "9")):
        with monkeypatch.context() as context:
            context.setattr(
                f"penstock_shard.model_loader.fingerprint.{name}", lambda *a, v=value: v
            )
            others.append(fingerprint.fingerprint("w", ops, F32))
    assert len({first, *others}) == 4
    assert fingerprint.fingerprint("w", ops, F32) == first
