"""Every process that the product starts gets an environment that was chosen for it: whoever adds a
place where one is started, and lets it inherit all, fails here.

`tests/integration/test_child_environments.py` looks at the processes themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from contract.sources import Module, Modules, doctored, product_modules

from penstock_cli.serve.serve import _ROUTER_VARIABLES, _SHARD_VARIABLES
from penstock_common.child_environment import _NAMES

# What starts a process, by the last part of its name, and takes the argument `env`.
STARTS = {
    *("Popen", "check_call", "check_output", "getoutput", "getstatusoutput"),
    *("create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"),
    *("subprocess.run", "subprocess.call"),
}
# What starts one, or becomes another, without that argument or with it in another place.
BARE = re.compile(
    r"os\.(exec|spawn|posix_spawn|fork|popen|system)\w*|[\w.]+\.Process|ProcessPool\w*"
)
# Where one may stand, and why.
BARE_ALLOWED = {
    ("penstock_cli.main", "os.execv"): "the command that the user gave, in this process",
    ("penstock_cli.translate.translate", "os.execve"): "the same, with what a translation adds",
    ("penstock_cli.serve.with_parent", "os.execvp"): "a child that has its own environment already",
    ("penstock_router.workers", "self._context.Process"): "the environment was reduced before",
    ("penstock_shard.structured_output.check_process", "os.fork"): "of a process that has little",
}


def test_every_process_is_started_with_an_environment_of_its_own() -> None:
    assert list(violations(product_modules())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run(['a'])",
        "import subprocess\nsubprocess.Popen(['a'], env=None)",
        "import os, subprocess\nsubprocess.Popen(['a'], env={**os.environ})",
        "import subprocess\nsubprocess.Popen(['a'], env={})",
        "import asyncio\nasyncio.create_subprocess_exec('a')",
        "import os\nos.posix_spawn('a', ['a'], {})",
        "import os\nos.fork()",
        "import multiprocessing\nmultiprocessing.Process(target=print)",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
    ],
)
def test_one_that_inherits_all_is_found(source: str) -> None:
    assert len(list(violations(doctored(penstock_shard__engine=source)))) == 1


def test_what_may_stand_without_is_there() -> None:
    found = {
        (module.name, name)
        for module in product_modules().values()
        for name, _ in _calls(module)
        if BARE.fullmatch(name)
    }
    assert set(BARE_ALLOWED) == found & set(BARE_ALLOWED)


@pytest.mark.parametrize(
    ("package", "variables"),
    [("penstock_router", _ROUTER_VARIABLES), ("penstock_shard", _SHARD_VARIABLES)],
)
def test_serve_hands_on_each_of_our_variables_to_who_reads_it(
    package: str, variables: tuple[str, ...]
) -> None:
    read = {
        node.value
        for module in product_modules().values()
        if module.package == package or module.name == "penstock_common.shared_flags"
        for node in ast.walk(module.tree())
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"PENSTOCK_[A-Z_]*[A-Z]", node.value)
    }
    assert "PENSTOCK_API_KEY" in read
    assert [name for name in read if not _is_covered(name, variables)] == []


def _is_covered(name: str, variables: tuple[str, ...]) -> bool:
    prefixes = tuple(variable for variable in variables if variable.endswith("_"))
    return name in _NAMES or name in variables or name.startswith(prefixes or "-")


def violations(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for name, call in _calls(module):
            if BARE.fullmatch(name):
                if (module.name, name) not in BARE_ALLOWED:
                    yield f"{module.name}:{call.lineno}: {name}"
            elif STARTS & {name, name.rpartition(".")[2]} and not _is_chosen(module, call):
                yield f"{module.name}:{call.lineno}: {name} without a chosen env"


def _calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(module.tree()):
        if isinstance(node, ast.Call):
            yield _name_of(node.func), node


def _name_of(function: ast.expr) -> str:
    """Return the dotted name of a called function. A `?` stands for a part that is no name."""
    if isinstance(function, ast.Attribute):
        return f"{_name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else "?"


def _is_chosen(module: Module, call: ast.Call) -> bool:
    """True if the `env` of a call comes from `child_environment`, or is a name or an attribute in a
    module that calls `child_environment`.
    """
    given = {word.arg: word.value for word in call.keywords}.get("env")
    if given is None or "os.environ" in ast.unparse(given):
        return False
    if "child_environment(" in ast.unparse(given):
        return True
    return isinstance(given, ast.Name | ast.Attribute) and "child_environment(" in module.source
