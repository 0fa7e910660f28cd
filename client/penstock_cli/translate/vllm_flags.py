"""Rules for each flag of `vllm serve` (0.33).

Names of flags are without dashes; `vllm_environment` has the variables.
"""

from __future__ import annotations

import json

from penstock_cli.translate.flag_rules import (
    Loss,
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
    readable_bytes,
    readable_int,
    refused,
    same,
)

VERSION = "0.33"
SHORT = {
    "-q": "quantization",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-asc": "api-server-count",
    "-n": "nnodes",
    "-r": "node-rank",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-O": "optimization-level",
}

_DEFAULT_MAX_LORAS = 8

# ---- values ------------------------------------------------------------------------------------

_DTYPES: dict[str, str | None] = {
    "half": "float16",
    "float": "float32",
    "auto": None,
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
}
_BACKENDS: dict[str, str | None] = {
    "flash_attn": "flash_attn",
    "torch_sdpa": "sdpa",
    "triton_attn": "triton",
    "cpu_attn": "cpu",
}
_SAME_TOOL_PARSERS = """
apertus dots functiongemma gemma4 gigachat3 granite internlm k2_horizon kimi_k2 kimi_k3 lfm2 longcat
mimo minicpm5 minimax_m2 minimax_m3 olmo3 seed_oss step3 xlam
"""
# Parsers of reasoning between <think> and </think>.
_THINK_PARSERS = """
deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 granite_thinking_parser holo2 kimi_k2
ling3 mimo minicpmv minimax_m2 nemotron_v3 olmo3 poolside_v1 qwen3 step3p5 step5
"""
# None if the chat template decides: "mistral" means several formats, "hf" the model's own.
_TOOL_PARSERS: dict[str, str | None] = {
    **dict.fromkeys(("mistral", "hf")),
    **dict.fromkeys(("hermes", "qwen3_json", "granite4", "ernie45"), "hermes"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "llama_json"),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), "pythonic"),
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41"), "deepseek_dsml"),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "step3p5", "step5"), "qwen_xml"),
    **dict.fromkeys(("glm45", "glm47", "ling3", "poolside_v1"), "glm"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
    **dict.fromkeys(("hy_v3", "hy_v4"), "hy_v3"),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), "tool_calls"),
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), "muse_glimmer"),
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    **{name: name for name in _SAME_TOOL_PARSERS.split()},
}
_REASONING_PARSERS: dict[str, str | None] = {
    "hf": None,
    **dict.fromkeys(_THINK_PARSERS.split(), "think"),
    **dict.fromkeys(("hy_v3", "hy_v4"), "hy_v3"),
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), "muse_glimmer"),
    "ernie45": "think_response",
    "hunyuan_a13b": "think_answer",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere_text",
    "gemma4": "gemma4",
    "granite": "granite",
    "kimi_k3": "kimi_k3",
    "minimax_m3": "minimax_m3",
    # Reasoning stays in the text.
    "minimax_m2_append_think": "none",
    "mistral": "mistral",
    "openai_gptoss": "harmony",
    "seed_oss": "seed",
    "step3": "step3",
}


def _context(text: str) -> str | None:
    # The longest context that fits in memory, which is a shard's default.
    return None if text.lower() in ("auto", "-1") else readable_int(text)


def _bound_or_none(text: str) -> str:
    """Parse a number. -1 means no bound, here and in vLLM."""
    return text if text == "-1" else readable_int(text)


def _block_size(text: str) -> str:
    if int(text) % 16:
        raise NotTranslatable(f"{text}: blocks hold a multiple of 16 tokens")
    return text


def _keep_alive(text: str) -> str:
    if float(text) <= 0:
        raise NotTranslatable("streams always get a comment when silent; --keep-alive-s says when")
    return text


def _shutdown(text: str) -> str:
    # At 0, vLLM ends requests at once: take the shortest possible time.
    return text if float(text) > 0 else "0.001"


def _origins(text: str) -> str | None:
    origins = json.loads(text)
    if len(origins) > 1:
        raise NotTranslatable("give --cors-origin to the router, once for each", Loss.BY_HAND)
    return str(origins[0]) if origins else None


def _template(text: str) -> str:
    if "{" in text or "\n" in text:
        raise NotTranslatable("write the template into a file and name that", Loss.REFUSED)
    return text


def _lora_module(text: str) -> str:
    if not text.startswith("{"):
        return text
    module = json.loads(text)
    if set(module) - {"name", "path", "base_model_name"}:
        raise NotTranslatable(f"{text}: an adapter here has a name and a path")
    return f"{module['name']}={module['path']}"


def _draft_tokens(text: str) -> str:
    settings = json.loads(text)
    of_ngrams = isinstance(settings, dict) and settings.get("method") == "ngram"
    if not of_ngrams or "num_speculative_tokens" not in settings:
        raise NotTranslatable(f"{text}: {_DRAFTS}")
    return readable_int(str(settings["num_speculative_tokens"]))


def _gibibytes(text: str) -> str | None:
    """Convert GiB to our size; None for 0."""
    return readable_bytes(str(int(float(text) * 2**30))) if float(text) > 0 else None


def _max_loras(text: str) -> str | None:
    # vLLM's number is for one step, ours for all loaded adapters: leave out a number below our
    # default.
    return readable_int(text) if int(readable_int(text)) > _DEFAULT_MAX_LORAS else None


def _max_images(text: str) -> str | None:
    # With --limit-mm-per-prompt.image, the value is a number, not an object.
    limits = json.loads(text)
    limit = limits.get("image") if isinstance(limits, dict) else limits
    count = limit.get("count") if isinstance(limit, dict) else limit
    if count == 0:
        raise NotTranslatable(
            f"{text}: to serve text only give shards --image-cache-bytes 0", Loss.BY_HAND
        )
    return None if count is None else str(int(count))


# ---- reasons that several flags share ------------------------------------------------------------

_OWN_IMAGES = "images are prepared as the model's files say; requests cannot change that"
_NO_VIDEO = "no video is served; requests with audio or video get 400"
_IMAGE_PROCESS = (
    "how vLLM prepares images; a router decodes them (--image-processes), a shard keeps what its "
    "encoder made of them (--image-cache-bytes)"
)
_ODD_ADAPTERS = "adapters are for the linear layers of a language model"
_ONE_SPLIT = "a model is split in one way only: each GPU has a part of every layer"
_ONE_MACHINE = (
    "`penstock serve` is for one machine: on several start `penstock shard` on each, with --nnodes "
    "for one model over all of them, and `penstock router --shards HOST:PORT,...` before them"
)
_OWN_PARSERS = "no code of others reads answers; --tool-call-parser and --reasoning-parser choose"
_KERNELS = "chooses among vLLM's own kernels; --attention-backend is all there is to choose here"
_COMPILER = "tunes vLLM's compiler and CUDA graphs; there is nothing of the kind to tune"
_STATES = "tunes vLLM's kernels for layers with a state; --state-spacing says which are kept"
_NO_OFFLOAD = "weights stay on the device; choose a model that fits"
_OWN_TRANSFER = (
    "shards fetch KV blocks from each other by penstock's gRPC: give them --kv-host-bytes, "
    "--kv-peers and PENSTOCK_KV_PEER_KEY, and --role prefill or decode to those that compute "
    "nothing else: docs/failover.md"
)
_OWN_METRICS = "what /metrics has is fixed: docs/metrics.md"
_DRAFTS = "speculative decoding is by n-grams only, without a draft model: see --speculative-tokens"
_PROXY = "let a proxy before the router do it"
_PROCESS = "how vLLM arranges its own processes; there is nothing of the kind to arrange"
_RLHF = "weights do not change while a shard serves; start one with the new weights"

FLAGS: Table = {
    # The model.
    **becomes("model", "MODEL", Part.MODEL),
    **same("revision trust-remote-code! download-dir served-model-name+ enforce-eager!"),
    **becomes("dtype", "--dtype", convert=one_of(_DTYPES, "no such dtype is served")),
    **becomes("max-model-len", "--max-model-len", convert=_context),
    **becomes(
        "load-format",
        "--load-format",
        convert=one_of(
            {"auto": None, "hf": None, "safetensors": "safetensors", "dummy": "dummy"},
            "weights are read as safetensors",
        ),
    ),
    **becomes("hf-token?", "HF_TOKEN", Part.ENVIRONMENT),
    **lost(
        "convert",
        "embeddings are those of the model's modules.json, or where it has none those of "
        "--embeddings last or mean. Classes are not served",
        "auto none",
    ),
    **lost("runner", "embeddings are served beside text, if the model has any", "auto generate"),
    **becomes("quantization", "--quantization", convert=quantization),
    **refused("quantization-config", "as --quantization"),
    **needless("allow-deprecated-quantization!", "what is served is served"),
    **refused("tokenizer", "the tokenizer is the model's; put the other one into its directory"),
    **named(
        "tokenizer-mode",
        Rule(
            why="the tokenizer is tokenizer.json, or made of the model's older files",
            loss=Loss.REFUSED,
            harmless=frozenset({"auto", "hf", "slow", "fastokens"}),
        ),
    ),
    **refused("tokenizer-revision code-revision", "all files are of one --revision"),
    **refused("hf-config-path hf-overrides", "edit config.json in a copy of the model", "{}"),
    **refused("config-format", "the configuration is config.json", "auto hf"),
    **refused("model-class-overrides", "a model is computed as its config.json says", "{}"),
    **refused(
        "model-impl", "our decoder or transformers, as the model needs", "auto vllm transformers"
    ),
    **refused("generation-config", "defaults of sampling are the model's own", "auto"),
    **refused(
        "override-generation-config",
        "write the values into the model's generation_config.json",
        "{}",
    ),
    **refused("logits-processors+ io-processor-plugin", "no code of others runs on logits"),
    **refused(
        "logprobs-mode",
        "log-probabilities are those of the model, before temperature and penalties",
        "raw_logprobs",
    ),
    **refused("disable-sliding-window!", "windows are as the model has them"),
    **refused("watermark-config diffusion-config engram-config", "is not served"),
    **refused(
        "pooler-config",
        "pooling is as the model's modules.json says, or give --embeddings last or mean",
        "{}",
    ),
    **lost("enable-prompt-embeds!", "prompts are text or token ids"),
    **needless("skip-tokenizer-init! tokens-only!", "shards take token ids over gRPC"),
    **needless("safetensors-load-strategy use-tqdm-on-load!", "files are mapped and read once"),
    **needless(
        "safetensors-prefetch-num-threads safetensors-prefetch-block-size pt-load-map-location "
        "max-parallel-loading-workers ignore-patterns+ model-loader-extra-config",
        "weights are read from mapped safetensors; there is nothing to tune",
    ),
    **lost(
        "seed",
        "each request has its own seed, random where it gives none; set `seed` in requests",
        "0",
    ),
    **needless("use-fp64-gumbel!", "draws depend on seed and position alone"),
    # The server.
    **same("host port", Part.SERVE),
    **becomes("api-server-count", "--workers", Part.SERVE),
    **becomes("api-key+", "PENSTOCK_API_KEY", Part.ENVIRONMENT),
    **becomes("ssl-keyfile", "--tls-key-file", Part.SERVE),
    **becomes("ssl-certfile", "--tls-cert-file", Part.SERVE),
    **needless("enable-ssl-refresh!", "certificates are read again when their files change"),
    **lost("ssl-ca-certs ssl-cert-reqs ssl-ciphers", f"for clients' certificates: {_PROXY}", "0"),
    **becomes("chat-template", "--chat-template", convert=_template),
    **becomes("trust-request-chat-template!", "--trust-request-chat-template", Part.ROUTER),
    **lost("trust-request-mm-kwargs!", _OWN_IMAGES),
    **refused("default-chat-template-kwargs", "write the values into the template", "{}"),
    **refused("reasoning-effort-map", "write the mapping of efforts into the chat template", "{}"),
    **refused("response-role", "answers are the assistant's", "assistant"),
    **becomes(
        "reasoning-parser",
        "--reasoning-parser",
        Part.ROUTER,
        one_of(
            _REASONING_PARSERS,
            "reasoning of this form is not told from the answer",
            Loss.REFUSED,
        ),
    ),
    **refused("reasoning-parser-plugin", _OWN_PARSERS),
    **lost("reasoning-config", "a thinking budget ends with the model's own mark alone", "{}"),
    **refused(
        "return-tokens-as-token-ids!", "set return_tokens_as_token_ids in each request instead"
    ),
    **lost("enable-force-include-usage!", "usage comes with stream_options.include_usage"),
    **becomes(
        "tool-call-parser",
        "--tool-call-parser",
        Part.ROUTER,
        one_of(_TOOL_PARSERS, "the format of calls is what the chat template shows"),
    ),
    **needless("enable-auto-tool-choice!", "tool_choice auto is always there"),
    **needless("exclude-tools-when-tool-choice-none!", "so it is always"),
    **lost("tool-parser-plugin", _OWN_PARSERS),
    **lost("tool-server", "requests bring their tools, and clients run them"),
    **lost("tool-strict-level", "each tool says by `strict` whether its schema is kept to", "auto"),
    **refused(
        "chat-template-content-format",
        "templates see a message's parts joined by line breaks",
        "auto string",
    ),
    **needless("enable-request-id-headers!", "every answer has X-Request-Id"),
    **needless("enable-server-load-tracking!", "/load is always there"),
    **needless("enable-tokenizer-info-endpoint!", "/tokenizer_info is always there"),
    **needless("enable-prompt-tokens-details!", "cached tokens are always told"),
    **needless("disable-fastapi-docs! enable-offline-docs!", "/docs needs no other host"),
    **needless("log-error-stack!", "the log has the stack of every defect"),
    **needless("fingerprint-mode fingerprint-value", "system_fingerprint tells of weights"),
    **needless("renderer-num-workers", "--tokenizer-threads and --text-processes of the router"),
    **needless("enable-flash-late-interaction!", "no scores are served"),
    **becomes("sse-keep-alive-interval", "--keep-alive-s", Part.ROUTER, _keep_alive),
    **becomes("shutdown-timeout", "--shutdown-timeout-s", Part.SERVE, _shutdown),
    **becomes("uvicorn-log-level log-level", "--log-level", Part.ROUTER, log_level),
    **becomes("enable-log-requests!", "--[no-]log-requests", Part.ROUTER),
    **needless("max-log-len enable-log-outputs! enable-log-deltas!", "no text is ever logged"),
    **needless(
        "disable-uvicorn-access-log! disable-access-log-for-endpoints",
        "there is a line for each request for tokens, which --no-log-requests leaves out",
    ),
    **lost("logging-config log-config-file", "--log-format and --log-level are all there is", "{}"),
    **needless("disable-log-stats! aggregate-engine-logging!", "figures are at /metrics"),
    **becomes("otlp-traces-endpoint", "--otlp-endpoint", Part.BOTH, otlp_over_http),
    **needless("collect-detailed-traces+", "spans go from HTTP to engine steps"),
    **lost("uds", "the router listens on a host and port"),
    **lost("root-path", f"paths have no prefix; {_PROXY}"),
    **becomes("allowed-origins", "--cors-origin", Part.ROUTER, _origins),
    **needless("allowed-methods allowed-headers", "origins alone decide; see --cors-origin"),
    **lost("allow-credentials!", "pages send a key in a header, and no cookies"),
    **lost("middleware", f"no code of others runs in the router; {_PROXY}"),
    **needless("h11-max-incomplete-event-size h11-max-header-count", "a header may have 8 kB"),
    **refused(
        "config",
        "files of flags are not read; write its lines as flags and translate again",
    ),
    **lost("grpc! grpc-port", "shards speak penstock's own gRPC: docs/grpc-api.md"),
    **by_hand("enable-scale-out!", _OWN_TRANSFER),
    **lost("cohere-is-reasoning-model! cohere-format", "Cohere's API is not served"),
    **lost("anthropic-disabled-thinking-effort", "thinking is as the model's template has it"),
    **lost("enable-per-request-metrics!", "the log and traces have them, answers do not"),
    # The engine.
    **same("max-num-seqs gpu-memory-utilization"),
    **becomes("enable-prefix-caching!", "--[no-]enable-prefix-caching"),
    **becomes("device-memory-utilization", "--gpu-memory-utilization"),
    **becomes("max-num-batched-tokens", "--max-num-batched-tokens", convert=readable_int),
    **becomes("kv-cache-memory-bytes", "--kv-memory", convert=readable_bytes),
    **becomes("num-gpu-blocks-override", "--kv-blocks"),
    **becomes("block-size", "--block-size", convert=_block_size),
    **becomes(
        "kv-cache-dtype",
        "--kv-cache-dtype",
        convert=one_of(
            {"auto": None, "float16": "float16", "fp8": "fp8", "fp8_e4m3": "fp8"},
            "keys and values are as precise as the weights: more memory, no other answers",
        ),
    ),
    **becomes("max-logprobs", "--max-logprobs", convert=_bound_or_none),
    **becomes("max-num-queued-reqs", "--max-queued-requests", Part.ROUTER),
    **becomes(
        "max-num-queued-tokens",
        "--max-queued-tokens",
        Part.ROUTER,
        at_least(1, "one prompt may always wait"),
    ),
    **becomes(
        "attention-backend",
        "--attention-backend",
        convert=one_of(_BACKENDS, "the best here that serves the model is taken", Loss.NONE),
    ),
    **becomes("device-ids", "CUDA_VISIBLE_DEVICES", Part.ENVIRONMENT),
    **becomes(
        "tensor-parallel-size pipeline-parallel-size",
        "--tensor-parallel-size",
        Part.DEVICES,
        at_least(1, "one GPU at least"),
    ),
    **becomes("data-parallel-size", "--shards", Part.COPIES, at_least(1, "one shard at least")),
    **needless("enable-chunked-prefill!", "long prompts are always computed in chunks"),
    **needless("scheduling-policy", "`priority` of requests is always heeded"),
    **needless(
        "max-num-scheduled-tokens max-num-active-seqs prefill-schedule-interval watermark "
        "scheduler-reserve-full-isl! long-prefill-token-threshold "
        "long-prefill-token-threshold-adaptive! async-scheduling! stream-interval "
        "disable-chunked-mm-input!",
        "the scheduler shares steps out by itself; --max-prefill-tokens is what there is to set",
    ),
    **refused("scheduler-cls worker-cls worker-extension-cls", "the engine runs no code of others"),
    **needless(
        "prefix-caching-hash-algo prefix-cache-retention-interval prefix-match-unit",
        "prefixes are found by blake2b of whole blocks and kept while there is room",
    ),
    **needless("kv-cache-dtype-skip-layers+", "all layers alike"),
    **needless("disable-hybrid-kv-cache-manager!", "each layer keeps no more than it sees"),
    **needless("kv-sharing-fast-prefill! swa-bounded-replay! disable-cascade-attn!", _KERNELS),
    **needless(
        "mamba-backend mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding! "
        "mamba-cache-philox-rounds mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size "
        "mamba-cache-mode enable-mamba-shared-prefix-checkpoint! replayssm-buffer-len "
        "use-replayssm! gdn-prefill-backend kda-prefill-backend kda-decode-backend",
        _STATES,
    ),
    **becomes("kv-offloading-size", "--kv-host-bytes", convert=_gibibytes),
    **needless("kv-offloading-backend", "--kv-host-bytes has one backend, penstock's own"),
    **lost(
        "offload-backend cpu-offload-gb cpu-offload-params+ offload-group-size "
        "offload-num-in-group offload-prefetch-step offload-params+",
        _NO_OFFLOAD,
        "0",
    ),
    **by_hand("kv-transfer-config", _OWN_TRANSFER),
    **needless("kv-events-config", "shards tell routers by gRPC what their prefix caches hold"),
    **lost(
        "ec-transfer-config ec-manager-config",
        "a shard keeps what its image encoder made for itself alone",
    ),
    **becomes("speculative-config", "--speculative-tokens", convert=_draft_tokens),
    **lost("spec-method spec-model spec-tokens", _DRAFTS),
    **needless("per-request-spec-decode-metrics", _DRAFTS),
    **needless(
        "optimization-level performance-mode compilation-config cudagraph-capture-sizes+ "
        "max-cudagraph-capture-size ir-op-priority jit-monitor-mode jit-monitor-verbose! "
        "enable-flashinfer-autotune!",
        _COMPILER,
    ),
    **needless(
        "monokernel! moe-backend linear-backend sparse-indexer-topk-backend kernel-config "
        "attention-config disable-custom-all-reduce! enable-shm-tensor-arena!",
        _KERNELS,
    ),
    **needless(
        "show-hidden-metrics-for-version kv-cache-metrics! kv-cache-metrics-sample "
        "cudagraph-metrics! enable-mfu-metrics! custom-histogram-buckets "
        "enable-logging-iteration-details!",
        _OWN_METRICS,
    ),
    **needless("enable-layerwise-nvtx-tracing! profiler-config", "py-spy is the profiler"),
    **lost(
        "structured-outputs-config",
        "grammars are llguidance's; how JSON is written says `structured_outputs` of each request",
        "{}",
    ),
    **lost("aux-output-config enable-return-routed-experts! return-sampling-mask!", "is not told"),
    **needless("enable-trace-replay!", "see --audit-log and `penstock replay`"),
    **lost("additional-config", "is for platforms that are not served", "{}"),
    **lost(
        "weight-transfer-config enable-sleep-mode! sleep-mode-offload-cudagraph! "
        "sleep-preserve-parameter-names+",
        _RLHF,
    ),
    **needless("sleep-mode-backend", "a shard does not sleep: see --enable-sleep-mode"),
    **needless("watchdog-config", "an engine that stalls is started again: --stall-timeout-s"),
    **needless("enable-cumem-allocator! enable-nccl-comm-suspend!", _PROCESS),
    **needless("fail-on-environ-validation!", "a wrong flag always ends the start"),
    # Images.
    **becomes("allowed-local-media-path", "--allowed-media-folder", Part.ROUTER),
    **named(
        "allowed-media-domains+",
        Rule(to="--allowed-media-domains", part=Part.ROUTER, joins=True),
    ),
    **becomes("limit-mm-per-prompt", "--max-images", Part.ROUTER, _max_images),
    **named("language-model-only!", Rule(to="--image-cache-bytes 0")),
    **refused(
        "mm-processor-kwargs", "write the values into the model's preprocessor_config.json", "{}"
    ),
    **lost("media-io-kwargs", _OWN_IMAGES, "{}"),
    **lost("enable-mm-embeds!", "images are pictures, never what another encoder made of them"),
    **lost("mm-encoder-only!", "a shard has the encoder and the model"),
    **lost("video-pruning-rate video-pruning-method", _NO_VIDEO),
    **lost(
        "mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin",
        "the encoder's weights have 16 bits or more",
    ),
    **needless(
        "mm-processor-cache-gb mm-processor-cache-type mm-hasher-algorithm "
        "mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend "
        "mm-encoder-attn-dtype skip-mm-profiling! mm-tensor-ipc mm-processor-device "
        "mm-ipc-gpu-memory-gb mm-device-do-normalize!",
        _IMAGE_PROCESS,
    ),
    **needless("interleave-mm-strings!", "images always stand where a request has them"),
    **named("lora-modules+", Rule(to="--lora", convert=_lora_module, repeats=True)),
    **same("enable-lora! max-lora-rank"),
    **becomes("max-loras", "--max-loras", convert=_max_loras),
    **needless("max-cpu-loras", "adapters that are loaded stay on the device: see --max-loras"),
    **needless("fully-sharded-loras! specialize-active-lora!", "is a trade-off of their kernels"),
    **lost("lora-dtype", "adapters are computed in the model's dtype", "auto"),
    **lost(
        "enable-tower-connector-lora! lora-target-modules+ default-mm-loras "
        "enable-mixed-moe-lora-format! enable-moe-shared-loras! max-lora-cls-labels",
        _ODD_ADAPTERS,
    ),
    # Several devices and machines.
    **lost(
        "decode-context-parallel-size dcp-comm-backend dcp-q-replicate! "
        "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size "
        "prefill-context-parallel-size enable-hc-sp! "
        "enable-expert-parallel! enable-batch-sharded-sampling! enable-ep-weight-filter! "
        "all2all-backend enable-dbo! ubatch-size enable-elastic-ep! elastic-ep-max-dp-size "
        "dbo-decode-token-threshold dbo-prefill-token-threshold enable-eplb! eplb-config "
        "expert-placement-strategy",
        _ONE_SPLIT,
        "1",
    ),
    **lost(
        "headless! nnodes node-rank master-addr master-port data-parallel-rank "
        "data-parallel-start-rank data-parallel-size-local data-parallel-address "
        "data-parallel-rpc-port data-parallel-hybrid-lb! data-parallel-external-lb! "
        "data-parallel-multi-port-external-lb!",
        _ONE_MACHINE,
    ),
    **needless(
        "data-parallel-backend data-parallel-supervisor-port dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold dp-sync-interval "
        "disable-nccl-for-dp-synchronization! distributed-executor-backend "
        "distributed-timeout-seconds cpu-distributed-timeout-seconds numa-bind! numa-bind-nodes+ "
        "numa-bind-cpus+ ray-workers-use-nsight! enable-fault-tolerance! fault-tolerance-config",
        _PROCESS,
    ),
}
