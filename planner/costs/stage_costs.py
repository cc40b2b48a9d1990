"""Seconds and bytes of a stage: sums over its layers, storages that they share, its weight
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import msgspec

from ...profiles.errors import PlanError
from ...profiles.profile import (
    Edge,
    KindTimes,
    Layer,
    Measurement,
    OperationCost,
    OptimizerCost,
    Profile,
)
from ...profiles.sizes import measured_at
from ..systems.variants import Variant
from ..systems.versions import check_versions
from .recomputation import KeptStorages
from .tied_parameters import NOTHING, BytesElsewhere, copied_bytes

RECEIVES_AHEAD = {"F": 2, "B": 1}
"""Messages of each kind and link that a stage has buffers posted for, ahead of their use."""


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of one stage for one micro-batch size, on a device of speed 1.

    Attributes:
        forward_s, backward_s: of one micro-batch; the last stage's hold the loss, and forwards what
            running one costs besides its layers.
        weight_s: its weight part, where the backward is split (`weight_part_s`).
        matrix_bytes: of its parameters, what is matrices of hidden layers.
        split_s: how much longer both parts take than the backward in one.
        postponed_bytes: gradients that wait for the weight part of one micro-batch.
        kept_bytes: what one micro-batch in flight keeps for its backward.
        kept_storages: names of the storages among them that other layers may keep too.
        recompute_s, rebuilt_bytes: of layers that are computed again before the backward: their
            forwards, and what these keep besides.
        workspace_bytes: largest working set of any of its layers.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parameter_bytes: int
    buffer_bytes: int
    kept_bytes: int
    kept_storages: frozenset[str]
    workspace_bytes: int
    weight_s: float = 0.0
    split_s: float = 0.0
    postponed_bytes: int = 0
    matrix_bytes: int = 0
    recompute_s: float = 0.0
    rebuilt_bytes: int = 0


@dataclass(frozen=True)
class Transfer:
    """A tensor that one stage sends to another for each micro-batch, in bytes.

    Attributes:
        nbytes: for one micro-batch; its gradient is as large where it needs one.
        storage: the memory behind it, on the stage that makes it.
    """

    tensor: str
    source: int
    target: int
    nbytes: int
    needs_grad: bool
    storage: str = ""


def at(measurements: Sequence[Measurement], micro_batch: int) -> Measurement:
    """A layer's measurement at a micro-batch size, by linear interpolation between measured sizes.

    Raises:
        PlanError: the size lies outside what was measured; nothing is extrapolated.
    """
    if not measurements[0].micro_batch <= micro_batch <= measurements[-1].micro_batch:
        raise PlanError(
            f"micro-batches of {micro_batch} samples: the profile measured "
            f"{measurements[0].micro_batch} to {measurements[-1].micro_batch}; "
            f"profile again with --micro-batch-sizes that reach {micro_batch}"
        )
    return measured_at(measurements, micro_batch)


def in_a_stage(measured: Measurement, operation: OperationCost | None) -> Measurement:
    """A layer's measurement as a stage runs it: with the seconds of saved-tensor hooks."""
    if operation is None or not measured.saved_tensors:
        return measured
    return msgspec.structs.replace(
        measured,
        forward_s=measured.forward_s + measured.saved_tensors * operation.pack_s,
        backward_s=measured.backward_s + measured.saved_tensors * operation.unpack_s,
    )


UNMEASURED_WEIGHT_SHARE = 0.5
"""How much of a layer's backward is its weight part, where the profile doesn't say."""


def weight_part_s(layer: Layer, measured: Measurement) -> float:
    """Seconds of the weight part W of a layer's split backward.

    Where that wasn't measured, what its inputs' gradients alone don't take; where those weren't
    either, half of the backward of layers that have weights.
    """
    if measured.backward_weight_s is not None:
        return measured.backward_weight_s
    if measured.backward_input_s is not None:
        return max(measured.backward_s - measured.backward_input_s, 0.0)
    return measured.backward_s * UNMEASURED_WEIGHT_SHARE if layer.parameter_bytes else 0.0


def input_part_s(layer: Layer, measured: Measurement) -> float:
    """Seconds of the input part B of a layer's split backward."""
    if measured.backward_input_s is not None:
        return measured.backward_input_s
    return measured.backward_s - weight_part_s(layer, measured)


def sized(fixed_bytes: int, bytes_per_sample: float, micro_batch: int) -> int:
    """Bytes of a tensor for a micro-batch of this size."""
    return round(fixed_bytes + bytes_per_sample * micro_batch)


def unmeasured_weight_parts(profile: Profile) -> tuple[str, ...]:
    """Names of layers whose weight part is assumed to be half of the backward."""
    return tuple(
        layer.name
        for layer in profile.layers
        if layer.parameter_bytes and any(m.backward_input_s is None for m in layer.measurements)
    )


@dataclass(frozen=True)
class LayerCosts:
    """Every layer's seconds and bytes at one micro-batch size, as stages run it.

    Attributes:
        measured: without the loss.
        loss: None where there is none.
        storages: bytes of every storage that several layers may keep.
        shared_bytes: of such storages that the layer keeps.
    """

    measured: tuple[Measurement, ...]
    loss: Measurement | None
    storages: dict[str, int]
    shared_bytes: tuple[int, ...]


def layer_costs(profile: Profile, micro_batch: int) -> LayerCosts:
    """Every layer's seconds and bytes at a micro-batch size. Raises PlanError for a size outside
    what was measured."""

    def found(measurements: Sequence[Measurement]) -> Measurement:
        return in_a_stage(at(measurements, micro_batch), profile.operation)

    storages = {
        s.name: sized(s.fixed_bytes, s.bytes_per_sample, micro_batch) for s in profile.storages
    }
    return LayerCosts(
        measured=tuple(found(layer.measurements) for layer in profile.layers),
        loss=found(profile.loss) if profile.loss else None,
        storages=storages,
        shared_bytes=tuple(sum(storages[n] for n in layer.saves) for layer in profile.layers),
    )


def _step_s(optimizer: OptimizerCost, layers: Sequence[Layer], parameters: int) -> float:
    """Of an optimizer's step on so many bytes of parameters: of layers by themselves, where that is
    known, and of the rest by their bytes."""
    own_s, rest = 0.0, parameters
    for layer in layers:
        if layer.update_s is not msgspec.UNSET:
            own_s, rest = own_s + layer.update_s, rest - layer.parameter_bytes
    if not parameters:
        return own_s
    return optimizer.update_fixed_s + optimizer.update_s_per_byte * max(rest, 0) + own_s


class Costs:
    """Seconds and bytes of any stage of one profile, cached.

    Attributes:
        stage: (names of layers, micro-batch size, whether it is the last, bytes of parameters that
            another stage of its device has for it; 0 by default; names of layers that are computed
            again, where these aren't all; none by default) → `StageCost`. Raises PlanError for a
            micro-batch size outside what was measured.
        transfers: (names of each stage's layers, micro-batch size) → tensors that cross the cuts,
            each once for each receiving stage, in the graph's order.
        on: a kind of device → the costs there. Raises PlanError where the profile has no such.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.stage = lru_cache(maxsize=20_000)(self._stage)
        self.transfers = lru_cache(maxsize=1_000)(self._find_transfers)
        self.on = lru_cache(maxsize=None)(lambda kind: Costs(least_of(profile, [(kind, 1.0)])))
        self._layers = lru_cache(maxsize=None)(partial(layer_costs, profile))
        self._kept = KeptStorages(profile)
        self._position = {layer.name: k for k, layer in enumerate(profile.layers)}
        self._needs: dict[str, list[Edge]] = {layer.name: [] for layer in profile.layers}
        self._made: dict[str, list[Edge]] = {layer.name: [] for layer in profile.layers}
        for edge in profile.edges:
            self._made[edge.producer].append(edge)
            if edge.consumer in self._needs:
                self._needs[edge.consumer].append(edge)

    def _stage(
        self,
        names: tuple[str, ...],
        micro_batch: int,
        last: bool,
        elsewhere: BytesElsewhere = NOTHING,
        recomputed: frozenset[str] = frozenset(),
    ) -> StageCost:
        profile = self.profile
        inside = sorted(self._position[name] for name in names)
        repeated = self._kept.positions(recomputed)
        costs = self._layers(micro_batch)
        layers = [profile.layers[k] for k in inside]
        measured = [costs.measured[k] for k in inside]
        losses = [costs.loss] if last and costs.loss else []
        shared, rebuilt = self._shared_storages(layers, micro_batch, repeated)
        private = {k: max(costs.measured[k].saved_bytes - costs.shared_bytes[k], 0) for k in inside}
        parameters = sum(layer.parameter_bytes for layer in layers)
        parameters += copied_bytes(profile.shared, names) - elsewhere.parameters
        buffers = sum(layer.buffer_bytes for layer in layers)
        buffers += copied_bytes(profile.shared_frozen or (), names) - elsewhere.frozen
        optimizer, operation = profile.optimizer, profile.operation
        besides_s = operation.forward_s if operation else 0.0
        around_s = (
            operation.mini_batch_s + operation.update_s_per_byte * parameters if operation else 0.0
        )
        weight_s = [weight_part_s(la, m) for la, m in zip(layers, measured, strict=True)]
        split_s = (
            input_part_s(la, m) + weight - m.backward_s
            for la, m, weight in zip(layers, measured, weight_s, strict=True)
        )
        return StageCost(
            forward_s=sum(m.forward_s for m in (*measured, *losses)) + besides_s,
            backward_s=sum(m.backward_s for m in (*measured, *losses)),
            update_s=around_s + _step_s(optimizer, layers, parameters),
            parameter_bytes=parameters,
            buffer_bytes=buffers,
            kept_bytes=(
                sum(nbytes for k, nbytes in private.items() if k not in repeated)
                + sum(shared.values())
                + sum(m.saved_bytes for m in losses)
            ),
            kept_storages=frozenset(shared),
            workspace_bytes=max((m.workspace_bytes for m in (*measured, *losses)), default=0),
            weight_s=sum(weight_s),
            split_s=max(sum(split_s), 0.0),
            postponed_bytes=sum(
                self._waiting(layer, m) for layer, m in zip(layers, measured, strict=True)
            ),
            matrix_bytes=sum(layer.matrix_bytes or 0 for layer in layers),
            recompute_s=sum(costs.measured[k].forward_s for k in sorted(repeated)),
            rebuilt_bytes=sum(private[k] for k in sorted(repeated)) + sum(rebuilt.values()),
        )

    def _waiting(self, layer: Layer, measured: Measurement) -> int:
        """Gradients that wait for a layer's weight part: those of its outputs, if not measured, or
        where no gradient leaves it and all of its backward waits."""
        first_part = any(edge.needs_grad for edge in self._needs[layer.name])
        if measured.postponed_bytes is not None and first_part:
            return measured.postponed_bytes
        if not layer.parameter_bytes:
            return 0
        outputs = {edge.tensor: edge for edge in self._made[layer.name] if edge.needs_grad}
        return sum(
            sized(edge.fixed_bytes, edge.bytes_per_sample, measured.micro_batch)
            for edge in outputs.values()
        )

    def _shared_storages(
        self, layers: Sequence[Layer], micro_batch: int, recomputed: frozenset[int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of each storage that some layer of the stage keeps and others may keep too: those
        that are kept, and those that layers computed again make before the backward."""
        names = {layer.name for layer in layers}
        storages = self._layers(micro_batch).storages
        made: set[str] = set()
        received: dict[str, dict[str, int]] = {}
        for layer in layers:
            made |= {edge.storage for edge in self._made[layer.name]}
            for edge in self._needs[layer.name]:
                if edge.producer not in names:
                    size = sized(edge.fixed_bytes, edge.bytes_per_sample, micro_batch)
                    received.setdefault(edge.storage, {})[edge.tensor] = size
        kept: dict[str, int] = {}
        rebuilt: dict[str, int] = {}
        inside = {self._position[name] for name in names}
        # What layers that are computed again take is kept, too.
        repeated = [layer for layer in layers if self._position[layer.name] in recomputed]
        taken = (edge.storage for layer in repeated for edge in self._needs[layer.name])
        for name in dict.fromkeys([*(name for la in layers for name in la.saves), *taken]):
            # What comes over a cut is as large as its message, whatever it was a view of.
            here = received.get(name, {})
            nbytes = sum(here.values()) if here and name not in made else storages[name]
            if not recomputed or (times := self._kept.kept(name, recomputed, inside)):
                kept[name] = nbytes * times if recomputed else nbytes
            elif self._kept.is_recomputed(name, recomputed):
                rebuilt[name] = nbytes
        return kept, rebuilt

    def _find_transfers(
        self, stages: tuple[tuple[str, ...], ...], micro_batch: int
    ) -> tuple[Transfer, ...]:
        stage_of = {name: s for s, names in enumerate(stages) for name in names}
        stage_of["output"] = len(stages) - 1
        found: dict[tuple[str, int], Transfer] = {}
        for edge in self.profile.edges:
            source, target = stage_of[edge.producer], stage_of[edge.consumer]
            if source != target and (edge.tensor, target) not in found:
                nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, micro_batch)
                found[edge.tensor, target] = Transfer(
                    edge.tensor, source, target, nbytes, edge.needs_grad, edge.storage
                )
        return tuple(found.values())


# What a system's weight rules cost: versions kept, mixed or predicted, by bytes of parameters ---


def as_run_by(profile: Profile, variant: Variant, update_every: int = 1) -> Profile:
    """The profile with the operation costs that apply in this system: of hooks, and of weight
    versions.

    Where no update comes between a forward and its backward, or both run on whatever the parameters
    are then, weights needn't be kept out of autograd's graphs, and there are no hooks. (Copies in
    another precision are, even so.) What mini-batches cost besides is counted at the update after
    them, for all since the one before.

    Raises PlanError where the system can't have it.
    """
    check_versions(profile, variant)
    operation = profile.operation
    if operation is None:
        return profile
    around_s = update_every * operation.mini_batch_s
    operation = msgspec.structs.replace(operation, mini_batch_s=around_s)
    latest = variant.forward_weights == variant.backward_weights == "latest"
    if (variant.flushes or latest) and profile.autocast is None:
        operation = msgspec.structs.replace(operation, pack_s=0.0, unpack_s=0.0)
    return msgspec.structs.replace(profile, operation=operation)


def weights_s_per_byte(
    variant: Variant, operation: OperationCost | None, update_every: int, *, first: bool, last: bool
) -> float:
    """Seconds for each update and byte of a stage's parameters, besides the optimizer's step.

    On the last stage no update comes between a mini-batch's forward and its backward: nothing is
    kept there or made, but where forwards use the version that stage 0 had; that one is the latest
    on the first stage, which keeps none for it. Elsewhere it's counted as if there always were
    one. What is made counts once for each mini-batch; what a system from outside declares, on every
    stage.

    Args:
        operation: what a version costs; None: not measured, 0.
    """
    if operation is None:
        return 0.0
    declared = 0.0 if variant.outside is None else variant.outside.passes * operation.mix_s_per_byte
    if last and (first or not variant.synchronises):
        return declared
    keeps = variant.stashes or (variant.synchronises and not first)
    kept = operation.keep_s_per_byte if keeps else 0.0
    mixes = variant.backward_weights in ("intermediate", "corrected", "outside")
    mixed = operation.mix_s_per_byte if mixes else 0.0
    predicts = variant.prediction or variant.forward_weights == "outside"
    predicted = operation.predict_s_per_byte if predicts else 0.0
    # What weights are corrected by is mixed at each update.
    averages = variant.backward_weights in ("corrected", "outside")
    averaged = operation.mix_s_per_byte if averages else 0.0
    return declared + kept + averaged + update_every * (mixed + predicted)


# Devices of several kinds -----------------------------------------------------------------------
# Kinds differ by layer and direction, so no speed is exact. Plans are judged by the seconds of each
# kind; the search goes by speeds, and by seconds that, over them, no kind is below.

_SECONDS = ("forward_s", "backward_s", "update_s", "weight_s", "split_s", "recompute_s")


def least_of(profile: Profile, kinds: Sequence[tuple[str, float]]) -> Profile:
    """The profile with the least seconds that any of these kinds has, each times a speed.

    Raises PlanError where the profile has none of a kind.
    """
    found = [(_kind(profile, name), speed) for name, speed in kinds]
    if not found:
        return profile
    optimizer = msgspec.structs.replace(
        profile.optimizer,
        update_fixed_s=min(kind.update_fixed_s * speed for kind, speed in found),
        update_s_per_byte=min(kind.update_s_per_byte * speed for kind, speed in found),
    )
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(
                    measured,
                    forward_s=min(kind.forward_s[k][n] * speed for kind, speed in found),
                    backward_s=min(kind.backward_s[k][n] * speed for kind, speed in found),
                    # Kinds have seconds of whole backwards alone.
                    backward_input_s=None,
                    backward_weight_s=None,
                )
                for n, measured in enumerate(layer.measurements)
            ),
        )
        for k, layer in enumerate(profile.layers)
    )
    return msgspec.structs.replace(profile, layers=layers, optimizer=optimizer)


def _kind(profile: Profile, name: str) -> KindTimes:
    kinds = profile.kinds or ()
    for kind in kinds:
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in kinds) or "none"
    raise PlanError(f"kind {name!r}: the profile has no seconds of such a device; it has {known}")


def slowest(costs: Sequence[tuple[StageCost, float]]) -> StageCost:
    """What a stage costs on the slowest of its devices: the most of each, times a factor."""
    most = {name: max(getattr(cost, name) * factor for cost, factor in costs) for name in _SECONDS}
    return replace(costs[0][0], **most)
