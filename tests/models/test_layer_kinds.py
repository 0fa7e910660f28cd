"""Layers that see windows, chunks, latents or the keys of others, or have states: what they keep,
and where such models are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.driver import Driver, load, make_sequence
from models.tiny_families import generate, make_family
from safetensors.torch import load_file, save_file

from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.worker.model_runner import ModelRunner

Family = Callable[..., Path]


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return lambda model_type, **changes: make_family(tmp_path / model_type, model_type, **changes)


def kv_bytes(runner: ModelRunner) -> int:
    return runner.info.kv_bytes_per_token


def test_latents_take_a_fraction_of_the_keys_and_values_of_all_heads(family: Family) -> None:
    directory = family("deepseek_v3", num_attention_heads=16, num_key_value_heads=16)
    # In four layers: 32 numbers of a latent and 16 of a rotated key, in four bytes each. Keys of
    # 32 and values of 16 for each of 16 heads would be 16 times as many.
    assert kv_bytes(load(directory)) == 4 * (32 + 16) * 4


def test_layers_that_read_the_keys_of_others_keep_none(family: Family) -> None:
    info = load(family("gemma4_text")).info
    # Of four layers the last two read: one has keys of 16, the other of 32, for two heads.
    assert info.kv_bytes_per_token == 2 * 2 * (16 + 32) * 4
    assert info.cache_groups == (CacheGroup(window=8), CacheGroup(pool=1))


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_layers_of_a_type_need_not_alternate_with_those_of_another(
    family: Family, model_type: str
) -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    changes = {"activation_sparsity_pattern": [0.5] * 6} if model_type == "gemma3n_text" else {}
    directory = family(
        model_type, layer_types=types, num_hidden_layers=6, num_kv_shared_layers=3, **changes
    )
    assert {group.window for group in load(directory).info.cache_groups} == {8, None}


def test_a_long_sequence_takes_little_more_where_layers_see_windows(family: Family) -> None:
    def per_sequence(window: int) -> int:
        directory = family("mistral", sliding_window=window, max_position_embeddings=4096)
        runner = load(directory, max_num_batched_tokens=64, kv_blocks=256)
        return runner.info.kv_bytes_per_sequence

    of_windows, of_all = per_sequence(64), per_sequence(4096)
    assert of_windows * 4096 == of_all * (64 + 64 + 16)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "activation gelu_pytorch_tanh"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3, .*_key_heads 2"),
        ("lfm2", {"conv_L_cache": 17}, "convolutions of 17 inputs"),
    ],
)
def test_layers_with_states_that_our_decoder_does_not_compute_are_refused_in_a_line(
    family: Family, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=f"{model_type} is served by our decoder alone.*{reason}"):
        load(family(model_type, **changes))


def test_a_hybrid_has_a_state_for_each_sequence_that_may_run_and_some_to_keep(
    family: Family,
) -> None:
    directory = family("lfm2", max_position_embeddings=40_000)
    runner = load(directory, load_format="dummy", max_num_seqs=12, kv_blocks=None)
    states, blocks = runner.info.pools
    assert states >= 12 + 2
    assert blocks * 16 >= 40_000
    # And with a flag exactly so many blocks.
    directory = family("qwen3_next", max_position_embeddings=256)
    assert load(directory, kv_blocks=20, max_num_seqs=4).info.pools == (6, 20)


def test_what_a_hybrid_is_refused_for_names_the_flag(family: Family) -> None:
    directory = family("qwen3_next")
    for settings, line in (
        ({"speculative_tokens": 4}, "--speculative-tokens 4: layers of this model have states"),
        ({"state_spacing": 24}, "--state-spacing 24: .* must be a multiple of --block-size 16"),
        ({"kv_memory_bytes": 10_000}, "10000 bytes are too few for one sequence: its states take"),
    ):
        with pytest.raises(ModelError, match=line):
            load(directory, **{"kv_blocks": None, **settings})
    config = directory / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps(found | {"layer_types": ["linear_attention"] * 4}))
    with pytest.raises(ModelError, match=r"served by our decoder alone.*: no layer has keys"):
        load(directory)


def test_of_states_alone_as_many_fit_as_memory_has_and_blocks_name_their_tokens(
    family: Family,
) -> None:
    directory = family("mamba2")
    info = load(directory, kv_blocks=None, kv_memory_bytes=10**7, max_model_len=100).info
    states, blocks = info.pools
    assert states == info.num_states > info.kv_sequences > states // 4
    # Seven blocks name the tokens of the longest sequence: each takes a record of the host.
    assert info.kv_bytes_per_token == 512 // 16
    assert info.kv_bytes_per_sequence == info.state_bytes + 7 * 512
    assert 0.9 * 10**7 < states * info.state_bytes + blocks * 512 <= 10**7
    with pytest.raises(ModelError, match=r"but one sequence of 128 tokens needs 8; .*--kv-blocks"):
        load(directory, kv_blocks=7, max_model_len=128)
    with pytest.raises(ModelError, match=r"no room for .* lower --kv-blocks"):
        load(directory, kv_blocks=2**40, max_model_len=128)
    assert load(directory, kv_blocks=8, max_model_len=128).info.num_blocks == 8
    with pytest.raises(ModelError, match="too few for one sequence: its states take"):
        load(directory, kv_blocks=None, kv_memory_bytes=10**4, max_model_len=100)


@pytest.mark.parametrize(
    ("model_type", "changes", "line"),
    [
        ("mamba", {"hidden_act": "gelu"}, "short convolutions with gelu are not served, only"),
        ("mamba", {"conv_kernel": 17}, "a short convolution of 17 taps; at most 16"),
        ("mamba2", {"time_step_limit": [0.0]}, r"time_step_limit is \[0.0\]; it must be two"),
    ],
)
def test_a_mixer_that_is_not_served_is_one_line(
    family: Family, model_type: str, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ModelError, match=line) as caught:
        load(family(model_type, **changes), max_model_len=128)
    assert "\n" not in str(caught.value)


def test_silu_may_have_its_other_name(family: Family) -> None:
    load(family("mamba", hidden_act="swish"), max_model_len=128)


def test_weights_that_layers_share_are_packed_once(family: Family) -> None:
    types = ["linear_attention", "hybrid"] * 4
    directory = family("zamba2", num_hidden_layers=8, num_mem_blocks=1, layers_block_type=types)
    module = load(directory).model.module  # type: ignore[attr-defined]
    layers = [layer.shared_transformer for layer in module.model.layers[1::2]]
    assert len({id(layer.self_attn.o_proj.weight.matrix) for layer in layers}) == 1
    assert len({id(layer.feed_forward.down_proj.weight.matrix) for layer in layers}) == 1


def test_a_mixer_of_transformers_needs_each_tensor_of_its_state(family: Family) -> None:
    directory = family("bamba")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    (name, *_) = [name for name in tensors if name.endswith("A_log")]
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(name)) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_time_steps_are_bounded_as_configured_in_prompts_and_after_them(family: Family) -> None:
    bounded = family("mamba2", time_step_limit=[0.9, 1.0])
    expected = generate(bounded, [[5, 6, 7] * 9], 1).outputs
    driver = Driver(load(bounded, max_model_len=128))
    sequence = make_sequence([5, 6, 7] * 9, max_tokens=1)
    driver.generate([sequence], max_chunk=2)
    assert list(sequence.token_ids[27:]) == expected[0]


def test_chunks_that_our_decoder_does_not_compute_are_refused_with_its_reason(
    family: Family,
) -> None:
    directory = family("llama4_text", hidden_act="gelu")
    line = "llama4_text is served by our decoder alone, which does not .*: activation gelu"
    with pytest.raises(ModelError, match=line):
        load(directory)


def test_beyond_what_indexers_leave_whole_a_context_is_refused(family: Family) -> None:
    directory = family("deepseek_v32", index_topk=64, max_position_embeddings=512)
    assert load(directory).info.max_model_len == 64
    line = "--max-model-len 65: beyond 64 tokens the indexers of DeepseekV32ForCausalLM select keys"
    with pytest.raises(ModelError, match=line):
        load(directory, max_model_len=65)


def test_chunks_that_blocks_do_not_divide_are_refused(family: Family) -> None:
    directory = family("llama4_text", attention_chunk_size=48)
    with pytest.raises(ModelError, match="--block-size 32: the model attends within chunks of 48"):
        load(directory, block_size=32)
    assert load(directory, block_size=16).info.max_model_len == 512


def test_layers_that_differ_in_heads_that_do_not_fit_are_named(family: Family) -> None:
    directory = family("gemma4_unified")
    path = directory / "config.json"
    text = path.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 3')
    assert text != path.read_text()
    path.write_text(text)
    with pytest.raises(ModelError, match="num_attention_heads is 4; it must be a multiple of"):
        load_model_runner(ShardConfig(device="cpu"), directory, progress=lambda line: None)


def test_too_little_memory_for_one_sequence_is_one_line(family: Family) -> None:
    with pytest.raises(ModelError, match=r"lower --max-model-len to .* or raise --kv-blocks"):
        load(family("gemma4_text"), kv_blocks=4)
