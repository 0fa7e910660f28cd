"""vLLM's tests of its OpenAI and Anthropic routes: those of routes that penstock serves too, of one
model. Tests of its inside, without a server, are in the same files and left out.
"""

from __future__ import annotations

from dataclasses import replace

from suites.suite import Suite

_HERE = "tests/entrypoints"
_CHATS = (
    *("batched_chat_completions", "chat", "chat_completion", "chat_logit_bias_validation"),
    *("completion_with_function_calling", "enable_force_include_usage", "include_reasoning"),
    *("logprob_token_ids", "root_path", "thinking_token_budget"),
)
_COMPLETIONS = ("completion", "prompt_validation", "token_in_token_out")
_RESPONSES = (
    *("basic", "errors", "function_call", "harmony", "parsable_context", "simple", "stateful"),
    "structured_output",
)
_OTHERS = ("chunked_prompt", "return_token_ids", "return_tokens_as_ids")
_FILES = (
    "anthropic/test_messages",
    *(f"openai/chat_completion/test_{name}" for name in _CHATS),
    *(f"openai/completion/test_{name}" for name in _COMPLETIONS),
    "openai/models/test_models",
    *(f"openai/responses/test_{name}" for name in _RESPONSES),
    *(f"openai/test_{name}" for name in _OTHERS),
    *("pooling/basic/test_truncation", "pooling/embed/test_online"),
    *("serve/instrumentator/test_metrics", "serve/instrumentator/test_orca_metrics"),
    "serve/tokenize/test_tokenization",
)
# What needs a longer context, as many log-probabilities as there are tokens, or another key.
_LARGE = (
    "openai/chat_completion/test_chat_echo",
    "serve/instrumentator/test_basic",
    "serve/middleware/test_optional_middleware",
)
_RACE = "an answer is complete before it is cancelled, or not"


def _paths(files: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{_HERE}/{file}.py" for file in files)


VLLM = Suite(
    name="vllm",
    source="vllm",
    root=".",
    conftests=_HERE,
    tests=_paths(_FILES),
    plugin="vllm_server",
    needs=("RemoteOpenAIServer",),
    key="abc-123",
    models=(
        *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "qwen3-lora"),
        *("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        *("HuggingFaceH4/zephyr-7b-beta", "zephyr-lora", "zephyr-lora2"),
        *("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolVLM-256M-Instruct"),
        *("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "claude-3-7-sonnet-latest"),
        *("intfloat/multilingual-e5-small", "sentence-transformers/all-MiniLM-L12-v2"),
        *("openai-community/gpt2", "openai/gpt-oss-20b"),
    ),
    context=3072,
    # Its tests ask for tokens up to 5000.
    vocabulary=8192,
    shard_flags=("--embeddings", "last"),
    router_flags=("--metrics-names", "vllm"),
    left_out={
        f"{_HERE}/openai/responses/test_harmony.py::test_background_cancel": _RACE,
        f"{_HERE}/openai/responses/test_stateful.py::test_background_cancel": _RACE,
        f"{_HERE}/serve/instrumentator/test_metrics.py::test_abort_metrics_reset": "short answers "
        "are seen running, or end before",
    },
)

VLLM_LARGE = replace(
    VLLM,
    name="vllm-large",
    tests=_paths(_LARGE),
    key="test",
    context=16_384,
    shard_flags=("--max-logprobs", "-1"),
    left_out={
        f"{_HERE}/serve/instrumentator/test_basic.py::test_server_load": "a tenth of a second "
        "after it was sent, a request is seen running or not yet",
    },
)
