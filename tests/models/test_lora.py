"""Adapters in our decoder and in transformers' models: what peft computes, whoever is beside."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.tiny_families import make_family
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import make_adapter
from support.budget import budget, in_soak
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.checkpoint.adapter_files import read_adapter_files
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import (
    LoopedDelta,
    LoraBank,
    LoraLimits,
    LowRank,
    Part,
    StackedDelta,
    TokenAdapters,
)
from penstock_shard.model_loader.adapter_store import read_weights
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.lora_targets import make_adaptable
from penstock_shard.models.transformers.transformers_model import TransformersModel
from penstock_shard.ops.torch_ops import TorchOps
from penstock_shard.selfcheck.random_steps import Row, random_steps
from penstock_shard.sequence import Sequence

Directory = Callable[[str], Path]

# peft asks models in a way that transformers will not have for ever.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Family, what is adapted, and what else the configuration says.
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "all of llama": ("llama", ALL, {}),
    "some of llama": ("llama", ["q_proj", "v_proj", "down_proj"], {"r": 3, "lora_alpha": 5}),
    "rank stabilised": ("llama", ALL, {"r": 9, "use_rslora": True}),
    "ranks of their own": (
        "llama",
        ALL,
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"o_proj": 40}},
    ),
    "some layers": ("llama", ALL, {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "biases": ("qwen2", ALL, {}),
    "head norms": ("qwen3", ALL, {}),
    "fused tensors": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {}),
    "norms of outputs": ("gemma2", ALL, {}),
    "beside experts": ("qwen3_moe", ATTENTION, {}),
    "latents": (
        "deepseek_v3",
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
        {},
    ),
    "pairs side by side": ("llama4", ATTENTION, {}),
    "values that are keys": ("gemma4", [*ATTENTION, "mlp.gate_proj"], {}),
    "transformers: olmo": ("olmo", ALL, {}),
    "transformers: stablelm": ("stablelm", ALL, {"use_rslora": True}),
    "transformers: phi": ("phi", ["q_proj", "dense", "fc1", "fc2"], {}),
    "transformers: opt": ("opt", ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"], {}),
}
# Those that differ most: the others in the soak.
SOME = ["all of llama", "ranks of their own", "fused tensors", "beside experts"]
SOME += ["latents", "transformers: stablelm"]


def make_peft(model_dir: Path, out: Path, targets: list[str], seed: int, **config: Any) -> Path:
    """An adapter that peft itself saves, with B no zeros, and the model it makes of it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wanted = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **{"r": 4, **config})
    model = get_peft_model(base, wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(str(out))
    return out


def merged_logits(model_dir: Path, adapter: Path | None, token_ids: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


class Adapted:
    """A runner with adapters at its indices 1, 2, ..., and steps over its model."""

    def __init__(self, model_dir: Path, *adapters: Path, **settings: Any) -> None:
        self.runner = load(model_dir, enable_lora=True, **settings)
        store = self.runner.adapters
        assert store is not None
        for index, adapter in enumerate(adapters, 1):
            store.place(index, store.read(str(adapter)))

    def sequence(self, prompt: list[int], index: int, max_tokens: int = 12) -> Sequence:
        sequence = make_sequence(prompt, max_tokens=max_tokens)
        sequence.adapter_index = index
        return sequence

    def logits(self, *rows: tuple[int, int]) -> list[tuple[list[int], Tensor]]:
        """Return the token ids and the logits of a sequence for each row, computed in two steps. A
        row is the number of tokens and the index of the adapter.
        """
        info = self.runner.info
        kv_dtype = getattr(torch, info.kv_dtype)
        with random_steps(
            self.runner.model, info.vocab_size, info.block_size, 32, kv_dtype
        ) as steps:
            sequences = []
            for length, index in rows:
                sequence = steps.sequence(length)
                sequence.adapter_index = index
                sequences.append((sequence, length // 2, length))
            first: list[Row] = [(sequence, 0, half) for sequence, half, _ in sequences]
            second: list[Row] = [(s, half, length - half) for s, half, length in sequences]
            parts = [
                steps.run(step).split([count for _, _, count in step]) for step in (first, second)
            ]
        joined = [torch.cat([parts[0][i], parts[1][i]]) for i in range(len(sequences))]
        return [(s.token_ids, part) for (s, _, _), part in zip(sequences, joined, strict=True)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "cpu") if name in SOME else in_soak(name, "cpu") for name in CASES),
        *((name, "sdpa") for name in ("some of llama", "transformers: phi")),
    ],
)
def test_logits_are_those_of_peft(
    name: str, backend: str, model_dir: Directory, tmp_path: Path
) -> None:
    family, targets, config = CASES[name]
    directory = model_dir(family)
    adapter = make_peft(directory, tmp_path / "adapter", targets, 1, **config)
    adapted = Adapted(directory, adapter, attention_backend=backend)
    kind = TransformersModel if name.startswith("transformers") else Decoder
    assert isinstance(adapted.runner.model, kind)
    for (token_ids, logits), path in zip(
        adapted.logits((40, 1), (23, 0)), (adapter, None), strict=True
    ):
        expected = merged_logits(directory, path, token_ids)
        error = float(((logits - expected) / expected.std()).abs().max())
        assert error < 1e-4, f"index of {path}: {error:g}"


def test_greedy_tokens_are_those_of_the_merged_model(model_dir: Directory, tmp_path: Path) -> None:
    directory = model_dir("llama")
    adapters = [make_peft(directory, tmp_path / str(seed), ALL, seed) for seed in (1, 2, 3)]
    adapted = Adapted(directory, *adapters)
    prompts = [[7, 30, 100 + row] for row in range(budget(5, 8))]
    sequences = [adapted.sequence(prompt, row % 4) for row, prompt in enumerate(prompts)]
    Driver(adapted.runner, seed=3).generate(sequences, max_chunk=2)
    for sequence in sequences:
        path = None if sequence.adapter_index == 0 else adapters[sequence.adapter_index - 1]
        best = merged_logits(directory, path, sequence.token_ids.tolist()).argmax(-1).tolist()
        start = sequence.num_prompt_tokens
        assert sequence.token_ids[start:].tolist() == best[start - 1 : -1]


@pytest.mark.usefixtures("whole_check")
@pytest.mark.parametrize("dtype", [in_soak("float32"), "auto"])
def test_a_token_has_the_same_bits_alone_and_beside_other_adapters(
    dtype: str, model_dir: Directory, tmp_path: Path
) -> None:
    directory = model_dir("llama")
    adapters = [make_peft(directory, tmp_path / str(seed), ALL, seed) for seed in (1, 2)]
    rows = [(50, 1), (33, 2), (41, 0), (20, 1), (9, 2)]
    adapted = Adapted(directory, *adapters, dtype=dtype)
    assert adapted.runner.info.batch_invariant
    together = adapted.logits(*rows)
    for row, (token_ids, logits) in zip(rows, together, strict=True):
        alone = _logits_of(adapted, token_ids, row[1])
        assert torch.equal(alone, logits), row
    # At other indices, too.
    swapped = Adapted(directory, *reversed(adapters), dtype=dtype)
    token_ids, logits = together[0]
    assert torch.equal(_logits_of(swapped, token_ids, 2), logits)


def _logits_of(adapted: Adapted, token_ids: list[int], index: int) -> Tensor:
    info = adapted.runner.info
    kv_dtype = getattr(torch, info.kv_dtype)
    with random_steps(
        adapted.runner.model, info.vocab_size, info.block_size, 32, kv_dtype
    ) as steps:
        sequence = steps.sequence(len(token_ids))
        sequence.token_ids[:] = array("I", token_ids)
        sequence.adapter_index = index
        return steps.run([(sequence, 0, len(token_ids))])


def test_an_adapter_that_was_dropped_adds_nothing(model_dir: Directory, tmp_path: Path) -> None:
    directory = model_dir("llama")
    adapter = make_peft(directory, tmp_path / "a", ALL, 1)
    adapted = Adapted(directory, adapter)
    token_ids, logits = adapted.logits((20, 1))[0]
    assert adapted.runner.adapters is not None
    adapted.runner.adapters.drop(1)
    assert torch.equal(_logits_of(adapted, token_ids, 1), _logits_of(adapted, token_ids, 0))
    assert not torch.equal(_logits_of(adapted, token_ids, 1), logits)


def _pair(rank: int, in_features: int, out_features: int) -> LowRank:
    return LowRank(torch.randn(rank, in_features), torch.randn(out_features, rank))


# ---- the two ways to compute them --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_adapters_add_what_looped_ones_do(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    ops = TorchOps(torch.device("cpu"), dtype, "bfloat16", SdpaBackend())
    if dtype is torch.float32:
        ops = TorchOps(torch.device("cpu"), dtype, "float32", SdpaBackend())
    parts = [Part("q", 0, 24), Part("k", 24, 32), Part("v", 32, 40)]
    looped = LoopedDelta(parts, ops)
    stacked = StackedDelta(parts, 20, LoraLimits(5, 9), ops)
    ranks = {1: 3, 2: 9, 4: 5}
    for index, rank in ranks.items():
        pairs = {
            part.module: _pair(rank, 20, part.end - part.start)
            for part in parts
            if (index, part.module) != (2, "k")
        }
        looped.place(index, pairs)
        stacked.place(index, pairs)
    tokens = TokenAdapters(torch.tensor([0, 1, 2, 2, 4, 1, 0, 4, 3]))
    x = torch.randn(9, 20).to(dtype)
    base = torch.randn(9, 40).to(dtype)
    found = [base.clone(), base.clone()]
    looped.add(x, found[0], tokens)
    stacked.add(x, found[1], tokens)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    error = (found[0] - found[1]).abs().max() / found[0].abs().max()
    assert float(error) < tolerance
    # Tokens without an adapter, and those of an index that is empty, keep their bits.
    for row in (0, 6, 8):
        assert torch.equal(found[1][row], base[row])
    assert not torch.equal(found[1][1], base[1])
    stacked.drop(2)
    again = base.clone()
    stacked.add(x, again, tokens)
    assert torch.equal(again[2], base[2])
    assert torch.equal(again[1], found[1][1])


@pytest.mark.parametrize("family", ["phi3", "phi"])
def test_stacked_adapters_in_a_model_are_those_of_peft(
    family: str, model_dir: Directory, tmp_path: Path
) -> None:
    directory = model_dir(family)
    targets = [*ATTENTION, "qkv_proj", "gate_up_proj", "down_proj", "dense", "fc2"]
    adapter = make_peft(directory, tmp_path / "adapter", targets, 1)
    runner = load(directory, attention_backend="sdpa")
    assert isinstance(runner.model, Decoder | TransformersModel)
    ops = TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
    bank = LoraBank(LoraLimits(3, 8), ops, stacked=True)
    make_adaptable(runner.model, bank)
    bank.place(2, read_weights(read_adapter_files(adapter)))
    token_ids = list(range(5, 40))
    adapted = Adapted.__new__(Adapted)
    adapted.runner = runner
    for index, path in ((2, adapter), (0, None), (1, None)):
        expected = merged_logits(directory, path, token_ids)
        error = (_logits_of(adapted, token_ids, index) - expected) / expected.std()
        assert float(error.abs().max()) < 1e-4, index


@pytest.mark.parametrize(
    ("modules", "rank", "words"),
    [
        ({"model.layers.0.self_attn.q_proj": (48, 32)}, 4, "48 inputs and 32 outputs, the model's"),
        ({"model.layers.0.self_attn.q_proj": (48, 32)}, 4, "is it an adapter of 'random'"),
        ({"model.layers.9.self_attn.q_proj": (32, 32)}, 4, "no such module that takes adapters"),
        ({"model.layers.9.self_attn.q_proj": (32, 32)}, 4, "is it an adapter of 'random'"),
        ({"lm_head": (32, 384)}, 4, "no such module that takes adapters"),
        ({"model.layers.0.self_attn.q_proj": (32, 32)}, 9, "rank 9 is over --max-lora-rank 8"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    modules: Any, rank: int, words: str, model_dir: Directory, tmp_path: Path
) -> None:
    runner = load(model_dir("llama"), enable_lora=True, max_lora_rank=8)
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=words):
        runner.adapters.read(str(make_adapter(tmp_path / "a", modules, rank=rank)))


def test_an_adapter_of_no_numbers_is_refused(model_dir: Directory, tmp_path: Path) -> None:
    runner = load(model_dir("llama"), enable_lora=True)
    assert runner.adapters is not None
    broken = make_adapter(tmp_path / "a", size=float("nan"))
    with pytest.raises(ModelError, match="values that are no numbers"):
        runner.adapters.read(str(broken))


def test_an_adapter_of_experts_is_refused_in_one_line(model_dir: Directory, tmp_path: Path) -> None:
    runner = load(model_dir("qwen3_moe"), enable_lora=True)
    assert runner.adapters is not None
    adapter = make_adapter(tmp_path / "a", {"model.layers.0.mlp.experts.3.gate_proj": (32, 24)})
    with pytest.raises(
        ModelError, match=r"experts\.3\.gate_proj: adapters of experts are not served"
    ):
        runner.adapters.read(str(adapter))


def test_an_adapter_of_what_code_multiplies_by_itself_is_refused(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "jamba", "jamba")
    adapter = make_peft(directory, tmp_path / "adapter", ["dt_proj"], 1)
    runner = load(directory, enable_lora=True)
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=r"dt_proj: this model has no such module that takes"):
        runner.adapters.read(str(adapter))


def test_tensors_that_lie_elsewhere_than_their_shapes_say_are_refused(
    model_dir: Directory, tmp_path: Path
) -> None:
    runner = load(model_dir("llama"), enable_lora=True)
    assert runner.adapters is not None
    path = make_adapter(tmp_path / "a")
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"[0, 512]", b"[0, 510]"))
    with pytest.raises(ModelError, match="cannot read the weights"):
        runner.adapters.read(str(path))


def test_values_must_be_numbers_in_the_dtype_that_all_adapters_share(tmp_path: Path) -> None:
    files = read_adapter_files(make_adapter(tmp_path / "of torch.mine", size=1e6))
    read_weights(files, torch.bfloat16)
    words = r"of torch\.mine: .* values that are no numbers in float16$"
    with pytest.raises(ModelError, match=words):
        read_weights(files, torch.float16)


def test_memory_is_measured_with_what_adapters_take(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[int] = set()

    def add(delta: LoopedDelta, x: Tensor, y: Tensor, tokens: TokenAdapters) -> None:
        found.update(tokens.indices.tolist())

    monkeypatch.setattr(LoopedDelta, "add", add)
    load(model_dir("llama"), enable_lora=True)
    assert found == {1}


def test_a_model_without_linear_layers_takes_no_adapters(model_dir: Directory) -> None:
    with pytest.raises(ModelError, match="no linear layer of this model can take one"):
        load(model_dir("gpt2"), enable_lora=True)


def test_numbers_of_other_adapters_do_not_matter() -> None:
    ops = TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
    stacked = StackedDelta([Part("q", 0, 8)], 6, LoraLimits(2, 4), ops)
    stacked.place(1, {"q": _pair(4, 6, 8)})
    x, y = torch.randn(2, 6), torch.zeros(2, 8)
    stacked.add(x, y, TokenAdapters(torch.tensor([1, 0])))
    stacked._a[16:] = torch.inf
    again = torch.zeros(2, 8)
    stacked.add(x, again, TokenAdapters(torch.tensor([1, 0])))
    assert torch.equal(y, again)
