"""Which micro-batch counts a system can run with, on costs that the profile has."""

from __future__ import annotations

from ...profiles.errors import PlanError
from ..evaluate import Question
from ..plan import MAX_MICRO_BATCHES
from ..systems.variants import variant_named


def micro_batch_counts(question: Question, asked: int | None) -> list[int]:
    """Every count to look at, rising: the one asked for, or all that divide the mini-batch.

    A count asked for need not divide it: micro-batches then differ by one sample.
    Raises PlanError where there is none.
    """
    variant = variant_named(question.variant)
    batch, sizes = question.mini_batch, question.profile.micro_batch_sizes
    if variant.whole_mini_batches:
        if asked not in (None, 1):
            raise PlanError(
                f"--micro-batches {asked}: {variant.name} runs whole mini-batches; leave it out"
            )
        asked = 1
    if asked is not None and asked > batch:
        raise PlanError(f"--micro-batches {asked}: the mini-batch has only {batch} samples")
    if asked is None:
        within = [m for m in range(sizes[0], sizes[-1] + 1) if batch % m == 0]
        counts = sorted(batch // m for m in within)
    else:
        counts = [asked] if sizes[0] <= -(-batch // asked) <= sizes[-1] else []
    if not counts:
        size = f"of {-(-batch // asked)} samples " if asked else ""
        raise PlanError(
            f"mini-batch {batch}: micro-batches {size}are asked for that the profile didn't "
            f"measure: it has {sizes[0]} to {sizes[-1]} samples; profile again with --batch-size "
            "and --micro-batch-sizes that reach them"
        )
    if counts[0] > MAX_MICRO_BATCHES:
        raise PlanError(
            f"mini-batch {batch}: would have {counts[0]} micro-batches; {MAX_MICRO_BATCHES} are "
            "the most"
        )
    return [n for n in counts if n <= MAX_MICRO_BATCHES]
