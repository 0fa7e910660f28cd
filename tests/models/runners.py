"""Runners of models with every logits processor and output, as a shard has them."""

from __future__ import annotations

from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.structured_output.matcher_state import MaskFiller
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.model_runner import ModelRunner
from penstock_shard.worker.outputs.all_outputs import every_output


def make_runner(
    model: CausalModel,
    info: RunnerInfo,
    *,
    masks: MaskFiller | None = None,
    graphs: Graphs | None = None,
) -> ModelRunner:
    """Return a runner of the model. Without `masks` no request may have a constraint."""
    return ModelRunner(
        model, info, shaping=every_processor(masks), make_outputs=every_output, graphs=graphs
    )
