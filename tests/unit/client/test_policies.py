"""Choosing a shard from a snapshot."""

from __future__ import annotations

from penstock_client.policies import Candidate, least_load


def _candidate(address: str, **load: int) -> Candidate:
    fields = dict.fromkeys(
        ("running", "waiting", "queued_prompt_tokens", "sent_requests", "sent_prompt_tokens"), 0
    )
    return Candidate(address, **{**fields, **load})


def test_the_shard_with_less_work_ahead_is_chosen() -> None:
    busy = _candidate("busy", running=10)
    assert least_load([busy, _candidate("idle")]).address == "idle"


def test_a_long_queued_prompt_weighs_more_than_a_running_request() -> None:
    prompt = _candidate("prompt", queued_prompt_tokens=8000)
    assert least_load([prompt, _candidate("decoding", running=4)]).address == "decoding"


def test_what_was_just_sent_counts_before_the_shard_reports_it() -> None:
    sent = {"a": 0, "b": 0}
    for _ in range(10):
        candidates = [_candidate(name, sent_requests=count) for name, count in sent.items()]
        sent[least_load(candidates).address] += 1
    assert sent == {"a": 5, "b": 5}
