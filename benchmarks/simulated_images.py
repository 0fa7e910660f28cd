"""Measures how images slow text streams, on a simulated GPU and a virtual clock.

    python benchmarks/simulated_images.py
    python benchmarks/simulated_images.py --rates 0.25 4

64 text streams decode on a shard while requests with images of four megapixels come. Client
library, server, engine and scheduler are real. A step takes the time of Llama-3.1-8B's bytes and
multiplications on an H100, an image that of Qwen2.5-VL-7B's encoder
(`tests/simulation/encoders.py`). The simulation does not know how a device divides itself between
step and encoder. So each figure has two columns: the best case, in which both run as fast as alone,
and a bad case, in which each gets half of the device.

Rows differ in an operator's settings. With "roles", one shard has prompts and images, and another
decodes. `x` is the p99 divided by the p99 without images.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation.device_loads import Fared, Image, Load, Setting, long_prompts
from simulation.devices import H100
from simulation.encoders import Encoding

from benchmarks.tables import row, table

# Tokens as in Qwen2.5-VL.
_IMAGE = Image(2464, 1680, 5280)
_TEXT_TOKENS = 100
_SHARES = {"beside": None, "halves": 0.5}


@dataclass(frozen=True)
class _Operated:
    """An operator's settings."""

    max_prefill_tokens: int = 1024
    seconds_between_tokens: float | None = None
    roles: Sequence[str] = ("both",)

    def fare(self, share: float | None, per_s: float) -> Fared:
        """Run with `per_s` images a second."""
        setting = Setting(
            blocks="none" if len(self.roles) == 1 else "ahead",
            device=replace(H100, encoding=Encoding(share)),
            max_prefill_tokens=self.max_prefill_tokens,
        )
        load = Load(
            per_s,
            prompt_tokens=_TEXT_TOKENS,
            seconds_between_tokens=self.seconds_between_tokens,
            image=_IMAGE,
        )
        fared = long_prompts(setting, self.roles, load)
        gc.collect()
        return fared


_OPERATED = {
    "defaults": _Operated(),
    "streams want 15.5 ms": _Operated(seconds_between_tokens=0.0155),
    "--max-prefill-tokens 128": _Operated(128),
    "--max-prefill-tokens 64": _Operated(64),
    "roles, a GPU each": _Operated(roles=("prefill", "decode")),
}


def main() -> None:
    args = parse_args()
    logging.disable()
    gc.disable()
    columns = ("between tokens p99, ms", "x", "first token p50, s", "max")
    headings = (f"{column}, {share}" for share in _SHARES for column in columns)
    table("images a second", "set", *headings)
    for name, operated in _OPERATED.items():
        without = operated.fare(None, 0)
        row("0", name, f"{1e3 * without.gap_p99_s:.1f}", "1.00", *[""] * 6)
        for per_s in args.rates:
            fared = [operated.fare(share, per_s) for share in _SHARES.values()]
            row(f"{per_s:g}", name, *(cell for each in fared for cell in _cells(each, without)))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="PER_S",
                        help="images a second (default: 0.5 1 2)")  # fmt: skip
    return parser.parse_args(argv)


def _cells(fared: Fared, without: Fared) -> list[str]:
    firsts_s = fared.first_tokens_s or [0.0]
    return [
        f"{1e3 * fared.gap_p99_s:.1f}",
        f"{fared.gap_p99_s / without.gap_p99_s:.2f}",
        f"{median(firsts_s):.2f}",
        f"{max(firsts_s):.2f}",
    ]


if __name__ == "__main__":
    main()
