"""Fixtures of the router's unit tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import support.router_doubles as doubles
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return doubles.byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return doubles.sentencepiece_tokenizer()


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return doubles.wordpiece_tokenizer()


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    return doubles.metaspace_tokenizer()


@pytest.fixture
def fleet(byte_level: Tokenizer) -> doubles.FakeFleet:
    return doubles.FakeFleet(doubles.model_files(byte_level))


@pytest.fixture
async def router(fleet: doubles.FakeFleet) -> AsyncIterator[doubles.MemoryRouter]:
    async with doubles.memory_router(fleet) as served:
        yield served
