"""What parts of the GPU benchmark ask for can be had, of the shape that stands in on cpu too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu
from benchmarks.gpu_bench import serving, steps
from benchmarks.gpu_bench.shapes import SHAPES, Variant

PARTS = [name for name in gpu.PARTS if name not in ("machine", "attention")]


class _Asked(Exception):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant.label)
        self.variant = variant


def _ask(variant: Variant, *_: Any) -> Any:
    raise _Asked(variant)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PARTS)
def test_no_part_asks_for_a_longer_context_than_its_shape_has(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "make_runner", _ask)
    over_http = ("requests_over_http", "throughput_over_http")
    for function in ("steps_over_grpc", *over_http, "transformers_requests"):
        monkeypatch.setattr(serving, function, _ask)
    part = gpu.PARTS[name][1]
    with pytest.raises(_Asked) as asked:
        list(part(gpu._TINY if device == "cpu" else gpu._FULL, device, tmp_path))
    variant = asked.value.variant
    assert variant.device == device
    assert variant.max_model_len <= SHAPES[variant.shape].values["max_position_embeddings"]


def test_every_part_is_in_one_call_which_ends_within_nine_minutes() -> None:
    assert sorted(name for call in gpu.CALLS for name in call) == sorted(gpu.PARTS)
    for call in gpu.CALLS:
        assert sum(gpu.PARTS[name][0] for name in call) <= 9 * 60
