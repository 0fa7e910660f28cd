"""A stand-in for llama-server: the running penstock, whatever the presets of its tests say.

A preset sets a seed, a temperature and the maximum number of tokens for every request: they are
sent with each request instead. OpenAI's routes get their `/v1`, which llama-server does not need.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

_PORT = urlsplit(os.environ["SUITE_URL"]).port
_SECURED_PORT = urlsplit(os.environ["SUITE_SECURED_URL"]).port

# Downloads files, of which there are none.
sys.modules["wget"] = ModuleType("wget")
os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": str(_PORT)}
sys.path.insert(0, os.environ["SUITE_ROOT"])

utils: Any = import_module("utils")

_GENERATES = ("/completions", "/chat/completions")
_OPENAI = (*_GENERATES, "/embeddings", "/models", "/responses", "/rerank")
_LIMITS = ("max_tokens", "n_predict", "max_completion_tokens")


class ServerProcess(utils.ServerProcess):  # type: ignore[misc]
    """A server that is started already. Each request is sent with the values of the preset."""

    def start(self, timeout_seconds: int = 0) -> None:
        self.server_port = _SECURED_PORT if self.api_key else _PORT

    def make_url(self, path: str, host: str | None = None) -> Any:
        return super().make_url(f"/v1{path}" if path in _OPENAI else path, host)

    def make_request(
        self, method: str, path: str, data: Any = None, *more: Any, **others: Any
    ) -> Any:
        return super().make_request(method, path, self._preset(path, data), *more, **others)

    def make_stream_request(
        self, method: str, path: str, data: Any = None, *more: Any, **others: Any
    ) -> Any:
        return super().make_stream_request(method, path, self._preset(path, data), *more, **others)

    def _preset(self, path: str, data: Any) -> Any:
        if path.removeprefix("/v1") not in _GENERATES or not isinstance(data, dict):
            return data
        preset = {"seed": self.seed, "temperature": self.temperature}
        if self.n_predict and not any(name in data for name in _LIMITS):
            preset["max_tokens"] = self.n_predict
        return preset | data


utils.ServerProcess = ServerProcess
utils.ServerPreset.load_all = staticmethod(lambda: None)
