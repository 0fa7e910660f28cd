"""What one GPU gives beside what it could: decode, attention, prefill, serving, exactness.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --parts machine 8b 8b-exact --out benchmarks/results
    python benchmarks/gpu.py --call 2
    python benchmarks/gpu.py --device cpu --tiny

Weights are random, in the shapes of models people serve. Each part runs in a process of its own,
with a bound on its time; what fails is a line of the table, beside the figures it had by then, and
the others go on. Prints one table and writes one JSON file with the device, the versions and the
commit. After --minutes no part is started any more, and those that were not are lines of the table:
the parts that matter most come first, and --parts and --call run the others. With --tiny the same
runs on a processor in a few minutes: its figures mean nothing, and its goals are not met.

parts
  machine      bytes a second of a copy, and flops of a product: what the rest is held against
  8b           a decode step's time beside bytes / (0.9 x the copy's rate), batch 1, 32 and 256,
               context 512; prompts a second beside the product's rate; the kernels that take most
  attention    keys and values read a second by decode attention
  8b-exact     equal bits whatever the batch and the chunks, and what that costs
  requests     ShareGPT-like requests over HTTP, completions and chats
  transformers the same requests through transformers' continuous batching
  8b-fp8       decode steps with weights in fp8
  8b-1k        completions of 1,000 tokens after 1,000, over HTTP, with weights and KV cache in fp8
  1.5b         steps while streams are read over gRPC, beside the device's own time for them; decode
               steps
  70b-fp8      the same of a large model, with up to 1,024 streams
  30b-a3b      decode steps of a model with experts
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

# Parts import torch and the servers themselves: a failed import is then a line of the table.
from benchmarks.gpu_bench import goals
from benchmarks.gpu_bench.shapes import Variant

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
_BATCHES = (1, 32, 256)
_CONTEXT = 512
# Least max_model_len: sequences whose bits are compared must fit.
_LEAST_LEN = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """How much work the parts do."""

    steps: int
    seconds: float
    requests: int
    # Those of 8b-1k, and the tokens of each prompt and answer.
    long_requests: int
    long_tokens: int
    batches: tuple[int, ...]
    # Numbers of streams over gRPC for the large shape.
    large_batches: tuple[int, ...]
    prompts: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    context: int


_FULL = Size(
    steps=40,
    seconds=3.0,
    requests=2000,
    long_requests=1024,
    long_tokens=1000,
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
    long_requests=2,
    long_tokens=20,
    batches=(1, 4),
    large_batches=(1, 4),
    prompts=(64,),
    attention=((2, 48),),
    context=48,
)

# The function that a part's process runs: size, device, folder -> rows, each once it is measured.
Part = Callable[[Size, str, Path], Iterator[Row]]


def _variant(shape: str, device: str, **changes: Any) -> Variant:
    return Variant("tiny" if device == "cpu" else shape, device, **changes)


def _machine(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import machine

    place = machine.device_of(device)
    yield {
        "what": "machine",
        "copy_gb_per_s": 1e-9 * machine.copy_bytes_per_s(place),
        "matmul_tflops": 1e-12 * machine.matmul_flops_per_s(place),
    }


def _attention(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import attention

    shape = "tiny" if device == "cpu" else "llama-3.1-8b"
    backend = "sdpa" if device == "cpu" else "auto"
    return attention.attention(shape, device, backend, size.attention)


def _decode(shape: str, *, prompts: bool = False, **changes: Any) -> Part:
    """A part that measures decode steps, checks the bits of an exact variant, measures prompts, and
    profiles the kernels of both.
    """

    def part(size: Size, device: str, folder: Path) -> Iterator[Row]:
        from benchmarks.gpu_bench import kernels, steps

        longest = max(_LEAST_LEN, *(length + 8 for length in size.prompts))
        variant = _variant(shape, device, max_model_len=longest, **changes)
        runner, loaded = steps.make_runner(variant, folder)
        yield loaded
        yield from steps.decode(runner, variant, size.batches, size.context, size.steps)
        if variant.exact:
            yield steps.exact_bits(runner, variant, size.batches[-1])
        if prompts:
            yield from steps.prefill(runner, variant, size.prompts)
        # Last, as profiling may slow down what follows.
        yield from kernels.decode_kernels(runner, variant, size.batches, size.context)
        if prompts:
            yield kernels.prompt_kernels(runner, variant, size.prompts[0])

    return part


def _served(shape: str, streams: str, context_share: int, **changes: Any) -> Part:
    """A part that measures steps while streams are read over gRPC, the device's own time for such
    steps, and decode steps.
    """

    def part(size: Size, device: str, folder: Path) -> Iterator[Row]:
        from benchmarks.gpu_bench import serving, steps

        variant = _variant(shape, device, **changes)
        context, counts = size.context // context_share, getattr(size, streams)
        rows: list[Row] = []
        try:
            rows.extend(serving.steps_over_grpc(variant, counts, context, size.seconds, folder))
        finally:
            # Runs after a failure too, for the rows measured before it.
            runner, loaded = steps.make_runner(variant, folder)
            yield loaded
            for row in rows:
                device_s, launch_s = steps.device_and_launch_s(
                    runner, row["batch"], row["context"], size.steps
                )
                yield {**row, "device_ms": 1e3 * device_s, "launch_ms": 1e3 * launch_s}
            yield from steps.decode(runner, variant, size.batches, size.context, size.steps)

    return part


def _requests(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    variant = _variant("qwen2.5-1.5b", device, max_num_seqs=512, max_model_len=4096)
    return serving.requests_over_http(variant, size.requests, folder)


def _throughput(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    # A prompt may take a few tokens more than it has words.
    variant = _variant(
        "llama-3.1-8b",
        device,
        quantization="fp8",
        kv_cache_dtype="fp8" if device == "cuda" else "auto",
        max_num_seqs=1024,
        max_model_len=4096,
    )
    return serving.throughput_over_http(variant, size.long_requests, size.long_tokens, folder)


def _transformers(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    # A quarter of the requests, since transformers is slower.
    variant = _variant("qwen2.5-1.5b", device)
    yield serving.transformers_requests(variant, max(2, size.requests // 4), folder)


# Name -> time limit in seconds, and what the part does. Limits leave time for the first compilation
# of kernels, and in the first part for reading gigabytes of libraries from the disk.
PARTS: dict[str, tuple[float, Part]] = {
    "machine": (120, _machine),
    "8b": (150, _decode("llama-3.1-8b", prompts=True)),
    "attention": (90, _attention),
    "8b-exact": (150, _decode("llama-3.1-8b", exact=True)),
    "requests": (150, _requests),
    "transformers": (90, _transformers),
    "8b-fp8": (90, _decode("llama-3.1-8b", quantization="fp8")),
    "1.5b": (120, _served("qwen2.5-1.5b", "batches", 1, max_model_len=8192)),
    "70b-fp8": (
        180,
        # A 16th of the context, so that the keys and values of all streams fit.
        _served("llama-70b", "large_batches", 16, quantization="fp8", max_num_seqs=1024),
    ),
    "30b-a3b": (120, _decode("qwen3-30b-a3b")),
    "8b-1k": (210, _throughput),
}
# What ends within nine minutes, should each part take all its time: for machines that bound a
# command. The parts that matter most come first.
CALLS = (
    ("machine", "8b", "attention", "8b-exact"),
    ("requests", "transformers", "8b-fp8", "1.5b"),
    ("8b-1k", "70b-fp8", "30b-a3b"),
)


def main() -> int:
    args = _parse()
    if args.run is not None:
        return _run_part(args)
    _allow_many_files()
    begun_s = time.monotonic()
    args.file_name = f"gpu-{time.strftime('%Y-%m-%d-%H%M')}.json"
    rows: list[Row] = [{"what": "run", "date": time.strftime("%Y-%m-%d"), "commit": _commit(args)}]
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.parts or PARTS:
            left_s = args.minutes * 60 - (time.monotonic() - begun_s)
            found = _run_in_process(name, args, Path(scratch) / name, left_s)
            # Every part repeats the facts of the device.
            rows += [row for row in found if row not in rows]
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
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parts", nargs="+", choices=tuple(PARTS), metavar="PART")
    which.add_argument(
        "--call",
        type=int,
        choices=range(1, len(CALLS) + 1),
        help="a third of the parts, which ends within nine minutes",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="in all (default: 9)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--commit", help="of the source, where git cannot say it")
    # For the process of one part.
    parser.add_argument("--run", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        args.parts = CALLS[args.call - 1]
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu: the shapes are for a GPU; give --tiny")
    return args


def _allow_many_files() -> None:
    """Raise the limit of open files: there are thousands of connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _commit(args: argparse.Namespace) -> str:
    if args.commit:
        return str(args.commit)
    git = shutil.which("git")
    if git is None:
        return "unknown"
    found = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def _run_in_process(name: str, args: argparse.Namespace, folder: Path, left_s: float) -> list[Row]:
    """Run a part in a process of its own. Returns its rows, and one that says why it failed."""
    if left_s < 10:
        return [{"part": name, "failed": "no time was left"}]
    folder.mkdir()
    print(f"{name}:", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
    command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    packages = [str(ROOT / place) for place in ("proto", "client", "router", "shard")]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # The packages of this checkout, installed or not.
        "PYTHONPATH": os.pathsep.join(filter(None, [*packages, os.environ.get("PYTHONPATH")])),
    }
    begun_s, bound_s = time.monotonic(), min(PARTS[name][0], left_s)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            status = process.wait(bound_s)
            failed = f"exit status {status}: {_last_line(log)}" if status else ""
        except subprocess.TimeoutExpired:
            failed = f"not within {bound_s:.0f} s: {_last_line(log)}"
        finally:
            _end(process)
    print(text := log.read_text(errors="replace"), file=sys.stderr, flush=True)
    rows = _read_rows(folder)
    rows.append({"what": "took", "part": name, "seconds": round(time.monotonic() - begun_s, 1)})
    if failed:
        rows.append({"part": name, "failed": failed, "log": text[-4000:]})
    return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part with the servers it started: they would hold memory that the next part needs."""
    if process.poll() is not None:
        return
    whole = [psutil.Process(process.pid)]
    whole += whole[0].children(recursive=True)
    for one in whole:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(whole, timeout=10)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "it said nothing")


def _run_part(args: argparse.Namespace) -> int:
    from benchmarks.gpu_bench import machine

    rows: list[Row] = [{"what": "facts", **machine.facts(machine.device_of(args.device))}]
    _keep(args.folder, rows)
    for row in PARTS[args.run][1](_TINY if args.tiny else _FULL, args.device, args.folder):
        print("  " + ", ".join(f"{name} {_brief(value)}" for name, value in row.items()))
        rows.append(row)
        _keep(args.folder, rows)
    return 0


def _keep(folder: Path, rows: Sequence[Row]) -> None:
    """Replace the file of rows atomically: the process may be killed at any time."""
    new = folder / "rows.json.new"
    new.write_text(json.dumps(list(rows)))
    new.replace(folder / "rows.json")


def _read_rows(folder: Path) -> list[Row]:
    result = folder / "rows.json"
    rows: list[Row] = json.loads(result.read_text()) if result.exists() else []
    return rows


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]


def _write(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the JSON file; called after each part, so that a crash loses nothing measured."""
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / args.file_name).write_text(json.dumps(list(rows), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
