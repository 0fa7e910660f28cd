"""Vectors over HTTP are transformers' own hidden states, pooled, cut and scaled, in any coding."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_maker import VOCABULARY, make_model
from support.budget import seeded
from support.processes import Router, Shard, running

torch = pytest.importorskip("torch")

FAMILIES = ("llama", "gemma3", "gpt2")
BOUND = 1e-5
Array = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def router(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    logs = tmp_path_factory.mktemp("logs")
    flags = ("--embeddings", "last", "--dtype", "float32", "--threads", "1")
    shards = [
        Shard(logs / name, "--model", str(path), "--served-model-name", name, *flags)
        for name, path in models.items()
    ]
    served = Router(logs / "router", [shard.address for shard in shards])
    with running(*shards, served):
        yield served


@pytest.fixture(scope="module")
def inputs() -> list[list[int]]:
    rng = seeded("inputs of embeddings")
    return [rng.choices(range(3, VOCABULARY), k=count) for count in (1, 2, 17, 90)]


def post(router: Router, path: str, **fields: object) -> Any:
    status, text = router.ask(path, fields)
    assert status == 200, text
    return json.loads(text)


def embed(router: Router, model: str, given: object, **fields: object) -> list[Any]:
    answer = post(router, "/v1/embeddings", model=model, input=given, **fields)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


@cache
def _as_transformers_has_it(directory: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def expected(directory: Path, ids: list[int], pooling: str, size: int | None = None) -> Array:
    """Return the vector that transformers computes, before it is scaled."""
    with torch.inference_mode():
        hidden = _as_transformers_has_it(directory)(torch.tensor([ids])).last_hidden_state[0]
    pooled = hidden[-1] if pooling == "last" else hidden.double().mean(dim=0)
    vector: Array = pooled.double().numpy()
    return vector[:size]


def scaled(vector: Array) -> Array:
    unit: Array = vector / np.linalg.norm(vector)
    return unit


@pytest.mark.parametrize("dimensions", [None, 7])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_hidden_states_of_transformers_pooled_cut_and_scaled(
    family: str,
    pooling: str,
    dimensions: int | None,
    router: Router,
    models: dict[str, Path],
    inputs: list[list[int]],
) -> None:
    asked = {"pooling": pooling, "dimensions": dimensions}
    found = embed(router, family, inputs, **asked)
    plain = embed(router, family, inputs, use_activation=False, **asked)
    for ids, vector, raw in zip(inputs, found, plain, strict=True):
        own = expected(models[family], ids, pooling, dimensions)
        assert len(own) == (dimensions or 32)
        np.testing.assert_allclose(vector, scaled(own), rtol=0, atol=BOUND)
        np.testing.assert_allclose(raw, own, rtol=BOUND, atol=BOUND)
    assert max(abs(np.linalg.norm(raw) - 1.0) for raw in plain) > 0.01


def _bfloat16(data: bytes, order: str) -> Any:
    upper = np.frombuffer(data, f"{order}u2").astype(np.uint32)
    return (upper << 16).view(np.float32)


def _fp8(kind: Any) -> Callable[[bytes, str], Any]:
    return lambda data, order: torch.frombuffer(bytearray(data), dtype=kind).float().numpy()


# How others read each, by its bytes' order, and the most by which a number of 1 is rounded.
DECODERS: dict[str, tuple[Callable[[bytes, str], Any], float]] = {
    "float32": (lambda data, order: np.frombuffer(data, f"{order}f4"), 0.0),
    "float16": (lambda data, order: np.frombuffer(data, f"{order}f2"), 2**-11),
    "bfloat16": (_bfloat16, 2**-8),
    "fp8_e4m3": (_fp8(torch.float8_e4m3fn), 2**-4),
    "fp8_e5m2": (_fp8(torch.float8_e5m2), 2**-3),
}


@pytest.mark.parametrize(("endianness", "order"), [("little", "<"), ("big", ">"), ("native", "=")])
@pytest.mark.parametrize("dtype", DECODERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_base64_in_any_coding_decodes_to_the_same_vectors(
    family: str,
    dtype: str,
    endianness: str,
    order: str,
    router: Router,
    models: dict[str, Path],
    inputs: list[list[int]],
) -> None:
    decode, rounding = DECODERS[dtype]
    coding = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    for dimensions in (None, 7):
        coded = embed(router, family, inputs, dimensions=dimensions, pooling="mean", **coding)
        for ids, text in zip(inputs, coded, strict=True):
            own = scaled(expected(models[family], ids, "mean", dimensions))
            found = decode(base64.b64decode(text, validate=True), order)
            np.testing.assert_allclose(found, own, rtol=rounding, atol=max(BOUND, rounding / 64))


def test_ollamas_routes_give_the_same_vectors_the_older_one_as_they_are(
    router: Router, models: dict[str, Path]
) -> None:
    text = "The quick brown fox"
    [unit], [raw] = (embed(router, "llama", text, normalize=each) for each in (True, False))
    asked = {"model": "llama", "input": text, "prompt": text}
    assert post(router, "/api/embed", **asked)["embeddings"] == [unit]
    assert post(router, "/api/embeddings", **asked)["embedding"] == raw
    [cut] = post(router, "/api/embed", **asked, dimensions=5)["embeddings"]
    assert np.linalg.norm(cut) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(cut, scaled(np.array(raw[:5])), atol=1e-6)
