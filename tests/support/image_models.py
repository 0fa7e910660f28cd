"""Files of small models that see images, one of each family, and tokenizers with their tokens.

Values are those of released checkpoints, but for ids, as the vocabularies are small.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# As most templates do: contents are texts, or parts for each of which something is written.
_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# As LLaVA-NeXT's: images first, and texts that are no parts are lost.
PARTS_ONLY_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}IMAGE{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class ImageModel:
    """The contents of the files that a family's checkpoints have."""

    model_type: str
    # The contents of preprocessor_config.json.
    images: dict[str, Any]
    # The text that a template writes for an image.
    shown: str
    special_tokens: tuple[str, ...]
    # The token that stands for parts of an image in a prompt.
    token: str
    processor: dict[str, Any] = field(default_factory=dict)
    # The extra special tokens of tokenizer_config.json, by name.
    named_tokens: dict[str, str] = field(default_factory=dict)
    # The tokens whose ids config.json gives, by the name of the id.
    tokens_of_ids: dict[str, str] = field(default_factory=dict)

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a token for each byte, and the special ones."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", *self.special_tokens)
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in special]
        )
        return tokenizer

    def files(self, template: str = _PARTS) -> dict[str, bytes]:
        """Return the files by name, as a router gets them."""
        tokenizer = self.tokenizer()
        config = {
            "model_type": self.model_type,
            "image_token_id": tokenizer.token_to_id(self.token),
            "vision_config": {"hidden_size": 32},
        } | {name: tokenizer.token_to_id(token) for name, token in self.tokens_of_ids.items()}
        tokenizer_config = {
            "chat_template": template.replace("IMAGE", self.shown),
            "extra_special_tokens": self.named_tokens,
        }
        files = {
            "config.json": config,
            "preprocessor_config.json": self.images,
            "tokenizer_config.json": tokenizer_config,
        }
        if self.processor:
            files["processor_config.json"] = self.processor
        encoded = {name: json.dumps(values).encode() for name, values in files.items()}
        return encoded | {"tokenizer.json": tokenizer.to_str().encode()}


_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen(model_type: str, **images: Any) -> ImageModel:
    images = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2} | images
    return ImageModel(model_type, images, _QWEN_SHOWN, _QWEN_TOKENS, "<|image_pad|>")


def _glm(model_type: str, name: str) -> ImageModel:
    return ImageModel(
        model_type,
        {
            "image_processor_type": f"{name}ImageProcessor",
            "size": {"shortest_edge": 12_544, "longest_edge": 9_633_792},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>"),
        "<|image|>",
    )


def _idefics(model_type: str, longest: int, tile: int, tokens: int) -> ImageModel:
    name = "Idefics3" if model_type == "idefics3" else "SmolVLM"
    labels = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
    return ImageModel(
        model_type,
        {
            "image_processor_type": f"{name}ImageProcessor",
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": tile},
        },
        "<image>",
        ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *labels),
        "<image>",
        {"image_seq_len": tokens},
    )


def _pixtral(model_type: str, longest: int, **processor: Any) -> ImageModel:
    return ImageModel(
        model_type,
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": longest}},
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        processor,
    )


IMAGE_MODELS: dict[str, ImageModel] = {
    "qwen2_vl": _qwen("qwen2_vl", patch_size=14, min_pixels=3136, max_pixels=12_845_056),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl", patch_size=14, size={"shortest_edge": 3136, "longest_edge": 12_845_056}
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl", patch_size=16, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}
    ),
    "qwen3_5": _qwen(
        "qwen3_5", patch_size=16, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}
    ),
    "glm4v": _glm("glm4v", "Glm4v"),
    "glm46v": _glm("glm46v", "Glm46V"),
    "gemma4": ImageModel(
        "gemma4",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 280,
        },
        "\n\n<|image|>\n\n",
        ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>"),
        "<|image|>",
        {"image_seq_length": 280},
        {
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "audio_token": "<|audio|>",
            "eoa_token": "<audio|>",
        },
        {"boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
    ),
    "llava": ImageModel(
        "llava",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
        "<image>\n",
        ("<image>",),
        "<image>",
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "idefics3": _idefics("idefics3", 1456, 364, 169),
    "smolvlm": _idefics("smolvlm", 2048, 512, 64),
    "pixtral": _pixtral("llava", 1024, patch_size=16),
    "mistral3": _pixtral("mistral3", 1540, patch_size=14, spatial_merge_size=2),
    "internvl": ImageModel(
        "internvl",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 448, "width": 448},
            "min_patches": 1,
            "max_patches": 12,
            # The processor asks for it, whatever the file says.
            "crop_to_patches": False,
        },
        "<IMG_CONTEXT>\n",
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        {"image_seq_length": 256},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "llava_next": ImageModel(
        "llava_next",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        },
        "<image>\n",
        ("<image>",),
        "<image>",
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "gemma3": ImageModel(
        "gemma3",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
            "do_pan_and_scan": None,
        },
        "<start_of_image>",
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<image_soft_token>",
        {"image_seq_length": 256},
        {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    ),
}
