"""Models divided over two ranks, each a process, over gloo: together they give what one does.

The other rank is one process for all tests here, as starting one takes seconds.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_maker import make_model
from models.other_rank import STACKED, load_as_told
from support.adapters import make_adapter
from support.budget import budget, in_soak
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.checkpoint.stacked_experts import StackedExperts, has_stacks
from penstock_shard.config import ShardConfig
from penstock_shard.distributed import divide_module
from penstock_shard.distributed.collectives import RankRendezvous, Ranks
from penstock_shard.distributed.divide_decoder import (
    EMBEDDING,
    HEAD,
    SlicedTensors,
    divided_by,
    local_spec,
)
from penstock_shard.distributed.group import RankGroup
from penstock_shard.distributed.messages import Join
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.distributed.rank_connections import Followers, await_ranks
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.adapter_store import adapter_store
from penstock_shard.model_loader.load_rank import load_part
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.models.base import CausalModel, ForwardOutput
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.spec import tensor_shapes
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.selfcheck.batch_invariance import first_variance
from penstock_shard.selfcheck.random_steps import random_steps

BLOCK, NUM_BLOCKS = 16, 32
# Tokens of a greedy output.
GREEDY = budget(12, 24)
# Of a logit, in standard deviations of all.
TOLERANCE = 2e-5
OURS = ["llama", "gemma2", "mixtral", "deepseek_v3", "llama4", "gemma4"]
# Heads that are gathered; experts as transformers keeps them.
THEIRS = ["olmo2", "deepseek_v2"]
# Divided as llama and mixtral are.
ALIKE = ["qwen2", "qwen3_moe"]
MORE = ["phi3", "glm4", "granite", "cohere2", "gpt_neox", "starcoder2", "qwen2_moe", "olmoe"]


class TwoRanks:
    """Two processes, this one and another, that load models together."""

    def __init__(self) -> None:
        self._meeting_point = RankRendezvous(2, alone=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports = [listener.getsockname()[1], self._meeting_point.port]
            script = Path(__file__).with_name("other_rank.py")
            command = [sys.executable, str(script), *map(str, ports)]
            self.process = subprocess.Popen(command)
            lines = await_ranks(listener, 2, {1: self.process}, lambda text: None)
        self.lost: list[str] = []
        self.followers = Followers(lines, on_lost=self.lost.append)
        self._meeting_point.await_others(self.followers.check)
        self.ranks = self._meeting_point.join(torch.device("cpu"))

    def load(
        self, directory: Path, *, stacked: bool = False, **settings: Any
    ) -> tuple[LoadedModel, MirroredModel]:
        """`stacked`: adapters are computed as they are on devices."""
        config = config_of(tensor_parallel_size=2, **settings)
        self.followers.tell(Join(config, str(directory), STACKED if stacked else 0))
        try:
            loaded = load_as_told(config, directory, self.ranks, stacked=stacked)
        except ModelError:
            with pytest.raises(ModelError):
                RankGroup(self.ranks, self.followers).whole(None, "", "")  # type: ignore[arg-type]
            raise
        met = RankGroup(self.ranks, self.followers)
        return loaded, met.whole(loaded, loaded.ops.backend.name, "")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    assert not ranks.lost
    dist.destroy_process_group()
    ranks.process.kill()
    ranks.process.wait()


def config_of(**settings: Any) -> ShardConfig:
    values = {"device": "cpu", "dtype": "float32", "threads": 1, **settings}
    return ShardConfig(**values)


def cut_logits(model: CausalModel, vocab_size: int, adapters: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the logits of two random sequences, in chunks beside decodes, over shuffled blocks."""
    with random_steps(model, vocab_size, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        long, short = steps.sequence(70), steps.sequence(33)
        long.adapter_index, short.adapter_index = adapters
        parts = [
            steps.run([(long, 0, 40), (short, 0, 7)]),
            steps.run([(long, 40, 1), (short, 7, 20)]),
            steps.run([(short, 27, 1), (long, 41, 29)]),
            steps.run([(short, 28, 5)]),
        ]
    return torch.cat(parts)


def greedy(model: CausalModel, vocab_size: int, count: int = GREEDY, adapter: int = 0) -> list[int]:
    """Tokens after a random prompt, each the best."""
    with random_steps(model, vocab_size, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        sequence = steps.sequence(20 + count)
        sequence.adapter_index = adapter
        logits = steps.run([(sequence, 0, 20)], [19])
        for position in range(20, 20 + count):
            sequence.token_ids[position] = int(logits[0].argmax())
            logits = steps.run([(sequence, position, 1)])
        return sequence.token_ids[20:]


def check_equal(two_ranks: TwoRanks, directory: Path, **settings: Any) -> None:
    whole = load_part(config_of(**settings), directory, None, lambda text: None).part
    _, divided = two_ranks.load(directory, **settings)
    vocab_size = len(whole_logits := cut_logits(whole, 300)[0])
    expected, found = cut_logits(whole, vocab_size), cut_logits(divided, vocab_size)
    assert len(whole_logits) == found.shape[1]
    error = float(((found - expected) / expected.std()).abs().max())
    assert error < TOLERANCE, error
    assert greedy(divided, vocab_size) == greedy(whole, vocab_size)


@pytest.mark.parametrize("family", [*OURS, *THEIRS, *map(in_soak, ALIKE + MORE)])
def test_two_ranks_give_the_logits_and_tokens_of_one(
    family: str, two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    check_equal(two_ranks, model_dir(family))


def test_heads_of_keys_that_are_fewer_than_ranks_are_kept_by_several(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    # And a vocabulary that two do not divide, with a head that is the embedding.
    changes: dict[str, Any] = {
        "num_key_value_heads": 1,
        "vocab_size": 383,
        "tie_word_embeddings": True,
    }
    directory = make_model(tmp_path / "model", "llama", attention_bias=True, **changes)
    check_equal(two_ranks, directory)
    loaded, _ = two_ranks.load(directory)
    assert [layer.num_kv_heads for layer in loaded.part.layers] == [1, 1, 1]


def test_parts_are_packed_as_the_whole_is(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    """The dtype is float16, where sums of halves are rounded otherwise than those of the whole."""
    for family in ("llama", "olmo2"):
        settings: dict[str, Any] = {"dtype": "float16"}
        whole = load_part(config_of(**settings), model_dir(family), None, lambda text: None).part
        _, divided = two_ranks.load(model_dir(family), **settings)
        expected, found = cut_logits(whole, 384), cut_logits(divided, 384)
        assert float(((found - expected) / expected.std()).abs().max()) < 1e-4


def test_made_up_weights_are_divided_too(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    _, divided = two_ranks.load(model_dir("llama"), load_format="dummy")
    assert bool(torch.isfinite(cut_logits(divided, 384)).all())


def test_final_hidden_states_are_those_of_one(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    whole = load_part(config_of(), model_dir("llama"), None, lambda text: None).part
    _, divided = two_ranks.load(model_dir("llama"))
    expected, found = (_hidden(model) for model in (whole, divided))
    assert torch.allclose(found, expected, atol=1e-4)


def _hidden(model: CausalModel) -> Tensor:
    """Return the hidden states of two tokens of a sequence of 40."""
    recorder = WithHidden(model)
    with random_steps(recorder, 384, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        steps.run([(steps.sequence(40), 0, 40)])
    return recorder.hidden


class WithHidden:
    """A model that is always asked for hidden states too, and keeps them."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any, **more: Any) -> ForwardOutput:
        forward: Any = self._model.forward
        forwarded: ForwardOutput = forward(*inputs, hidden_rows=torch.tensor([3, 30]), **more)
        self.hidden = forwarded.hidden.clone()
        return forwarded


@pytest.mark.usefixtures("whole_check")
@pytest.mark.parametrize("family", [in_soak("llama"), "mixtral"])
def test_with_kernels_of_fixed_bits_sums_over_ranks_have_fixed_bits(
    family: str, two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    loaded, divided = two_ranks.load(model_dir(family))
    if loaded.ops.backend.name != "cpu":
        pytest.skip("no cpu kernels here")
    assert two_ranks.ranks.in_order
    found = first_variance(
        divided, 384, 256, BLOCK, torch.float32, loaded.ops.set_threads, threads=1
    )
    assert found is None


def test_the_least_memory_of_all_ranks_counts(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    _, divided = two_ranks.load(model_dir("llama"))
    # On one machine's memory each takes as much.
    assert divided.least_free(1000, 0.9) == 500


# ---- adapters --------------------------------------------------------------------------------


class Adapted:
    """A model on one rank and the same on two, with the same adapters; of transformers' code where
    our decoder does not compute it.
    """

    def __init__(self, two_ranks: TwoRanks, directory: Path, **settings: Any) -> None:
        settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **settings}
        loaded, divided = two_ranks.load(directory, **settings)
        stacked = settings.pop("stacked", False)
        config = config_of(**settings)
        alone = load_as_told(config, directory, None, stacked=stacked)
        assert alone.bank is not None
        self.modules = alone.bank.modules
        self.vocab_size = alone.vocab_size
        self.models = (alone.model, divided)
        banks = (alone.bank, loaded.bank)
        stores = map(partial(adapter_store, config), banks, self.models)
        self.stores = [store for store in stores if store is not None]

    def place(self, index: int, adapter: Path) -> None:
        for store in self.stores:
            store.place(index, store.read(str(adapter)))

    def drop(self, index: int) -> None:
        for store in self.stores:
            store.drop(index)

    def equal_logits(self, first: int, second: int) -> Tensor:
        """Return the divided model's logits of two sequences in one batch, with the adapters of
        these indices. Fails if the whole model's differ.
        """
        architecture = type(getattr(self.models[0], "module", None)).__name__
        tolerance = TOLERANCE * (3 if architecture in ROUNDED_MORE else 1)
        expected, found = (
            cut_logits(model, self.vocab_size, (first, second)) for model in self.models
        )
        error = float(((found - expected) / expected.std()).abs().max())
        assert error < tolerance, (first, second, error)
        return found


# Families, what else their configuration says, and how they are loaded.
ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "fewer heads of keys than ranks": ("llama", {"num_key_value_heads": 1}, {}),
    "fused tensors": ("phi3", {}, {}),
    "transformers: olmo2": ("olmo2", {}, {}),
    "stacked": ("qwen2", {}, {"stacked": True, "attention_backend": "sdpa"}),
    "stacked, fused tensors": ("phi3", {}, {"stacked": True, "attention_backend": "sdpa"}),
    "stacked, transformers": ("granite", {}, {"stacked": True, "attention_backend": "sdpa"}),
    "beside experts": ("qwen3_moe", {}, {}),
    "transformers: gpt_neox": ("gpt_neox", {}, {}),
    "transformers: starcoder2": ("starcoder2", {}, {}),
    "transformers: deepseek_v2": ("deepseek_v2", {}, {}),
    "transformers: qwen2_moe": ("qwen2_moe", {}, {}),
}
# Here adapters that are looped and stacked differ by more than 1e-5 on one rank, too.
ROUNDED_MORE = {"GraniteForCausalLM", "Qwen2MoeForCausalLM"}
# Those that differ most: the others in the soak.
SOME_ADAPTED = ["fewer heads of keys than ranks", "transformers: olmo2", "stacked, fused tensors"]


@pytest.mark.parametrize("name", [n if n in SOME_ADAPTED else in_soak(n) for n in ADAPTED])
def test_adapters_add_the_same_over_two_ranks(
    name: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    family, changes, settings = ADAPTED[name]
    directory = make_model(tmp_path / "model", family, **changes)
    adapted = Adapted(two_ranks, directory, **settings)
    paths = [
        make_adapter(tmp_path / str(seed), adapted.modules, seed=seed, rank=3 + seed, size=0.05)
        for seed in range(3)
    ]
    without = adapted.equal_logits(0, 0)
    adapted.place(1, paths[0])
    adapted.place(2, paths[1])
    both = adapted.equal_logits(1, 2)
    assert not torch.allclose(both, without, atol=0.01)
    for index in (1, 2):
        alone, divided = (greedy(m, adapted.vocab_size, GREEDY // 2, index) for m in adapted.models)
        assert divided == alone, index
    adapted.drop(1)
    assert torch.equal(adapted.equal_logits(1, 0), without)
    adapted.place(1, paths[2])
    assert not torch.allclose(adapted.equal_logits(1, 2), both, atol=0.01)


def test_an_adapter_that_fits_one_rank_only_is_refused(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The adapter's shapes must be those of the whole model."""
    loaded, divided = two_ranks.load(model_dir("llama"), enable_lora=True)
    store = adapter_store(config_of(enable_lora=True), loaded.bank, divided)
    assert store is not None
    modules = {"model.layers.0.self_attn.q_proj": (32, 16)}
    with pytest.raises(ModelError, match="32 inputs and 16 outputs, the model's has 32 and 32"):
        store.read(str(make_adapter(tmp_path / "a", modules)))


# ---- what cannot be divided ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
            "num_attention_heads is 3, which must be a multiple",
        ),
        ("llama", {"intermediate_size": 63}, "intermediate_size is 63, which must be a multiple"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 25},
            "moe_intermediate_size is 25, which must be a multiple",
        ),
        ("opt", {}, "OPTForCausalLM comes with no plan in transformers"),
        (
            "olmo2",
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "num_attention_heads is 3, which must be a multiple",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_in_one_line(
    family: str,
    changes: dict[str, Any],
    words: str,
    two_ranks: TwoRanks,
    tmp_path: Path,
) -> None:
    directory = make_model(tmp_path / "model", family, **changes)
    with pytest.raises(ModelError, match=words) as refusal:
        two_ranks.load(directory)
    assert "--tensor-parallel-size 2" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_modules_that_do_not_compute_the_same_divided_are_refused(
    model_dir: Callable[[str], Path],
) -> None:
    ranks = Ranks(0, 2)
    config = config_of(tensor_parallel_size=2)
    loaded = load_part(config, model_dir("granite"), ranks, lambda text: None)
    # As if the plan were wrong: nothing is added up.
    with ranks.apart(), pytest.raises(ModelError, match="gives other logits than whole"):
        loaded.check()


def test_a_plan_that_says_what_is_not_known_is_refused(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**GraniteConfig.base_model_tp_plan, "layers.*.mlp": "other"}
    monkeypatch.setattr(GraniteConfig, "base_model_tp_plan", plan)
    config = config_of(tensor_parallel_size=2)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp as other"):
        load_part(config, model_dir("granite"), Ranks(0, 2), lambda text: None)


def test_sizes_that_differ_from_layer_to_layer_are_looked_at_where_weights_are_cut() -> None:
    """A configuration has a list of them then, as Gemma 3n has."""
    text = SimpleNamespace(num_attention_heads=4, intermediate_size=[64, 128])
    module: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    divide_module._check_sizes(module, 2)
    with pytest.raises(ModelError, match="num_attention_heads is 4"):
        divide_module._check_sizes(module, 3)


def test_a_number_for_each_head_is_divided_like_the_heads() -> None:
    """Attention sinks are such numbers, where a plan names them."""
    module: Any = nn.Module()
    module.sinks = nn.Parameter(torch.arange(4.0), requires_grad=False)
    divide_module._divide("sinks", module, "colwise", Ranks(1, 2))
    assert module.sinks.tolist() == [2.0, 3.0]


# ---- parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*OURS, *ALIKE, "qwen3", "phi3"])
@pytest.mark.parametrize("size", [4, in_soak(2)])
def test_parts_together_are_the_whole(
    family: str, size: int, model_dir: Callable[[str], Path]
) -> None:
    directory = model_dir(family)
    config = load_config(directory, trust_remote_code=False)
    spec = decoder_spec(config)
    part = local_spec(spec, size)
    whole = StackedExperts(directory, config) if has_stacks(config) else Checkpoint(directory)
    sources = [SlicedTensors(whole, spec, rank, size) for rank in range(size)]
    for name, shape in tensor_shapes(part).items():
        if name in (HEAD, EMBEDDING):
            continue
        with contextlib.ExitStack() as reading:
            (stored,) = reading.enter_context(whole.read([name]))
            parts = [reading.enter_context(source.read([name]))[0] for source in sources]
            assert {tuple(tensor.shape) for tensor in parts} == {shape}
            assert _joined(name, parts, stored), name


def _joined(name: str, parts: list[Tensor], stored: Tensor) -> bool:
    """True if every number of the whole is in some part, and no other number is."""
    if parts[0].shape == stored.shape:
        return all(torch.equal(part, stored) for part in parts)
    found = torch.cat([part.flatten() for part in parts])
    return torch.equal(found.unique(), stored.unique())


def test_sums_in_order_are_those_of_the_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    ranks = Ranks(2, 4, in_order=True)
    monkeypatch.setattr(ranks, "gather", lambda part: parts)
    # 1e8 + 1 is 1e8 in float32, so that another order would give another sum.
    assert ranks.add_up(parts[2].clone()).tolist() == [1.0]


def test_the_division_is_the_one_that_transformers_plans() -> None:
    """Where the plan divides a weight of these families, we divide it along the same side."""
    for config in (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Gemma2Config):
        for path, style in config.base_model_tp_plan.items():
            leaf = path.rpartition(".")[2]
            expected = {"colwise": {"rows", "heads"}, "rowwise": {"columns"}}.get(style, {None})
            assert divided_by(leaf) in expected, (config, path)
