"""The `penstock` command: starts processes, or runs a small tool of this package.

Router and shard are started as `python -m ...`, and a subcommand's module is imported at its use,
so that each process loads only the modules that it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_USAGE = """\
usage: penstock COMMAND [ARGUMENTS]

LLM serving, split into a router (HTTP and text) and shards (tensors).

run it
  serve [MODEL]   a router and its shards on this machine, restarted when they die
  router          a router: the HTTP API in front of shards
  shard           a shard: one model behind gRPC

use it
  chat            talk to a model in the terminal
  info            what a shard serves, and how busy it is; of a router, its models
  health          for probes: exit status 0 when healthy
  bench           load on a router: throughput, time to first token, inter-token latency
  replay          generate again what an audit log recorded, and compare
  translate       a command line of vLLM or TGI as one of penstock
  keys            make, list and revoke API keys of a router

`penstock COMMAND --help` says more, `penstock --version` which version this is.
"""

_PROCESSES = {"router": "penstock_router", "shard": "penstock_shard"}
_TOOLS = {
    "serve": "penstock_cli.serve.serve",
    "chat": "penstock_cli.chat",
    "info": "penstock_cli.info",
    "health": "penstock_cli.health",
    "bench": "penstock_cli.bench.bench",
    "replay": "penstock_cli.replay",
    "translate": "penstock_cli.translate.translate",
    "keys": "penstock_cli.keys",
}


def main() -> None:
    # Child processes must import nothing from their working directory.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from penstock_common.version import VERSION

        print(f"penstock {VERSION}")
        return 0
    command, arguments = argv[0], argv[1:]
    if command in _PROCESSES:
        _become(_PROCESSES[command], arguments)
    if command not in _TOOLS:
        from difflib import get_close_matches

        close = get_close_matches(command, [*_PROCESSES, *_TOOLS], n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        said = f"penstock: no command {command!r}{meant} (`penstock --help` lists them)"
        print(said, file=sys.stderr)
        return 2
    return _run_tool(_TOOLS[command], arguments)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals and exit status need no forwarding."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _run_tool(module: str, arguments: Sequence[str]) -> int:
    from penstock_common.shared_flags import quiet_grpc

    quiet_grpc()
    try:
        status: int = importlib.import_module(module).main(arguments)
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        from penstock_common.version import why_not_imported

        print(f"penstock: {why_not_imported(error, 'client')}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    main()
