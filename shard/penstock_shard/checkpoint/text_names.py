"""The names of a text model's tensors in the files of a model of images and text. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# The prefixes that replace "model." in files of images-and-text models. Newer files have the
# second, Idefics 3 has the last.
_COMPOSITE_ROOTS = ("language_model.model.", "model.language_model.", "model.text_model.")
# The empty prefix is for models that were saved without a head, such as embedding models.
_ROOTS = (*_COMPOSITE_ROOTS, "model.", "")
_HEADS = ("language_model.lm_head.", "lm_head.")
# The prefix of an image encoder's tensors, in files where the text model's prefix is "model.".
_TOWER = "visual."


@dataclass(frozen=True, slots=True)
class TextNames:
    # Maps names in a causal language model to names in the files.
    stored: dict[str, str] = field(default_factory=dict)
    # The replacement of "model." in the files.
    root: str = "model."
    # True if parts of the files are left out, such as towers for images.
    leaves_out: bool = False

    def in_files(self, name: str) -> str:
        """Return a tensor's name in the files, even if they do not have the tensor."""
        own = self.root + name.removeprefix("model.") if name.startswith("model.") else name
        return self.stored.get(name, own)


def text_names(names: Iterable[str]) -> TextNames:
    """Find the text model's tensors. Return all names if the model has no other part."""
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
    """Return a module's name in the text model. `name` may also be its name in the whole model."""
    for root in _COMPOSITE_ROOTS:
        if name.startswith(root):
            return "model." + name.removeprefix(root)
    return name
