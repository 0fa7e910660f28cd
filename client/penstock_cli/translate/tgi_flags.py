"""Rules for each flag and variable of text-generation-inference's launcher (3.3).

Each flag is also an environment variable, in capitals; `ENVIRONMENT` has the variables that are not
flags.
"""

from __future__ import annotations

from penstock_cli.translate.flag_rules import (
    HUB,
    NotTranslatable,
    Part,
    Rule,
    Table,
    at_least,
    becomes,
    by_hand,
    log_level,
    lost,
    named,
    needless,
    one_of,
    otlp_over_http,
    quantization,
    refused,
    same,
)

VERSION = "3.3"
SHORT = {"-p": "port", "-e": "env", "-g": "graceful-termination-timeout"}


def _memory_share(text: str) -> str | None:
    # TGI's default is 1, but means nine tenths, which is our default.
    return None if float(text) == 1 else text


def _batched_tokens(text: str) -> str:
    # A step must also have room for one token of each running request, and up to 256 may run.
    return str(max(int(text), 256))


def _drafts(text: str) -> str | None:
    return str(int(text)) if int(text) else None


def _adapter(text: str) -> str:
    """Parse NAME=PATH, or a hub id that is also the name."""
    name, _, source = text.strip().partition("=")
    if "@" in (source or name):
        raise NotTranslatable(f"{text}: adapters come at their newest revision; give a directory")
    return f"{name}={source or name}"


_OWN_SCHEDULE = "prompts and decodes share each step here; there is nothing to trade off"
_ROPE = "rotary embeddings are as the model's config.json says; write rope_scaling there"

FLAGS: Table = {
    **becomes("model-id", "MODEL", Part.MODEL),
    **same("revision trust-remote-code! dtype"),
    **becomes("hostname", "--host", Part.SERVE),
    **same("port", Part.SERVE),
    **becomes("num-shard", "--tensor-parallel-size", Part.DEVICES, at_least(1, "one GPU at least")),
    **named(
        "sharded",
        Rule(
            why="over how many GPUs a model is split says --tensor-parallel-size",
            harmless=frozenset({"true", "false"}),
        ),
    ),
    **becomes("validation-workers", "--tokenizer-threads", Part.ROUTER),
    **becomes("max-concurrent-requests", "--max-concurrent-requests", Part.ROUTER),
    **becomes("max-total-tokens", "--max-model-len"),
    **becomes("max-batch-prefill-tokens", "--max-num-batched-tokens", convert=_batched_tokens),
    **becomes("max-batch-size", "--max-num-seqs"),
    **becomes("cuda-memory-fraction", "--gpu-memory-utilization", convert=_memory_share),
    **becomes("huggingface-hub-cache weights-cache-override", "--download-dir"),
    **becomes("payload-limit", "--max-body-bytes", Part.ROUTER),
    **becomes("graceful-termination-timeout", "--shutdown-timeout-s", Part.SERVE),
    **becomes("json-output!", "--log-format json", Part.BOTH),
    **becomes("otlp-endpoint", "--otlp-endpoint", Part.BOTH, otlp_over_http),
    **named("cors-allow-origin", Rule(to="--cors-origin", part=Part.ROUTER, repeats=True)),
    **becomes("api-key", "PENSTOCK_API_KEY", Part.ENVIRONMENT),
    **becomes(
        "cuda-graphs",
        "--enforce-eager",
        convert=one_of({"0": ""}, "batch sizes are not chosen here"),
    ),
    **needless("max-waiting-tokens waiting-served-ratio", _OWN_SCHEDULE),
    **needless(
        "max-batch-total-tokens",
        "the KV cache takes the memory there is (--gpu-memory-utilization), and a request takes of "
        "it what it has come to, not the most it may become",
    ),
    **needless("shard-uds-path", "the router reaches its shards over TCP, at --shard-port"),
    **needless("master-addr master-port", "no model is split over processes"),
    **needless("disable-custom-kernels!", "there are none of that kind; see --attention-backend"),
    **needless("usage-stats", "nothing is reported to anybody"),
    **needless("env!", "`penstock info` tells what a shard serves, and on what"),
    **needless("enable-prefill-logprobs!", "always there for requests that ask for them"),
    **needless("otlp-service-name", "set OTEL_SERVICE_NAME"),
    **lost(
        "max-input-tokens max-input-length",
        "a prompt may be as long as the context (--max-model-len) less one token",
    ),
    **lost("max-best-of", "best_of goes up to 16384 there, less --max-concurrent-requests", "2"),
    **lost("max-stop-sequences", "up to 4 on TGI's routes; the routes below /v1 take more", "4"),
    **lost("max-top-n-tokens", "up to 5 on TGI's routes; --max-logprobs is for those of /v1", "5"),
    **lost("max-client-batch-size", "prompts of one request count against the queue instead", "4"),
    **becomes(
        "kv-cache-dtype",
        "--kv-cache-dtype",
        convert=one_of(
            {"fp8": "fp8", "fp8_e4m3fn": "fp8"},
            "keys and values are as precise as activations: twice the memory",
        ),
    ),
    **becomes("speculate", "--speculative-tokens", convert=_drafts),
    **lost("ngrok! ngrok-authtoken ngrok-edge", "no tunnel; run one beside it"),
    **lost(
        "disable-grammar-support!",
        "requests with a grammar are served",
        "false",
    ),
    **named("lora-adapters", Rule(to="--lora", convert=_adapter, repeats=True, separator=",")),
    **lost("watermark-gamma watermark-delta", "no watermark; requests that ask for one get 422"),
    **becomes("quantize", "--quantization", convert=quantization),
    **refused("rope-scaling rope-factor", _ROPE),
    **refused(
        "tokenizer-config-path",
        "the tokenizer is the model's; for another chat template give --chat-template FILE",
    ),
}

ENVIRONMENT: Table = {
    **HUB,
    **becomes("HF_API_TOKEN", "HF_TOKEN", Part.ENVIRONMENT),
    **becomes("HF_MODEL_ID", "MODEL", Part.MODEL),
    **becomes("HF_MODEL_REVISION", "--revision"),
    **becomes(
        "SM_NUM_GPUS", "--tensor-parallel-size", Part.DEVICES, at_least(1, "one GPU at least")
    ),
    **becomes("HF_MODEL_QUANTIZE", "--quantization", convert=quantization),
    **by_hand("HF_MODEL_TRUST_REMOTE_CODE", "give --trust-remote-code", "false 0"),
    **becomes("LOG_LEVEL", "--log-level", Part.ROUTER, log_level),
    **becomes(
        "PREFIX_CACHING",
        "--no-enable-prefix-caching",
        convert=one_of({"0": "", "false": "", "1": None, "true": None}, "must be 0 or 1"),
    ),
    **becomes("AIP_HTTP_PORT", "--port", Part.SERVE),
    **lost("AIP_PREDICT_ROUTE AIP_HEALTH_ROUTE", "routes have fixed names: /invocations, /health"),
    **needless("PREFILL_CHUNKING", "long prompts are always computed in chunks"),
    **needless("REQUEST_LOGPROBS", "always there for requests that ask for them"),
    **needless("LOG_COLORIZE", "logs have no colours where they go to no terminal"),
    **needless("DEBUG", "give --log-level debug to the router"),
    **needless(
        "ATTENTION USE_FLASH_ATTENTION",
        "the best backend there is is taken; --attention-backend chooses another",
    ),
    **needless("TGI_WIGGLE_ROOM", "--gpu-memory-utilization says what share of it is used"),
    **needless("HF_HUB_ENABLE_HF_TRANSFER HF_HUB_USER_AGENT_ORIGIN", "the hub's library does well"),
    **needless("XPU_MEMORY_FRACTION", "no XPU is served"),
    **needless("EXLLAMA_VERSION DISABLE_EXLLAMA", "there are no such kernels"),
    **needless("ROCM_USE_* PYTORCH_TUNABLEOP_*", "there are no such kernels to tune"),
    **lost("COMPUTE_TYPE", "the header x-compute-type says what the shards run on"),
}
