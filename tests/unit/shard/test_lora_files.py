"""Adapters' files: read as peft writes them, and refused by name for what is not served."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import make_adapter, write_safetensors

from penstock_shard.checkpoint.adapter_files import read_adapter_files
from penstock_shard.checkpoint.untrusted.module_patterns import ModulePatterns, PatternUnreadable
from penstock_shard.errors import ModelError

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
MODULES = {Q: (32, 24), UP: (32, 64)}


def test_an_adapter_is_read(tmp_path: Path) -> None:
    files = read_adapter_files(make_adapter(tmp_path / "a", MODULES, rank=4, lora_alpha=10))
    assert files.rank == 4
    assert files.base_model == "random"
    found = [(p.module, p.rank, p.in_features, p.out_features, p.scale) for p in files.pairs]
    assert found == [(Q, 4, 32, 24, 2.5), (UP, 4, 32, 64, 2.5)]
    assert files.pairs[0].name_b == f"base_model.model.{Q}.lora_B.weight"


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_modules_are_called_as_in_the_text_model_alone(root: str, tmp_path: Path) -> None:
    """peft gives modules such names in a model of images and text."""
    modules = {name.replace("model.", root, 1): sizes for name, sizes in MODULES.items()}
    pattern = {f"{root}layers.1.mlp.up_proj": 8}
    adapter = make_adapter(tmp_path / "a", modules, rank=4, lora_alpha=6, alpha_pattern=pattern)
    files = read_adapter_files(adapter)
    assert [(pair.module, pair.scale) for pair in files.pairs] == [(Q, 1.5), (UP, 2.0)]
    assert (
        files.pairs[0].name_a == f"base_model.model.{root}layers.0.self_attn.q_proj.lora_A.weight"
    )


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True, "lora_alpha": 6}, (3.0, 3.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 8}}, (2.0, 1.5)),
        ({"lora_alpha": 6, "alpha_pattern": {"layers.1.mlp.up_proj": 8}}, (1.5, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {r"layers\.\d+\..*_proj": 8}}, (2.0, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"proj": 8}}, (1.5, 1.5)),
    ],
)
def test_the_scale_is_that_of_the_module(
    config: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    files = read_adapter_files(make_adapter(tmp_path / "a", MODULES, rank=4, **config))
    assert tuple(pair.scale for pair in files.pairs) == scales


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "one", seed=1)
    shutil.copytree(one, tmp_path / "copy")
    others = [
        make_adapter(tmp_path / "two", seed=2),
        make_adapter(tmp_path / "alpha", seed=1, lora_alpha=3),
    ]
    known = read_adapter_files(one).content_hash
    assert read_adapter_files(tmp_path / "copy").content_hash == known
    assert known not in [read_adapter_files(other).content_hash for other in others]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not served"),
        ({"use_dora": True}, "use_dora: 'True' is not served"),
        ({"bias": "all"}, "bias: 'all' is not served"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: .*lm_head"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"of_next_year": {"on": 1}}, "of_next_year"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the model's own weights"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much' is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: 'nan' is no number"),
        ({"r": 5}, "lora_A of rank 4 and lora_B of rank 4; adapter_config.json says 5"),
        ({"rank_pattern": {"q_proj": 3}}, "says 3"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern: cannot be read"),
    ],
)
def test_what_would_change_results_is_refused_by_its_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        read_adapter_files(make_adapter(tmp_path / "a", **config))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {
            "use_dora": False,
            "modules_to_save": None,
            "layer_replication": None,
            "arrow_config": None,
        },
        {"init_lora_weights": "gaussian", "rank_pattern": {}, "megatron_core": "megatron.core"},
        {"layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
    ],
)
def test_what_changes_nothing_is_no_error(config: dict[str, Any], tmp_path: Path) -> None:
    assert read_adapter_files(make_adapter(tmp_path / "a", **config)).rank == 4


# By Python's matcher each takes from minutes to years for the name of one module.
SLOW = [
    r"((\w|\.)*)*!",
    "(a+)+!",
    "(.*)+!",
    ".*" * 12 + "!",
    r"(\w*\.)*!",
    r"(?:[a-z]+|\w+)*!",
    r"(?=.*)(q|q_proj|.)*!",
    "(((((((q*)*)*)*)*)*)*)*!",
    "[a-z_]*" * 12 + "!",
    "(.|..|...)*!",
]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", SLOW)
def test_no_pattern_of_an_adapters_author_takes_long(
    pattern: str, field: str, tmp_path: Path
) -> None:
    modules = {f"model.layers.{each}.self_attn.q_proj": (32, 24) for each in range(64)}
    config: dict[str, Any] = {field: {pattern: 4}}
    path = make_adapter(tmp_path / "a", modules, rank=4, **config)
    assert seconds(lambda: read_or_refused(path)) < 2.0


def test_many_patterns_for_many_modules_are_refused_before_they_take_long(tmp_path: Path) -> None:
    modules = {f"model.layers.{each}.self_attn.q_proj": (1, 1) for each in range(2000)}
    patterns = {f"{'.*' * 100}{each}": 1 for each in range(500)}
    path = make_adapter(tmp_path / "a", modules, rank=1, rank_pattern=patterns)
    refused: list[str] = []
    assert seconds(lambda: refused.append(read_or_refused(path))) < 4.0
    assert "characters of expressions for 2000 modules" in refused[0]


def test_a_pattern_for_each_module_is_as_quick_as_one_for_all(tmp_path: Path) -> None:
    """Adapters whose ranks were found in training have a pattern for each module."""
    modules = {f"model.layers.{each}.self_attn.q_proj": (1, 1) for each in range(3000)}
    path = make_adapter(tmp_path / "a", modules, rank=1, rank_pattern=dict.fromkeys(modules, 1))
    assert seconds(lambda: read_adapter_files(path)) < 4.0


def read_or_refused(path: Path) -> str:
    """Return the refusal of an adapter; empty if it was read."""
    try:
        read_adapter_files(path)
    except ModelError as error:
        return str(error)
    return ""


def seconds(act: Callable[[], object]) -> float:
    """Return the seconds of processor time that `act` takes here: the least of three tries."""
    took = []
    for _ in range(3):
        begin_s = time.process_time()
        act()
        took.append(time.process_time() - begin_s)
    return min(took)


# As adapters have them, and what each kind of element can be.
PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    r"layers\.1\.self_attn\.q_proj",
    r"layers\.\d+\..*_proj",
    r"layers\.(0|1[02]?)\..*",
    "q_proj|up_proj",
    "(?:self_attn|mlp).(q|up)_proj",
    "^model.layers.1.self_attn.q_proj",
    "^layers.1.self_attn.q_proj",
    r"[0-9]+\.mlp\.\w+$",
    "[uq]p?_proj",
    ".*",
    ".+proj",
    "proj",
    "()",
    "|q_proj",
    "layers.(0|(1|11)).*p.*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_fits_where_peft_says_so(pattern: str) -> None:
    names = ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.12.up_proj")
    modules = [f"model.layers.{layer}.{name}" for layer in (0, 1, 11, 12) for name in names]
    found = [ModulePatterns({pattern: 1}, len(modules)).value(module, 0) for module in modules]
    assert found == [int(bool(re.match(rf"(.*\.)?({pattern})$", module))) for module in modules]


def test_the_first_pattern_that_fits_counts() -> None:
    patterns = ModulePatterns({"x": 0, ".*q_proj": 1, Q: 2, "q_proj": 3, "up_proj": 4, ".*": 5}, 2)
    assert [patterns.value(module, 9) for module in (Q, UP, "model.norm")] == [1, 4, 5]


@pytest.mark.parametrize(
    "pattern", ["a{2}", "(a)*", "a*?", "[^a]", "(?=a)", r"\1", "a)", "(a", "é+é{2}"]
)
def test_what_else_an_expression_may_have_is_refused_with_its_place(pattern: str) -> None:
    with pytest.raises(PatternUnreadable, match="is not served; names"):
        ModulePatterns({pattern: 1}, 1)


def cut(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def pickle(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def half(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_A.weight"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros((4, 32), np.float32)})


def magnitude(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_magnitude_vector"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros(4, np.float32)})


def whole_numbers(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_A.weight"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros((4, 32), np.float32)})
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"I32"'))


def list_of_settings(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps([1]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "there is no such directory"),
        (lambda path: (path / "adapter_config.json").unlink(), "there is no adapter_config.json"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "there is no adapter_model"),
        (pickle, "only as pickle"),
        (cut, "is cut short"),
        (half, f"lora_B of {Q} is missing"),
        (magnitude, "lora_magnitude_vector is no matrix of a LoRA adapter"),
        (whole_numbers, "is of 'I32'; an adapter's tensors are BF16, F16, F32"),
        (list_of_settings, "is not a JSON object"),
        (
            lambda path: write_safetensors(path / "adapter_model.safetensors", {}),
            "there are no tensors in it",
        ),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "a")
    damage(path)
    with pytest.raises(ModelError, match=words) as refused:
        read_adapter_files(path)
    assert "\n" not in str(refused.value)


# ---- files that are odd ------------------------------------------------------------------------

DEEP = "[" * 100_000


def in_header(text: str | bytes) -> Callable[[Path], object]:
    header = text.encode() if isinstance(text, str) else text

    def damage(path: Path) -> None:
        content = struct.pack("<Q", len(header)) + header + bytes(4096)
        (path / "adapter_model.safetensors").write_bytes(content)

    return damage


def in_config(**config: Any) -> Callable[[Path], object]:
    return lambda path: make_adapter(path, **config)


def stated(**changes: Any) -> str:
    tensor = {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512], **changes}
    return json.dumps({f"base_model.model.{Q}.lora_A.weight": tensor})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (in_header(DEEP), "is no safetensors file"),
        (in_header('{"a":' * 100_000), "nested too deeply"),
        (in_header(b"\xff\xfe{"), "is no safetensors file"),
        (in_header("[]"), "is no safetensors file"),
        (in_header('{"a": 1}'), "is no safetensors file"),
        (in_header(stated(dtype=[1])), "is no safetensors file"),
        (in_header(stated(dtype="F64" * 1000)), "is of 'F64"),
        (in_header(stated(shape="ab")), "is no safetensors file"),
        (in_header(stated(shape=[4, -1])), "is no safetensors file"),
        (in_header(stated(shape=[4, 1.5])), "is no safetensors file"),
        (in_header(stated(data_offsets=["a", "b"])), "is no safetensors file"),
        (in_header(stated(data_offsets=[0, 10**30])), "is no safetensors file|is cut short"),
        (in_header(stated().replace("model.layers", "model\\n.layers")), "printable characters"),
        (in_header(stated().replace("model.layers", "m" * 10**4)), "printable characters"),
        (in_config(r=10**400), "r: '1000.* is no number"),
        (in_config(lora_alpha=1e999), "lora_alpha: 'inf' is no number"),
        (in_config(alpha_pattern={"a{99999999999}": 1}), "alpha_pattern: cannot be read"),
        (in_config(alpha_pattern={"(" * 50_000 + ")" * 50_000: 1}), "400 are served"),
        (
            in_config(rank_pattern={"(" * 20 + ")" * 20: 1}),
            r"rank_pattern: cannot be read: '\({20}",
        ),
        (in_config(alpha_pattern=["q_proj"]), "alpha_pattern: .* is no object of patterns"),
        (lambda path: (path / "adapter_config.json").write_text(DEEP), "nested too deeply"),
        (in_config(peft_type=["LORA" * 1000]), "peft_type"),
        (in_config(bias={"all": "x" * 1000}), "bias"),
    ],
)
def test_odd_files_are_refused_in_one_short_line(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "a")
    damage(path)
    with pytest.raises(ModelError, match=words) as refused:
        read_adapter_files(path)
    assert len(str(refused.value).removeprefix(str(path))) < 600


def test_whatever_the_files_say_they_are_read_or_refused(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    path = make_adapter(tmp_path / "a", MODULES)
    files = [path / "adapter_config.json", path / "adapter_model.safetensors"]
    whole = [file.read_bytes() for file in files]
    for _ in range(150):
        for file, content in zip(files, whole, strict=True):
            file.write_bytes(content)
        which = chance.randrange(2)
        start = 8 * which
        (length,) = struct.unpack("<Q", whole[1][:8]) if which else (len(whole[0]),)
        text = whole[which][start : start + length]
        damaged = odd_bytes(text, chance) if chance.random() < 0.3 else odd_json(text, chance)
        head = struct.pack("<Q", len(damaged)) if which else b""
        files[which].write_bytes(head + damaged + whole[which][start + length :])
        with contextlib.suppress(ModelError):
            read_adapter_files(path)


def odd_bytes(text: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(text))
    return text[:place] + chance.randbytes(chance.randrange(4)) + text[place + 1 :]


def odd_json(text: bytes, chance: random.Random) -> bytes:
    """Return the JSON with one value in it replaced by an odd one."""
    value = json.loads(text)
    holder, key = value, chance.choice(list(value))
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.8:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    odd: list[Any] = [None, True, -1, 0, 2**70, 10**400, 1e308, 0.5, "", "x\n", "\ud800"]
    odd += [[], [[]], {}, {"a": []}]
    holder[key] = chance.choice(odd)
    return json.dumps(value).encode()
