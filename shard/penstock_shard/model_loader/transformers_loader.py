"""Loads a transformers module from a model directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from penstock_shard.checkpoint.text_names import TextNames
from penstock_shard.errors import ModelError, first_line, library_faults, report_faults

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Buffers that older releases of modelling code saved: rotary frequencies and causal masks.
_LEFTOVERS = re.compile(r"(inv_freq|attn\.bias|attention\.bias|masked_bias|position_ids)$")


def load_config(model_dir: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Raises ModelError if transformers cannot read the configuration."""
    what = f"{model_dir}: transformers {transformers.__version__} cannot read the configuration"
    with report_faults(what), _own_code(what):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
    return config


@contextmanager
def _own_code(what: str) -> Iterator[None]:
    """Name our flag in the error if transformers asks for permission to run a model's own code."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        reason = "the model comes with its own code, which --trust-remote-code would run"
        raise ModelError(f"{what}: {reason}") from error


def resolve_dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of weights on a GPU; for "auto" the model's own dtype."""
    if name != "auto":
        return _DTYPES[name]
    own = config.get_text_config().dtype or config.dtype
    if isinstance(own, str):
        own = _DTYPES.get(own)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


@dataclass(frozen=True, slots=True)
class LoadOptions:
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False
    # True for random weights. Then only the configuration is read.
    dummy: bool = False
    # Replacements of the directory's files: tensors by name, or objects that give a tensor when
    # transformers slices them with an ellipsis.
    tensors: Mapping[str, object] | None = None
    # Names among `tensors` that need not be read.
    needless: frozenset[str] = frozenset()
    names: TextNames = field(default_factory=TextNames)


def load_module(model_dir: Path, config: PreTrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """Load a directory's causal LM in eval mode, on its device.

    Raises ModelError if weights are missing, or do not fit the configuration or the memory.
    """
    # The shard reports progress itself, and the checks below replace transformers' warnings.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    faults: tuple[type[Exception], ...] = (*library_faults(), RuntimeError, SafetensorError)
    try:
        with torch.device(options.device):
            make = _random if options.dummy else _read
            module = make(model_dir, config, options)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{model_dir}: the weights do not fit into memory: {error}") from error
    except faults as error:
        raise ModelError(f"{model_dir}: cannot load the weights: {first_line(error)}") from error
    module.eval()
    module.requires_grad_(False)
    return module


def _random(model_dir: Path, config: PreTrainedConfig, options: LoadOptions) -> PreTrainedModel:
    torch.manual_seed(0)
    module: PreTrainedModel = AutoModelForCausalLM.from_config(
        config,
        dtype=options.dtype,
        attn_implementation="eager",
        trust_remote_code=options.trust_remote_code,
    )
    return module


def _read(model_dir: Path, config: PreTrainedConfig, options: LoadOptions) -> PreTrainedModel:
    source: dict[str, Any] = {"pretrained_model_name_or_path": model_dir}
    maker: Any = AutoModelForCausalLM
    if options.tensors is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": dict(options.tensors)}
        maker = _class_of(config, options)
    module, loading = maker.from_pretrained(
        **source,
        config=config,
        dtype=options.dtype,
        # Every class has eager attention; `unsupported.py` decides whether ours may replace it.
        attn_implementation="eager",
        trust_remote_code=options.trust_remote_code,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"{model_dir}: the weights lack {len(missing)} of the model's tensors, "
            f"{options.names.in_files(missing[0])} for one; the files are incomplete or of "
            "another model"
        )
    unexpected = set(loading["unexpected_keys"]) - options.needless
    unread = sorted(name for name in unexpected if _is_of_model(name, module, options))
    if unread:
        raise ModelError(
            f"{model_dir}: the weights have {len(unread)} tensors that the model's code in "
            f"transformers {transformers.__version__} does not read, "
            f"{options.names.in_files(unread[0])} for one"
        )
    loaded: PreTrainedModel = module
    return loaded


def _class_of(config: PreTrainedConfig, options: LoadOptions) -> type[PreTrainedModel]:
    with torch.device("meta"):
        return type(
            AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
        )


def _is_of_model(name: str, module: PreTrainedModel, options: LoadOptions) -> bool:
    """Tell whether an unread tensor belongs to a layer. Other tensors belong to parts that the
    model does not need, such as heads for training. If these parts are left out already, all
    tensors count.
    """
    if _LEFTOVERS.search(name):
        return False
    if options.names.leaves_out:
        return True
    layers = {
        f"{parent}.{child}."
        for parent, stack in module.named_modules()
        if isinstance(stack, nn.ModuleList)
        for child, _ in stack.named_children()
    }
    return any(name.startswith(layer) for layer in layers)
