"""DeepSpeed: a PipelineModule whose stages are the plan's.

A PipelineModule is a list of layers, each called with what the one before gave, and cuts it by
equal counts, by parameters or by classes of layers, never at places that are named
(deepspeed/runtime/pipe/module.py). So the file makes one layer of each stage, and there are as many
of those as stages: cut by equal counts, each stage has its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ...profiles.errors import TargetError, TraceError
from ...profiles.profile import made_of
from ..plan import Plan
from .blocks import blocks_by_stage, blocks_of
from .engines import Engine, EngineFiles, precision_notes
from .torch_pipelining import RESULT, ModelFacts

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


_ONE_MODULE = "write these layers and what lies between them as one module"
_CHAIN = "a layer there is called with what the one before gave"


def for_deepspeed(plan: Plan, look: Callable[[Plan], ModelFacts]) -> EngineFiles:
    """The module and its settings.

    Args:
        look: sees what has to be known of the model.

    Raises PlanError where DeepSpeed can't express the plan.
    """
    DEEPSPEED.check(plan)
    parts = blocks_by_stage(DEEPSPEED, plan)
    for s in range(1, len(parts)):
        tensors = [edge.tensor for edge in plan.edges if edge.target == s]
        if len(tensors) != 1:
            raise DEEPSPEED.refuse(
                f"stage {s} receives {len(tensors)} tensors ({', '.join(map(repr, tensors))}), and "
                f"{_CHAIN}; keep their layers together with --pin"
            )
    notes = [
        f"pipeline_module of {MODULE} wants a layer for each of its names, which does all that the "
        "model does up to the next name's"
    ]
    if unseen := _check_chain(plan, look):
        notes.append(
            f"{unseen}: each of those layers must take one tensor, which the one before gives"
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
        (*notes, *precision_notes(plan)),
    )


def _check_chain(plan: Plan, look: Callable[[Plan], ModelFacts]) -> str:
    """Check that each block takes one tensor, which the one before gives; if nobody can see, why.

    Raises PlanError naming a tensor that another block takes.
    """
    if numbers := made_of(plan.profile):
        return f"the plan was made from {numbers}, without a model"
    try:
        facts = look(plan)
    except (TargetError, TraceError) as error:
        return f"the model couldn't be looked at ({error})"
    names = [name for stage in plan.stages for name in stage.nodes]
    block_of = dict(zip(names, blocks_of(names), strict=True))
    blocks = list(dict.fromkeys(block_of.values()))
    place = {name: blocks.index(block) for name, block in block_of.items()}
    place |= {"": -1, RESULT: len(blocks)}
    received: dict[int, str] = {}
    for tensor, producer, consumer in facts.taken:
        source, target = place[producer], place[consumer]
        if source == target:
            continue
        made = f"of {blocks[source]!r}" if producer else "that the model is given"
        taker = "the model's result" if consumer == RESULT else repr(blocks[target])
        if target != source + 1:
            raise DEEPSPEED.refuse(
                f"{taker} takes tensor {tensor!r} {made}, and {_CHAIN}; {_ONE_MODULE}"
            )
        other = received.setdefault(target, tensor)
        if other != tensor and consumer != RESULT:
            raise DEEPSPEED.refuse(
                f"{taker} takes two tensors {made}, {other!r} and {tensor!r}, and {_CHAIN}, one "
                f"tensor; {_ONE_MODULE}"
            )
    return ""
