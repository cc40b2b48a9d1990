"""What a system's weight rules cost: versions kept, mixed or predicted, by bytes of parameters."""

from __future__ import annotations

import msgspec

from ...profiles.profile import OperationCost, Profile
from ..systems.variants import Variant


def as_run_by(profile: Profile, variant: Variant) -> Profile:
    """The profile with what operations cost in this system.

    Where no update comes between a forward and its backward, weights needn't be kept out of
    autograd's graphs, and there are no hooks. (Copies in another precision are, even so.)
    """
    if profile.operation is None or not variant.flushes or profile.autocast is not None:
        return profile
    operation = msgspec.structs.replace(profile.operation, pack_s=0.0, unpack_s=0.0)
    return msgspec.structs.replace(profile, operation=operation)


def weights_s_per_byte(
    variant: Variant,
    operation: OperationCost | None,
    update_every: int,
    *,
    first: bool,
    last: bool,
) -> float:
    """Seconds for each update and byte of a stage's parameters, besides the optimizer's step.

    On the last stage no update comes between a mini-batch's forward and its backward: nothing is
    kept there or made, but where forwards use the version that stage 0 had; that one is the latest
    on the first stage, which keeps none for it. Elsewhere it's counted as if there always were
    one. What is made counts once for each mini-batch.

    Args:
        operation: what a version costs; None: not measured, 0.
    """
    if operation is None or (last and (first or not variant.synchronises)):
        return 0.0
    keeps = variant.stashes or (variant.synchronises and not first)
    kept = operation.keep_s_per_byte if keeps else 0.0
    mixed = operation.mix_s_per_byte if variant.backward_weights == "intermediate" else 0.0
    predicted = operation.predict_s_per_byte if variant.prediction else 0.0
    return kept + update_every * (mixed + predicted)
