"""Embeddings by the openai package, langchain-openai and litellm as they are released.

The openai package asks for base64 unless told otherwise; a plain request asks for numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from clients.asked import MODEL, NO_MODEL, PROMPTS
from clients.direct import post
from clients.environments import WITH_EMBEDDINGS, observe

pytestmark = WITH_EMBEDDINGS

# Of a number as JSON and as a float32.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def direct(fake) -> Any:
    return post(f"{fake.url}/v1/embeddings", model=MODEL, input=PROMPTS, encoding_format="float")


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("sdks", "with_embeddings", fake.url)


@pytest.fixture
def client(fake) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(answer: Any) -> Any:
    return [pytest.approx(item["embedding"], abs=ROUNDING) for item in answer["data"]]


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])
def test_the_openai_package_gets_the_vectors_of_a_plain_request(client, direct, options) -> None:
    answer = client.embeddings.create(model=MODEL, input=PROMPTS, **options)
    assert [item.embedding for item in answer.data] == vectors(direct)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"] > 0


def test_fewer_dimensions_are_the_first_of_them(client, direct) -> None:
    answer = client.embeddings.create(model=MODEL, input=PROMPTS[0], dimensions=8)
    (vector,) = answer.data
    assert len(vector.embedding) == 8
    scale = direct["data"][0]["embedding"][0] / vector.embedding[0]
    expected = [value * scale for value in vector.embedding]
    assert expected == pytest.approx(direct["data"][0]["embedding"][:8], abs=1e-5)


@pytest.mark.soak
def test_langchain_gets_the_vectors_of_a_plain_request(seen, direct) -> None:
    assert seen["langchain"] == vectors(direct)
    assert seen["langchain_query"] == vectors(direct)[0]


@pytest.mark.soak
def test_litellm_gets_the_vectors_and_usage_of_a_plain_request(seen, direct) -> None:
    assert seen["litellm"] == vectors(direct)
    assert seen["litellm_tokens"] == direct["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (openai.NotFoundError, {"model": NO_MODEL}, NO_MODEL),
        (openai.BadRequestError, {"input": ""}, "input"),
        (openai.BadRequestError, {"dimensions": 100000}, "dimensions"),
        (openai.BadRequestError, {"input": "word " * 3000}, "2048"),
    ],
)
def test_a_bad_request_is_the_sdks_own_error_and_says_why(client, error, options, words) -> None:
    with pytest.raises(error) as caught:
        client.embeddings.create(**{"model": MODEL, "input": PROMPTS, **options})
    assert words in caught.value.message
