"""A training that is tried before a target is measured: what it is of, and what it finds.

It needs weight versions and optimizers of stages, and lives in `runtime/verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tasks.hooks import RunLength
from ..tasks.samples import pick, rows_of
from ..tasks.task import Task
from ..tracing.call import Call
from ..tracing.graph import TracedModel, shared_state
from ..tracing.shapes import bound_by_values
from .bench import Bench
from .checks import place_call, usual_length, warn

_FEW = 4

TRIAL_MICRO_BATCHES = 2
"""Of each of a trial's mini-batches."""


@dataclass(frozen=True)
class TrialCase:
    """A model and its graph, before it is measured or trained.

    Attributes:
        name: of the target.
        model: in training mode; the graph has its parameters and modules.
        micro_batches: of a mini-batch, each inputs and target.
        bound: positions of layers that no plan parts.
        length: of the run that schedulers are told of.
        overwrites: parameters may be written into between a forward and its backward.
        cuts: for each of two mini-batches the layers' positions piece by piece; None: drawn ones.
    """

    name: str
    task: Task
    model: nn.Module
    graph: TracedModel
    micro_batches: tuple[tuple[Call, Any], ...]
    bound: Collection[tuple[int, ...]]
    length: RunLength
    autocast: torch.dtype | None
    device: torch.device
    overwrites: bool = True
    cuts: tuple[tuple[tuple[int, ...], ...], ...] | None = None


@dataclass(frozen=True)
class TrialReport:
    """What a trial found."""

    lines: tuple[str, ...] = ()
    """To warn of."""
    unversioned: tuple[str, ...] = ()
    """Parameters that a backward takes as memory has them then, by name."""


Trial = Callable[[TrialCase], TrialReport]
"""Raises TargetError for a model that pieces would train otherwise."""


def trial_samples(
    call: Call, expected: Any, place: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[tuple[Call, Any], ...]:
    """A mini-batch in micro-batches, as `TrialCase` has them, each tensor put where it is needed.
    Raises TargetError where it can't be cut."""
    rows = rows_of(call.tensors, "train")
    each = rows // TRIAL_MICRO_BATCHES
    found = []
    for i in range(TRIAL_MICRO_BATCHES):
        part = slice(i * each, (i + 1) * each)
        cut = call.with_tensors([tensor[part].clone() for tensor in call.tensors])
        found.append(place_call(place, cut, pick(expected, part, rows)))
    return tuple(found)


def tried(
    bench: Bench, trial: Trial | None, call_of: Callable[[int], tuple[Call, Any]]
) -> tuple[str, ...]:
    """Find layers whose shapes depend on values, then make the trial. Returns its `unversioned`."""
    if bench.platform.computed:
        return ()
    bench.progress("shapes that depend on values", 0, 0)
    # Of a few samples hardly all have the same value.
    case = next((case for case in bench.cases if case.size >= _FEW), bench.cases[-1])
    bench.by_values = bound_by_values(case.traced, case.inputs)
    if trial is None or bench.target.task is None:
        return ()
    bench.progress("training two mini-batches", 0, 0)
    tried = trial(_trial_case(bench, bench.target.task, call_of))
    for line in tried.lines:
        warn(line)
    return tried.unversioned


def _trial_case(bench: Bench, task: Task, call_of: Callable[[int], tuple[Call, Any]]) -> TrialCase:
    """Of as few samples as will do, where the graph takes any number of them."""
    case, platform = bench.cases[0], bench.platform
    free = bench.traced.only_size is None and bench.batch_size > _FEW
    size = _FEW if free else case.size
    samples = trial_samples(*call_of(size * TRIAL_MICRO_BATCHES), platform.place)
    shared = shared_state(case.traced, case.saved.rewritten)
    return TrialCase(
        name=bench.target.name,
        task=task,
        model=bench.model,
        graph=case.traced,
        micro_batches=samples,
        bound=bench.bound | bench.by_values | (set(shared.tied) - set(shared.copyable)),
        length=usual_length(bench, task),
        autocast=platform.autocast,
        device=platform.device,
    )
