"""What exports have to know of a model: looked up in its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...profiles.measuring.process_settings import settings_put_back
from ...profiles.tasks.objects import SESSION
from ...profiles.tracing.call import Call, unchanged
from ...profiles.tracing.graph import TracedModel, shared_state, values
from ...profiles.tracing.shapes import specs_and_result
from ...runtime.prepare.devices import modes_of_profile
from ...runtime.prepare.distribution import laid_on
from ...runtime.prepare.loss import kind_of_loss
from ...runtime.prepare.tracing import trace_for_run
from ..plan import Plan
from .torch_pipelining import RESULT, ModelFacts

_NOT_CALLED = ("parameter_groups", "scheduler")
"""Hooks of a task that change how it trains, and that an exported script doesn't call."""


def facts_of(plan: Plan) -> ModelFacts:
    """Trace the plan's model and see.

    Raises:
        TargetError: the task can't be imported or built, or fails.
        TraceError: the model can't be traced.
        PlanError: it is another model than the plan's, or the plan was edited and not checked.
    """
    with settings_put_back(), modes_of_profile(plan.profile).on():
        return _facts_of(plan)


def _facts_of(plan: Plan) -> ModelFacts:
    traced = trace_for_run(plan.profile.target, plan, [plan.micro_batch], evaluate=False)
    task, graph = traced.task, traced.training[plan.micro_batch]
    laid_on(plan, traced, plan.micro_batch)
    names = [layer.name for layer in graph.layers]
    call, wanted = traced.target.call(plan.micro_batch)
    result, calls = _run(traced.model, call, names)
    return ModelFacts(
        layers=tuple(names),
        calls=calls,
        ties=[[names[k] for k in group] for group in shared_state(graph).tied],
        one_tensor=isinstance(result, Tensor),
        weighted=kind_of_loss(task, result, wanted).weighted,
        unused_hooks=tuple(hook for hook in _NOT_CALLED if hasattr(task, hook)),
        in_session=plan.profile.target.startswith(SESSION),
        taken=tuple(_taken(graph, call)),
    )


def _taken(graph: TracedModel, call: Call) -> Iterator[tuple[str, str, str]]:
    """Tensors that layers take from elsewhere. Numbers, such as sizes, can be had of a tensor."""
    specs, _ = specs_and_result(graph, call.tensors)
    ends = [*(layer.name for layer in graph.layers), RESULT]
    for value in values(graph):
        name = value.node.name
        if name in specs and specs[name].kind == "tensor":
            producer = "" if value.producer is None else ends[value.producer]
            yield from ((name, producer, ends[k]) for k in value.consumers)


def _run(model: nn.Module, call: Call, names: list[str]) -> tuple[Any, dict[str, int]]:
    """The model's result, and how often it calls the modules of these names."""
    modules = dict(model.named_modules())
    calls = {name: 0 for name in names if name in modules}

    def counting(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] += 1

        return count

    hooks = [modules[name].register_forward_pre_hook(counting(name)) for name in calls]
    try:
        # What is compiled doesn't call the hooks of what is inside.
        with unchanged(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            result = call.of(model)
            # Put back, too, as whatever hooks keep.
            return result, dict(calls)
    finally:
        for hook in hooks:
            hook.remove()
