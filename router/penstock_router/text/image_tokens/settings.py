"""Reads and checks values of a model's files; errors name the file and the value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock_router.text.image_tokens.base import ImagesUnusable
from penstock_router.text.tokenizer import Tokenizer

CONFIG = "config.json"
PROCESSOR = "processor_config.json"
IMAGE_PROCESSOR = "preprocessor_config.json"

# More tokens than an image has in any checkpoint.
MAX_TOKENS = 65_536
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of a file, or of an object in it. All methods raise `ImagesUnusable` for a wrong
    value.
    """

    name: str
    values: Mapping[str, Any] = field(repr=False)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def part(self, name: str) -> Settings:
        """Return the object of this name; empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.unusable(name, "is no object")
        return Settings(f"{self.name}: {name}", value or {})

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _INT32_MAX
    ) -> int:
        """Return a whole number within bounds; without a default, it must be present."""
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.unusable(name, "is missing")
        if type(value) is not int or not least <= value <= most:
            raise self.unusable(name, f"must be a whole number from {least} to {most}")
        return value

    def text(self, name: str, default: str) -> str:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str) or not value:
            raise self.unusable(name, "must be a string")
        return value

    def refuse(self, name: str, *accepted: Any) -> None:
        """Raise unless the value is null or in `accepted`."""
        value = self.get(name)
        if value is not None and value not in accepted:
            raise self.unusable(name, "is not implemented")

    def unusable(self, name: str, why: str) -> ImagesUnusable:
        value = self.get(name)
        shown = "" if value is None else f" ({str(value)[:60]!r})"
        return ImagesUnusable(f"{self.name}: {name}{shown} {why}")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that determine a family's image tokens, and the tokenizer."""

    config: Settings
    processor: Settings
    # An object in processor_config.json, or a file of its own.
    image_processor: Settings
    tokenizer: Tokenizer

    def image_token(self) -> tuple[str, int]:
        """Return the token that stands for an image's rows, and its id."""
        older = self.config.get("image_token_id") is None
        return self.token_of_id("image_token_index" if older else "image_token_id")

    def token_of_id(self, name: str) -> tuple[str, int]:
        """Return the text and id of the token whose id config.json has under this name."""
        token_id = self.config.integer(name, least=0)
        text = self.tokenizer.token_text(token_id)
        if self.tokenizer.token_id(text) != token_id:
            raise self.config.unusable(name, "is no token of tokenizer.json")
        return text, token_id

    def special_token(self, name: str, default: str) -> tuple[str, int]:
        """Return the token that tokenizer_config.json has under this name, and its id."""
        named = self.tokenizer.config
        for group in ("extra_special_tokens", "model_specific_special_tokens"):
            extra = named.get(group)
            named = named | (extra if isinstance(extra, dict) else {})
        text = named.get(name, default)
        text = text.get("content") if isinstance(text, dict) else text
        return self.known(name, text)

    def known(self, name: str, text: object) -> tuple[str, int]:
        """Return a token's text and id; `name` is its name in the model's files."""
        token_id = self.tokenizer.token_id(text) if isinstance(text, str) else None
        if token_id is None:
            raise ImagesUnusable(f"tokenizer.json: it has no token {text!r} ({name})")
        return str(text), token_id

    def tokens(self, *texts: str) -> frozenset[str]:
        """Select the texts that are tokens; others mean nothing to a tokenizer."""
        return frozenset(text for text in texts if self.tokenizer.token_id(text) is not None)

    def ids_between(self, token: str, text: str) -> list[int]:
        [ids] = self.tokenizer.encode(
            [f"{token}{text}{token}"], add_special_tokens=False, max_tokens=_INT32_MAX
        )
        return ids[1:-1]


def read_settings(files: Mapping[str, bytes], name: str) -> Settings:
    """Read a file's values; empty if the file is missing."""
    try:
        values = msgspec.json.decode(files.get(name) or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ImagesUnusable(f"{name}: it is not valid JSON") from None
    if not isinstance(values, dict):
        raise ImagesUnusable(f"{name}: it is no JSON object")
    return Settings(name, values)


def read_model_files(files: Mapping[str, bytes], tokenizer: Tokenizer) -> ModelFiles | None:
    """Read the files of a model that sees images; None for other models."""
    config = read_settings(files, CONFIG)
    if not isinstance(config.get("vision_config"), dict):
        return None
    processor = read_settings(files, PROCESSOR)
    nested = processor.part("image_processor")
    images = nested if nested.values else read_settings(files, IMAGE_PROCESSOR)
    if not images.values:
        raise ImagesUnusable(f"{IMAGE_PROCESSOR}: the model has none")
    return ModelFiles(config, processor, images, tokenizer)
