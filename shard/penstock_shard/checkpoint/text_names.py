"""What the tensors of a text model are called in the files of a model of images and text.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# What such files have in place of "model."; the second in newer ones, the last in Idefics 3's.
_COMPOSITE_ROOTS = ("language_model.model.", "model.language_model.", "model.text_model.")
# The last is of models that were saved without their head, as embedding models are.
_ROOTS = (*_COMPOSITE_ROOTS, "model.", "")
_HEADS = ("language_model.lm_head.", "lm_head.")
# Begins the names of a tower beside a text model whose names begin as those of any other.
_TOWER = "visual."


@dataclass(frozen=True, slots=True)
class TextNames:
    """The tensors of the text model in a checkpoint."""

    # Their names in a causal language model -> those in the files.
    stored: dict[str, str] = field(default_factory=dict)
    # What names in the files have in place of "model.".
    root: str = "model."
    # Whether the files have more, such as towers for images, which is left out.
    leaves_out: bool = False

    def in_files(self, name: str) -> str:
        """How a tensor is called in the files, or would be if it were there."""
        own = self.root + name.removeprefix("model.") if name.startswith("model.") else name
        return self.stored.get(name, own)


def text_names(names: Iterable[str]) -> TextNames:
    """The tensors of the text model among those of the files; all where there is no other part."""
    stored = list(names)
    root = next((root for root in _ROOTS if f"{root}embed_tokens.weight" in stored), "model.")
    if root == "":
        found = {f"model.{name}": name for name in stored}
    elif root == "model.":
        found = {name: name for name in stored if not name.startswith(_TOWER)}
    else:
        places = {root: "model."} | dict.fromkeys(_HEADS, "lm_head.")
        found = {
            own + name.removeprefix(place): name
            for place, own in places.items()
            for name in stored
            if name.startswith(place)
        }
    return TextNames(found, root, len(found) < len(stored))


def text_module(name: str) -> str:
    """A module of the text model, by its name in the whole or its own: as the latter."""
    for root in _COMPOSITE_ROOTS:
        if name.startswith(root):
            return "model." + name.removeprefix(root)
    return name
