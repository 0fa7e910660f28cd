"""Requests that engines died of, remembered so that their like is refused for a while.

Knows requests and times only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict

from penstock_client.errors import InvalidRequest, PoisonousRequest
from penstock_client.types import GenerationRequest

# In so many engines that died a request was running before it is tried alone...
SUSPECT_DEATHS = 2
# ... and in so many before it is refused.
POISON_DEATHS = 3
# Whoever gives so many tokens in an engine did not end those before it: it would have died where it
# died, and what had been computed and not been heard of there is less. The shard counts alike.
TRIAL_TOKENS = 8

_MAX_REFUSED = 10_000


class RefusedRequests:
    """What is refused, by fingerprint. The oldest are forgotten beyond ten thousand."""

    def __init__(self, refuse_s: float) -> None:
        self._refuse_s = refuse_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, kind: bytes, now_s: float) -> PoisonousRequest:
        """Refuse what has this fingerprint from now on; the error for the first of them."""
        self._until_s[kind] = now_s + self._refuse_s
        self._until_s.move_to_end(kind)
        if len(self._until_s) > _MAX_REFUSED:
            self._until_s.popitem(last=False)
        return PoisonousRequest(
            f"{POISON_DEATHS} engines died while this request was running, the last with it alone; "
            f"requests like it are refused for {self._refuse_s:g} s"
        )

    def check(self, request: GenerationRequest, now_s: float) -> None:
        """Raises `PoisonousRequest` for the like of one that was added a short while ago, and
        `InvalidRequest` for a prompt that is no token ids.
        """
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        # Fingerprints cost time, and there is hardly ever anything to compare them with.
        if not self._until_s:
            return
        left_s = self._until_s.get(fingerprint(request), 0.0) - now_s
        if left_s > 0:
            raise PoisonousRequest(
                f"engines died of a request like this one; refused for another {left_s:.0f} s"
            )


def fingerprint(request: GenerationRequest) -> bytes:
    """The same for what makes an engine do the same: all but the seed, the label and the like.

    Raises `InvalidRequest` for a prompt that is no token ids.
    """
    sampling = dataclasses.replace(request.sampling, seed=None)
    what = (request.model, request.adapter, sampling, request.constraint, request.thinking_budget,
            request.logprobs, request.prompt_logprobs, list(request.logprob_token_ids))  # fmt: skip
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    try:
        digest.update(array("I", request.prompt_token_ids))
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"prompt_token_ids: {error}", field="prompt_token_ids") from None
    return digest.digest()
