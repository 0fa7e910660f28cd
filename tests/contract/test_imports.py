"""The rules of imports between packages and rooms: they keep torch out of the router, and the stubs
in one room.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from contract.sources import Module, Modules, doctored, imports, product_modules

TENSORS = ("torch", "transformers")
STUBS = "penstock_proto.shard_pb2"
STUB_USERS = "penstock_proto.codec."

# Which of our own packages each may import, itself apart.
ALLOWED_PACKAGES = {
    "penstock_common": (),
    "penstock_proto": ("penstock_common",),
    "penstock_client": ("penstock_proto", "penstock_common"),
    "penstock_cli": ("penstock_client", "penstock_proto", "penstock_common"),
    "penstock_router": ("penstock_client", "penstock_proto", "penstock_common"),
    "penstock_shard": ("penstock_proto", "penstock_common"),
}
# Of the router, besides routes/.
HTTP_ROOMS = ("penstock_router.routes.", "penstock_router.server.")
HTTP_USERS = (
    *("penstock_router.app", "penstock_router.workers"),
    # As a client.
    *("penstock_router.images.images", "penstock_router.images.fetcher"),
)
# Rooms of the shard that have tensors.
_ROOMS = (
    *("attention", "checkpoint", "device", "distributed", "images", "kernels"),
    *("load_cache", "lora", "model_loader", "models", "ops", "selfcheck", "worker"),
)
TENSOR_ROOMS = (
    *(f"penstock_shard.{room}." for room in _ROOMS),
    # Gives vLLM its masks.
    "penstock_shard.vllm_engine.in_core.grammars",
)
# These of them stay free of torch: what runs without it needs them.
FREE_OF_TENSORS = (
    "penstock_shard.worker.base",
    "penstock_shard.worker.capabilities",
    "penstock_shard.worker.fake_images",
    "penstock_shard.worker.fake_runner",
    "penstock_shard.worker.token_state",
    "penstock_shard.model_loader.load_runner",
    "penstock_shard.checkpoint.adapter_files",
    "penstock_shard.checkpoint.model_source",
    "penstock_shard.checkpoint.text_names",
    "penstock_shard.checkpoint.tokenizer_files",
    "penstock_shard.device.triton_support",
    "penstock_shard.distributed.messages",
    "penstock_shard.distributed.rank_connections",
    "penstock_shard.distributed.start_ranks",
)
# What these rooms know nothing of.
ABOVE_TENSORS = tuple(
    f"penstock_shard.{room}." for room in ("engine", "kv_cache", "scheduler", "server")
)


def test_every_package_imports_only_those_below_it() -> None:
    assert list(package_violations(product_modules())) == []


def test_the_stubs_are_touched_in_one_room() -> None:
    assert list(stub_violations(product_modules())) == []


def test_torch_is_imported_only_where_tensors_live() -> None:
    assert list(tensor_violations(product_modules())) == []


def test_what_computes_knows_nothing_of_engine_and_server() -> None:
    assert list(runner_violations(product_modules())) == []


def test_the_router_never_imports_grpc() -> None:
    assert list(grpc_violations(product_modules())) == []


def test_http_is_the_business_of_routes_and_of_what_serves_them() -> None:
    assert list(http_violations(product_modules())) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(product_modules()) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock_router.app", ["penstock_shard", "PIL"]),
        ("penstock_router.__main__", ["penstock_shard"]),
        # What counts would write files of its own beside the workers'.
        ("penstock_router.offload.text_process", ["aiohttp", "prometheus_client"]),
        ("penstock_router.images.decoder_process", ["aiohttp", "tokenizers"]),
        ("penstock_shard.server.app", ["penstock_client"]),
        ("penstock_shard.engine.main", ["penstock_client"]),
        ("penstock_cli.main", ["penstock_router"]),
        ("penstock_cli.health", ["aiohttp"]),
        ("penstock_client", ["penstock_router"]),
    ],
)
def test_a_process_starts_where_torch_is_not_installed(module: str, absent: list[str]) -> None:
    program = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TENSORS}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import {module}

loaded = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(loaded & {{*{TENSORS}, *{absent}}}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stderr, result.stdout.strip(), result.returncode) == ("", "", 0)


WITH_FEW_PACKAGES = (
    *("penstock_proto.facts", "penstock_proto.limits", "penstock_proto.errors"),
    "penstock_proto.engine_request",
    *("penstock_common.child_process.start", "penstock_common.child_process.child_end"),
    "penstock_shard.ipc.messages",
)


@pytest.mark.parametrize("module", WITH_FEW_PACKAGES)
def test_the_wires_types_and_ipc_need_msgspec_and_numpy_only(module: str) -> None:
    # The environment of a foreign engine has nothing else.
    program = f"""
import sys

class Few:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ("msgspec", "numpy")
        if not known and not top.startswith("penstock_"):
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Few())
import {module}
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stderr, result.returncode) == ("", 0)


# ---- the rules, each shown to catch what it is there for -------------------------------------


@pytest.mark.parametrize(
    "modules",
    [
        doctored(penstock_router__app="import penstock_shard.engine.engine"),
        doctored(penstock_client__audit_log="from penstock_cli.gpus import gpus"),
        doctored(penstock_client__audit_log="def late():\n    import penstock_router.app"),
        doctored(penstock_shard__server__app="from penstock_client import Fleet"),
        doctored(penstock_proto__transport="import penstock_client"),
    ],
)
def test_an_import_of_a_package_above_is_found(modules: Modules) -> None:
    assert len(list(package_violations(modules))) == 1


@pytest.mark.parametrize(
    "modules",
    [
        doctored(penstock_client__rpc__sync_client="from penstock_proto import shard_pb2 as pb"),
        doctored(penstock_client__audit_log="import penstock_proto.shard_pb2_grpc"),
        doctored(penstock_shard__server__app="from penstock_proto.shard_pb2_grpc import ShardStub"),
        doctored(penstock_router__app="from penstock_proto.shard_pb2 import Output"),
    ],
)
def test_a_second_user_of_the_stubs_is_found(modules: Modules) -> None:
    assert len(list(stub_violations(modules))) == 1


@pytest.mark.parametrize(
    "modules",
    [
        doctored(penstock_router__text__tokenizer="from transformers import AutoTokenizer"),
        doctored(penstock_shard__scheduler__scheduler="import torch.nn"),
        doctored(penstock_shard__worker__fake_runner="import torch"),
        doctored(penstock_shard__checkpoint__model_source="def late():\n    import transformers"),
        doctored(
            penstock_shard__engine__engine="from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from torch import Tensor"
        ),
    ],
)
def test_an_import_of_torch_elsewhere_is_found(modules: Modules) -> None:
    assert len(list(tensor_violations(modules))) == 1


@pytest.mark.parametrize("module", ["model_loader__create_runner", "distributed__group"])
def test_an_import_of_the_engine_where_tensors_live_is_found(module: str) -> None:
    source = (
        "from penstock_shard.config import ShardConfig\nimport penstock_shard.scheduler.scheduler"
    )
    modules = doctored(**{f"penstock_shard__{module}": source})
    assert len(list(runner_violations(modules))) == 1


@pytest.mark.parametrize(
    "source", ["import grpc", "from grpc.aio import Channel", "import grpc_health"]
)
def test_an_import_of_grpc_in_the_router_is_found(source: str) -> None:
    assert len(list(grpc_violations(doctored(penstock_router__app=source)))) == 1


@pytest.mark.parametrize("module", ["generation__job", "json_fields", "apis__openai__requests"])
def test_an_import_of_aiohttp_elsewhere_in_the_router_is_found(module: str) -> None:
    modules = doctored(**{f"penstock_router__{module}": "from aiohttp import web"})
    assert len(list(http_violations(modules))) == 1


@pytest.mark.parametrize(
    "modules",
    [
        doctored(
            penstock_shard__a="from penstock_shard.b import x",
            penstock_shard__b="def late():\n    from penstock_shard import a",
        ),
        doctored(
            penstock_client="from penstock_client.fleet import Fleet",
            penstock_client__fleet="from . import Fleet",
        ),
        doctored(
            penstock_router__a="import penstock_router.b",
            penstock_router__b="import penstock_router.c",
            penstock_router__c="if TYPE_CHECKING:\n    from .a import X",
        ),
    ],
)
def test_a_circle_of_imports_is_found(modules: Modules) -> None:
    cycle = find_cycle(modules)
    assert cycle[0] == cycle[-1]
    assert len(cycle) == len(modules) + 1


def package_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        package = target.partition(".")[0]
        allowed = (module.package, *ALLOWED_PACKAGES[module.package])
        if package in ALLOWED_PACKAGES and package not in allowed:
            yield f"{module.name} imports {target}"


def stub_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        if target.startswith(STUBS) and not (
            module.name.startswith(STUB_USERS) or module.is_generated
        ):
            yield f"{module.name} imports {target}"


def tensor_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        allowed = module.name.startswith(TENSOR_ROOMS) and module.name not in FREE_OF_TENSORS
        if target.partition(".")[0] in TENSORS and not allowed:
            yield f"{module.name} imports {target}"


def runner_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        if module.name.startswith(TENSOR_ROOMS) and target.startswith(ABOVE_TENSORS):
            yield f"{module.name} imports {target}"


def grpc_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        if module.package == "penstock_router" and target.startswith(("grpc", "google.protobuf")):
            yield f"{module.name} imports {target}"


def http_violations(modules: Modules) -> Iterator[str]:
    for module, target in _edges(modules):
        allowed = module.name in HTTP_USERS or module.name.startswith(HTTP_ROOMS)
        inside = module.package == "penstock_router" and not allowed
        if inside and target.partition(".")[0] == "aiohttp":
            yield f"{module.name} imports {target}"


def find_cycle(modules: Modules) -> list[str]:
    """Return one circle of imports, its first module again at the end; empty if there is none."""
    graph: dict[str, list[str]] = {name: [] for name in modules}
    for module, target in _edges(modules):
        if target in modules and target != module.name:
            graph[module.name].append(target)
    done: set[str] = set()
    for name in graph:
        if cycle := _walk(name, graph, [], done):
            return cycle
    return []


def _walk(name: str, graph: dict[str, list[str]], path: list[str], done: set[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name not in done:
        done.add(name)
        for target in graph[name]:
            if cycle := _walk(target, graph, [*path, name], done):
                return cycle
    return []


def _edges(modules: Modules) -> Iterator[tuple[Module, str]]:
    for module in modules.values():
        for target in imports(module, modules):
            yield module, target
