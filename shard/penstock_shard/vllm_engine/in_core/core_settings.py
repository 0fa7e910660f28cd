"""Our settings, which vLLM's configuration carries to its core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_NAME = "penstock"


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of constraints, which are not served without a `tokenizer_dir`."""

    tokenizer_dir: str = ""
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    timeout_s: float = 0.0
    memory_bytes: int = 0
    constraint_threads: int = 1


_SETTINGS = msgspec.json.Decoder(CoreSettings)


def add_settings(vllm_config: Any, settings: CoreSettings) -> None:
    """Put the settings into vLLM's configuration, as text, because vLLM hashes it as JSON."""
    vllm_config.additional_config[_NAME] = msgspec.json.encode(settings).decode()


def read_settings(vllm_config: Any) -> CoreSettings:
    return _SETTINGS.decode(vllm_config.additional_config[_NAME])
