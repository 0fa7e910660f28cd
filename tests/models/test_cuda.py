"""Results on a CUDA device: they are those on cpu, whichever way they are computed there.

Skipped without a device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.attention_cases import CASES, Case, check_case
from models.drawer import Drawer, SampleRow
from models.driver import Driver, load, make_sequence
from models.mixed_requests import serve
from models.reference import OUTPUT_TOKENS, reference
from models.sampling_reference import KINDS, OUTPUT, PROMPT, sampling_request
from support.adapters import make_adapter
from support.drafters import Oracle, named
from torch import Tensor

from penstock_shard.attention.backend_order import READS_ANY_CACHE, candidates
from penstock_shard.attention.base import AttentionBackend, Unusable
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.models.cuda_graphs import GraphedModel
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.rope_tables import rope_tables
from penstock_shard.models.decoder.weights import read_weights
from penstock_shard.ops.base import Ops
from penstock_shard.ops.torch_ops import TorchOps
from penstock_shard.selfcheck.random_steps import Row, random_steps
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
CUDA = torch.device("cuda")
F32 = torch.float32
VOCABULARY = 384
PROMPTS = [[*range(5, 75)], [*range(200, 207)], [*range(90, 130)], [7]]

pytestmark = [
    pytest.mark.gpu,
    # What a library only says on a device is not what these are about.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_oss", "opt", "deepseek_v2", "deepseek_v3"]
)
def test_greedy_output_on_cuda_equals_generate(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    prompts = [list(range(5, 75)), list(range(200, 207)), list(range(90, 130))]
    runner = load(model_dir(family), device="cuda", dtype="float32", kv_blocks=None)
    sequences = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
    Driver(runner).generate(sequences)
    outputs = [sequence.token_ids[sequence.num_prompt_tokens :].tolist() for sequence in sequences]
    assert outputs == reference(model_dir(family), prompts)


def test_tokens_drawn_on_cuda_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).cuda() * 2
    kinds = list(KINDS.values())
    rows = [
        SampleRow(sampling_request(PROMPT, OUTPUT, **{**kinds[i % len(kinds)], "seed": i}), 6)
        for i in range(64)
    ]
    together = Drawer().sample(logits, rows)
    alone = [Drawer().sample(logits[i : i + 1], [rows[i]])[0] for i in range(64)]
    assert [result.token_id for result in together] == [result.token_id for result in alone]
    on_cpu = Drawer().sample(logits.cpu(), rows)
    same = sum(a.token_id == b.token_id for a, b in zip(together, on_cpu, strict=True))
    # The exponential may differ in its last bit.
    assert same >= 62


# ---- ways through a runner ---------------------------------------------------------------------


def on_device(directory: Path, **settings: object) -> ModelRunner:
    """Load a model on the device, with few rows and short contexts, so that few graphs are
    recorded.
    """
    limits = {"max_num_seqs": 8, "max_model_len": 128}
    return load(directory, **{"device": "cuda", **limits, **settings})


def greedy(runner: ModelRunner, drafter: Drafter | None = None) -> dict[str, list[int]]:
    """Outputs of the prompts by name, of an engine that decodes all of them together."""
    requests = [
        make_sequence(prompt, max_tokens=30, request_id=str(number)).request
        for number, prompt in enumerate(PROMPTS)
    ]
    said, _ = serve(runner, requests, num_blocks=runner.info.num_blocks, drafter=drafter)
    outputs: dict[str, Any] = {str(number): found[0] for number, found in enumerate(said)}
    assert all(len(output) == 30 for output in outputs.values())
    return outputs


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "deepseek_v3"])
def test_tokens_with_graphs_are_those_without(family: str, model_dir: Directory) -> None:
    graphed = on_device(model_dir(family))
    assert isinstance(graphed.model, GraphedModel)
    assert graphed.model.num_graphs > 0
    eager = on_device(model_dir(family), enforce_eager=True)
    assert not isinstance(eager.model, GraphedModel)
    assert greedy(graphed) == greedy(eager)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_with_drafts_are_those_without(family: str, model_dir: Directory) -> None:
    expected = greedy(on_device(model_dir(family)))
    drafter = Oracle(4, named(expected))
    assert greedy(on_device(model_dir(family)), drafter) == expected
    assert drafter.accepted_total > 0


def test_tokens_of_an_adapter_are_those_on_cpu(model_dir: Directory, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", size=1.0)
    found = {}
    for device in ("cpu", CUDA.type):
        runner = on_device(model_dir("llama"), device=device, enable_lora=True, max_loras=2)
        assert runner.adapters is not None
        runner.adapters.place(2, runner.adapters.read(str(path)))
        for index in (0, 2):
            sequences = [make_sequence(prompt) for prompt in PROMPTS]
            for sequence in sequences:
                sequence.adapter_index = index
            Driver(runner).generate(sequences)
            found[device, index] = [sequence.token_ids for sequence in sequences]
    assert found["cpu", 2] != found["cpu", 0]
    assert found[CUDA.type, 0] == found["cpu", 0]
    assert found[CUDA.type, 2] == found["cpu", 2]


@pytest.mark.usefixtures("whole_check")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_exact_bits_are_the_same_alone_and_in_a_batch(
    family: str, dtype: str, model_dir: Directory
) -> None:
    runner = on_device(model_dir(family), exact=True, dtype=dtype, enforce_eager=True)
    assert runner.info.batch_invariant
    kv_dtype = getattr(torch, runner.info.kv_dtype)
    with random_steps(runner.model, VOCABULARY, runner.info.block_size, 32, kv_dtype) as steps:
        watched = steps.sequence(60)
        others = [steps.sequence(length) for length in (1, 30, 17, 50)]
        alone = steps.run([(watched, 0, 60)])
        beside: list[Row] = [(other, 0, len(other.token_ids)) for other in others]
        # Its prompt between others, then one of its tokens computed as a decode.
        batch = steps.run([*beside[:2], (watched, 0, 59), *beside[2:]])
        assert torch.equal(batch[31 : 31 + 59], alone[:59])
        decode = steps.run([(watched, 59, 1), *beside[1:]])
        assert torch.equal(decode[:1], alone[59:])


# ---- backends and kernels ----------------------------------------------------------------------


def attention_backends(dtype: torch.dtype) -> dict[str, AttentionBackend]:
    """Return the backends that can be made here, and Triton's in its exact form."""
    made = {}
    for number, candidate in enumerate(candidates("auto", CUDA)):
        try:
            made[f"{candidate.name} {number}"] = candidate.make(CUDA, dtype)
        except Unusable as error:
            print(f"{candidate.name}: {error}")
    if importlib.util.find_spec("triton") is not None:
        # Imported here and not above, because it needs Triton.
        from penstock_shard.attention.triton import TritonBackend

        made["triton, exact"] = TritonBackend(exact=True)
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_backend_that_serves_a_layer_gives_attention_by_its_definition(case: Case) -> None:
    ran = []
    for name, backend in attention_backends(case.dtype).items():
        reads = case.cached_as == case.dtype or backend.name in READS_ANY_CACHE
        if not reads or backend.refusal(case.spec, case.dtype) is not None:
            continue
        print(name)
        check_case(backend, case, CUDA)
        ran.append(backend.name)
    assert "sdpa" in ran


def decoder(directory: Path, ops: Ops) -> Decoder:
    config = load_config(directory, trust_remote_code=False)
    spec = decoder_spec(config)
    ropes = rope_tables(config, spec, 128, CUDA)
    weights = read_weights(spec, Checkpoint(directory), ropes, ops, lambda line: None)
    return Decoder(spec, weights, ops)


def logits_of(model: Decoder) -> Tensor:
    """A prompt, its rest beside another prompt, and decodes of both."""
    with random_steps(model, VOCABULARY, 16, 12, F32) as steps:
        first, second = steps.sequence(70), steps.sequence(40)
        parts = [
            steps.run([(first, 0, 50)]),
            steps.run([(first, 50, 19), (second, 0, 39)]),
            steps.run([(first, 69, 1), (second, 39, 1)]),
        ]
        return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mixtral", "deepseek_v3"])
def test_logits_of_triton_ops_are_those_of_plain_torch(family: str, model_dir: Directory) -> None:
    pytest.importorskip("triton")
    from penstock_shard.attention.triton import TritonBackend
    from penstock_shard.ops.triton_ops import TritonOps

    plain = TorchOps(CUDA, F32, "float32", SdpaBackend())
    expected = logits_of(decoder(model_dir(family), plain))
    for exact in (False, True):
        ops = TritonOps(CUDA, F32, "float32", TritonBackend(exact=exact), exact=exact)
        found = logits_of(decoder(model_dir(family), ops))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
