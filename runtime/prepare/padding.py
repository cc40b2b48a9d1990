"""Micro-batches that were filled up to full size: what is real of the model's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...profiles.errors import RunError, TargetError, TraceError
from ...profiles.tracing.packing import map_tensors

DROP = "leave it out: --ragged drop"
DIVIDE = "plan with --micro-batches that divide the mini-batch"
NO_EVALUATION = "give test data that micro-batches divide, or train with --no-evaluate"


def check_result(
    shapes: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    size: int,
    other: int,
    advice: str,
) -> None:
    """Check before a run that padding can be cut off the model's result.

    Args:
        shapes: of the result's tensors for a micro-batch of `size` samples.
        others: the same for `other` samples: what merely happens to have a row for each shows.
        advice: what to do where it can't, for the message.

    Raises TargetError.
    """
    for shape, moved in zip(shapes, others, strict=True):
        rows = shape[0] if shape else 0
        if not rows or rows % size or moved[0] != rows // size * other:
            raise TargetError(
                f"some micro-batch is to be filled up to {size} samples, and the model's result "
                f"holds a tensor of shape {list(shape)} then, whose rows aren't of one sample "
                f"each: what is real can't be told; {advice}"
            )


def real_part(result: Any, real: int, size: int, advice: str) -> Any:
    """The result of the first `real` of `size` samples.

    Of every tensor the rows of real samples, whether it has one or the same number for each
    sample (a flattened ``[size · c, ...]``, samples first).

    Args:
        advice: what to do where that can't be told, for the message.

    Raises:
        RunError: a tensor's first dimension has nothing to do with the number of samples.
    """

    def cut(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not rows or rows % size:
            raise RunError(
                f"{real} samples were filled up to a micro-batch of {size}, and the model's result "
                f"holds a tensor of shape {list(tensor.shape)}, without a row or more for each; "
                f"{advice}"
            )
        return tensor[: rows // size * real]

    try:
        return map_tensors(cut, result)
    except TraceError as error:
        raise RunError(
            f"{real} samples were filled up to a micro-batch of {size}, and what is real of the "
            f"result can't be told: {error}; {advice}"
        ) from None
