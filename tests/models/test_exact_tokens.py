"""A request gives the same tokens and log-probabilities, bit for bit, whatever runs beside it.

Not only nearly: a request that is taken up elsewhere goes on as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from model_maker import make_model, write_tokenizer
from models.driver import load
from models.gguf_maker import make_gguf
from models.runners import make_runner
from models.tiny_families import make_family
from safetensors.torch import load_file, save_file
from support.budget import budget, in_soak, seeded
from support.engines import packed

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling, RequestOutput
from penstock_shard.checkpoint.gguf_files import unfold
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.models.cuda_graphs import GraphedModel
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import SequenceState
from penstock_shard.worker.base import Runner

_STOP = frozenset({1})
_VOCABULARY = 1536
# Of tiny families, widths that torch computes alike to the last element, as those of real models.
_WIDTHS = {
    "gemma4_text": {"hidden_size_per_layer_input": 32},
    "falcon_h1": {},
    "jamba": {},
    "mamba2": {},
    "qwen3_next": {},
}
_RECORDED = {"llama", "gguf"}
# Types of a file's matrices that are not Q4_0.
_MIXED = {"attn_v": "Q8_0", "attn_k": "F16", "ffn_down": "Q4_1", "output": "Q8_0"}


@dataclass(frozen=True)
class _Asked:
    """A request before it is made: each run needs a fresh one."""

    prompt: tuple[int, ...]
    sampling: EngineSampling
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int | None

    def request(self, name: str) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            attempt=0,
            prompt=packed(self.prompt),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_token_ids=_STOP,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass
class _Answer:
    prompt: list[float]
    token_ids: list[int]
    chosen: list[float]
    top_ids: list[int]
    top: list[float]

    def take(self, output: RequestOutput) -> None:
        assert output.error is None
        self.token_ids += output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt += output.prompt_logprobs.chosen
        if output.logprobs is not None:
            self.chosen += output.logprobs.chosen
            self.top_ids += output.logprobs.top_token_ids
            self.top += output.logprobs.top_logprobs


def _random_sampling(rng: random.Random, vocabulary: int) -> EngineSampling:
    def maybe(value: object, neutral: object) -> object:
        return value if rng.random() < 0.35 else neutral

    some = tuple(rng.sample(range(vocabulary), 40))
    values = {
        "temperature": rng.choice((0.0, 0.3, 1.0, 1.7)),
        "top_k": maybe(rng.choice((1, 5, 70)), 0),
        "top_p": maybe(rng.uniform(0.2, 0.99), 1.0),
        "min_p": maybe(rng.uniform(0.01, 0.3), 0.0),
        "typical_p": maybe(rng.uniform(0.2, 0.95), 1.0),
        "repetition_penalty": maybe(rng.uniform(0.8, 1.5), 1.0),
        "presence_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "frequency_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "penalty_window_tokens": maybe(rng.choice((1, 6, 30)), None),
        "logit_bias": maybe(tuple((i, rng.uniform(-3, 3)) for i in some[:5]), ()),
        "bad_words": maybe(((some[5],), (some[6], some[7])), ()),
        "allowed_token_ids": maybe(some, ()),
        "seed": rng.randrange(2**64),
    }
    return EngineSampling(**values)  # type: ignore[arg-type]


def _random_requests(rng: random.Random, count: int, vocabulary: int) -> list[_Asked]:
    shared = [rng.randrange(3, vocabulary) for _ in range(64)]
    asked = []
    for _ in range(count):
        start = shared[: rng.choice((0, 0, 16, 40, 64))]
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, budget(30, 50)))]
        max_tokens = rng.randint(1, budget(16, 24))
        asked.append(
            _Asked(
                (*start, *own),
                _random_sampling(rng, vocabulary),
                max_tokens,
                rng.randint(0, max_tokens),
                rng.choice((0, 3)),
                rng.choice((None, None, 2)),
            )
        )
    return asked


def _serve(
    runner: Runner,
    asked: Sequence[_Asked],
    *,
    chunk: int,
    at_once: int,
    prefix_caching: bool = False,
    put_downs: random.Random | None = None,
) -> list[_Answer]:
    """Serve all, at most `at_once` together; with `put_downs`, each is put down up to 3 times."""
    info = runner.info
    most = max(chunk, at_once)
    blocks = BlockManager.of(info, most, enable_prefix_caching=prefix_caching)
    limits = SchedulerLimits(at_once, most, chunk, max_scored_tokens=16)
    scheduler = create_scheduler(limits, blocks)
    engine = Engine(runner, scheduler, blocks)
    answers = [_Answer([], [], [], [], []) for _ in asked]
    for number, item in enumerate(asked):
        engine.submit(item.request(str(number)))
    sequences = scheduler.sequences
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)].take(output)
        if put_downs is not None:
            running = [
                sequence
                for sequence in sequences
                if sequence.state is SequenceState.RUNNING and sequence.preemptions < 3
            ]
            if running and put_downs.random() < 0.5:
                scheduler._preempt(put_downs.choice(running), "a reason")
    # Of a few that are short it may be that hardly any is.
    if put_downs is not None and len(asked) >= 20:
        assert sum(sequence.preemptions for sequence in sequences) > len(sequences) // 4
    return answers


def _tie_logits(directory: Path, target: Path) -> Path:
    """The model with pairs of ids whose logits are always equal."""
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(target / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if name in weights and (name == "lm_head.weight" or "lm_head.weight" not in weights):
            head = weights[name].clone()
            head[1::2] = head[0::2][: len(head[1::2])]
            weights[name] = head
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _make(family: str, tmp_path: Path) -> Path:
    """A model with more tokens than the sampler looks at first."""
    target = tmp_path / "model"
    if family == "gguf":
        plain = make_model(target, "llama", vocab_size=_VOCABULARY)
        write_tokenizer(plain)
        return unfold(make_gguf(plain, tmp_path / "model.gguf", "Q4_0", kinds=_MIXED))
    if family in _WIDTHS:
        directory = make_family(target, family, vocab_size=_VOCABULARY, **_WIDTHS[family])
    else:
        directory = make_model(target, family, vocab_size=_VOCABULARY)
    return _tie_logits(directory, tmp_path / "tied")


@pytest.mark.usefixtures("whole_check")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        in_soak("llama", {"kv_cache_dtype": "float16", "threads": 2}),
        in_soak("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        in_soak("llama", {"dtype": "bfloat16"}),
        # Codes of three kinds, some with minimums, and halves, within one product too.
        ("gguf", {"dtype": "auto"}),
        in_soak("gemma2", {}),
        in_soak("gpt2", {}),
        # Latents, and experts in groups; chunks.
        ("deepseek_v3", {}),
        in_soak("llama4", {}),
        # Keys of two sizes, in pools of their own; and some that other layers read.
        ("gemma4", {}),
        # Experts, and states in three of four layers; states alone.
        ("qwen3_next", {"state_spacing": 32}),
        in_soak("mamba2", {"state_spacing": 32, "max_model_len": 512}),
        in_soak("gemma4_text", {}),
        in_soak("falcon_h1", {"state_spacing": 32}),
        in_soak("jamba", {"state_spacing": 32}),
    ],
)
def test_tokens_and_logprobs_do_not_depend_on_what_else_runs(
    family: str,
    settings: dict[str, object],
    tmp_path: Path,
) -> None:
    rng = seeded("exact tokens")
    directory = _make(family, tmp_path)
    loaded = load(directory, kv_blocks=1024, enforce_eager=False, **settings)
    assert loaded.info.batch_invariant
    # Steps of few rows are recorded and replayed, where they can be.
    graphs = loaded.model if isinstance(loaded.model, GraphedModel) else None
    graphs = graphs if graphs is not None and graphs.num_graphs else None
    assert (graphs is not None) == (family in _RECORDED)
    # Prompt log-probabilities in passes of a few tokens, as at the size of real vocabularies.
    runner = make_runner(loaded.model, loaded.info, graphs=graphs)
    ahead = make_runner(
        loaded.model, dataclasses.replace(loaded.info, max_steps_ahead=1), graphs=graphs
    )
    asked = _random_requests(rng, budget(3, 500 if family == "llama" else 100), _VOCABULARY)
    alone = [_serve(runner, [item], chunk=512, at_once=1)[0] for item in asked]
    torch.manual_seed(rng.randrange(2**32))
    for chunk, at_once in ((1, 2), (16, 7), (512, 64)):
        together = _serve(runner, asked, chunk=chunk, at_once=at_once)
        assert together == alone, f"chunks of {chunk}, {at_once} at once"
    shuffled = rng.sample(range(len(asked)), len(asked))
    hits = _serve(ahead, [asked[i] for i in shuffled], chunk=64, at_once=16, prefix_caching=True)
    assert hits == [alone[i] for i in shuffled], "with prefix hits"
    put_down = _serve(
        ahead, asked, chunk=16, at_once=16, prefix_caching=rng.random() < 0.5, put_downs=rng
    )
    assert put_down == alone, "after being put down"
