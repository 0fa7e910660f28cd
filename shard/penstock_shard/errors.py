"""The exception for a model that cannot be served; how to recognise and report that a device is
out of memory; which exceptions a failing device or compiler raises.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_common.version import why_not_imported
from penstock_shard.config import ShardConfig
from penstock_shard.device.triton_support import is_installed

# Messages: of torch's allocator on cpu; of CUDA and Triton; of cuBLAS.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")
# torch's exception, by its name: importing torch takes seconds.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
# Of what a library says, in characters.
_LONGEST_REASON = 400


class ModelError(Exception):
    """A model cannot be loaded or served; the message is one line, for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class AdapterNotFound(ModelError):
    """There is no adapter at a path, or none that can be read. The message says what is there, so
    callers must not get it: they may name any path.
    """


def cannot_hold(names: str, error: ValueError, weights: str) -> ModelError:
    """The error for tensors with a value that this kind of weights cannot represent."""
    advice = "; use --dtype float32" if weights == "float16" else ""
    return ModelError(f"{names}: {error}{advice}")


def first_line(error: BaseException) -> str:
    """The first line of the error's message; the name of its class if the message is empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Libraries, and torch on cpu, raise a plain RuntimeError: only its words tell."""
    if any(kind.__name__ == _OUT_OF_MEMORY_CLASS for kind in type(error).__mro__):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def report_out_of_memory(when: str) -> Iterator[None]:
    """Turns an out-of-memory error into a ModelError that says which flags to lower. Other errors,
    and ModelErrors of inner code that knew more, pass unchanged.
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
    """Turns the lack of a package into a ModelError that says how to install what this shard needs.
    Another start would lack it too.
    """
    try:
        yield
    except ImportError as error:
        raise ModelError(why_not_imported(error, config.extra)) from error


def library_faults() -> tuple[type[Exception], ...]:
    """The errors that libraries raise over values in a model's files that nobody has checked."""
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
    """Turns what libraries stumble over in a model's files into a ModelError that begins with
    `what`. Other errors pass unchanged.
    """
    try:
        yield
    except library_faults() as error:
        # Which value is wrong stands in the second line of those that check types.
        is_known = isinstance(error, OSError | ValueError) or not str(error)
        reason = first_line(error) if is_known else f"{type(error).__name__}: {error}"
        raise ModelError(f"{what}: {reason[:_LONGEST_REASON]}") from error


def device_failures() -> tuple[type[Exception], ...]:
    """The errors that GPU libraries and compilers raise when they cannot do what they are asked."""
    known: tuple[type[Exception], ...] = (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        LookupError,
        OSError,
        ImportError,
        # Triton runs a C compiler.
        subprocess.SubprocessError,
    )
    if not is_installed():
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)


class ImageUnusable(Exception):
    """An image cannot be encoded; the text says why, in a few words."""
