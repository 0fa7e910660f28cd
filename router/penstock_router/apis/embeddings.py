"""OpenAI's embeddings: bodies -> what is to be embedded, and vectors -> the JSON of the answer."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from penstock_router.apis.base import ERRORS, TIMEOUT, BodyKind
from penstock_router.apis.openai.fields import COMPLETION_FIELDS
from penstock_router.apis.openai.kinds import prompts
from penstock_router.json_fields import (
    BOOLEAN,
    POSITIVE,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    one_of,
    read_fields,
    table,
)
from penstock_router.request import CompletionRequest
from penstock_router.text.prompts import embedding_prompts

MAX_INPUTS = 2048

FIELDS = table(
    [
        Field("model", STRING, "One of /v1/models that makes embeddings."),
        Field(
            "input",
            prompts(MAX_INPUTS, "input: must not be empty, nor hold an empty text"),
            "A text, token ids, or an array of either.",
            required=True,
        ),
        Field("encoding_format", one_of("float", "base64"), "base64: of little-endian floats."),
        Field("dimensions", POSITIVE, "Keep the first so many values; default: all."),
        Field("normalize", BOOLEAN, "Scale vectors to length 1; default: as the model has it."),
        Field("pooling", one_of("last", "mean"), "Of which tokens; default: as the model has it."),
        *(
            COMPLETION_FIELDS[name]
            for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "user")
        ),
        TIMEOUT,
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
    """Texts to embed. An option that is None has the model's default."""

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    as_base64: bool = False


def parse(body: JsonObject) -> EmbedRequest:
    """A body of /v1/embeddings."""
    values = read_fields(FIELDS, body)
    options = (WARNINGS, "model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens")
    return EmbedRequest(
        prompts=values["input"],
        max_tokens=0,
        timeout_s=values.get("timeout"),
        pooling=values.get("pooling"),
        dimensions=values.get("dimensions"),
        normalize=values.get("normalize"),
        as_base64=values.get("encoding_format") == "base64",
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
    model: str, vectors: Sequence[Sequence[float]], num_tokens: int, *, as_base64: bool
) -> EmbeddingAnswer:
    """The vectors in the order of their inputs."""
    data: list[Embedding] = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_base64 else list(vector),
        }
        for index, vector in enumerate(vectors)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _base64(vector: Sequence[float]) -> str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
