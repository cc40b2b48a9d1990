"""Weight rules of a system from outside at a stage, in the place of the table's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.systems.hooks import HOOKS, StageHooks, overrides
from ...planner.systems.outside import StageContext, StageRules
from ...planner.systems.variants import Variant
from ...profiles.errors import PluginError
from ...profiles.plugins import call_plugin
from ..prepare.prepared import Prepared
from .delays import delay_of
from .hooked import HookedStage


def context_at(prepared: Prepared, s: int) -> StageContext:
    """What a system from outside may know of a stage."""
    plan = prepared.plan
    return StageContext(
        stage=s,
        stages=len(plan.stages),
        micro_batches=plan.micro_batches,
        replicas=len(plan.stages[s].devices),
        updates=sum(segment.updates for segment in prepared.segments),
        delay=delay_of(plan, s),
    )


class OutsideRules(StageHooks):
    """A stage's rules from outside. Where one of its hooks fails, PluginError names file and line.

    Attributes:
        own: the plugin's object.
    """

    def __init__(self, rules: StageRules, plugin: str) -> None:
        self.own, self._plugin, self.makes = rules, plugin, rules.makes
        for name in HOOKS:
            if name != "rate" and (overrides(rules, name) or name in _WEIGHTS):
                setattr(self, name, partial(self._called, name))

    @property
    def kept(self) -> Mapping[str, MutableMapping[nn.Parameter, Tensor]]:  # type: ignore[override]
        """Their state, by name and parameter."""
        return self.own.kept

    def rate(self, update: int) -> float:
        return call_plugin(self._plugin, lambda: float(self.own.rate(update)), "rate")

    def _called(self, hook: str, *arguments: Any) -> Any:
        return call_plugin(self._plugin, lambda: getattr(self.own, hook)(*arguments), hook)


_WEIGHTS = ("forward_weights", "backward_weights")
"""Hooks that a row may ask for where its rules don't have them."""


def outside_rules(stage: HookedStage) -> OutsideRules | None:
    """A stage's rules; None where the system has none, or nothing is trained.

    Raises PluginError where they can't be made, for what are no rules, and for a `kept` of
    something else than tensors by parameters of the stage.
    """
    variant, parameters = stage.variant, stage.updated
    if variant.outside is None or variant.outside.rules is None or stage.optimizer is None:
        return None
    plugin, make = variant.outside.plugin, variant.outside.rules
    context = context_at(stage.prepared, stage.number)
    part = f"rules of {variant.name} for stage {stage.number}"
    rules = call_plugin(plugin, lambda: make(context, parameters), part)
    if not isinstance(rules, StageRules):
        raise PluginError(f"{plugin}: {part}: gives a {type(rules).__name__}; give a StageRules")
    _check_kept(getattr(rules, "kept", None), parameters, f"{plugin}: {part}: kept")
    return OutsideRules(rules, plugin)


def outside_update(variant: Variant, context: StageContext, optimizer: Optimizer) -> Optimizer:
    """The optimizer that a system's own `update` makes of the user's.

    Raises PluginError where it fails, or gives something else.
    """
    assert variant.outside is not None
    assert variant.outside.update is not None
    make, plugin = variant.outside.update, variant.outside.plugin
    part = f"update of {variant.name} for stage {context.stage}"
    found: object = call_plugin(plugin, lambda: make(context, optimizer), part)
    if not isinstance(found, Optimizer):
        raise PluginError(
            f"{plugin}: {part}: gives a {type(found).__name__}; return the torch.optim.Optimizer "
            "to step"
        )
    return found


def _check_kept(kept: object, parameters: Sequence[nn.Parameter], where: str) -> None:
    """Checkpoints name a tensor by its parameter, and go through all of them."""
    if not isinstance(kept, dict):
        raise PluginError(
            f"{where} is a {type(kept).__name__}; give a dict of a name → parameter → tensor"
        )
    own = {id(p) for p in parameters}
    for name, state in kept.items():
        if not isinstance(name, str) or not isinstance(state, dict):
            raise PluginError(
                f"{where} has {name!r} with a {type(state).__name__}; give a name, with a dict of "
                "parameter → tensor"
            )
        for p, tensor in state.items():
            if id(p) not in own:
                shape = f" of shape {tuple(p.shape)}" if isinstance(p, Tensor) else ""
                raise PluginError(
                    f"{where}[{name!r}] has a {type(p).__name__}{shape}, which isn't one of the "
                    "parameters that the rules were given"
                )
            if not isinstance(tensor, Tensor):
                raise PluginError(
                    f"{where}[{name!r}] has a {type(tensor).__name__} for a parameter; give a "
                    "tensor"
                )
