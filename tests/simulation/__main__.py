"""`python -m simulation`: histories from seeds; the exit status is 1 as soon as one fails."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
import time

from simulation.history import Report, run
from simulation.plan import Plan, draw
from simulation.shorten import shorten


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    flags.add_argument("--seeds", type=int, default=300, help="how many histories")
    flags.add_argument("--first", type=int, default=0, help="the first seed")
    flags.add_argument(
        "--replay", type=int, help="only this seed, made shorter if it fails; tell what happens"
    )
    flags.add_argument(
        "--no-scenes", action="store_true", help="replay without what comes after troubles"
    )
    flags.add_argument("--keep-going", action="store_true", help="after a failure")
    asked = flags.parse_args()
    if asked.seeds < 1:
        flags.error("--seeds: at least 1")
    logging.disable()
    gc.disable()
    if asked.replay is not None:
        return _replay(draw(asked.replay, has_scenes=not asked.no_scenes))
    return _run_all(range(asked.first, asked.first + asked.seeds), keep_going=asked.keep_going)


def _replay(plan: Plan) -> int:
    report = run(plan)
    if report.faults:
        print(_said(report), "made shorter:", sep="\n", flush=True)
        report = shorten(report)
    return _tell(report.plan)


def _tell(plan: Plan) -> int:
    """Let it happen again, and tell what does; whether it failed."""
    print(f"{plan.num_shards} shards, {plan.policy}, windows of {plan.window_bytes} bytes")
    for part in (plan.config, plan.kind, plan.next_kind, *plan.arrivals, *plan.troubles):
        print(_written(part))
    report = run(plan, lambda text, now_s: print(f"{now_s:8.3f}  {text}"))
    print(_said(report))
    return int(bool(report.faults))


def _run_all(seeds: range, *, keep_going: bool) -> int:
    began_s, failed = time.perf_counter(), 0
    seconds, finished, continued = 0.0, 0, 0
    for count, seed in enumerate(seeds, 1):
        report = run(draw(seed))
        if count % 50 == 0:
            gc.collect()
        seconds, finished = seconds + report.seconds, finished + report.finished
        continued += report.continued
        if report.faults:
            failed += 1
            print(f"after {count} seeds: {_said(report)}", flush=True)
            if not keep_going:
                _tell(shorten(report).plan)
                return 1
    took_s = time.perf_counter() - began_s
    print(
        f"{len(seeds)} histories, {failed} failed: {60 * len(seeds) / took_s:.0f} a minute; "
        f"{seconds / len(seeds):.1f} s each, {finished} answers, continued {continued} times"
    )
    return bool(failed)


def _written(part: object) -> str:
    """A dataclass without what is as usual."""
    if not dataclasses.is_dataclass(part):
        return repr(part)
    values = [(f.name, getattr(part, f.name), f.default) for f in dataclasses.fields(part)]
    unusual = [(name, value) for name, value, usual in values if value not in (usual, ())]
    said = (f"{name}={_written(value)}" for name, value in unusual)
    return f"{type(part).__name__}({', '.join(said)})"


def _said(report: Report) -> str:
    lines = [f"seed {report.plan.seed} {'failed' if report.faults else 'holds'}"]
    return "\n  ".join([*lines, *report.faults])


if __name__ == "__main__":
    sys.exit(main())
