"""Models that would be served wrongly are refused by name, before they serve anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_maker import make_config, make_model
from models.driver import load
from models.tiny_families import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.errors import ModelError
from penstock_shard.models.transformers import unsupported
from penstock_shard.models.transformers.transformers_model import ATTENTION_NAME, TransformersModel
from penstock_shard.ops.torch_ops import TorchOps


def plain_ops() -> TorchOps:
    return TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "FalconForCausalLM does not let its attention be replaced"),
        ("bloom", "BloomForCausalLM does not let its attention be replaced"),
    ],
)
def test_families_that_would_be_silently_wrong_are_refused(
    family: str, reason: str, model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load(model_dir(family))
    assert "\n" not in str(caught.value)


def test_layer_types_that_are_not_attention_are_refused() -> None:
    config = make_config("qwen3")
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="layers of type linear_attention"):
        unsupported.check_config(config, 128)


_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("aya_vision", "AyaVisionForConditionalGeneration", "of images and text of a type"),
        ("vit", "ViTForImageClassification", "no class that generates text"),
    ],
)
def test_models_of_images_whose_text_is_not_served_are_refused_in_a_line_that_says_what_to_serve(
    model_type: str, architecture: str, reason: str, tmp_path: Path
) -> None:
    small = _SMALL | ({"model_type": "llama"} if model_type == "aya_vision" else {})
    text = {} if model_type == "vit" else {"text_config": small}
    config = {"model_type": model_type, "architectures": [architecture], **text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"^{architecture} .*{reason}.*; serve a ") as caught:
        load(tmp_path, load_format="dummy", max_model_len=64)
    assert "\n" not in str(caught.value)


_ENCODER = "is an encoder, whose tokens see those after them"
_SCORES = "gives scores or classes of texts"
_HALVES = "is an encoder-decoder, or half of one"


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("bert", "BertModel", _ENCODER),
        ("bert", "BertForMaskedLM", _ENCODER),
        ("bert", "BertForSequenceClassification", _SCORES),
        ("roberta", "RobertaModel", _ENCODER),
        ("xlm-roberta", "XLMRobertaModel", _ENCODER),
        ("xlm-roberta", "XLMRobertaForSequenceClassification", _SCORES),
        ("modernbert", "ModernBertModel", _ENCODER),
        ("distilbert", "DistilBertModel", _ENCODER),
        ("mpnet", "MPNetModel", _ENCODER),
        ("nomic_bert", "NomicBertModel", _ENCODER),
        ("deberta-v2", "DebertaV2ForSequenceClassification", _SCORES),
        ("t5", "T5EncoderModel", _HALVES),
        ("t5", "T5ForConditionalGeneration", _HALVES),
        ("clip_text_model", "CLIPTextModel", "has no class that generates text"),
        ("siglip", "SiglipModel", "has no class that generates text"),
        ("qwen3", "Qwen3ForSequenceClassification", _SCORES),
        ("llama", "LlamaForTokenClassification", _SCORES),
        ("qwen2", "Qwen2ForRewardModel", _SCORES),
        ("llama", "LlamaBidirectionalModel", _ENCODER),
        ("xlnet", "XLNetModel", _ENCODER),
        ("gemma3_text", "Gemma3TextModel", _ENCODER),
        ("qwen2", "Qwen2Model", _ENCODER),
    ],
)
def test_models_that_are_no_decoders_are_refused_by_what_they_are(
    model_type: str, architecture: str, reason: str, tmp_path: Path
) -> None:
    changes: dict[str, dict[str, object]] = {
        # That their attention was changed.
        "gemma3_text": {"use_bidirectional_attention": True},
        "qwen2": {"is_causal": False},
        "xlnet": {"d_head": 16},
    }
    config = {"model_type": model_type, "architectures": [architecture], **_SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config | changes.get(model_type, {})))
    # More positions than any has: what it is comes first.
    flags = {"load_format": "dummy", "embeddings": "last", "max_model_len": 100_000}
    with pytest.raises(ModelError) as caught:
        load(tmp_path, **flags)
    line = str(caught.value)
    assert line.startswith(f"{architecture} ({model_type}) {reason}")
    assert line.endswith(
        ", and is not served; serve a decoder, which generates text, and vectors with "
        "--embeddings last or mean"
    )


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_a_decoder_saved_without_its_head_is_a_decoder(architecture: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": [architecture], **_SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = load(tmp_path, load_format="dummy", embeddings="last", max_model_len=64)
    assert "embed" in runner.info.capabilities


def test_layers_that_differ_in_what_no_attention_call_shows_are_refused() -> None:
    config = tiny_config("llama", per_layer_config={1: {"intermediate_size": 64}})
    with pytest.raises(
        ModelError, match="has layers that differ in intermediate_size, which is not served; "
    ):
        unsupported.check_config(config, 128)


def test_rope_that_depends_on_the_batch_is_refused_past_its_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = make_config("llama", rope_parameters=rope, max_position_embeddings=256)
    unsupported.check_config(config, 256)
    config.max_position_embeddings = 512
    config.rope_parameters["original_max_position_embeddings"] = 256
    with pytest.raises(ModelError, match="use --max-model-len 256"):
        unsupported.check_config(config, 512)


def test_heads_that_cannot_be_turned_or_shared_are_refused() -> None:
    config = make_config("qwen3")
    config.head_dim = 15
    with pytest.raises(ModelError, match="head_dim is 15"):
        unsupported.check_config(config, 128)
    config = make_config("qwen3")
    config.num_key_value_heads = 3
    with pytest.raises(ModelError, match=r"num_attention_heads is 4; .* num_key_value_heads, 3"):
        unsupported.check_config(config, 128)


def test_a_lost_sliding_window_is_refused(model_dir: Callable[[str], Path]) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir("mistral"))
    module.set_attn_implementation(ATTENTION_NAME)
    specs = TransformersModel(module, plain_ops()).layers
    unsupported.check_layers(module, specs, 256)
    lost = [dataclasses.replace(spec, window=None) for spec in specs]
    with pytest.raises(ModelError, match="does not get the sliding window"):
        unsupported.check_layers(module, lost, 256)
    # A context within the window never needs it.
    unsupported.check_layers(module, lost, 24)


def test_a_lost_softcap_is_refused(model_dir: Callable[[str], Path]) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir("gemma2"))
    module.set_attn_implementation(ATTENTION_NAME)
    specs = TransformersModel(module, plain_ops()).layers
    unsupported.check_layers(module, specs, 256)
    lost = [dataclasses.replace(spec, softcap=None) for spec in specs]
    with pytest.raises(ModelError, match="do not get the softcap"):
        unsupported.check_layers(module, lost, 256)


def test_a_layer_that_does_not_attend_is_refused(model_dir: Callable[[str], Path]) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir("llama"))
    module.set_attn_implementation(ATTENTION_NAME)
    specs = TransformersModel(module, plain_ops()).layers
    with pytest.raises(ModelError, match="2 attention calls for 3 layers"):
        unsupported.check_layers(module, specs[:2], 256)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        ("scale", "float32"),
        ("order", "float32"),
        ("window", "float32"),
        ("nan", "float32"),
        ("order", "bfloat16"),
        ("zero", "bfloat16"),
    ],
)
def test_the_self_check_finds_wrong_attention(
    fault: str, dtype: str, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = SdpaBackend.attend

    def wrong(self: SdpaBackend, *args: object, **options: object) -> Tensor:
        if fault == "scale":
            options["scale"] = 0.1
        if fault == "window":
            options["window"] = 30
        output: Tensor = good(self, *args, **options)  # type: ignore[arg-type]
        if fault == "order":
            output = output.roll(1, dims=0)
        if fault == "zero":
            output = torch.zeros_like(output)
        if fault == "nan":
            output[3] = float("nan")
        return output

    monkeypatch.setattr(SdpaBackend, "attend", wrong)
    with pytest.raises(ModelError, match="OPTForCausalLM: self-check failed"):
        load(model_dir("opt"), dtype=dtype, attention_backend="sdpa")


def test_an_unknown_architecture_is_refused_in_one_line(tmp_path: Path) -> None:
    config = {"model_type": "perceptron", "architectures": ["PerceptronForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="perceptron") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_with_its_own_code_names_the_flag(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_model(tmp_path, "llama")
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


def test_truncated_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load the weights") as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["intermediate_size"] = 128
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot load the weights") as caught:
        load(directory)
    assert "\n" not in str(caught.value)
