"""Log-probabilities and ranks of tokens, from raw logits."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock_proto.types import Logprobs
from penstock_shard.device.async_copy import is_host, to_device, to_host
from penstock_shard.worker.sampling.top_k_top_p import ordered_topk


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities that are being copied to the host: of the chosen tokens [n], with ranks
    [n]; of the best tokens [n, k], with ids; and of requested ids, row after row.
    """

    _chosen: Tensor
    _ranks: Tensor
    _top: Tensor
    _top_ids: Tensor
    _requested: Tensor
    _counts: abc.Sequence[int]
    _asked: abc.Sequence[abc.Sequence[int]]
    _vocabulary: int

    def finish(self) -> list[Logprobs]:
        chosen, ranks, requested = (
            self._chosen.tolist(),
            self._ranks.tolist(),
            self._requested.tolist(),
        )
        top, ids = self._top.numpy(), self._top_ids.numpy().astype("<u4")
        columns = [
            Logprobs(
                chosen=[chosen[i]],
                ranks=[ranks[i]],
                top_n=min(count, self._vocabulary),
                best_ids=bytearray(ids[i, :count].tobytes()),
                best_logprobs=bytearray(top[i, :count].tobytes()),
            )
            for i, count in enumerate(self._counts)
        ]
        start = 0
        for asked, logprobs in zip(self._asked, columns, strict=False):
            logprobs.requested = requested[start : start + len(asked)]
            start += len(asked)
        return columns


def score_tokens(
    logits: Tensor,
    tokens: Tensor,
    counts: abc.Sequence[int],
    asked: abc.Sequence[abc.Sequence[int]] = (),
) -> TokenScores:
    """Score from raw logits [n, V]: the log-probability and rank of tokens [n] (rank 1 is the most
    likely; equal logits share a rank), the `counts[i]` best tokens of row i, and the ids
    `asked[i]`.

    Ranks and order come from the logits, because different logits may have equal log-probabilities.
    """
    logits = logits.float()
    vocabulary = logits.shape[1]
    scores = torch.log_softmax(_with_aligned_rows(logits), dim=1)
    place = tokens.unsqueeze(1)
    ranks = (logits > logits.gather(1, place)).sum(dim=1, dtype=torch.int32) + 1
    top_ids = torch.empty((len(counts), 0), dtype=torch.int64, device=logits.device)
    if most := min(max(counts), vocabulary):
        # Only logits equal to the largest have a difference of 0.
        top_ids = ordered_topk(logits - logits.amax(dim=1, keepdim=True), most)
    width = scores.shape[1]
    wanted = [row * width + token for row, ids in enumerate(asked) for token in ids]
    requested = scores.view(-1)[to_device(np.array(wanted, dtype=np.int64), logits.device)]
    return TokenScores(
        to_host(scores.gather(1, place).squeeze(1)),
        to_host(ranks),
        to_host(scores.gather(1, top_ids)),
        to_host(top_ids),
        to_host(requested),
        counts,
        asked,
        vocabulary,
    )


def _with_aligned_rows(logits: Tensor) -> Tensor:
    """Pad float32 [n, V] with -inf columns so that each row begins at a multiple of 16 bytes. torch
    on CUDA sums a row in an order that depends on its alignment, which changes the last bit.
    """
    spare = -logits.shape[1] % 4
    if is_host(logits) or not spare:
        return logits
    return functional.pad(logits, (0, spare), value=float("-inf"))
