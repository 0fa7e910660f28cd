"""What becomes of each family of `tiny_families`: what computes it, or why it is refused.

`test_every_family.py` holds each to it, and `docs/models.md` shows the same table
(`contract/models_page.py`).
"""

from __future__ import annotations

OURS = "our decoder"
THEIRS = "the code of transformers"
SERVED = (OURS, THEIRS)

_LINEAR = "layers of type linear_attention"
_INDEXED = "layers of type indexed_attention"
_IMAGES = "is a model of images and text"

# By `model_type`: one of SERVED, or a part of the line in which loading is refused.
OUTCOMES: dict[str, str] = {
    "apertus": THEIRS,
    "arcee": THEIRS,
    "bailing_hybrid": _LINEAR,
    "bamba": _LINEAR,
    "bitnet": THEIRS,
    "cohere2": THEIRS,
    "deepseek_v3": THEIRS,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": "layers of type compressed_sparse_attention, heavily_compressed_attention",
    "dots1": THEIRS,
    "ernie4_5_moe": THEIRS,
    "exaone4": THEIRS,
    "falcon_h1": "layers of type hybrid",
    "falcon_mamba": _LINEAR,
    "gemma2": OURS,
    "gemma3": THEIRS,
    "gemma3_text": OURS,
    "gemma3n_text": THEIRS,
    "gemma4": THEIRS,
    "gemma4_text": THEIRS,
    "gemma4_unified": THEIRS,
    "glm4": THEIRS,
    "glm46v": _IMAGES,
    "glm4_moe": THEIRS,
    "glm4v": _IMAGES,
    "glm5_next": _IMAGES,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": THEIRS,
    "granite": THEIRS,
    "granitemoe": THEIRS,
    "granitemoehybrid": _LINEAR,
    "hunyuan_v1_dense": THEIRS,
    "hy_v3": THEIRS,
    "hy_v4": _INDEXED,
    "internvl": _IMAGES,
    "jamba": _LINEAR,
    "kimi_k25": _IMAGES,
    "kimi_linear": _LINEAR,
    "lfm2": "layers of type conv",
    "lfm2_moe": "layers of type conv",
    "lfm3": "layers of type conv",
    "llama": OURS,
    "llama4": THEIRS,
    "llama4_text": THEIRS,
    "longcat_flash": THEIRS,
    "mamba2": _LINEAR,
    "mimo_v2_flash": THEIRS,
    "minimax": _LINEAR,
    "minimax_m2": THEIRS,
    "minimax_m3_vl": _IMAGES,
    "ministral3": THEIRS,
    "mistral": OURS,
    "mistral3": _IMAGES,
    "mistral4": _IMAGES,
    "mixtral": OURS,
    "nanochat": THEIRS,
    "nemotron_h": "layers of type linear_attention, mlp, moe",
    "olmo2": THEIRS,
    "olmo3": THEIRS,
    "olmo_hybrid": _LINEAR,
    "phi3": OURS,
    "phimoe": THEIRS,
    "qwen2": OURS,
    "qwen2_5_vl": _IMAGES,
    "qwen3": OURS,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": OURS,
    "qwen3_next": _LINEAR,
    "qwen3_vl": _IMAGES,
    "qwen4_exp": "layers of type indexed_attention, linear_attention",
    "qwen4_exp_text": "layers of type indexed_attention, linear_attention",
    "recurrent_gemma": _LINEAR,
    "seed_oss": THEIRS,
    "smollm3": THEIRS,
    "stablelm": THEIRS,
    "starcoder2": THEIRS,
    "zamba2": "layers of type hybrid, linear_attention",
}
