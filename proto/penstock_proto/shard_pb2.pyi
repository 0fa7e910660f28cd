from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "stop", "output", "constraint", "objective", "model", "adapter", "cache_salt", "label", "traceparent", "instance_id", "hand_back", "suspect", "number", "thinking_budget", "adapter_hash", "caller", "kv_source", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HAND_BACK_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HASH_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    stop: StopConditions
    output: OutputOptions
    constraint: Constraint
    objective: Objective
    model: str
    adapter: str
    cache_salt: str
    label: str
    traceparent: str
    instance_id: str
    hand_back: bool
    suspect: bool
    number: int
    thinking_budget: ThinkingBudget
    adapter_hash: str
    caller: str
    kv_source: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., objective: _Optional[_Union[Objective, _Mapping]] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., label: _Optional[str] = ..., traceparent: _Optional[str] = ..., instance_id: _Optional[str] = ..., hand_back: _Optional[bool] = ..., suspect: _Optional[bool] = ..., number: _Optional[int] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., adapter_hash: _Optional[str] = ..., caller: _Optional[str] = ..., kv_source: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "width", "height", "offset", "num_tokens")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    width: int
    height: int
    offset: int
    num_tokens: int
    def __init__(self, digest: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ImageChunk(_message.Message):
    __slots__ = ("digest", "width", "height", "instance_id", "pixels")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    width: int
    height: int
    instance_id: str
    pixels: bytes
    def __init__(self, digest: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., instance_id: _Optional[str] = ..., pixels: _Optional[bytes] = ...) -> None: ...

class PutImageResponse(_message.Message):
    __slots__ = ("was_there",)
    WAS_THERE_FIELD_NUMBER: _ClassVar[int]
    was_there: bool
    def __init__(self, was_there: _Optional[bool] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("max_tokens", "begin_token_id", "end_token_id", "begun")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    begin_token_id: int
    end_token_id: int
    begun: bool
    def __init__(self, max_tokens: _Optional[int] = ..., begin_token_id: _Optional[int] = ..., end_token_id: _Optional[int] = ..., begun: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "bad_words", "allowed_token_ids", "penalty_window_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PENALTY_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    penalty_window_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., penalty_window_tokens: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("logprobs", "prompt_logprobs", "logprob_token_ids")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    grammar: str
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("priority", "deadline_ms", "time_to_first_token_s", "seconds_between_tokens", "latency_sensitive")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BETWEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SENSITIVE_FIELD_NUMBER: _ClassVar[int]
    priority: int
    deadline_ms: int
    time_to_first_token_s: float
    seconds_between_tokens: float
    latency_sensitive: bool
    def __init__(self, priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., time_to_first_token_s: _Optional[float] = ..., seconds_between_tokens: _Optional[float] = ..., latency_sensitive: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("outputs", "tokens")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    tokens: Tokens
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("numbers", "token_ids", "positions")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "first_position", "token_ids", "logprobs", "prompt_logprobs", "cached_tokens", "finish", "error", "queue_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt_logprobs: PromptLogprobs
    cached_tokens: int
    finish: Finish
    error: Error
    queue_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "ranks", "top_n", "top_token_ids", "top_logprobs", "requested")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_n: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    requested: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_n: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., requested: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_index", "logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    logprobs: Logprobs
    def __init__(self, first_index: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_token_id")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finish.Reason]
        REASON_STOP: _ClassVar[Finish.Reason]
        REASON_LENGTH: _ClassVar[Finish.Reason]
        REASON_ABORTED: _ClassVar[Finish.Reason]
    REASON_UNSPECIFIED: Finish.Reason
    REASON_STOP: Finish.Reason
    REASON_LENGTH: Finish.Reason
    REASON_ABORTED: Finish.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: Finish.Reason
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[Finish.Reason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "value", "bound", "engine_died")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DIED_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    field: str
    value: str
    bound: str
    engine_died: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., bound: _Optional[str] = ..., engine_died: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "attempts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("request_ids", "seconds", "expected_seconds", "priority")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    expected_seconds: float
    priority: int
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ..., expected_seconds: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("schema_revision", "min_schema_revision", "version", "instance_id", "model", "model_aliases", "revision", "architecture", "weights_hash", "tokenizer_hash", "max_model_len", "vocab_size", "eos_token_ids", "default_sampling", "block_size", "num_blocks", "limits", "dtype", "kv_dtype", "device", "attention_backend", "capabilities", "batch_invariant", "numerics_fingerprint", "adapters", "embedding", "loaded_adapters", "kv_bytes_per_token", "kv_bytes_per_sequence", "kv_sequences", "state_bytes", "num_states", "role", "shape", "bounds", "uncontinued")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MIN_SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    LOADED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KV_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    UNCONTINUED_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    min_schema_revision: int
    version: str
    instance_id: str
    model: str
    model_aliases: _containers.RepeatedScalarFieldContainer[str]
    revision: str
    architecture: str
    weights_hash: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: SamplingParams
    block_size: int
    num_blocks: int
    limits: Limits
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    batch_invariant: bool
    numerics_fingerprint: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    embedding: EmbeddingDefaults
    loaded_adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_sequences: int
    state_bytes: int
    num_states: int
    role: str
    shape: ModelShape
    bounds: _containers.RepeatedCompositeFieldContainer[FieldBound]
    uncontinued: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema_revision: _Optional[int] = ..., min_schema_revision: _Optional[int] = ..., version: _Optional[str] = ..., instance_id: _Optional[str] = ..., model: _Optional[str] = ..., model_aliases: _Optional[_Iterable[str]] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., weights_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., device: _Optional[str] = ..., attention_backend: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., batch_invariant: _Optional[bool] = ..., numerics_fingerprint: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., embedding: _Optional[_Union[EmbeddingDefaults, _Mapping]] = ..., loaded_adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_bytes_per_sequence: _Optional[int] = ..., kv_sequences: _Optional[int] = ..., state_bytes: _Optional[int] = ..., num_states: _Optional[int] = ..., role: _Optional[str] = ..., shape: _Optional[_Union[ModelShape, _Mapping]] = ..., bounds: _Optional[_Iterable[_Union[FieldBound, _Mapping]]] = ..., uncontinued: _Optional[_Iterable[str]] = ...) -> None: ...

class FieldBound(_message.Message):
    __slots__ = ("field", "most", "least")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    field: str
    most: float
    least: float
    def __init__(self, field: _Optional[str] = ..., most: _Optional[float] = ..., least: _Optional[float] = ...) -> None: ...

class ModelShape(_message.Message):
    __slots__ = ("model_type", "num_parameters", "weight_bytes", "num_layers", "hidden_size", "num_heads", "num_kv_heads")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    def __init__(self, model_type: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "content_hash", "source", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    content_hash: str
    source: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., content_hash: _Optional[str] = ..., source: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class EmbeddingDefaults(_message.Message):
    __slots__ = ("pooling", "normalize", "size")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    pooling: EmbedRequest.Pooling
    normalize: bool
    size: int
    def __init__(self, pooling: _Optional[_Union[EmbedRequest.Pooling, str]] = ..., normalize: _Optional[bool] = ..., size: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens", "max_logprobs")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_logprobs: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_logprobs: _Optional[int] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("name", "data", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    sha256: str
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("instance_id", "running", "waiting", "queued_prompt_tokens", "referenced_blocks", "num_blocks", "steps_total", "step_running_s", "engine_beat_age_s", "serving", "draining", "running_tokens", "preemptions_total", "handing_over", "steps_seconds_total", "computed_tokens_total", "adapters_revision", "copied_blocks", "disk_blocks", "loaded_blocks_total", "fetched_blocks_total", "exported_blocks_total", "classes")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HANDING_OVER_FIELD_NUMBER: _ClassVar[int]
    STEPS_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_REVISION_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    running: int
    waiting: int
    queued_prompt_tokens: int
    referenced_blocks: int
    num_blocks: int
    steps_total: int
    step_running_s: float
    engine_beat_age_s: float
    serving: bool
    draining: bool
    running_tokens: int
    preemptions_total: int
    handing_over: bool
    steps_seconds_total: float
    computed_tokens_total: int
    adapters_revision: int
    copied_blocks: int
    disk_blocks: int
    loaded_blocks_total: int
    fetched_blocks_total: int
    exported_blocks_total: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassLoad]
    def __init__(self, instance_id: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., referenced_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., steps_total: _Optional[int] = ..., step_running_s: _Optional[float] = ..., engine_beat_age_s: _Optional[float] = ..., serving: _Optional[bool] = ..., draining: _Optional[bool] = ..., running_tokens: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., handing_over: _Optional[bool] = ..., steps_seconds_total: _Optional[float] = ..., computed_tokens_total: _Optional[int] = ..., adapters_revision: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., loaded_blocks_total: _Optional[int] = ..., fetched_blocks_total: _Optional[int] = ..., exported_blocks_total: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassLoad, _Mapping]]] = ...) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("priority", "running", "waiting", "queued_prompt_tokens")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    running: int
    waiting: int
    queued_prompt_tokens: int
    def __init__(self, priority: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlocksReport(_message.Message):
    __slots__ = ("instance_id", "snapshot_begins", "snapshot_ends", "device", "host", "disk", "gone")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGINS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ENDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    snapshot_begins: bool
    snapshot_ends: bool
    device: _containers.RepeatedScalarFieldContainer[int]
    host: _containers.RepeatedScalarFieldContainer[int]
    disk: _containers.RepeatedScalarFieldContainer[int]
    gone: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance_id: _Optional[str] = ..., snapshot_begins: _Optional[bool] = ..., snapshot_ends: _Optional[bool] = ..., device: _Optional[_Iterable[int]] = ..., host: _Optional[_Iterable[int]] = ..., disk: _Optional[_Iterable[int]] = ..., gone: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("limit_ms", "hand_over")
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    limit_ms: int
    hand_over: bool
    def __init__(self, limit_ms: _Optional[int] = ..., hand_over: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("running", "waiting")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "pooling", "dimensions", "normalize", "instance_id", "label")
    class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        POOLING_UNSPECIFIED: _ClassVar[EmbedRequest.Pooling]
        POOLING_LAST: _ClassVar[EmbedRequest.Pooling]
        POOLING_MEAN: _ClassVar[EmbedRequest.Pooling]
    POOLING_UNSPECIFIED: EmbedRequest.Pooling
    POOLING_LAST: EmbedRequest.Pooling
    POOLING_MEAN: EmbedRequest.Pooling
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[TokenIds]
    pooling: EmbedRequest.Pooling
    dimensions: int
    normalize: bool
    instance_id: str
    label: str
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., pooling: _Optional[_Union[EmbedRequest.Pooling, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., instance_id: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings",)
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchBlocksRequest(_message.Message):
    __slots__ = ("namespace", "root", "digests", "token_ids", "num_known")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    root: bytes
    digests: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_known: int
    def __init__(self, namespace: _Optional[bytes] = ..., root: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_known: _Optional[int] = ...) -> None: ...

class FetchBlocksResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    def __init__(self, record: _Optional[bytes] = ...) -> None: ...
