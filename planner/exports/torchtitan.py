"""torchtitan: modules of each model part, and the schedule as CSV.

torchtitan gives every stage a copy of the whole model, and keeps of its children those that
``module_fqns_per_model_part`` names; of a child that is an nn.ModuleList or nn.ModuleDict, the
named entries. So cuts are between those (torchtitan/distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import json

from ..plan import Plan
from ..systems.placement import pattern_of
from .blocks import blocks_by_stage
from .engines import Engine, EngineFiles, ranks_of
from .schedule import schedule_csv

TORCHTITAN = Engine(
    "torchtitan",
    {
        "gpipe": "GPipe",
        "1f1b-flush": "1F1B",
        "1f1b-split": "",
        "interleaved": "",
        "v-shaped": "",
        "given": "",
    },
    placements=frozenset({"loop", "v"}),
)

# Which of its two ways to place stages it takes goes by the name of a schedule, also with a CSV.
_PLACED = {"straight": "PipelineScheduleMulti", "loop": "Interleaved1F1B", "v": "ZBVZeroBubble"}

CONFIG, CSV = "torchtitan.toml", "schedule.csv"


def for_torchtitan(plan: Plan) -> EngineFiles:
    """Settings and schedule. Raises PlanError where torchtitan can't express the plan."""
    TORCHTITAN.check(plan)
    parts = blocks_by_stage(TORCHTITAN, [stage.nodes for stage in plan.stages])
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
    name = "" if plan.placement else TORCHTITAN.schedules[plan.system.schedule]
    if name == "1F1B" and plan.micro_batches // replicas < len(plan.stages):
        name = ""  # torch's class wants a micro-batch for each stage
    lines = [
        "# Beside your own settings of torchtitan, which these replace.",
        "[training]",
        f"local_batch_size = {plan.mini_batch // replicas}",
        "",
        "[parallelism]",
        f"pipeline_parallel_degree = {len(ranks_of(plan))}",
        f"data_parallel_replicate_degree = {replicas}",
        f"pipeline_parallel_microbatch_size = {plan.micro_batch}",
        f'pipeline_parallel_schedule = "{name or _PLACED[pattern]}"',
        *([] if name else [f'pipeline_parallel_schedule_csv = "{CSV}"']),
        "module_fqns_per_model_part = [",
        *(f"    {json.dumps(blocks)}," for blocks in parts),
        "]",
    ]
    return EngineFiles(
        {CONFIG: "\n".join(lines) + "\n", CSV: schedule_csv(plan)},
        (
            "the model's forward must do without the modules of other stages; children that are in "
            "no layer of their own have to be added to their stage's line",
        ),
    )
