"""Rank 0: starts the other ranks' processes and waits for the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock_shard.config import ShardConfig
from penstock_shard.distributed.collectives import RankRendezvous, Ranks
from penstock_shard.distributed.messages import Arrived, Call, Join, Loaded
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.distributed.rank_connections import Followers, await_ranks
from penstock_shard.distributed.start_ranks import listen, local_ranks, start_rank
from penstock_shard.errors import ModelError
from penstock_shard.models.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks, which have joined torch.distributed."""

    ranks: Ranks
    followers: Followers

    def whole(self, own: LoadedModel, attention_backend: str, weights_hash: str) -> MirroredModel:
        """Wait until the other ranks have loaded; return the whole model. `own` is rank 0's part.

        Raises ModelError if a rank cannot load its part, has other weights or another attention
        backend than rank 0, or if the ranks do not compute the same as the undivided model.
        """
        for rank, loaded in enumerate(self.followers.answers(Loaded), start=1):
            if loaded.attention_backend != attention_backend:
                raise ModelError(
                    f"rank {rank} attends with {loaded.attention_backend}, rank 0 with "
                    f"{attention_backend}; name one with --attention-backend"
                )
            if loaded.weights_hash not in ("", weights_hash):
                raise ModelError(
                    f"rank {rank} on another machine has other weights than rank 0; give all the "
                    "same model"
                )
        self.followers.tell(Call("check", []))
        own.check()
        return MirroredModel(own.model, self.ranks, self.followers)


def gather_group(
    config: ShardConfig, model_dir: Path, device: torch.device, progress: Callable[[str], None]
) -> RankGroup:
    """Start this machine's other ranks, wait for other machines' ranks, and let all start loading.

    Raises ModelError if a rank cannot start, connect or join.
    """
    size = config.tensor_parallel_size
    try:
        listener = listen(config)
    except OSError as error:
        raise ModelError(f"--master-port {config.master_port}: {error.strerror}") from error
    with contextlib.closing(listener):
        port = listener.getsockname()[1]
        processes = {
            place.rank: start_rank(place, "127.0.0.1", port) for place in local_ranks(config)[1:]
        }
        progress(f"starting ranks 1 to {size - 1} of {size}")
        lines = await_ranks(listener, size, processes, progress)
    rendezvous = RankRendezvous(size, alone=config.nnodes == 1)
    followers = Followers(lines, list(processes.values()))
    followers.tell(Join(config, str(model_dir), rendezvous.port))
    # Joining torch.distributed blocks until all ranks join. So each rank first reports that it can
    # join.
    followers.answers(Arrived)
    rendezvous.await_others(followers.check)
    with followers.watched():
        ranks = rendezvous.join(device)
    return RankGroup(ranks, followers)
