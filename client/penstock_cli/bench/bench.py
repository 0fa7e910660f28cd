"""The command line of `penstock bench`. `load.py` sends requests, `report.py` summarizes.

Works with any server that has `/v1/completions` or `/v1/chat/completions`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from penstock_cli.arguments import (
    MODEL_HELP,
    add_url,
    parser_for,
    positive_int,
    seconds,
)
from penstock_cli.bench.load import Answer, Lengths, Load, Plan, Server, run
from penstock_cli.bench.report import Objective, plot, summarize, table
from penstock_cli.router_errors import one_line
from penstock_common.flags import choice, number
from penstock_common.logs import escape
from penstock_common.version import how_to_install

_DEFAULT_STREAMS = 16
_DEFAULT_REQUESTS = 64
# Default prompt words and output tokens, by --lengths; "sharegpt" takes them as medians.
_DEFAULT_LENGTHS = {"fixed": (128, 64), "sharegpt": (64, 128)}
_PROGRESS_PERIOD_S = 0.25
_positive = number(float, above=0)
_ANSWER_FIELDS = {"ignore_eos": True, "stream_options": {"include_usage": True}}

_EPILOG = """\
examples:
  penstock bench --streams 1,4,16 --plot curve.png
  penstock bench --rate 2,4,8 --duration 60 --lengths sharegpt --slo-ttft-ms 500 --slo-tpot-ms 50
  penstock bench --url http://127.0.0.1:8080 --model NAME --body '{"temperature": 0}'

A closed loop (--streams) sends the next request when one is answered: it finds the throughput. An
open loop (--rate) sends at random moments whatever the answers, as a crowd does, and counts
latency from the moment a request was due: it finds what users wait for.
"""


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.rate and math.inf in args.rate and args.duration:
        parser.error("argument --rate: inf sends all at once and needs --requests, not --duration")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"argument --plot: needs matplotlib; {how_to_install('bench')}")
    # All loads draw from one generator, so no prompt repeats and none is in the server's prefix
    # cache.
    rng = random.Random(args.seed)
    summaries = []
    for load in _loads(args):
        summaries.append(asyncio.run(_measure(load, args, rng)))
        _show(summaries[-1], args.json)
    try:
        _write_files(summaries, args)
    except OSError as error:
        print(f"penstock bench: {one_line(error)}", file=sys.stderr)
        return 1
    return 0 if all(summary["requests"] and not summary["failed"] for summary in summaries) else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("bench", "Measure a server under streaming load, as its users see it.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add_url(parser)
    parser.add_argument("--model", metavar="NAME", help=MODEL_HELP)
    _add_load(parser)
    _add_requests(parser)
    _add_results(parser)
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load", "Several loads, as in --streams 1,4,16, run one after another."
    )
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--streams",
        type=_list_of(positive_int),
        metavar="N[,N...]",
        help=f"closed loop: requests at once (default: {_DEFAULT_STREAMS})",
    )
    loop.add_argument(
        "--rate",
        "--rates",
        type=_list_of(_rate),
        metavar="R[,R...]",
        help="open loop: requests a second on average; inf: all at once",
    )
    end = group.add_mutually_exclusive_group()
    end.add_argument("--requests", type=positive_int, metavar="N",
                     help=f"requests in each load (default: {_DEFAULT_REQUESTS})")  # fmt: skip
    end.add_argument("--duration", type=seconds, metavar="S",
                     help="send for so long instead, then wait for what is in flight")  # fmt: skip


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--lengths", **choice(_DEFAULT_LENGTHS), default="fixed",
        help="sharegpt: log-normal, as in chats people have shared (sigma 1.4 for prompts, 1.0 "
        "for outputs, 4 to 1024) with the two below as medians (default: %(default)s)")  # fmt: skip
    add("--prompt-words", type=positive_int, metavar="N",
        help="words in a prompt, about one token each (default: 128; 64 for sharegpt)")  # fmt: skip
    add("--output-tokens", type=positive_int, metavar="N",
        help="tokens to generate, exactly (default: 64; 128 for sharegpt)")  # fmt: skip
    add("--seed", type=number(int), default=0, metavar="N",
        help="seed of prompts, lengths and arrivals (default: %(default)s)")  # fmt: skip
    add("--body", type=_fields, default={}, metavar="JSON",
        help="further fields of each request; null omits a field that a server does not know, "
        'as in \'{"ignore_eos": null, "stream_options": null}\'')  # fmt: skip
    add("--chat", action="store_true", help="send chats of one message (/v1/chat/completions)")
    add("--no-done", action="store_true",
        help="the server does not end streams with [DONE]")  # fmt: skip
    add("--no-keepalive", action="store_true", help="a new connection for each request")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--slo-ttft-ms", type=_positive, metavar="MS",
        help="objective for time to first token; shows the share within it")  # fmt: skip
    add("--slo-tpot-ms", type=_positive, metavar="MS",
        help="objective: mean time per output token after the first")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object a load, each on its line")
    add("--output", type=_new_file, metavar="FILE", help="also write all of them as JSON")
    add("--plot", type=_new_file, metavar="FILE", help="also draw them, as PNG")


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _rate(text: str) -> float:
    return math.inf if text == "inf" else _positive(text)


def _fields(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")


def _new_file(text: str) -> Path:
    """Refuse a path that cannot be a new file."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, not {text!r}")
    return path


def _loads(args: argparse.Namespace) -> list[Load]:
    if args.rate:
        return [Load(open_loop=True, level=rate) for rate in args.rate]
    return [Load(open_loop=False, level=n) for n in args.streams or [_DEFAULT_STREAMS]]


def _lengths(args: argparse.Namespace) -> Lengths:
    prompt_words, output_tokens = _DEFAULT_LENGTHS[args.lengths]
    return Lengths(
        args.prompt_words or prompt_words,
        args.output_tokens or output_tokens,
        spread=args.lengths == "sharegpt",
    )


def _plan(load: Load, args: argparse.Namespace) -> Plan:
    if args.duration:
        return Plan(load, _lengths(args), duration_s=args.duration)
    return Plan(load, _lengths(args), requests=args.requests or _DEFAULT_REQUESTS)


def _server(args: argparse.Namespace) -> Server:
    fields = {"model": args.model, **_ANSWER_FIELDS, **args.body}
    given = {name: value for name, value in fields.items() if value is not None}
    return Server(
        args.url,
        given,
        args.api_key,
        keepalive=not args.no_keepalive,
        sends_done=not args.no_done,
        chat=args.chat,
    )


async def _measure(load: Load, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    answers: list[Answer] = []
    cpu_s = time.process_time()
    async with _progress(load, answers):
        wall_s = await run(_plan(load, args), _server(args), rng, answers)
    objective = None
    if args.slo_ttft_ms or args.slo_tpot_ms:
        objective = Objective(args.slo_ttft_ms or math.inf, args.slo_tpot_ms or math.inf)
    return summarize(
        load,
        answers,
        wall_s=wall_s,
        client_cpu_s=time.process_time() - cpu_s,
        objective=objective,
    )


@contextlib.asynccontextmanager
async def _progress(load: Load, answers: Sequence[Answer]) -> AsyncIterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_renew_line(load, answers))
    try:
        yield
    finally:
        task.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


async def _renew_line(load: Load, answers: Sequence[Answer]) -> None:
    begin_s = time.perf_counter()
    while True:
        failed = sum(1 for answer in answers if answer.error)
        elapsed_s = time.perf_counter() - begin_s
        line = f"{load.name}: {elapsed_s:.0f} s, {len(answers)} answered, {failed} failed"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_PROGRESS_PERIOD_S)


def _show(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary), flush=True)
    elif summary["requests"]:
        print(table(summary), flush=True)
    else:
        # Usually no server is running: a table of zeros would hide that.
        reason = summary["first_error"] or "none was sent in this time"
        print(escape(f"penstock bench: no request succeeded: {reason}"), file=sys.stderr)


def _write_files(summaries: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.output:
        lengths = _lengths(args)
        settings = {
            "url": args.url,
            "model": args.model,
            "seed": args.seed,
            "body": args.body,
            "chat": args.chat,
            "lengths": args.lengths,
            "prompt_words": lengths.prompt_words,
            "output_tokens": lengths.output_tokens,
        }
        document = {"settings": settings, "loads": list(summaries)}
        args.output.write_text(json.dumps(document, indent=2) + "\n")
    if args.plot:
        plot(summaries, args.plot)
