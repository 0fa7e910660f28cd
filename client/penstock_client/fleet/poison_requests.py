"""Requests that crashed engines, remembered so that requests like them are refused for a while."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict

from penstock_proto.errors import InvalidRequest, PoisonousRequest
from penstock_proto.types import GenerationRequest

# After this many engines died while a request ran, it is tried alone...
SUSPECT_DEATHS = 2
# ... and after this many it is refused.
POISON_DEATHS = 3

_MAX_REFUSED = 10_000


class RefusedRequests:
    """Fingerprints that are refused, ten thousand at most: the oldest are forgotten first."""

    def __init__(self, refuse_s: float) -> None:
        self._refuse_s = refuse_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, kind: bytes, now_s: float) -> PoisonousRequest:
        """Refuse requests of this fingerprint from now on; returns the error for this one."""
        self._until_s[kind] = now_s + self._refuse_s
        self._until_s.move_to_end(kind)
        if len(self._until_s) > _MAX_REFUSED:
            self._until_s.popitem(last=False)
        return PoisonousRequest(
            f"{POISON_DEATHS} engines died while this request was running, the last with it alone; "
            f"requests like it are refused for {self._refuse_s:g} s"
        )

    def check(self, request: GenerationRequest, now_s: float) -> None:
        """Raises `PoisonousRequest` for a request like one that was added a short while ago, and
        `InvalidRequest` for a prompt that is no token ids.
        """
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        # A fingerprint takes time to compute, and there is hardly ever one to compare it with.
        if not self._until_s:
            return
        left_s = self._until_s.get(fingerprint(request), 0.0) - now_s
        if left_s > 0:
            raise PoisonousRequest(
                f"engines died of a request like this one; refused for another {left_s:.0f} s"
            )


def fingerprint(request: GenerationRequest) -> bytes:
    """Equal for requests that make an engine do the same: seed, label and the like do not count.

    Raises `InvalidRequest` for a prompt that is no token ids.
    """
    sampling = dataclasses.replace(request.sampling, seed=None)
    what = (request.model, request.adapter, sampling, request.constraint, request.thinking_budget,
            request.logprobs, request.prompt_logprobs, list(request.logprob_token_ids),
            [*request.images])  # fmt: skip
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    try:
        digest.update(array("I", request.prompt_token_ids))
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"prompt_token_ids: {error}", field="prompt_token_ids") from None
    return digest.digest()
