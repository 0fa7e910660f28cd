"""`python -m penstock_shard`: what `penstock shard` starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from penstock_common.logs import set_up_logging
from penstock_common.shared_flags import quiet_grpc
from penstock_shard.cli import parse_config
from penstock_shard.distributed.node import serve_node


def main() -> int:
    """Parse, serve, exit."""
    # Until the server installs its own handlers, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # When numpy is imported, here and in the engine, its BLAS starts a thread for each core: a
    # quarter of a start's processor time, for nothing. How many torch has is said by others.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = parse_config(sys.argv[1:])
    set_up_logging(config.log_format, config.log_level)
    if config.node_rank > 0:
        return serve_node(config)
    quiet_grpc()
    # Imported after parsing, so that --help and bad flags answer at once.
    from penstock_shard.server.app import serve

    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
