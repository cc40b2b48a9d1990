"""The rules of a system from outside at a stage, in the place of those of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...planner.plan import Plan
from ...planner.systems.outside import StageContext, StageRules
from ...planner.systems.variants import Variant
from ...profiles.errors import PluginError
from ..prepare.devices import dense_bytes


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


class OutsideRules:
    """A stage's, as `Drift` is to its policy."""

    def __init__(self, rules: StageRules) -> None:
        self.rules = rules

    @property
    def kept(self) -> Mapping[str, Mapping[nn.Parameter, Tensor]]:
        """Its state, by name and parameter."""
        return self.rules.kept

    @property
    def nbytes(self) -> int:
        """Bytes of that."""
        return sum(dense_bytes(t) for kept in self.rules.kept.values() for t in kept.values())

    def rate(self, update: int) -> float:
        """Of the learning rate, what an update has."""
        return float(self.rules.rate(update))

    def before_update(self) -> None:
        """The weights are about to change."""
        self.rules.before_update()

    def after_update(self) -> None:
        """They have changed."""
        self.rules.after_update()

    def correct(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a backward so many updates after its forward."""
        self.rules.backward_weights(updates, into)

    def predict(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a forward that looks so many updates ahead."""
        self.rules.forward_weights(updates, into)


def outside_rules(
    variant: Variant, context: StageContext, parameters: Sequence[nn.Parameter]
) -> OutsideRules | None:
    """A stage's rules; None where the system has none.

    Raises PluginError for what are no rules.
    """
    if variant.outside is None or variant.outside.rules is None:
        return None
    rules = variant.outside.rules(context, parameters)
    if not isinstance(rules, StageRules):
        raise PluginError(
            f"{variant.outside.plugin}: rules of {variant.name} gives a {type(rules).__name__}; "
            "give a StageRules"
        )
    return OutsideRules(rules)
