"""Measures a fleet with twice the load of its capacity and two classes of requests.

    python benchmarks/two_classes.py
    python benchmarks/two_classes.py --shards 8 --upper 0.5 --seconds 60 --seed 1

Shards, clock and policies are those of `fleet.py`: a shard's own engine and scheduler over a
simulated device. Requests come at random times; prompts share nothing. The same seed gives the same
figures on any machine.

There are three runs: the upper class alone; both classes, with `priority` 1 for the lower; and both
in one class, without preemptions. Columns: milliseconds to the first token of the upper class, and
of the lower; output tokens a second of both while requests came; preemptions; the most preemptions
of a sequence; and requests that did not get all their tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.policies import Answer, SimulatedFleet, percentile

from benchmarks import tables
from penstock_client.load_balancing.policies import DEFAULT_POLICY, make_policy

_HEADINGS = (
    *("run", "upper first p50, ms", "p99", "lower first p50", "p99", "tokens/s"),
    *("put down", "unfinished"),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, its time and class."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_upper: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a run's requests; first tokens in seconds."""

    upper_firsts_s: Sequence[float]
    lower_firsts_s: Sequence[float]
    tokens_per_s: float
    preemptions: int
    unfinished: int


def main() -> None:
    args = parse_args()
    arrivals = trace(args.shards, args.load, args.upper, args.seconds, args.seed)
    upper = [each for each in arrivals if each.is_upper]
    runs = (
        ("upper alone", upper, True),
        ("two classes", arrivals, True),
        ("one class", arrivals, False),
    )
    tables.table(*_HEADINGS)
    for name, those, has_classes in runs:
        tables.row(name, *cells(run(those, args.shards, args.seconds, has_classes)))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=kind)
    parser.add_argument("--shards", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--load", type=float, default=2.0, metavar="F", help="of the capacity (2)")
    parser.add_argument("--upper", type=float, default=0.5, metavar="F",
                        help="the upper class's part of the capacity (0.5)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of arrivals (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    return parser.parse_args(argv)


# Requests a second that a shard serves: tokens a second in the run in one class, divided by 196
# tokens of a request.
_CAPACITY_PER_S = 6.2


def trace(shards: int, load: float, upper: float, seconds: float, seed: int) -> list[Arrival]:
    """Draw requests at `load` times the capacity, with `upper` times the capacity in the upper
    class.
    """
    chance = random.Random(f"two classes {seed}")
    arrivals, at_s, rate = [], 0.0, _CAPACITY_PER_S * shards * load
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        prompt = int(chance.lognormvariate(6.6, 0.6))
        output = min(2000, int(chance.lognormvariate(5.1, 0.6)))
        is_upper = chance.random() < upper / load
        arrivals.append(Arrival(at_s, max(16, min(8000, prompt)), max(4, output), is_upper))
    return arrivals


def run(arrivals: Sequence[Arrival], shards: int, seconds: float, has_classes: bool) -> Result:
    """Send the requests, and wait until all have ended."""
    fleet = SimulatedFleet(shards, partial(make_policy, DEFAULT_POLICY))
    answers: list[tuple[Arrival, Answer]] = []

    def send(number: int, arrival: Arrival) -> None:
        prompt = [number % 60_000 + 1, *([2] * (arrival.prompt_tokens - 1))]
        priority = int(has_classes and not arrival.is_upper)
        answer = fleet.submit(prompt, arrival.output_tokens, "", lambda answer: None, priority)
        answers.append((arrival, answer))

    for number, arrival in enumerate(arrivals):
        fleet.after(arrival.at_s, partial(send, number, arrival))
    fleet.run([])
    firsts: dict[bool, list[float]] = {True: [], False: []}
    for arrival, answer in answers:
        firsts[arrival.is_upper].append(answer.first_token_s)
    return Result(
        firsts[True],
        firsts[False],
        fleet.summary(seconds).output_tokens_per_s,
        fleet.preemptions,
        sum(len(answer.token_times_s) != each.output_tokens for each, answer in answers),
    )


def cells(result: Result) -> list[str]:
    firsts = (result.upper_firsts_s, result.lower_firsts_s)
    shown = [
        f"{1000 * percentile(each, share):,.0f}" if each else "-"
        for each in firsts
        for share in (0.5, 0.99)
    ]
    return [*shown, f"{result.tokens_per_s:,.0f}", str(result.preemptions), str(result.unfinished)]


if __name__ == "__main__":
    main()
