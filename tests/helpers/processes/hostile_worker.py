"""A worker that posts its messages as to NCCL, and each of whose operations waits for all of them.

There is no GPU: gloo carries what is posted, and a forward, a backward or an update of a stage, and
its evaluation too, begins when all that its worker has posted is through.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from timeprest.runtime.communication import nccl, opening, transport
from timeprest.runtime.communication.transport import NCCL
from timeprest.runtime.stage.piece import StagePiece
from timeprest.runtime.stage.stage import Stage
from timeprest.runtime.training import worker

BOUND = timedelta(seconds=20)


class Posted:
    """Waited for by a thread of its own, as gloo says nothing of what nobody waits for."""

    def __init__(self, work):
        self._through = threading.Event()
        self._work = work
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self):
        self._work.wait(BOUND)
        self._through.set()

    def is_completed(self):
        return self._through.is_set()

    def wait(self):
        assert self._through.is_set()

    def block(self):
        if not self._through.wait(BOUND.total_seconds()):
            raise TimeoutError("the device stands still")


class GlooPoster:
    """A send is through when its receiver says so."""

    every: ClassVar[list] = []

    def __init__(self, routes, device, timeout_s):
        self._tags = {pair: 1000 + 2 * k for k, pair in enumerate(nccl.directions(routes))}
        self._kept = []

    def ready(self, tensor):
        return None

    def send(self, tensor, ready, direction):
        tag, peer = self._tags[direction], direction[1].rank
        self._send(tensor, peer, tag)
        return self._posted(dist.irecv(torch.empty(1), peer, tag=tag + 1))

    def receive(self, buffer, direction):
        tag, peer = self._tags[direction], direction[0].rank
        self._send(torch.zeros(1), peer, tag + 1)
        return self._posted(dist.irecv(buffer, peer, tag=tag))

    def _send(self, tensor, peer, tag):
        self._kept.append((tensor, dist.isend(tensor, peer, tag=tag)))

    def _posted(self, work):
        self.every.append(Posted(work))
        return self.every[-1]


def waits(operation):
    def waiting(*arguments, **options):
        for posted in GlooPoster.every:
            posted.block()
        GlooPoster.every.clear()
        return operation(*arguments, **options)

    return waiting


def main(arguments):
    for name in ("forward", "backward", "backward_weight", "update"):
        setattr(Stage, name, waits(getattr(Stage, name)))
    StagePiece.evaluate = waits(StagePiece.evaluate)
    opening.between_processes = lambda transport, wanted, **others: NCCL
    transport.NcclPoster = nccl.NcclPoster = GlooPoster
    worker.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
