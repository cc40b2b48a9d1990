"""Shapes of mini-batches that aren't all alike: which there are, and inputs of a certain one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from ..errors import TargetError
from ..profile import Shapes, VaryingShapes
from ..tracing.call import Call
from .batches import Batch, Batches, DryError
from .samples import Given, Names, first_rows, read_batch

BATCHES, SECONDS = 32, 5.0
"""Mini-batches that are looked at where nothing is said, and for how long at most."""
ALONE, ALONE_SECONDS = 2048, 1.0
"""Samples of a data set that are looked at one by one, and for how long at most."""


@dataclass(frozen=True)
class LookedAt:
    """Some mini-batches of the training data: the shapes that vary, None where all had the same,
    and those with most and least bytes; the smallest may be a sample alone."""

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
        return first_rows(call, batch.target, "train", samples)


def look_at_batches(
    given: Given,
    mini_batch: int,
    like: Call,
    names: Names,
    most: int | None = None,
    alone: Iterable[Batch] = (),
) -> LookedAt | None:
    """Look at the training data's first mini-batches; None where there is none.

    Args:
        like: a call of the model.
        most: how many; None: BATCHES, within SECONDS.
        alone: samples, each a batch of its own, whose sizes others may have too (`samples_alone`).

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
    single: dict[Shapes, Batch] = {}
    for batch in alone:
        single.setdefault(shapes_of(batch.inputs), batch)
    if len({tuple(map(len, shapes)) for shapes in (*found, *single)}) > 1:
        some = " and ".join(str([list(s) for s in shapes]) for shapes in list(found)[:2])
        raise TargetError(
            f"data('train'): inputs of one sample have the shapes {some}: sizes may differ from "
            "mini-batch to mini-batch, but not the number of dimensions"
        )
    every = single | found
    largest, smallest = max(found, key=_size(found)), min(every, key=_size(every))
    varying = None
    if len(every) > 1:
        least, most_of_all = _each(min, every), _each(max, every)
        varying = VaryingShapes(
            profiled=largest,
            least=least,
            # No more than mini-batches have, or larger ones would pass for looked at; but what
            # differs has to show.
            most=tuple(
                tuple(m if m > low else top for m, low, top in zip(*sizes, strict=True))
                for sizes in zip(_each(max, found), least, most_of_all, strict=True)
            ),
            batches=seen,
        )
    return LookedAt(varying, found[largest], every[smallest], like)


def samples_alone(sets: Iterable[Any], names: Names) -> Iterator[Batch]:
    """Samples of map-style data sets, evenly spread, each a batch of its own.

    The first mini-batches may happen to be equally long, as where most rows are cut; a last one of
    few samples, or one for testing, is shorter then. Samples with a size of 0 or 1 are left out: a
    graph may be another one for these.
    """
    for data in sets:
        begin = time.perf_counter()
        for k in range(0, len(data), max(1, len(data) // ALONE)):
            call, target = read_batch(data.collate_fn([data[k]]), names)
            batch = Batch(call.tensors, target, 1)
            if all(size > 1 for shape in shapes_of(batch.inputs) for size in shape):
                yield batch
            if time.perf_counter() - begin > ALONE_SECONDS:
                break


def _each(pick: Any, found: Iterable[Shapes]) -> Shapes:
    """Of each size the least, or the largest."""
    return tuple(
        tuple(pick(sizes) for sizes in zip(*shapes, strict=True))
        for shapes in zip(*found, strict=True)
    )


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
