"""The examples of ollama's client."""

from __future__ import annotations

from suites.suite import Suite

OLLAMA = Suite(
    name="ollama",
    source="ollama",
    root=".",
    conftests=".",
    tests=("examples",),
    plugin="ollama_examples",
    models=(
        *(
            "gemma4",
            "llama3.1",
            "llama3.1:8b",
            "llama3.2",
            "qwen3",
            "codellama:7b-code",
            "deepseek-r1",
        ),
        *("gpt-oss:20b",),
    ),
    shard_flags=("--embeddings", "last"),
)
