"""A profile in the terminal: layers, the whole model, and how precise the times are."""

from __future__ import annotations

import msgspec
from rich.console import Console

from ...profiles.profile import (
    Measurement,
    Profile,
    Shapes,
    VaryingShapes,
    front_end_called,
    made_of,
)
from ...profiles.units import format_bytes, format_seconds
from .layout import fitted, fixed, words

MAX_ROWS = 40


def print_profile(console: Console, profile: Profile, *, verbose: bool) -> None:
    """Print the layers with their costs, the whole model, and the precision of the times."""
    size = profile.micro_batch_sizes[-1]
    shown = profile.layers if verbose else profile.layers[:MAX_ROWS]
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            layer.kind,
            format_bytes(layer.parameter_bytes),
            *_cells(layer.measurements[-1]),
        )
        for layer in shown
    ]
    if len(shown) < len(profile.layers):
        rows.append((f"… {len(profile.layers) - len(shown)} more (-v)", *[""] * 6))
    if profile.loss:
        rows.append(("loss", "", "", *_cells(profile.loss[-1])))
    rows.append(_whole(profile))
    names, kinds, *figures = zip(*rows, strict=True)
    heads = ("parameters", "forward", "backward", "±", "saved")
    # Names whole as far as they fit: kinds can be cut short.
    table = fitted(
        f"{profile.target}: {len(profile.layers)} layers, micro-batch of {size}",
        words("layer", names, 24),
        [words("kind", kinds, 8), *map(fixed, heads, figures)],
        console.width,
    )
    console.print(table)
    _print_trust(console, profile)


def _whole(profile: Profile) -> tuple[str, ...]:
    whole = profile.whole_model[-1]
    how = "measured in one piece"
    if not profile.can_run:
        how = "sum of the layers"
    elif profile.device.startswith("meta"):
        how = "computed"
    return (
        "whole model",
        how,
        format_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
        format_seconds(whole.forward_s),
        format_seconds(whole.backward_s),
        "",
        format_bytes(whole.saved_bytes),
    )


def _cells(m: Measurement) -> tuple[str, str, str, str]:
    error = "" if m.relative_error is None else f"{m.relative_error:.0%}"
    return (
        format_seconds(m.forward_s),
        format_seconds(m.backward_s),
        error,
        format_bytes(m.saved_bytes),
    )


def _print_trust(console: Console, profile: Profile) -> None:
    frozen = sum(layer.frozen_bytes or 0 for layer in profile.layers)
    if frozen:
        console.print(
            f"parameters: those that are trained; {format_bytes(frozen)} more are frozen "
            "(requires_grad off), of which there are no versions, gradients or optimizer state"
        )
    if profile.can_run:
        console.print(
            f"graph: {front_end_called(profile.front_end)}; {profile.granularity} granularity"
        )
        for refusal in profile.refusals:
            console.print(f"  not by {refusal}")
        ratios = ", ".join(f"{m}: {ratio:.2f}" for m, ratio in layer_sum_ratios(profile))
        console.print(f"sum of layers / whole model, by micro-batch size: {ratios}")
        if any(m.relative_error is not None for m in profile.layers[0].measurements):
            console.print("±: standard error of forward + backward")
    else:
        console.print(f"from {made_of(profile)}: can be planned, but not run")
    if profile.together is not None:
        found = profile.together
        console.print(
            f"{found.processes} processes at once: each takes {found.slowdown:.2f} × the time"
        )
    if profile.operation is not None:
        cost = profile.operation
        console.print(
            f"besides its layers a stage takes {format_seconds(cost.forward_s)} for each "
            f"micro-batch, {format_seconds(cost.mini_batch_s)} for each mini-batch and "
            f"{format_seconds(cost.pack_s + cost.unpack_s)} for each tensor that autograd keeps"
        )
    if profile.loading_s_per_sample is not msgspec.UNSET:
        each_s = profile.loading_s_per_sample
        console.print(
            f"loading takes {format_seconds(each_s)} for a sample, "
            f"{format_seconds(each_s * profile.batch_size)} for {profile.batch_size} of them"
        )
    if profile.reserved_bytes is not msgspec.UNSET:
        console.print(
            f"besides tensors each process takes {format_bytes(profile.reserved_bytes)} of its "
            f"GPU, and its allocator {profile.reserved_share or 0.0:.0%} of what they take"
        )
    if profile.varying is not msgspec.UNSET:
        console.print(f"mini-batches differ in shape: {_varying(profile.varying)}")
    for assumption in profile.assumptions:
        console.print(f"assumed: {assumption}")


def _varying(varying: VaryingShapes) -> str:
    """From which to which shapes, of a sample, and which were measured."""
    one = len(varying.profiled) == 1

    def shown(shapes: Shapes) -> str:
        found = ["×".join(map(str, shape)) or "1" for shape in shapes]
        return found[0] if one else f"({', '.join(found)})"

    return (
        f"of a sample, {shown(varying.least)} to {shown(varying.most)} in "
        f"{varying.batches} of them; measured at {shown(varying.profiled)}"
    )


def layer_sum_ratios(profile: Profile) -> list[tuple[int, float]]:
    """For each micro-batch size, the layers' times added up over the whole model's."""
    ratios = []
    for k, whole in enumerate(profile.whole_model):
        parts = [layer.measurements[k] for layer in profile.layers]
        parts += [profile.loss[k]] if profile.loss else []
        total = sum(m.forward_s + m.backward_s for m in parts)
        one = whole.forward_s + whole.backward_s
        ratios.append((whole.micro_batch, total / one if one else 1.0))
    return ratios
