"""The committed stubs are what protoc makes of shard.proto, byte for byte."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from contract.sources import PACKAGES

FOLDER = PACKAGES["penstock_proto"]
STUBS = ("shard_pb2.py", "shard_pb2.pyi", "shard_pb2_grpc.py")


@pytest.fixture(autouse=True)
def _the_same_generator() -> None:
    source = (FOLDER / "shard_pb2_grpc.py").read_text()
    named = re.search(r"GRPC_GENERATED_VERSION = ['\"]([\d.]+)['\"]", source)
    assert named is not None
    if named[1] != version("grpcio-tools"):
        pytest.skip(f"made by grpcio-tools {named[1]}, installed is {version('grpcio-tools')}")


def test_the_committed_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / FOLDER.name, ignore=shutil.ignore_patterns("*.py*"))
    assert stale_stubs(tmp_path) == [], "run `make proto` and commit what it writes"


def test_a_field_more_in_the_proto_file_makes_the_stubs_stale(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER.name
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py*"))
    proto = folder / "shard.proto"
    proto.write_text(
        proto.read_text().replace("message AbortResponse {", "message AbortResponse { bool x = 1;")
    )
    assert {"shard_pb2.py", "shard_pb2.pyi"} <= set(stale_stubs(tmp_path))


def stale_stubs(include: Path) -> list[str]:
    """Generate in a folder that holds the package with its proto file; which stubs differ."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--pyi_out=."]
    proto = f"{FOLDER.name}/shard.proto"
    subprocess.run([*command, "--grpc_python_out=.", proto], cwd=include, check=True, timeout=60)
    made = include / FOLDER.name
    return [name for name in STUBS if (made / name).read_bytes() != (FOLDER / name).read_bytes()]
