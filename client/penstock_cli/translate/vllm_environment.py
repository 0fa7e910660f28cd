"""Rules for each environment variable of vLLM (0.33).

`vllm_flags` has the flags. A name with a * is a family.
"""

from __future__ import annotations

from penstock_cli.translate.flag_rules import (
    HUB,
    NotTranslatable,
    Part,
    Table,
    becomes,
    by_hand,
    log_level,
    lost,
    needless,
    one_of,
    refused,
)


def _gibibytes(text: str) -> str | None:
    # 0 means vLLM's default.
    return f"{text}G" if text != "0" else None


def _body_bytes(text: str) -> str:
    if int(text) < 1:
        raise NotTranslatable(f"{text}: a body always has a bound; give --max-body-bytes")
    return text


def _threads(text: str) -> str | None:
    """Count the cores in `0-31` or `0,2,4`; for several instances (`0-3|4-7`), those of the
    first.
    """
    if text in ("auto", "nobind"):
        return None
    try:
        ranges = [part.partition("-") for part in text.partition("|")[0].split(",")]
        return str(sum(int(last or first) - int(first) + 1 for first, _, last in ranges))
    except ValueError:
        raise NotTranslatable(f"{text}: give --threads N") from None


_IMAGES_ALONE = "text and images are served, as requests have them"
_KERNELS = "chooses among vLLM's own kernels and libraries; there is nothing of the kind to choose"
_COMPILER = "tunes vLLM's compiler and CUDA graphs; there is nothing of the kind to tune"
_BUILD = "is for building vLLM"
_PROCESS = "how vLLM arranges its own processes; there is nothing of the kind to arrange"
_DEBUG = "looks into vLLM; --log-level debug and py-spy are what there is here"
_ONE_SPLIT = "a model is split in one way only: each GPU has a part of every layer"
_TRANSFERS = "tunes vLLM's ways to move KV blocks; penstock's own has nothing of the kind to tune"
_OWN_TOOLS = "calls are read without expressions, and kept to a schema where `strict` says so"
_NOBODY = "nothing is reported to anybody"

ENVIRONMENT: Table = {
    **HUB,
    **becomes("VLLM_API_KEY", "PENSTOCK_API_KEY", Part.ENVIRONMENT),
    **becomes("VLLM_LOGGING_LEVEL", "--log-level", Part.ROUTER, log_level),
    **becomes("VLLM_CPU_KVCACHE_SPACE", "--kv-memory", convert=_gibibytes),
    **becomes("VLLM_CPU_OMP_THREADS_BIND", "--threads", convert=_threads),
    **lost("VLLM_CPU_NUM_OF_RESERVED_CPU", "--threads says how many are used"),
    **needless("CUDA_HOME LD_LIBRARY_PATH", "stays as it is in the environment"),
    **needless("VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE", _NOBODY),
    **needless("VLLM_USAGE_STATS_SERVER", _NOBODY),
    **needless(
        "VLLM_BATCH_INVARIANT",
        "a shard proves at load whether it is, and `penstock info` tells",
    ),
    **refused(
        "VLLM_USE_MODELSCOPE", "models are a hub's (HF_ENDPOINT) or a directory's", "0 false"
    ),
    **refused("VLLM_MODEL_REDIRECT_PATH", "name the directory as the model"),
    **refused(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "the context ends where the model's does", "0 false"
    ),
    **refused("VLLM_TEST_FORCE_LOAD_FORMAT", "give --load-format", "dummy"),
    **refused(
        "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE "
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS",
        "prompts are as the model's template has them",
    ),
    **lost("VLLM_PLUGINS", "no code of others runs in penstock"),
    **lost(
        "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL",
        "models are a hub's or a directory's; copy them there",
    ),
    **becomes(
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "--enable-lora",
        convert=one_of({"1": "", "true": "", "0": None, "false": None}, "must be 0 or 1"),
    ),
    **lost(
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST",
        "adapters are loaded by their names: see --lora and /v1/load_lora_adapter",
    ),
    **needless("VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM", "there are no such kernels"),
    **lost(
        "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_CONFIGURE_LOGGING",
        "--log-format and --log-level are all there is",
    ),
    **needless(
        "VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_DISABLE_LOG_LOGO "
        "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_LOG_MODEL_INSPECTION",
        "logs are short here, and figures are at /metrics",
    ),
    **lost(
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_ENGINE_READY_TIMEOUT_S "
        "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "times are --stall-timeout-s, --drain-timeout-s and --max-restarts of shards, and those "
        "that `penstock router --help` lists",
    ),
    **becomes(
        "VLLM_HTTP_MAX_REQUEST_BODY_SIZE", "--max-body-bytes", Part.ROUTER, convert=_body_bytes
    ),
    **needless("VLLM_REQUEST_BODY_LOG_LEVEL", "no text is ever logged"),
    **needless(
        "VLLM_CHAT_TEMPLATE_FUEL", "a template that a request brings has five seconds, no more"
    ),
    **lost(
        "VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS "
        "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
        "bounds of requests are fixed, /openapi.json has them",
    ),
    **needless("VLLM_ENABLE_RESPONSES_API_STORE", "responses are kept; see --response-store"),
    **lost("VLLM_ENABLE_COHERE_API", "Cohere's API is not served"),
    **lost(
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_ENFORCE_STRICT_TOOL_CALLING "
        "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
        _OWN_TOOLS,
    ),
    **needless(
        "VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_USE_OUTLINES_CACHE",
        "--max-constraint-bytes, --constraint-timeout-s and --constraint-memory-bytes bound it",
    ),
    **becomes("VLLM_MAX_IMAGE_PIXELS", "--max-image-pixels", Part.ROUTER),
    **by_hand("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "give the router --max-image-bytes"),
    **by_hand(
        "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
        "give the router --max-images, --max-image-bytes and --max-image-pixels",
    ),
    **needless("VLLM_MEDIA_LOADING_THREAD_COUNT", "the router's --image-processes decode images"),
    **needless("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "each redirect is checked as the URL is"),
    **needless(
        "VLLM_IMAGE_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES",
        "an image is fetched within five seconds, by one try",
    ),
    **needless(
        "VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_*", "an image that is fetched again is decoded once"
    ),
    **lost(
        "VLLM_*AUDIO_* VLLM_*IMAGE_* VLLM_*VIDEO_* VLLM_*MEDIA_* VLLM_MAX_EMBED_DECODE_BYTES "
        "VLLM_ASSETS_* VLLM_OBJECT_STORAGE_*",
        _IMAGES_ALONE,
    ),
    **lost("VLLM_SERVER_DEV_MODE", "/admin opens with --admin-key", "0"),
    **needless(
        "VLLM_TARGET_DEVICE VLLM_IMAGE_TAG VLLM_*BUILD_* VLLM_*_VERSION* VLLM_USE_PRECOMPILED* "
        "VLLM_NCCL_INCLUDE_PATH VLLM_CPU_CI_ENV CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE",
        _BUILD,
    ),
    **needless(
        "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_TUNED_CONFIG_FOLDER VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_FLASHINFER_AUTOTUNE_*",
        "what is compiled is kept below PENSTOCK_CACHE",
    ),
    **needless(
        "VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_PROCESS_NAME_PREFIX "
        "VLLM_*MULTIPROC* VLLM_RAY_* VLLM_RUST_* VLLM_USE_RUST_* VLLM_MQ_* "
        "VLLM_MSGPACK_* VLLM_*NIC_* VLLM_TPU_* LOCAL_RANK VLLM_DISTRIBUTED_USE_SPLIT_GROUP "
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_USE_SPINLOOP_EXT "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_GC_DEBUG "
        "VLLM_USE_FASTOKENS VLLM_FASTSAFETENSORS_*",
        _PROCESS,
    ),
    **needless(
        "VLLM_DP_* VLLM_RANDOMIZE_DP_* VLLM_PP_* VLLM_XPU_PP_* VLLM_ELASTIC_EP_* VLLM_DBO_* "
        "VLLM_DCP_* VLLM_USE_DIRECT_DCP_* VLLM_DEEPEP* VLLM_*NCCL* VLLM_ALLREDUCE_* "
        "VLLM_FLASHINFER_ALLREDUCE_* VLLM_FLASHINFER_MOE_A2A_* VLLM_SKIP_P2P_CHECK "
        "VLLM_REPLICATE_EMBED VLLM_STEP5_SHARD_SP_SHARED_EXPERT",
        _ONE_SPLIT,
    ),
    **needless(
        "VLLM_NIXL_* VLLM_P2P_* VLLM_EC_* VLLM_MOONCAKE_* MOONCAKE_* VLLM_KV_EVENTS_* "
        "VLLM_*KV_OFFLOAD*",
        _TRANSFERS,
    ),
    **needless(
        "VLLM_*_COMPILE VLLM_*COMPILE_CACHE* VLLM_*AOT_* VLLM_*CUDAGRAPH* VLLM_*INDUCTOR_* "
        "VLLM_XLA_* VLLM_TRITON_FORCE_* VLLM_TRITON_JIT_* VLLM_ENABLE_PREGRAD_PASSES "
        "VLLM_PATTERN_MATCH_DEBUG VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME "
        "VLLM_USE_V2_MODEL_RUNNER",
        _COMPILER,
    ),
    **needless(
        "VLLM_DEBUG_* VLLM_TRACE_* VLLM_*_PROFILING VLLM_*NANS* VLLM_GPU_SYNC_CHECK "
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
        _DEBUG,
    ),
    **needless(
        "VLLM_ROCM_* VLLM_XPU_* VLLM_CUDART_SO_PATH VLLM_*CUDA_COMPATIBILITY* VLLM_*DEEP_GEMM* "
        "VLLM_*FLASHINFER_* VLLM_*_FLASHINFER VLLM_MARLIN_* VLLM_HUMMING_* VLLM_ZENTORCH_* "
        "VLLM_KIMI_* VLLM_*MOE_* VLLM_MXFP* VLLM_*_FP4_* VLLM_*_GEMM_* VLLM_*_STREAM* "
        "VLLM_*KERNEL* VLLM_*_LAYOUT VLLM_WEIGHT_OFFLOADING_* VLLM_*PIN_MEMORY VLLM_MLA_DISABLE "
        "VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 VLLM_FLOAT32_MATMUL_PRECISION "
        "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
        "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_TRITON_USE_TD VLLM_USE_TRITON_AWQ "
        "VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS VLLM_ENABLE_HPC_OPS",
        _KERNELS,
    ),
}
