"""OpenAI's embeddings: parses bodies, and renders vectors as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from penstock_router.apis.base import ERRORS, TIMEOUT, BodyKind
from penstock_router.apis.openai.fields import COMPLETION_FIELDS
from penstock_router.apis.openai.kinds import prompts
from penstock_router.apis.vector_bytes import DTYPES, ENDIANNESS, encode
from penstock_router.json_fields import (
    ANYTHING,
    BOOLEAN,
    POSITIVE,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    add_warning,
    another_name,
    not_served,
    one_of,
    read_fields,
    table,
    taken,
    without_effect,
)
from penstock_router.request import CompletionRequest
from penstock_router.text.prompts import embedding_prompts

MAX_INPUTS = 2048

NORMALIZE = Field(
    "normalize", BOOLEAN, "Scale vectors to length 1, once they are cut; default true."
)
# Fields that would change the vectors, for example by other inputs or added text.
_NOT_SERVED = (
    *(not_served(name, ANYTHING) for name in ("messages", "input_type", "prompt_name", "task")),
    *(not_served(name, ANYTHING) for name in ("mm_processor_kwargs", "cache_salt")),
    not_served("padding", STRING, "do_not_pad"),
    not_served("truncate", ANYTHING, False, "NONE"),
    not_served("late_chunking", BOOLEAN, False),
    not_served("output_dtype", STRING, "float"),
    not_served("embedding_type", ANYTHING, "float"),
)

FIELDS = table(
    [
        Field("model", STRING, "One of /v1/models that makes embeddings."),
        Field(
            "input",
            prompts(MAX_INPUTS, "input: must not be empty, nor hold an empty text"),
            "A text, token ids, or an array of either.",
            required=True,
        ),
        Field("encoding_format", one_of("float", "base64"), "base64: of the numbers' bytes."),
        Field("embed_dtype", one_of(*DTYPES), "The numbers in base64; default float32."),
        Field("endianness", one_of(*ENDIANNESS), "Their bytes' order; default little."),
        Field("dimensions", POSITIVE, "Keep the first so many values; default: all."),
        NORMALIZE,
        another_name("use_activation", NORMALIZE),
        Field("pooling", one_of("last", "mean"), "Of which tokens; default: as the model has it."),
        *(
            COMPLETION_FIELDS[name]
            for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "user")
        ),
        TIMEOUT,
        taken("priority", 0, help="Inputs are computed in the order in which they come."),
        taken("request_id", help="The request's id is X-Request-Id."),
        *_NOT_SERVED,
    ]
)


class Embedding(TypedDict):
    """A vector, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(TypedDict):
    """An answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(CompletionRequest):
    """Texts to embed. None means the model's default."""

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    as_base64: bool = False
    # The type of the numbers in base64.
    dtype: str = "float32"
    endianness: str = "little"


def parse(body: JsonObject) -> EmbedRequest:
    values = read_fields(FIELDS, body)
    as_base64 = values.get("encoding_format") == "base64"
    for name in ("embed_dtype", "endianness"):
        if name in values and not as_base64:
            add_warning(values, without_effect(name))
    options = (WARNINGS, "model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens")
    return EmbedRequest(
        prompts=values["input"],
        max_tokens=0,
        timeout_s=values.get("timeout"),
        pooling=values.get("pooling"),
        dimensions=values.get("dimensions"),
        normalize=values.get("normalize", True),
        as_base64=as_base64,
        dtype=values.get("embed_dtype", "float32"),
        endianness=values.get("endianness", "little"),
        **{name: values[name] for name in options if name in values},
    )


EMBEDDINGS = BodyKind(
    name="embeddings",
    request_type=EmbedRequest,
    parse=parse,
    work=embedding_prompts,
    errors=ERRORS,
)


def answer(
    asked: EmbedRequest, model: str, vectors: Sequence[Sequence[float]], num_tokens: int
) -> EmbeddingAnswer:
    """Render the vectors in the order of their inputs. Raises `BadRequest` for a number too large
    for the dtype.
    """
    data: list[Embedding] = [
        {"object": "embedding", "index": index, "embedding": _encoded(asked, vector)}
        for index, vector in enumerate(vectors)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(asked: EmbedRequest, vector: Sequence[float]) -> list[float] | str:
    if not asked.as_base64:
        return list(vector)
    return base64.b64encode(encode(vector, asked.dtype, asked.endianness)).decode()
