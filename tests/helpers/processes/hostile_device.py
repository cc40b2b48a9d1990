"""A device on which every operation waits for all that its worker has posted, without a GPU.

So a card behaves when a call of a library synchronises it: sends and receives that were posted are
kernels, and a send is through when its receiver has taken it. Workers are threads of this process.
"""

from __future__ import annotations

import random
import threading
from collections import deque

import torch
from timeprest.planner.systems.operations import BACKWARD, FORWARD, UPDATE
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.communication.nccl import NcclChannels
from timeprest.runtime.prepare.distribution import SentValue, distribute
from timeprest.runtime.prepare.workers import Replica, Share

STUCK_S = 6.0
"""No run takes that long unless it stands still."""


class Kernel:
    """A send or a receive."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.through = False

    def is_completed(self):
        return self.through

    def wait(self):
        assert self.through


class Wires:
    """What all workers have posted; a send and a receive go through together."""

    def __init__(self):
        self.changed = threading.Condition()
        self.waiting = {}
        self.failed = False

    def post(self, direction, side, kernel):
        with self.changed:
            mine, others = (
                self.waiting.setdefault((direction, k), deque()) for k in (side, not side)
            )
            mine.append(kernel)
            while mine and others:
                one, other = mine.popleft(), others.popleft()
                sent, room = (one, other) if side else (other, one)
                assert sent.tensor.shape == room.tensor.shape
                room.tensor.copy_(sent.tensor)
                one.through = other.through = True
            self.changed.notify_all()


class HostilePoster:
    """One worker's device."""

    def __init__(self, wires, waits=1.0, seed=0):
        """`waits`: the share of operations that wait for all that was posted."""
        self.wires = wires
        self.posted = []
        self._draw = random.Random(seed)
        self._waits = waits

    def ready(self, tensor):
        return None

    def send(self, tensor, ready, direction):
        return self._post(tensor, direction, True)

    def receive(self, buffer, direction):
        return self._post(buffer, direction, False)

    def _post(self, tensor, direction, side):
        kernel = Kernel(tensor)
        self.posted.append(kernel)
        self.wires.post(direction, side, kernel)
        return kernel

    def compute(self):
        """Run an operation, which waits."""
        if self._draw.random() >= self._waits:
            return
        with self.wires.changed:
            there = self.wires.changed.wait_for(
                lambda: self.wires.failed or all(kernel.through for kernel in self.posted), STUCK_S
            )
        if self.wires.failed or not there:
            raise PeerError("the device stands still")
        self.posted.clear()


# Pipelines on it --------------------------------------------------------------------------------


def workers_and_distribution(pipeline):
    """As plans have them: replicas, and what goes between them."""
    counts = [pipeline.replicas(s) for s in range(pipeline.stages)]
    placement = pipeline.placement or range(pipeline.stages)
    firsts, ranks = {}, 0
    for device, count in zip(placement, counts, strict=True):
        if device not in firsts:
            firsts[device] = ranks
            ranks += count
    replicas = []
    for s, count in enumerate(counts):
        for j in range(count):
            replicas.append(Replica(len(replicas), s, firsts[placement[s]] + j, j, count))
    n, whole = pipeline.micro_batches, pipeline.variant.whole_mini_batches
    samples = 6

    def share(replica):
        r = replica.count
        if whole:
            return Share(tuple(range(n)), samples // r, n * r, slice(replica.index, None, r))
        return Share(tuple(range(replica.index, n, r)), samples, n, slice(None))

    shares = [share(replica) for replica in replicas]
    sent = [SentValue(f"v{k}", link.source, link.target) for k, link in enumerate(pipeline.links)]
    specs = {
        m: {
            value.name: ValueSpec(value.name, "tensor", (m, 2), torch.float64, link.has_gradient)
            for value, link in zip(sent, pipeline.links, strict=True)
        }
        for m in {each.samples for each in shares}
    }
    return replicas, distribute(pipeline, replicas, shares, sent, specs)


class Worker(threading.Thread):
    """Follows a schedule as a runner does, with messages that say what they are."""

    def __init__(self, rank, sequence, replicas, distribution, channels, poster, sums):
        super().__init__(daemon=True)
        self.rank, self.channels, self.poster, self.sums = rank, channels, poster, sums
        self.mine = {r.stage: r for r in replicas if r.rank == rank}
        self.shares, self.routes = distribution.shares, distribution.routes
        self.operations = [(s, op) for s, op in sequence if s in self.mine]
        self.error = None

    def run(self):
        try:
            for s, op in self.operations:
                if self.shares[self.mine[s].number].has(op):
                    self.operation(self.mine[s], op)
                    self.channels.advance()
            self.channels.close()
        except BaseException as error:
            self.error = error
            with self.poster.wires.changed:
                self.poster.wires.failed = True
                self.poster.wires.changed.notify_all()
            self.sums.fail()

    def operation(self, replica, op):
        if op.kind == UPDATE:
            self.sums.meet(replica, op)
            self.poster.compute()
            return
        mine = self.shares[replica.number].of(op)
        if op.kind in (FORWARD, BACKWARD):
            for route in self.ends(replica, op, mine, 1):
                found = self.channels.receive(route, op.kind)
                assert torch.equal(found, self.message(route, op)), (route, op)
        self.poster.compute()
        if op.kind in (FORWARD, BACKWARD):
            for route in self.ends(replica, op, mine, 0):
                self.channels.send(route, op.kind, self.message(route, op))

    def ends(self, replica, op, mine, which):
        """Routes of which this is the sender (0) or the receiver (1) of messages."""
        for route in self.routes:
            there = route.spec.needs_grad or op.kind == FORWARD
            if route.handed_over or not there or set(mine).isdisjoint(route.micro_batches):
                continue
            if route.between(op.kind)[which] == replica:
                yield route

    def message(self, route, op):
        name = hash((route.number, op.kind, op.mini_batch, op.micro_batch)) % 2**40
        return torch.full(route.shape(op.kind), float(name), dtype=torch.float64)


class Sums:
    """Sums at updates, at which replicas wait for each other; all workers, where they flush."""

    def __init__(self, replicas, *, flushes):
        stages = {} if flushes else {r.stage: r.count for r in replicas}
        ranks = len({r.rank for r in replicas})
        self.flushes = flushes
        self.barriers = {s: threading.Barrier(count) for s, count in stages.items()}
        self.everyone = threading.Barrier(ranks)
        self.met = {}

    def meet(self, replica, op):
        if not self.flushes:
            self.barriers[replica.stage].wait(STUCK_S)
        elif self.met.get((replica.rank, op.mini_batch)) is None:
            # Of a worker's stages, the first one's update waits for all.
            self.met[replica.rank, op.mini_batch] = True
            self.everyone.wait(STUCK_S)

    def fail(self):
        for barrier in (*self.barriers.values(), self.everyone):
            barrier.abort()


def run_on_hostile_devices(pipeline, sequence, posted, waits=1.0, seed=0):
    """Run a schedule. Raises what a worker fails with.

    Args:
        sequence: of all operations; a worker runs its own in that sequence.
        posted: makes the posts of a worker, as `posts` does.
    """
    replicas, distribution = workers_and_distribution(pipeline)
    routes = [route for route in distribution.routes if not route.handed_over]
    ranks = sorted({replica.rank for replica in replicas})
    names = [f"worker {rank}" for rank in ranks]
    wires, sums = Wires(), Sums(replicas, flushes=pipeline.variant.flushes)
    posters = [HostilePoster(wires, waits, seed + rank) for rank in ranks]
    found, error = {}, []

    def make(rank):
        try:
            found[rank] = NcclChannels(
                rank, names, routes, torch.device("cpu"), STUCK_S, poster=posters[rank]
            )
        except BaseException as failed:
            error.append(failed)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in ranks]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert not error
    workers = [
        Worker(rank, sequence, replicas, distribution, found[rank], posters[rank], sums)
        for rank in ranks
    ]
    for worker in workers:
        worker.channels.open(
            [], lambda rank: posted(rank, sequence, replicas, distribution.shares, routes)
        )
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    errors = [worker.error for worker in workers if worker.error is not None]
    if errors:
        raise errors[0]
