"""Fixtures of the router's unit tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

import router_doubles as doubles


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
