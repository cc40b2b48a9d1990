"""Shapes of mini-batches that aren't all alike: which there are, and inputs of a certain one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from ..errors import TargetError
from ..profile import Shapes, VaryingShapes
from ..tracing.call import Call
from .batches import Batch, Batches, DryError
from .samples import Given, Names, rows_among

BATCHES, SECONDS = 32, 5.0
"""Mini-batches that are looked at where nothing is said, and for how long at most."""


@dataclass(frozen=True)
class LookedAt:
    """Some mini-batches of the training data.

    Attributes:
        varying: None: all had the same shapes.
        largest, smallest: by bytes.
    """

    varying: VaryingShapes | None
    largest: Batch
    smallest: Batch
    _like: Call

    def call(self, samples: int, batch: Batch | None = None) -> tuple[Call, Any]:
        """Inputs and target of samples of a batch, the largest by default; the first ones again
        where it has fewer."""
        batch = batch or self.largest
        call = self._like.with_tensors(batch.inputs)
        if self.varying is not None:
            call = replace(call, varying=self.varying.free)
        return rows_among(call, batch.target, "train", samples)


def look_at_batches(
    given: Given, mini_batch: int, like: Call, names: Names, most: int | None = None
) -> LookedAt | None:
    """Look at the training data's first mini-batches.

    Args:
        like: a call of the model.
        most: how many; None: BATCHES, within SECONDS.

    Returns None where there is none.

    Raises TargetError where inputs have different numbers of dimensions, and as `Batches.batch`.
    """
    batches = Batches(given, "train", 0, mini_batch, names)
    found: dict[Shapes, Batch] = {}
    seen, begin = 0, time.perf_counter()
    try:
        while seen < (most or BATCHES):
            try:
                batch = batches.batch(0, seen)
            except DryError:
                break
            found.setdefault(shapes_of(batch.inputs), batch)
            seen += 1
            if most is None and time.perf_counter() - begin > SECONDS:
                break
    finally:
        batches.close()
    if not found:
        return None
    if len({tuple(map(len, shapes)) for shapes in found}) > 1:
        some = " and ".join(str([list(s) for s in shapes]) for shapes in list(found)[:2])
        raise TargetError(
            f"data('train'): inputs of one sample have the shapes {some}: sizes may differ from "
            "mini-batch to mini-batch, but not the number of dimensions"
        )
    largest, smallest = max(found, key=_size(found)), min(found, key=_size(found))
    varying = None
    if len(found) > 1:
        every = [list(zip(*sizes, strict=True)) for sizes in zip(*found, strict=True)]
        varying = VaryingShapes(
            profiled=largest,
            least=tuple(tuple(map(min, sizes)) for sizes in every),
            most=tuple(tuple(map(max, sizes)) for sizes in every),
            batches=seen,
        )
    return LookedAt(varying, found[largest], found[smallest], like)


def shapes_of(inputs: tuple[Tensor, ...]) -> Shapes:
    """Of one sample."""
    return tuple(tuple(tensor.shape[1:]) for tensor in inputs)


def _size(found: dict[Shapes, Batch]) -> Any:
    """What a mini-batch of these shapes is compared by: bytes of a sample, then its sizes."""

    def size(shapes: Shapes) -> tuple[float, Shapes]:
        batch = found[shapes]
        return sum(tensor.nbytes for tensor in batch.inputs) / batch.rows, shapes

    return size


def at_profiled(call: Call, varying: VaryingShapes | msgspec.UnsetType) -> Call:
    """The same inputs, cut or filled up with zeros to the shapes that were profiled."""
    if varying is msgspec.UNSET:
        return call
    tensors = []
    for tensor, shape in zip(call.tensors, varying.profiled, strict=True):
        made = tensor.new_zeros((tensor.shape[0], *shape))
        pairs = zip(tensor.shape, made.shape, strict=True)
        common = tuple(slice(min(mine, wanted)) for mine, wanted in pairs)
        made[common] = tensor[common]
        tensors.append(made)
    return replace(call.with_tensors(tensors), varying=varying.free)
