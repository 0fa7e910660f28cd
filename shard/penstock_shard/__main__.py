"""The module that `penstock shard` runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from penstock_common.child_process.process_group import adopt_orphans
from penstock_common.logs import end_log, set_up_logging
from penstock_common.shared_flags import USAGE_STATUS, quiet_grpc
from penstock_common.version import why_not_imported
from penstock_shard.cli import parse_config
from penstock_shard.distributed.node import serve_node


def main() -> int:
    # Until the server installs its own handlers, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Otherwise numpy's BLAS starts a thread for each core, in this process and in the engine. That
    # takes a quarter of the processor time that a start needs. torch's threads are set elsewhere.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = parse_config(sys.argv[1:])
    set_up_logging(config.log_format, config.log_level, shard=config.log_name)
    if config.node_rank > 0 and config.engine == "penstock":
        return serve_node(config)
    quiet_grpc()
    adopt_orphans()
    try:
        # Import after parsing, so that --help and errors about flags appear at once.
        if config.node_rank > 0:
            from penstock_shard.server.vllm_node import serve_vllm_node as serve
        else:
            from penstock_shard.server.app import serve
    except ImportError as error:
        end_log(f"penstock shard: {why_not_imported(error, config.extra)}")
        return USAGE_STATUS
    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
