"""torchtitan: modules of each model part, and the schedule as CSV.

Releases 0.2.x read settings from TOML; since then they are Python functions that return a
``Trainer.Config``. Release 0.3.0 counts batches in samples, its main branch of August 2026 in
tokens (torchtitan/config/configs.py). All are written.

torchtitan gives every stage a copy of the whole model, and keeps of its children those that
``module_fqns_per_model_part`` names; of a child that is an nn.ModuleList or nn.ModuleDict, the
named entries. So cuts are between those (torchtitan/distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import json

from ..plan import Plan
from ..systems.placement import pattern_of
from .blocks import blocks_by_stage
from .engines import TORCHS, Engine, EngineFiles, precision_notes, ranks_of
from .schedule import schedule_csv

TORCHTITAN = Engine("torchtitan", TORCHS, placements=frozenset({"loop", "v"}))

# Which of its two ways to place stages it takes goes by the name of a schedule, also with a CSV.
_PLACED = {"straight": "PipelineScheduleMulti", "loop": "Interleaved1F1B", "v": "ZBVZeroBubble"}

CONFIG, PYTHON, CSV = "torchtitan.toml", "torchtitan_plan.py", "schedule.csv"

_MODULE = '''"""A plan as settings of torchtitan, which are Python after its release 0.2.2.

In a config registry of your own, beside this file:

    def my_model():
        return with_plan(llama3_debugmodel())

Where torchtitan counts batches in tokens, a sample of the plan is a sequence of
``training.max_context_length`` of them.
"""

{imports}MINI_BATCH = {mini_batch}
MICRO_BATCH = {micro_batch}
MODULES = [
{modules}
]


def with_plan(config):
    """``config``, a Trainer.Config, with the plan's settings in it."""
    training, parallelism = config.training, config.parallelism
    if hasattr(training, "local_batch_size"):  # release 0.3
        training.local_batch_size = MINI_BATCH // {replicas}
        training.global_batch_size = MINI_BATCH
        parallelism.pipeline_parallel_microbatch_size = MICRO_BATCH
    else:
        training.num_tokens_per_microbatch_per_dp_rank = MICRO_BATCH * training.max_context_length
        training.num_tokens_per_train_step = MINI_BATCH * training.max_context_length
        parallelism.num_pp_microbatches = {micro_batches}
    training.disable_cuda_graphs = True  # it refuses them in a pipeline
    parallelism.pipeline_parallel_degree = {ranks}
    parallelism.data_parallel_replicate_degree = {replicas}
    parallelism.pipeline_parallel_layers_per_stage = None
    parallelism.pipeline_parallel_schedule = "{schedule}"
    parallelism.pipeline_parallel_schedule_csv = {csv}
    parallelism.module_fqns_per_model_part = MODULES
    return config
'''


def for_torchtitan(plan: Plan, look: object) -> EngineFiles:
    """Settings and schedule; no model is looked at.

    Raises PlanError where torchtitan can't express the plan.
    """
    TORCHTITAN.check(plan)
    parts = blocks_by_stage(TORCHTITAN, plan)
    for s, blocks in enumerate(parts):
        for block in blocks:
            *above, last = block.split(".")
            if len(above) > 1 or (above and not last.isdecimal()):
                raise TORCHTITAN.refuse(
                    f"{block!r} on stage {s} is no child of the model's, nor an entry of a list "
                    "that is one, and it keeps or drops those alone"
                )
            if not above and last.isdecimal():
                raise TORCHTITAN.refuse(
                    f"{block!r} on stage {s}: the model is itself a list, and it cuts between "
                    "children with names and entries of their lists"
                )
    replicas = len(plan.stages[0].devices)
    pattern = pattern_of(plan.placement, len(plan.stages))
    name = TORCHTITAN.class_of(plan)
    ranks, schedule = len(ranks_of(plan)), name or _PLACED[pattern]
    modules = "\n".join(f"    {json.dumps(blocks)}," for blocks in parts)
    lines = [
        "# For torchtitan 0.2.x, beside your own settings, which these replace.",
        "[training]",
        f"local_batch_size = {plan.mini_batch // replicas}",
        "",
        "[parallelism]",
        f"pipeline_parallel_degree = {ranks}",
        f"data_parallel_replicate_degree = {replicas}",
        f"pipeline_parallel_microbatch_size = {plan.micro_batch}",
        f'pipeline_parallel_schedule = "{schedule}"',
        *([] if name else [f'pipeline_parallel_schedule_csv = "{CSV}"']),
        f"module_fqns_per_model_part = [\n{modules}\n]",
    ]
    python = _MODULE.format(
        mini_batch=plan.mini_batch,
        micro_batch=plan.micro_batch,
        modules=modules,
        ranks=ranks,
        replicas=replicas,
        micro_batches=plan.micro_batches // replicas,
        schedule=schedule,
        imports="" if name else "from pathlib import Path\n\n",
        csv='""' if name else f'str(Path(__file__).with_name("{CSV}"))',
    )
    return EngineFiles(
        {CONFIG: "\n".join(lines) + "\n", PYTHON: python, CSV: schedule_csv(plan)},
        (
            f"releases 0.2.x read {CONFIG}; after those, {PYTHON} says how to use it",
            "the model's forward must do without the modules of other stages, its lists must be an "
            "nn.ModuleList or nn.ModuleDict, and children that are in no layer of their own have "
            "to be added to their stage's line",
            *precision_notes(plan),
        ),
    )
