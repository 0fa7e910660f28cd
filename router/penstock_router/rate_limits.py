"""How much a key may ask for in a minute: requests, and tokens of prompts and outputs.

Token buckets (Turner, New directions in communications, 1986): full at first, refilled steadily,
never over full. A request with a body takes one from the first as it arrives, whatever it says. Of
the second it takes, once its prompt is tokenized, the prompt's tokens and what it may put out, of
that an eighth of a minute's at most: many answers have no other bound than the model's context, and
most are far shorter. When it is over, what it took in vain goes back, and what it put out beyond is
taken, also below zero. So every token counts, an overdraft is paid back before anything else is let
in, and only as many answers may overdraw at once as an eighth goes into what there was. A full
bucket lets any request in, however long its prompt is.

Knows numbers and times only: no HTTP and no keys.
"""

from __future__ import annotations

import math
import time

from penstock_router.errors import TooManyRequests
from penstock_router.metrics import Metrics
from penstock_router.records import RequestRecord

_MINUTE_S = 60.0
_OUTPUT_SHARE = 8


class Bucket:
    """So many a minute, of which up to a minute's may be taken at once."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def change(self, per_minute: int, now_s: float) -> None:
        """Another limit: what is used up stays so."""
        self._level = min(float(per_minute), self.level(now_s))
        self._at_s, self.per_minute = now_s, per_minute

    def level(self, now_s: float) -> float:
        """What is in it, below zero where it is overdrawn."""
        refilled = self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S
        return min(float(self.per_minute), refilled)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is in it, or it is full."""
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Out of it, whatever is in it; less than nothing goes back."""
        self._level = self.level(now_s) - amount
        self._at_s = now_s


class Rates:
    """The buckets of one key."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def change(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """From now on these hold; None: no limit."""
        now_s = time.monotonic()
        self.requests = _changed(self.requests, requests_per_minute, now_s)
        self.tokens = _changed(self.tokens, tokens_per_minute, now_s)

    def headers(self) -> dict[str, str]:
        """What OpenAI's clients read of them."""
        shown: dict[str, str] = {}
        now_s = time.monotonic()
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level(now_s)))
                shown[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                shown[f"x-ratelimit-remaining-{what}"] = str(left)
                reset_s = bucket.wait_s(bucket.per_minute, now_s)
                shown[f"x-ratelimit-reset-{what}"] = f"{reset_s:.3f}s"
        return shown


def _changed(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.change(per_minute, now_s)
    return bucket


class Charge:
    """What one request takes of its key's rates."""

    __slots__ = ("_delivered_tokens", "_metrics", "_prompt_tokens", "_rates", "_record", "_taken")

    def __init__(self, rates: Rates | None, metrics: Metrics) -> None:
        self._rates = rates
        self._metrics = metrics
        # Of tokens; and those that it must pay for in any case.
        self._taken = 0
        self._prompt_tokens = 0
        self._record: RequestRecord | None = None
        self._delivered_tokens = 0

    def take_request(self) -> None:
        """As it arrives. Raises `TooManyRequests`."""
        if self._rates is not None and self._rates.requests is not None:
            self._take(self._rates.requests, 1, "requests")

    def take_tokens(self, prompt_tokens: int, max_output_tokens: int) -> None:
        """Before its tokens are worked on. Raises `TooManyRequests`."""
        if self._rates is None or self._rates.tokens is None:
            return
        bucket = self._rates.tokens
        outputs = min(max_output_tokens, bucket.per_minute // _OUTPUT_SHARE)
        self._take(bucket, prompt_tokens + outputs, "tokens")
        self._taken = prompt_tokens + outputs

    def begin(self, prompt_tokens: int) -> None:
        """It has its places: the prompt is used."""
        self._prompt_tokens = prompt_tokens

    def follow(self, record: RequestRecord, delivered_tokens: int) -> None:
        """What it puts out is counted there; so much was put out by a request before."""
        self._record, self._delivered_tokens = record, delivered_tokens

    def settle(self) -> None:
        """It is over: what it used is taken, and no more."""
        if self._rates is None or self._rates.tokens is None or not self._taken:
            return
        used = self._prompt_tokens
        if self._record is not None and self._record.usage is not None:
            used += self._record.output_tokens - self._delivered_tokens
        self._rates.tokens.take(used - self._taken, time.monotonic())
        self._taken = 0

    def _take(self, bucket: Bucket, amount: int, what: str) -> None:
        now_s = time.monotonic()
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            self._metrics.refused.labels(f"key_{what}_per_minute").inc()
            retry_after_s = max(1, math.ceil(wait_s))
            raise TooManyRequests(
                f"this key may ask for {bucket.per_minute} {what} a minute, and they are used up; "
                f"try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )
        bucket.take(amount, now_s)
