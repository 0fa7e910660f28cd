"""The numerics fingerprint: it covers all that a result's bits come from.

`test_invariance.py` tests it for what torch computes here, `test_triton_decoder.py` for what Triton
does.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.sources import PACKAGES, Module, imports, product_modules
from models.driver import load

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.errors import ModelError
from penstock_shard.kernels import build_cpu
from penstock_shard.model_loader import fingerprint
from penstock_shard.ops.torch_ops import TorchOps

SHARD = PACKAGES["penstock_shard"]
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def importers(wanted: Collection[str], imported: Mapping[str, Collection[str]]) -> set[str]:
    """The modules that import one of these, wherever the import stands."""
    return {
        module
        for module, names in imported.items()
        if any(name in wanted or name.startswith("triton.") for name in names)
    }


def defines_kernels(module: Module) -> bool:
    """True if Triton compiles a function of the module."""
    if "triton." not in module.source:
        return False
    functions = [node for node in ast.walk(module.tree()) if isinstance(node, ast.FunctionDef)]
    marks = [ast.unparse(mark) for function in functions for mark in function.decorator_list]
    return any(mark.startswith("triton.") for mark in marks)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SHARD.parent).with_suffix("").parts).removesuffix(".__init__")


def test_every_triton_kernel_is_hashed_and_what_launches_it() -> None:
    modules = {
        name: each for name, each in product_modules().items() if name.startswith(SHARD.name)
    }
    kernels = {module.name for module in modules.values() if defines_kernels(module)}
    imported = {module.name: list(imports(module, modules)) for module in modules.values()}
    using_triton = importers({"triton"}, imported)
    launching = importers(kernels, imported)
    hashed = {name_of(path) for path in fingerprint.triton_sources(fingerprint._PACKAGE)}
    assert kernels
    assert kernels <= using_triton
    assert using_triton | launching <= hashed
    # No module that has nothing to do with it: its changes would be other numerics.
    assert hashed <= using_triton | importers(using_triton, imported)


@pytest.mark.parametrize(
    "source",
    [
        "import triton",
        "if True:\n    from triton.language import exp",
        "from inner.kernels import scale",
        "from inner import kernels",
    ],
)
def test_however_a_module_imports_kernels_it_is_hashed(tmp_path: Path, source: str) -> None:
    kernels = tmp_path / "inner" / "kernels.py"
    kernels.parent.mkdir()
    kernels.write_text("import triton\n\n@triton.jit\ndef scale(x):\n    pass\n")
    (tmp_path / "user.py").write_text(source)
    (tmp_path / "other.py").write_text("import tritonic\n# import triton")
    assert fingerprint.triton_sources(tmp_path) == [kernels, tmp_path / "user.py"]


def test_a_change_of_one_byte_of_a_kernel_is_another_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "kernel.py"
    found = set()
    for number in (1, 2):
        kernel.write_text(f"import triton\n\n@triton.jit\ndef scale(x):\n    x * {number}\n")
        monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path)
        found.add(fingerprint._triton_hash())
    assert len(found) == 2


def test_a_tree_without_sources_of_kernels_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import torch\n")
    with pytest.raises(ModelError, match=r"has no sources of Triton kernels$"):
        fingerprint.triton_sources(tmp_path)


def test_every_source_in_c_is_hashed() -> None:
    sources = set(build_cpu.SOURCES)
    assert sources == {path for end in ("c", "h") for path in SHARD.rglob(f"*.{end}")}
    included = {
        path.parent / name for path in sources for name in _INCLUDE.findall(path.read_text())
    }
    assert included <= sources


def test_another_llguidance_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    ops = TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
    first = fingerprint.fingerprint("w", ops, torch.float32)
    assert fingerprint.fingerprint("w", ops, torch.float32) == first
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"another {name}")
    assert fingerprint.fingerprint("w", ops, torch.float32) != first


def test_the_fingerprint_names_all_that_decides_about_bits(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(family: str = "llama", **settings: object) -> str:
        settings = {"dtype": "auto", **settings}
        return load(model_dir(family), **settings).info.numerics_fingerprint

    first = named()
    assert named(threads=2, kv_blocks=70) == first
    others = [
        named("qwen2"),
        named(dtype="float32"),
        named(dtype="bfloat16"),
        named(kv_cache_dtype="float32"),
        named(quantization="int8"),
        named(quantization="int4"),
    ]
    monkeypatch.setattr("torch.__version__", "2.13.99")
    others.append(named())
    # Of what reads configurations and makes rotary tables, and of our own Python.
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(
            "importlib.metadata.version",
            lambda name: "5.99.0" if name == "transformers" else version(name),
        )
        others.append(named())
    for name in ("MODEL_REVISION", "SAMPLER_REVISION"):
        monkeypatch.setattr(f"penstock_shard.model_loader.fingerprint.{name}", "5.99.0")
        others.append(named())
    assert len({first, *others}) == 11


def test_kernels_of_layers_are_hashed_on_a_gpu_whatever_computes_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fingerprint, "_device", lambda device: (str(device),))
    backend = SimpleNamespace(name="flash_attn")
    ops: Any = SimpleNamespace(device=torch.device("cuda"), backend=backend, weights="bfloat16")
    assert fingerprint._kernels(ops)[0] == fingerprint._triton_hash()
    ops.device = torch.device("cpu")
    assert fingerprint._triton_hash() not in fingerprint._kernels(ops)
