"""Command line -> one frozen `ShardConfig`. The only place that reads arguments and environment.

Flags that mean the same as vLLM's have the same names, so that users' habits carry over.
"""

from __future__ import annotations

import argparse
from collections import abc
from dataclasses import fields

from penstock_common.flags import OneLineParser
from penstock_common.shared_flags import (
    SHARD_PORT,
    add_api_key,
    add_observing_flags,
    tracing_of,
)
from penstock_common.tls import TlsFilesUnusable, check_server_files
from penstock_shard.adapter_flags import add_adapter_flags, check_adapter_flags
from penstock_shard.config import ShardConfig
from penstock_shard.parallel_flags import add_parallel_flags, check_parallel_flags

# Draft tokens further ahead are hardly ever accepted.
_MOST_DRAFTS = 64


def parse_config(argv: abc.Sequence[str]) -> ShardConfig:
    """Parse the command line of a shard; exits with status 2 and one line on a bad value."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.runner == "fake" and args.enforce_eager:
        parser.error("--enforce-eager: the fake runner has no eager mode")
    check_parallel_flags(parser, args)
    _check_tls(parser, args)
    check_adapter_flags(parser, args)
    if not args.enable_chunked_prefill:
        parser.error("--no-enable-chunked-prefill: long prompts are always computed in chunks")
    _check_sizes(parser, args)
    given = vars(args) | {
        "served_model_names": tuple(args.served_model_name or ()),
        "loras": tuple(args.lora),
        "kv_memory_bytes": args.kv_memory,
        "tracing": tracing_of(parser, args.otlp_endpoint),
    }
    # All other fields have the names of their flags.
    return ShardConfig(**{field.name: given[field.name] for field in fields(ShardConfig)})


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="penstock shard",
        description="Serve one model over gRPC: token ids in, token ids out.",
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_server_flags(parser.add_argument_group("server"))
    observing = parser.add_argument_group("metrics, logs and traces")
    observing.add_argument(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="serve Prometheus metrics over HTTP on this port of --host (default: nowhere)",
    )
    add_observing_flags(
        observing,
        log_requests=False,
        log_requests_help="a line for each request; the router's log has one too",
    )
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_exactness_flags(parser.add_argument_group("equal results"))
    add_parallel_flags(parser.add_argument_group("a model over several devices"))
    _add_scheduling_flags(parser.add_argument_group("scheduling"))
    _add_speculation_flags(parser.add_argument_group("speculation"))
    _add_cache_flags(parser.add_argument_group("KV cache"))
    _add_constraint_flags(parser.add_argument_group("constraints on outputs"))
    add_adapter_flags(parser.add_argument_group("adapters"))
    fake = parser.add_argument_group("fake runner (no torch, no weights)")
    fake.add_argument(
        "--step-ms",
        type=_non_negative_float,
        default=20.0,
        metavar="MS",
        help="how long a step takes (default: %(default)s)",
    )
    fake.add_argument(
        "--fake-eos-rate",
        type=_fraction,
        default=0.0,
        metavar="P",
        help="probability that a token ends the sequence (default: %(default)s)",
    )
    fake.add_argument(
        "--fake-weights",
        default="fake",
        metavar="NAME",
        help="another name gives other tokens (default: %(default)s)",
    )
    fake.add_argument(
        "--fake-crash-on",
        type=_non_negative_int,
        metavar="ID",
        help="end the engine at the tenth token of a sequence with this id in its prompt",
    )
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="PATH_OR_HUB_ID",
        help="a directory or a hub id (default: the built-in toy model)",
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub model")
    group.add_argument(
        "--download-dir", metavar="DIR", help="where hub models are kept (default: HF_HOME)"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="name clients ask for, and further aliases (default: --model)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a jinja chat template instead of the model's own"
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model"
    )
    group.add_argument(
        "--embeddings",
        choices=("auto", "last", "mean"),
        default="auto",
        help="serve embeddings, of the last token or the mean of all tokens "
        "(default: as the model's modules.json says, where there is one)",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="dummy: random weights, only the configuration is read",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument("--port", type=_port, default=SHARD_PORT, help="port (default: %(default)s)")
    add_api_key(group, "refuse calls without it")
    group.add_argument(
        "--tls-cert-file",
        "--ssl-certfile",
        metavar="FILE",
        help="speak TLS with this certificate, read again when it changes",
    )
    group.add_argument("--tls-key-file", "--ssl-keyfile", metavar="FILE", help="and its key")
    group.add_argument(
        "--tls-client-ca-file",
        "--ssl-ca-certs",
        metavar="FILE",
        help="refuse clients without a certificate of these authorities (mutual TLS)",
    )
    group.add_argument(
        "--stall-timeout-s",
        type=_non_negative_float,
        default=10.0,
        metavar="S",
        help="restart an engine that gives no sign of life for so long, or whose step takes so "
        "long and ten times as long as expected (default: %(default)s)",
    )
    group.add_argument(
        "--max-restarts",
        type=_positive_int,
        default=5,
        metavar="N",
        help="give up after this many failed engine starts in a row (default: %(default)s)",
    )
    group.add_argument(
        "--drain",
        choices=("migrate", "finish"),
        default="migrate",
        help="on SIGTERM, move running requests to other shards at once, or let them finish here; "
        "those that no other shard can continue finish (default: %(default)s)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=_non_negative_float,
        default=30.0,
        metavar="S",
        help="on SIGTERM, how long that may take (default: %(default)s)",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runner",
        choices=("model", "fake"),
        default="model",
        help="what computes tokens (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: cuda where there is one",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="auto: the model's own on cuda; on cpu weights in float16 and arithmetic in float32",
    )
    group.add_argument(
        "--quantization",
        "--quantize",
        choices=("int8", "fp8", "int4"),
        help="round weights at load: int8 with a scale for each output (cpu), fp8 with a scale "
        "for each output, activations too (GPU), int4 in groups of 128 by torchao (GPU); default: "
        "as precise as stored, fp8 checkpoints in fp8 where the GPU has it",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "float32", "float16", "fp8"),
        help="auto: as precise as activations, on cpu as weights; fp8 needs the attention backend "
        "triton or sdpa",
    )
    group.add_argument(
        "--threads",
        type=_positive_int,
        metavar="N",
        help="compute threads on cpu (default: one less than the cores, or the quota)",
    )
    group.add_argument(
        "--attention-backend",
        choices=("auto", "cpu", "sdpa", "flash_attn", "torch_varlen", "triton"),
        default="auto",
        help="cpu: our C kernels; sdpa: plain torch (default: the best one here that supports the "
        "model)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="do not use CUDA graphs",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=_positive_fraction,
        default=0.9,
        metavar="F",
        help="share of GPU memory to use (default: %(default)s)",
    )


def _add_exactness_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--exact",
        action="store_true",
        help="batch invariance: a token's logits have the same bits in any batch, so that requests "
        "continue on another shard bit for bit; slower on a GPU; on a cpu it is so anyway; "
        "refused if a check at load finds a difference",
    )


def _add_scheduling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-model-len",
        type=_positive_int,
        metavar="TOKENS",
        help="longest prompt plus output (default: the model's context)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=_positive_int,
        default=256,
        metavar="N",
        help="most requests in one step (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive_int,
        metavar="N",
        help="most tokens computed in one step (default: 512 on cpu, 2048 on cuda)",
    )
    group.add_argument(
        "--max-prefill-tokens",
        type=_positive_int,
        metavar="N",
        help="most prompt tokens in a step while other requests decode; chunks of a longer prompt "
        "take no longer than the decodes (default: half of --max-num-batched-tokens)",
    )
    group.add_argument(
        "--aging-s",
        type=_positive_float,
        default=30.0,
        metavar="S",
        help="a request that has waited so long for its next token goes first, whatever its "
        "priority (default: %(default)s)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cannot be turned off: long prompts are computed in chunks",
    )
    group.add_argument(
        "--max-queued-requests",
        type=_positive_int,
        default=1024,
        metavar="N",
        help="refuse beyond this many waiting requests (default: %(default)s)",
    )
    group.add_argument(
        "--max-queued-tokens",
        type=_positive_int,
        default=4_000_000,
        metavar="N",
        help="refuse beyond this many waiting prompt tokens (default: %(default)s)",
    )
    group.add_argument(
        "--max-logprobs",
        type=_positive_int,
        default=20,
        metavar="N",
        help="most log-probabilities a request may ask for (default: %(default)s)",
    )


def _add_speculation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speculative-tokens",
        type=_draft_length,
        default=0,
        metavar="N",
        help="n-gram speculative decoding: draft up to N tokens from the sequence itself; the "
        f"output is the same, faster where text repeats (default: 0, at most {_MOST_DRAFTS})",
    )


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse KV blocks of equal prefixes",
    )
    group.add_argument(
        "--block-size",
        type=_positive_int,
        metavar="TOKENS",
        help="tokens in a KV block (default: what the attention backend wants)",
    )
    group.add_argument(
        "--kv-blocks",
        type=_positive_int,
        metavar="N",
        help="number of KV blocks (default: from free memory)",
    )
    group.add_argument(
        "--kv-memory", type=_bytes, metavar="BYTES", help="memory for KV blocks, as 512M or 2G"
    )
    group.add_argument(
        "--check-integrity",
        action="store_true",
        help="whenever the engine is idle, count again which request has which KV block; an engine "
        "whose counts differ logs the difference, ends and is started again",
    )


def _add_constraint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-constraint-bytes",
        type=_bytes,
        default=2**18,
        metavar="BYTES",
        help="longest schema, regex, grammar or list of choices (default: 256K)",
    )
    group.add_argument(
        "--constraint-timeout-s",
        type=_positive_float,
        default=2.0,
        metavar="S",
        help="refuse a constraint that takes a processor longer to compile (default: %(default)s)",
    )
    group.add_argument(
        "--constraint-memory-bytes",
        type=_bytes,
        default=2**28,
        metavar="BYTES",
        help="and one that takes more memory, as 512M or 2G (default: 256M)",
    )
    group.add_argument(
        "--constraint-threads",
        type=_positive_int,
        default=1,
        metavar="N",
        help="threads of the engine that compile constraints and fill their masks "
        "(default: %(default)s)",
    )


def _check_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.kv_blocks is not None and args.kv_memory is not None:
        parser.error("--kv-blocks and --kv-memory exclude each other; give one")
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < args.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens {args.max_num_batched_tokens}: must be at least "
            f"--max-num-seqs ({args.max_num_seqs}), or some requests would never move"
        )
    if args.block_size is not None and args.block_size % 16:
        parser.error(f"--block-size {args.block_size}: must be a multiple of 16")


def _check_tls(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the TLS files before anything starts."""
    cert, key, client_ca = args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file
    if (cert is None) != (key is None):
        parser.error("--tls-cert-file and --tls-key-file: give both or neither")
    if client_ca is not None and cert is None:
        parser.error("--tls-client-ca-file: without --tls-cert-file there is no TLS")
    try:
        if cert is not None:
            check_server_files(cert, key, client_ca)
    except TlsFilesUnusable as error:
        parser.error(f"TLS: {error}")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None


def _positive_int(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _non_negative_int(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def _draft_length(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= _MOST_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and {_MOST_DRAFTS}")
    return value


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 65535")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a number") from None


def _non_negative_float(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number, at least 0")
    return value


def _positive_float(text: str) -> float:
    value = _non_negative_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return value


def _positive_fraction(text: str) -> float:
    value = _fraction(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def _bytes(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a size such as 512M or 2G")
    return int(digits) * unit
