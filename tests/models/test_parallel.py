"""Models divided over two ranks, each a process, over gloo: together they give what one does.

The other rank is one process for all tests here, as starting one takes seconds.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_maker import make_model
from support.budget import budget
from support.processes import wait_until
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock_shard import rank_main
from penstock_shard.config import ShardConfig
from penstock_shard.models.base import CausalModel, Forwarded
from penstock_shard.models.checkpoint import Checkpoint
from penstock_shard.models.cuda_graphs import GraphedModel
from penstock_shard.models.decoder_spec import decoder_spec, tensor_shapes
from penstock_shard.models.errors import ModelError
from penstock_shard.models.parallel import crew, mirrored, modules
from penstock_shard.models.parallel.crew import Crew
from penstock_shard.models.parallel.followers import Followers, await_ranks
from penstock_shard.models.parallel.messages import (
    REVISION,
    Failed,
    FromRank,
    Hello,
    Join,
    Line,
    Loaded,
    ToRank,
)
from penstock_shard.models.parallel.mirrored import MirroredModel, RankFailed
from penstock_shard.models.parallel.processes import RankPlace
from penstock_shard.models.parallel.ranks import MeetingPoint, Ranks
from penstock_shard.models.parallel.slices import (
    EMBEDDING,
    HEAD,
    SlicedTensors,
    divided_by,
    local_spec,
)
from penstock_shard.models.transformers_loader import load_config
from penstock_shard.runner.create import RankStack, load_stack
from penstock_shard.runner.invariance import first_variance
from penstock_shard.runner.trial import trial_steps

BLOCK, NUM_BLOCKS = 16, 32
# Of a logit, in standard deviations of all.
TOLERANCE = 1e-5
OURS = ["llama", "qwen2", "gemma2", "qwen3_moe", "mixtral"]
# Heads that are gathered; experts as transformers keeps them.
THEIRS = ["olmo2", "deepseek_v2"]
MORE = ["phi3", "granite", "cohere2", "gpt_neox", "starcoder2", "qwen2_moe", "olmoe"]


class TwoRanks:
    """This process and another, which load models together."""

    def __init__(self) -> None:
        self._meeting_point = MeetingPoint(2, alone=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports = [listener.getsockname()[1], self._meeting_point.port]
            script = Path(__file__).with_name("other_rank.py")
            command = [sys.executable, str(script), *map(str, ports)]
            self.process = subprocess.Popen(command)
            lines = await_ranks(listener, 2, {1: self.process}, lambda text: None)
        self.lost: list[str] = []
        self.followers = Followers(lines, on_lost=self.lost.append)
        self.ranks = self._meeting_point.join(torch.device("cpu"))

    def load(self, directory: Path, **settings: Any) -> tuple[RankStack, MirroredModel]:
        config = config_of(tensor_parallel_size=2, **settings)
        self.ranks.checks.clear()
        self.followers.tell(Join(config, str(directory), 0))
        try:
            stack = load_stack(config, directory, self.ranks, lambda text: None)
        except ModelError:
            with pytest.raises(ModelError):
                Crew(self.ranks, self.followers, self._meeting_point).whole(None, "", "")  # type: ignore[arg-type]
            raise
        met = Crew(self.ranks, self.followers, self._meeting_point)
        return stack, met.whole(stack.model, stack.ops.backend.name, "")


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


def cut_logits(model: CausalModel, vocab_size: int) -> Tensor:
    """Of two random sequences in chunks beside decodes, over shuffled blocks."""
    with trial_steps(model, vocab_size, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        long, short = steps.sequence(70), steps.sequence(33)
        parts = [
            steps.run([(long, 0, 40), (short, 0, 7)]),
            steps.run([(long, 40, 1), (short, 7, 20)]),
            steps.run([(short, 27, 1), (long, 41, 29)]),
            steps.run([(short, 28, 5)]),
        ]
    return torch.cat(parts)


def greedy(model: CausalModel, vocab_size: int, count: int = 24) -> list[int]:
    """Tokens after a random prompt, each the best."""
    with trial_steps(model, vocab_size, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        sequence = steps.sequence(20 + count)
        logits = steps.run([(sequence, 0, 20)], [19])
        for position in range(20, 20 + count):
            sequence.token_ids[position] = int(logits[0].argmax())
            logits = steps.run([(sequence, position, 1)])
        return sequence.token_ids[20:]


def check_equal(two_ranks: TwoRanks, directory: Path, **settings: Any) -> None:
    whole = load_stack(config_of(**settings), directory, None, lambda text: None).model
    _, divided = two_ranks.load(directory, **settings)
    vocab_size = len(whole_logits := cut_logits(whole, 300)[0])
    expected, found = cut_logits(whole, vocab_size), cut_logits(divided, vocab_size)
    assert len(whole_logits) == found.shape[1]
    error = float(((found - expected) / expected.std()).abs().max())
    assert error < TOLERANCE, error
    assert greedy(divided, vocab_size) == greedy(whole, vocab_size)


@pytest.mark.parametrize("family", [*OURS, *THEIRS, *(MORE if budget(0, 1) else [])])
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
    stack, _ = two_ranks.load(directory)
    assert [layer.num_kv_heads for layer in stack.model.layers] == [1, 1, 1]


def test_parts_are_packed_as_the_whole_is(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    """In float16, where sums of halves are rounded otherwise than those of the whole."""
    for family in ("llama", "olmo2"):
        settings = {"dtype": "float16"}
        whole = load_stack(config_of(**settings), model_dir(family), None, lambda text: None).model
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
    whole = load_stack(config_of(), model_dir("llama"), None, lambda text: None).model
    _, divided = two_ranks.load(model_dir("llama"))
    expected, found = (_hidden(model) for model in (whole, divided))
    assert torch.allclose(found, expected, atol=1e-4)


def _hidden(model: CausalModel) -> Tensor:
    """Of two tokens of a sequence of 40."""
    recorder = WithHidden(model)
    with trial_steps(recorder, 384, BLOCK, NUM_BLOCKS, torch.float32) as steps:
        steps.run([(steps.sequence(40), 0, 40)])
    return recorder.hidden


class WithHidden:
    """A model that is always asked for hidden states too, and keeps them."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any, **more: Any) -> Forwarded:
        forward: Any = self._model.forward
        forwarded: Forwarded = forward(*inputs, hidden_rows=torch.tensor([3, 30]), **more)
        self.hidden = forwarded.hidden.clone()
        return forwarded


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_with_kernels_of_fixed_bits_sums_over_ranks_have_fixed_bits(
    family: str, two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    stack, divided = two_ranks.load(model_dir(family))
    if stack.ops.backend.name != "cpu":
        pytest.skip("no cpu kernels here")
    assert two_ranks.ranks.in_order
    found = first_variance(
        divided, 384, 256, BLOCK, torch.float32, stack.ops.set_threads, threads=1
    )
    assert found is None


def test_the_least_memory_of_all_ranks_counts(
    two_ranks: TwoRanks, model_dir: Callable[[str], Path]
) -> None:
    _, divided = two_ranks.load(model_dir("llama"))
    # On one machine's memory each takes as much.
    assert divided.least_free(1000, 0.9) == 500


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
    load_stack(config_of(tensor_parallel_size=2), model_dir("granite"), ranks, lambda text: None)
    # As if the plan were wrong: nothing is added up.
    with ranks.apart(), pytest.raises(ModelError, match="gives other logits than whole"):
        ranks.check()


def test_a_plan_that_says_what_is_not_known_is_refused(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**GraniteConfig.base_model_tp_plan, "layers.*.mlp": "other"}
    monkeypatch.setattr(GraniteConfig, "base_model_tp_plan", plan)
    config = config_of(tensor_parallel_size=2)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp as other"):
        load_stack(config, model_dir("granite"), Ranks(0, 2), lambda text: None)


def test_sizes_that_differ_from_layer_to_layer_are_looked_at_where_weights_are_cut() -> None:
    """A configuration has a list of them then, as Gemma 3n has."""
    text = SimpleNamespace(num_attention_heads=4, intermediate_size=[64, 128])
    module: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    modules._check_sizes(module, 2)
    with pytest.raises(ModelError, match="num_attention_heads is 4"):
        modules._check_sizes(module, 3)


def test_a_number_for_each_head_is_divided_like_the_heads() -> None:
    """As attention sinks are, where a plan names them."""
    module: Any = nn.Module()
    module.sinks = nn.Parameter(torch.arange(4.0), requires_grad=False)
    modules._divide("sinks", module, "colwise", Ranks(1, 2))
    assert module.sinks.tolist() == [2.0, 3.0]


# ---- ranks that end ----------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["without a word", "with a reason"])
def test_the_end_of_a_rank_is_noticed_unless_it_has_said_why(fails: bool) -> None:
    ours, theirs = _connected()
    other: Line[ToRank] = Line(theirs, ToRank)
    hello = Hello(REVISION, 1, 2, 4711, "there")
    lost: list[str] = []
    followers = Followers({1: (hello, Line(ours, FromRank))}, on_lost=lost.append)
    if fails:
        other.send(Failed("does not fit"))
    other.close()
    if fails:
        with pytest.raises(ModelError, match="rank 1: does not fit"):
            followers.answers(Loaded)
        assert not lost
    else:
        wait_until(lambda: bool(lost), timeout_s=10, what="noticed")
        assert lost == ["rank 1 (process 4711 on there) ended; without it nothing can be computed"]


def test_rank_0_does_not_wait_for_one_that_cannot_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on another machine that has too few devices, or not the model."""
    ours, theirs = _connected()
    line: Line[FromRank] = Line(ours, FromRank)
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), line)}
    monkeypatch.setattr(crew, "await_ranks", lambda *_: lines)
    monkeypatch.setattr(crew, "start_rank", lambda *_: None)
    other: Line[ToRank] = Line(theirs, ToRank)
    other.send(Failed("torch finds 1 CUDA devices here"))
    with pytest.raises(ModelError, match="rank 1: torch finds 1 CUDA devices here"):
        crew.gather_crew(
            config_of(tensor_parallel_size=2), tmp_path, torch.device("cpu"), lambda text: None
        )
    other.close()


def test_a_rank_that_fails_in_a_step_does_not_look_as_if_it_could_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody asks for its answer then, so that only its end is noticed."""
    ours, theirs = _connected()

    def fail(*_: object) -> None:
        raise RankFailed("rank 0 asks for what is not known here")

    monkeypatch.setattr(rank_main, "_load", lambda *_: (SimpleNamespace(served=0, model=0), 0))
    monkeypatch.setattr(mirrored, "follow", fail)
    line: Line[ToRank] = Line(theirs, ToRank)
    join = Join(config_of(tensor_parallel_size=2), str(tmp_path), 0)
    with pytest.raises(RankFailed):
        rank_main._serve(line, queue.SimpleQueue(), join, RankPlace(1, 2, 1, 2), "127.0.0.1")
    line.close()
    heard: Line[FromRank] = Line(ours, FromRank)
    assert heard.receive() is None
    heard.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RankFailed("rank 0 asks for what is not known here"), "rank 0 asks for what"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), "--max-num-batched-tokens"),
        (AssertionError("a defect"), None),
    ],
)
def test_a_rank_that_cannot_go_on_says_why_and_shows_its_stack_only_for_a_defect(
    error: Exception,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank_main, "_load", lambda *_: (SimpleNamespace(served=0, model=0), 0))
    monkeypatch.setattr(mirrored, "follow", fail)
    join = Join(config_of(tensor_parallel_size=2), str(tmp_path), 0)
    line: Any = SimpleNamespace(send=None)
    args = (line, queue.SimpleQueue[ToRank](), join, RankPlace(1, 2, 1, 2), "127.0.0.1")
    if words is None:
        with pytest.raises(AssertionError):
            rank_main._serve_or_say(*args)
    else:
        assert rank_main._serve_or_say(*args) == 1
    (record,) = caplog.records
    assert record.levelname == "CRITICAL"
    assert record.getMessage().startswith("rank 1 cannot go on")
    assert (words or "") in record.getMessage()
    assert (record.exc_info is None) is (words is not None)


def test_memory_that_ends_while_graphs_are_recorded_ends_the_engine() -> None:
    """The others wait for this rank in the middle of it: there is no going on without graphs."""
    ours, theirs = _connected()
    line: Line[FromRank] = Line(ours, FromRank)
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), line)}
    model = MirroredModel(WithoutMemory(), Ranks(0, 2), Followers(lines, on_lost=lambda _: None))
    with pytest.raises(RankFailed, match="--enforce-eager"):
        model.capture([], BLOCK, 0)
    theirs.close()


class WithoutMemory(GraphedModel):
    """A model whose graphs cannot be recorded."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def capture(self, *_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


# ---- parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*OURS, "qwen3", "phi3"])
@pytest.mark.parametrize("size", [4, *([2] if budget(0, 1) else [])])
def test_parts_together_are_the_whole(
    family: str, size: int, model_dir: Callable[[str], Path]
) -> None:
    spec = decoder_spec(load_config(model_dir(family), trust_remote_code=False))
    part = local_spec(spec, size)
    whole = Checkpoint(model_dir(family))
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
    """Whether every number of the whole is in some part, and none besides."""
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
    """Where its plan divides a weight of these families, so do we, along the same side."""
    for config in (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Gemma2Config):
        for path, style in config.base_model_tp_plan.items():
            leaf = path.rpartition(".")[2]
            expected = {"colwise": {"rows", "heads"}, "rowwise": {"columns"}}.get(style, {None})
            assert divided_by(leaf) in expected, (config, path)
