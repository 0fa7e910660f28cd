"""What one GPU gives beside what it could: decode, attention, prefill, serving, exactness.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --parts machine decode-8b exact-8b --out benchmarks/results
    python benchmarks/gpu.py --device cpu --tiny

Weights are random, in the shapes of models people serve. Each part runs in a process of its own,
with a bound on its time; what fails is a line of the table, and the others go on. Prints one table
and writes one JSON file with the device, the versions and the commit. After --minutes no part is
started any more, and those that were not are lines of the table: the parts that matter most come
first. With --tiny the same runs on a processor in a minute: its figures mean nothing, and its goals
are not met.

parts
  machine       bytes a second of a copy, and flops of a product: what the rest is held against
  attention     keys and values read a second by decode attention
  decode-*      a step's time beside bytes / (0.9 x the copy's rate); batch 1, 32, 256, context 512
  prefill-*     prompts a second beside the product's rate
  served-*      steps while streams are read over gRPC, beside the device's own time for them
  requests      ShareGPT-like requests over HTTP, completions and chats; beside transformers'
                continuous batching
  exact-*       equal bits whatever the batch and the chunks, and what that costs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_bench import attention, goals, machine, serving, steps
from benchmarks.gpu_bench.steps import Variant

_BATCHES = (1, 32, 256)
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Size:
    """How much a part does."""

    steps: int
    seconds: float
    requests: int
    batches: tuple[int, ...]
    # Of the shape that is large: streams over gRPC.
    large_batches: tuple[int, ...]
    prompts: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    context: int


_FULL = Size(
    steps=40,
    seconds=2.0,
    requests=2000,
    batches=_BATCHES,
    large_batches=(1, 32, 1024),
    prompts=(2048, 8192),
    attention=((1, 32768), (32, 512), (32, 4096), (256, 512), (256, 2048)),
    context=_CONTEXT,
)
_TINY = Size(
    steps=6,
    seconds=0.5,
    requests=4,
    batches=(1, 4),
    large_batches=(1, 4),
    prompts=(64,),
    attention=((2, 48),),
    context=48,
)

# What a part's process runs: size, device and folder -> rows.
Part = Callable[[Size, str, Path], list[dict[str, Any]]]


def _variant(shape: str, device: str, **changes: Any) -> Variant:
    return Variant("tiny" if device == "cpu" else shape, device, **changes)


def _machine(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    place = machine.device_of(device)
    return [
        {
            "what": "machine",
            "copy_gb_per_s": 1e-9 * machine.copy_bytes_per_s(place),
            "matmul_tflops": 1e-12 * machine.matmul_flops_per_s(place),
        }
    ]


def _attention(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    shape = "tiny" if device == "cpu" else "llama-3.1-8b"
    backend = "sdpa" if device == "cpu" else "auto"
    return attention.attention(shape, device, backend, size.attention)


def _decode(shape: str, **changes: Any) -> Part:
    def part(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
        variant = _variant(shape, device, **changes)
        batches = [count for count in size.batches if count <= variant.max_num_seqs]
        return steps.decode(variant, batches, size.context, size.steps, folder)

    return part


def _decode_large(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    variant = _large(device)
    return steps.decode(variant, size.batches, size.context, size.steps, folder)


def _large(device: str) -> Variant:
    quantization = None if device == "cpu" else "fp8"
    return _variant("llama-70b", device, quantization=quantization, max_num_seqs=1024)


def _prefill(shape: str) -> Part:
    def part(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
        variant = _variant(shape, device, max_model_len=max(size.prompts) + 8, max_num_seqs=8)
        return steps.prefill(variant, size.prompts, folder)

    return part


def _served(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    variant = _variant("qwen2.5-1.5b", device, max_model_len=4096)
    return serving.steps_over_grpc(variant, size.batches[-1:], size.context, size.seconds, folder)


def _served_large(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    return serving.steps_over_grpc(
        _large(device), size.large_batches, size.context // 4, size.seconds, folder
    )


def _requests(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    variant = _variant("qwen2.5-1.5b", device, max_num_seqs=512, max_model_len=4096)
    return serving.requests_over_http(variant, size.requests, folder)


def _transformers(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    # A quarter of the requests: it is the slower one.
    variant = _variant("qwen2.5-1.5b", device)
    return serving.transformers_requests(variant, max(2, size.requests // 4), folder)


def _exact(size: Size, device: str, folder: Path) -> list[dict[str, Any]]:
    variant = _variant("llama-3.1-8b", device, exact=True)
    return steps.exact_bits(variant, size.batches[-1], folder)


# Name, seconds it may take, and what it does.
PARTS: dict[str, tuple[float, Part]] = {
    "machine": (30, _machine),
    "decode-8b": (60, _decode("llama-3.1-8b")),
    "attention": (45, _attention),
    "decode-1.5b": (45, _decode("qwen2.5-1.5b")),
    "served-1.5b": (60, _served),
    "requests": (120, _requests),
    "transformers": (90, _transformers),
    "prefill-8b": (60, _prefill("llama-3.1-8b")),
    "decode-8b-fp8": (60, _decode("llama-3.1-8b", quantization="fp8")),
    "exact-8b": (75, _exact),
    "decode-8b-exact": (75, _decode("llama-3.1-8b", exact=True)),
    "decode-30b-a3b": (75, _decode("qwen3-30b-a3b")),
    "decode-70b-fp8": (90, _decode_large),
    "served-70b-fp8": (120, _served_large),
}


def main() -> int:
    args = _parse()
    if args.run is not None:
        return _run_part(args)
    begun_s = time.monotonic()
    args.file_name = f"gpu-{time.strftime('%Y-%m-%d-%H%M')}.json"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.parts or PARTS:
            left_s = args.minutes * 60 - (time.monotonic() - begun_s)
            rows += _run_in_process(name, args, Path(scratch) / name, left_s)
            _write(args, rows)
    print(goals.table(list(goals.lines(rows))))
    print(f"{time.monotonic() - begun_s:.0f} s", file=sys.stderr)
    return 1 if any("failed" in row for row in rows) else 0


def _parse() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to nothing of everything")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), metavar="PART")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all (default: 9)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the JSON file goes")
    # A part, in its own process.
    parser.add_argument("--run", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu: the shapes are for a GPU; give --tiny")
    return args


def _run_in_process(
    name: str, args: argparse.Namespace, folder: Path, left_s: float
) -> list[dict[str, Any]]:
    """Rows of a part, or one that says why there are none."""
    if left_s < 10:
        return [{"part": name, "failed": "no time was left"}]
    folder.mkdir()
    print(f"{name}:", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
    command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(
            command, env=environment, stdout=sys.stderr, timeout=min(PARTS[name][0], left_s),
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return [{"part": name, "failed": f"not within {error.timeout:.0f} s"}]
    result = folder / "rows.json"
    if done.returncode or not result.exists():
        return [{"part": name, "failed": f"exit status {done.returncode}"}]
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def _run_part(args: argparse.Namespace) -> int:
    rows = PARTS[args.run][1](_TINY if args.tiny else _FULL, args.device, args.folder)
    for row in rows:
        print("  " + ", ".join(f"{name} {_brief(value)}" for name, value in row.items()))
    facts = {"what": "facts", **machine.facts(machine.device_of(args.device))}
    found = [facts, *rows] if args.run == "machine" else rows
    (args.folder / "rows.json").write_text(json.dumps(found))
    return 0


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """After each part, so that nothing is lost with the next."""
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / args.file_name).write_text(json.dumps(list(rows), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
