"""Copies between a GPU and pinned host memory, on streams of their own.

What uses them knows no GPU: `Copier` says what is needed of one, so that the same code runs in
tests with copies from the CPU to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Landing(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Wait for it; of all threads, the one that asks waits alone."""


class Copier(Protocol):
    """Copies a worker's tensors down to host memory and up again."""

    def far(self, tensor: Tensor) -> bool:
        """Whether a tensor is in device memory."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a message, from which copies up are quick."""

    def down(self, tensor: Tensor) -> tuple[Tensor, Landing]:
        """Start a copy to host memory, of what the tensor holds when work handed in so far is done.

        The tensor must be kept, and not be changed, until the copy has landed.
        """

    def up(self, host: Tensor) -> Tensor:
        """Start a copy to the device; work handed in from now on waits for it, this thread doesn't.

        The host tensor may be let go at once.
        """


class CudaCopier:
    """Of one GPU: a stream for each direction, beside the one that computes.

    Torch's allocator of pinned memory gives no block away while a copy from or to it is under way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def far(self, tensor: Tensor) -> bool:
        """Whether it is on a GPU."""
        return tensor.is_cuda

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def down(self, tensor: Tensor) -> tuple[Tensor, Landing]:
        """Behind what the current stream has to do, and beside what it gets to do next."""
        host = self.room(tensor.shape, tensor.dtype)
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            host.copy_(tensor.detach(), non_blocking=True)
            return host, self._down.record_event()

    def up(self, host: Tensor) -> Tensor:
        """The current stream waits for the copy, and the host for nothing."""
        with torch.cuda.stream(self._up):
            there = host.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._up)
        # It was allocated for the other stream, and mustn't be given away while this one reads it.
        there.record_stream(current)
        return there
