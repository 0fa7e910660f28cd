"""Data that comes in is never run as code: no pickles, no eval, no shell, no model's own Python.

Only `multiprocessing` pickles by itself. It hands the router's configuration from a parent to the
workers that it starts, over a pipe that only the two have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from contract.sources import Module, Modules, doctored, imports, product_modules

from penstock_shard.config import ShardConfig

CODE_IN_DATA = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code")
RUNS_TEXT = ("eval", "exec", "compile", "__import__")
# Who reads kept loads, with torch, which raises an error of pickle's for what it does not make.
READS_LOADS = "penstock_shard.load_cache.load_cache"
# Who starts processes with `multiprocessing`, and may hand their arguments over.
STARTS_WORKERS = ("penstock_router.workers",)
# Of `multiprocessing`, what pickles what is put in by the one and taken out by the other side.
PICKLES = ("Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pool", "Client", "Listener")


def test_no_module_reads_data_that_could_be_code() -> None:
    assert list(import_violations(product_modules())) == []


def test_of_pickle_only_an_error_is_imported() -> None:
    lines = product_modules()[READS_LOADS].source.splitlines()
    assert [line for line in lines if "import" in line and "pickle" in line] == [
        "from pickle import UnpicklingError"
    ]


def test_no_call_runs_what_it_is_given() -> None:
    assert list(call_violations(product_modules())) == []


def test_a_models_own_code_runs_only_where_the_operator_says_so() -> None:
    assert ShardConfig.__dataclass_fields__["trust_remote_code"].default is False


def import_violations(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for target in imports(module, modules):
            root = target.partition(".")[0]
            is_worker = module.name in STARTS_WORKERS
            if module.name == READS_LOADS and target == "pickle":
                continue
            if root in CODE_IN_DATA or (root == "multiprocessing" and not is_worker):
                yield f"{module.name} imports {target}"


def call_violations(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.Call) and (why := _violation(module, node)):
                yield f"{module.name}:{node.lineno}: {why}"


def _violation(module: Module, call: ast.Call) -> str:
    name = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in RUNS_TEXT or name in ("os.system", "os.popen"):
        return name
    if name == "torch.load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if given.get("shell", "False") != "False":
        return f"{name} with a shell"
    if given.get("allow_pickle", "False") != "False":
        return f"{name} with pickles"
    if given.get("trust_remote_code") == "True":
        return f"{name} runs a model's own code, whatever the operator said"
    if module.name in STARTS_WORKERS:
        method = name.rpartition(".")[2]
        # `Connection.send` pickles; `send_bytes` does not.
        if method in (*PICKLES, "send", "recv"):
            return f"{name} pickles"
    return ""


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "def late():\n    import shelve",
        "import multiprocessing",
        "from multiprocessing.connection import Client",
    ],
)
def test_an_import_of_what_could_read_code_is_found(source: str) -> None:
    assert len(list(import_violations(doctored(penstock_shard__a=source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_a_call_that_runs_what_it_is_given_is_found(source: str) -> None:
    assert len(list(call_violations(doctored(penstock_shard__a=source)))) == 1


@pytest.mark.parametrize("source", ["pipe.send(config)", "context.Queue()", "heard.recv()"])
def test_objects_through_a_pipe_of_workers_are_found(source: str) -> None:
    assert len(list(call_violations(doctored(penstock_router__workers=source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "load(path, trust_remote_code=config.trust)",
        "re.compile(x)",
        "model.eval()",
        "queue.Queue()",
    ],
)
def test_what_runs_nothing_is_fine(source: str) -> None:
    assert not list(call_violations(doctored(penstock_shard__a=source)))
