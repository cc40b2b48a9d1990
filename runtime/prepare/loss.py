"""What a task's loss gives: a mean over samples, or (sum, weight); found out before the run."""

from __future__ import annotations

import contextlib
import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...profiles.errors import TargetError
from ...profiles.tasks.hooks import describe_error, is_ctrl_c
from ...profiles.tasks.task import Loss, Task, read_loss
from ...profiles.tracing.pieces import map_tensors


@dataclass(frozen=True)
class LossKind:
    """What a task's loss gives, as was found out before the run.

    Attributes:
        weighted: (sum, weight); else a mean.
        unknown: why that couldn't be found out; empty: it could.
    """

    weighted: bool = False
    unknown: str = ""

    def read(self, found: Any) -> Loss:
        """What the loss returned in training. Raises TargetError where it isn't what it was."""
        loss = read_loss(found)
        if (loss.weight is not None) != self.weighted:
            now, before = ("a mean", "(sum, weight)")[:: 1 if self.weighted else -1]
            why = f" (it failed then: {self.unknown})" if self.unknown else ""
            raise TargetError(
                f"the task's loss gives {now}, and gave {before} when it was tried before the "
                f"run{why}: it must give the same for any output and target"
            )
        return loss


def kind_of_loss(task: Task, result: Any, target: Any) -> LossKind:
    """Whether a task's loss gives (sum, weight).

    It is asked once, of a copy of the task, with a result of the right shapes, under the autocast
    that the caller has on.

    Args:
        result: the model's; fake tensors (of one mode) where it wasn't computed.
    """
    with contextlib.suppress(Exception):  # the user's object
        task = copy.copy(task)
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            return LossKind(isinstance(_tried(task, result, target), tuple))
    except BaseException as error:  # the user's code
        if is_ctrl_c(error):
            raise
        return LossKind(unknown=describe_error(error))
    finally:
        torch.random.set_rng_state(before)


def _tried(task: Task, result: Any, target: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    modes: list[AbstractContextManager[Any]] = []

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor.detach()
        modes.append(tensor.fake_mode)
        return tensor

    result = map_tensors(note, result)
    try:
        # On fake tensors it takes no memory.
        with modes[0] if modes else nullcontext():
            return task.loss(result, target)
    except Exception:
        if not modes:
            raise
        # A loss that looks at numbers.
        zeros = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype), result)
        return task.loss(zeros, target)
