"""Requests that engines died of, remembered so that their like is refused for a while.

Knows requests and times only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections import OrderedDict

from penstock_client.errors import PoisonousRequest
from penstock_client.types import GenerationRequest

# In so many engines that died a request was running before it is tried alone...
SUSPECT_DEATHS = 2
# ... and in so many before it is refused.
POISON_DEATHS = 3

_MAX_REFUSED = 10_000


class RefusedRequests:
    """What is refused, by fingerprint. The oldest are forgotten beyond ten thousand."""

    def __init__(self, refuse_s: float) -> None:
        self._refuse_s = refuse_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: GenerationRequest, now_s: float) -> PoisonousRequest:
        """Refuse its like from now on; the error for this one."""
        self._until_s[_fingerprint(request)] = now_s + self._refuse_s
        if len(self._until_s) > _MAX_REFUSED:
            self._until_s.popitem(last=False)
        return PoisonousRequest(
            f"{POISON_DEATHS} engines died while this request was running, the last with it alone; "
            f"requests like it are refused for {self._refuse_s:g} s"
        )

    def check(self, request: GenerationRequest, now_s: float) -> None:
        """Raises `PoisonousRequest` for the like of one that was added a short while ago."""
        # Fingerprints cost time, and there is hardly ever anything to compare them with.
        if not self._until_s:
            return
        left_s = self._until_s.get(_fingerprint(request), 0.0) - now_s
        if left_s > 0:
            raise PoisonousRequest(
                f"engines died of a request like this one; refused for another {left_s:.0f} s"
            )


def _fingerprint(request: GenerationRequest) -> bytes:
    """The same for what makes an engine do the same: all but the seed, the label and the like."""
    sampling = dataclasses.replace(request.sampling, seed=None)
    what = (request.model, request.adapter, sampling, request.constraint, request.logprobs,
            request.prompt_logprobs, list(request.logprob_token_ids))  # fmt: skip
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    ids = request.prompt_token_ids
    digest.update(struct.pack(f"<{len(ids)}I", *ids))
    return digest.digest()
