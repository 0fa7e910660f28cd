"""The configuration of a shard, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_common.shared_flags import SHARD_PORT
from penstock_common.trace_export import TracingConfig


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Processor time and memory that compiling one constraint may take."""

    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything that is configured of a shard. Sizes that are None are determined at load."""

    # None: the built-in model.
    model: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    served_model_names: tuple[str, ...] = ()
    trust_remote_code: bool = False
    load_format: str = "auto"
    chat_template: str | None = None

    host: str = "127.0.0.1"
    port: int = SHARD_PORT
    api_key: str | None = None
    # None: no TLS. With a client CA each client must present a certificate that it signed.
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    # Port for Prometheus on `host`; None: no metrics. `metrics_names`: servers whose metric names
    # are used besides our own.
    metrics_port: int | None = None
    metrics_names: tuple[str, ...] = ()

    runner: str = "model"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    # The same bits in any batch, on a GPU too.
    exact: bool = False
    # How prompts are pooled to embeddings; "auto": as the model's files say, if they do.
    embeddings: str = "auto"
    gpu_memory_utilization: float = 0.9

    # Processes that share the model, with a device each; on how many machines, and which of these
    # this one is; the address and port of the first, where the others find rank 0.
    tensor_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29501

    # Adapters loaded at the start, as (name, source); whether others may be loaded later; the most
    # at once, and their highest rank.
    loras: tuple[tuple[str, str], ...] = ()
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 64

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_prefill_tokens: int | None = None
    # A request that has waited this long for its next token goes before all others.
    aging_s: float = 30.0
    # Most draft tokens at once for a sequence; 0: no speculation.
    speculative_tokens: int = 0
    block_size: int | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    # Whether the engine checks its records of requests and blocks whenever it is idle.
    check_integrity: bool = False
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_logprobs: int = 20

    # Bounds of one constraint: its size, and the time and memory to compile it; and how many engine
    # threads compile constraints and fill their masks.
    max_constraint_bytes: int = 262_144
    constraint_timeout_s: float = 2.0
    constraint_memory_bytes: int = 256 << 20
    constraint_threads: int = 1

    # Without a beat for this long the engine counts as hung and is restarted.
    stall_timeout_s: float = 10.0
    # Failed engine starts in a row before the shard gives up.
    max_restarts: int = 5
    # On SIGTERM: whether running requests move to other shards ("migrate") or finish here
    # ("finish"), and how long either may take.
    drain: str = "migrate"
    drain_timeout_s: float = 30.0

    # `log_format` is one of penstock_common.logs.FORMATS; `log_requests`: a line for each request.
    log_level: str = "info"
    log_format: str = "auto"
    log_requests: bool = False
    # Where trace spans are exported to; None: no tracing.
    tracing: TracingConfig | None = None

    step_ms: float = 20.0
    fake_eos_rate: float = 0.0
    fake_weights: str = "fake"
    fake_crash_on: int | None = None

    @property
    def model_name(self) -> str:
        """The name in requests: the first --served-model-name, or the model's own."""
        if self.served_model_names:
            return self.served_model_names[0]
        return self.model or "penstock-toy"

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may use adapters."""
        return self.enable_lora or bool(self.loras)

    @property
    def constraint_limits(self) -> ConstraintLimits:
        """What one constraint may take to be compiled."""
        return ConstraintLimits(self.constraint_timeout_s, self.constraint_memory_bytes)

    @property
    def max_step_logits(self) -> int:
        """Most rows of logits of a step: one for each sequence, one for each draft token."""
        drafts = max(self.max_num_seqs, self.speculative_tokens) if self.speculative_tokens else 0
        return self.max_num_seqs + drafts

    def batched_tokens(self, device: str) -> int:
        """Most tokens of a step; by default what such a device computes in about half a second."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if device == "cpu" else 2048, self.max_num_seqs)

    def prefill_tokens(self, device: str) -> int:
        """Most prompt tokens of a step in which other requests decode."""
        return self.max_prefill_tokens or max(1, self.batched_tokens(device) // 2)
