"""What an engine tells of what it serves: for GetInfo, and for checking requests."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_shard.ipc.request import Pooling


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How a model's embeddings are meant to be made; `size` is their number of dimensions."""

    pooling: Pooling
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter. `content_hash` is over its files; `source` is what the caller gave."""

    name: str
    content_hash: str
    source: str
    rank: int


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the runner serves, for GetInfo and for checking sequences."""

    architecture: str
    weights_hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # Defaults from the model's generation_config: SamplingParams field names to values.
    default_sampling: dict[str, float]
    block_size: int
    num_blocks: int
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    # What requests may ask of this runner; see `penstock_shard.server.validation`.
    capabilities: frozenset[str]
    # Set if "embed" is among the capabilities.
    embedding: EmbeddingDefaults | None = None
    batch_invariant: bool = False
    numerics_fingerprint: str = ""
    # How many steps may be launched beyond the oldest that is not collected: 1 keeps a device busy
    # while results are handled, 0 collects each step before the next is scheduled.
    max_steps_ahead: int = 0
    # Prompt tokens of a step whose log-probabilities are wanted, over all rows.
    max_scored_tokens: int = 2**31
    # How long the largest step took in the trial at load; 0 if none was run.
    worst_step_s: float = 0.0
    # Loaded adapters, if "adapter" is among the capabilities.
    adapters: tuple[Adapter, ...] = ()
