"""The table of tokens in docs/images.md, by the code that counts them.

Run it to write the table again: `python -m contract.images_page` in tests/.
"""

from __future__ import annotations

from pathlib import Path

from support.image_models import IMAGE_MODELS

from penstock_router.text.image_tokens.registry import read_image_tokens
from penstock_router.text.tokenizer import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "images.md"
MARK = "<!-- tokens -->"
# Width and height.
_SIZES = ((1, 1), (512, 512), (1024, 768), (1920, 1080), (4032, 3024))
# With values of released checkpoints.
_FAMILIES = {
    "qwen2_5_vl": "Qwen2-VL, Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL, Qwen3.5",
    "glm4v": "GLM-4V",
    "mistral3": "Mistral 3",
    "pixtral": "Pixtral",
    "internvl": "InternVL",
    "idefics3": "Idefics 3 (8B)",
    "smolvlm": "SmolVLM (256M)",
    "llava": "LLaVA 1.5",
    "llava_next": "LLaVA-NeXT",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
}


def table() -> str:
    """A row for each family, a column for each size."""
    sizes = [f"{width} × {height}" for width, height in _SIZES]
    lines = [f"| family | {' | '.join(sizes)} |", "|---" * (1 + len(sizes)) + "|"]
    for name, title in _FAMILIES.items():
        counts = " | ".join(f"{count:,}" for count in _counts(name))
        lines.append(f"| {title} | {counts} |")
    return "\n".join(lines)


def _counts(name: str) -> list[int]:
    files = IMAGE_MODELS[name].files()
    tokens = read_image_tokens(files, load_tokenizer(files))
    assert tokens is not None
    return [len(tokens.token_ids(width, height)) for width, height in _SIZES]


def with_table(page: str) -> str:
    before, _, rest = page.partition(f"{MARK}\n")
    _, found, after = rest.partition(MARK)
    assert found, f"{MARK} must stand before and after the table"
    return f"{before}{MARK}\n{table()}\n{MARK}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
