"""What command lines have in common."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from penstock_common.flags import usable_key
from penstock_common.shared_flags import quiet_grpc


@pytest.mark.parametrize("key", ["k", "sk-5ecret", "two words", "~!@#$%^&*()"])
def test_a_key_is_what_a_header_can_carry(key: str) -> None:
    assert usable_key(key) == key


@pytest.mark.parametrize(
    "key", ["", " ", " k", "k ", "k\n", "a\nb", "a\x7fb", "schlüssel", "k\udce9"]
)
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        usable_key(key)
    assert str(refused.value) == (
        "a key is printable ASCII, not empty, without spaces around it; leave it out to do without"
    )


@pytest.mark.parametrize(("given", "found"), [(None, "NONE"), ("INFO", "INFO")])
def test_grpc_is_quiet_unless_its_variable_says_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first, so that what it becomes is undone.
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")
    if given is None:
        del os.environ["GRPC_VERBOSITY"]
    quiet_grpc()
    assert os.environ["GRPC_VERBOSITY"] == found


def test_grpc_is_not_imported_before_it_is_told_to_be_quiet() -> None:
    code = "import sys, penstock_common.shared_flags; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
