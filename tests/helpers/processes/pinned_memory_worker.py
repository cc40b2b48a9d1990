"""A worker whose messages and sums take the way of GPUs that are shared, with no GPU there.

Tensors are copied "down" and "up" as between a GPU and pinned memory, and copies behave as badly
as those may: nothing is in the host's tensor before the copy has landed, and what is let go is
overwritten at once.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from timeprest.runtime.communication import opening
from timeprest.runtime.communication.transport import PINNED
from timeprest.runtime.training import distributed, worker


class LateCopier:
    """Copies from the CPU to the CPU."""

    def far(self, tensor):
        return tensor.is_floating_point()

    def room(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def down(self, tensor):
        host = torch.full(tensor.shape, -1, dtype=tensor.dtype)
        return host, Landing(tensor, host)

    def up(self, host):
        there = host.clone()
        host.fill_(-1)
        return there


class Landing:
    """A copy that is made when somebody waits for it."""

    def __init__(self, tensor, host):
        self.tensor = tensor
        self.host = host

    def synchronize(self):
        self.host.copy_(self.tensor)


def main(arguments):
    opening.between_processes = lambda transport, wanted, **others: PINNED
    distributed.open_transport = partial(opening.open_transport, copier=LateCopier())
    worker.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
