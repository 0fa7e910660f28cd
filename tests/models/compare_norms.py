"""Compares, without a card, what is compiled of a norm that rounds to fp8 and of one that does not.

Bits of the norm depend on how a row's values lie over threads, which is the order of the sum of
squares, and on which products and sums the compiler fuses: what is computed after it may change
both.

    PYTHONPATH=tests python tests/models/compare_norms.py [89 | 90 | 100 | 120]

Run as a process of its own, like `compile_launches.py`. Prints a line for each size where they
differ, then how many are alike.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from models.compile_launches import Card
from torch import Tensor
from triton.runtime import driver, jit

from penstock_shard.kernels.triton_layers import add_rms_norm
from penstock_shard.kernels.triton_quantize import empty_fp8_rows

# From one value a thread to many; some are no powers of two, and rows of one are not aligned.
SIZES = (16, 500, 1536, 4096, 5120, 16384)
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)$", re.MULTILINE)
_SUM = re.compile(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32")
# Instructions that round, and those by which threads exchange values.
_ARITHMETIC = re.compile(
    r"^\s*(?:@!?%p\d+ )?(shfl\S+|(?:add|cvt|div|fma|mul|rsqrt|sub)\.\S*f(?:16|32)(?:x2)?)\s",
    re.MULTILINE,
)


def main() -> int:
    driver.set_active(Card(int(sys.argv[1]) if len(sys.argv) > 1 else 90))
    compiled = _only_compile()
    different, compared = 0, 0
    for size in SIZES:
        x, weight = torch.zeros(3, size, dtype=torch.bfloat16), torch.zeros(size)
        residuals: tuple[Tensor | None, ...] = (None, x.clone())
        for residual in residuals:
            add_rms_norm(x, residual, weight, 1e-6, 0.0)
            rounded = empty_fp8_rows(3, size, x.device)
            add_rms_norm(x, residual, weight, 1e-6, 0.0, rounded=rounded)
            fault = _difference(*compiled[-2:])
            compared += 1
            if fault is not None:
                different += 1
                print(f"{size}: {fault}")
    print(f"{compared - different} of {compared} norms alike")
    return 1 if different else 0


def _only_compile() -> list[dict[str, str]]:
    """Make each launch from now on compile its kernel and not run it. Return a list that gets the
    code of each, by language.
    """
    run: Any = jit.JITFunction.run
    compiled: list[dict[str, str]] = []

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        compiled.append(kernel.asm)
        return kernel

    jit.JITFunction.run = compile_only
    return compiled


def _difference(plain: dict[str, str], rounding: dict[str, str]) -> str | None:
    layouts = [_layout_of_sum(code["ttgir"]) for code in (plain, rounding)]
    if layouts[0] != layouts[1]:
        return f"{layouts[0]}, with rounding {layouts[1]}"
    norm, both = (_ARITHMETIC.findall(code["ptx"]) for code in (plain, rounding))
    for place, pair in enumerate(zip(norm, both, strict=False)):
        if pair[0] != pair[1]:
            return f"instruction {place} is {pair[0]}, with rounding {pair[1]}"
    return None if len(norm) < len(both) else "nothing is rounded"


def _layout_of_sum(text: str) -> str:
    """Return the layout of the first sum, which is the norm's."""
    found = _SUM.search(text)
    assert found is not None, text
    return dict(_LAYOUT.findall(text))[found[1]]


if __name__ == "__main__":
    sys.exit(main())
