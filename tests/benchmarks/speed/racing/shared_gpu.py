"""Torch's pipelines on a GPU that their processes share.

NCCL refuses a GPU that two processes have, and gloo sends host memory alone: torch's schedules
can't run there by themselves. Here they get what they lack, through pinned memory, as ours do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tasks import Race


def stage_shapes(
    race: Race, pieces: Sequence[nn.Module], micro_batches: int
) -> list[tuple[Tensor, Tensor]]:
    """Every piece's input and output of a micro-batch, without memory.

    Torch's stages would tell each other of them in device memory.
    """
    x = race.data("train")[: race.mini_batch // micro_batches][0].to("meta")
    found = []
    for piece in pieces:
        with torch.no_grad():
            y = copy.deepcopy(piece).to("meta")(x)
        found.append((x, y))
        x = y
    return found


class Arriving:
    """A message on its way into host memory, and from there into the stage's."""

    def __init__(self, op: Any) -> None:
        self._there = op.tensor
        self._host = torch.empty(op.tensor.shape, dtype=op.tensor.dtype, pin_memory=True)
        self._work = dist.irecv(self._host, op.peer, op.group, op.tag)

    def wait(self) -> None:
        """Until it is in host memory; the device waits for the copy up."""
        assert self._work is not None
        self._work.wait()
        self._there.data.copy_(self._host, non_blocking=True)


class Leaving:
    """A message on its way out, of what the device has computed by then."""

    def __init__(self, op: Any) -> None:
        self._host = torch.empty(op.tensor.shape, dtype=op.tensor.dtype, pin_memory=True)
        self._host.copy_(op.tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self._work = dist.isend(self._host, op.peer, op.group, op.tag)

    def wait(self) -> None:
        """Until it has gone."""
        assert self._work is not None
        self._work.wait()


def through_pinned_memory(ops: Sequence[Any], desc: str | None = None) -> list[Arriving | Leaving]:
    """Stands in for `torch.distributed.pipelining.schedules._batch_p2p`."""
    return [Leaving(op) if op.op is dist.isend else Arriving(op) for op in ops]
