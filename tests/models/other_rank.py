"""Rank 1 of two, for tests: loads one model after the other, as it is told, and follows.

python other_rank.py PORT STORE_PORT
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from penstock_shard.config import ShardConfig
from penstock_shard.distributed.collectives import Ranks, join
from penstock_shard.distributed.messages import (
    REVISION,
    TO_RANK,
    Failed,
    Hello,
    Join,
    Loaded,
    MessageSocket,
    ToRank,
)
from penstock_shard.distributed.parallel_model import follow
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import LoraBank, LoraLimits, Shares
from penstock_shard.model_loader import load_rank
from penstock_shard.model_loader.load_rank import load_part
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.ops.base import Ops

# In the place of a port, which these ranks do not need: adapters as they are on devices.
STACKED = 1


def load_as_told(
    config: ShardConfig, directory: Path, ranks: Ranks | None, *, stacked: bool
) -> LoadedModel:
    """`load_part`; `stacked` says how adapters are computed, whatever the device."""

    def make_bank(limits: LoraLimits, ops: Ops, *, shares: Shares, **_: bool) -> LoraBank:
        return LoraBank(limits, ops, stacked=stacked, shares=shares)

    with patch.object(load_rank, "LoraBank", make_bank):
        return load_part(config, directory, ranks, lambda text: None)


class NextModel(Exception):
    """Rank 0 is done with the one there is."""


def main() -> None:
    port, store_port = map(int, sys.argv[1:])
    line: MessageSocket[ToRank] = MessageSocket(
        socket.create_connection(("127.0.0.1", port)), TO_RANK
    )
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
            loaded = load_as_told(
                message.config,
                Path(message.model_dir),
                ranks,
                stacked=message.store_port == STACKED,
            )
        except ModelError as error:
            line.send(Failed(str(error)))
            joining.append(line.receive())
            continue
        line.send(Loaded(loaded.ops.backend.name, ""))
        try:
            follow(loaded, ranks, hear, line.send)
        except NextModel:
            continue


if __name__ == "__main__":
    main()
