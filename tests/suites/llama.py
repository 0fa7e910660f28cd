"""Tests of llama.cpp's server, which llama-cpp-python's source holds: those of routes that penstock
serves too. Routes of its own are infilling, reranking, slots and templates.
"""

from __future__ import annotations

from suites.suite import Suite

LLAMA = Suite(
    name="llama",
    source="llama_cpp_python",
    root="vendor/llama.cpp/tools/server/tests",
    conftests=".",
    tests=tuple(
        f"unit/test_{name}.py"
        for name in (
            *("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion"),
            *("embedding", "security", "stream", "tokenize", "tool_call"),
        )
    ),
    plugin="llama_server",
    # What needs models of gigabytes.
    options=("-m", "not slow"),
    key="sk-this-is-the-secret-key",
    models=(
        *("tinyllama-2", "bert-bge-small", "test", "gpt-3.5-turbo-instruct", "davinci-002"),
        *("gpt-4.1", "text-embedding-3-small"),
    ),
    shard_flags=("--embeddings", "last"),
    left_out={
        "unit/test_stream.py::test_stream_stop_during_model_load": "it is skipped if the answer "
        "came sooner than it looked",
    },
)
