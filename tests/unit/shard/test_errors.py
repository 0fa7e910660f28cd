"""Errors of libraries, told in one line."""

from __future__ import annotations

import pytest

from penstock_shard.errors import (
    ModelError,
    first_line,
    is_out_of_memory,
    report_out_of_memory,
)


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's: its class tells what it is, even without a text."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("one\ntwo"), "one"),
        (RuntimeError("\n one \n"), "one"),
        (RuntimeError(""), "RuntimeError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (OutOfMemoryError(""), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("out of resource: shared memory"), False),
        (RuntimeError(""), False),
    ],
)
def test_memory_that_is_short_is_known_by_class_or_by_words(
    error: RuntimeError, short: bool
) -> None:
    assert is_out_of_memory(error) is short


def test_memory_that_is_short_is_told_in_one_line_and_nothing_else_is() -> None:
    with (
        pytest.raises(ModelError, match=r"^out of memory at load: no room; .*lower --max-num") as e,
        report_out_of_memory("at load"),
    ):
        raise OutOfMemoryError("no room\nat all")
    assert "\n" not in str(e.value)
    for error in (
        RuntimeError("a defect"),
        ModelError("said already"),
        MemoryError("out of memory"),
    ):
        with pytest.raises(type(error)) as raised, report_out_of_memory("at load"):
            raise error
        assert raised.value is error
