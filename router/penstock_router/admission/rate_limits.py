"""Bounds what a key may ask for in a minute: requests, and tokens of prompts and outputs.

Token buckets (Turner, New directions in communications, 1986): full at first, refilled steadily,
never over full. A request with a body takes one from the bucket of requests as it arrives, even if
it is refused later. From the bucket of tokens it takes, once its prompt is tokenized, the prompt's
tokens and its maximum output, but for the output at most an eighth of a minute's tokens: many
answers have no other bound than the model's context, and most are far shorter. When the request is
over, output tokens that it did not use go back, and those beyond what it took are taken, also below
zero. So every token that a shard makes counts, also one that is made once more for a client that
resumes, or that no client reads; an overdraft is refilled before any request is admitted, and at
most about eight answers may overdraw at once. A full bucket admits any request, however long its
prompt.
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
    """A token bucket of `per_minute`, which is also its size."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def change(self, per_minute: int, now_s: float) -> None:
        """Set another limit; the level stays, up to the new size."""
        self._level = min(float(per_minute), self.level(now_s))
        self._at_s, self.per_minute = now_s, per_minute

    def level(self, now_s: float) -> float:
        """The content of the bucket; below zero if it is overdrawn."""
        refilled = self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S
        return min(float(self.per_minute), refilled)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until this amount is in the bucket, or the bucket is full."""
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, even below zero; a negative amount goes back in."""
        self._level = self.level(now_s) - amount
        self._at_s = now_s


class Rates:
    """The buckets of one key."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def change(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Set the limits from now on; None: no limit."""
        now_s = time.monotonic()
        self.requests = _changed(self.requests, requests_per_minute, now_s)
        self.tokens = _changed(self.tokens, tokens_per_minute, now_s)

    def headers(self) -> dict[str, str]:
        """The x-ratelimit headers that OpenAI's clients read."""
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
    """The share of a request in its key's buckets."""

    __slots__ = ("_metrics", "_prompt_tokens", "_rates", "_record", "_taken")

    def __init__(self, rates: Rates | None, metrics: Metrics) -> None:
        self._rates = rates
        self._metrics = metrics
        # Tokens taken from the bucket, and the prompt's tokens once they count as used.
        self._taken = 0
        self._prompt_tokens = 0
        self._record: RequestRecord | None = None

    def take_request(self) -> None:
        """Take one request, as it arrives. Raises `TooManyRequests`."""
        if self._rates is not None and self._rates.requests is not None:
            self._take(self._rates.requests, 1, "requests")

    def take_tokens(self, prompt_tokens: int, max_output_tokens: int) -> None:
        """Take its tokens, before it waits for places. Raises `TooManyRequests`."""
        if self._rates is None or self._rates.tokens is None:
            return
        bucket = self._rates.tokens
        outputs = min(max_output_tokens, bucket.per_minute // _OUTPUT_SHARE)
        self._take(bucket, prompt_tokens + outputs, "tokens")
        self._taken = prompt_tokens + outputs

    def begin(self, prompt_tokens: int) -> None:
        """Note that it has its places: from now on its prompt's tokens count as used."""
        self._prompt_tokens = prompt_tokens

    def follow(self, record: RequestRecord) -> None:
        """`record` counts the tokens that are made for it."""
        self._record = record

    def settle(self) -> None:
        """The request is over: correct the bucket to the tokens it used."""
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
