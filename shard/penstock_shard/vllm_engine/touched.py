"""The names of vLLM that this folder uses. A check at load tells whether vLLM has them.

Keys are `module:Class`. Values are names of attributes and fields, also of attributes that the
constructor sets, and of methods' parameters.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import msgspec

_Touched = Mapping[str, tuple[str, ...]]

_CONFIGURATION: _Touched = {
    "vllm.config:PoolerConfig": ("pooling_type",),
    "vllm.config:VllmConfig": (
        *("model_config", "cache_config", "device_config", "scheduler_config"),
        *("additional_config", "use_v2_model_runner", "parallel_config"),
    ),
    "vllm.config:ParallelConfig": ("worker_cls",),
    "vllm.config:CacheConfig": (
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "gpu_memory_utilization",
    ),
    "vllm.config:DeviceConfig": ("device_type",),
    "vllm.config:SchedulerConfig": ("max_num_batched_tokens",),
    "vllm.config:ModelConfig": (
        *("architectures", "dtype", "hf_text_config", "max_model_len"),
        *("get_vocab_size", "get_hidden_size"),
    ),
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        *(
            "create_engine_config",
            "usage_context",
            "headless",
            "model",
            "skip_tokenizer_init",
            "generation_config",
        ),
        *("disable_log_stats", "revision", "dtype", "tensor_parallel_size", "max_model_len"),
        *("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size"),
        *("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
        *("enforce_eager", "max_logprobs", "trust_remote_code", "load_format"),
        *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
        *("runner", "convert", "pooler_config", "language_model_only"),
        *("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
    ),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.platforms:current_platform": (
        *("is_cuda", "is_cpu", "get_device_name", "device_id_to_physical_device_id"),
    ),
    "vllm.usage.usage_lib:UsageContext": ("OPENAI_API_SERVER",),
    "vllm.third_party:pynvml": (
        *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"),
        "NVMLError",
    ),
    "vllm.sampling_params:SamplingParams": (
        *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids"),
        *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
        *("prompt_logprobs", "detokenize", "skip_clone", "extra_args"),
    ),
}
# Names for `core.py`, `images.py`, `continuing.py` and `grammars.py`.
CORE: _Touched = {
    **_CONFIGURATION,
    "vllm.config:SchedulerConfig.": ("async_scheduling", "scheduler_cls"),
    "vllm.config:ModelConfig.": ("hf_config",),
    "vllm.engine.arg_utils:AsyncEngineArgs.": (
        *("limit_mm_per_prompt", "mm_device_do_normalize", "mm_processor_cache_gb"),
    ),
    "vllm.multimodal.inputs:MultiModalFieldConfig": ("batched", "flat_from_sizes", "keep_on_cpu"),
    "vllm.multimodal.inputs:MultiModalKwargsItems": ("from_hf_inputs",),
    "vllm.multimodal.inputs:PlaceholderRange": ("offset", "length"),
    "vllm.pooling_params:PoolingParams": ("task", "use_activation"),
    "vllm.renderers:renderer_from_config": (),
    "vllm.sampling_params:SamplingParams.": ("_bad_words_token_ids", "structured_outputs"),
    "vllm.sampling_params:StructuredOutputsParams": ("grammar",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("add_request", "update_from_output"),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        *("add_request", "update_from_output", "vllm_config", "structured_output_manager"),
    ),
    "vllm.v1.engine:EngineCoreEvent": ("type",),
    "vllm.v1.engine:EngineCoreOutput": (
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors"),
        *("pooling_output", "finish_reason", "stop_reason", "events", "prefill_stats"),
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs", "scheduler_stats"),
    "vllm.v1.engine.core_client:AsyncMPClient": (
        *("add_request_async", "abort_requests_async", "get_output_async", "ensure_alive"),
        *("add_lora_async", "remove_lora_async", "reset_prefix_cache_async"),
        "reset_running_requests",
    ),
    "vllm.v1.engine.core_client:EngineCoreClient": (
        *("make_async_mp_client", "vllm_config", "executor_class", "log_stats"),
    ),
    "vllm.v1.engine.input_processor:InputProcessor": (
        *("process_inputs", "lora_request", "priority"),
    ),
    "vllm.v1.executor:Executor": ("get_class",),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": (
        *("monitor_workers", "start_worker_monitor", "inline"),
    ),
    "vllm.v1.metrics.stats:PrefillStats": ("num_computed_tokens", "num_cached_tokens"),
    "vllm.v1.metrics.stats:SchedulerStats": ("kv_cache_usage",),
    "vllm.v1.request:Request": (
        *("sampling_params", "prompt_token_ids", "num_prompt_tokens", "_output_token_ids"),
    ),
    "vllm.v1.structured_output:StructuredOutputManager": ("backend", "executor"),
    "vllm.v1.structured_output.backend_types:StructuredOutputBackend": (
        *("compile_grammar", "allocate_token_bitmask", "destroy"),
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar": (
        *("accept_tokens", "fill_bitmask", "is_terminated"),
    ),
}
# Names for `generate_core.py`.
GENERATE: _Touched = {
    **_CONFIGURATION,
    "vllm.logprobs:Logprob": ("logprob", "rank"),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason", "stop_reason"),
    "vllm.outputs:RequestOutput": ("outputs", "prompt_logprobs", "num_cached_tokens"),
    "vllm.sampling_params:RequestOutputKind": ("DELTA",),
    "vllm.sampling_params:SamplingParams.": ("output_kind",),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        *("from_vllm_config", "generate", "abort", "errored", "dead_error", "add_lora"),
        *("remove_lora", "lora_request", "priority", "disable_log_stats"),
    ),
}
# Names for `in_core/cpu_worker.py`. The class in `cpu_worker` itself is not imported here, because
# that changes torch.
CPU_WORKER: _Touched = {
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("generators",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("input_batch", "discard_request_mask"),
    "vllm.v1.worker.gpu_worker:Worker": ("sample_tokens", "grammar_output"),
}


def missing(touched: _Touched) -> list[str]:
    """List names that the installed vLLM lacks, as `module:Class` or `module:Class.name`."""
    return [name for each in touched.items() for name in _missing_of(*each)]


def _missing_of(where: str, names: tuple[str, ...]) -> Iterator[str]:
    where = where.rstrip(".")
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        yield where
        return
    known = _names_of(found)
    yield from (f"{where}.{each}" for each in names if each not in known)


def _names_of(found: Any) -> set[str]:
    """Return names of a class that users of an instance can use."""
    names = set(dir(found))
    for base in getattr(found, "__mro__", ()):
        names.update(inspect.get_annotations(base))
        init = inspect.unwrap(base.__dict__.get("__init__"))
        names.update(getattr(getattr(init, "__code__", None), "co_names", ()))
    if hasattr(found, "__dataclass_fields__"):
        names.update(field.name for field in fields(found))
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        names.update(found.__struct_fields__)
    for each in list(names):
        member = inspect.getattr_static(found, each, None)
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member):
            names.update(inspect.signature(member).parameters)
    return names
