"""Configurations as well-known models on the hub have them: each goes to our decoder.

Shapes are those of the models; where a model is made, it is made small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_maker import make_model
from models.driver import load
from models.model_steps import relative_errors
from safetensors.torch import load_file, save_file

from penstock_shard.checkpoint.text_config import text_config
from penstock_shard.errors import ModelError
from penstock_shard.images.families import axis_of_frequencies
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.rope_tables import rope_tables
from penstock_shard.models.decoder.self_attention import HeadAttention
from penstock_shard.models.decoder.spec import NO_ROTATION, DecoderSpec, NotOurs
from penstock_shard.models.transformers import unsupported
from penstock_shard.ops.base import RoutingRule

_LLAMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
}
_QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_VL_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "rope_theta": 5000000,
    "use_cache": True,
    "vocab_size": 151936,
}
_GEMMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "num_hidden_layers": 26,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "vocab_size": 49152,
    },
    "Llama-3.2-1B": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Qwen2.5-0.5B": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "transformers_version": "4.40.1",
        "use_mrope": False,
    },
    "Qwen3-0.6B": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    },
    "Phi-3-mini-4k": {
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2",
        "use_cache": True,
        "vocab_size": 32064,
    },
    "Mistral-7B-v0.1": {
        **_MISTRAL,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.3": {
        **_MISTRAL,
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "gemma-2-2b": {
        **_GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b": {
        **_GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
# What makes such a model small without another way through the code.
# Models of images and text, with little of what they say of their towers.
COMPOSITES: dict[str, dict[str, Any]] = {
    "Qwen3-VL-4B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            **_QWEN3_VL_TEXT,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
        "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_vl"},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    },
    "Qwen3-VL-30B-A3B": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **_QWEN3_VL_TEXT,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl_moe"},
    },
    "Qwen2.5-VL-7B": {
        **_QWEN,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "eos_token_id": 151645,
        "hidden_size": 3584,
        "image_token_id": 151655,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "transformers_version": "4.41.2",
        "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
        "vocab_size": 152064,
    },
    "Mistral-Small-3.1-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        "vision_feature_layer": -1,
    },
    "Ministral-3-8B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        "vision_feature_layer": -1,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "LLaVA-1.5-7B": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 576,
        "image_token_index": 32000,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "SmolVLM-256M": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": 49190,
        "model_type": "idefics3",
        "pad_token_id": 128002,
        "scale_factor": 4,
        "text_config": {
            **_LLAMA,
            "_flash_attn_2_enabled": True,
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "neftune_noise_alpha": 0.0,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            # Of what sees images, and was not used.
            "perceiver_config": {"model_type": "vllama3", "qk_layer_norms_perceiver": False},
            "pixel_shuffle_factor": 4,
            "qk_layer_norms": False,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "use_resampler": False,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 768, "image_size": 512, "model_type": "idefics3"},
        "vocab_size": 49280,
    },
    "GLM-4.1V-9B": {
        "architectures": ["Glm4vForConditionalGeneration"],
        "image_token_id": 151343,
        "model_type": "glm4v",
        "text_config": {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338, 151348],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 13696,
            "max_position_embeddings": 65536,
            "model_type": "glm4v_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 151552,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 24, "hidden_size": 1536, "model_type": "glm4v"},
    },
    "Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    },
}
# Mixtures of experts whose attention is of another kind, or whose routers are.
MIXTURES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "Llama-4-Scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            "_attn_implementation_autoset": True,
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attention_dropout": 0.0,
            "bos_token_id": 200000,
            "eos_token_id": [200001, 200007, 200008],
            "for_llm_compression": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "output_router_logits": False,
            "pad_token_id": 200018,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_qk_norm": True,
            "vocab_size": 202048,
        },
    },
}
_SMALL = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_each_goes_to_our_decoder(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    read = load_config(write(tmp_path, config), trust_remote_code=False)
    unsupported.check_config(read, config["max_position_embeddings"])
    spec = decoder_spec(read)
    assert len(spec.layers) == config["num_hidden_layers"]
    assert spec.layers[0].num_kv_heads == config["num_key_value_heads"]
    windows = [layer.window for layer in spec.layers[:6]]
    expected: dict[str, list[int | None]] = {
        "Phi-3-mini-4k": [2047] * 6,
        "Mistral-7B-v0.1": [4096] * 6,
        "gemma-2-2b": [4096, None] * 3,
        "gemma-3-1b": [512] * 5 + [None],
    }
    assert windows == expected.get(name, [None] * 6)
    assert spec.tied == (not name.startswith(("Phi", "Mistral")))


@pytest.mark.parametrize("name", COMPOSITES)
def test_the_text_of_models_of_images_goes_to_our_decoder_too(name: str, tmp_path: Path) -> None:
    config = COMPOSITES[name]
    text = config.get("text_config", config)
    read = load_config(write(tmp_path, config), trust_remote_code=False)
    unsupported.check_config(read, 128000)
    spec = decoder_spec(text_config(read, has_head=name != "gemma-3-4b"))
    assert len(spec.layers) == text["num_hidden_layers"]
    assert spec.tied == (name == "gemma-3-4b")
    assert {layer.window for layer in spec.layers} == ({1024, None} if spec.tied else {None})
    assert spec.qkv_bias == name.startswith(("Qwen2.5", "GLM"))
    if spec.experts is not None:
        assert (spec.experts.num_experts, spec.experts.rule.is_normalised) == (128, True)


def test_mixtures_with_latents_chunks_or_other_routers_go_to_our_decoder(tmp_path: Path) -> None:
    def spec_of(name: str) -> DecoderSpec:
        read = load_config(write(tmp_path, MIXTURES[name]), trust_remote_code=False)
        unsupported.check_config(read, 8192)
        return decoder_spec(text_config(read, has_head=True))

    deepseek, glm, llama = map(spec_of, MIXTURES)
    first = deepseek.layers[0]
    assert (first.head_dim, first.head_dim_v, first.num_kv_heads) == (576, 512, 1)
    # 192 ** -0.5, times the square of 0.1 * log(40) + 1.
    assert first.scale == pytest.approx(0.135234, rel=1e-4)
    assert deepseek.experts is not None
    assert deepseek.experts.layers == set(range(3, 61))
    assert deepseek.experts.rule == RoutingRule(8, "sigmoid", True, 2.5, groups=8, top_groups=4)
    assert (deepseek.experts.shared_size, deepseek.unread[-1]) == (2048, "model.layers.61.")
    assert glm.experts is not None
    assert (glm.head_norms, glm.qkv_bias, glm.output_bias) == (None, True, False)
    assert glm.experts.rule == RoutingRule(8, "sigmoid", True, 1.0)
    assert [layer.chunk for layer in llama.layers[:4]] == [8192, 8192, 8192, None]
    assert llama.rope_types[:4] == ("", "", "", NO_ROTATION)
    assert llama.experts is not None
    assert (llama.experts.scales_inputs, llama.experts.num_experts) == (True, 16)
    assert (llama.experts.intermediate_size, llama.experts.shared_size) == (8192, 8192)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Phi-3-mini-4k", "gemma-3-1b"])
def test_a_small_one_computes_as_transformers_does(name: str, tmp_path: Path) -> None:
    """The model has the hub's own config.json beside its weights, not the one that transformers
    saves.
    """
    config = {name: value for name, value in CONFIGS[name].items() if name != "torch_dtype"}
    small = {key: value for key, value in _SMALL.items() if key in config}
    family = {"llama": "llama", "phi3": "phi3", "gemma3_text": "gemma3"}[config["model_type"]]
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    extra = {"gemma3": {"layer_types": types[:7], "query_pre_attn_scalar": 256}}.get(family, {})
    rope = {"rope_type": "default", "rope_theta": float(config["rope_theta"])}
    ropes = {} if family == "gemma3" else {"rope_parameters": rope}
    shapes: dict[str, Any] = {**_SMALL, "tie_word_embeddings": family != "phi3", **extra, **ropes}
    if "head_dim" not in config:
        shapes["head_dim"] = 8
    directory = make_model(tmp_path, family, **shapes)
    write(directory, {**config, **small})
    assert isinstance(load(directory).model, Decoder)
    assert relative_errors(directory)[0] < 1e-4


def test_code_of_the_models_own_is_left_to_transformers_where_it_is_trusted(
    tmp_path: Path,
) -> None:
    read = load_config(write(tmp_path, CONFIGS["Phi-3-mini-4k"]), trust_remote_code=False)
    decoder_spec(read)
    with pytest.raises(NotOurs, match="auto_map"):
        decoder_spec(read, trust_remote_code=True)


def test_a_pattern_of_windows_that_says_otherwise_is_left_to_transformers(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 13
    config = {**CONFIGS["gemma-3-1b"], "layer_types": types}
    read = load_config(write(tmp_path, config), trust_remote_code=False)
    with pytest.raises(NotOurs, match="sliding_window_pattern 6"):
        decoder_spec(read)


def test_the_newer_name_of_the_activation_wins_for_gemma_alone(tmp_path: Path) -> None:
    config = {**CONFIGS["gemma-2-2b"], "hidden_act": "silu"}
    read = load_config(write(tmp_path, config), trust_remote_code=False)
    assert decoder_spec(read).activation == "gelu_tanh"
    config = {**CONFIGS["SmolLM2-135M"], "hidden_activation": "gelu_pytorch_tanh"}
    read = load_config(write(tmp_path, config), trust_remote_code=False)
    with pytest.raises(NotOurs, match="hidden_activation"):
        decoder_spec(read)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 4}, r"num_attention_heads is 9.* num_key_value_heads, 4"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"hidden_size": 577}, "577"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {**CONFIGS["SmolLM2-135M"], "num_hidden_layers": 2, **changes}
    with pytest.raises(ModelError, match=reason) as caught:
        load(write(tmp_path, config), load_format="dummy")
    assert "\n" not in str(caught.value)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "own", "rope_theta": 1e4}}, "own"),
        ({"rope_parameters": {**_YARN, "factor": "4", "rope_theta": 1e4}}, "str"),
        ({"num_attention_heads": 0}, "zero"),
        ({"num_key_value_heads": 0}, "multiple of num_key_value_heads, 0"),
        ({"max_position_embeddings": -5}, "--max-model-len"),
    ],
)
def test_values_that_transformers_fails_on_are_refused_in_one_line(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {**CONFIGS["SmolLM2-135M"], "num_hidden_layers": 2, **changes}
    with pytest.raises(ModelError, match=reason) as caught:
        load(write(tmp_path, config), load_format="dummy")
    assert "\n" not in str(caught.value)


def test_yarn_may_go_as_far_as_it_stretches(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    directory = make_model(tmp_path, "qwen2", rope_parameters=rope)
    assert load(directory).info.max_model_len == 256
    runner = load(directory, max_model_len=1024)
    assert runner.info.max_model_len == 1024
    assert isinstance(runner.model, Decoder)
    parts = [layer.weights.attention for layer in runner.model._layers]
    assert {len(part.rope.cos) for part in parts if isinstance(part, HeadAttention)} == {1024}
    with pytest.raises(ModelError, match="1025: the model has 1024 positions"):
        load(directory, max_model_len=1025)
    with pytest.raises(ModelError, match="257: the model has 256 positions"):
        load(make_model(tmp_path / "plain", "qwen2"), max_model_len=257)


def test_gemmas_scale_has_the_dtype_of_its_weights(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "gemma3", hidden_size=36)
    model = load(directory).model
    assert isinstance(model, Decoder)
    assert model._spec.embedding_scale == 6.0
    directory = make_model(tmp_path / "other", "gemma3", hidden_size=40)
    weights = directory / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    model = load(directory).model
    assert isinstance(model, Decoder)
    assert model._spec.embedding_scale == float(torch.tensor(40**0.5).bfloat16()) != 40**0.5


@pytest.mark.parametrize("name", COMPOSITES)
def test_each_frequency_of_a_head_follows_an_axis_where_there_are_three(
    name: str, tmp_path: Path
) -> None:
    read = load_config(write(tmp_path, COMPOSITES[name]), trust_remote_code=False)
    # Time, row and column: how many of each.
    expected = {
        "Qwen2.5-VL-7B": (16, 24, 24),
        "Qwen3-VL-4B": (24, 20, 20),
        "Qwen3-VL-30B-A3B": (24, 20, 20),
        "GLM-4.1V-9B": (8, 12, 12),
        "Qwen3.5-27B": (11, 11, 10),
    }
    axes = axis_of_frequencies(read)
    assert tuple(axes.count(axis) for axis in range(3)) == expected.get(name, (0, 0, 0))
    if axes:
        text = text_config(read, has_head=True)
        tables = rope_tables(text, decoder_spec(text), 2, torch.device("cpu"))
        assert {table.cos.shape[1] for table in tables.values()} == {len(axes)}
