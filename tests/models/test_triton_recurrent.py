"""Triton's kernels of layers with a state, in its interpreter: what the cpu kernels compute, and
the same bits however a prompt is cut and whatever is beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.recurrent_steps import cpu_ops
from models.test_recurrent import Layer
from models.test_selective_scan import Scan
from models.tiny_families import generate, make_family
from support.budget import budget, seeded
from torch import Tensor

from penstock_shard.attention.sdpa import SdpaBackend

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from penstock_shard.ops.triton_ops import TritonOps

# So many tokens of a prompt are more than one program of a convolution has.
_LONG = 35


class _Ops(TritonOps):
    """Triton's ops, with decays and softplus of the cpu kernels. What torch computes of these on a
    processor depends on the number of tokens.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
        self._others = cpu_ops()

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        return self._others.decay(x, rate, bias)

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        return self._others.softplus(x, bias, low, high)


def _lengths(name: str) -> list[int]:
    rng = seeded(name)
    torch.manual_seed(rng.randrange(1 << 30))
    return [_LONG, *(rng.randint(1, budget(6, _LONG)) for _ in range(budget(2, 6)))]


def _check(computed: Layer | Scan) -> None:
    whole = computed.run(_Ops(), [64])
    for found, expected in zip(whole, computed.run(cpu_ops(), [64]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for cuts in ([13, 4], *([[1], [16, 3]] if budget(0, 1) else [])):
        again = computed.run(_Ops(), cuts)
        assert all(torch.equal(one, other) for one, other in zip(again, whole, strict=True))


@pytest.mark.parametrize("by_channel", [False, True])
def test_short_convolutions_and_the_delta_rule(by_channel: bool) -> None:
    # Neither is a power of two, nor are there as many keys as values.
    _check(Layer(_lengths("delta rule in Triton"), 2, 4, 5, 40, 4, by_channel))


@pytest.mark.parametrize("by_column", [False, True])
def test_selective_scans(by_column: bool) -> None:
    _check(Scan(_lengths("scan in Triton"), 2, 4, 20, 5, by_column))


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_tokens_of_a_model_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    prompts = [[*range(100, 120)], [*range(300, 307)]]
    directory = make_family(tmp_path, family)
    runner = load(directory, attention_backend="triton", max_model_len=64, state_spacing=32)
    sequences = [make_sequence(prompt, max_tokens=4) for prompt in prompts]
    Driver(runner).generate(sequences)
    outputs = [sequence.token_ids[sequence.num_prompt_tokens :].tolist() for sequence in sequences]
    assert outputs == generate(directory, prompts, 4).outputs
