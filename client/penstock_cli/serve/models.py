"""Models that `penstock serve` serves, and their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_cli.serve.child_flags import Unusable
from penstock_common.shared_flags import model_name

_SOURCE, _NAME = "--model", "--served-model-name"


@dataclass(frozen=True, slots=True)
class Model:
    """A model for shards to load ("": the built-in one), and the user's name for it ("": its own
    name).
    """

    source: str = ""
    given_name: str = ""

    @property
    def name(self) -> str:
        return self.given_name or model_name(self.source)

    @property
    def flags(self) -> list[str]:
        source = [_SOURCE, self.source] if self.source else []
        return [*source, _NAME, self.given_name] if self.given_name else source


def split_models(arguments: Sequence[str]) -> tuple[list[Model], list[str]]:
    """Split the arguments into models and the rest. Models come first, because after a flag, a
    model could be the flag's value.
    """
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    models = [_model(word) for word in arguments[:count]] or [Model()]
    return models, list(arguments[count:])


def _model(word: str) -> Model:
    name, equals, source = word.partition("=")
    is_named = equals and name and source and "/" not in name and not os.path.exists(word)
    return Model(source, name) if is_named else Model(word)


def check_models(models: Sequence[Model], shard_flags: Sequence[str]) -> None:
    """Raise `Unusable` if models cannot be told apart."""
    if len(models) == 1:
        return
    for flag in (_SOURCE, _NAME):
        if any(word.partition("=")[0] == flag for word in shard_flags):
            raise Unusable(f"{flag}: is for one model; name each of several as NAME=MODEL")
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        first, second, *_ = (model.source for model in models if model.name == twice)
        raise Unusable(
            f"{first} and {second} are both named {twice}: name one of them otherwise, as "
            f"NAME={second}"
        )
