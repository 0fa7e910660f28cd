"""The choice of a model's attention backend: by what is installed, what it serves, and a check."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import library_stand_ins
from models.driver import load
from torch import Tensor

from penstock_shard.attention import flash_attn
from penstock_shard.attention.backend_order import (
    RAN_ON_HARDWARE,
    Candidate,
    candidates,
    describe_backend,
    make_backend,
)
from penstock_shard.attention.base import (
    AttentionBackend,
    LayerSpec,
    NotHere,
    StateSpec,
    Unusable,
)
from penstock_shard.attention.flash_attn import make_flash_attention_3
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.attention.torch_varlen import make_torch_varlen
from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.choices import choose_attention
from penstock_shard.model_loader.choices.choose_attention import (
    AttentionOptions,
    choose_backend,
    serves_latents,
)
from penstock_shard.model_loader.load_model import ModelFiles, load_model
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.ops.torch_ops import TorchOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32, BF16 = torch.float32, torch.bfloat16
PLAIN = LayerSpec(0, 4, 2, 16, 16, 0.25)
WINDOW = LayerSpec(1, 4, 2, 16, 16, 0.25, window=33)
SOFTCAP = LayerSpec(2, 4, 2, 16, 16, 0.25, softcap=6.0)
SINKS = LayerSpec(3, 4, 2, 16, 16, 0.25, has_sinks=True)
LATENTS = LayerSpec(4, 4, 1, 24, 16, 0.25, values_in_keys=True)
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def install(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType) -> None:
    monkeypatch.setitem(sys.modules, module.__name__, module)


def make_ops(dtype: torch.dtype = F32, backend: AttentionBackend | None = None) -> TorchOps:
    return TorchOps(CPU, dtype, dtype_name(dtype), backend or SdpaBackend())  # type: ignore[arg-type]


def test_auto_is_sdpa_on_cpu() -> None:
    assert make_backend("auto", CPU, BF16).name == "sdpa"


def test_auto_tries_libraries_then_our_kernels_then_plain_torch() -> None:
    names = [candidate.name for candidate in candidates("auto", CUDA)]
    assert names == ["flash_attn", "flash_attn", "torch_varlen", "triton", "sdpa"]


def test_a_backend_is_not_tried_with_layers_that_keep_a_state() -> None:
    pytest.importorskip("triton")
    layer = LayerSpec(0, 0, 0, 0, 0, 0.0, state=StateSpec(8, 4))
    lines: list[str] = []
    backend = choose_backend(make_ops(), [layer], AttentionOptions("triton"), lines.append)
    assert (backend.name, lines) == ("triton", [])


def test_hopper_gets_flash_attn_3_where_it_is_installed(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, library_stand_ins.flash_attn_2())
    assert describe_backend(make_backend("auto", CUDA, BF16), CUDA).startswith("flash_attn 2.8.3 ")
    install(monkeypatch, library_stand_ins.flash_attn_3())
    assert describe_backend(make_backend("auto", CUDA, BF16), CUDA).startswith("flash_attn 3 ")
    assert describe_backend(make_backend("flash_attn", CUDA, BF16), CUDA).startswith(
        "flash_attn 3 "
    )


def test_other_devices_never_get_flash_attn_3(
    ampere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, library_stand_ins.flash_attn_3())
    with pytest.raises(NotHere, match=r"capability 9\.0"):
        make_flash_attention_3(CUDA, BF16)
    install(monkeypatch, library_stand_ins.flash_attn_2())
    assert describe_backend(make_backend("auto", CUDA, BF16), CUDA).startswith("flash_attn 2")


def test_float32_passes_the_libraries_over(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, library_stand_ins.flash_attn_2())
    install(monkeypatch, library_stand_ins.flash_attn_3())
    assert make_backend("auto", CUDA, F32).name in ("triton", "sdpa")
    with pytest.raises(ModelError, match=r"float16 and bfloat16, not float32; .*use sdpa"):
        make_backend("flash_attn", CUDA, F32)


def test_flash_attn_without_the_library_says_what_to_install() -> None:
    with pytest.raises(ModelError, match=r"not installed; install .* extra flash: .*, or use sdpa"):
        make_backend("flash_attn", CPU, BF16)


def test_a_named_backend_that_is_not_here_is_refused_before_anything_is_loaded(
    model_dir: Callable[[str], Path],
) -> None:
    lines = list[str]()
    config = ShardConfig(device="cpu", attention_backend="flash_attn", dtype="bfloat16")
    line = r"^--attention-backend flash_attn: .* install .* extra flash: .*, or use sdpa$"
    with pytest.raises(ModelError, match=line):
        load_model_runner(config, model_dir("llama"), progress=lines.append)
    assert lines == []


@pytest.mark.parametrize("version", ["2.7.4.post1", "1.0.9", "0"])
def test_an_old_flash_attn_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, library_stand_ins.flash_attn_2(version))
    with pytest.raises(ModelError, match=f"flash_attn {re.escape(version)} is installed, and 2.8"):
        make_backend("flash_attn", CPU, BF16)


def test_a_library_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: x\\nmore')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot be imported: undefined symbol: x, or use sdpa$"):
        make_backend("flash_attn", CPU, BF16)


def test_varlen_attn_without_a_block_table_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None  # type: ignore[attr-defined]
    install(monkeypatch, module)
    with pytest.raises(NotHere, match=r"takes no block table; torch 2\.13 does"):
        make_torch_varlen(CUDA, BF16)
    module.varlen_attn = library_stand_ins.varlen_attn  # type: ignore[attr-defined]
    assert make_torch_varlen(CUDA, BF16).name == "torch_varlen"


# --- the check at load


class Wrong(SdpaBackend):
    """The reference with one fault."""

    name = "wrong"

    def __init__(self, fault: str = "none") -> None:
        self.fault = fault

    def attend(self, cache: Any, query: Tensor, batch: Any, **options: Any) -> Tensor:
        window = options.get("window")
        if self.fault == "no compiler":
            raise subprocess.CalledProcessError(1, ["gcc"])
        if self.fault == "memory":
            raise RuntimeError("CUDA error: out of memory")
        if self.fault == "raises":
            raise NotImplementedError("no such kernel\nat line 1")
        if self.fault == "a key more" and window:
            options["window"] = window + 1
        if self.fault == "a key less" and window:
            options["window"] = window - 1
        if self.fault in ("window", "softcap", "sinks"):
            options[self.fault] = None
        if self.fault == "scale":
            options["scale"] *= 1.2
        if self.fault == "heads":
            # Queries that share a KV head are those beside each other.
            query = query.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        if self.fault == "rotated":
            query = torch.cat((query[..., : cache[1].shape[3]], 0 * query[..., :8]), dim=-1)
        if self.fault == "table":
            batch.block_table.copy_(batch.block_table.sort(dim=1, descending=True).values)
        output = super().attend(cache, query, batch, **options)
        if self.fault == "nan":
            output[-1, -1, -1] = torch.nan
        if self.fault == "shape":
            output = output[:, :, :-1]
        if self.fault == "last row":
            output[-1] = output[0]
        return output


def choice(
    layers: list[LayerSpec],
    *backends: AttentionBackend | Exception,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = F32,
    **wish: Any,
) -> tuple[str, list[str]]:
    """The name of the backend that layers get of these, and the lines of progress."""

    def maker(backend: AttentionBackend | Exception) -> Callable[..., AttentionBackend]:
        def make(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
            if isinstance(backend, Exception):
                raise backend
            return backend

        return make

    found = tuple(Candidate("any", maker(backend)) for backend in backends)
    monkeypatch.setattr(choose_attention, "candidates", lambda name, device: found)
    ops, lines = make_ops(dtype), list[str]()
    backend = choose_backend(ops, layers, AttentionOptions(**wish), lines.append)
    return backend.name, lines


@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float16, torch.float8_e4m3fn])
def test_a_right_backend_passes_without_a_line(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_attention, "READS_ANY_CACHE", {"wrong"})
    layers = [PLAIN, WINDOW, SOFTCAP, SINKS, LATENTS]
    found = choice(layers, Wrong(), monkeypatch=monkeypatch, dtype=dtype, kv_dtype=kv_dtype)
    assert found == ("wrong", [])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        ("a key more", WINDOW),
        ("a key less", WINDOW),
        ("window", WINDOW),
        ("softcap", SOFTCAP),
        ("sinks", SINKS),
        ("scale", PLAIN),
        ("heads", PLAIN),
        ("rotated", LATENTS),
        ("table", PLAIN),
        ("nan", PLAIN),
        ("last row", PLAIN),
    ],
)
def test_a_wrong_backend_is_passed_over_with_one_line(
    fault: str, layer: LayerSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = (Wrong(fault), SdpaBackend())
    name, lines = choice([layer], *backends, monkeypatch=monkeypatch, dtype=dtype)
    assert name == "sdpa"
    assert len(lines) == 1
    assert lines[0].startswith("attention backend sdpa, because wrong differs from sdpa by ")
    assert f"layer {layer.index}" in lines[0]


@pytest.mark.parametrize("fault", ["a key more", "a key less"])
def test_one_key_shows_among_a_thousand_in_bfloat16(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerSpec(0, 4, 2, 64, 64, 0.125, window=1000)
    backends = (Wrong(fault), SdpaBackend())
    assert choice([layer], *backends, monkeypatch=monkeypatch, dtype=BF16)[0] == "sdpa"
    assert choice([layer], Wrong(), monkeypatch=monkeypatch, dtype=BF16) == ("wrong", [])


def test_every_kind_of_layer_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [PLAIN, PLAIN, WINDOW, SINKS]
    name, lines = choice(layers, Wrong("sinks"), SdpaBackend(), monkeypatch=monkeypatch)
    assert name == "sdpa"
    assert "layer 3" in lines[0]


def test_memory_that_is_short_does_not_count_against_a_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        choice([PLAIN], Wrong("memory"), SdpaBackend(), monkeypatch=monkeypatch)


def test_all_reasons_are_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Wrong(fault) for fault in ("raises", "no compiler", "shape")]
    absent = (NotHere("unremarkable"), Unusable("it is too old"))
    _, lines = choice([PLAIN], *absent, *faults, SdpaBackend(), monkeypatch=monkeypatch)
    assert len(lines) == 1
    reasons = (
        "attention backend sdpa, because it is too old; ",
        "wrong fails on cpu with NotImplementedError: no such kernel; ",
        "wrong fails on cpu with CalledProcessError: ",
        "Command '['gcc']' returned non-zero exit status 1.; ",
        "wrong gives [45, 4, 15] for [45, 4, 16]",
    )
    assert lines[0] == "".join(reasons)


def test_a_named_backend_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"^--attention-backend any: wrong fails .*; use .* sdpa$"):
        choice([PLAIN], Wrong("raises"), monkeypatch=monkeypatch, backend="any")


def exact_ops(backend: AttentionBackend) -> TorchOps:
    """Return ops with this backend that count as exact in all that they compute beside it."""
    ops = make_ops(backend=backend)
    ops.exact = True
    return ops


def test_the_backend_of_exact_ops_is_tried_and_kept_or_refused() -> None:
    right, wish = Wrong(), AttentionOptions()
    chosen = choose_backend(exact_ops(right), [PLAIN], wish, lambda line: pytest.fail(line))
    assert chosen is right
    with pytest.raises(ModelError, match="wrong differs from sdpa"):
        choose_backend(exact_ops(Wrong("scale")), [PLAIN], wish, print)


def test_another_dtype_of_the_cache_or_size_of_blocks_passes_a_library_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flash = flash_attn.FlashAttention2(library_stand_ins.flash_attn_2())
    for wish, reason in (
        ({"kv_dtype": torch.float8_e4m3fn}, "keeps keys and values as bfloat16, not float8"),
        ({"block_size": 32}, "needs --block-size to be a multiple of 256, not 32"),
    ):
        name, lines = choice(
            [PLAIN], flash, SdpaBackend(), monkeypatch=monkeypatch, dtype=BF16, **wish
        )
        assert name == "sdpa"
        assert reason in lines[0]
    assert choice([PLAIN], flash, monkeypatch=monkeypatch, dtype=BF16) == ("flash_attn", [])


@pytest.mark.parametrize(
    ("named", "served"),
    [("auto", True), ("triton", True), ("sdpa", True), ("flash_attn", False)],
)
def test_on_a_gpu_all_but_libraries_serve_latents(
    named: str, served: bool, ampere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named == "triton":
        pytest.importorskip("triton")
    install(monkeypatch, library_stand_ins.flash_attn_2())
    ops = make_ops(BF16)
    ops.device = CUDA
    assert serves_latents(ops, AttentionOptions(named)) is served


def test_latents_are_kept_unless_a_library_that_reads_none_is_asked_for(
    model_dir: Callable[[str], Path], ampere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, library_stand_ins.flash_attn_2())
    directory, lines = model_dir("deepseek_v3"), list[str]()
    # As long as queries and keys of heads: flash-attn 2 asks for that.
    config = load_config(directory, trust_remote_code=False)
    config.v_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    files = ModelFiles(directory, config, 64, dummy=True)

    def heads(backend: str) -> set[tuple[int, int, int]]:
        wish = AttentionOptions(backend)
        layers = load_model(files, make_ops(BF16), lines.append, wish).model.layers
        return {(spec.num_kv_heads, spec.head_dim, spec.head_dim_v) for spec in layers}

    assert heads("auto") == heads("sdpa") == {(1, 24, 16)}
    assert lines == []
    assert heads("flash_attn") == {(4, 24, 24)}
    reason = "latent attention with --attention-backend flash_attn"
    assert lines[0] == f"running the code of transformers ({reason})"


@pytest.mark.parametrize("window", [1, 2, 31, 300, 9000])
@pytest.mark.parametrize("library", ["flash_attn_2", "flash_attn_3"])
def test_the_libraries_pass_for_windows_of_any_length(
    library: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = {
        "flash_attn_2": flash_attn.FlashAttention2,
        "flash_attn_3": flash_attn.FlashAttention3,
    }
    backend = version[library](getattr(library_stand_ins, library)())
    layer = LayerSpec(0, 4, 2, 16, 16, 0.25, window=window)
    found = choice([layer], backend, monkeypatch=monkeypatch, dtype=BF16)
    assert found == ("flash_attn", [])


def test_a_device_that_faults_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def fails(*arguments: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    ops = exact_ops(Wrong())
    ops.device = CUDA
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(choose_attention, "_difference", fails)
    with pytest.raises(ModelError, match=r"wrong fails .*; use another --attention-backend"):
        choose_backend(ops, [PLAIN], AttentionOptions(), print)


def test_varlen_attn_of_this_torch_fails_on_cpu_in_one_line(
    model_dir: Callable[[str], Path],
) -> None:
    try:
        make_torch_varlen(CPU, BF16)
    except NotHere as error:
        pytest.skip(str(error))
    line = r"^--attention-backend torch_varlen: .* fails on cpu"
    with pytest.raises(ModelError, match=line) as caught:
        load(model_dir("llama"), attention_backend="torch_varlen", dtype="bfloat16")
    assert "\n" not in str(caught.value)


# --- what is said of them


def test_the_page_says_which_backends_have_run_on_hardware() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", DOCS.read_text(), re.MULTILINE)
    said = {name: ran for name, ran in rows if name in RAN_ON_HARDWARE}
    assert said == {
        name: ", ".join(sorted(kinds)) or "never" for name, kinds in RAN_ON_HARDWARE.items()
    }


def test_info_says_where_a_backend_is_untested() -> None:
    assert describe_backend(SdpaBackend(), CPU) == "sdpa"
    assert describe_backend(SdpaBackend(), CUDA) == "sdpa (untested on cuda)"


def test_every_backend_that_can_be_chosen_has_its_line() -> None:
    assert set(RAN_ON_HARDWARE) == {"cpu", *(each.name for each in candidates("auto", CUDA))}
