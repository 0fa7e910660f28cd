"""The one exception for a model that cannot be served. Knows nothing of models or torch."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded or served; the message is one line, for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def cannot_hold(names: str, error: ValueError, weights: str) -> ModelError:
    """For a tensor with a value that its kind of weights does not have."""
    advice = "; use --dtype float32" if weights == "float16" else ""
    return ModelError(f"{names}: {error}{advice}")
