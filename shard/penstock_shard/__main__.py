"""`python -m penstock_shard`: what `penstock shard` starts."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from penstock_shard.command_line import parse_config
from penstock_shard.config import LOG_FORMAT


def main() -> int:
    """Parse, serve, exit."""
    # Until the server's own handlers are there, Ctrl-C ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = parse_config(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # After parsing, so that --help and bad flags answer at once.
    from penstock_shard.server import serve

    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
