"""Runs the child processes of `penstock serve`.

Restarts a child that dies, and ends all children on Ctrl-C. On Linux, children end even if this
process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock_cli.gpus import visible_gpus
from penstock_cli.serve.child_flags import Typed, Unusable, check
from penstock_cli.serve.greeting import Access, greet
from penstock_cli.serve.models import Model, check_models, split_models
from penstock_cli.serve.with_parent import with_parent
from penstock_client.fleet.discovery import authority
from penstock_common.back_off import BackOff
from penstock_common.child_environment import HUB, TRACES, VLLM, child_environment
from penstock_common.flags import OneLineParser, flag, parser_of, usable_key, words_of
from penstock_common.listening import listen
from penstock_common.port_holder import holder_of, why_not
from penstock_common.shared_flags import (
    SERVING,
    SHARD_API_KEY,
    SHARD_PORT,
    USAGE_STATUS,
    ListeningConfig,
    seconds,
)

# Time for a router to stop after the time for its requests.
_STOP_TIMEOUT_S = 15.0
_FIRST_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 10.0
# A child that ran for this time has recovered: its count of deaths starts again.
_STEADY_S = 30.0
_MAX_DEATHS = 5
# Without --shard-port, the number of ports to try for shards, from SHARD_PORT on.
_MOST_PORTS = 1000
_MAX_PORT = 65535
# `_HERE` maps a listening address that means all addresses to one for connecting.
_LOOPBACK = "127.0.0.1"
_HERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

# Variables for shards and for the router, besides those that every child gets.
_SHARD_VARIABLES = (*SHARD_API_KEY, "PENSTOCK_KV_PEER_KEY", *HUB, *VLLM, *TRACES)
_ROUTER_VARIABLES = (
    *("PENSTOCK_API_KEY", "PENSTOCK_API_KEYS_FILE", "PENSTOCK_ADMIN_KEY", "PENSTOCK_RESUME_KEY"),
    *("PENSTOCK_SHARD_", *TRACES),
)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ListeningConfig):
    """Flags of `penstock serve` itself; all others are for shards or the router."""

    port: int = flag(8000, "port", group=SERVING, at_least=1, at_most=_MAX_PORT)
    shutdown_timeout_s: float = seconds(10.0, "time for running requests to finish when this ends")
    api_key: str | None = flag(
        None,
        "key that callers of the router and of its shards must send "
        "(default: PENSTOCK_API_KEY, or none)",
        metavar="KEY",
        read=usable_key,
    )
    shards: int = flag(1, "number for each model", group="shards", at_least=1)
    tensor_parallel_size: int = flag(
        1, "GPUs that the model of each shard is split over", at_least=1
    )
    shard_port: int | None = flag(
        None,
        "port of the first shard; the others have those after it "
        f"(default: {SHARD_PORT}, and where one is taken the next)",
        at_least=1,
        at_most=_MAX_PORT,
    )


@dataclass(slots=True)
class _Child:
    name: str
    command: list[str]
    # Names of our environment variables that the child gets; below, additional ones, such as
    # secrets, which process lists would show among arguments.
    variables: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    stop_timeout_s: float = _STOP_TIMEOUT_S
    process: asyncio.subprocess.Process | None = None
    deaths: int = 0
    started_s: float = field(default=0.0)


def main(arguments: Sequence[str]) -> int:
    models, arguments = split_models(arguments)
    router_flags: Sequence[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, router_flags = arguments[:split], arguments[split + 1 :]
    config, shard_flags = _parsed(arguments, len(models))
    children = functools.partial(_children, config, models, shard_flags, router_flags)
    num_shards = len(models) * config.shards
    try:
        check_models(models, shard_flags)
        # Check flags before ports, because one flag may be --help. Check one shard of each model.
        *shards, router = children(_usual_ports(config, num_shards))
        asked = [_typed(shard) for shard in shards[:: config.shards]]
        if not check(_typed(router), asked, _parser().flags):
            return 0
        if taken := _first_taken(config.host, config.port, "--port"):
            raise Unusable(taken)
        found = children(_shard_ports(config, num_shards))
    except Unusable as problem:
        _say(str(problem))
        return USAGE_STATUS
    names = [model.name for model in models]
    return asyncio.run(_serve(found, _access(config, router_flags), names))


def _access(config: ServeConfig, router_flags: Sequence[str]) -> Access:
    scheme = "https" if config.tls_cert_file else "http"
    here = authority(_HERE.get(config.host, config.host), config.port)
    key = config.api_key or os.environ.get("PENSTOCK_API_KEY")
    return Access(f"{scheme}://{here}", _needs_key(config.api_key, router_flags), key)


def _needs_key(api_key: str | None, router_flags: Sequence[str]) -> bool:
    variables = ("PENSTOCK_API_KEY", "PENSTOCK_API_KEYS_FILE")
    return (
        bool(api_key)
        or any(os.environ.get(variable) for variable in variables)
        or any(flag.partition("=")[0] in ("--api-key", "--api-keys-file") for flag in router_flags)
    )


def _parsed(arguments: Sequence[str], num_models: int = 1) -> tuple[ServeConfig, list[str]]:
    parser = _parser()
    given, shard_flags = parser.parse_known_args(arguments)
    config = ServeConfig(**vars(given))
    num_shards = num_models * config.shards
    if (last_port := _usual_ports(config, num_shards)[-1]) > _MAX_PORT:
        parser.error(f"argument --shard-port: must be from 1 to {_MAX_PORT} for every shard, and "
                     f"the last of {num_shards} has {last_port}")  # fmt: skip
    if too_few := _too_few_gpus(num_shards, config.tensor_parallel_size):
        parser.error(f"argument --tensor-parallel-size: {too_few}")
    return config, shard_flags


def _say(line: str) -> None:
    print(f"penstock serve: {line}", file=sys.stderr, flush=True)


def _parser() -> OneLineParser:
    parser = parser_of(
        ServeConfig,
        "penstock serve",
        "Serve models on this machine: a router, and a shard or more of each, restarted when they "
        "die.",
    )
    parser.usage = "penstock serve [MODEL ...] [FLAGS] [-- FLAGS OF THE ROUTER]"
    parser.epilog = (
        "A MODEL, which comes first, is a directory, a hub id or a GGUF file (default: the "
        "built-in toy model); as NAME=MODEL it gets another name than its own. Other flags are "
        "handed to the shards of all: see `penstock shard --help`; those after `--` to the router: "
        "see `penstock router --help`. Several shards take the GPUs in turn, each as many as its "
        "model is split over."
    )
    return parser


def _children(
    config: ServeConfig,
    models: Sequence[Model],
    shard_flags: list[str],
    router_flags: Sequence[str],
    shard_ports: Sequence[int],
) -> list[_Child]:
    # Give all children the same key: otherwise a shard would use the key in our own environment.
    key = {} if config.api_key is None else {"PENSTOCK_API_KEY": config.api_key}
    size = config.tensor_parallel_size
    gpus = itertools.cycle(
        ({"CUDA_VISIBLE_DEVICES": ",".join(group)} if group else {}) | key
        for group in _groups(visible_gpus() if len(shard_ports) > 1 else [], size) or [[]]
    )
    if size > 1:
        shard_flags = [*shard_flags, "--tensor-parallel-size", str(size)]
    ports = iter(shard_ports)
    shards: list[_Child] = []
    for model in models:
        of_model = list(itertools.islice(ports, config.shards))
        shards += _shards(of_model, [*model.flags, *shard_flags], gpus)
    addresses = ",".join(f"{_LOOPBACK}:{port}" for port in shard_ports)
    listening = words_of(config, ListeningConfig)
    return [
        *shards,
        _Child(
            "router",
            _python("penstock_router", "--shards", addresses, *listening, *router_flags),
            variables=_ROUTER_VARIABLES,
            environment=key,
            stop_timeout_s=config.shutdown_timeout_s + _STOP_TIMEOUT_S,
        ),
    ]


def _shards(
    ports: Sequence[int], flags: Sequence[str], environments: Iterator[dict[str, str]]
) -> Iterator[_Child]:
    """Yield the shards of one model. If they copy KV blocks, they are each other's peers."""
    addresses = [f"{_LOOPBACK}:{port}" for port in ports]
    is_peer = len(addresses) > 1 and _copies_blocks(flags)
    peer_key = {"PENSTOCK_KV_PEER_KEY": secrets.token_hex(32)} if is_peer else {}
    for address, port in zip(addresses, ports, strict=True):
        peers = ["--kv-peers", *_others(address, addresses)] if is_peer else []
        yield _Child(
            f"shard {address}",
            _python("penstock_shard", "--port", str(port), *flags, *peers),
            variables=_SHARD_VARIABLES,
            environment={**next(environments), **peer_key},
        )


def _copies_blocks(shard_flags: Sequence[str]) -> bool:
    """True if shards have memory for copies of KV blocks, and the flags name no peers."""
    names = {flag.partition("=")[0] for flag in shard_flags}
    return "--kv-host-bytes" in names and "--kv-peers" not in names


def _others(address: str, addresses: Sequence[str]) -> list[str]:
    return [other for other in addresses if other != address]


def _too_few_gpus(num_shards: int, size: int) -> str:
    """Return an error text if shards need several GPUs each and too few exist. Shards that need one
    GPU may share it, and a single shard checks its GPUs itself.
    """
    if num_shards == 1 or size == 1:
        return ""
    found, needed = len(visible_gpus()), num_shards * size
    if not 0 < found < needed:
        return ""
    return (
        f"{num_shards} shards with {size} GPUs each need {needed}, and {found} can be seen; "
        "lower it or --shards, or for shards on cpu hide them with CUDA_VISIBLE_DEVICES="
    )


def _groups(gpus: list[str], size: int) -> list[list[str]]:
    """Split the GPUs into groups of `size`; the rest is not used."""
    count = len(gpus) // size
    return [gpus[index * size : (index + 1) * size] for index in range(count)]


def _usual_ports(config: ServeConfig, count: int) -> list[int]:
    first: int = SHARD_PORT if config.shard_port is None else config.shard_port
    return list(range(first, first + count))


def _shard_ports(config: ServeConfig, count: int) -> list[int]:
    """Return the ports from --shard-port on; without it, the next free ports, with a message if
    these are unusual. Raise `Unusable` if too few ports are free.
    """
    usual = _usual_ports(config, count)
    if config.shard_port is not None:
        if taken := _first_taken(_LOOPBACK, usual[0], "--shard-port", count=count):
            raise Unusable(taken)
        return usual
    candidates = range(SHARD_PORT, SHARD_PORT + _MOST_PORTS)
    free = (port for port in candidates if not _first_taken(_LOOPBACK, port, "--shard-port"))
    ports = list(itertools.islice(free, count))
    if len(ports) < count:
        tried = f"{SHARD_PORT} to {candidates[-1]}"
        raise Unusable(f"fewer than {count} ports from {tried} are free for shards; say "
                       "with --shard-port where there are")  # fmt: skip
    if ports != usual:
        taken_port = next(port for port in usual if port not in ports)
        holder = holder_of(taken_port)
        which = f"port {taken_port} is taken{f' by {holder}' if holder else ''}"
        _say(f"{which}; ports of the shards: {', '.join(map(str, ports))}")
    return ports


def _first_taken(host: str, port: int, flag: str, *, count: int = 1) -> str:
    """Return an error text if one of the ports is in use, or "".

    Checked before anything starts: another process at the router's port would answer in its place.
    """
    for number in range(port, port + count):
        try:
            # Listen exactly as the router does.
            listen(host, number).close()
        except socket.gaierror:
            return f"argument --host: {host!r} is no name or address of a host"
        except OSError as error:
            wrong = "--host" if error.errno == errno.EADDRNOTAVAIL else flag
            where = authority(host, number)
            return f"cannot listen on {where}: {why_not(error, number)}; give another {wrong}"
    return ""


def _typed(child: _Child) -> Typed:
    # The first 3 words are Python, -m and the module.
    return Typed(child.command[3:], child.variables, child.environment)


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


async def _serve(children: list[_Child], access: Access, models: Sequence[str] = ()) -> int:
    """Run until a signal, or until a child cannot be kept running. Return the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in _stop_signals():
        loop.add_signal_handler(signum, stop.set)
    greeting = asyncio.create_task(greet(access, models))
    keepers = [asyncio.create_task(_keep(child)) for child in children]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
    for task in (greeting, stopped, *keepers):
        task.cancel()
    for signum in (signal.SIGINT, signal.SIGTERM):
        # A second Ctrl-C does not wait for running requests. A second SIGHUP is ignored: a closed
        # terminal often sends two.
        loop.add_signal_handler(signum, _kill_all, children)
    if stopped in done:
        # Writing fails if the terminal is closed.
        with contextlib.suppress(OSError):
            _say("ending as soon as running requests have; Ctrl-C again ends them at once")
    # End the router first: its requests need the shards to finish.
    for child in reversed(children):
        await _end(child)
    if stopped in done:
        return 0
    failures = [task.result() for task in keepers if task in done]
    # Print the reasons after all other log lines.
    for _, reason in failures:
        _say(f"ended, as {reason}")
    return max(status for status, _ in failures)


def _stop_signals() -> list[signal.Signals]:
    """Return the signals of Ctrl-C, of `kill` and, without nohup, of a closed terminal."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return signals


async def _keep(child: _Child) -> tuple[int, str]:
    """Run a child, and restart it when it dies. If a restart is pointless, return the exit status
    and the reason.
    """
    back_off = BackOff(_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S)
    while True:
        # Start a session, so that Ctrl-C reaches only us and we end children in the right order.
        child.process = await asyncio.create_subprocess_exec(
            *with_parent(child.command),
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            env={**child_environment(*child.variables), **child.environment},
        )
        child.started_s = time.monotonic()
        status = await child.process.wait()
        if time.monotonic() - child.started_s > _STEADY_S:
            child.deaths = 0
            back_off.reset()
        child.deaths += 1
        if status == USAGE_STATUS or child.deaths >= _MAX_DEATHS:
            return USAGE_STATUS if status == USAGE_STATUS else 1, _last_words(child, status)
        _say(f"the {child.name} {_end_of(status)}, starting it again in {back_off.wait_s:g} s")
        await asyncio.sleep(back_off.wait_s)
        back_off.lengthen()


def _last_words(child: _Child, status: int) -> str:
    if status == USAGE_STATUS:
        command = child.command[2].replace("_", " ")
        return f"the {child.name} cannot start: the line above that begins `{command}:` says why"
    return (
        f"the {child.name} died {child.deaths} times in a row; the last time it {_end_of(status)}; "
        "its lines above say more"
    )


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    if -status == signal.SIGKILL:
        return "was killed (by somebody, or by the system if memory ran out)"
    return f"was ended by {signal.Signals(-status).name}"


async def _end(child: _Child) -> None:
    process = child.process
    if process is None or process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(child.stop_timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _kill_all(children: list[_Child]) -> None:
    for child in children:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
