"""A plan's schedule for engines that run one mini-batch at a time."""

from __future__ import annotations

import msgspec

from ..plan import Plan, pipeline_of
from ..schedules.schedules import make_schedule
from ..schedules.torch_csv import csv_text


def schedule_csv(plan: Plan) -> str:
    """A mini-batch in torch's CSV, as each replica runs it: stages have as many of them.

    Gradients go back through stages that have nothing to train, too: those engines wait for them.
    """
    edges = tuple(msgspec.structs.replace(edge, needs_grad=True) for edge in plan.edges)
    plan = msgspec.structs.replace(plan, edges=edges)
    replicas = len(plan.stages[0].devices)
    if replicas > 1:
        plan = msgspec.structs.replace(
            plan,
            mini_batch=plan.mini_batch // replicas,
            micro_batches=plan.micro_batches // replicas,
            stages=tuple(
                msgspec.structs.replace(stage, devices=stage.devices[:1]) for stage in plan.stages
            ),
        )
    return csv_text(make_schedule(pipeline_of(plan), 1))
