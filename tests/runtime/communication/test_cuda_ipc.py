"""Messages through slots of a GPU's memory, without a GPU: no copy comes too early or too late."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from helpers.processes.pretend_streams import pretend
from timeprest.planner.systems.operations import BACKWARD, FORWARD
from timeprest.profiles.errors import UserError
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication import transport
from timeprest.runtime.communication.cuda_ipc import GpuMemory
from timeprest.runtime.communication.shared_memory import connect
from timeprest.runtime.communication.signed_store import Secret, SignedStore
from timeprest.runtime.communication.transport import GLOO, IPC, IPC_AND_NCCL, NCCL, PINNED
from timeprest.runtime.prepare.messages import MessageRoute, message_series
from timeprest.runtime.prepare.workers import Replica

CPU = torch.device("cpu")
LARGE = (2**20, 2)
"""Shape whose messages have no slots but those posted ahead."""


def route(number=0, shape=(2, 3), dtype=torch.float32):
    spec = ValueSpec(f"t{number}", "tensor", tuple(shape), dtype, True)
    return MessageRoute(number, spec, Replica(0, 0, 0), Replica(1, 1, 1), (0,), 1)


def both(*routes):
    store, found = SignedStore(dist.HashStore(), Secret(b"ours")), {}

    def join(rank):
        ends, names = GpuMemory(CPU), ("stage 0", "stage 1")
        found[rank] = connect(rank, names, routes, store, timeout_s=5.0, ends=ends)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found[1].open([message_series(FORWARD, [[c]], 1000) for c in routes])
    found[0].open([message_series(BACKWARD, [[c]], 1000) for c in routes])
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "routes",
    [
        (route(),),
        (route(shape=LARGE),),
        (route(shape=(3, 5), dtype=torch.bfloat16), route(1, LARGE), route(2, (0, 3))),
    ],
)
def test_messages_are_what_was_sent_however_late_copies_are(routes, seed, monkeypatch):
    gpu = pretend(monkeypatch, seed)
    source, target = both(*routes)
    found, count = [], 12 if any(c.shape(FORWARD) == LARGE for c in routes) else 70
    for k in range(count):
        for c in routes:
            gpu.worker = 0
            message = torch.zeros(c.shape(FORWARD), dtype=c.spec.dtype)
            # What makes it is under way, too.
            torch.cuda.current_stream().put(lambda made=message, k=k: made.fill_(k))
            source.send(c, FORWARD, message)
            gpu.worker = 1
            if k:
                found.append((c, k - 1, target.receive(c, FORWARD)))
        if not gpu.draw.randrange(8):
            gpu.run()
    found += [(c, count - 1, target.receive(c, FORWARD)) for c in routes]
    source.close()
    gpu.run()
    for c, k, message in found:
        wanted = torch.full(c.shape(FORWARD), float(k)).to(c.spec.dtype)
        assert message.dtype == c.spec.dtype
        assert torch.equal(message, wanted)


def test_memory_is_given_back_when_the_sender_is_through(monkeypatch):
    gpu = pretend(monkeypatch)
    source, target = both(route())
    # Whose copy is still to come.
    source.send(route(), FORWARD, torch.ones(2, 3))
    ended = []
    waits = threading.Thread(target=lambda: (target.end(), ended.append(1)))
    waits.start()
    waits.join(0.2)
    assert not ended
    source.end()
    waits.join(5)
    assert ended
    gpu.run()


@pytest.mark.parametrize(
    ("way", "wanted", "one_host", "varying", "transport_is"),
    [
        (NCCL, "auto", True, False, IPC),
        (PINNED, "auto", True, False, IPC),
        (NCCL, "auto", False, False, IPC_AND_NCCL),
        (PINNED, "auto", False, False, PINNED),
        (NCCL, "auto", True, True, PINNED),
        (NCCL, "gloo", True, False, PINNED),
        (NCCL, "nccl", True, False, NCCL),
        (NCCL, "ipc", True, False, IPC),
    ],
)
def test_on_gpus_messages_go_from_card_to_card_where_they_can(
    way, wanted, one_host, varying, transport_is
):
    found = transport.between_processes(way, wanted, one_host=one_host, varying=varying)
    assert found == transport_is


@pytest.mark.parametrize(
    ("way", "wanted", "one_host", "varying", "reason"),
    [
        (GLOO, "ipc", True, False, "stages on the CPU don't use it"),
        (PINNED, "nccl", True, False, "workers share a GPU"),
        (NCCL, "ipc", False, False, "several hosts"),
        (NCCL, "nccl", True, True, "differ in shape"),
    ],
)
def test_what_cant_be_had_is_refused(way, wanted, one_host, varying, reason):
    with pytest.raises(UserError, match=f"^--transport {wanted}: .*{reason}"):
        transport.between_processes(way, wanted, one_host=one_host, varying=varying)
