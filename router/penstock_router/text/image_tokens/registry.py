"""Finds a model's family by its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock_router.text.image_tokens import (
    gemma3,
    gemma4,
    glm4v,
    idefics3,
    internvl,
    llava,
    llava_next,
    pixtral,
    qwen_vl,
)
from penstock_router.text.image_tokens.base import ImagesUnusable, ImageTokens
from penstock_router.text.image_tokens.settings import ModelFiles, read_model_files
from penstock_router.text.tokenizer import Tokenizer

# Families by model type and image processor type, the latter without "Fast" or "Pil".
_FAMILIES: dict[tuple[str, str], Callable[[ModelFiles], ImageTokens]] = {
    ("gemma3", "Gemma3ImageProcessor"): gemma3.read,
    ("gemma4", "Gemma4ImageProcessor"): gemma4.read,
    ("glm46v", "Glm46VImageProcessor"): glm4v.read,
    ("glm4v", "Glm46VImageProcessor"): glm4v.read,
    ("glm4v", "Glm4vImageProcessor"): glm4v.read,
    ("glm4v_moe", "Glm46VImageProcessor"): glm4v.read,
    ("glm4v_moe", "Glm4vImageProcessor"): glm4v.read,
    ("idefics3", "Idefics3ImageProcessor"): idefics3.read,
    ("internvl", "GotOcr2ImageProcessor"): internvl.read,
    ("llava", "CLIPImageProcessor"): llava.read,
    ("llava", "LlavaImageProcessor"): llava.read,
    ("llava", "PixtralImageProcessor"): pixtral.read,
    ("llava_next", "LlavaNextImageProcessor"): llava_next.read,
    ("mistral3", "PixtralImageProcessor"): pixtral.read,
    ("qwen2_5_vl", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("qwen2_vl", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("qwen3_5", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("qwen3_5_moe", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("qwen3_vl", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("qwen3_vl_moe", "Qwen2VLImageProcessor"): qwen_vl.read,
    ("smolvlm", "SmolVLMImageProcessor"): idefics3.read,
}


def read_image_tokens(files: Mapping[str, bytes], tokenizer: Tokenizer) -> ImageTokens | None:
    """Read a model's image tokens; None if it sees no images. Raises `ImagesUnusable` for
    unsuitable files.
    """
    found = read_model_files(files, tokenizer)
    if found is None:
        return None
    model_type = found.config.text("model_type", "unknown")
    given = found.image_processor.text("image_processor_type", "unknown")
    read = _FAMILIES.get((model_type, given.removesuffix("Fast").removesuffix("Pil")))
    if read is None:
        text = f"models of type {model_type} with a {given} are not implemented"
        raise ImagesUnusable(f"{found.image_processor.name}: {text}")
    found.image_processor.refuse("do_resize", True)
    tokens = read(found)
    [ids] = tokenizer.encode([tokens.text], add_special_tokens=False, max_tokens=2**31 - 1)
    if ids.count(tokens.token_id) != 1:
        raise ImagesUnusable(f"tokenizer.json: {tokens.text!r} is not tokenized as one image")
    return tokens


def load_image_tokens(
    files: Mapping[str, bytes], tokenizer: Tokenizer
) -> tuple[ImageTokens | None, str]:
    """Return `read_image_tokens` and "", or None and the reason why images are refused."""
    try:
        return read_image_tokens(files, tokenizer), ""
    except ImagesUnusable as error:
        return None, str(error)
