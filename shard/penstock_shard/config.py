"""The configuration of a shard; its fields are the shard's flags, in the order of `penstock shard
--help`.

Flags that mean the same as in vLLM have the same names.
"""

from __future__ import annotations

import argparse
import functools
import socket
from collections.abc import Collection
from dataclasses import dataclass

from penstock_common.flags import flag, short, size, size_with_unit
from penstock_common.shared_flags import (
    OBSERVING,
    SHARD_API_KEY,
    SHARD_PORT,
    ObservingConfig,
    key,
    model_name,
)
from penstock_proto.limits import MAX_ADAPTER_NAME_CHARACTERS

_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_count = functools.partial(flag, at_least=1)
_port = functools.partial(flag, at_least=0, at_most=65535)


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """The processor time and memory that compiling one constraint may take."""

    timeout_s: float
    memory_bytes: int


def adapter(text: str) -> tuple[str, str]:
    """Parse an adapter's NAME=PATH. Raises ArgumentTypeError for other text."""
    name, _, source = text.partition("=")
    if not (name and source):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, not {short(text)}")
    return name, source


def engine_arg(text: str) -> tuple[str, str]:
    """Parse an engine argument's NAME=VALUE. Raises ArgumentTypeError for other text."""
    name, given, value = text.partition("=")
    if not (name.isidentifier() and given):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {short(text)}")
    return name, value


def name_refusal(name: str, model_names: Collection[str]) -> str:
    """Say why an adapter cannot have this name; '' if it can."""
    if not 1 <= len(name) <= MAX_ADAPTER_NAME_CHARACTERS:
        return f"a name has 1..{MAX_ADAPTER_NAME_CHARACTERS} characters"
    if not name.isprintable() or name != name.strip():
        return "a name has no control characters, and no space around it"
    if name in model_names:
        return "the model itself has this name"
    return ""


@dataclass(frozen=True, slots=True)
class ShardConfig(ObservingConfig):
    """The configuration of a shard. Sizes that are None are determined at load."""

    model: str | None = flag(
        None,
        "a directory, a GGUF file or a hub id; HUB_ID:END names one of several GGUF files by "
        "the end of its name (default: the built-in toy model)",
        group="model",
        metavar="PATH_OR_HUB_ID",
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub model")
    download_dir: str | None = flag(None, "folder for hub models (default: HF_HOME)")
    served_model_names: tuple[str, ...] = flag(
        (),
        "name that clients ask for, and aliases (default: the hub id, or the name of the "
        "directory or GGUF file)",
        name="--served-model-name",
        metavar="NAME",
        several=True,
    )
    chat_template: str | None = flag(
        None, "a jinja chat template instead of the model's own", metavar="FILE"
    )
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    embeddings: str = flag(
        "auto",
        "serve embeddings: of the last token, or the mean of all (default: as in the model's "
        "modules.json, if it has one)",
        choices=("auto", "last", "mean"),
    )
    load_format: str = flag(
        "auto",
        "dummy: random weights, only the configuration is read",
        choices=("auto", "safetensors", "dummy"),
    )

    host: str = flag("127.0.0.1", "address", group="server")
    port: int = _port(SHARD_PORT, "port")
    api_key: str | None = key(SHARD_API_KEY, "key that calls need")
    tls_cert_file: str | None = flag(
        None,
        "speak TLS with this certificate, read again when it changes",
        alias="--ssl-certfile",
    )
    tls_key_file: str | None = flag(None, "private key", alias="--ssl-keyfile")
    tls_client_ca_file: str | None = flag(
        None,
        "refuse clients without a certificate of these authorities (mutual TLS)",
        alias="--ssl-ca-certs",
    )
    stall_timeout_s: float = flag(
        10.0,
        "restart an engine after this time without a sign of life, or in one step that also "
        "takes ten times as long as expected",
        at_least=0,
    )
    max_restarts: int = _count(5, "give up after this many failed engine starts in a row")
    standby: bool = flag(
        False,
        "keep a second engine process that has imported everything, so that a new engine is ready "
        "seconds sooner when one dies (about 0.4 GB of memory)",
    )
    drain: str = flag(
        "migrate",
        "migrate: on SIGTERM, move running requests to other shards at once; those that none "
        "can continue finish here; finish: all finish here",
        choices=("migrate", "finish"),
    )
    role: str = flag(
        "both",
        "prefill: routers send long prompts here, and move their requests on once computed; "
        "decode: they send all else; needs --kv-peers",
        choices=("both", "prefill", "decode"),
    )
    drain_timeout_s: float = flag(30.0, "longest time for --drain", at_least=0)

    metrics_port: int | None = _port(
        None,
        "serve Prometheus metrics over HTTP on this port of --host (default: nowhere)",
        group=OBSERVING,
    )
    log_requests: bool = flag(
        False, "log a line for each request, as the router does", negatable=True
    )

    runner: str = flag("model", "source of the tokens", group="engine", choices=("model", "fake"))
    engine: str = flag(
        "penstock",
        "engine that computes; vllm: the one in another environment (--engine-python)",
        choices=("penstock", "vllm"),
    )
    engine_python: str | None = flag(
        None, "the Python of the environment that has vLLM", metavar="PATH"
    )
    # (name, value)
    engine_args: tuple[tuple[str, str], ...] = flag(
        (),
        "an argument of vLLM's own engine; may be repeated",
        name="--engine-arg",
        metavar="NAME=VALUE",
        read=engine_arg,
        gather=tuple,
    )
    device: str = flag("auto", "default: cuda where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto",
        "auto: the model's own on cuda; float16 weights and float32 arithmetic on cpu. "
        "bfloat16 on cpu rounds the inputs of products; faster with AVX-512 BF16",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    quantization: str | None = flag(
        None,
        "round weights at load: int8 with a scale for each output (cpu), fp8 with a scale for each "
        "output, activations too (GPU), int4 in groups of 32 (cpu) or of 128 by torchao (GPU); "
        "default: as stored, in 4 and 8 bits too with --dtype auto (cpu), fp8 where the GPU has it",
        alias="--quantize",
        choices=("int8", "fp8", "int4"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "auto: precision of activations (cpu: of weights); fp8 needs the attention backend "
        "triton or sdpa",
        choices=("auto", "float32", "float16", "fp8"),
    )
    threads: int | None = _count(
        None, "compute threads on cpu (default: one less than the cores, or the quota)"
    )
    attention_backend: str = flag(
        "auto",
        "cpu: our C kernels; sdpa: plain torch (default: the best one here that supports the "
        "model)",
        choices=("auto", "cpu", "sdpa", "flash_attn", "torch_varlen", "triton"),
    )
    enforce_eager: bool = flag(
        False, "do not record decode steps as CUDA graphs, or as calls of kernels (cpu)"
    )
    load_cache_bytes: int = flag(
        16 * 2**30,
        "disk for what loads on cpu made of models' files, beside compiled kernels: the next "
        "start reads it, and is ready seconds sooner; 0: keep none",
        name="--load-cache",
        read=size_with_unit,
        at_least=0,
        metavar="BYTES",
    )
    gpu_memory_utilization: float = flag(
        0.9, "share of GPU memory to use", above=0, at_most=1, metavar="F"
    )

    exact: bool = flag(
        False,
        "batch invariance: a token's logits have the same bits in any batch, so that requests "
        "continue on another shard bit for bit; slower on a GPU; on a cpu it is so anyway; refused "
        "if a check at load finds a difference",
        group="equal results",
    )

    tensor_parallel_size: int = _count(
        1,
        "devices that share one model, each with a process",
        group="a model over several devices",
    )
    nnodes: int = _count(1, "machines with an equal number of these")
    node_rank: int = flag(
        0,
        "number of this machine; 0 answers, the others compute",
        at_least=0,
        metavar="R",
    )
    master_addr: str | None = flag(None, "address of machine 0, with --nnodes", metavar="HOST")
    master_port: int = _port(29501, "port at --master-addr")

    max_model_len: int | None = _count(
        None,
        "longest prompt plus output (default: the model's context)",
        group="scheduling",
        metavar="TOKENS",
    )
    max_num_seqs: int = _count(256, "most requests in one step")
    max_num_batched_tokens: int | None = _count(
        None, "most tokens computed in one step (default: 512 on cpu, 2048 on cuda)"
    )
    max_prefill_tokens: int | None = _count(
        None,
        "most prompt tokens in a step while other requests decode; chunks of a longer prompt take "
        "no longer than the decodes (default: half of --max-num-batched-tokens)",
    )
    aging_s: float = flag(
        30.0,
        "a request goes first after this wait for its next token; one of a lower class every "
        "eighth time",
        above=0,
    )
    enable_chunked_prefill: bool = flag(
        True,
        "cannot be turned off: long prompts are computed in chunks",
        negatable=True,
    )
    max_queued_requests: int = _count(1024, "refuse beyond this many waiting requests")
    max_queued_tokens: int = _count(4_000_000, "refuse beyond this many waiting prompt tokens")
    max_logprobs: int = flag(
        20,
        "most log-probabilities a request may ask for at each token; -1: all of the vocabulary",
        at_least=-1,
    )

    # Draft tokens further ahead than 64 are hardly ever accepted.
    speculative_tokens: int = flag(
        0,
        "n-gram speculative decoding: draft up to N tokens from the sequence itself, at most 64; "
        "the output is the same, faster where text repeats",
        group="speculation",
        at_least=0,
        at_most=64,
    )

    enable_prefix_caching: bool = flag(
        True, "reuse KV blocks of equal prefixes", group="KV cache", negatable=True
    )
    block_size: int | None = _count(
        None,
        "tokens in a KV block (default: that of the attention backend)",
        metavar="TOKENS",
    )
    state_spacing: int = _count(
        512,
        "distance of kept states, for layers with a state in place of keys; a multiple of the "
        "block size. States at the last full block of each prompt, and where prompts part, are "
        "kept too",
        metavar="TOKENS",
    )
    kv_blocks: int | None = _count(None, "number of KV blocks (default: from free memory)")
    kv_memory_bytes: int | None = _count(
        None,
        "memory for KV blocks, as 512M or 2G",
        name="--kv-memory",
        read=size_with_unit,
        metavar="BYTES",
    )
    image_cache_bytes: int = flag(
        2**30,
        "host memory for encoded images, of a model that sees, as 512M or 2G, and as much "
        "again for their pixels; 0: serve only text",
        read=size,
        at_least=0,
        metavar="BYTES",
    )
    retained_kv_share: float = flag(
        0.5,
        "largest share of KV blocks to retain for ended requests while their clients run "
        "tools; 0: none",
        at_least=0,
        at_most=1,
        metavar="F",
    )
    kv_host_bytes: int = flag(
        0,
        "host memory for copies of KV blocks whose prefixes are used again, as 512M or 2G: "
        "found once the device has reused the blocks, and by the next engine if one dies",
        read=size,
        at_least=0,
        metavar="BYTES",
    )
    kv_disk: str | None = flag(
        None,
        "a directory, of no other shard, for copies of those blocks on disk: the next shard "
        "here finds them too",
        metavar="DIR",
    )
    kv_disk_bytes: int = flag(
        0, "size of --kv-disk; the oldest go first", read=size, at_least=0, metavar="BYTES"
    )
    kv_disk_age_s: float = flag(
        86_400.0,
        "delete older copies, as keys and values reveal prompts",
        above=0,
        at_most=1e9,
    )
    kv_disk_salted: bool = flag(
        False, "write blocks of requests with a cache_salt to --kv-disk too"
    )
    kv_peers: tuple[str, ...] = flag(
        (),
        "HOST:PORT of other shards: KV blocks are fetched from there, not computed, and they "
        "may fetch ours; a name may stand for several; needs --kv-host-bytes and "
        "PENSTOCK_KV_PEER_KEY",
        metavar="ADDRESS",
        several=True,
    )
    kv_peer_key: str | None = key(
        "PENSTOCK_KV_PEER_KEY", "key of shards for each other, which no client has"
    )
    kv_peer_ca_file: str | None = flag(
        None,
        "speak TLS with peers that have certificates of these authorities; ours is --tls-cert-file",
        metavar="FILE",
    )
    kv_peer_server_name: str | None = flag(
        None, "name in peers' certificates (default: the address connected to)"
    )
    check_integrity: bool = flag(
        False,
        "recount which request has which KV block when the engine is idle; if counts differ, "
        "the engine logs it, ends and is started again",
    )

    max_constraint_bytes: int = _count(
        2**18,
        "longest schema, regex, grammar or list of choices",
        group="constraints on outputs",
        read=size,
        metavar="BYTES",
    )
    constraint_timeout_s: float = flag(
        2.0, "refuse a constraint that takes a processor longer to compile", above=0
    )
    constraint_memory_bytes: int = _count(
        2**28, "refuse a constraint of more, as 512M or 2G", read=size, metavar="BYTES"
    )
    constraint_threads: int = _count(
        1, "threads of the engine that compile constraints and fill their masks"
    )

    # (name, source)
    loras: tuple[tuple[str, str], ...] = flag(
        (),
        "serve a LoRA adapter under this name: a directory or hub id; may be repeated",
        group="adapters",
        name="--lora",
        metavar="NAME=PATH",
        read=adapter,
        gather=tuple,
    )
    enable_lora: bool = flag(
        False, "allow loading adapters while the shard runs (default: only with --lora)"
    )
    keep_loras: bool = flag(
        True,
        "reload adapters that were loaded while the shard ran, at its next start at this port "
        "for this model",
        negatable=True,
    )
    max_loras: int = _count(
        8, "most adapters at once; a GPU sets memory aside for all", at_most=256
    )
    max_lora_rank: int = _count(64, "highest rank of an adapter", at_most=512, metavar="R")

    step_ms: float = flag(
        20.0,
        "time of a step",
        group="fake runner (no torch, no weights)",
        at_least=0,
    )
    fake_eos_rate: float = flag(
        0.0, "probability that a token ends the sequence", at_least=0, at_most=1, metavar="P"
    )
    fake_weights: str = flag("fake", "another name gives other tokens", metavar="NAME")
    fake_crash_on: int | None = flag(
        None,
        "end the engine at the tenth token of a sequence with this id in its prompt",
        at_least=0,
        metavar="ID",
    )

    def __post_init__(self) -> None:
        if not self.served_model_names:
            # Resolve the model's path only once, because a link in it may change while the shard
            # runs.
            object.__setattr__(self, "served_model_names", (model_name(self.model),))

    @property
    def model_name(self) -> str:
        """The model's first name in requests."""
        return self.served_model_names[0]

    @property
    def extra(self) -> str:
        """The name of penstock's optional extra that has the packages for this shard."""
        return "fake" if self.runner == "fake" else "shard"

    @property
    def log_name(self) -> str:
        """The name of this shard in its log; empty while its port is unknown. If the shard listens
        on all addresses, this is the machine's name and the port.
        """
        host = socket.gethostname() if self.host in _ALL_ADDRESSES else self.host
        return f"{host}:{self.port}" if self.port else ""

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.loras)

    @property
    def constraint_limits(self) -> ConstraintLimits:
        return ConstraintLimits(self.constraint_timeout_s, self.constraint_memory_bytes)

    @property
    def max_step_logits(self) -> int:
        """The largest number of rows of logits in a step: one for each sequence and each draft."""
        drafts = max(self.max_num_seqs, self.speculative_tokens) if self.speculative_tokens else 0
        return self.max_num_seqs + drafts

    def batched_tokens(self, device: str) -> int:
        """The largest number of tokens in a step; by default, about half a second of computing."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if device == "cpu" else 2048, self.max_num_seqs)

    def most_logprobs(self, vocab_size: int) -> int:
        """The largest number of log-probabilities of a token, for a vocabulary of `vocab_size`."""
        return vocab_size if self.max_logprobs < 0 else self.max_logprobs

    def prefill_tokens(self, device: str) -> int:
        """The largest number of prompt tokens in a step in which other requests decode."""
        return self.max_prefill_tokens or max(1, self.batched_tokens(device) // 2)
