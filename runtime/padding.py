"""Micro-batches that were filled up to full size: what is real of the model's result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..profiles.errors import RunError, TraceError
from ..profiles.tracing.packing import map_tensors


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
