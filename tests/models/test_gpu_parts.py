"""The parts of the GPU benchmark: what they ask for can be had, also of the shape that stands in on
cpu.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers import Tokenizer

from benchmarks.gpu_bench import checks, sampler, serving, steps
from benchmarks.gpu_bench.parts import FULL, PARTS, TINY
from benchmarks.gpu_bench.shapes import SHAPES, Variant
from penstock_shard.selfcheck.ops import KERNELS

MODELS = [
    name for name, part in PARTS.items() if part.rows and name not in ("machine", "attention")
]


class _Asked(Exception):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant.label)
        self.variant = variant


def _ask(variant: Variant, *_: Any) -> Any:
    raise _Asked(variant)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_no_part_asks_for_a_longer_context_than_its_shape_has(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "make_runner", _ask)
    over_http = ("requests_over_http", "throughput_over_http")
    for function in ("steps_over_grpc", *over_http, "transformers_requests"):
        monkeypatch.setattr(serving, function, _ask)
    rows = PARTS[name].rows
    assert rows is not None
    with pytest.raises(_Asked) as asked:
        list(rows(TINY if device == "cpu" else FULL, device, tmp_path))
    variant = asked.value.variant
    assert variant.device == device
    assert variant.max_model_len <= SHAPES[variant.shape].values["max_position_embeddings"]


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b"])
def test_every_id_that_a_shape_can_draw_is_text(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    tokenizer = Tokenizer.from_file(str(shape.write(tmp_path) / "tokenizer.json"))
    count = shape.values["vocab_size"]
    assert tokenizer.get_vocab_size() == count
    # The first three are special.
    assert [i for i in range(3, count) if not tokenizer.decode([i])] == []
    assert tokenizer.decode([400, 401]) == " x190 x191"


def test_checks_name_every_kind_of_kernels_and_every_backend() -> None:
    names = list(checks.attempts("cuda"))
    kernels = [f"kernels of {kind}, bfloat16, exact" for kind in KERNELS]
    assert [name for name in names if name in kernels] == kernels
    backends = {name.split()[1] for name in names if name.startswith("attention ")}
    assert backends == {"flash_attn", "torch_varlen", "triton"}


def test_sampling_is_timed_beside_reading_the_logits_once() -> None:
    attempts = sampler.attempts((2,), 50, "cpu")
    row = attempts["2 rows, peaked, top_k, top_p"]()
    assert row["ms"] >= row["host_ms"] > 0
    assert 0 < row["floor_ms"] < row["ms"]
