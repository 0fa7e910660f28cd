"""A stand-in for vLLM: the running penstock for its server, and mocks for its package.

Tests import much from that package; only the names that they use against a server are real.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import anthropic
import openai
import pytest
import transformers

URL = os.environ["SUITE_URL"]
# The served model's files.
MODEL = os.environ["SUITE_MODEL"]


class RemoteOpenAIServer:
    """The penstock that runs already, whatever model and flags are asked for but a key."""

    DUMMY_API_KEY = "token-abc123"
    url_root = URL
    uds = None
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: list[str], **others: Any) -> None:
        if "--api-key" in vllm_serve_args or "VLLM_API_KEY" in (others.get("env_dict") or {}):
            self.url_root = os.environ["SUITE_SECURED_URL"]
        self.host, port = self.url_root.removeprefix("http://").split(":")
        self.port = int(port)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._openai(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._openai(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._anthropic(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._anthropic(options))

    def _openai(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return own | {"timeout": 45} | options

    def _anthropic(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._openai({}) | {"base_url": self.url_root} | options


@pytest.fixture
def local_asset_server() -> MagicMock:
    """Images, of which the toy sees none."""
    return MagicMock()


class _NoPlatform:
    """No GPU of any maker."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: False


class _Names(ModuleType):
    """A module in which every name can be imported, and none does anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


# Packages of which tests against a server need the names.
_PACKAGES = ("gpt_oss", "openai_harmony", "vllm")
# Modules of tests that are about vLLM's inside.
_OF_TESTS = (
    "tests.utils",
    "tests.conftest",
    "tests.entrypoints.openai.chat_completion.test_serving_chat",
)


class _Finder(MetaPathFinder, Loader):
    """Finds every module of vLLM, and what it needs itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        mine = name.partition(".")[0] in _PACKAGES or name in _OF_TESTS
        return ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_REAL.get(module.__name__, {}))


_own_tokenizer = transformers.AutoTokenizer.from_pretrained


def get_tokenizer(*names: Any, **options: Any) -> Any:
    """The served model's, whichever is asked for."""
    return _own_tokenizer(MODEL)


class ModelConfig:
    """The served model's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._told = json.loads(Path(MODEL, "config.json").read_text())

    def get_vocab_size(self) -> int:
        return int(self._told["vocab_size"])


class Answer(SimpleNamespace):
    """An answer of a server, whatever it should hold."""

    @classmethod
    def model_validate(cls, told: Any) -> Any:
        return json.loads(json.dumps(told), object_hook=lambda fields: cls(**fields))


class VLLMValidationError(ValueError):
    """An error that is raised only in tests without a server."""


_REAL: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "multi_gpu_only": lambda **options: lambda test: test,
        "requires_fp8": lambda test: test,
    },
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": Answer},
    "vllm.entrypoints.pooling.pooling.protocol": {"PoolingResponse": Answer},
    "vllm.exceptions": {"VLLMValidationError": VLLMValidationError},
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda *names, **options: MODEL
    },
    "vllm.platforms": {"current_platform": _NoPlatform()},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.version": {"__version__": "0.33.0"},
}

sys.meta_path.insert(0, _Finder())
transformers.AutoTokenizer.from_pretrained = get_tokenizer
