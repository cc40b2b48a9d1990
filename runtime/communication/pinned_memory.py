"""Messages between stages that share a GPU: through pinned host memory.

A message is copied down on a stream of its own, sent from pinned memory by channels between
processes, received into pinned memory, and copied up. Computing waits for small copies down alone;
the copy up it waits for on the device, behind the message itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...profiles.errors import TimeprestError
from ..prepare.messages import MessageRoute, MessageSeries
from .channel import Channels, PeerError, SendingThread
from .posts import Posts, no_posts

# Copies between a GPU and pinned host memory, on streams of their own ---------------------------


class CudaCopier:
    """Copies a worker's tensors down to pinned host memory and back up: from and to one GPU, on a
    stream for each direction beside the one that computes.

    Torch's allocator of pinned memory gives no block away while a copy from or to it is under way.
    Nothing else here knows a GPU: tests have copies from the CPU to the CPU in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def far(self, tensor: Tensor) -> bool:
        """Whether a tensor is in device memory."""
        return tensor.is_cuda

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a message, from which copies up are quick."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def down(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start a copy to host memory, of what the tensor holds when work handed in so far is done;
        beside it runs what the current stream gets to do next.

        The tensor must be kept, and not be changed, until the copy has landed: its event says when.
        """
        host = self.room(tensor.shape, tensor.dtype)
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            host.copy_(tensor.detach(), non_blocking=True)
            return host, self._down.record_event()

    def up(self, host: Tensor) -> Tensor:
        """Start a copy to the device; work handed in from now on waits for it, this thread doesn't.

        The host tensor may be let go at once.
        """
        with torch.cuda.stream(self._up):
            there = host.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._up)
        # It was allocated for the other stream, and mustn't be given away while this one reads it.
        there.record_stream(current)
        return there


# Channels over those in host memory -------------------------------------------------------------

AT_ONCE_BYTES = 4 * 2**20
"""A copy down of no more than this is waited for at once: 0.2 ms at 20 GB/s. While the next
operation is handed to the GPU, Python may let the thread wait for longer than that."""


class PinnedMemoryChannels(Channels):
    """Channels for tensors in device memory, over channels for those in host memory."""

    def __init__(self, host: Channels, copier: CudaCopier, timeout_s: float) -> None:
        """
        Args:
            host: sends and receives in host memory; what it receives into comes from `copier`.
        """
        self._host = host
        self._copier = copier
        self._timeout_s = timeout_s
        self._copies = SendingThread(timeout_s)

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
        """Post the first receives."""
        self._host.open(series)

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Start the copy down. The thread that sends waits for it, where it takes a while."""
        self._check()
        going = (tensor, *self._copier.down(tensor))
        send = partial(self._send_landed, route, kind, *going)
        # Messages keep their sequence.
        if tensor.nbytes <= AT_ONCE_BYTES and not self._copies.count:
            try:
                send()
            except RuntimeError as error:
                raise _not_copied(error) from error
            return
        self._copies.put(send, 0 if kept else tensor.nbytes)

    def _send_landed(
        self, route: MessageRoute, kind: str, tensor: Tensor, host: Tensor, landed: torch.cuda.Event
    ) -> None:
        """`tensor`: is kept until it has landed."""
        landed.synchronize()
        self._host.send(route, kind, host)

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """The next message, on its way up."""
        self._check()
        return self._copier.up(self._host.receive(route, kind))

    def throttle(self, most: int) -> None:
        """Wait for the copies, and for the channels behind them."""
        landed = self._copies.wait_for(0)
        self._check()
        if not landed:
            raise PeerError(f"a copy from the GPU took over {self._timeout_s:g} s (--timeout)")
        self._host.throttle(most)

    def end(self) -> None:
        self._copies.end()
        self._host.end()

    @property
    def held_bytes(self) -> int:
        """Messages on their way down, and what the channels in host memory hold."""
        return self._copies.pending_bytes + self._host.held_bytes

    def _check(self) -> None:
        error = self._copies.error
        if error is None:
            return
        raise error if isinstance(error, TimeprestError) else _not_copied(error)


def _not_copied(error: BaseException) -> PeerError:
    return PeerError(f"a message couldn't be copied from the GPU: {error}")
