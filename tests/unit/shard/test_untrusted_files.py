"""Files of a model's author: none leads to the host's, none is waited for, none takes much."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters import make_adapter
from support.budget import budget, seeded

from penstock_shard.checkpoint.adapter_files import read_adapter_files
from penstock_shard.checkpoint.model_source import BUILTIN_MODEL, check_directory
from penstock_shard.checkpoint.pooling_files import pooling_of
from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files
from penstock_shard.checkpoint.untrusted.files import read_object
from penstock_shard.checkpoint.untrusted.gguf_layout import check_gguf
from penstock_shard.checkpoint.weight_files import INDEX, model_shape, stored_tensors, weight_files
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.load_runner import load_runner

PUBLISHED = [
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "vocab.txt",
    "tokenizer.model",
    INDEX,
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that is served."""
    directory = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL, directory)
    return directory


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the host."""
    path = tmp_path / "secret"
    path.write_text('{"a": "secret"}')
    return path


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    return str(caught.value)


def put_link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("is_relative", [False, True])
def test_no_link_publishes_a_file_of_the_host(
    name: str, is_relative: bool, model: Path, secret: Path
) -> None:
    path = model / name
    target = os.path.relpath(secret, path.parent) if is_relative else secret
    put_link(path, target)
    expected = f"{path}: leads out of its directory"
    assert refusal(lambda: check_directory(model, needs_weights=False)).startswith(expected)
    assert refusal(lambda: read_tokenizer_files(model)).startswith(expected)
    config = ShardConfig(model=str(model), runner="fake")
    assert refusal(lambda: load_runner(config, print)).startswith(expected)


def test_no_chain_of_links_and_no_linked_folder_does(model: Path, secret: Path) -> None:
    put_link(model / "one.jinja", secret)
    put_link(model / "chat_template.jinja", "one.jinja")
    assert "leads out of" in refusal(lambda: check_directory(model))
    (model / "one.jinja").unlink()
    (model / "chat_template.jinja").unlink()
    folder = secret.parent / "folder"
    folder.mkdir()
    secret.rename(folder / "x.jinja")
    put_link(model / "additional_chat_templates", folder)
    assert "leads out of" in refusal(lambda: check_directory(model))


def test_a_directory_beside_with_the_same_beginning_is_outside(model: Path) -> None:
    beside = model.with_name("model-2")
    beside.mkdir()
    (beside / "a").write_text("a")
    put_link(model / "chat_template.jinja", beside / "a")
    assert "leads out of" in refusal(lambda: check_directory(model))


def test_links_within_a_model_are_followed_and_a_model_may_be_a_link(
    model: Path, tmp_path: Path
) -> None:
    (model / "..data").mkdir()
    (model / "..data" / "template").write_text("T")
    put_link(model / "chat_template.jinja", "..data/template")
    put_link(tmp_path / "link", model)
    check_directory(tmp_path / "link")
    assert read_tokenizer_files(tmp_path / "link")["chat_template.jinja"] == b"T"


def test_weights_may_be_anywhere(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "weights")
    put_link(model / "model.safetensors", tmp_path / "weights")
    check_directory(model)


def in_hub_cache(model: Path, root: Path) -> Path:
    """The model as a hub's cache has it: links to files that are named by their hashes."""
    repository = root / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        put_link(snapshot / path.name, f"../../blobs/{number}")
    (repository / "blobs" / "tool").write_text("T")
    put_link(snapshot / "additional_chat_templates" / "a.jinja", "../../../blobs/tool")
    return snapshot


def test_the_links_of_a_hubs_cache_are_followed_and_no_further(
    model: Path, tmp_path: Path, secret: Path
) -> None:
    snapshot = in_hub_cache(model, tmp_path)
    put_link(tmp_path / "link", snapshot)
    for directory in (snapshot, tmp_path / "link"):
        check_directory(directory)
        assert read_tokenizer_files(directory)["additional_chat_templates/a.jinja"] == b"T"
    put_link(snapshot.parents[1] / "blobs" / "tool", secret)
    assert "leads out of" in refusal(lambda: check_directory(snapshot))
    other = tmp_path / "models--other--name" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("another model's")
    put_link(snapshot.parents[1] / "blobs" / "tool", other / "x")
    assert "leads out of" in refusal(lambda: check_directory(snapshot))


def test_no_link_of_an_adapter_shows_a_file_of_the_host(tmp_path: Path, secret: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter")
    put_link(adapter / "adapter_config.json", secret)
    assert "leads out of its directory" in refusal(lambda: read_adapter_files(adapter))


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "a//x", "a/", "./x", "..", ".", "", "/x", "a\\b", "x\ny", 5, None, ["x"]],
)
def test_an_index_names_files_of_its_directory_alone(name: Any, model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    line = refusal(lambda: weight_files(model))
    assert "is no name of a file beside it" in line


@pytest.mark.parametrize("path", ["../..", "/etc", "a/b", "..", "."])
def test_a_module_of_pooling_is_a_folder_of_the_model(path: str, model: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": path}]
    (model / "modules.json").write_text(json.dumps(modules))
    assert "is no folder beside it" in refusal(lambda: pooling_of(model, "auto", print))


# ---- nothing is waited for, nothing takes much -------------------------------------------------


@pytest.mark.parametrize("name", [*PUBLISHED, "model.safetensors", "a.safetensors", "modules.json"])
def test_a_pipe_is_not_waited_for(name: str, model: Path) -> None:
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert refusal(lambda: check_directory(model)) == f"{path}: is no regular file"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_nor_is_one_of_an_adapter(name: str, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(ModelError):
        read_adapter_files(adapter)


def sparse(path: Path, num_bytes: int, begin: bytes = b"") -> Path:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(num_bytes)
    return path


def test_a_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = sparse(tmp_path / "config.json", 3 * 2**30)
    with memory_within(2**26):
        assert f"has {3 * 2**30} bytes; " in refusal(lambda: read_object(path))


def test_a_large_header_is_refused_by_its_size(tmp_path: Path) -> None:
    begin = struct.pack("<Q", 3 * 2**30)
    path = sparse(tmp_path / "model.safetensors", 3 * 2**30 + 8, begin)
    with memory_within(2**26):
        assert f"has a header of {3 * 2**30} bytes; " in refusal(lambda: stored_tensors(path))


def test_a_tensor_of_very_many_dimensions_is_refused(model: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with time_within(2.0):
        refusal(lambda: model_shape(model))


@pytest.mark.parametrize("deep", ['{"a":' * 100_000, '{"a":' * 300 + "1" + "}" * 300, "[" * 1000])
def test_deep_json_is_refused(deep: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(deep)
    refusal(lambda: check_directory(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("hidden_size", 2**31),
        ("num_experts", 10**7),
        ("num_labels", 10**7),
        ("attention_types", [[["global"], 10**10]]),
        ("first_k_dense_replace", 10**10),
        ("num_key_value_heads", [1, 10**9]),
        ("max_position_embeddings", 2**40),
        ("anything", 10**30),
        ("anything", -(10**30)),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_size_that_no_model_has_is_refused_by_its_field(
    field: str, value: Any, is_nested: bool, model: Path
) -> None:
    config = {field: value}
    (model / "config.json").write_text(json.dumps({"text_config": config} if is_nested else config))
    line = refusal(lambda: check_directory(model))
    assert f"config.json: {field}: " in line
    assert "the most that is served" in line


# ---- GGUF --------------------------------------------------------------------------------------


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(kind: int, value: bytes, *, num_tensors: int = 0, num_fields: int = 1) -> bytes:
    """A file of one field."""
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)
    return head + gguf_string(b"key") + struct.pack("<I", kind) + value


def gguf_array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def gguf_tensor(*sizes: int, offset: int = 0) -> bytes:
    packed = b"".join(struct.pack("<Q", size) for size in sizes)
    head = gguf_string(b"t") + struct.pack("<I", len(sizes)) + packed
    return gguf(4, bytes(4), num_tensors=1) + head + struct.pack("<IQ", 0, offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GGUX", "does not begin as one"),
        (b"GGUF", "are named"),
        (gguf(9, gguf_array(0, 3_000_000)), "3000000 elements of arrays; 1048576 are served"),
        (gguf(9, gguf_array(0, 10**18)), "elements of arrays; 1048576 are served"),
        (gguf(9, gguf_array(8, 1_000_000)), "1000000 elements of arrays in "),
        (gguf(9, gguf_array(9, 1, gguf_array(0, 1, b"a"))), "arrays of the type 9"),
        (gguf(9, gguf_array(8, 1, gguf_string(b"x" * 3000))), "a string in an array of 3000 bytes"),
        (gguf(9, gguf_array(8, 20_000, gguf_string(b"x" * 2000) * 20_000)), "33554432 are served"),
        (gguf(8, struct.pack("<Q", 2**60)), "bytes are named"),
        (gguf(99, b""), "no type 99"),
        (gguf(4, bytes(4), num_tensors=10**6), "1000000 tensors; 65536 are served"),
        (gguf(4, bytes(4), num_fields=4000), "4000 fields in "),
        (gguf_tensor(2**32, 2**32), "values in a file of"),
        (gguf_tensor(*[1] * 5), "5 dimensions"),
        (gguf_tensor(4, offset=2**62), "begins behind its end"),
    ],
)
def test_a_gguf_file_that_claims_what_it_does_not_hold_is_refused_at_once(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with memory_within(2**26), time_within(1.0):
        assert words in refusal(lambda: check_gguf(path))


# ---- whatever the files say --------------------------------------------------------------------


@contextlib.contextmanager
def time_within(most_s: float) -> Iterator[None]:
    begin_s = time.process_time()
    yield
    assert time.process_time() - begin_s < most_s


@contextlib.contextmanager
def memory_within(num_bytes: int) -> Iterator[None]:
    """Check that this process's peak of memory grows by no more."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 < num_bytes


ODD: list[Any] = [None, True, -1, 0, 3, 2**31, 2**62, -(2**63), 10**12, 10**30, 1e308, 0.5]
ODD += [float("nan"), float("inf"), "", "2", "x\n", "\x00", [], [[]], {}, {"a": []}, [None], ["x"]]


def odd_value(text: bytes, chance: random.Random) -> bytes:
    """Return the JSON with one value in it replaced by an odd one."""
    root = [json.loads(text)]
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.9:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key] = chance.choice(ODD)
    return json.dumps(root[0]).encode()


def odd_bytes(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(min(len(content), 4096))
    if chance.random() < 0.2:
        return content[:place]
    return content[:place] + chance.randbytes(chance.randrange(9)) + content[place + 1 :]


def small_model(directory: Path) -> None:
    """Write the built-in model, with a little of every other file that is read."""
    shutil.copytree(BUILTIN_MODEL, directory)
    (directory / "model.safetensors").unlink()
    save_file({"w": np.ones((2, 2), dtype=np.float32)}, directory / "model-1.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["mean"]}')
    (directory / "chat_template.json").write_text('{"chat_template": "x"}')


def read_all(directory: Path) -> None:
    """Read the files of a model with all readers that need no torch."""
    config = ShardConfig(model=str(directory), runner="fake")
    load_runner(config, lambda line: None)
    check_directory(directory)
    pooling_of(directory, "auto", lambda line: None)


def test_whatever_a_models_files_say_they_are_read_or_refused(tmp_path: Path) -> None:
    chance = seeded("files of a model")
    model = tmp_path / "model"
    small_model(model)
    names = [str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()]
    names.remove("README.md")
    with memory_within(2**29):
        for _ in range(budget(80, 2000)):
            path = model / chance.choice(names)
            whole = path.read_bytes()
            is_json = path.suffix == ".json" and chance.random() < 0.7
            path.write_bytes(odd_value(whole, chance) if is_json else odd_bytes(whole, chance))
            with contextlib.suppress(ModelError), time_within(5.0):
                read_all(model)
            path.write_bytes(whole)


def test_whatever_a_gguf_file_says_it_is_walked_or_refused(tmp_path: Path) -> None:
    chance = seeded("GGUF")
    path = tmp_path / "a.gguf"
    wholes = [gguf(9, gguf_array(0, 40, bytes(40))), gguf_tensor(2, 2) + bytes(64)]
    wholes += [gguf(9, gguf_array(8, 3, gguf_string(b"a") * 3)), gguf(8, gguf_string(b"text"))]
    with memory_within(2**28), time_within(budget(20, 600)):
        for _ in range(budget(2000, 100_000)):
            path.write_bytes(odd_bytes(chance.choice(wholes), chance))
            with contextlib.suppress(ModelError):
                check_gguf(path)
