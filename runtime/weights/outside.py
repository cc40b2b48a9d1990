"""The rules of a system from outside at a stage, in the place of those of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.plan import Plan
from ...planner.systems.outside import StageContext, StageRules
from ...planner.systems.variants import Variant
from ...profiles.errors import PluginError
from ...profiles.plugins import call_plugin

_T = TypeVar("_T")


def context_of(plan: Plan, stage: int, updates: int) -> StageContext:
    """What a stage's rules may know. `updates`: that the run will make."""
    return StageContext(
        stage=stage,
        stages=len(plan.stages),
        micro_batches=plan.micro_batches,
        replicas=len(plan.stages[stage].devices),
        updates=updates,
        delay=plan.predicted.stages[stage].version_difference,
    )


class OutsideRules(StageRules):
    """A stage's. Where they fail, PluginError names file and line.

    Attributes:
        own: the plugin's object.
    """

    def __init__(self, rules: StageRules, plugin: str) -> None:
        self.own, self._plugin = rules, plugin

    @property
    def kept(self) -> Mapping[str, Mapping[nn.Parameter, Tensor]]:  # type: ignore[override]
        """Their state, by name and parameter."""
        return self.own.kept

    def rate(self, update: int) -> float:
        """Of the learning rate, what an update has."""
        return self._called("rate", lambda: float(self.own.rate(update)))

    def before_update(self) -> None:
        """The weights are about to change."""
        self._called("before_update", self.own.before_update)

    def after_update(self) -> None:
        """They have changed."""
        self._called("after_update", self.own.after_update)

    def forward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a forward that looks so many updates ahead."""
        self._called("forward_weights", lambda: self.own.forward_weights(updates, into))

    def backward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a backward so many updates after its forward."""
        self._called("backward_weights", lambda: self.own.backward_weights(updates, into))

    def _called(self, hook: str, run: Callable[[], _T]) -> _T:
        return call_plugin(self._plugin, run, hook)


def outside_rules(
    variant: Variant, context: StageContext, parameters: Sequence[nn.Parameter]
) -> OutsideRules | None:
    """A stage's rules; None where the system has none.

    Raises PluginError where they can't be made, for what are no rules, and for a `kept` of
    something else than tensors by parameters of the stage.
    """
    if variant.outside is None or variant.outside.rules is None:
        return None
    make, plugin = variant.outside.rules, variant.outside.plugin
    part = f"rules of {variant.name} for stage {context.stage}"
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
