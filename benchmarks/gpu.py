"""Measures one GPU against its limits: parts, in order of value, within a given time.

    python benchmarks/gpu.py --seconds 270 --out found
    python benchmarks/gpu.py --seconds 270 --out found env machine checks+tokens 8b
    python benchmarks/gpu.py --seconds 600 --out found --device cpu --tiny

Weights are random, in the shapes of real models. Each part runs in its own process, for a bounded
time. One that hangs writes its stacks to its log and is ended with all that it started; the others
go on. --out gets rows.json, with each row at once, summary.txt with the table and logs.txt after
every part, and triton-cache.tar.gz at the end: compiled kernels for the next run on such a device.
With --tiny, everything runs on a CPU in a few minutes; its figures mean nothing, and goals are not
met.

Only Python, torch, Triton and transformers need to be installed: --wheels has the rest.

parts (a+b: side by side, without figures)
  env          packages, tools, imports, a first product
  machine      bytes a second of a copy, and flops of a product, to compare the rest with
  checks       each kind of kernels and each attention backend alone, beside plain torch
  tokens       tokens of small models beside transformers': step by step, from graphs, exact
  8b           a decode step's time beside bytes / (0.9 x the copy's rate), batch 1, 32 and 256,
               context 512; prompts a second beside the product's rate; the longest kernels
  http         a few ShareGPT-like requests over HTTP, to see that it serves
  sampler      sampling 256 rows by their parameters, beside logits read once
  attention    keys and values read a second by decode attention
  8b-exact     equal bits with any batch and chunks, and the cost of that
  requests     ShareGPT-like requests over HTTP, completions and chats
  transformers the same requests through transformers' continuous batching
  8b-fp8       decode steps with weights in fp8
  8b-1k        completions of 1,000 tokens after 1,000, over HTTP, with weights and KV cache in fp8
  1.5b         steps while streams are read over gRPC, beside the device's own time for them; decode
               steps
  70b-fp8      the same with a large model and up to 1,024 streams
  30b-a3b      decode steps of a model with experts
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_bench import attempts, bare_machine, marks
from benchmarks.gpu_bench.goals import Row
from benchmarks.gpu_bench.parts import FULL, PARTS, TINY
from benchmarks.gpu_bench.results import add_rows, read_rows, write_report
from benchmarks.gpu_bench.run_parts import Run, run_together

# No part fits into less.
_LEAST_S = 15
_WHEELS_S = 60.0
# Kept for packing compiled kernels.
_LAST_S = 1.5


def main() -> int:
    begun_s = time.monotonic()
    args = _parse()
    if args.run is not None:
        _run_part(args)
        return 0
    bare_machine.allow_many_files()
    # Raises SystemExit, so that everything is ended and written.
    signal.signal(signal.SIGTERM, _end)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-parts-"))
    with marks.watched(str(scratch), scratch):
        _run(args, scratch, begun_s + args.seconds)
    print((args.out / "summary.txt").read_text())
    return 1 if any("failed" in row for row in read_rows(args.out)) else 0


def _parse() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="(default: all, in their order)")
    parser.add_argument("--seconds", type=float, metavar="N", help="ends by itself within so many")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="for what is found")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to nothing of everything")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="of what is not installed")
    parser.add_argument("--triton-cache", type=Path, metavar="FILE", help="of an earlier run")
    parser.add_argument("--commit", help="of the source, where git cannot say it")
    # For processes of a part, or of some of its attempts.
    parser.add_argument("--run", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu: the shapes are for a GPU; give --tiny")
    if args.run is None:
        _check_run(args, parser)
    return args


def _check_run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.seconds is None or args.seconds < _LEAST_S:
        parser.error(f"--seconds is {args.seconds}; at least {_LEAST_S} are needed")
    args.groups = [group.split("+") for group in args.parts or PARTS]
    for name in [name for group in args.groups for name in group]:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}, only {', '.join(PARTS)}")
        if sum(group.count(name) for group in args.groups) > 1:
            parser.error(f"part {name} is named more than once")
    for name in ("wheels", "triton_cache"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            parser.error(f"--{name.replace('_', '-')} {path}: there is no such path")
    if args.triton_cache and not tarfile.is_tarfile(args.triton_cache):
        parser.error(f"--triton-cache {args.triton_cache} is no tar archive")
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "rows.json").exists():
        parser.error(f"--out {args.out} has the rows.json of another run")
    args.out = args.out.resolve()


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _run(args: argparse.Namespace, scratch: Path, until_s: float) -> None:
    """Run all parts, then pack compiled kernels, even if a signal ends a part."""
    add_rows(args.out, _about(args))
    site = scratch / "site"
    if args.wheels:
        bound_s = min(_WHEELS_S, until_s - time.monotonic())
        _note(args.out, "wheels", bare_machine.install_wheels(args.wheels, site, bound_s))
    kernels = bare_machine.unpack_kernels(args.triton_cache, scratch / "kernels")
    command = [sys.executable, *sys.argv[:1], "--out", str(args.out), "--device", args.device]
    command += ["--tiny"] if args.tiny else []
    run = Run(
        command,
        bare_machine.environment(scratch, site, kernels),
        args.out,
        scratch / "parts",
        until_s,
    )
    run.scratch.mkdir()
    try:
        for group in args.groups:
            run_together({name: PARTS[name].bound_s for name in group}, run)
    finally:
        write_report(args.out, run.folders())
        within_s = until_s - time.monotonic() - _LAST_S
        _note(args.out, "triton-cache", bare_machine.pack_kernels(kernels, args.out, within_s))


def _note(out: Path, what: str, failed: str) -> None:
    """Record a failure before or after the parts, if any."""
    if failed:
        add_rows(out, {"what": "part failed", "part": what, "failed": failed})
        print(f"{what}: {failed}", file=sys.stderr)


def _about(args: argparse.Namespace) -> Row:
    date = time.strftime("%Y-%m-%d")
    return {"what": "run", "date": date, "commit": _commit(args), "arguments": sys.argv[1:]}


def _commit(args: argparse.Namespace) -> str:
    if args.commit:
        return str(args.commit)
    git = shutil.which("git")
    if git is None:
        return "unknown"
    found = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=bare_machine.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def _run_part(args: argparse.Namespace) -> None:
    """Run a part, or some of its attempts, in this process."""
    part, size = PARTS[args.run], TINY if args.tiny else FULL
    if part.attempts is None:
        assert part.rows is not None
        from benchmarks.gpu_bench import machine

        facts = {"what": "facts", **machine.facts(machine.device_of(args.device))}
        if facts not in read_rows(args.out):
            add_rows(args.out, facts)
        rows = part.rows(size, args.device, args.folder)
    elif args.first is None:
        rows = attempts.in_turn(args.folder)
    else:
        made = part.attempts(size, args.device, args.folder)
        attempts.make_attempts(made, args.device, args.first, args.count)
        return
    for row in rows:
        print("  " + ", ".join(f"{name} {_brief(value)}" for name, value in row.items()))
        add_rows(args.out, {"part": args.run, **row})


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]


if __name__ == "__main__":
    sys.exit(main())
