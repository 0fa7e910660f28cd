"""Kernels are compiled for a card, which needs none: what the interpreter runs need not compile."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.budget import budget

from penstock_shard import kernels

# Where nothing is kept of an earlier run, each takes half a minute for each kind of weights.
CAPABILITIES = ("90", "80", "86", "89", "100", "120")[: budget(1, 6)]
KINDS = ("bfloat16", "float32")[: budget(1, 2)]
SHAPES = ("few",)[: budget(1, 0)]
KERNELS = sorted(Path(kernels.__file__).parent.glob("triton_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_that_the_ops_launch_compiles_for_a_card_and_fits_into_it(capability: str) -> None:
    found = _run("compile_launches.py", capability, *KINDS, *SHAPES)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
def test_no_kernel_is_compiled_again_for_another_number_of_rows() -> None:
    """Within a serving step a compiler would take seconds."""
    found = _run("count_compilations.py")
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert found.stdout.startswith("20 kernels, 0 "), found.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if int(each) >= 89])
def test_a_norm_that_rounds_is_computed_as_one_that_does_not(capability: str) -> None:
    """The interpreter knows neither layouts nor fused products."""
    found = _run("compare_norms.py", capability)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert found.stdout == "12 of 12 norms alike\n"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_arguments_of_kernels_have_no_types_that_triton_does_not_know(path: Path) -> None:
    """Triton reads the types as code and finds no such name; the interpreter does not look."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            stated = {ast.unparse(arg.annotation) for arg in node.args.args if arg.annotation}
            assert stated <= {"tl.constexpr"}, node.name
            assert node.returns is None, node.name


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    # Other tests have the interpreter run kernels.
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)
