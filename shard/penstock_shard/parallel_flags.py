"""The flags of a model over several devices, and checks that they are consistent. Knows argparse;
knows nothing of devices, or of what can be divided.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_parallel_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel-size",
        type=_whole(1),
        default=1,
        metavar="N",
        help="devices that share one model, each with a process (default: %(default)s)",
    )
    group.add_argument(
        "--nnodes",
        type=_whole(1),
        default=1,
        metavar="N",
        help="machines that these are on, as many on each (default: %(default)s)",
    )
    group.add_argument(
        "--node-rank",
        type=_whole(0),
        default=0,
        metavar="R",
        help="which of the machines this is; 0 answers, the others compute (default: %(default)s)",
    )
    group.add_argument(
        "--master-addr", metavar="HOST", help="where machine 0 is, with several machines"
    )
    group.add_argument(
        "--master-port",
        type=_whole(0, 65535),
        default=29501,
        metavar="PORT",
        help="and its port for the others (default: %(default)s)",
    )


def check_parallel_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with one line if the flags contradict each other."""
    size, nodes = args.tensor_parallel_size, args.nnodes
    if args.runner == "fake" and size > 1:
        parser.error(f"--tensor-parallel-size {size}: the fake runner has nothing to divide")
    if size % nodes:
        parser.error(
            f"--tensor-parallel-size {size}: must be a multiple of --nnodes ({nodes}), which have "
            "as many devices each"
        )
    if args.node_rank >= nodes:
        parser.error(f"--node-rank {args.node_rank}: must be below --nnodes ({nodes})")
    if nodes > 1 and args.master_addr is None:
        parser.error(f"--nnodes {nodes}: give --master-addr, where machine 0 is")
    if nodes == 1 and args.master_addr is not None:
        parser.error(f"--master-addr {args.master_addr}: with --nnodes 1 there is no other machine")


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text}: must be {bounds}")
        return value

    return read
