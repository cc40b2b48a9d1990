"""What Python objects keep in plain attributes during training: it isn't in checkpoints.

A run that goes on has them as they were made: a counter of a loss, what a module of the user's
remembers. Each checkpoint notes which of them had changed by then, and a run that goes on there
names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...profiles.tasks.optimizers import is_librarys, writes_own_state
from ...profiles.tracing.random_states import GENERATORS
from ...profiles.tracing.remembered import OF_EVERY_MODULE, mark
from ..stage.stage import Stage
from ..weights.outside import OutsideRules

_BY_SCHEDULERS = "_opt_called"
"""What torch's schedulers give an optimizer."""


def plain_attributes(stages: Sequence[Stage]) -> dict[str, Any]:
    """What those of this process have in attributes that are numbers, tensors, random generators,
    or lists and dicts of them: by name, as messages say it, what tells it from another."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for stage in stages:
        own = {id(t) for t in (*stage.piece.module.parameters(), *stage.piece.module.buffers())}
        for path, module in _modules(stage.piece.module, seen):
            found |= _of(f"the model's {path}." if path else "the model's ", module, own)
        optimizer = stage.updates.optimizer
        # What one with methods of its own keeps there was tried before the run (`trial`).
        if not (optimizer is None or is_librarys(optimizer) or writes_own_state(optimizer)):
            every = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0))
            usual = frozenset((*every, _BY_SCHEDULERS))
            own |= {id(p) for group in optimizer.param_groups for p in group["params"]}
            found |= _of(f"the optimizer's (stage {stage.number}) ", optimizer, own, usual)
        for rules in stage.hooks.hooks:
            if isinstance(rules, OutsideRules):
                kept = {id(t) for by in rules.kept.values() for t in by.values()}
                found |= _of(f"the rules' (stage {stage.number}) ", rules.own, kept)
    task = stages[0].piece.task
    found |= _of("the task's ", task)
    for name, value in _attributes(task).items():
        if isinstance(value, nn.Module):
            for path, module in _modules(value, seen):
                # Its buffers aren't the model's.
                where = f"the task's {name}.{path}".rstrip(".") + "."
                own = {id(p) for p in module.parameters()}
                found |= _of(where, module, own)
                buffers = module.named_buffers(recurse=False)
                found |= {
                    where + buffer: mark(tensor, gradients=False) for buffer, tensor in buffers
                }
    return found


def changed(before: Mapping[str, Any], stages: Sequence[Stage]) -> list[str]:
    """Names of those that aren't what they were, ascending."""
    now = plain_attributes(stages)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _modules(root: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules():
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _attributes(thing: object) -> Mapping[str, Any]:
    return getattr(thing, "__dict__", {})


def _of(
    where: str, thing: object, own: Collection[int] = (), usual: Collection[str] = OF_EVERY_MODULE
) -> dict[str, Any]:
    """Of one object. `own`: ids of tensors that checkpoints have; `usual`: what isn't looked at."""
    found = {}
    for name, value in _attributes(thing).items():
        if name in usual:
            continue
        # What has a gradient is computed anew in each forward.
        if (told := mark(value, own, gradients=False)) is not None:
            # Tracing gives them names of its own.
            kind = f" ({type(value).__name__})" if isinstance(value, GENERATORS) else ""
            found[where + name + kind] = told
    return found
