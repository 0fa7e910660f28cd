"""Tests of SGLang's router: chats, responses and embeddings through a gateway."""

from __future__ import annotations

from suites.suite import Suite

SGLANG = Suite(
    name="sglang",
    source="sglang_router",
    root="e2e_test",
    conftests="chat_completions",
    tests=(
        "chat_completions",
        "embeddings/test_basic.py",
        "responses",
        "router/test_worker_api.py",
    ),
    plugin="sglang_backend",
    needs=("setup_backend",),
    models=(),
    # Its tests ask for 2048 tokens beside a prompt.
    context=4096,
    shard_flags=("--embeddings", "last"),
)
