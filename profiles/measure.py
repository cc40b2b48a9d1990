"""Measuring a target: layer by layer, at several micro-batch sizes → a Profile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .assemble import assemble
from .bench import Bench, Progress
from .errors import TargetError, TraceError
from .profile import Profile, check_profile
from .target import Target, describe_error
from .trace import trace


def default_sizes(batch_size: int) -> tuple[int, ...]:
    """Micro-batch sizes to measure: the mini-batch and its halves down to a sixteenth."""
    sizes = {batch_size}
    size = batch_size
    while size % 2 == 0 and len(sizes) < 5:
        size //= 2
        sizes.add(size)
    return tuple(sorted(sizes))


def measure(
    target: Target,
    *,
    batch_size: int = 64,
    micro_batch_sizes: Sequence[int] | None = None,
    threads: int = 1,
    seconds: float = 8.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a target on the CPU in train mode.

    Args:
        batch_size: samples in a mini-batch.
        micro_batch_sizes: sizes to measure; by default the mini-batch and its halves.
        threads: torch's threads while measuring; a stage will run with as many.
        seconds: time to spend on timing. At least 5 rounds are made, at most 50.
        seed: for the model's initial weights.

    Raises:
        TargetError: the model can't be built, or fails on its own inputs.
        TraceError: the model can't be traced.
    """
    sizes = tuple(sorted(set(micro_batch_sizes or default_sizes(batch_size))))
    torch.set_num_threads(threads)
    model = target.model(seed)
    model.train()
    if not any(p.requires_grad for p in model.parameters()):
        raise TargetError(f"{target.name}: the model has no parameter to train")
    traced = trace(model, target.name)
    if len(traced.inputs) < len(target.sample(1)[0]):
        raise TargetError(
            f"{target.name}: the data gives {len(target.sample(1)[0])} inputs, but the model's "
            f"forward takes {len(traced.inputs)}"
        )
    try:
        bench = Bench(target, model, traced, sizes, batch_size)
        bench.run(seconds, progress or (lambda *_: None))
    except (TargetError, TraceError):
        raise
    except Exception as error:  # the user's model and loss run here
        raise TargetError(
            f"{target.name}: the model failed on its own inputs: {describe_error(error)}"
        ) from error
    return check_profile(assemble(bench, threads))
