"""Segments of a run, and the samples of each micro-batch, padding included."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset

from ...planner.plan import Plan
from ...profiles.errors import RunError, TargetError, TaskWarning, TraceError
from ...profiles.tasks.hooks import RunLength
from ...profiles.tasks.samples import (
    alike,
    batch_size_of,
    check_batches,
    collates,
    comes_in_batches,
    has_one_sequence,
    size_of,
)
from ...profiles.tasks.task import Task
from ...profiles.tracing.pieces import map_tensors
from ..settings import RunSettings
from .traced_task import ForwardLook, TracedTask


@dataclass(frozen=True)
class Segment:
    """A stretch of training that ends drained: an epoch, what `steps` leave of it, or its part
    between two checkpoints or evaluations.

    Attributes:
        epoch: counted from 0.
        first: number of its first mini-batch in the whole run.
        mini_batches: how many it has.
        samples: in all of them. The last mini-batch may have fewer than the others.
        mini_batch: samples in every other.
        micro_batches: in each mini-batch.
        update_every: mini-batches that an update is made after, the last ones left out.
        offset: mini-batches of its epoch before it.
        rest: mini-batches of its epoch after it.
        checkpoint: one is written at its end.
        evaluation: one is made at its end, though the epoch goes on.
        whole_epoch: mini-batches of an epoch that no `steps` cut short.
    """

    epoch: int
    first: int
    mini_batches: int
    samples: int
    mini_batch: int
    micro_batches: int
    update_every: int = 1
    offset: int = 0
    rest: int = 0
    checkpoint: bool = False
    evaluation: bool = False
    whole_epoch: int = 0

    @property
    def end(self) -> int:
        """Mini-batches of the run that are done after it."""
        return self.first + self.mini_batches

    def together(self, mini_batch: int) -> int:
        """Mini-batches whose mean is the gradient that this one's update goes by."""
        return mean_over(mini_batch, self.update_every, self.mini_batches)

    def updates_after(self, mini_batch: int) -> bool:
        """Whether there is an update after this one."""
        return (mini_batch + 1) % self.update_every == 0 or mini_batch + 1 == self.mini_batches

    def ends_epoch(self, mini_batch: int) -> bool:
        """Whether this is an epoch's last one, and not merely the run's."""
        return self.offset + mini_batch + 1 == self.whole_epoch

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        return -(-self.mini_batches // self.update_every)

    def samples_of(self, mini_batch: int) -> int:
        """Samples in the segment's mini-batch of this number."""
        return min(self.mini_batch, self.samples - mini_batch * self.mini_batch)


def training_samples(plan: Plan, settings: RunSettings, given: Any) -> int:
    """Samples in the training data that data("train") gave; where nobody can know, as many as the
    run's steps take. Raises TargetError for batches of another size than the plan's, and where
    nobody can know how long a run of epochs would be. Warns of samples that no epoch has."""
    check_batches(given, "train", plan.mini_batch)
    size = size_of(given, "train", plan.mini_batch)
    if size is not None:
        over = size % plan.mini_batch
        if over and settings.ragged == "drop" and has_one_sequence(given):
            warnings.warn(
                f"{settings.task}: the last {over} of {size} training samples don't fill a "
                f"mini-batch of {plan.mini_batch}, and are never trained on, since the DataLoader "
                "has the same sequence each epoch: fill it up (--ragged pad), give the loader "
                "shuffle=True, or drop_last=True where that is meant",
                TaskWarning,
                stacklevel=2,
            )
        return size
    if settings.steps is None:
        raise TargetError(
            f"{settings.task}: data('train') has no length, so an epoch has no end: say how many "
            "mini-batches to train with --steps, or give the data set a __len__"
        )
    return settings.steps * plan.mini_batch


def run_length(segments: Sequence[Segment]) -> RunLength:
    """Updates in a run, and in one whole epoch of it."""
    first = segments[0]
    updates = sum(segment.updates for segment in segments)
    return RunLength(updates, -(-first.whole_epoch // first.update_every))


def segments(plan: Plan, settings: RunSettings, samples: int) -> tuple[Segment, ...]:
    """A run's segments, from checkpoint, evaluation or epoch to the next. Samples that don't fill a
    mini-batch are dealt with as settings say.

    Raises TargetError when the data doesn't fill one mini-batch, or leaves some over and
    mustn't.
    """
    each, over = divmod(samples, plan.mini_batch)
    if over and settings.ragged == "error":
        raise TargetError(
            f"{settings.task}: the last {over} of {samples} training samples don't fill a "
            f"mini-batch of {plan.mini_batch}; leave them out (--ragged drop) or fill it up "
            "(--ragged pad)"
        )
    if settings.ragged == "pad":
        each += bool(over)
    if not each:
        raise TargetError(
            f"{settings.task}: {samples} training samples don't fill one mini-batch of "
            f"{plan.mini_batch}; plan with a smaller --mini-batch, or fill it up (--ragged pad)"
        )
    total = settings.steps if settings.steps is not None else settings.epochs * each
    found: list[Segment] = []
    for epoch, first in enumerate(range(0, total, each)):
        count = min(each, total - first)
        cuts = places_within(first, count, settings.checkpoint_every, plan.update_every)
        evaluations = (
            places_within(first, count, settings.eval_every, plan.update_every)
            if settings.evaluate and settings.eval_every is not None
            else ()
        )
        # A run of --steps that is to have more of them goes on where it ended, each time.
        stopped = (settings.resume_at or 0, *settings.grown_at)
        within = (min(max(end - first, 0), count) for end in stopped)
        ends = {0, *cuts, *evaluations, *within, count}
        for start, end in itertools.pairwise(sorted(ends)):
            left = samples - start * plan.mini_batch
            due = end in cuts or (settings.checkpoint_every != 0 and first + end == total)
            found.append(
                Segment(
                    epoch=epoch,
                    first=first + start,
                    mini_batches=end - start,
                    samples=min((end - start) * plan.mini_batch, left),
                    mini_batch=plan.mini_batch,
                    micro_batches=plan.micro_batches,
                    update_every=plan.update_every,
                    offset=start,
                    rest=count - end,
                    checkpoint=due,
                    evaluation=end in evaluations and end < count,
                    whole_epoch=each,
                )
            )
    return tuple(found)


def places_within(first: int, count: int, every: int | None, update_every: int) -> tuple[int, ...]:
    """After which mini-batches of an epoch checkpoints or evaluations come.

    Each comes at the update that a multiple of `every` falls on, or the next one: updates are made
    of the same mini-batches with and without it.

    Args:
        first, count: mini-batches of the run before the epoch, and in it.
        every: mini-batches of the run; None: at the epoch's end; 0: nowhere.
        update_every: mini-batches that an update is made after.
    """
    if every is None:
        return (count,)
    if not every:
        return ()
    multiples = range(every - first % every, count + 1, every)
    return tuple(sorted({min(-(-k // update_every) * update_every, count) for k in multiples}))


def real_samples(
    segment: Segment, mini_batch: int, micro_batch: int, dealt: slice = slice(None)
) -> range:
    """Positions of a micro-batch's samples in the epoch, padding left out.

    Micro-batches that don't divide a mini-batch differ by one sample, the larger ones first;
    where there are more of them than samples, the last ones are empty.

    Args:
        dealt: which of the micro-batch's samples, where replicas share them.
    """
    each, more = divmod(segment.samples_of(mini_batch), segment.micro_batches)
    before = (segment.offset + mini_batch) * segment.mini_batch
    start = before + micro_batch * each + min(micro_batch, more)
    return range(start, start + each + (micro_batch < more))[dealt]


def mean_over(mini_batch: int, update_every: int, mini_batches: int) -> int:
    """How many mini-batches of a segment make the update of this one, whose gradient is their
    mean."""
    first = mini_batch - mini_batch % update_every
    return min(update_every, mini_batches - first)


class MicroBatchPart(NamedTuple):
    """A micro-batch, padded to full size, and its share of the mini-batch's mean.

    Attributes:
        real: samples of its own, in front.
        size: samples with padding.
        share: of the mini-batch's samples: its weight in the mini-batch's loss.
        weight: in the gradient of an update, which may be the mean of several mini-batches.
    """

    real: int
    size: int
    share: float
    weight: float

    @property
    def padded(self) -> bool:
        """Whether some of it isn't real."""
        return self.real < self.size


def part_of(segment: Segment, mini_batch: int, real: int, size: int) -> MicroBatchPart:
    """The part of a mini-batch that a micro-batch, or a replica's part of it, is.

    Args:
        real: its samples (`real_samples`).
        size: with padding.
    """
    share = real / segment.samples_of(mini_batch)
    return MicroBatchPart(real, size, share, share / segment.together(mini_batch))


# Padding: the real part of the model's result for a micro-batch that was filled up --------------

DROP = "leave it out: --ragged drop"
DIVIDE = "plan with --micro-batches that divide the mini-batch"
NO_EVALUATION = "give test data that micro-batches divide, or train with --no-evaluate"


def fills_up(plan: Plan, segments: Sequence[Segment]) -> bool:
    """Whether some micro-batch of the training is filled up."""
    rest = plan.mini_batch % plan.micro_batches
    return bool(rest) or any(segment.samples % plan.mini_batch for segment in segments)


def check_padding(
    plan: Plan,
    settings: RunSettings,
    task: Task,
    segments: Sequence[Segment],
    samples: Sequence[int],
    traced: TracedTask,
    looks: Mapping[int, ForwardLook],
) -> None:
    """Check before a run that padding can be cut off the model's result, where there will be any.

    Args:
        samples: per stage, in a replica's micro-batch.
        looks: by number of samples.

    Raises TargetError.
    """
    size = samples[-1]
    if plan.mini_batch % plan.micro_batches:
        advice = DIVIDE
    elif any(segment.samples % plan.mini_batch for segment in segments):
        advice = DROP
    elif settings.evaluate:
        # What every stage has room for.
        size = min(samples)
        try:
            found: Any = task.data("test")
            count = size_of(found, "test", plan.mini_batch) or 1
            if comes_in_batches(found):
                # Of batches of any size, as of a stream, each may end in a part of a micro-batch.
                stream = isinstance(getattr(found, "dataset", None), IterableDataset)
                each = plan.mini_batch if collates(found) else batch_size_of(found) or 1
                count = math.gcd(count, each if alike(found) and not stream else 1)
        except Exception:  # the user's code, which the evaluation is to tell of
            return
        if not count % size:
            return
        advice = NO_EVALUATION
    else:
        return
    shapes, graph = looks[size].result_shapes, traced.training[size]
    # A graph of one size alone is tried at that one.
    other = size if graph.only_size is not None else size + 1
    try:
        others = traced.look(other, graph).result_shapes
    except TraceError:
        raise
    except Exception:  # the user's model, which needn't take that other size
        return
    check_result(shapes, others, size, other, advice)


def check_result(
    shapes: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    size: int,
    other: int,
    advice: str,
) -> None:
    """Raise TargetError, with this advice, where padding can't be cut off the model's result.

    Args:
        shapes: of the result's tensors for a micro-batch of `size` samples.
        others: the same for `other` samples: what merely happens to have a row for each shows.
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
    """The result without padding: its first `real` of `size` samples.

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
