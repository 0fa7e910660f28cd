"""Exceptions for unusable models, adapters and images; functions that recognise errors of libraries
and devices, such as out of memory.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_common.version import why_not_imported
from penstock_shard.config import ShardConfig
from penstock_shard.device.triton_support import is_installed

# Parts of out-of-memory messages: of torch's allocator on cpu; of CUDA and Triton; of cuBLAS.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")
# torch's exception by name, because importing torch takes seconds.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
# The number of characters of a library's message that are kept.
_LONGEST_REASON = 400


class ModelError(Exception):
    """A model cannot be loaded or served. The message is one line, for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class AdapterNotFound(ModelError):
    """A path has no readable adapter. Clients must not get the message, because it says what the
    path has instead, and clients may name any path.
    """


def cannot_hold(names: str, error: ValueError, weights: str) -> ModelError:
    """Make the error for tensors with a value that `weights` cannot represent."""
    advice = "; use --dtype float32" if weights == "float16" else ""
    return ModelError(f"{names}: {error}{advice}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the error's class name if there is none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error means out of memory. Libraries, and torch on cpu, raise a plain
    RuntimeError, so the message decides.
    """
    if any(kind.__name__ == _OUT_OF_MEMORY_CLASS for kind in type(error).__mro__):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def report_out_of_memory(when: str) -> Iterator[None]:
    """Turn an out-of-memory error into a ModelError that says which flags to lower. Other errors
    pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"out of memory {when}: {first_line(error)}; end what else takes this memory, lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-loras, or give --quantization or a "
            "larger --tensor-parallel-size"
        ) from error


@contextmanager
def report_missing(config: ShardConfig) -> Iterator[None]:
    """Turn an ImportError into a ModelError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ModelError(why_not_imported(error, config.extra)) from error


def library_faults() -> tuple[type[Exception], ...]:
    """The errors that libraries raise for wrong values in a model's files."""
    errors = importlib.import_module("huggingface_hub.errors")
    return (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
        errors.StrictDataclassError,
    )


@contextmanager
def report_faults(what: str) -> Iterator[None]:
    """Turn `library_faults` into a ModelError that begins with `what`."""
    try:
        yield
    except library_faults() as error:
        # Other errors need their whole text, because those of type checks name the wrong value in
        # their second line.
        is_known = isinstance(error, OSError | ValueError) or not str(error)
        reason = first_line(error) if is_known else f"{type(error).__name__}: {error}"
        raise ModelError(f"{what}: {reason[:_LONGEST_REASON]}") from error


def device_failures() -> tuple[type[Exception], ...]:
    """The errors that GPU libraries and compilers raise."""
    known: tuple[type[Exception], ...] = (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        LookupError,
        OSError,
        ImportError,
        # Triton runs a C compiler, which raises this.
        subprocess.SubprocessError,
    )
    if not is_installed():
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)


class ImageUnusable(Exception):
    """An image cannot be encoded; the message says why in a few words."""
