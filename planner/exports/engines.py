"""What other engines can express of a plan; the rest is refused, in a line that says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...profiles.errors import PlanError
from ..plan import Plan
from ..recordings.recording import lanes_of
from ..systems.placement import pattern_of
from ..systems.variants import VARIANTS, ScheduleRule

UNTIE = (
    "and there nobody sums their gradients; untie the model, as gpt2:tied=0 is, or export it --to "
    "megatron, which sums them"
)
"""Of stages that share parameters. One stage that has them all would often be the only one."""

MASKS = "or export it --to megatron, whose stages each make what needs no gradient, as masks do"
"""Of what every block takes: no pin keeps those together."""


@dataclass(frozen=True)
class EngineFiles:
    """A plan as an engine reads it.

    Attributes:
        files: the text of each, by its name.
        notes: a line each for whoever uses them; ``{folder}`` stands for where they are.
    """

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


TORCHS: Mapping[ScheduleRule, str] = {
    "gpipe": "GPipe",
    "1f1b-flush": "1F1B",
    "1f1b-split": "",
    "interleaved": "",
    "v-shaped": "",
    "given": "",
}
"""Of torch, and of who builds on it: without a class, a schedule goes as CSV."""


@dataclass(frozen=True)
class Engine:
    """What an engine can do.

    Attributes:
        name: for messages.
        schedules: the sequences of operations that it runs, each under its own name for it.
        placements: the patterns of several stages on each device that it has.
        sums_ties: whether it sums the gradients of parameters that several stages use.
        one_device: whether stages of a single device are a pipeline there.
        makes_masks: whether each stage makes what needs no gradient, like masks and rotations by
            positions, from the model's inputs: so that it needn't be sent.
    """

    name: str
    schedules: Mapping[ScheduleRule, str]
    placements: frozenset[str] = frozenset()
    sums_ties: bool = False
    one_device: bool = False
    makes_masks: bool = False

    def refuse(self, why: str) -> PlanError:
        """The error for what the engine can't express."""
        return PlanError(f"{self.name} can't run this plan: {why}")

    def class_of(self, plan: Plan) -> str:
        """Its name for the plan's schedule where a class of torch's runs that; empty: none does."""
        name = "" if plan.placement else self.schedules[plan.system.schedule]
        each = plan.micro_batches // len(plan.stages[0].devices)
        # It wants a micro-batch for each stage.
        return "" if name == "1F1B" and each < len(plan.stages) else name

    def check(self, plan: Plan) -> None:
        """Raise PlanError, naming the first thing that the engine can't express."""
        if len(plan.stages) == 1:
            raise self.refuse("it has one stage, so there is no pipeline")
        if len(ranks_of(plan)) == 1 and not self.one_device:
            raise self.refuse(
                f"all its {len(plan.stages)} stages are on one device, and there a pipeline has "
                "two at least; plan with --devices 2 or more"
            )
        self._check_system(plan)
        self._check_devices(plan)
        self._check_stages(plan)

    def _check_system(self, plan: Plan) -> None:
        system = plan.system
        rows = [v for v in VARIANTS.values() if v.is_plain_training]
        names = [v.name for v in rows if v.schedule in self.schedules]
        known = ", ".join(names)
        if system.order is not None and system.flushes and system.schedule not in self.schedules:
            other = "" if system.name in names else f", and plan with --variant {known}"
            raise self.refuse(
                "its devices run an order that was given, and there schedules are built in; leave "
                f"--order out{other}"
            )
        if system.schedule not in self.schedules or not system.flushes:
            why = (
                f"it has no schedule like {system.name}'s"
                if system.flushes
                else f"{system.name} never flushes, and it flushes before each update"
            )
            raise self.refuse(f"{why}; plan with --variant {known}")
        if not system.is_plain_training:
            outside = system.outside.plugin if system.outside is not None else ""
            raise self.refuse(
                f"{system.name} has rules of its own for updates ({outside}), and there an update "
                f"is the optimizer's alone; plan with --variant {known}"
            )
        if system.order is not None and not system.order.alike:
            raise self.refuse(
                "the order given differs from mini-batch to mini-batch, and there all are alike"
            )
        if plan.update_every > 1:
            raise self.refuse(
                f"its updates are made of {plan.update_every} mini-batches each; plan with a "
                "larger --mini-batch instead of --update-every"
            )
        if plan.mini_batch % plan.micro_batches:
            raise self.refuse(
                f"{plan.micro_batches} micro-batches don't divide its mini-batch of "
                f"{plan.mini_batch} samples, and there they are all alike"
            )

    def _check_devices(self, plan: Plan) -> None:
        replicas = [len(stage.devices) for stage in plan.stages]
        if len(set(replicas)) > 1:
            raise self.refuse(
                f"its stages have {', '.join(map(str, replicas))} replicas, and there each has as "
                "many; plan with --replicas off"
            )
        pattern = pattern_of(plan.placement, len(plan.stages))
        if plan.placement and pattern not in self.placements:
            can = " or ".join(f"--placement {name}" for name in sorted(self.placements))
            raise self.refuse(
                f"its devices have several stages, placed {pattern}; plan with "
                f"{can or '--stages-per-device 1'}"
            )
        per_rank = {len(stages) for stages in ranks_of(plan)}
        if len(per_rank) > 1:
            raise self.refuse(
                "its devices have different numbers of stages, and there each has as many; edit "
                "the plan, or plan with another number of --stages"
            )

    def _check_stages(self, plan: Plan) -> None:
        for edge in plan.edges:
            if edge.target > edge.source + 1 and (edge.needs_grad or not self.makes_masks):
                other = "" if edge.needs_grad else f", {MASKS}"
                raise self.refuse(
                    f"tensor {edge.tensor!r} skips from stage {edge.source} to stage "
                    f"{edge.target}, and there stages send to the next one alone; plan fewer "
                    f"stages, or keep its layers together with --pin{other}"
                )
        for s, stage in enumerate(plan.stages):
            if stage.recompute:
                raise self.refuse(
                    f"stage {s} computes activations again, and there that can't be said of a "
                    "stage; plan with --recompute off"
                )
        if not self.sums_ties:
            self._check_ties(plan)

    def _check_ties(self, plan: Plan) -> None:
        on_one_device = {s for d in plan.predicted.devices for tie in d.ties for s in tie.stages}
        for s, stage in enumerate(plan.predicted.stages):
            # What replicas don't sum is of parameters that other stages use too.
            devices = plan.stages[s].devices
            own_s = plan.cluster.all_reduce_s(devices, stage.parameter_bytes)
            copied = stage.all_reduce_s > own_s * (1 + 1e-6)
            if s in on_one_device or copied:
                raise self.refuse(f"stage {s} shares parameters with another stage, {UNTIE}")


def precision_notes(plan: Plan) -> tuple[str, ...]:
    """A line for engines whose own settings say what forwards run under, where it matters."""
    if plan.profile.autocast is None:
        return ()
    return (
        f"it was planned for forwards under autocast ({plan.profile.autocast}), which isn't "
        "written: the engine's own settings say the precision",
    )


def ranks_of(plan: Plan) -> list[list[int]]:
    """For each rank of the pipeline, its stages; replicas are one rank."""
    return [list(lane.stages) for lane in lanes_of(plan) if not lane.replica]
