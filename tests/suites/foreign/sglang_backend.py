"""A stand-in for the workers and gateways that tests of SGLang's router start: the running
penstock.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
import requests

URL = os.environ["SUITE_URL"]
MODEL = os.environ["SUITE_MODEL"]


class Gateway:
    """A router of penstock, as far as tests ask it."""

    base_url = URL

    def health(self) -> bool:
        return requests.get(f"{URL}/health", timeout=10).ok

    def list_models(self) -> Any:
        return requests.get(f"{URL}/v1/models", timeout=10).json()["data"]


@pytest.fixture(scope="class")
def setup_backend(request: pytest.FixtureRequest) -> Any:
    """The kind of backend, its model, a client, and a gateway."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="not-used", timeout=45, max_retries=0)
    return request.param, MODEL, client, Gateway()


class _Infra(ModuleType):
    """The module that starts workers. Tests import its names, and use none of them here."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


sys.modules["infra"] = _Infra("infra")
