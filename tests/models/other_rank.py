"""Rank 1 of two, for tests: loads one model after the other, as it is told, and follows.

python other_rank.py PORT STORE_PORT
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch

from penstock_shard.models.errors import ModelError
from penstock_shard.models.parallel.messages import (
    REVISION,
    Failed,
    Hello,
    Join,
    Line,
    Loaded,
    ToRank,
)
from penstock_shard.models.parallel.mirrored import follow
from penstock_shard.models.parallel.ranks import join
from penstock_shard.runner.create import load_stack


class NextModel(Exception):
    """Rank 0 is done with the one there is."""


def main() -> None:
    port, store_port = map(int, sys.argv[1:])
    line: Line[ToRank] = Line(socket.create_connection(("127.0.0.1", port)), ToRank)
    line.send(Hello(REVISION, 1, 2, os.getpid(), "here"))
    ranks = join(torch.device("cpu"), 1, 2, "127.0.0.1", store_port)
    joining = [line.receive()]

    def hear() -> ToRank:
        message = line.receive()
        if message is None:
            sys.exit()
        if isinstance(message, Join):
            joining.append(message)
            raise NextModel
        return message

    while isinstance(message := joining.pop(), Join):
        try:
            stack = load_stack(message.config, Path(message.model_dir), ranks, lambda text: None)
        except ModelError as error:
            line.send(Failed(str(error)))
            joining.append(line.receive())
            continue
        line.send(Loaded(stack.ops.backend.name, ""))
        try:
            follow(stack.served, stack.model, ranks, hear, line.send)
        except NextModel:
            continue


if __name__ == "__main__":
    main()
