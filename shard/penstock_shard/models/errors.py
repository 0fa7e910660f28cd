"""The one exception for a model that cannot be served, and what may go wrong with a device: how
memory that is short shows, and how it is told.

Knows nothing of models or torch.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_shard.models.triton_here import is_installed

# Of torch's allocator on cpu, of CUDA and Triton, and of cuBLAS.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")
# torch's class, by its name: torch takes seconds to import.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"


class ModelError(Exception):
    """A model cannot be loaded or served; the message is one line, for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def cannot_hold(names: str, error: ValueError, weights: str) -> ModelError:
    """For a tensor with a value that its kind of weights does not have."""
    advice = "; use --dtype float32" if weights == "float16" else ""
    return ModelError(f"{names}: {error}{advice}")


def first_line(error: BaseException) -> str:
    """What the error says, as far as it is one line; its class where it says nothing."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Libraries, and on cpu torch itself, have no class for it, only words."""
    if any(kind.__name__ == _OUT_OF_MEMORY_CLASS for kind in type(error).__mro__):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def out_of_memory_told(when: str) -> Iterator[None]:
    """Where memory ends inside, raises a ModelError that says what to lower; nobody nearer to it
    knew better. Everything else is raised as it is.
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


def device_failures() -> tuple[type[Exception], ...]:
    """What libraries and compilers raise where they cannot do what they are asked."""
    known: tuple[type[Exception], ...] = (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        LookupError,
        OSError,
        ImportError,
        # Of the C compiler that Triton runs.
        subprocess.SubprocessError,
    )
    if not is_installed():
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)
