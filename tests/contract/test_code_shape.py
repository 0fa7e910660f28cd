"""The shape of the code: short functions, short modules, errors caught by name, no authors'
folders.

Ruff checks style; these tests check what ruff does not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.sources import ROOT, Module, Modules, doctored, product_modules

MAX_FUNCTION_LINES = 80
MAX_MODULE_LINES = 600

# Where an error of any kind is caught and goes no further, and why there.
EDGES = {
    "penstock_common.tasks": "what lasts as long as the process outlives an error nobody foresaw",
    "penstock_router.text.tokenizer": "the tokenizers library raises bare Exception",
    "penstock_router.generation.deltas": "what fails where deltas arrive goes to who waits",
    "penstock_router.observe.request_record": "a defect of who tells of requests must not cost one",
    "penstock_shard.vllm_engine.core": "what was raised in a worker of vLLM's is a plain Exception",
    "penstock_shard.vllm_engine.generate_core": "as vllm_engine.core",
    "penstock_shard.vllm_engine.load_core": "what vLLM and all below it raise is of no common kind",
    "penstock_shard.vllm_engine.main": "what vLLM raises of a dead core is of no common kind",
    "penstock_router.server.sse": "the status line is sent: an error event is the last resort",
    "penstock_router.offload.text_process": "a defect costs the body it shows on, not the process",
    "penstock_router.images.decoder_process": "Pillow raises anything for what is broken",
    "penstock_shard.structured_output.checker": "a defect costs the constraint it shows on",
    "penstock_shard.server.observe.request_record": "a defect of who tells costs no shard",
    "penstock_router.app": "the edge of the process: a bug is answered with 500",
}

TEXT_FOLDERS = (
    "proto",
    "client",
    "router",
    "shard",
    "tests",
    "deploy",
    "docs",
    "benchmarks",
    "examples",
)
TEXT_SUFFIXES = {
    ".py",
    ".pyi",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".proto",
    ".json",
    ".txt",
    ".tpl",
    ".mjs",
}
# Written so that this file does not mention one itself.
HOME_PATH = re.compile(r"(?<![\w.$}])/(?:root|home|Users|work)/\w")


def test_no_function_is_longer_than_eighty_lines() -> None:
    assert list(long_functions(product_modules())) == []


def test_no_module_is_longer_than_six_hundred_lines() -> None:
    assert list(long_modules(product_modules())) == []


def test_msgspec_reads_every_type_at_import() -> None:
    assert list(types_read_late(product_modules())) == []


def test_errors_are_caught_by_name_but_at_the_edges() -> None:
    found = {module for module, _ in swallowed_errors(product_modules())}
    assert found == set(EDGES), "EDGES must list exactly the modules that catch everything"


def test_no_file_mentions_a_folder_of_its_author() -> None:
    assert [str(path) for path in _texts() if HOME_PATH.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class C:\n  def f(self):"])
def test_a_long_function_is_found(head: str) -> None:
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
    assert len(list(long_functions(doctored(penstock_shard__a=f"{head}\n{body}")))) == 1


def test_a_long_module_is_found() -> None:
    source = "x = 1\n" * (MAX_MODULE_LINES + 1)
    assert len(list(long_modules(doctored(penstock_shard__a=source)))) == 1


@pytest.mark.parametrize(
    "handler",
    [
        "except: pass",
        "except Exception: pass",
        "except BaseException as e: print(e)",
        "except (OSError, Exception): pass",
        "except builtins.Exception: pass",
    ],
)
def test_an_error_that_is_swallowed_is_found(handler: str) -> None:
    modules = doctored(penstock_shard__a=f"try:\n    f()\n{handler}")
    assert len(list(swallowed_errors(modules))) == 1


@pytest.mark.parametrize(
    "handler", ["except OSError: pass", "except BaseException:\n    g()\n    raise"]
)
def test_an_error_caught_by_name_or_raised_again_is_fine(handler: str) -> None:
    assert not list(swallowed_errors(doctored(penstock_shard__a=f"try:\n    f()\n{handler}")))


@pytest.mark.parametrize("folder", ["root", "home", "Users"])
def test_a_folder_of_an_author_is_found(folder: str) -> None:
    assert HOME_PATH.search(f'model = "/{folder}/someone/model"')


def test_a_path_of_an_image_is_no_ones_folder() -> None:
    assert not HOME_PATH.search("/opt/penstock /var/cache/penstock https://host.example/home/page")


@pytest.mark.parametrize(
    "source",
    [
        "def f(data): return msgspec.json.decode(data, type=Thing)",
        "def f(data): return msgspec.json.Decoder(Thing).decode(data)",
        "def f(data): return msgspec.convert(data, Thing)",
        "OTHERS = msgspec.json.Decoder(Other)\ndef f(data): return msgspec.convert(data, Thing)",
    ],
)
def test_a_type_that_two_threads_may_read_at_once_is_found(source: str) -> None:
    assert list(types_read_late(doctored(penstock_shard__a=source))) == ["penstock_shard.a: Thing"]


def test_a_type_that_is_read_at_import_is_fine() -> None:
    source = (
        "THINGS = msgspec.json.Decoder(Thing)\ndef f(data): return msgspec.convert(data, Thing)"
    )
    assert not list(types_read_late(doctored(penstock_shard__a=source)))


def types_read_late(modules: Modules) -> Iterator[str]:
    """Types that msgspec meets only when a function runs. It reads a type when it first meets it;
    two threads that make it do so at once end their process with a segmentation fault.
    """
    for module in _written(modules):
        in_functions = {
            id(call)
            for function in ast.walk(module.tree())
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for call in ast.walk(function)
        }
        early, late = set[str](), set[str]()
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                given = {word.arg: word.value for word in node.keywords}
                if re.fullmatch(r"msgspec\.\w+\.Decoder", called):
                    (late if id(node) in in_functions else early).add(ast.unparse(node.args[0]))
                elif called == "msgspec.convert":
                    late.add(ast.unparse(given.get("type") or node.args[1]))
                elif re.fullmatch(r"msgspec\.\w+\.decode", called) and "type" in given:
                    late.add(ast.unparse(given["type"]))
        yield from (f"{module.name}: {name}" for name in sorted(late - early))


def long_functions(modules: Modules) -> Iterator[str]:
    for module in _written(modules):
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{module.name}.{node.name}: {lines} lines"


def long_modules(modules: Modules) -> Iterator[str]:
    for module in _written(modules):
        lines = len(module.source.splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"{module.name}: {lines} lines"


def swallowed_errors(modules: Modules) -> Iterator[tuple[str, int]]:
    """Module and line of each handler that catches everything and does not raise it again."""
    for module in _written(modules):
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    yield module.name, node.lineno


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(part) for part in caught.elts)
    return caught is None or ast.unparse(caught).rpartition(".")[2] in (
        "Exception",
        "BaseException",
    )


def _written(modules: Modules) -> Iterator[Module]:
    """The modules that people wrote."""
    return (module for module in modules.values() if not module.is_generated)


def _texts() -> Iterator[Path]:
    for path in ROOT.iterdir():
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name == "Makefile"):
            yield path
    for folder in TEXT_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if "node_modules" in path.parts or not path.is_file():
                continue
            if path.suffix in TEXT_SUFFIXES or path.name.startswith("Dockerfile"):
                yield path
