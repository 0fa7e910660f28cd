"""Facts that a shard tells of itself: its model, how it is served, and its load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from penstock_proto.limits import GREEDY_TEMPERATURE
from penstock_proto.types import Pooling, SamplingParams

# Numbers that came over the wire were rounded to 32 bits.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ShardLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """A model's defaults for embeddings; `size` is the length of a whole vector."""

    pooling: Pooling
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a shard has loaded; `source` is the argument of `load_adapter`."""

    name: str
    content_hash: str
    source: str
    rank: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a model according to its files; 0 or empty if unknown."""

    # The type in config.json, such as "llama".
    model_type: str = ""
    num_parameters: int = 0
    # Bytes of the stored weights.
    weight_bytes: int = 0
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    # Heads of keys and values.
    num_kv_heads: int = 0


def _size_of(value: Any) -> float:
    return len(value) if isinstance(value, Sized) else float(value)


@dataclass(frozen=True, slots=True)
class FieldBound:
    """Bound of what an engine honours of a field, where that is less than the wire allows: a
    number's least value beside 0 and its most, or the most entries of a list.
    """

    field: str
    most: float
    least: float = 0.0

    def holds(self, value: object) -> bool:
        """Tell whether the engine takes this value of the field."""
        size = _size_of(value)
        if size < GREEDY_TEMPERATURE:
            return True
        return self.least * (1 - _ROUNDING) <= size <= self.most * (1 + _ROUNDING)

    def __str__(self) -> str:
        return f"0, or {self.least:g} to {self.most:g}" if self.least else f"at most {self.most:g}"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard's model and how it is served. `instance_id` is new at each start of its engine."""

    address: str
    schema_revision: int
    min_schema_revision: int
    version: str
    instance_id: str
    model: str
    model_aliases: tuple[str, ...]
    revision: str
    architecture: str
    weights_hash: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    block_size: int
    num_blocks: int
    limits: ShardLimits
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    capabilities: frozenset[str]
    batch_invariant: bool
    numerics_fingerprint: str
    # Loaded adapters, by name.
    adapters: Mapping[str, Adapter]
    # None if "embed" is not among the capabilities.
    embedding: EmbeddingDefaults | None = None
    # Bytes of keys and values of a token, and of a sequence of `max_model_len` tokens; and the
    # number of such sequences that fit. 0 if unknown.
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    kv_sequences: int = 0
    # For layers with states: bytes of one sequence's states, and the number of states that fit.
    state_bytes: int = 0
    num_states: int = 0
    # The work that the shard should get: "prefill", "decode" (if other shards do the rest), "both".
    role: str = "both"
    shape: ModelShape = ModelShape()
    # Bounds of some capabilities; and capabilities that the shard lacks for requests with
    # `output_token_ids`.
    bounds: tuple[FieldBound, ...] = ()
    uncontinued: frozenset[str] = frozenset()

    def has_adapter(self, name: str, content_hash: str = "") -> bool:
        """True if the adapter of this name is loaded, with this content ("" is any). The name ""
        means the base model, which is always loaded.
        """
        adapter = self.adapters.get(name)
        return not name or (adapter is not None and content_hash in ("", adapter.content_hash))

    def adapter_hash(self, name: str) -> str:
        """The hash of an adapter's content; "" if the adapter is not loaded."""
        adapter = self.adapters.get(name)
        return "" if adapter is None else adapter.content_hash


@dataclass(slots=True)
class ClassLoad:
    """Requests of one class at a shard, and prompt tokens of requests without an output yet."""

    priority: int
    running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a shard last reported."""

    instance_id: str = ""
    running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0
    running_tokens: int = 0
    referenced_blocks: int = 0
    num_blocks: int = 0
    steps_total: int = 0
    step_running_s: float = 0.0
    engine_beat_age_s: float = 0.0
    preemptions_total: int = 0
    serving: bool = False
    draining: bool = False
    handing_over: bool = False
    # Sums over all steps of the engine: seconds, and computed tokens.
    steps_seconds_total: float = 0.0
    computed_tokens_total: int = 0
    # Increases whenever the set of loaded adapters changes.
    adapters_revision: int = 0
    # KV blocks with copies in memory and on disk; and all blocks that the engine has copied back,
    # fetched from other shards, and exported.
    copied_blocks: int = 0
    disk_blocks: int = 0
    loaded_blocks_total: int = 0
    fetched_blocks_total: int = 0
    exported_blocks_total: int = 0
    # Empty if all requests have the default priority, and from shards of older releases.
    classes: tuple[ClassLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksReport:
    """Pieces of prefixes that a shard holds, or no longer holds: names by `Tier`. A snapshot has
    all reports from the one that begins it to the one that ends it.
    """

    pieces: Mapping[int, Sequence[int]]
    instance_id: str = ""
    snapshot_begins: bool = False
    snapshot_ends: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Remaining work of a draining shard."""

    running: int
    waiting: int
