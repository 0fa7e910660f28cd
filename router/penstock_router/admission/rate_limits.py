"""Limits each key's requests per minute, and its prompt and output tokens per minute.

Token buckets (Turner, New directions in communications, 1986) are full at first and are refilled
steadily. An arriving request with a body takes 1 from the bucket of requests, even if it is refused
later. Once its prompt is tokenized, it takes the prompt's tokens and its maximum output from the
bucket of tokens. The output part is at most an eighth of a minute's tokens: often only the context
bounds an answer, and most answers are far shorter.

At the end, unused output tokens go back, or additional tokens are taken, even below zero. So every
generated token counts, even if it is generated again for a resumed stream, or never read. No
request is admitted before an overdraft is refilled. At most about eight answers overdraw at once. A
full bucket admits any request, however long its prompt.
"""

from __future__ import annotations

import math
import time

from penstock_router.errors import TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import RequestRecord

_MINUTE_S = 60.0
_OUTPUT_SHARE = 8


class Bucket:
    """A token bucket: `per_minute` is its rate and its size."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def change(self, per_minute: int, now_s: float) -> None:
        """Set another limit. The level stays, or drops to the new size."""
        self._level = min(float(per_minute), self.level(now_s))
        self._at_s, self.per_minute = now_s, per_minute

    def level(self, now_s: float) -> float:
        """Return the number of tokens in the bucket: negative if it is overdrawn."""
        refilled = self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S
        return min(float(self.per_minute), refilled)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until this amount is in the bucket, or the bucket is full."""
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, even below zero; a negative amount goes back in."""
        self._level = self.level(now_s) - amount
        self._at_s = now_s


class Rates:
    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def change(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Set the limits from now on; None: no limit."""
        now_s = time.monotonic()
        self.requests = _changed(self.requests, requests_per_minute, now_s)
        self.tokens = _changed(self.tokens, tokens_per_minute, now_s)

    def headers(self) -> dict[str, str]:
        """Return the x-ratelimit headers that OpenAI's clients read."""
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
    """One request's use of its key's buckets."""

    __slots__ = ("_metrics", "_prompt_tokens", "_rates", "_record", "_taken")

    def __init__(self, rates: Rates | None, metrics: Metrics) -> None:
        self._rates = rates
        self._metrics = metrics
        # `_taken`: tokens taken from the bucket. `_prompt_tokens`: the prompt's tokens, once they
        # count as used.
        self._taken = 0
        self._prompt_tokens = 0
        self._record: RequestRecord | None = None

    def take_request(self) -> None:
        """Count one request on arrival. Raises `TooManyRequests` if the bucket is empty."""
        if self._rates is not None and self._rates.requests is not None:
            self._take(self._rates.requests, 1, "requests")

    def take_tokens(self, prompt_tokens: int, max_output_tokens: int) -> None:
        """Take the request's tokens before it waits for places. Raises `TooManyRequests` if too few
        are left.
        """
        if self._rates is None or self._rates.tokens is None:
            return
        bucket = self._rates.tokens
        outputs = min(max_output_tokens, bucket.per_minute // _OUTPUT_SHARE)
        self._take(bucket, prompt_tokens + outputs, "tokens")
        self._taken = prompt_tokens + outputs

    def begin(self, prompt_tokens: int) -> None:
        """Count the prompt's tokens as used, because the request has its places."""
        self._prompt_tokens = prompt_tokens

    def follow(self, record: RequestRecord) -> None:
        """Set the record that counts the tokens made for this request."""
        self._record = record

    def settle(self) -> None:
        """Correct the bucket to the tokens that the request used."""
        if self._rates is None or self._rates.tokens is None or not self._taken:
            return
        used = self._prompt_tokens
        if self._record is not None:
            used += self._record.made_tokens
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
