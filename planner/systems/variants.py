"""The training systems, in one table: how they order work and which weights each pass uses.

Rules are names; `schedules` and `versions` hold what the names mean. Adding a system is a row
here, and at most one small rule there. docs/systems.md explains each row and its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from ...profiles import plugins
from ...profiles.errors import OrderError, PlanError, PluginError
from ...profiles.units import real_number
from .orders import Order
from .outside import Outside

ScheduleRule = Literal[
    "gpipe",
    "1f1b",
    "1f1b-flush",
    "1f1b-micro",
    "1f1b-deep",
    "1f1b-split",
    "nf1b",
    "interleaved",
    "v-shaped",
    "given",
]
BackwardUnit = Literal["micro", "mini"]
ForwardWeights = Literal["latest", "micro-batch-entry", "mini-batch-entry", "predicted", "outside"]
BackwardWeights = Literal["latest", "forward", "predicted", "intermediate", "corrected", "outside"]
Prediction = Literal["", "smoothed-gradient", "optimizer-step"]
Horizon = Literal["", "round-trip", "backward"]
UpdateRule = Literal["optimizer", "nesterov"]
Placement = Literal["any", "loop", "v"]


@dataclass(frozen=True)
class Variant:
    """One training system. Where a row says nothing else, nothing is flushed, all passes run on the
    latest weights, and mini-batches have micro-batches.

    Attributes:
        schedule: rule that makes the list of operations (`schedules`).
        backward_unit: a backward works through one micro-batch, or a whole mini-batch.
        flushes: the pipeline drains before each update.
        forward_weights: "latest" at each forward; vertical synchronisation, at all stages the
            version that stage 0 had when this micro-batch entered there ("micro-batch-entry"),
            or when its mini-batch's first one did ("mini-batch-entry"); or "predicted" from the
            latest.
        backward_weights: the "latest"; the very ones the "forward" used (stashed), which may
            differ from micro-batch to micro-batch; "predicted" from the latest; "intermediate"
            between those of the forward (stashed) and the latest, micro-batch by micro-batch; or
            the latest "corrected" towards those of the forward by the weights' mean change.
        whole_mini_batches: the system knows no micro-batches, N is 1.
        summary: one line for people.
        scratch_copies: copies of the weights besides the versions: where predictions are made; or
            the weights' mean change, and where corrections by it are made.
        micro_batch_per_stage: there must be a micro-batch for each stage, N ≥ S.
        forwards_first: at every stage all forwards of a mini-batch run before its first backward.
        prediction: what weights are predicted with: the optimizer's "smoothed-gradient", or the
            "optimizer-step" that its rule makes of its present state.
        horizon: the version that predictions aim at: the stage's when the mini-batch ends its
            "round-trip", at its backward on stage 0; or when its own "backward" runs. Of each
            micro-batch for itself, where a backward takes one.
        update_rule: the user's "optimizer"; or its "nesterov" form, the gradient discounted.
        split_backward: each backward has two parts, B for the gradients of what the stage received
            and W for those of its weights; W has no messages and may come later.
        placement: which device runs which stage (`placement`); "any": as the plan says.
        half_memory: devices keep about half the activations of 1F1B's fullest.
        rescheduled: its paper divides a late stage's rate while it is being got used to (T1), which
            runs do unless they are told otherwise.
        outside: the rules of a system from outside, which "outside" weights are made by.
        order: what devices run, where a user gives it; the schedule is "given" then.
    """

    name: str
    schedule: ScheduleRule
    backward_unit: BackwardUnit
    summary: str
    flushes: bool = False
    forward_weights: ForwardWeights = "latest"
    backward_weights: BackwardWeights = "latest"
    whole_mini_batches: bool = False
    scratch_copies: int = 0
    micro_batch_per_stage: bool = False
    forwards_first: bool = False
    prediction: Prediction = ""
    horizon: Horizon = ""
    update_rule: UpdateRule = "optimizer"
    split_backward: bool = False
    placement: Placement = "any"
    half_memory: bool = False
    rescheduled: bool = False
    order: Order | None = None
    outside: Outside | None = None

    @property
    def recompute_refusal(self) -> str:
        """Why stages can't compute their activations again before a backward; empty: they can."""
        if self.prediction or self.forward_weights == "outside":
            return (
                f"{self.name} predicts weights and doesn't keep them, so activations can't be "
                "computed again"
            )
        if self.split_backward:
            return (
                f"{self.name} postpones weight gradients, which need what a backward would have "
                "computed again; plan with --recompute off"
            )
        return ""

    @property
    def is_plain_training(self) -> bool:
        """Whether weights are those of plain training: it flushes, and nobody changes updates."""
        outside = self.outside or Outside()
        own_optimizer = self.update_rule == "optimizer" and not outside.acts
        return self.flushes and own_optimizer

    @property
    def keeps_scratch(self) -> bool:
        """Whether the memory that weights are made in stays from one backward to the next."""
        return self.scratch_copies > 0 or self.outside is not None

    def places(self, devices: int) -> int:
        """Micro-batches of its two stages that a device of a V keeps at once at the most: 2·D, as
        1F1B's fullest; or half of that and one more of each stage, ⌈(D + 1) / 2⌉ of each, as in the
        schedules that the authors of 2405.15362 published."""
        return 2 * (devices // 2 + 1 if self.half_memory else devices)

    @property
    def synchronises(self) -> bool:
        """Whether one pass uses the same version at all stages: vertical synchronisation."""
        return self.forward_weights in ("micro-batch-entry", "mini-batch-entry")

    @property
    def stashes(self) -> bool:
        """Whether the forward's weights are kept for the backward."""
        return self.backward_weights in ("forward", "intermediate")

    def makes_weights_on(self, stage: int, stages: int) -> bool:
        """Whether this stage predicts or corrects weights over any update.

        The last one's backward follows its forward at once. But to the end of the round trip it
        makes ⌊s/2⌋ updates more, with S − s mini-batches in flight (SpecTrain, section 3.2). In an
        order that a user gives, updates may come anywhere.
        """
        if not self.scratch_copies or self.order is not None:
            return self.scratch_copies > 0
        return stage < stages - 1 or (self.horizon == "round-trip" and stage > 1)

    def least_micro_batches(self, stages: int) -> int:
        """The fewest micro-batches, N, that so many stages can have."""
        return stages if self.micro_batch_per_stage else 1


_TABLE = (
    Variant(
        name="timeprest",
        schedule="nf1b",
        backward_unit="mini",
        forward_weights="micro-batch-entry",
        summary="nF1B, backward on the latest weights, nothing stashed for it (2410.14312)",
    ),
    Variant(
        name="timeprest-stashed",
        schedule="nf1b",
        backward_unit="mini",
        forward_weights="micro-batch-entry",
        backward_weights="forward",
        summary="timeprest with weights stashed for the backward (FGCS 178, 108260: Variant 1)",
    ),
    Variant(
        name="pipedream-unstashed",
        schedule="1f1b",
        backward_unit="mini",
        forward_weights="micro-batch-entry",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, nothing stashed (FGCS 178, 108260: Variant 2)",
    ),
    Variant(
        name="v-timeprest",
        schedule="nf1b",
        backward_unit="mini",
        summary="nF1B, latest weights in every pass, one copy (2509.23241)",
    ),
    Variant(
        name="i-timeprest",
        schedule="nf1b",
        backward_unit="mini",
        forward_weights="micro-batch-entry",
        backward_weights="intermediate",
        summary="nF1B, backward between the forward's weights and the latest (2509.23241)",
    ),
    Variant(
        name="pipedream",
        schedule="1f1b",
        backward_unit="mini",
        backward_weights="forward",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, weights stashed for the backward (1806.03377)",
    ),
    Variant(
        name="pipedream-vertical-sync",
        schedule="1f1b",
        backward_unit="mini",
        forward_weights="mini-batch-entry",
        backward_weights="forward",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, each on one version at all stages (1806.03377)",
    ),
    Variant(
        name="pipedream-2bw",
        schedule="1f1b-micro",
        backward_unit="micro",
        forward_weights="mini-batch-entry",
        backward_weights="forward",
        summary="1F1B over micro-batches, never flushed, two versions (2006.09503)",
        micro_batch_per_stage=True,
    ),
    Variant(
        name="pipemare",
        schedule="1f1b-deep",
        backward_unit="micro",
        backward_weights="corrected",
        summary="1F1B over micro-batches, never flushed, no stash, backward corrected (1910.05124)",
        scratch_copies=2,
        rescheduled=True,
    ),
    Variant(
        name="pipedream-flush",
        schedule="1f1b-flush",
        backward_unit="micro",
        flushes=True,
        summary="1F1B over micro-batches, flush: plain mini-batch training (2006.09503)",
    ),
    Variant(
        name="spectrain",
        schedule="1f1b",
        backward_unit="mini",
        forward_weights="predicted",
        backward_weights="predicted",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, weights predicted from momentum (1809.02839)",
        scratch_copies=1,
        prediction="smoothed-gradient",
        horizon="round-trip",
    ),
    Variant(
        name="pipeoptim",
        schedule="1f1b",
        backward_unit="mini",
        forward_weights="predicted",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, forward predicted by the optimizer's rule (2312.00839)",
        scratch_copies=1,
        prediction="optimizer-step",
        horizon="backward",
    ),
    Variant(
        name="pipedream-nesterov",
        schedule="1f1b",
        backward_unit="mini",
        backward_weights="forward",
        whole_mini_batches=True,
        summary="pipedream with delay-corrected Nesterov momentum (2505.01099)",
        update_rule="nesterov",
    ),
    Variant(
        name="gpipe",
        schedule="gpipe",
        backward_unit="micro",
        flushes=True,
        summary="all forwards, all backwards, flush: plain mini-batch training (1811.06965)",
        forwards_first=True,
    ),
    Variant(
        name="zb-h1",
        schedule="1f1b-split",
        backward_unit="micro",
        flushes=True,
        summary="1F1B, flush, weight gradients postponed to fill the bubble (2401.10241)",
        split_backward=True,
    ),
    Variant(
        name="interleaved-1f1b",
        schedule="interleaved",
        backward_unit="micro",
        flushes=True,
        summary="1F1B over several stages of each device in turn, flush (2104.04473)",
        placement="loop",
    ),
    Variant(
        name="zb-v",
        schedule="v-shaped",
        backward_unit="micro",
        flushes=True,
        summary="a V of stages, flush, weight gradients fill the bubble (2401.10241, 2405.15362)",
        split_backward=True,
        placement="v",
    ),
    Variant(
        name="v-half",
        schedule="v-shaped",
        backward_unit="micro",
        flushes=True,
        summary="zb-v with about half of 1F1B's activations, and some bubble (2405.15362)",
        split_backward=True,
        placement="v",
        half_memory=True,
    ),
)

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _TABLE}

_ALSO_CALLED = {
    "1f1b": "pipedream-flush",
    "dapple": "pipedream-flush",
    "2bw": "pipedream-2bw",
    "fill-drain": "gpipe",
    "interleaved": "interleaved-1f1b",
    "zero-bubble": "zb-h1",
    "zbv": "zb-v",
}
"""What papers and other engines call systems of the table."""


def variant_named(name: str) -> Variant:
    """The system of this name: of the table, or of a plugin at hand.

    Raises PlanError listing the known ones, PluginError for a plugin that fails.
    """
    if name not in VARIANTS:
        for plugin in (*plugins.plugins_given(), *plugins.packages()):
            load_plugin(plugin)
    try:
        return VARIANTS[name]
    except KeyError:
        meant = _ALSO_CALLED.get(name.lower())
        hint = f"; {meant} is this one's name here" if meant else ""
        raise PlanError(f"unknown system {name!r}{hint}; known are {', '.join(VARIANTS)}") from None


def under_order(variant: Variant, order: Order) -> Variant:
    """The system with its weight rules as they are and an order in the place of its own.

    Systems of whole mini-batches run on several micro-batches by the same rules, each micro-batch
    with the version that its own forward finds (our reading); but those that predict don't.

    Raises OrderError where its backwards aren't of such operations.
    """
    micro, n = variant.backward_unit == "micro", order.micro_batches
    allowed = [v for v in _TABLE if v.flushes or not order.split]
    if n > 1:
        its_unit = "micro" if order.micro else "mini"
        allowed = [v for v in allowed if v.backward_unit == its_unit and not v.prediction]
    fitting = ", ".join(v.name for v in allowed)
    if order.micro != micro and n > 1:
        each, its = ("micro-batch", "mini-batch") if order.micro else ("mini-batch", "micro-batch")
        raise OrderError(
            f"{order.where}: each backward takes a {each}, in {variant.name} a {its}; such an "
            f"order runs in {fitting}"
        )
    if order.split and not variant.flushes:
        raise OrderError(
            f"{order.where}: its backwards have two parts, which {variant.name} doesn't know; such "
            f"an order runs in {fitting}"
        )
    if variant.prediction and n > 1:
        raise OrderError(
            f"{order.where}: has {n} micro-batches in a mini-batch; {variant.name} predicts for "
            "whole ones: give an order with one"
        )
    return replace(
        variant,
        schedule="given",
        order=replace(order, micro=micro),
        whole_mini_batches=variant.whole_mini_batches and n == 1,
        forwards_first=False,
        split_backward=order.split,
        placement="any",
        half_memory=False,
    )


# Systems from outside (`outside`) ----------------------------------------------------------------

_LOADED: dict[str, tuple[Variant, ...]] = {}

_CHOICES: Mapping[str, Sequence[Any]] = {
    "schedule": [rule for rule in get_args(ScheduleRule) if rule != "given"],
    "backward_unit": get_args(BackwardUnit),
    "forward_weights": get_args(ForwardWeights),
    "backward_weights": get_args(BackwardWeights),
    "prediction": get_args(Prediction),
    "horizon": get_args(Horizon),
    "update_rule": get_args(UpdateRule),
    "placement": get_args(Placement),
    **dict.fromkeys(("flushes", "whole_mini_batches", "micro_batch_per_stage"), (False, True)),
    **dict.fromkeys(("forwards_first", "split_backward", "half_memory"), (False, True)),
}

_FREE: Mapping[str, set[Any]] = {
    "backward_unit": set(),
    "split_backward": set(),
    "flushes": set(),
    "whole_mini_batches": {True},
    "placement": set(),
    "forwards_first": {False},
    "half_memory": {False},
}
"""Fields that a schedule goes by, and the values that every schedule takes."""

_OF_SCHEDULE: Mapping[str, Mapping[str, set[Any]]] = {
    schedule: {
        name: free | {getattr(row, name) for row in _TABLE if row.schedule == schedule}
        for name, free in _FREE.items()
    }
    for schedule in _CHOICES["schedule"]
}
"""Per schedule the values that go with it: those, and what the table's own rows have."""


def load_plugin(plugin: str) -> tuple[Variant, ...]:
    """Add the systems of a plugin to the table, if it has any; a plugin is loaded once.

    Args:
        plugin: a file, or "package NAME" with the name of an entry point.

    Raises PluginError: it isn't there, fails, or has a row that can't be.
    """
    key = plugin if plugin.startswith(plugins.PACKAGE) else str(Path(plugin).resolve())
    module = plugins.module_of(plugin)
    if key not in _LOADED:
        try:
            rows = _rows_of(plugin, module)
        except PluginError:
            # A file that is corrected can be loaded again.
            plugins.forget(plugin)
            raise
        VARIANTS.update((row.name, row) for row in rows)
        _LOADED[key] = tuple(rows)
    return _LOADED[key]


def _rows_of(plugin: str, module: Any) -> list[Variant]:
    """A plugin's rows, all of them looked at before any is added. Raises PluginError."""
    systems, checksum = getattr(module, "SYSTEMS", []), plugins.checksum_of(module)
    if not isinstance(systems, (list, tuple)) or (hasattr(module, "SYSTEMS") and not systems):
        raise PluginError(f"{plugin}: SYSTEMS is no list of rows (docs/plugins.md)")
    rows = [_checked(plugin, checksum, k, row) for k, row in enumerate(systems)]
    for k, row in enumerate(rows):
        if row.name in VARIANTS:
            raise PluginError(f"{plugin}: there is a system {row.name!r} already")
        if any(row.name == other.name for other in rows[:k]):
            raise PluginError(f"{plugin}: SYSTEMS[{k}].name: {row.name!r} is another row's, too")
    return rows


def _checked(plugin: str, checksum: str, number: int, row: object) -> Variant:
    """A plugin's row, which says where it is from. Raises PluginError."""
    where = f"{plugin}: SYSTEMS[{number}]"
    if not isinstance(row, Variant):
        raise PluginError(f"{where}: is a {type(row).__name__}; give a Variant")
    for name, choices in _CHOICES.items():
        value = getattr(row, name)
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise PluginError(f"{where}.{name}: {value!r}: give one of {known}")
    if not isinstance(row.name, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", row.name):
        raise PluginError(f"{where}.name: {row.name!r}: give small letters, digits and -")
    if row.name == "all":
        raise PluginError(f"{where}.name: 'all' stands for every system; give another name")
    if not isinstance(row.summary, str) or "\n" in row.summary:
        raise PluginError(f"{where}.summary: {row.summary!r}: give one line of text")
    for name, wanted in _OF_SCHEDULE[row.schedule].items():
        value = getattr(row, name)
        if value not in wanted and "any" not in wanted:
            raise PluginError(
                f"{where}.{name}: {value!r} doesn't go with the schedule "
                f"{row.schedule!r}; give {' or '.join(map(repr, sorted(wanted)))}"
            )
    outside = _checked_outside(where, row.outside)
    _check_weights(where, row, outside)
    return replace(row, order=None, outside=replace(outside, plugin=plugin, checksum=checksum))


def _checked_outside(where: str, outside: object) -> Outside:
    if outside is None:
        return Outside()
    if not isinstance(outside, Outside):
        raise PluginError(f"{where}.outside: is a {type(outside).__name__}; give an Outside")
    for name in ("rules", "update", "copies"):
        part = getattr(outside, name)
        if not callable(part) and (part is not None or name == "copies"):
            raise PluginError(f"{where}.outside.{name}: {part!r} can't be called; give a function")
    passes = real_number(outside.passes)
    if passes is None or not 0 <= passes < inf:
        raise PluginError(f"{where}.outside.passes: {outside.passes!r}: give a number from 0")
    return replace(outside, passes=float(passes))


def _check_weights(where: str, row: Variant, outside: Outside) -> None:
    """What weights of passes need for being made."""
    passes = {"forward": row.forward_weights, "backward": row.backward_weights}
    made = [name for name, weights in passes.items() if weights == "outside"]
    if made and outside.rules is None:
        raise PluginError(f"{where}.outside: has no rules to make the {made[0]}'s weights")
    if row.flushes and (set(passes.values()) != {"latest"} or row.prediction or row.horizon):
        raise PluginError(f"{where}: flushes, so all its passes run on the latest weights")
    predicted = [name for name, weights in passes.items() if weights == "predicted"]
    if predicted and not row.prediction:
        raise PluginError(
            f"{where}.prediction: say what the {predicted[0]}'s weights are predicted with"
        )
    aiming = ["forward"] if "forward" in made else predicted
    if aiming and not row.horizon:
        raise PluginError(f"{where}.horizon: say what the {aiming[0]}'s weights aim at")
    if row.stashes and row.forward_weights in ("predicted", "outside"):
        raise PluginError(
            f"{where}.backward_weights: {row.backward_weights!r} needs the forward's own weights; "
            f"those that are {row.forward_weights!r} aren't kept"
        )
    if row.backward_weights == "corrected" and outside.rules is not None:
        raise PluginError(
            f"{where}.outside.rules: 'corrected' weights have rules of their own, beside which no "
            "others act; give backward_weights 'outside'"
        )
    least = 2 if "corrected" in passes.values() else min(len(predicted), 1)
    copies: object = row.scratch_copies
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < least:
        raise PluginError(
            f"{where}.scratch_copies: {copies!r}: give a whole number from {least}"
            + " for the weights that are made" * (least > 0)
        )
