"""DeepSpeed: a PipelineModule whose stages are the plan's.

A PipelineModule is a list of layers, each called with what the one before gave, and cuts it by
equal counts, by parameters or by classes of layers, never at places that are named
(deepspeed/runtime/pipe/module.py). So the file makes one layer of each stage, and there are as many
of those as stages: cut by equal counts, each stage has its own.
"""

from __future__ import annotations

import json

from ..plan import Plan
from .blocks import blocks_by_stage
from .engines import Engine, EngineFiles, precision_notes

DEEPSPEED = Engine("DeepSpeed", {"1f1b-flush": "1F1B"})

MODULE, CONFIG = "pipeline_module.py", "ds_config.json"

_TEXT = '''"""The stages of a plan as DeepSpeed's PipelineModule; written by tp-plan export.

    from pipeline_module import pipeline_module
    net = pipeline_module({{name: layer, ...}}, loss_fn=...)

With ds_config.json, which has the plan's micro-batches.
"""

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

STAGES = {stages}


class PlannedStage(nn.Sequential):
    """Layers of one stage; a LayerSpec among them is built with it."""

    def __init__(self, *layers):
        built = (each.build() if isinstance(each, LayerSpec) else each for each in layers)
        super().__init__(*built)


def pipeline_module(layers, **more):
    """The PipelineModule.

    Args:
        layers: for each name in STAGES a module, or a LayerSpec that is built on its stage alone;
            each is called with what the one before gave.
        more: other arguments of PipelineModule, such as loss_fn.
    """
    named = {{name for names in STAGES for name in names}}
    if named != set(layers):
        raise ValueError(f"the plan has other layers than these: {{sorted(named ^ set(layers))}}")
    stages = [LayerSpec(PlannedStage, *(layers[name] for name in names)) for names in STAGES]
    return PipelineModule(stages, num_stages=len(stages), partition_method="uniform", **more)
'''


def for_deepspeed(plan: Plan) -> EngineFiles:
    """The module and its settings. Raises PlanError where DeepSpeed can't express the plan."""
    DEEPSPEED.check(plan)
    parts = blocks_by_stage(DEEPSPEED, [stage.nodes for stage in plan.stages])
    for s in range(1, len(parts)):
        tensors = [edge.tensor for edge in plan.edges if edge.target == s]
        if len(tensors) != 1:
            raise DEEPSPEED.refuse(
                f"stage {s} receives {len(tensors)} tensors ({', '.join(map(repr, tensors))}), and "
                "a layer there is called with what the one before gave; keep their layers together "
                "with --pin"
            )
    replicas = len(plan.stages[0].devices)
    stages = "[\n" + "".join(f"    {json.dumps(blocks)},\n" for blocks in parts) + "]"
    config = {
        "train_batch_size": plan.mini_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches // replicas,
    }
    return EngineFiles(
        {MODULE: _TEXT.format(stages=stages), CONFIG: json.dumps(config, indent=2) + "\n"},
        (
            f"pipeline_module of {MODULE} wants a layer for each of its names",
            *precision_notes(plan),
        ),
    )
